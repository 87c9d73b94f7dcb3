"""Entry points of every family and size, registered with timm; imported for that effect."""

from typing import TYPE_CHECKING, Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from attngeo.models.names import FAMILIES, SIZES, attention_kind_of, feed_forward_of, model_names
from attngeo.models.sizes import PYRAMID_SIZES

if TYPE_CHECKING:
    from attngeo.models.pyramid import Pyramid

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _default_cfg(size: str) -> dict[str, Any]:
    image_size = PYRAMID_SIZES[size].image_size
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
        "first_conv": "stages.0.patch_embed.convolution",
        "classifier": "head",
        "license": "apache-2.0",
    }


default_cfgs = generate_default_cfgs({f"{family}_{size}": _default_cfg(size) for family in FAMILIES for size in SIZES})

__all__ = model_names()


def _register(family: str, size: str) -> None:
    name = f"{family}_{size}"

    def create(pretrained: bool = False, **options: Any) -> "Pyramid":
        # Imported here because importing timm from any layer module imports this module, before that layer is complete.
        from attngeo.models.pyramid import Pyramid

        options["attention"] = attention_kind_of(name, options)
        options["feed_forward"] = feed_forward_of(name, options)
        # "getter" takes the maps of `forward_intermediates` for features_only=True.
        features = {"out_indices": tuple(range(len(PYRAMID_SIZES[size].dims))), "feature_cls": "getter"}
        model: Pyramid = build_model_with_cfg(
            Pyramid, name, pretrained, size=PYRAMID_SIZES[size], feature_cfg=features, **options
        )
        return model

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"Pyramid of size {size} with {FAMILIES[family]} attention in every stage."
    globals()[name] = register_model(create)


for _family in FAMILIES:
    for _size in SIZES:
        _register(_family, _size)
