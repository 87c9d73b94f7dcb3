"""Vision transformers, all pre-norm; a token is a patch of the image, the first one the class token."""

from typing import Any

from attngeo.language_models.sites import Architecture, AttentionSite, linear_site


def _dinov2(model: Any) -> list[AttentionSite]:
    """A scale behind the attention belongs to the operator."""
    return [
        linear_site(
            layer.attention,
            layer.attention.q_proj,
            layer.attention.k_proj,
            layer.attention.v_proj,
            layer.attention.o_proj,
            heads=model.config.num_attention_heads,
            norm=layer.norm1,
            result=layer.layer_scale1,
            output_scale=layer.layer_scale1.lambda1,
        )
        for layer in model.encoder.layer
    ]


def _vit(model: Any) -> list[AttentionSite]:
    return [
        linear_site(
            layer.attention,
            layer.attention.q_proj,
            layer.attention.k_proj,
            layer.attention.v_proj,
            layer.attention.o_proj,
            heads=model.config.num_attention_heads,
            norm=layer.layernorm_before,
        )
        for layer in model.layers
    ]


VISION_TRANSFORMERS = (
    Architecture("dinov2", "Dinov2Model", "images", False, "pre", _dinov2, {}, ("embeddings.mask_token",)),
    Architecture(
        "vit",
        "ViTModel",
        "images",
        False,
        "pre",
        _vit,
        {"add_pooling_layer": False},
        call_options={"interpolate_pos_encoding": True},
    ),
)
