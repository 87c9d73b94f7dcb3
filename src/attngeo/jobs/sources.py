"""Where a preset's pretrained models, texts and images are found."""

from pathlib import Path

import numpy as np

from attngeo.config import LanguageModelConfig, Preset
from attngeo.data import embedded, text
from attngeo.errors import UserError


def model_folder(preset: Preset, model: LanguageModelConfig) -> str:
    """A local Hugging Face folder or a hub name."""
    if model.source == "embedded":
        return str(embedded.fetch(model.id))
    if model.source == "hub" or model.source.startswith("hub:"):
        return model.source.partition(":")[2] or model.id
    folder = preset.root / Path(model.source).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(
            f"model {model.id!r}: {folder} holds no config.json",
            "name a folder that save_pretrained wrote, 'hub:NAME' or 'embedded'",
        )
    return str(folder)


def texts(preset: Preset) -> list[str]:
    """The documents that language models are measured on."""
    if preset.texts == "embedded":
        return text.load()
    folder = preset.root / Path(preset.texts).expanduser()
    documents = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("*.txt"))]
    if not documents:
        raise UserError(f"texts: {folder} holds no .txt file", "name a folder of text files, or 'embedded'")
    return documents


def photographs(count: int, size: int) -> np.ndarray:
    """The first `count` validation images of the texture set, class by class: uint8 [count, size, size, 3]."""
    from PIL import Image

    folder = embedded.fetch("textile") / "val"
    by_class = [sorted(f for f in c.iterdir() if f.is_file()) for c in sorted(folder.iterdir()) if c.is_dir()]
    chosen = [files[i // len(by_class)] for i, files in zip(range(count), _cycle(by_class), strict=False)]
    images = [np.asarray(Image.open(f).convert("RGB").resize((size, size), Image.Resampling.BICUBIC)) for f in chosen]
    return np.stack(images)


def _cycle(items: list[list[Path]]) -> list[list[Path]]:
    return items * (1 + max(len(files) for files in items))
