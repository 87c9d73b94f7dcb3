"""Where a preset's pretrained models, texts and images are found."""

from pathlib import Path
from typing import TYPE_CHECKING

from attngeo.config import DecoderCheckpoint, LanguageModelConfig, Preset
from attngeo.data import embedded, text
from attngeo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

PHOTOGRAPHS = "textile"  # the embedded images that vision models look at
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


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


def texts(preset: Preset, model: LanguageModelConfig | None = None) -> list[str]:
    """The documents that a language model is measured on; for our own decoders, the ends that they were not trained on.

    UserError for a folder without texts and for a file that is none.
    """
    documents = text.documents(preset.texts, preset.root)
    if preset.decoders and isinstance(model, DecoderCheckpoint):
        return text.held_out(documents, preset.decoders.training.hold_out)[1]
    return documents


def photographs(count: int, size: int = 224) -> "Tensor":
    """The first `count` validation photographs, class by class, as a pretrained vision transformer expects them.

    Bicubic resize, ImageNet mean and deviation: float32 [count, 3, size, size].
    """
    import torch
    from PIL import Image
    from torchvision.transforms.v2 import functional

    folder = embedded.fetch(PHOTOGRAPHS) / "val"
    classes = [sorted(f for f in c.iterdir() if f.is_file()) for c in sorted(folder.iterdir()) if c.is_dir()]
    images = []
    for index in range(count):
        files = classes[index % len(classes)]
        with Image.open(files[index // len(classes)]) as opened:
            image = opened.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
        pixels = functional.to_dtype(functional.pil_to_tensor(image), torch.float32, scale=True)
        images.append(functional.normalize(pixels, list(_IMAGENET_MEAN), list(_IMAGENET_STD)))
    return torch.stack(images)
