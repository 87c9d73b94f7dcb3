"""What an adapter says of a family: where its layers keep W_Q, W_K, W_V, W_O, biases, head map and norms.

Row vectors act from the left, as in the paper: a head sends the state x_j to x_j W_V W_O. Each site's weights are given
for *states* x, the normalised token vectors without the norm's gain g and bias b: attention reads h = x g + b, so
diag(g) W_V and b W_V + b_V are the value map and its bias, and likewise for queries and keys. In a post-norm family the
residual stream itself is what attention reads, gain included, so nothing is folded. A scale after the output projection
(Dinov2) is folded into W_O; a whole norm there (Gemma) is no linear map and stays outside of the walk.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attngeo.errors import UserError


@dataclass(frozen=True)
class HeadWeights:
    """One layer's operator, in float64; K value groups serve H heads (K = H without grouped-query attention)."""

    value: Tensor
    """W_V with the norm's gain folded in, [K, C, D]."""
    output: Tensor
    """W_O with the scale behind it folded in, [H, D, C]."""
    value_bias: Tensor
    """[K, D], zeros where the family has none."""
    output_bias: Tensor
    """[C], zeros where the family has none."""
    group: Tensor
    """Value group of each head, int64 [H]."""

    @property
    def heads(self) -> int:
        return self.output.shape[0]

    @property
    def groups(self) -> int:
        return self.value.shape[0]

    @property
    def head_dim(self) -> int:
        return self.value.shape[2]

    @property
    def model_dim(self) -> int:
        return self.value.shape[1]


@dataclass(frozen=True)
class QueryKeyWeights:
    """What one layer compares, in float64, before any norm of queries and keys and before rotary positions."""

    query: Tensor
    """W_Q with the norm's gain folded in, [H, C, D]."""
    key: Tensor
    """W_K with the norm's gain folded in, [K, C, D]."""
    query_bias: Tensor
    """[H, D], zeros where the family has none."""
    key_bias: Tensor
    """[K, D], zeros where the family has none."""

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [H, N, D] and keys [K, N, D] of states [N, C]."""
        return states @ self.query + self.query_bias[:, None], states @ self.key + self.key_bias[:, None]


@dataclass(frozen=True)
class AttentionSite:
    """One layer's attention: the modules to listen to and the parameters of its operator.

    Weights are views of the model's own parameters, input side first whatever the family's storage; behind the input
    they may be flat, [C, K D], or cut into heads, [C, K, D].
    """

    attention: nn.Module
    """Its first argument is h [B, N, C]."""
    projection: nn.Module
    """Its input is the heads' outputs side by side, [B, N, H D]."""
    result: nn.Module
    """Its output (first item, if it returns several) is the attention's own, [B, N, C], before any norm behind it."""
    value_weight: Tensor
    """[C, K D]."""
    output_weight: Tensor
    """[H D, C]."""
    heads: int
    groups: int
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gain: Tensor | None = None
    """Gain of the norm in front, [C]; None in a post-norm family."""
    shift: Tensor | None = None
    """Bias of the norm in front, [C]; None where it has none."""
    output_scale: Tensor | None = None
    """Scale between the projection and the residual stream, [C]."""
    query_weight: Tensor | None = None
    """[C, H D]; None for a layer that does not compare queries with keys by one matrix each."""
    key_weight: Tensor | None = None
    """[C, K D]."""
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    query_norm: nn.Module | None = None
    """Norm of each head's queries [..., D], before they are turned by their positions."""
    key_norm: nn.Module | None = None
    query_scale: float = 1.0
    """Scale of the queries before the attention function, which then has none of its own."""
    maps: int | nn.Module = 1
    """Which of the items that `attention` returns is its maps [B, H, N, N], or the module inside that is given them."""

    def weights(self) -> HeadWeights:
        """The operator in float64, whatever the stored precision: spectra are not defined in half precision."""
        output = self.output_weight.detach().double()
        width = output.shape[1]
        value, value_bias = self._folded(self.value_weight, self.value_bias, self.groups)
        output_bias = _or_zeros(self.output_bias, width)
        if self.output_scale is not None:
            scale = self.output_scale.detach().double()
            output, output_bias = output * scale, output_bias * scale
        return HeadWeights(
            value=value,
            output=output.reshape(self.heads, -1, width),
            value_bias=value_bias,
            output_bias=output_bias,
            group=torch.arange(self.heads) // (self.heads // self.groups),
        )

    def query_key_weights(self) -> QueryKeyWeights:
        """W_Q and W_K in float64; UserError where the layer has none."""
        if self.query_weight is None or self.key_weight is None:
            raise UserError(
                f"the adapter of {type(self.attention).__name__} names no query and key weights",
                "give its AttentionSite query_weight and key_weight",
            )
        query, query_bias = self._folded(self.query_weight, self.query_bias, self.heads)
        key, key_bias = self._folded(self.key_weight, self.key_bias, self.groups)
        return QueryKeyWeights(query, key, query_bias, key_bias)

    def states(self, attention_input: Tensor) -> Tensor:
        """States x [..., C] in float64 with x g + b = h; a component whose gain is 0 carries nothing and is set to 0.

        Dividing back, rather than normalising anew, keeps the identity exact where the library's norm uses float32.
        """
        states = attention_input.detach().double()
        if self.shift is not None:
            states = states - self.shift.detach().double()
        if self.gain is not None:
            gain = self.gain.detach().double()
            states = torch.where(gain == 0, 0.0, states / torch.where(gain == 0, 1.0, gain))
        return states

    def _folded(self, weight: Tensor, bias: Tensor | None, parts: int) -> tuple[Tensor, Tensor]:
        """Weight [parts, C, D] and bias [parts, D] as they act on states."""
        weight = weight.detach().double()
        if weight.dim() > 2:  # cut out of a fused matrix: one layout, so that the same weights give the same bits
            weight = weight.contiguous().flatten(1)
        folded_bias = _or_zeros(bias, weight.shape[1])
        if self.shift is not None:
            folded_bias = folded_bias + self.shift.detach().double() @ weight
        if self.gain is not None:
            weight = self.gain.detach().double()[:, None] * weight
        return weight.reshape(len(weight), parts, -1).transpose(0, 1), folded_bias.reshape(parts, -1)


