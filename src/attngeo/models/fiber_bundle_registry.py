"""Entry points of the plain vision transformers, registered with timm; imported for that effect."""

from typing import TYPE_CHECKING, Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from attngeo.models.fiber_bundle_sizes import VIT_SIZES
from attngeo.models.registry import IMAGENET_MEAN, IMAGENET_STD

if TYPE_CHECKING:
    from attngeo.models.fiber_bundle import FiberViT


def _default_cfg(image_size: int) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, image_size, image_size),
        "fixed_input_size": False,
        "min_input_size": (3, 1, 1),
        "pool_size": None,
        "crop_pct": 0.9 if image_size >= 224 else 1.0,
        "interpolation": "bicubic",
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "first_conv": "patch_embed.convolution",
        "classifier": "head",
        "license": "apache-2.0",
    }


default_cfgs = generate_default_cfgs(
    {f"fibervit_{name}": _default_cfg(size.image_size) for name, size in VIT_SIZES.items()}
)

__all__ = [f"fibervit_{name}" for name in VIT_SIZES]


def _register(size: str) -> None:
    name = f"fibervit_{size}"

    def create(pretrained: bool = False, **options: Any) -> "FiberViT":
        # Imported here because importing timm from any layer module imports this module, before that layer is complete.
        from attngeo.models.fiber_bundle import FiberViT

        model: FiberViT = build_model_with_cfg(FiberViT, name, pretrained, size=VIT_SIZES[size], **options)
        return model

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"Plain vision transformer of size {size}; `form` names its attention and feed-forward."
    globals()[name] = register_model(create)


for _size in VIT_SIZES:
    _register(_size)
