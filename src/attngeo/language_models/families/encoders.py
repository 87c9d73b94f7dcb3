"""Bidirectional encoders of text; of T5, an encoder-decoder, the encoder alone."""

from typing import Any

from torch import Tensor

from attngeo.language_models.sites import Architecture, AttentionSite, ComparedVectors, linear_site


def _bert(model: Any) -> list[AttentionSite]:
    """BERT and RoBERTa: post-norm, and the output projection lives in another module than the attention."""
    return [
        linear_site(
            layer.attention.self,
            layer.attention.self.query,
            layer.attention.self.key,
            layer.attention.self.value,
            layer.attention.output.dense,
            heads=model.config.num_attention_heads,
            result=layer.attention.output.dense,
        )
        for layer in model.encoder.layer
    ]


def _distilbert(model: Any) -> list[AttentionSite]:
    return [
        linear_site(
            layer.attention,
            layer.attention.q_lin,
            layer.attention.k_lin,
            layer.attention.v_lin,
            layer.attention.out_lin,
            heads=model.config.n_heads,
        )
        for layer in model.transformer.layer
    ]


def _mpnet(model: Any) -> list[AttentionSite]:
    """Post-norm, a relative position bias shared by all layers; maps are seen where they are dropped out."""
    return [
        linear_site(
            layer.attention.attn,
            layer.attention.attn.q,
            layer.attention.attn.k,
            layer.attention.attn.v,
            layer.attention.attn.o,
            heads=model.config.num_attention_heads,
            maps=layer.attention.attn.dropout,
        )
        for layer in model.encoder.layer
    ]


def _mpnet_compared(site: AttentionSite, attention_input: Tensor, given: dict[str, Any]) -> ComparedVectors:
    attention: Any = site.attention
    query, key = (
        project(attention_input).unflatten(-1, (site.heads, -1)).transpose(1, 2)
        for project in (attention.q, attention.k)
    )
    bias, mask = given["position_bias"], given["attention_mask"]
    return ComparedVectors(query, key, query.shape[-1] ** -0.5, bias if mask is None else bias + mask)


def _modernbert(model: Any) -> list[AttentionSite]:
    """One Linear with all queries, then all keys, then all values; the first layer has no norm in front."""
    heads = model.config.num_attention_heads
    sites = []
    for layer in model.layers:
        fused, output = layer.attn.Wqkv, layer.attn.Wo
        weights = fused.weight.T.chunk(3, dim=1)
        biases = (None, None, None) if fused.bias is None else fused.bias.chunk(3)
        sites.append(
            AttentionSite(
                attention=layer.attn,
                projection=output,
                result=layer.attn,
                query_weight=weights[0],
                key_weight=weights[1],
                value_weight=weights[2],
                query_bias=biases[0],
                key_bias=biases[1],
                value_bias=biases[2],
                output_weight=output.weight.T,
                output_bias=output.bias,
                gain=getattr(layer.attn_norm, "weight", None),
                shift=getattr(layer.attn_norm, "bias", None),
                heads=heads,
                groups=heads,
            )
        )
    return sites


def _t5(model: Any) -> list[AttentionSite]:
    """No 1/sqrt(d), a relative position bias that the first layer makes and all others are handed."""
    return [
        linear_site(
            block.layer[0].SelfAttention,
            block.layer[0].SelfAttention.q,
            block.layer[0].SelfAttention.k,
            block.layer[0].SelfAttention.v,
            block.layer[0].SelfAttention.o,
            heads=model.config.num_heads,
            norm=block.layer[0].layer_norm,
            maps=2,
        )
        for block in model.encoder.block
    ]


# RoBERTa and MPNet count positions from behind the padding token's id, which MPNet's class fixes at 1.
_NO_POOLING = {"add_pooling_layer": False}

ENCODERS = (
    Architecture("bert", "BertModel", "tokens", False, "post", _bert, _NO_POOLING),
    Architecture("distilbert", "DistilBertModel", "tokens", False, "post", _distilbert),
    Architecture("modernbert", "ModernBertModel", "tokens", False, "pre", _modernbert),
    Architecture(
        "mpnet",
        "MPNetModel",
        "tokens",
        False,
        "post",
        _mpnet,
        _NO_POOLING,
        compared=_mpnet_compared,
        reserved_positions=lambda config: 2,
    ),
    Architecture(
        "roberta",
        "RobertaModel",
        "tokens",
        False,
        "post",
        _bert,
        _NO_POOLING,
        reserved_positions=lambda config: config.pad_token_id + 1,
    ),
    Architecture("t5", "T5EncoderModel", "tokens", False, "pre", _t5, encoder_only=True),
)