def _or_zeros(bias: Tensor | None, width: int) -> Tensor:
    return torch.zeros(width, dtype=torch.float64) if bias is None else bias.detach().double().flatten()


def linear_site(
    attention: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    *,
    heads: int,
    groups: int | None = None,
    norm: Any = None,
    **others: Any,
) -> AttentionSite:
    """Site of a layer with one nn.Linear each for queries, keys, values and output; `norm` is the norm in front.

    `others` are fields of AttentionSite: those that the modules do not tell, and those that differ from what they do.
    """
    fields: dict[str, Any] = {
        "attention": attention,
        "projection": output,
        "result": attention,
        "query_weight": query.weight.T,
        "query_bias": query.bias,
        "key_weight": key.weight.T,
        "key_bias": key.bias,
        "value_weight": value.weight.T,
        "value_bias": value.bias,
        "output_weight": output.weight.T,
        "output_bias": output.bias,
        "heads": heads,
        "groups": heads if groups is None else groups,
        "gain": getattr(norm, "weight", None),
        "shift": getattr(norm, "bias", None),
    }
    return AttentionSite(**(fields | others))


class ComparedVectors(NamedTuple):
    """What a layer's softmax is taken of: scaling q k^T, soft-capped if there is a cap, plus the bias."""

    query: Tensor
    """As they are compared: after their norm, scale and rotary positions, [B, H, N, D]."""
    key: Tensor
    """[B, K, N, D]."""
    scaling: float
    bias: Tensor | None
    """Mask and position bias, [B, 1 or H, 1 or N, N]."""
    soft_cap: float | None = None


@dataclass(frozen=True)
class Architecture:
    """A supported family; `sites` lists the attention of each layer, first layer first."""

    name: str
    """The configuration's model_type."""
    model_class: str
    """Class of the headless model in the transformers library, with its module there if that does not export it."""
    reads: Literal["tokens", "images", "audio"]
    causal: bool
    norm: Literal["pre", "post"]
    """Where the norm stands in all or most of its models; a site without a gain is post-norm."""
    sites: Callable[[Any], list[AttentionSite]]
    model_options: dict[str, Any] = field(default_factory=dict)
    optional_keys: tuple[str, ...] = ()
    """Prefixes of parameters that a weights file may lack because the forward pass never reads them."""
    call_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the forward pass beside the tokens or images."""
    refused: dict[str, str] = field(default_factory=dict)
    """Configuration entries under which the family is not this walk, each with the reason."""
    reserved_positions: Callable[[Any], int] = lambda config: 0
    """How many of the configuration's max_position_embeddings no token can have."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Beginnings of stored names (regular expressions) that this part of a larger model has otherwise."""
    tables_from_above: bool = False
    """Whether the library fills a table in a block when it initialises the model, and not when it does the block."""
    encoder_only: bool = False
    """Whether this is the encoder of an encoder-decoder: decoder and cross-attention are neither built nor analysed."""
    compared: Callable[[AttentionSite, Tensor, dict[str, Any]], ComparedVectors] | None = None
    """For a class that computes attention without the library's interface: site, h and arguments by name -> vectors."""

    @property
    def network(self) -> Any:
        """The class itself."""
        module, _, name = f"transformers.{self.model_class}".rpartition(".")
        return getattr(import_module(module), name)

    @property
    def input_name(self) -> str:
        """The argument of the forward pass that takes the windows."""
        return {"tokens": "input_ids", "images": "pixel_values", "audio": "input_features"}[self.reads]

    def positions(self, config: Any) -> int | None:
        """The longest window in tokens, special ones included; None where the configuration names no limit."""
        stored = getattr(config, "max_position_embeddings", None)
        return None if stored is None else stored - self.reserved_positions(config)
