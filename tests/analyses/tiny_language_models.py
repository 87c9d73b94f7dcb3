"""Random models of each supported family, small enough for a test and with nothing left at a trivial initial value."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from attngeo.language_models.architectures import architecture_of
from attngeo.language_models.families.audio import FRAMES_PER_TOKEN
from attngeo.language_models.loading import LoadedModel

VOCABULARY = 53
LAYERS = 3


FREE_HEADS = ("dinov2", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "t5", "vit")
"""Families whose heads need not add up to the hidden size."""
GROUPED = ("falcon", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose heads may share keys and values."""
ROTARY = ("falcon", "gpt_neox", "modernbert", *GROUPED[1:])
EVEN = (*ROTARY, "whisper")
"""Families whose positions come in pairs of components."""
EVERYDAY = ("bert", "dinov2", "gpt2", "llama")
"""One family of each kind, for tests of what does not depend on the family."""


def config(
    family: str,
    heads: int = 3,
    groups: int | None = None,
    head_dim: int = 5,
    width: int | None = None,
    **changed: Any,
) -> Any:
    """A configuration of `family` with 3 layers; those of `EVEN` have an even head_dim, one more than an odd one asked.

    `width` is the hidden size where the family lets it differ from heads times head_dim, a sliding window is shorter
    than the windows of tokens, and biases and soft caps are on where there are any.
    """
    if family in EVEN:
        head_dim += head_dim % 2
    width = width or (heads * 6 if family == "llama" else heads * head_dim)
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": heads}
    text = {"vocab_size": VOCABULARY, "intermediate_size": 17, "max_position_embeddings": 64}
    grouped = {"head_dim": head_dim, "num_key_value_heads": groups or heads}
    alternating = ["sliding_attention", "full_attention", "sliding_attention"]
    no_special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    image = {"image_size": 28, "patch_size": 7, "head_dim": head_dim}
    match family:
        case "bert" | "roberta" | "mpnet":
            entries = text | sizes
        case "bloom":
            entries = {"vocab_size": VOCABULARY, "hidden_size": width, "n_layer": LAYERS, "n_head": heads}
        case "dinov2":
            entries = sizes | image | {"mlp_ratio": 2}
        case "distilbert":
            entries = {"vocab_size": VOCABULARY, "dim": width, "n_layers": LAYERS, "n_heads": heads, "hidden_dim": 17}
        case "falcon":
            entries = text | sizes | {"bias": True, "multi_query": groups == 1, "ffn_hidden_size": 17}
            if groups is not None and groups > 1:
                entries |= {"new_decoder_architecture": True, "num_kv_heads": groups}
        case "gemma2" | "gemma3_text":
            entries = text | sizes | grouped | no_special | {"attention_bias": True, "query_pre_attn_scalar": 7}
            entries |= {"sliding_window": 4, "layer_types": alternating, "attn_logit_softcapping": 1.5}
        case "gpt2":
            entries = {"vocab_size": VOCABULARY, "n_embd": width, "n_layer": LAYERS, "n_head": heads, "n_inner": 17}
            entries |= {"n_positions": 64}
        case "gpt_neox":
            rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
            entries = text | sizes | {"rope_parameters": rotary}
        case "llama":
            entries = text | sizes | grouped | {"attention_bias": True}
        case "mistral":
            entries = text | sizes | grouped | {"sliding_window": 4}
        case "modernbert":
            entries = text | sizes | no_special | {"attention_bias": True, "norm_bias": True, "local_attention": 6}
            entries |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        case "opt":
            entries = {"vocab_size": VOCABULARY, "ffn_dim": 17, "max_position_embeddings": 64} | sizes
            entries |= {"word_embed_proj_dim": 7}
        case "phi3":
            rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
            entries = text | sizes | grouped | no_special | {"sliding_window": 4, "rope_parameters": rotary}
        case "qwen2":
            entries = text | sizes | grouped | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        case "qwen3":
            entries = text | sizes | grouped | {"attention_bias": True}
        case "t5":
            entries = {"vocab_size": VOCABULARY, "d_model": width, "d_kv": head_dim, "d_ff": 17, "num_layers": LAYERS}
            entries |= {"num_heads": heads, "relative_attention_num_buckets": 6, "relative_attention_max_distance": 9}
        case "whisper":
            entries = {"vocab_size": VOCABULARY, "d_model": width, "num_mel_bins": 7, "max_source_positions": 11}
            entries |= {"encoder_layers": LAYERS, "encoder_attention_heads": heads, "encoder_ffn_dim": 17}
            entries |= {"decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 5, "pad_token_id": 0}
            entries |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        case "vit":
            entries = sizes | image | {"intermediate_size": 17}
        case _:
            raise ValueError(f"no tiny configuration of {family}")
    return transformers.AutoConfig.for_model(family, **(entries | changed))


def network(configuration: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """The headless network with every parameter moved away from the zeros and ones of the initialisation."""
    adapter = architecture_of(configuration)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = adapter.network._from_config(configuration, attn_implementation="eager", **adapter.model_options)
    move_parameters(model, seed)
    return model.to(dtype).eval().requires_grad_(False)


def move_parameters(model: Any, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)


def loaded(configuration: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> LoadedModel:
    return LoadedModel(
        model=network(configuration, dtype, seed),
        tokenizer=None,
        adapter=architecture_of(configuration),
        id="tiny",
        quantised=None,
        stored_dtype=str(dtype).removeprefix("torch."),
    )


def windows(configuration: Any, count: int = 3, tokens: int = 11, seed: int = 0) -> Tensor:
    """Token ids [count, tokens], images [count, 3, 21, 28] or log-mel features [count, 7, 22] as the family reads."""
    draw = torch.Generator().manual_seed(seed)
    match architecture_of(configuration).reads:
        case "images":
            return torch.randn(count, 3, 21, 28, generator=draw)
        case "audio":
            frames = FRAMES_PER_TOKEN * configuration.max_source_positions
            return torch.randn(count, configuration.num_mel_bins, frames, generator=draw)
    return torch.randint(VOCABULARY, (count, tokens), generator=draw)


def given(configuration: Any, count: int = 3) -> dict[str, Tensor]:
    """The same as an argument of `analyze`."""
    argument = {"tokens": "texts", "images": "images", "audio": "features"}[architecture_of(configuration).reads]
    return {argument: windows(configuration, count)}


def saved(folder: Path, configuration: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A model folder as the hub has them."""
    network(configuration, dtype, seed).save_pretrained(folder)
    return folder
