"""Names of the models and the attention kind that each one runs, without torch."""

from collections.abc import Mapping
from typing import Any

from attngeo.errors import UserError
from attngeo.models.sizes import PYRAMID_SIZES

FAMILIES: dict[str, str] = {
    "laplacianformer": "laplacian",
    "softmaxformer": "softmax",
    "gaussianformer": "gaussian",
    "fiberformer": "riemannian",
}

SIZES: tuple[str, ...] = tuple(PYRAMID_SIZES)


def model_names() -> list[str]:
    """All registered model names, family by family, small to large."""
    return [f"{family}_{size}" for family in FAMILIES for size in SIZES]


def attention_kind_of(model_name: str, options: Mapping[str, Any] | None = None) -> str:
    """The kind, or the user's target, that `create_model(model_name, **options)` runs in every stage.

    UserError if the name is not a registered one.
    """
    family, _, size = model_name.rpartition("_")
    if family not in FAMILIES or size not in SIZES:
        raise UserError(
            f"unknown model {model_name!r}",
            f"names are FAMILY_SIZE with a family of {', '.join(FAMILIES)} and a size of {', '.join(SIZES)}",
        )
    chosen = (options or {}).get("attention")
    return FAMILIES[family] if chosen is None else str(chosen)
