"""The section `benchmarks` of config/<preset>/config.yaml: what is timed and compared, at which sizes."""

import math
from typing import Annotated

from pydantic import Field, field_validator

from attngeo.config.explain import allowed
from attngeo.config.settings import Identifier, Strict
from attngeo.evaluation.operator_sizes import INVERSE_SLICES, INVERSE_TOKENS, PYRAMID_SIZES
from attngeo.evaluation.token_sizes import LAYER_KINDS, PASSES, TOKENS, Pass
from attngeo.layers.registry import ATTENTION_KINDS
from attngeo.models.names import SIZES


def _square_of_landmarks(value: int) -> int:
    if math.isqrt(value) ** 2 != value:
        raise ValueError("landmarks lie on a square grid: give a square such as 16 or 49")
    return value


class OperatorTimingsConfig(Strict):
    """Sizes and patience of the timings of the operators."""

    sizes: tuple[tuple[int, int, int, int], ...] = Field(
        PYRAMID_SIZES, description="batch times heads, tokens, landmarks and head width of the kernels"
    )
    inverse_tokens: tuple[int, ...] = Field(INVERSE_TOKENS, description="sizes of the matrices that are inverted")
    slices: int = Field(
        INVERSE_SLICES, ge=1, description="batch times heads of the inverses and at the published numbers of tokens"
    )
    channels: int = Field(32, ge=1, description="head width at the published numbers of tokens")
    repeats: int = Field(20, ge=1)
    seconds: float = Field(1.0, gt=0, description="for each contestant, after which three samples suffice")


class SolverConfig(Strict):
    """Size of the comparison of solvers."""

    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1)
    matrices: int = Field(16, ge=1, description="matrices a seed, and as many in all for the trained ones")
    landmarks: int = Field(49, ge=1, description="a square: landmarks lie on a grid")
    iterations: int = Field(30, ge=1)
    eps: float = Field(0.01, gt=0)
    images: int = Field(8, ge=1, description="validation images that a trained model looks at")
    runs: tuple[Identifier, ...] = Field(
        (), description="runs with Laplacian attention; without it, the first one of the sheet and its other seeds"
    )

    @field_validator("landmarks")
    @classmethod
    def _a_square(cls, value: int) -> int:
        return _square_of_landmarks(value)


class EdgeConfig(Strict):
    """Models and patience of the timings of one image at a time."""

    image_sizes: dict[str, tuple[Annotated[int, Field(ge=1)], ...]] = Field(
        {"micro": (32, 64, 96), "tiny": (128, 224)}, description="image sizes (px) of each pyramid size"
    )
    kinds: tuple[str, ...] = Field(tuple(ATTENTION_KINDS), min_length=1, description="attention kinds")
    repeats: int = Field(50, ge=2)
    seconds: float = Field(1.0, gt=0, description="for each model, after which three passes suffice")

    @field_validator("image_sizes")
    @classmethod
    def _sizes_there_are(cls, value: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        for size in value:
            if size not in SIZES:
                raise ValueError(f"no pyramid size {size!r}: {allowed(SIZES, size)}")
        return value

    @field_validator("kinds")
    @classmethod
    def _kinds_there_are(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for kind in value:
            if kind not in ATTENTION_KINDS:
                raise ValueError(f"no attention kind {kind!r}: {allowed(list(ATTENTION_KINDS), kind)}")
        return value


class TokensConfig(Strict):
    """Sizes and patience of the cost of one attention layer against the number of tokens."""

    tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(TOKENS, min_length=1, description="squares")
    kinds: tuple[str, ...] = Field(
        LAYER_KINDS, min_length=1, description="attention kinds; softmax keeps its weights, softmax_fused does not"
    )
    passes: tuple[Pass, ...] = Field(PASSES, min_length=1)
    heads: int = Field(1, ge=1)
    head_dim: int = Field(32, ge=4, multiple_of=4)
    landmarks: int = Field(49, ge=1, description="a square: landmarks lie on a grid")
    repeats: int = Field(10, ge=1)
    seconds: float = Field(1.0, gt=0, description="for each case, after which three samples suffice")
    longest_s: float = Field(4.0, gt=0, description="a kind whose pass takes longer is not tried with more tokens")
    memory_mib: int = Field(2200, ge=1, description="a pass that needs more is left out")

    @field_validator("tokens")
    @classmethod
    def _squares(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for tokens in value:
            if math.isqrt(tokens) ** 2 != tokens:
                raise ValueError(f"tokens lie on a square grid: give squares such as 1024, not {tokens}")
        if len(set(value)) < len(value):
            raise ValueError("a number of tokens is given twice")
        return value

    @field_validator("landmarks")
    @classmethod
    def _a_square(cls, value: int) -> int:
        return _square_of_landmarks(value)

    @field_validator("kinds")
    @classmethod
    def _kinds_there_are(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for kind in value:
            if kind not in LAYER_KINDS:
                raise ValueError(f"no attention kind {kind!r}: {allowed(LAYER_KINDS, kind)}")
        return value


class TrainingStepConfig(Strict):
    """Sizes and patience of the timings of a training step: of one layer, and of a whole model in the loop."""

    batch: int = Field(2, ge=1, description="images of the single layer")
    heads: int = Field(2, ge=1)
    tokens: int = Field(3136, ge=1, description="a square")
    head_dim: int = Field(32, ge=4, multiple_of=4)
    model_size: str = "micro"
    images: int = Field(64, ge=1, description="a batch of the model")
    steps: int = Field(8, ge=1, description="that the loop takes in one sample")
    repeats: int = Field(8, ge=2)
    seconds: float = Field(1.0, gt=0, description="for each contestant, after which three samples suffice")

    @field_validator("tokens")
    @classmethod
    def _a_square(cls, value: int) -> int:
        if math.isqrt(value) ** 2 != value:
            raise ValueError("tokens lie on a square grid: give a square such as 3136")
        return value

    @field_validator("model_size")
    @classmethod
    def _a_size_there_is(cls, value: str) -> str:
        if value not in SIZES:
            raise ValueError(f"no pyramid size {value!r}: {allowed(SIZES, value)}")
        return value


class MetricCostsConfig(Strict):
    """Sizes and patience of the cost of low-rank metrics, and of their share of a transformer block."""

    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field((128, 256, 512, 1024, 2048, 4096), min_length=2)
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 4, 8, 16, 32, 64, 128, 256), min_length=2)
    block_dimensions: tuple[Annotated[int, Field(ge=64, multiple_of=64)], ...] = Field(
        (1024, 2048, 4096), min_length=1, description="widths of blocks with heads of 64"
    )
    block_ranks: tuple[Annotated[int, Field(ge=1)], ...] = Field((2, 8), min_length=1)
    tokens: int = Field(256, ge=1, description="tokens of a block")
    dense_to: int = Field(4096, ge=1, description="channels up to which dense forms are timed too")
    repeats: int = Field(10, ge=2)
    seconds: float = Field(1.0, gt=0, description="for each contestant, after which three samples suffice")


class BenchmarksConfig(Strict):
    """What is timed and compared."""

    operators: OperatorTimingsConfig = OperatorTimingsConfig()
    solver: SolverConfig = SolverConfig()
    edge: EdgeConfig = EdgeConfig()
    tokens: TokensConfig = TokensConfig()
    training_step: TrainingStepConfig = TrainingStepConfig()
    metric_costs: MetricCostsConfig = MetricCostsConfig()
