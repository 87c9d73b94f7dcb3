"""Opens a Hugging Face model folder for analysis: headless, in evaluation mode, with attention maps in sight."""

import copy
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from attngeo.errors import UserError
from attngeo.files import read_json
from attngeo.language_models.architectures import ARCHITECTURES, Architecture, AttentionSite, architecture_of
from attngeo.language_models.checkpoint import Checkpoint, open_checkpoint
from attngeo.language_models.gguf_file import folder_of
from attngeo.language_models.memory import ON_DEMAND_SHARE, available_bytes
from attngeo.language_models.on_demand import MappedWeights, SitesOnDemand, UntrainedWeights, WeightsOnDemand

_log = logging.getLogger(__name__)
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_FETCH_AGAIN = "fetch the model again"
_OFFLINE = ("HF_HUB_OFFLINE", "ATTNGEO_OFFLINE")
_TIED_OUTPUTS = ("lm_head.weight", "embed_out.weight", "predictions.decoder.weight", "lm_head.decoder.weight")
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
    weights: WeightsOnDemand | None = None
    """What brings the weights of the layer at hand, for a model that is not in memory as a whole."""
    stated_family: str = ""
    """What the folder's source.json calls its family, empty where it says nothing."""

    @property
    def family(self) -> str:
        """Models of one family may be compared by size: the stated family, else the architecture."""
        return self.stated_family or self.adapter.name

    @property
    def precision(self) -> str:
        return self.quantised or self.stored_dtype

    @property
    def sites(self) -> list[AttentionSite]:
        """Attention of each layer, first layer first."""
        if self.weights is None:
            sites = self.adapter.sites(self.model)
        else:
            sites = SitesOnDemand(self.weights, lambda: self.adapter.sites(self.model))
        if not sites:
            raise UserError(f"model {self.id} has no attention layer", "check num_hidden_layers in its config.json")
        return sites


def load(
    folder: Path | str,
    dtype: torch.dtype | None = torch.float32,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    on_demand: bool | None = None,
) -> LoadedModel:
    """Load a local folder (config.json, weights, tokenizer files if any), a GGUF file or a hub name ("owner/model").

    A hub name may be pinned to a commit, tag or branch, by `revision` or as "owner/model@revision"; whatever exists on
    disk is a path, and an @ in it is part of its name. The model id defaults to the last part of the name; dtype None
    keeps the precision of the weights file. With `offline`, or HF_HUB_OFFLINE set, the network is never touched.

    `on_demand` leaves the weights in their files and gives the memory of each layer back after it ran; None does so
    where they would fill more than `ON_DEMAND_SHARE` of the free memory. The numbers are the same to the last bit. The
    weights must then not be changed.

    Raises UserError for a missing model, an unsupported family, and weights that are missing or do not fit.
    """
    import transformers

    folder, model_id = _converted(folder, model_id)
    source, hub = folder, _hub_name(folder)
    if revision is not None and (hub is None or hub["revision"] is not None):
        raise UserError(
            f"{folder} cannot be pinned to revision {revision!r}",
            "give a revision once, and only to a name of the Hugging Face hub (owner/model)",
        )
    if revision is not None:
        source, hub = f"{folder}@{revision}", _HUB_NAME.fullmatch(f"{folder}@{revision}")
        if hub is None:
            raise UserError(f"{revision!r} is no revision", "give a commit, a tag or a branch")
    folder = _local_folder(source, offline)
    name = model_id or (folder.resolve().name if hub is None else hub["name"].rpartition("/")[2])
    # A revision that the id carries along says nothing about the precision of the weights.
    unpinned = name.removesuffix(f"@{hub['revision']}") if hub is not None and hub["revision"] else name
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged configuration raises whatever comes of it
        remedy = f"correct it, or {_SUPPORTED}"
        raise UserError(f"{folder / 'config.json'}: {_first_line(error)}", remedy) from error
    adapter = architecture_of(config)
    checkpoint = open_checkpoint(folder)
    _require_a_network(adapter, config, folder)
    stored_dtype = checkpoint.dtype or str(getattr(config, "dtype", None) or "unknown").removeprefix("torch.")
    on_demand = _on_demand(checkpoint, on_demand, dtype, stored_dtype)
    if dtype is None:
        dtype = getattr(torch, stored_dtype, torch.float32)
    try:
        with _quiet():
            model, report = adapter.network.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are an error of our own below
                key_mapping=adapter.renamed or None,
                **adapter.model_options,
            )
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        raise UserError(f"the weights in {folder} cannot be read: {_first_line(error)}", _FETCH_AGAIN) from error
    for key, found, wanted in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{checkpoint.file_of(key)}: {key} is {list(found)}, and config.json asks for {list(wanted)}",
            "use the config.json that belongs to these weights",
        )
    missing = {key for key in report["missing_keys"] if not key.startswith(adapter.optional_keys)}
    if getattr(config, "tie_word_embeddings", False):
        missing -= _resolve_tied(model, checkpoint, missing)
    if missing:
        raise UserError(
            f"the weights in {folder} lack {len(missing)} parameters, the first is {min(missing)}", _FETCH_AGAIN
        )
    model.eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=_tokenizer(folder),
        adapter=adapter,
        id=name,
        quantised=_quantisation(folder, unpinned, config),
        stored_dtype=_precision(stored_dtype, dtype),
        revision="" if hub is None else folder.name,
        stated_family=str(_source(folder).get("family") or ""),
        weights=MappedWeights(model, checkpoint.files) if on_demand else None,
    )


