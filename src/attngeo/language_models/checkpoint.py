"""The weight files of a model's folder, looked through before anything is loaded: which are there, whole and complete.

Only the headers of safetensors files are read. A damaged or incomplete download is a UserError that names the file.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attngeo.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FETCH_AGAIN = "fetch the model again"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header describes it."""

    file: Path
    dtype: str
    """Name of the format: "F32", "BF16"."""
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """The safetensors files that a model is read from; without any, the weights are a pickle of PyTorch's."""

    folder: Path
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.file for tensor in self.tensors.values()})

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def dtype(self) -> str | None:
        """Precision of the floating-point tensors, "bfloat16+float32" where they differ, None if there are none."""
        return "+".join(sorted({_DTYPES[t.dtype] for t in self.tensors.values() if t.dtype in _DTYPES})) or None

    def file_of(self, parameter: str) -> Path:
        """The file with a parameter of that name, in a headless model or below a head; the folder if none has it."""
        for name, tensor in self.tensors.items():
            if name == parameter or name.endswith(f".{parameter}"):
                return tensor.file
        return self.folder


def open_checkpoint(folder: Path) -> Checkpoint:
    """Look through the weight files of a folder.

    Raises UserError for an index that is missing beside its shards or is damaged, for a shard that is missing, cut
    short, damaged or without a weight that the index promises, and for a folder without weights.
    """
    if (folder / INDEX).is_file():
        return Checkpoint(folder, _sharded(folder))
    if (folder / SINGLE).is_file():
        return Checkpoint(folder, _read_header(folder / SINGLE))
    shards = sorted(folder.glob("*-of-*.safetensors"))
    if shards:
        raise UserError(
            f"{folder / INDEX} is missing beside {len(shards)} shards",
            "fetch that file again: it says which shard holds which weight",
        )
    if any((folder / name).is_file() for name in _PICKLED):
        return Checkpoint(folder)
    others = ", ".join(sorted(path.name for path in folder.glob("*.*") if path.suffix in (".h5", ".msgpack", ".onnx")))
    raise UserError(
        f"{folder} holds no weights: neither {SINGLE} nor {INDEX}" + (f", only {others}" if others else ""),
        "save the model with save_pretrained, which writes safetensors",
    )


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    try:
        placed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(placed.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} is damaged: {error}", "fetch that file again") from error
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        path = folder / shard
        if not path.is_file():
            raise UserError(f"the shard {path} is missing, which {INDEX} names", "fetch that file again")
        stored |= _read_header(path)
    for name, shard in placed.items():
        if name not in stored or stored[name].file.name != shard:
            raise UserError(f"{folder / shard} lacks {name}, which {INDEX} says it holds", "fetch both files again")
    return stored


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length)) if length <= size else {}
        stored, end = {}, 0
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                stored[name] = StoredTensor(path, str(entry["dtype"]), tuple(entry["shape"]), last - first)
                end = max(end, last)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(f"{path} is no safetensors file: {error}", _FETCH_AGAIN) from error
    if not header or size < 8 + length + end:
        raise UserError(f"{path} is cut short: {size} bytes of {8 + length + end}", _FETCH_AGAIN)
    return stored
