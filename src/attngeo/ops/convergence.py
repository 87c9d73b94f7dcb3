"""When an iterated inverse counts as reached; apart from the operators, for those who only judge a residual."""

# X is off from P^-1 by at most the residual ||I - P X||, relative to its norm: one per cent.
CONVERGED_RESIDUAL = 1e-2
