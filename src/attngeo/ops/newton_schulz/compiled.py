"""The inverses through the extension's registered operators."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def newton_schulz_inverse(W: Tensor, iterations: int, eps: float, start: str) -> tuple[Tensor, Tensor]:
    """Inverse of W + eps I and the residual ||I - P X||_F of every matrix: [...,M,M] -> [...,M,M], [...]."""
    inverse, residual = torch.ops.attngeo.newton_schulz_inverse(W, iterations, eps, start)
    return inverse, residual


def spd_inverse(W: Tensor, eps: float) -> Tensor:
    """Inverse of the symmetric positive definite W + eps I: [...,M,M] -> [...,M,M]."""
    inverse: Tensor
    inverse, failed_pivot = torch.ops.attngeo.spd_inverse(W, eps)
    _require_positive_pivots(failed_pivot)
    return inverse


def _require_positive_pivots(failed_pivot: Tensor) -> None:
    """Raise LinAlgError naming a matrix whose pivot is not positive; within a graph, an assertion without its name."""
    if torch.compiler.is_compiling() or is_fake(failed_pivot):
        torch._assert_async((failed_pivot == 0).all(), "spd_inverse: a matrix is not positive definite")
        return
    # vmap cannot look at values: they are looked at below it, where the mapped axis is one of the batch.
    while torch._C._functorch.is_batchedtensor(failed_pivot):
        failed_pivot = torch._C._functorch.get_unwrapped(failed_pivot)
    failed = failed_pivot.nonzero()
    if len(failed) == 0:
        return
    index = tuple(failed[0].tolist())
    pivot = int(failed_pivot[index].item())
    others = f", nor are {len(failed) - 1} others" if len(failed) > 1 else ""
    raise torch.linalg.LinAlgError(
        f"spd_inverse: matrix {index} of the batch is not positive definite (pivot {pivot} is not positive){others}"
    )
