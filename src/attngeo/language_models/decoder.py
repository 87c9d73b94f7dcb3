"""Our own decoder family: plain pre-norm Llama decoders over bytes, in float32, of any size and context.

Bytes, and no learnt vocabulary: nothing has to be trained or can leak from held-out text, the same tokenizer serves
every text, 92 kB of it give three times the tokens that subwords would, and embeddings stay a small share of the
smallest model, so that sizes with and without them tell the same story. A loss in nats a token is one in nats a byte.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngeo.files import write_json

BYTES = 256


def decoder_config(layers: int, width: int, heads: int, context: int) -> Any:
    """Configuration (transformers) of a decoder: RMS norms, rotary positions, SwiGLU, tied embeddings, no biases.

    The feed-forward width is 8/3 of the model's, in multiples of 16, so that a block has about 12 width^2 parameters.
    """
    import transformers

    return transformers.LlamaConfig(
        vocab_size=BYTES,
        hidden_size=width,
        intermediate_size=16 * round(width / 6),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def build(config: Any, seed: int) -> Any:
    """An untrained decoder with its language-model head, by the library's initialisation; a function of the seed."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)


def next_token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits [B, N, 256] for token ids [B, N]."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def non_embedding_parameters(model: Any) -> int:
    """Number of parameters without the (tied) embedding."""
    embedding: int = model.get_input_embeddings().weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - embedding


def byte_tokenizer() -> Any:
    """A tokenizer whose 256 tokens are the bytes of UTF-8; it has no special tokens."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # one printable character stands for each byte
    bare = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare, clean_up_tokenization_spaces=False)


def token_ids(tokenizer: Any, text: str) -> Tensor:
    """Token ids of a text, int64 [tokens], without special tokens."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def save(folder: Path, model: Any, tokenizer: Any, source: dict[str, Any]) -> None:
    """Write config.json, model.safetensors, the tokenizer's files and source.json, which says what the model is."""
    from transformers.utils import logging

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one shard is written at once, and a training has a bar of its own
    try:
        model.save_pretrained(folder)
    finally:
        if bar:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    write_json(folder / "source.json", source)
