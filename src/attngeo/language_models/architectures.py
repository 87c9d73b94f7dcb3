"""The families that the connection walk knows, by the model_type of their configuration, and how to add one.

An adapter (`Architecture`) tells where a family keeps its weights; `attngeo.connection_walk.adapters.adapter_errors`
proves it on any model of the family.
"""

from typing import Any

from attngeo.errors import UserError
from attngeo.language_models.families.audio import SPEECH_ENCODERS
from attngeo.language_models.families.decoders import DECODERS
from attngeo.language_models.families.encoders import ENCODERS
from attngeo.language_models.families.vision import VISION_TRANSFORMERS
from attngeo.language_models.sites import Architecture, AttentionSite, HeadWeights, linear_site

__all__ = [
    "ARCHITECTURES",
    "EXAMPLE",
    "Architecture",
    "AttentionSite",
    "HeadWeights",
    "architecture_of",
    "linear_site",
    "register",
]

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in sorted(
        (*DECODERS, *ENCODERS, *SPEECH_ENCODERS, *VISION_TRANSFORMERS), key=lambda family: family.name
    )
}

EXAMPLE = """\
from attngeo.language_models.architectures import Architecture, linear_site, register


def sites(model):
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    return [
        linear_site(a, a.q_proj, a.k_proj, a.v_proj, a.o_proj, heads=heads, groups=groups, norm=layer.input_layernorm)
        for layer in model.layers
        for a in [layer.self_attn]
    ]


register(Architecture("starcoder2", "Starcoder2Model", "tokens", causal=True, norm="pre", sites=sites))
"""
"""An adapter in ten lines; the remedy of an unsupported architecture shows it, and the README."""


def register(architecture: Architecture) -> None:
    """Add a family for the rest of the process; UserError if its model_type has an adapter already."""
    if architecture.name in ARCHITECTURES:
        raise UserError(f"the architecture {architecture.name!r} has an adapter already", "use it as it is")
    ARCHITECTURES[architecture.name] = architecture


def architecture_of(config: Any) -> Architecture:
    """The family of a transformers configuration; UserError names the unsupported family or variant."""
    name = str(getattr(config, "model_type", "") or "without model_type")
    supported = ", ".join(sorted(ARCHITECTURES))
    if name not in ARCHITECTURES:
        raise UserError(
            f"the connection walk does not know the architecture {name!r}",
            f"use one of the families {supported}, or register an adapter, as here for another family:\n\n{EXAMPLE}",
        )
    architecture = ARCHITECTURES[name]
    plain = ["add_cross_attention", "is_decoder"] + ["is_encoder_decoder"] * (not architecture.encoder_only)
    reasons = dict.fromkeys(plain, "it is not one walk over one set of tokens") | architecture.refused
    for entry, reason in reasons.items():
        if getattr(config, entry, False):
            raise UserError(
                f"the architecture {name!r} with {entry} = true is refused: {reason}",
                f"use a plain encoder or decoder of one of the families {supported}",
            )
    return architecture
