"""Every tolerance of the test suite, with the reason for its value; never loosened to make a test pass."""

# A stopped run must be saved before a workflow that waits 2 s loses patience.
CHECKPOINT_AFTER_SIGTERM_S = 2.0
# Class probabilities are sums of at most 4 float32 numbers below 1.
MIXED_IMAGE_ABSOLUTE = 1e-6
# The rate is computed in float64 by a formula of some ten operations.
SCHEDULE_RELATIVE = 1e-12
# 2000 float32 updates of an average whose rounding errors decay with it.
AVERAGE_RELATIVE = 1e-5
# Sphere functions in float64 on unit-size data: a few roundings of each of D <= 13 terms.
SPHERE_ROUNDING = 1e-13
# A central difference quotient of step 1e-6 of a smooth function of size one: rounding over the step, 1e-10.
DIFFERENCE_QUOTIENT = 1e-8
# Logarithm and transport between points 1e-6 from antipodal: their direction is conditioned as rounding / 1e-6.
SPHERE_NEAR_ANTIPODES = 1e-8
# Attention velocity against the derivative of the energy by automatic differentiation, both float64.
ENERGY_GRADIENT_ROUNDING = 1e-14
# P1.a: the ledger's bound on the tangency of a flow.
TANGENCY = 1e-6
# P1.c: the ledger's bounds on first-variation and minimiser-shift slopes, and on the slope at a stationary path.
FIRST_VARIATION_SLOPE = 0.05
STATIONARY_SLOPE = 0.1
# Fitted order of an integrator, stencil or quadrature over steps 1/2 .. 1/16: the next order still shows at order 4.
FITTED_ORDER = 0.15
# Slope of a control that must not fall with the step.
FLAT_SLOPE = 0.1
# Controls of the variational checks are off by their own size: the smallest measured is 0.6.
VARIATIONAL_CONTROL_FLOOR = 0.1
# Exact derivatives of polynomials by stencils of their degree, with step 0.1 dividing rounding errors by 0.01.
STENCIL_ROUNDING = 1e-11
# An MLflow server that refuses connections: one retry of each first call, on a loaded machine.
UNREACHABLE_SERVER_S = 20.0
# Kernel values: roundings beside those of the distance itself (exp of about 1 unit, the scaling, the last product).
KERNEL_ROUNDINGS = 6.0
# Kernels in half precision are computed in float32 and rounded once: half a unit of bfloat16, relative.
BFLOAT16_ROUNDING = 2.0**-8
FLOAT16_ROUNDING = 2.0**-11
# Gaussian kernel in float32 after centring: |q|^2 + |k|^2 - 2 q.k of numbers below 100 cancels to 100 * 1e-7.
GAUSSIAN_FLOAT32_ABSOLUTE = 2e-5
# Two float64 evaluations of the same formula with condition numbers up to 1e3.
FLOAT64_RELATIVE = 1e-11
# The linear form of injective rows against the dense one: the derivation promises 5e-13 in float64, 1e-4 in float32.
NYSTROM_FLOAT64_RELATIVE = 5e-12
NYSTROM_FLOAT32_RELATIVE = 1e-4
# A converged Newton-Schulz inverse in float64: rounding times condition number (below 1e4 in the tests) times M.
CONVERGED_RESIDUAL_FLOAT64 = 1e-10
# Peak memory of a pairwise kernel, forward and backward, in units of the score tensor: kernel, its gradient, the
# transposed copies of torch's own backward, and the inputs' gradients; a feature axis would make it D = 32 or more.
KERNEL_PEAK_SCORES = 8.0
# Attention layers against their dense definitions in float64: sums over 35 tokens behind an inverse of condition 1e3.
ATTENTION_FLOAT64 = 1e-9
# A distance expanded into products against the direct one, float64, followed by softmax.
EUCLIDEAN_METRIC_FLOAT64 = 1e-12
# 60 Newton-Schulz iterations in float64 leave rounding times a condition number of at most 1e4.
NEWTON_SCHULZ_AGAINST_CHOLESKY = 1e-10
# Rotary angles of up to 10 radians in float32, on vectors of length about 3.
INTEGER_SHIFT_FLOAT32 = 1e-5
# bfloat16 keeps 8 bits; what reports ask for is agreement within about 1e-2 of float32.
AUTOCAST_AGREEMENT = 1e-2
# Matrix products of another batch size sum in another order (float32, logits below 1).
BATCH_INDEPENDENCE = 1e-5
# The same operations traced into one graph may be fused, float32.
COMPILED_AGREEMENT = 1e-5
# Parameter totals derived from the paper are printed with three digits.
DERIVED_PARAMETERS_RELATIVE = 0.005
# The totals of multiply-accumulates that were derived come with two or three digits and an unknown rule.
DERIVED_MACS_RELATIVE = 0.02
# A PDF of a million points must stay easy to view: reports of hundreds of megabytes set the bound at 2 MB.
RASTERISED_SCATTER_BYTES = 2_000_000
# CIE76 distance of two series' colours, as seen by a deuteranope too; about 2 is just noticeable side by side.
SMALLEST_COLOUR_DISTANCE = 20.0
# Steps of L* that grey print keeps apart, beside the marks and dashes.
SMALLEST_LIGHTNESS_STEP = 8.0
# The connection walk against the model's own attention, float64: the bound that decides the claims P3.a and P3.b.
WALK_IDENTITY_FLOAT64 = 1e-9
# The same sum over a handful of edges in another order, float64.
WALK_SUM_FLOAT64 = 1e-12
# Singular values by QR of the thin factors against a full decomposition, float64, relative to the largest.
QR_SINGULAR_VALUES = 1e-12
# Singular values as roots of Gram eigenvalues: the square root of float64's epsilon, relative to the largest.
GRAM_SINGULAR_VALUES = 3e-8
# Isometry score from Gram spectra: sums of such values.
GRAM_ISOMETRY_SCORE = 1e-6
# Mean score of Gaussian heads against the derived table (three digits) and the first-order formula 1 - D/(2C).
GAUSSIAN_HEAD_SCORE = 2e-3
# Laws, spectra and defects of small known chains, float64.
KNOWN_CHAIN_FLOAT64 = 1e-12
# Half precision keeps 11 (float16) or 8 bits (bfloat16) of each weight; graph statistics of a tiny model move by less.
HALF_PRECISION_ANALYSIS = 5e-2
# Differences of pairs from a float32 store of graphs against the float64 statistic.
FLOAT32_GRAPHS = 1e-5
# A pixel in [0, 1] divided by a standard deviation above 0.05, in float32: a few roundings of a number below 20.
NORMALISED_PIXEL_ABSOLUTE = 5e-6
# The mean of 2000 uniform numbers has standard error 0.0065; 23 columns stay within 4 of them.
UNIFORM_MEAN_ABSOLUTE = 0.026
# Squared distances as |q|^2 + |k|^2 - 2 q.k: the three sums are rounded at up to twice the largest squared distance.
EUCLIDEAN_ROUNDINGS = 16.0
# Channel statistics of 8-bit pixels in float64; a spread of zero is reported as 1e-4.
STATISTICS_ABSOLUTE = 1e-9
# Published next-token probabilities are given to three digits; float32 sums in another order move the fourth.
NEXT_TOKEN_PROBABILITY = 2e-3
# A working sentence encoder puts a paraphrase this much closer than an unrelated sentence (measured gaps: 0.44, 0.71).
SENTENCE_COSINE = 0.3
# FFCV resizes by area, torch bilinearly with antialiasing: mean difference on smooth pictures, in standard deviations.
FFCV_PIXEL_DIFFERENCE = 0.1
# JPEG decoded by libjpeg-turbo's fast transform and by Pillow's accurate one: mean |difference| of 255 on photographs,
# measured 1.3 on 2,000 of them.
JPEG_DECODER_DIFFERENCE = 2.0
# P2.f: the ledger compares kinds at parameter counts within 5 %.
MATCHED_PARAMETERS_RELATIVE = 0.05
# Gaussian landmark matrices at initialisation: 1e-4 from the identity, 0.6 to 1.5 from the paper's start.
GAUSSIAN_START_RESIDUAL = 1e-2
# A chain that stays with probability 0.999 has a stationary law conditioned as 1000 times rounding, float64.
LAZY_CHAIN_RELATIVE = 1e-9
# Peak memory of a kernel's product with values, forward and backward, in units of q, k and v: outputs, gradients, at
# most 8 partial sums for the landmarks' side, padded copies of blocks; the kernel itself would be 85 of them.
MATMUL_PEAK_INPUTS = 12.0
# What rounding leaves of I - P X: its unit times M (sums of M products) times the condition of P, and a small factor.
INVERSE_CONDITIONED_ROUNDINGS = 2.0
# Gradients of a batch summed by process and by part, float32, relative to the largest: sums of about 100 terms.
SHARED_BATCH_GRADIENT = 1e-5
# Losses after up to 16 steps of AdamW, which moves a weight by the sign of a gradient that is mere rounding.
SHARED_BATCH_LOSS = 1e-3
# A process that has failed takes the others with it within a minute.
ENDS_AFTER_A_FAILURE_S = 60.0
# Means of 101 numbers below 10 in float64, summed batch by batch or at once.
EVALUATION_FLOAT64 = 1e-12
# Pixels normalised by one mean and deviation and then by others, or in batches of another size: float32 roundings.
EVALUATION_RENORMALISED = 1e-4
# Peak memory of exact kernel attention, forward and backward, in units of its input (measured: 40): projections,
# features, their float64 copies, gradients, at most 8 partial sums of each; the kernel alone would be 128 of them.
EXACT_ATTENTION_PEAK_INPUTS = 48.0
# Softmax over 121 tokens with its weights in memory and in blocks, float32, relative to the largest number.
FUSED_SOFTMAX_FLOAT32 = 1e-5
# Attention masses in float64: sums of at most 400 shares below 1.
MASSES_FLOAT64 = 1e-12
# Newton's method on a bandwidth stops at a relative error of 1e-7 in the mean; float32 kernels add half as much.
MATCHED_SIMILARITY_RELATIVE = 1e-6
# Rows far from every landmark in float32, relative to the largest number: their weights are 0, 1 or an equal share.
FAR_ROWS_FLOAT32 = 5e-6
# Peak memory of a step of softmax attention, in units of the N x N weights: scores, weights, and what is freed late.
FLOW_PEAK_PAIRS = 4.0
# L-BFGS stops at a gradient of 1e-8; the smallest curvature of the kinetic energy is about step * pi^2 = 0.1.
STATIONARY_DISTANCE = 3e-7
# Order 4 with step 1/8 on a flow with rates up to about 2.
CLUSTERING_TIME_RELATIVE = 1e-5
# The same with step 1/4, 16 times as much.
CLUSTERING_TIME_COARSE = 1e-4
# First-order perturbation theory at epsilon 1.25e-5: the field of E is weak, the next order is 400 epsilon.
PREDICTED_RESPONSE_RELATIVE = 2e-2
# A potential of the planted family fitted to paths that obey it, float64, with a ridge of 1e-10 of the mean eigenvalue.
FITTED_PATH = 1e-5
# A potential fitted to random walks by validated ridge: what it learns from noise costs other walks at most 5 %.
NO_WORSE_THAN_FREE = 1.05
# Norms that the library computes in float32 inside of a float64 model, three layers deep, states of size 1.
FLOAT32_STREAM = 1e-5
# Means over 1600 isotropic steps whose share has a standard deviation below 0.15: 4 standard errors.
RANDOM_WALK_MEAN = 0.015
# A block's output in a float32 model against its walk in float64: sums of at most 64 terms.
WALK_IDENTITY_FLOAT32 = 1e-4
# Queries and keys in float64 where the library turns or norms them in float32 (Gemma, ModernBERT, Qwen3).
FLOAT32_INSIDE_FLOAT64 = 1e-6
# Maps by a float64 softmax against the library's, whose softmax is float32.
FLOAT32_SOFTMAX_MAPS = 1e-6
# Queries and keys of 100 positions whose angles the library rounds to float32, times vectors of size 1.
ROTARY_FLOAT32_ANGLES = 2e-5
# A text in a padded batch and alone, float64: sums of products in another order, through three layers.
PADDED_BATCH_FLOAT64 = 1e-11
# Standard deviation of a parameter of 500 or more numbers, drawn twice: a relative error of 1/sqrt(2 n), four times.
UNTRAINED_SPREAD = 0.2
# The estimate of a window's memory counts copies that not all families make.
WINDOW_MEMORY = 4.0
# Deviations of rotated or rescaled singular values from their mean, float64: rounding of values of one size.
ROTATED_SPECTRUM = 1e-7
# A sampled mean lies within 5 of its standard errors (chance of more: 6e-7 a comparison).
SAMPLED_MEAN_ERRORS = 5.0
# pi P against pi for walks of up to 23 tokens whose linear system is conditioned up to 1e4, float64.
STATIONARY_LAW = 1e-10
# Coverage of 95 % intervals in 2000 samples: standard error 0.5 %, and 1.5 % that a bootstrap of 12 to 32 skewed values
# may lack.
BOOTSTRAP_COVERAGE = 0.03
# Ends of an interval from 4 000 resamples against SciPy's from 20 000, in widths: the error of a 2.5 % quantile.
BOOTSTRAP_AGAINST_SCIPY = 0.05
# Ends of an interval of numbers below 100 after a shift and a scale, float64; equal means may be ordered anew.
BOOTSTRAP_EQUIVARIANCE = 1e-9
# The square root of a metric of 5 channels applied in float32: a few roundings of numbers as large as its entries.
ROOT_ROUNDINGS = 16.0
# Attention in float32 whose scores are products of numbers up to 30 that cancel, relative to the largest output.
METRIC_ATTENTION_FLOAT32 = 2e-5
# Peak memory of attention by metric, forward and backward, in units of q, k, v, a and U: their centred and scaled
# copies, features of both sides and their gradients, a block of 2^17 pairs; a map of all pairs would be 340 of them.
METRIC_ATTENTION_PEAK_INPUTS = 16.0
# The budget: at 1,024 tokens at least so many times less than the form that keeps its N x N x R projections.
METRIC_ATTENTION_PEAK_RATIO = 5.0
# Products of three rotations, each from a singular value decomposition of a matrix with condition up to 1e4, float64.
FLAT_HOLONOMY = 1e-10
# What a later token may change in an output through a causal mask: sums in blocks of another split, float64.
LATER_TOKENS_FLOAT64 = 1e-12
# Residuals and ranks of small known matrices, float64.
KNOWN_MATRIX_FLOAT64 = 1e-12
# P4.c: the ledger's bound on gradients against finite differences.
GRADIENT_RELATIVE = 1e-4
# Of a metric's inverse, forms and their gradients where torch would round float32 factors: float64, rounded once.
METRIC_AS_FLOAT64 = 1e-6
