"""Names of the models and the attention kind that each one runs, without torch."""

from collections.abc import Mapping, Sequence
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

# What a run sheet may ask of the pyramid itself, beside the options of its attention layers.
PYRAMID_OPTIONS = ("init", "feed_forward", "fiber_rank")


def model_names() -> list[str]:
    """All registered model names, family by family, small to large."""
    return [f"{family}_{size}" for family in FAMILIES for size in SIZES]


def feed_forward_of(model_name: str, options: Mapping[str, Any] | None = None) -> str:
    """The feed-forward that `create_model(model_name, **options)` runs in every block."""
    return str((options or {}).get("feed_forward") or ("fiber" if model_name.startswith("fiberformer_") else "mlp"))


def kinds_in(attention: str) -> tuple[str, ...]:
    """The kinds, or targets, of an `attention` as run sheets write it: one, or one a stage joined by commas."""
    return tuple(part.strip() for part in attention.split(","))


def stage_kinds(attention: str | Sequence[str], stages: int) -> tuple[str, ...]:
    """One kind a stage from one for all, a sequence, or names joined by commas; UserError if their number differs."""
    kinds = kinds_in(attention) if isinstance(attention, str) else tuple(attention)
    if len(kinds) == 1:
        return kinds * stages
    if len(kinds) != stages:
        raise UserError(
            f"attention {','.join(kinds)!r} names {len(kinds)} kinds for {stages} stages",
            "name one for all stages, or one for each",
        )
    return kinds


def attention_kind_of(model_name: str, options: Mapping[str, Any] | None = None) -> str:
    """The kind, or the user's target, that `create_model(model_name, **options)` runs in every stage.

    Kinds that differ by stage are joined by commas. UserError if the name is not a registered one, or if the number of
    kinds is not that of its stages.
    """
    family, _, size = model_name.rpartition("_")
    if family not in FAMILIES or size not in SIZES:
        raise UserError(
            f"unknown model {model_name!r}",
            f"names are FAMILY_SIZE with a family of {', '.join(FAMILIES)} and a size of {', '.join(SIZES)}",
        )
    chosen = (options or {}).get("attention")
    kinds = stage_kinds(FAMILIES[family] if chosen is None else chosen, len(PYRAMID_SIZES[size].dims))
    return kinds[0] if len(set(kinds)) == 1 else ",".join(kinds)