def _require_a_network(adapter: Architecture, config: Any, folder: Path) -> None:
    """UserError where the configuration describes none: told apart from weights that are damaged."""
    try:
        with torch.device("meta"), _quiet():
            adapter.network._from_config(copy.deepcopy(config), **adapter.model_options)
    except Exception as error:  # what a class makes of sizes that do not fit differs from class to class
        raise UserError(
            f"{folder / 'config.json'} describes no {adapter.name} model: {_first_line(error)}",
            "use the config.json that belongs to these weights",
        ) from error


def random_init(
    config: Any, seed: int, dtype: torch.dtype = torch.float32, *, model_id: str, on_demand: bool | None = None
) -> LoadedModel:
    """An untrained network of a transformers configuration, by the library's initialisation; a function of the seed.

    With `on_demand` a layer is drawn when it runs and then forgotten; None does so where the network would fill more
    than `ON_DEMAND_SHARE` of the free memory. It is the same network either way.
    """
    adapter = architecture_of(config)
    with torch.device("meta"):
        model = adapter.network._from_config(config, dtype=dtype, attn_implementation="eager", **adapter.model_options)
    model.eval().requires_grad_(False)
    if on_demand is None:
        on_demand = sum(parameter.nbytes for parameter in model.parameters()) > ON_DEMAND_SHARE * available_bytes()
    weights = UntrainedWeights(model, seed, tables_from_above=adapter.tables_from_above)
    if on_demand:
        weights.draw_as_they_run()
    else:
        weights.draw_all()
    return LoadedModel(
        model=model,
        tokenizer=None,
        adapter=adapter,
        id=model_id,
        quantised=None,
        stored_dtype=str(dtype).removeprefix("torch."),
        weights=weights if on_demand else None,
    )


def parameters(model: nn.Module) -> int:
    """Number of parameters of the headless model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _hub_name(folder: Path | str) -> re.Match[str] | None:
    """The parts `name` and `revision` of a hub name; None for what exists on disk, whatever it is called."""
    return None if Path(folder).exists() else _HUB_NAME.fullmatch(str(folder))


def _converted(folder: Path | str, model_id: str | None) -> tuple[Path | str, str | None]:
    """A GGUF file as the folder it is converted to, and the id that names its quantisation; all else as it is."""
    path = Path(folder)
    if path.suffix.lower() != ".gguf" or path.is_dir():
        return folder, model_id
    converted = folder_of(path)
    return converted, model_id or f"{path.stem}@{converted.name.rpartition('@')[2]}"


def _local_folder(folder: Path | str, offline: bool) -> Path:
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

    offline = offline or any(os.environ.get(name, "0").lower() not in ("", "0", "false") for name in _OFFLINE)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub["name"],
                revision=hub["revision"],
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"],
                local_files_only=offline,
            )
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is no local model folder and "
            + ("no earlier download of it is there" if offline else f"the hub did not give it: {_first_line(error)}"),
            "fetch it once with a network"
            if offline
            else "check the name, the revision and the network, or name a local folder",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's progress bar and its table of parameters that the headless model leaves unread."""
    from transformers.utils import logging as messages

    verbosity, bar = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(verbosity)
        if bar:
            messages.enable_progress_bar()


