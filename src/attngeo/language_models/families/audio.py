"""Encoders of speech; a token is two frames of log-mel features."""

from typing import Any

from attngeo.language_models.sites import Architecture, AttentionSite, linear_site

FRAMES_PER_TOKEN = 2


def _whisper(model: Any) -> list[AttentionSite]:
    """Keys have no bias, and queries are scaled before they are compared."""
    return [
        linear_site(
            layer.self_attn,
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.self_attn.out_proj,
            heads=model.config.encoder_attention_heads,
            norm=layer.self_attn_layer_norm,
            query_scale=layer.self_attn.scaling,
        )
        for layer in model.layers
    ]


SPEECH_ENCODERS = (
    Architecture(
        "whisper",
        "models.whisper.modeling_whisper.WhisperEncoder",
        "audio",
        False,
        "pre",
        _whisper,
        renamed={r"^(model\.)?encoder\.": ""},
        tables_from_above=True,
        encoder_only=True,
    ),
)
