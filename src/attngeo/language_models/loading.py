"""Opens a Hugging Face model folder for analysis: headless, in evaluation mode, with attention maps in sight."""

import json
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attngeo.errors import UserError
from attngeo.files import read_json
from attngeo.language_models.architectures import ARCHITECTURES, Architecture, AttentionSite, architecture_of

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_FETCH_AGAIN = "fetch the model again"
_SUPPORTED = f"use a model of one of the families {', '.join(sorted(ARCHITECTURES))}"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to analyse; `precision` is how its weights were stored, not the dtype of the computation."""

    model: Any
    tokenizer: Any | None
    adapter: Architecture
    id: str
    quantised: str | None
    """Name of the quantisation that the weights went through ("gguf-q4_1"), None for weights as trained."""
    stored_dtype: str
    revision: str = ""
    """Commit of the hub's snapshot that the weights are from, empty for a local folder."""

    @property
    def precision(self) -> str:
        return self.quantised or self.stored_dtype

    @property
    def sites(self) -> list[AttentionSite]:
        """Attention of each layer, first layer first."""
        sites = self.adapter.sites(self.model)
        if not sites:
            raise UserError(f"model {self.id} has no attention layer", "check num_hidden_layers in its config.json")
        return sites


def load(folder: Path | str, dtype: torch.dtype | None = torch.float32, *, model_id: str | None = None) -> LoadedModel:
    """Load a local folder (config.json, weights, tokenizer files if any) or a hub name ("owner/model").

    A hub name may be pinned to a commit, tag or branch, "owner/model@revision"; whatever exists on disk is a path, and
    an @ in it is part of its name. The model id defaults to the last part of the name; dtype None keeps the precision
    of the weights file. Raises UserError for a missing model, an unsupported family, and weights that are missing or do
    not fit.
    """
    import transformers

    folder, hub = _local_folder(folder), _hub_name(folder)
    name = model_id or (folder.resolve().name if hub is None else hub["name"].rpartition("/")[2])
    # A revision that the id carries along says nothing about the precision of the weights.
    unpinned = name.removesuffix(f"@{hub['revision']}") if hub is not None and hub["revision"] else name
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{folder / 'config.json'}: {_first_line(error)}", _SUPPORTED) from error
    adapter = architecture_of(config)
    stored_dtype = _stored_dtype(folder, config)
    if dtype is None:
        dtype = getattr(torch, stored_dtype, torch.float32)
    model_class = getattr(transformers, adapter.model_class)
    try:
        with _quiet():
            model, report = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
                **adapter.model_options,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"the weights in {folder} cannot be read: {_first_line(error)}", _FETCH_AGAIN) from error
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(adapter.optional_keys))
    if missing:
        raise UserError(
            f"the weights in {folder} lack {len(missing)} parameters, the first is {missing[0]}", _FETCH_AGAIN
        )
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        tokenizer=_tokenizer(folder),
        adapter=adapter,
        id=name,
        quantised=_quantisation(folder, unpinned, config),
        stored_dtype=stored_dtype,
        revision="" if hub is None else folder.name,
    )


def random_init(config: Any, seed: int, dtype: torch.dtype = torch.float32, *, model_id: str) -> LoadedModel:
    """An untrained network of a transformers configuration, by the library's initialisation; a function of the seed."""
    import transformers

    adapter = architecture_of(config)
    model_class = getattr(transformers, adapter.model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=dtype, attn_implementation="eager", **adapter.model_options)
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        tokenizer=None,
        adapter=adapter,
        id=model_id,
        quantised=None,
        stored_dtype=str(dtype).removeprefix("torch."),
    )


def parameters(model: nn.Module) -> int:
    """Number of parameters of the headless model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _hub_name(folder: Path | str) -> re.Match[str] | None:
    """The parts `name` and `revision` of a hub name; None for what exists on disk, whatever it is called."""
    return None if Path(folder).exists() else _HUB_NAME.fullmatch(str(folder))


def _local_folder(folder: Path | str) -> Path:
    """The folder itself, or the hub's snapshot of that name: configuration, safetensors and tokenizer, never code."""
    path = Path(folder)
    if (path / "config.json").is_file():
        return path
    hub = _hub_name(folder)
    if hub is None:
        raise UserError(
            f"no model in {path}: it holds no config.json", "name a Hugging Face model folder, or run `attngeo fetch`"
        )
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub["name"],
                revision=hub["revision"],
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"],
            )
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is no local model folder and the hub did not give it: {_first_line(error)}",
            "check the name, the revision and the network, or name a local folder",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's progress bar and its table of parameters that the headless model leaves unread."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _tokenizer(folder: Path) -> Any | None:
    import transformers

    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")):
        return None
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _quantisation(folder: Path, name: str, config: Any) -> str | None:
    """The model id says it (`name@precision`), or the folder's source.json, or the configuration."""
    if "@" in name:
        return name.split("@", 1)[1]
    if (folder / "source.json").is_file():
        source = read_json(folder / "source.json")
        stated = str(source.get("name", "")).partition("@")[2] or source.get("quantised")
        if stated:
            return str(stated)
    quantization_config = getattr(config, "quantization_config", None)
    if quantization_config is None:
        return None
    if isinstance(quantization_config, dict):
        return str(quantization_config.get("quant_method", "quantised"))
    return str(getattr(quantization_config, "quant_method", "quantised"))


def _stored_dtype(folder: Path, config: Any) -> str:
    """Read from the weights file itself, since a configuration may name another one."""
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        found = {names[entry["dtype"]] for key, entry in header.items() if entry.get("dtype") in names}
        if found:
            return "+".join(sorted(found))
    return str(getattr(config, "dtype", None) or "unknown").removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
