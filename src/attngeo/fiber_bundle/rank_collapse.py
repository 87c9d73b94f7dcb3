"""Whether tokens become the same with depth: relative residual and effective rank behind every layer."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

# Relative residuals below this are rounding, in float64 over a dozen layers: they count as this, so that no form of
# attention wins by the noise of another.
RESIDUAL_FLOOR = 1e-12


class HasStates(Protocol):
    """A model that gives its residual stream by depth."""

    def states(self, x: Tensor) -> list[Tensor]:
        """What goes into the first block and what comes out of each; [B, N, C]."""
        ...


def relative_residual(x: Tensor) -> Tensor:
    """||X - 1 mean|| / ||X|| (Frobenius) of tokens X [..., N, C], the mean over tokens: 0 where all are the same.

    [..., N, C] -> [...]; 0 for tokens that are all zero.
    """
    norm = torch.linalg.matrix_norm(x)
    return torch.linalg.matrix_norm(x - x.mean(-2, keepdim=True)) / norm.clamp_min(torch.finfo(x.dtype).tiny)


def effective_rank(x: Tensor) -> Tensor:
    """exp of the entropy of the singular values of X [..., N, C], divided by their sum (Roy and Vetterli, 2007).

    Between 1 and min(N, C); 1 for tokens that are all zero.
    """
    values = torch.linalg.svdvals(x)
    shares = values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.special.entr(shares).sum(-1).exp()


def cubic_bound(residuals: Sequence[float], layers: int) -> list[float]:
    """Doubly exponential decay r_(l+1) = c r_l^3 of stacks of attention alone (Dong et al., 2021), by depth.

    Their constant bounds weights and entries of attention and says nothing at these sizes (it exceeds 1): c is the one
    that the first layer of `residuals` shows, and from there the law is theirs, r_l = c^((3^l - 1) / 2) r_0^(3^l).
    """
    first, second = residuals[:2]
    constant = second / first**3
    bound = [first]
    for _ in range(layers):
        bound.append(constant * bound[-1] ** 3)
    return bound


@torch.no_grad()
def by_depth(model: nn.Module, inputs: Tensor) -> list[dict[str, Any]]:
    """Rows with `depth` (0: what goes in), `metric`, `value` and `n` (sequences), means over sequences, in float64.

    The model is turned to float64 and back.
    """
    kept = {parameter.dtype for parameter in model.parameters()}
    model.double().eval()
    try:
        states = cast(HasStates, model).states(inputs.double() if inputs.is_floating_point() else inputs)
    finally:
        model.to(kept.pop())
    rows = []
    for depth, x in enumerate(states):
        for metric, values in (("relative_residual", relative_residual(x)), ("effective_rank", effective_rank(x))):
            rows.append({"depth": depth, "metric": metric, "value": values.mean().item(), "n": len(values)})
    return rows
