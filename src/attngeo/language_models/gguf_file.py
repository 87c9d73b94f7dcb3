"""A GGUF file as a Hugging Face folder: dequantised once into the cache, under the name of its quantisation."""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from attngeo.data.embedded import cache_root
from attngeo.data.embedded_models import gguf_llama
from attngeo.errors import UserError
from attngeo.files import explain_os_errors, sha256_file, write_json

_FORMAT = 1  # raised when the conversion writes something else, so that older folders are made anew


def folder_of(path: Path) -> Path:
    """The converted folder of a GGUF file, CACHE/gguf/HASH/NAME@gguf-TYPE; made if it is not there yet.

    TYPE is the one that most weights are stored in. UserError for a file that is missing, damaged, or of an
    architecture or a tokenizer that is not converted.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}", "name a GGUF file, a model folder or a hub name")
    home = cache_root() / "gguf" / f"{sha256_file(path)[:16]}-{_FORMAT}"
    made = sorted(home.glob("*@gguf-*"))
    if made:
        return made[0]
    with explain_os_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".aside-", dir=home))
    try:
        with explain_os_errors(home):
            folder = home / f"{path.stem}@gguf-{_convert(path, aside)}"
            write_json(aside / "source.json", {"name": folder.name, "file": path.name})
            if not folder.exists():  # else another process was first, with the same content
                os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _convert(path: Path, folder: Path) -> str:
    """Write the folder; the name of the type that most weights are stored in."""
    import gguf

    try:
        reader: Any = gguf.GGUFReader(path)
        weights: Counter[str] = Counter()
        for tensor in reader.tensors:
            weights[tensor.tensor_type.name.lower()] += int(tensor.n_elements)
        gguf_llama(path, folder)
    except OSError:
        raise  # a full disk is no fault of the file
    except Exception as error:  # parsers raise whatever a damaged file makes of them
        raise UserError(
            f"{path} cannot be converted: {str(error).strip() or type(error).__name__}",
            "convert it to a Hugging Face folder with another tool, mark the folder with a source.json of the form "
            '{"quantised": "gguf-q4_k"}, and name the folder',
        ) from error
    return weights.most_common(1)[0][0]
