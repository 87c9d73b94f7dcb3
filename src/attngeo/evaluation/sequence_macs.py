"""Multiply-accumulates of a transformer over tokens in one row, by the rule of `macs.py`."""

from typing import Any

from torch import Tensor, nn

from attngeo.evaluation.macs import count_macs
from attngeo.models.fiber_bundle import TokenTransformer


class _OnRow(nn.Module):
    """The model from its embeddings on, which stand as an image [B, C, 1, N]: looking a token up costs nothing."""

    def __init__(self, model: TokenTransformer) -> None:
        super().__init__()
        self.trunk = model.trunk
        self.head = model.head

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.trunk(image.flatten(2).transpose(1, 2), (1, image.shape[-1])))


def count_sequence_macs(model: TokenTransformer, tokens: int) -> dict[str, Any]:
    """The record of `count_macs` for one sequence of `tokens`; of a causal layer the pairs that it sees.

    `parameters` are those of the whole model, embedding and positions included.
    """
    counted = count_macs(_OnRow(model), (1, tokens), in_chans=model.trunk.norm.weight.numel())
    return counted | {"parameters": sum(parameter.numel() for parameter in model.parameters())}
