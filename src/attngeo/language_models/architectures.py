"""Where each supported family keeps what the connection walk needs: W_V, W_O, biases, head map and norms.

Row vectors act from the left, as in the paper: a head sends the state x_j to x_j W_V W_O. Each site's weights are given
for *states* x, the normalised token vectors without the norm's gain g and bias b: attention reads h = x g + b, so
diag(g) W_V and b W_V + b_V are the value map and its bias. In a post-norm family the residual stream itself is what
attention reads, gain included, so nothing is folded. A scale after the output projection (Dinov2) is folded into W_O.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

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
class AttentionSite:
    """One layer's attention: the modules to listen to and the parameters of its operator."""

    attention: nn.Module
    """Its first argument is h [B, N, C]; the second item that it returns is the attention maps [B, H, N, N]."""
    projection: nn.Module
    """Its input is the heads' outputs side by side, [B, N, H D]."""
    result: nn.Module
    """Its output (first item, if it returns several) is what the block adds to the residual stream, [B, N, C]."""
    value_weight: Tensor
    """[C, K D], input side first whatever the family's own storage."""
    output_weight: Tensor
    """[H D, C], input side first."""
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

    def weights(self) -> HeadWeights:
        """The operator in float64, whatever the stored precision: spectra are not defined in half precision."""
        value, output = self.value_weight.detach().double(), self.output_weight.detach().double()
        width, head_dim = value.shape[0], value.shape[1] // self.groups
        value_bias = _or_zeros(self.value_bias, value.shape[1])
        output_bias = _or_zeros(self.output_bias, width)
        if self.shift is not None:
            value_bias = value_bias + self.shift.detach().double() @ value
        if self.gain is not None:
            value = self.gain.detach().double()[:, None] * value
        if self.output_scale is not None:
            scale = self.output_scale.detach().double()
            output, output_bias = output * scale, output_bias * scale
        return HeadWeights(
            value=value.reshape(width, self.groups, head_dim).transpose(0, 1),
            output=output.reshape(self.heads, head_dim, width),
            value_bias=value_bias.reshape(self.groups, head_dim),
            output_bias=output_bias,
            group=torch.arange(self.heads) // (self.heads // self.groups),
        )

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


def _or_zeros(bias: Tensor | None, width: int) -> Tensor:
    return torch.zeros(width, dtype=torch.float64) if bias is None else bias.detach().double()


@dataclass(frozen=True)
class Architecture:
    """A supported family; `sites` lists the attention of each layer, first layer first."""

    name: str
    model_class: str
    """Class of the headless model in the transformers library."""
    reads: Literal["tokens", "images"]
    causal: bool
    norm: Literal["pre", "post"]
    sites: Callable[[Any], list[AttentionSite]]
    model_options: dict[str, Any] = field(default_factory=dict)
    optional_keys: tuple[str, ...] = ()
    """Prefixes of parameters that a weights file may lack because the forward pass never reads them."""


def _bert(model: Any) -> list[AttentionSite]:
    return [
        AttentionSite(
            attention=layer.attention.self,
            projection=layer.attention.output.dense,
            result=layer.attention.output.dense,
            value_weight=layer.attention.self.value.weight.T,
            value_bias=layer.attention.self.value.bias,
            output_weight=layer.attention.output.dense.weight.T,
            output_bias=layer.attention.output.dense.bias,
            heads=model.config.num_attention_heads,
            groups=model.config.num_attention_heads,
        )
        for layer in model.encoder.layer
    ]


def _llama(model: Any) -> list[AttentionSite]:
    return [
        AttentionSite(
            attention=layer.self_attn,
            projection=layer.self_attn.o_proj,
            result=layer.self_attn,
            value_weight=layer.self_attn.v_proj.weight.T,
            value_bias=layer.self_attn.v_proj.bias,
            output_weight=layer.self_attn.o_proj.weight.T,
            output_bias=layer.self_attn.o_proj.bias,
            gain=layer.input_layernorm.weight,
            heads=model.config.num_attention_heads,
            groups=model.config.num_key_value_heads,
        )
        for layer in model.layers
    ]


def _dinov2(model: Any) -> list[AttentionSite]:
    return [
        AttentionSite(
            attention=layer.attention,
            projection=layer.attention.o_proj,
            result=layer.layer_scale1,
            value_weight=layer.attention.v_proj.weight.T,
            value_bias=layer.attention.v_proj.bias,
            output_weight=layer.attention.o_proj.weight.T,
            output_bias=layer.attention.o_proj.bias,
            gain=layer.norm1.weight,
            shift=layer.norm1.bias,
            output_scale=layer.layer_scale1.lambda1,
            heads=model.config.num_attention_heads,
            groups=model.config.num_attention_heads,
        )
        for layer in model.encoder.layer
    ]


def _gpt2(model: Any) -> list[AttentionSite]:
    width = model.config.hidden_size
    # GPT-2's Conv1D stores [in, out] (a Linear stores [out, in]), with queries, keys and values side by side.
    return [
        AttentionSite(
            attention=layer.attn,
            projection=layer.attn.c_proj,
            result=layer.attn,
            value_weight=layer.attn.c_attn.weight[:, 2 * width :],
            value_bias=layer.attn.c_attn.bias[2 * width :],
            output_weight=layer.attn.c_proj.weight,
            output_bias=layer.attn.c_proj.bias,
            gain=layer.ln_1.weight,
            shift=layer.ln_1.bias,
            heads=model.config.num_attention_heads,
            groups=model.config.num_attention_heads,
        )
        for layer in model.h
    ]


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture("bert", "BertModel", "tokens", False, "post", _bert, {"add_pooling_layer": False}),
        Architecture("dinov2", "Dinov2Model", "images", False, "pre", _dinov2, {}, ("embeddings.mask_token",)),
        Architecture("gpt2", "GPT2Model", "tokens", True, "pre", _gpt2),
        Architecture("llama", "LlamaModel", "tokens", True, "pre", _llama),
    )
}


def architecture_of(config: Any) -> Architecture:
    """The family of a transformers configuration; UserError names the unsupported family or variant."""
    name = str(getattr(config, "model_type", "") or "without model_type")
    supported = ", ".join(sorted(ARCHITECTURES))
    if name not in ARCHITECTURES:
        raise UserError(
            f"the connection walk does not know the architecture {name!r}", f"use one of the families {supported}"
        )
    for flag in ("is_encoder_decoder", "add_cross_attention", "is_decoder"):
        if getattr(config, flag, False):
            raise UserError(
                f"the architecture {name!r} with {flag} = true is not one walk over one set of tokens",
                f"use a plain encoder or decoder of one of the families {supported}",
            )
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        raise UserError(
            f"{name!r} with pretraining_tp > 1 splits its projections", "set pretraining_tp to 1 in config.json"
        )
    return ARCHITECTURES[name]
