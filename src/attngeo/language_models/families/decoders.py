"""Causal language models: one linear layer each for q, k and v (Llama and its kin, OPT), and the fused layouts."""

from typing import Any

from torch import Tensor

from attngeo.language_models.sites import Architecture, AttentionSite, ComparedVectors, linear_site


def _llama(model: Any) -> list[AttentionSite]:
    """Llama, SmolLM, Mistral, Qwen2 and Qwen3; head_dim is free, Qwen3 norms each head's queries and keys."""
    return [
        linear_site(
            layer.self_attn,
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.self_attn.o_proj,
            heads=model.config.num_attention_heads,
            groups=model.config.num_key_value_heads,
            norm=layer.input_layernorm,
            query_norm=getattr(layer.self_attn, "q_norm", None),
            key_norm=getattr(layer.self_attn, "k_norm", None),
            **_gain_of(layer.input_layernorm, model.config),
        )
        for layer in model.layers
    ]


def _gain_of(norm: Any, config: Any) -> dict[str, Tensor]:
    """Gemma's norms multiply by 1 + w."""
    return {"gain": 1 + norm.weight.detach().double()} if config.model_type.startswith("gemma") else {}


def _opt(model: Any) -> list[AttentionSite]:
    """Queries are scaled before they are compared; the 350M model is post-norm, all others pre-norm."""
    return [
        linear_site(
            layer.self_attn,
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.self_attn.out_proj,
            heads=model.config.num_attention_heads,
            norm=layer.self_attn_layer_norm if model.config.do_layer_norm_before else None,
            query_scale=layer.self_attn.scaling,
        )
        for layer in model.decoder.layers
    ]


