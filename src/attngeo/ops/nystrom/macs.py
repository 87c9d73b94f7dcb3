"""Multiply-accumulates of the linear evaluation, without those of its kernels and its inverse."""


def product_macs(tokens: int, landmarks: int, values: int) -> int:
    """Of tokens with landmarks and values: C^T V, and C or C W^+ with the outcome."""
    return 2 * tokens * landmarks * values


def landmark_macs(tokens: int, landmarks: int, values: int, normalization: str, *, kernel_kept: bool = True) -> int:
    """Of landmark size: C W^+, or W^+ with the outcome of C^T V where the kernel is not kept.

    The variances of "injective" take a Gram matrix and one more product of tokens with landmarks and landmarks.
    """
    if not kernel_kept:
        return landmarks**2 * values
    return (3 if normalization == "injective" else 1) * tokens * landmarks**2
