"""Pure functions of tensors, each with a readable form and, where it pays, a compiled one.

Shapes: B batch, H heads, N tokens, M landmarks, D head dim, V width of values, R metric rank.
"""

from attngeo.ops import backend, low_rank_metric
from attngeo.ops.conjugate_gradient import conjugate_gradient_inverse
from attngeo.ops.gaussian_kernel import gaussian_kernel, gaussian_kernel_matmul
from attngeo.ops.laplacian_kernel import laplacian_kernel, laplacian_kernel_matmul
from attngeo.ops.newton_schulz import newton_schulz_inverse, spd_inverse
from attngeo.ops.nystrom import nystrom_attention, nystrom_matrix

__all__ = [
    "backend",
    "conjugate_gradient_inverse",
    "gaussian_kernel",
    "gaussian_kernel_matmul",
    "laplacian_kernel",
    "laplacian_kernel_matmul",
    "low_rank_metric",
    "newton_schulz_inverse",
    "nystrom_attention",
    "nystrom_matrix",
    "spd_inverse",
]