def _gpt2(model: Any) -> list[AttentionSite]:
    """Conv1D stores [in, out] (a Linear stores [out, in]), with queries, keys and values side by side."""
    width = model.config.hidden_size
    return [
        AttentionSite(
            attention=layer.attn,
            projection=layer.attn.c_proj,
            result=layer.attn,
            query_weight=layer.attn.c_attn.weight[:, :width],
            query_bias=layer.attn.c_attn.bias[:width],
            key_weight=layer.attn.c_attn.weight[:, width : 2 * width],
            key_bias=layer.attn.c_attn.bias[width : 2 * width],
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


def _phi3(model: Any) -> list[AttentionSite]:
    """One Linear with all queries, then all keys, then all values."""
    config = model.config
    sites = []
    for layer in model.layers:
        attention = layer.self_attn
        queries, keys = (
            count * attention.head_dim for count in (config.num_attention_heads, config.num_key_value_heads)
        )
        fused = attention.qkv_proj.weight.T
        sites.append(
            AttentionSite(
                attention=attention,
                projection=attention.o_proj,
                result=attention,
                query_weight=fused[:, :queries],
                key_weight=fused[:, queries : queries + keys],
                value_weight=fused[:, queries + keys :],
                output_weight=attention.o_proj.weight.T,
                gain=layer.input_layernorm.weight,
                heads=config.num_attention_heads,
                groups=config.num_key_value_heads,
            )
        )
    return sites


def _interleaved(fused: Any, heads: int) -> dict[str, Tensor | None]:
    """A Linear whose outputs are q, k and v of the first head, then of the second, and so on."""
    weight = fused.weight.unflatten(0, (heads, 3, -1)).movedim(-1, 0)
    bias = None if fused.bias is None else fused.bias.unflatten(0, (heads, 3, -1))
    fields: dict[str, Tensor | None] = {}
    for place, name in enumerate(("query", "key", "value")):
        fields[f"{name}_weight"] = weight[:, :, place]
        fields[f"{name}_bias"] = None if bias is None else bias[:, place]
    return fields


def _gpt_neox(model: Any) -> list[AttentionSite]:
    """Pythia and its kin; with the parallel residual, attention and feed-forward read the same stream."""
    heads = model.config.num_attention_heads
    return [
        AttentionSite(
            attention=layer.attention,
            projection=layer.attention.dense,
            result=layer.attention,
            **_interleaved(layer.attention.query_key_value, heads),  # type: ignore[arg-type]
            output_weight=layer.attention.dense.weight.T,
            output_bias=layer.attention.dense.bias,
            gain=layer.input_layernorm.weight,
            shift=layer.input_layernorm.bias,
            heads=heads,
            groups=heads,
        )
        for layer in model.layers
    ]


def _bloom(model: Any) -> list[AttentionSite]:
    """The attention module adds the residual stream itself, so its last Linear is listened to."""
    heads = model.config.n_head
    return [
        AttentionSite(
            attention=layer.self_attention,
            projection=layer.self_attention.dense,
            result=layer.self_attention.dense,
            **_interleaved(layer.self_attention.query_key_value, heads),  # type: ignore[arg-type]
            output_weight=layer.self_attention.dense.weight.T,
            output_bias=layer.self_attention.dense.bias,
            gain=layer.input_layernorm.weight,
            shift=layer.input_layernorm.bias,
            heads=heads,
            groups=heads,
        )
        for layer in model.h
    ]


def _bloom_compared(site: AttentionSite, attention_input: Tensor, given: dict[str, Any]) -> ComparedVectors:
    attention: Any = site.attention
    query, key, _ = attention._reshape(attention.query_key_value(attention_input))
    bias = given["alibi"].unflatten(0, (len(attention_input), site.heads))
    return ComparedVectors(query, key, attention.inv_norm_factor, _sum(bias, given["attention_mask"]))


def _falcon(model: Any) -> list[AttentionSite]:
    """Three layouts: q, k, v head by head; all queries, then one key and one value (multi-query); or, in the new
    decoder, group by group its queries, its key and its value.
    """
    config = model.config
    heads, groups = config.num_attention_heads, config.num_attention_heads
    if config.new_decoder_architecture:
        groups = config.num_kv_heads
    elif config.multi_query:
        groups = 1
    sites = []
    for layer in model.h:
        attention = layer.self_attention
        norm = layer.ln_attn if hasattr(layer, "ln_attn") else layer.input_layernorm
        sites.append(
            AttentionSite(
                attention=attention,
                projection=attention.dense,
                result=attention,
                **_by_group(attention.query_key_value, heads, groups),  # type: ignore[arg-type]
                output_weight=attention.dense.weight.T,
                output_bias=attention.dense.bias,
                gain=norm.weight,
                shift=norm.bias,
                heads=heads,
                groups=groups,
            )
        )
    return sites


def _by_group(fused: Any, heads: int, groups: int) -> dict[str, Tensor | None]:
    """A Linear whose outputs are, group by group, the group's queries, its key and its value."""
    fields: dict[str, Tensor | None] = {}
    cuts = {"query": slice(0, -2), "key": slice(-2, -1), "value": slice(-1, None)}
    weight = fused.weight.unflatten(0, (groups, heads // groups + 2, -1)).movedim(-1, 0)
    bias = None if fused.bias is None else fused.bias.unflatten(0, (groups, heads // groups + 2, -1))
    for name, cut in cuts.items():
        fields[f"{name}_weight"] = weight[:, :, cut]
        fields[f"{name}_bias"] = None if bias is None else bias[:, cut]
    return fields


def _falcon_compared(site: AttentionSite, attention_input: Tensor, given: dict[str, Any]) -> ComparedVectors:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    attention: Any = site.attention
    query, key, _ = attention._split_heads(attention.query_key_value(attention_input))
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *given["position_embeddings"])
    # The new decoder's library code repeats each group's key for its heads: one of each is enough here.
    return ComparedVectors(
        query, key[:, :: key.shape[1] // site.groups], attention.inv_norm_factor, given["attention_mask"]
    )


def _sum(first: Tensor, second: Tensor | None) -> Tensor:
    return first if second is None else first + second


_SEES_BOTH_SIDES = {"use_bidirectional_attention": "its tokens attend to later ones, too"}

DECODERS = (
    Architecture(
        "bloom",
        "BloomModel",
        "tokens",
        True,
        "pre",
        _bloom,
        refused={"slow_but_exact": "the library then cuts its projections into slices"},
        compared=_bloom_compared,
    ),
    Architecture(
        "falcon",
        "FalconModel",
        "tokens",
        True,
        "pre",
        _falcon,
        refused={"alibi": "the library's eager attention then adds the position bias twice"},
        compared=_falcon_compared,
    ),
    Architecture("gemma2", "Gemma2Model", "tokens", True, "pre", _llama, refused=_SEES_BOTH_SIDES),
    Architecture("gemma3_text", "Gemma3TextModel", "tokens", True, "pre", _llama, refused=_SEES_BOTH_SIDES),
    Architecture("gpt2", "GPT2Model", "tokens", True, "pre", _gpt2),
    Architecture("gpt_neox", "GPTNeoXModel", "tokens", True, "pre", _gpt_neox),
    Architecture("llama", "LlamaModel", "tokens", True, "pre", _llama),
    Architecture("mistral", "MistralModel", "tokens", True, "pre", _llama),
    Architecture("opt", "OPTModel", "tokens", True, "pre", _opt),
    Architecture("phi3", "Phi3Model", "tokens", True, "pre", _phi3),
    Architecture("qwen2", "Qwen2Model", "tokens", True, "pre", _llama),
    Architecture("qwen3", "Qwen3Model", "tokens", True, "pre", _llama),
)