def _tokenizer(folder: Path) -> Any | None:
    import transformers

    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its parsers raise whatever a damaged file makes of them
        raise UserError(
            f"the tokenizer files in {folder} cannot be read: {_first_line(error)}",
            "fetch them again, or take them out of the folder and measure the weights alone",
        ) from error


def _quantisation(folder: Path, name: str, config: Any) -> str | None:
    """The model id says it (`name@precision`), or the folder's source.json, or the configuration."""
    if "@" in name:
        return name.split("@", 1)[1]
    source = _source(folder)
    stated = str(source.get("name", "")).partition("@")[2] or source.get("quantised")
    if stated:
        return str(stated)
    quantization_config = getattr(config, "quantization_config", None)
    if quantization_config is None:
        return None
    if isinstance(quantization_config, dict):
        return str(quantization_config.get("quant_method", "quantised"))
    return str(getattr(quantization_config, "quant_method", "quantised"))


def _source(folder: Path) -> dict[str, Any]:
    """What source.json in the folder says of where the model is from."""
    return dict(read_json(folder / "source.json")) if (folder / "source.json").is_file() else {}


def _on_demand(checkpoint: Checkpoint, wanted: bool | None, dtype: torch.dtype | None, stored_dtype: str) -> bool:
    """Whether the weights stay in their files: only as they are stored, since any other precision is a copy."""
    as_stored = hasattr(torch, stored_dtype) and (dtype is None or str(dtype) == f"torch.{stored_dtype}")
    free = available_bytes()
    if not as_stored and checkpoint.bytes > free:
        raise UserError(
            f"{checkpoint.folder} holds {checkpoint.bytes / 2**30:.1f} GiB of {stored_dtype} weights, and "
            f"{free / 2**30:.1f} GiB are free",
            "leave the precision as stored, a single one: the weights are then read layer by layer",
        )
    if not as_stored or not checkpoint.tensors or wanted is not None:
        return as_stored and bool(checkpoint.tensors) and bool(wanted)
    large = checkpoint.bytes > ON_DEMAND_SHARE * free
    if large:
        _log.warning(
            "%s: %.1f GiB of weights, above %.0f %% of the %.1f GiB that are free: they stay on disk, and one layer at "
            "a time is in memory",
            checkpoint.folder,
            checkpoint.bytes / 2**30,
            100 * ON_DEMAND_SHARE,
            free / 2**30,
        )
    return large


def _resolve_tied(model: Any, checkpoint: Checkpoint, missing: set[str]) -> set[str]:
    """Read input embeddings that are stored under the tied output's name alone; the names that are resolved so."""
    from safetensors import safe_open

    table: Any = getattr(model.get_input_embeddings(), "weight", None)
    names = {name for name, parameter in model.named_parameters() if parameter is table} & missing
    for key, tensor in checkpoint.tensors.items() if names else ():
        if key.endswith(_TIED_OUTPUTS) and tensor.shape == tuple(table.shape):
            with safe_open(tensor.file, framework="pt") as file:
                model.get_input_embeddings().weight = nn.Parameter(file.get_tensor(key).to(table.dtype))
            return names
    return set()


def _precision(stored: str, dtype: torch.dtype) -> str:
    """How the weights were stored, and what they were rounded to if `dtype` cannot hold them."""
    parts = [getattr(torch, part, dtype) for part in stored.split("+")]
    if all(torch.promote_types(part, dtype) == dtype for part in parts):
        return stored
    return f"{stored} as {str(dtype).removeprefix('torch.')}"


def _first_line(error: BaseException) -> str:
    """The first line of the message, with the next one where that only announces it."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first
