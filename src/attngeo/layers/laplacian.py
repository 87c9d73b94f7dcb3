"""LaplacianFormer's attention: kernel exp(-||x - y||_1 / lambda), landmarks, Newton-Schulz, injective rows."""

from typing import ClassVar

from attngeo.layers.landmark import LandmarkAttention
from attngeo.layers.laplacian_kernel import LaplacianKernel


class LaplacianAttention(LaplacianKernel, LandmarkAttention):
    """Landmark attention with the Laplacian kernel, injective normalisation and a depthwise convolution on v (P2).

    The pooled landmarks and the solver's iteration are the paper's; the shared projection, the eps rule of the
    whitening and the learned scale are ours.
    """

    kind: ClassVar[str] = "laplacian"
