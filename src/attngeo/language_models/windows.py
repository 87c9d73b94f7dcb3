"""Cuts real text, or a set of images or of sound, into the windows that a model is analysed on."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngeo.errors import UserError
from attngeo.language_models.families.audio import FRAMES_PER_TOKEN
from attngeo.language_models.loading import LoadedModel, parameters
from attngeo.language_models.memory import require_memory

# A token is nearly always under eight characters, so that one text can fill every window without being read to its end.
_CHARACTERS_PER_TOKEN = 8


def text_windows(
    loaded: LoadedModel, texts: str | Sequence[str] | Tensor, windows: int, window_tokens: int
) -> list[Tensor]:
    """At most `windows` windows of exactly `window_tokens` token ids (int64), spread evenly over the texts.

    No window spans two texts, and none is padded. The model's special tokens stand around each window and count in it.
    Texts too short for a window are left out with a warning. A tensor [n, N] is taken as ready windows of token ids.

    Raises UserError if no window can be filled, the window exceeds the model's positions or the free memory, or there
    is no tokenizer.
    """
    if isinstance(texts, Tensor):
        if texts.dim() != 2 or texts.is_floating_point():
            raise TypeError(
                f"token ids must be an integer tensor [windows, tokens], not {texts.dtype} {list(texts.shape)}"
            )
        _require_positions(loaded, texts.shape[1])
        vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
        if texts.numel() == 0 or windows < 1:
            raise UserError(f"{windows} windows of token ids {list(texts.shape)} hold nothing", "give token ids")
        if not 0 <= int(texts.min()) <= int(texts.max()) < vocabulary:
            raise UserError(
                f"token ids from {int(texts.min())} to {int(texts.max())} exceed the {vocabulary} of {loaded.id}",
                "give ids that the model's own tokenizer made",
            )
        _require_memory(loaded, texts.shape[1])
        return list(texts[:windows].long())
    if window_tokens < 1 or windows < 1:
        raise UserError(
            f"{windows} windows of {window_tokens} tokens hold nothing", "ask for at least 1 window of 1 token"
        )
    _require_positions(loaded, window_tokens)
    if loaded.tokenizer is None:
        raise UserError(f"the folder of {loaded.id} has no tokenizer", "add its tokenizer files, or give token ids")
    _require_memory(loaded, window_tokens)
    prefix, suffix = _special_tokens(loaded.tokenizer)
    length = window_tokens - len(prefix) - len(suffix)
    if length < 1:
        raise UserError(
            f"a window of {window_tokens} tokens has no room beside {len(prefix) + len(suffix)} special tokens",
            "raise window_tokens",
        )
    candidates: list[list[int]] = []
    short = 0
    texts = [texts] if isinstance(texts, str) else list(texts)
    for text in texts:
        start = text[: _CHARACTERS_PER_TOKEN * window_tokens * windows]
        ids = loaded.tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"] if start.strip() else []
        whole = len(ids) // length
        short += whole == 0
        candidates += [ids[cut * length : (cut + 1) * length] for cut in range(whole)]
    if short:
        warnings.warn(
            f"{short} of {len(texts)} texts are shorter than a window of {window_tokens} tokens", stacklevel=2
        )
    if not candidates:
        raise UserError(
            f"none of the {len(texts)} texts fills a window of {window_tokens} tokens",
            "give longer texts or lower window_tokens",
        )
    return [torch.tensor(prefix + candidates[pick] + suffix) for pick in _spread(len(candidates), windows)]


def whole_texts(loaded: LoadedModel, texts: Sequence[str], longest: int) -> list[Tensor]:
    """Each text as one window of its own length, with the model's special tokens, cut at `longest` tokens.

    Empty texts are left out with a warning. Raises UserError if nothing is left, or there is no tokenizer.
    """
    if loaded.tokenizer is None:
        raise UserError(f"the folder of {loaded.id} has no tokenizer", "add its tokenizer files, or give token ids")
    prefix, suffix = _special_tokens(loaded.tokenizer)
    room = longest - len(prefix) - len(suffix)
    _require_positions(loaded, longest)
    if room < 1:
        raise UserError(f"{longest} tokens leave no room beside the special ones", "raise the number of tokens")
    _require_memory(loaded, longest)
    kept = [text for text in texts if text.strip()]
    if len(kept) < len(texts):
        warnings.warn(f"{len(texts) - len(kept)} of {len(texts)} texts are empty", stacklevel=2)
    if not kept:
        raise UserError(f"none of the {len(texts)} texts holds a word", "give texts")
    ids = [loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:room] for text in kept]
    return [torch.tensor(prefix + cut + suffix) for cut in ids]


def image_windows(loaded: LoadedModel, images: Tensor, windows: int) -> list[Tensor]:
    """At most `windows` images [3, H, W], one a window, spread evenly over a normalised float tensor [n, 3, H, W]."""
    if images.dim() != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise TypeError(f"images must be a float tensor [n, 3, H, W], not {images.dtype} {list(images.shape)}")
    if len(images) == 0 or windows < 1:
        raise UserError(
            f"{windows} windows of {len(images)} images hold nothing", "give at least one image and one window"
        )
    patch = loaded.model.config.patch_size
    if images.shape[2] < patch or images.shape[3] < patch:
        raise UserError(
            f"images of {list(images.shape[2:])} are smaller than one patch of {patch}", "resize the images"
        )
    _require_memory(loaded, 1 + (images.shape[2] // patch) * (images.shape[3] // patch))
    return [images[pick] for pick in _spread(len(images), windows)]


def audio_windows(loaded: LoadedModel, features: Tensor, windows: int) -> list[Tensor]:
    """At most `windows` of the log-mel features [F, T], one a window, spread evenly over a float tensor [n, F, T].

    Raises UserError for another number of mel bins or frames than the model's: it reads nothing shorter or longer.
    """
    config = loaded.model.config
    wanted = (config.num_mel_bins, FRAMES_PER_TOKEN * config.max_source_positions)
    if features.dim() != 3 or not features.is_floating_point():
        raise UserError(
            f"log-mel features are floating-point [n, {wanted[0]}, {wanted[1]}], not {features.dtype} "
            f"{list(features.shape)}",
            "give what the library's feature extractor of this model makes of the sound",
        )
    if tuple(features.shape[1:]) != wanted:
        raise UserError(
            f"{loaded.id} reads {wanted[0]} mel bins of {wanted[1]} frames, and these features are "
            f"{list(features.shape[1:])}",
            "pad or cut the sound to the model's length with its own feature extractor",
        )
    if len(features) == 0 or windows < 1:
        raise UserError(f"{windows} windows of {len(features)} recordings hold nothing", "give at least one of each")
    if not bool(features.isfinite().all()):
        raise UserError("the log-mel features are not all finite", "make them anew from the sound")
    _require_memory(loaded, config.max_source_positions)
    return [features[pick] for pick in _spread(len(features), windows)]


def _require_positions(loaded: LoadedModel, tokens: int) -> None:
    positions = loaded.adapter.positions(loaded.model.config)
    if positions is not None and tokens > positions:
        raise UserError(
            f"a window of {tokens} tokens exceeds the {positions} positions of {loaded.id}",
            f"lower window_tokens to {positions} or less",
        )


def _require_memory(loaded: LoadedModel, tokens: int) -> None:
    require_memory(loaded.model.config, tokens, parameters(loaded.model), loaded.id)


def shuffled_window(loaded: LoadedModel, window: Tensor, generator: torch.Generator) -> Tensor:
    """The window with its tokens in random order, special tokens in their places; of an image, its whole patches.

    Of sound, the frames of each token stay together.
    """
    if loaded.adapter.reads == "images":
        return _shuffled_patches(window, loaded.model.config.patch_size, generator)
    if loaded.adapter.reads == "audio":
        frames = window.unflatten(1, (-1, FRAMES_PER_TOKEN))
        return frames[:, torch.randperm(frames.shape[1], generator=generator)].flatten(1)
    special = [] if loaded.tokenizer is None else loaded.tokenizer.all_special_ids
    places = torch.nonzero(~torch.isin(window, torch.tensor(special, dtype=window.dtype))).squeeze(1)
    shuffled = window.clone()
    shuffled[places] = window[places[torch.randperm(len(places), generator=generator)]]
    return shuffled


def _shuffled_patches(image: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """[3, H, W] with its whole patches in random order; what lies beyond the last of them stays."""
    rows, columns = image.shape[1] // side, image.shape[2] // side
    shuffled = image.clone()
    covered = shuffled[:, : rows * side, : columns * side]
    patches = covered.unflatten(1, (rows, side)).unflatten(3, (columns, side)).movedim((1, 3), (0, 1)).flatten(0, 1)
    drawn = patches[torch.randperm(len(patches), generator=generator)].unflatten(0, (rows, columns))
    covered.copy_(drawn.movedim((0, 1), (1, 3)).flatten(3, 4).flatten(1, 2))
    return shuffled


def _spread(available: int, wanted: int) -> list[int]:
    """`wanted` indices spread evenly over `available`, all of them if there are fewer."""
    if wanted >= available:
        return list(range(available))
    return [int((2 * place + 1) * available / (2 * wanted)) for place in range(wanted)]


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and after a text, seen on a probe."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise ValueError("the tokenizer changes a text's own tokens when it adds special ones")
