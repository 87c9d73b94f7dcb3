"""Random models of each supported family, small enough for a test and with nothing left at a trivial initial value."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from attngeo.language_models.architectures import architecture_of
from attngeo.language_models.loading import LoadedModel

VOCABULARY = 53
LAYERS = 3


def config(family: str, heads: int = 3, groups: int | None = None, head_dim: int = 5) -> Any:
    """A configuration of `family`; only Llama knows value groups."""
    width = heads * head_dim
    if family == "bert":
        return transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=LAYERS,
            num_attention_heads=heads,
            intermediate_size=17,
            max_position_embeddings=64,
        )
    if family == "dinov2":
        return transformers.Dinov2Config(
            hidden_size=width,
            num_hidden_layers=LAYERS,
            num_attention_heads=heads,
            mlp_ratio=2,
            image_size=28,
            patch_size=7,
        )
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=width, n_layer=LAYERS, n_head=heads, n_inner=17, n_positions=64
        )
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * 6,
        head_dim=head_dim + head_dim % 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=groups or heads,
        intermediate_size=17,
        max_position_embeddings=64,
        attention_bias=True,
    )


def network(configuration: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """The headless network with every parameter moved away from the zeros and ones of the initialisation."""
    adapter = architecture_of(configuration)
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, adapter.model_class)._from_config(
            configuration, attn_implementation="eager", **adapter.model_options
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return model.to(dtype).eval().requires_grad_(False)


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
    """Token ids [count, tokens], or images [count, 3, 21, 28] for a vision family."""
    draw = torch.Generator().manual_seed(seed)
    if configuration.model_type == "dinov2":
        return torch.randn(count, 3, 21, 28, generator=draw)
    return torch.randint(VOCABULARY, (count, tokens), generator=draw)


def saved(folder: Path, configuration: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A model folder as the hub has them."""
    network(configuration, dtype, seed).save_pretrained(folder)
    return folder
