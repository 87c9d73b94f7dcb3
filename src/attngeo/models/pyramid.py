"""One pyramid backbone; the attention kind is chosen by name and runs in every stage."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from timm.layers import DropPath, LayerNorm, Mlp, calculate_drop_path_rates, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attngeo.errors import UserError
from attngeo.layers.attention import Grid, init_linear
from attngeo.layers.registry import (
    accepts_option,
    build_attention,
    feed_forward_class,
    refuse_unknown_options,
    uses_landmarks,
)
from attngeo.layers.registry import attention_options as attention_options_of
from attngeo.models.names import stage_kinds
from attngeo.models.sizes import PyramidSize

FeedForward = Literal["mlp", "fiber"]
Init = Literal["trunc_normal", "default"]

FIBER_RANK = 2


class PatchEmbed(nn.Module):
    """Overlapping convolution and norm: image [B, C, H, W] -> tokens [B, N, D] and their grid, for any H and W."""

    def __init__(self, channels: int, dim: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, dim, kernel, stride=stride, padding=kernel // 2)
        self.norm = LayerNorm(dim)
        trunc_normal_(self.convolution.weight, std=0.02)
        nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> tuple[Tensor, Grid]:
        features = self.convolution(image)
        return self.norm(features.flatten(2).transpose(1, 2)), (features.shape[2], features.shape[3])


class Block(nn.Module):
    """Pre-norm block: x <- x + attention(norm x), then x <- x + feed_forward(norm x), tokens [B, N, C]."""

    def __init__(self, dim: int, attention: nn.Module, feed_forward: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.attention = attention
        self.norm2 = LayerNorm(dim)
        self.feed_forward = feed_forward
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        mixed = self.attention(self.norm1(x), grid)
        if mixed.shape != x.shape:
            raise UserError(
                f"attention {type(self.attention).__name__} returned {tuple(mixed.shape)} for {tuple(x.shape)}",
                "its forward(x, grid) must return tokens of the shape it was given",
            )
        x = x + self.drop_path(mixed)
        return x + self.drop_path(self.feed_forward(self.norm2(x)))


class Stage(nn.Module):
    """Patch embedding, blocks and a norm: image [B, C, H, W] -> feature map [B, D, H', W']."""

    def __init__(self, patch_embed: PatchEmbed, blocks: list[Block], dim: int) -> None:
        super().__init__()
        self.patch_embed = patch_embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = LayerNorm(dim)
        self.grad_checkpointing = False

    def forward(self, image: Tensor) -> Tensor:
        x, grid = self.patch_embed(image)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                x = checkpoint(block, x, grid, use_reentrant=False)
            else:
                x = block(x, grid)
        return self.norm(x).transpose(1, 2).unflatten(2, grid)


class Pyramid(nn.Module):
    """Pyramid vision transformer with 2-D rotary positions, behind timm's model interface.

    `attention` is a registered kind or "path/to/file.py:Class", for all stages or one a stage (a sequence, or joined by
    commas); each of `attention_options` goes to the constructors of the kinds that have it. `feed_forward` is "mlp" or
    "fiber" (preconditioned by a per-token metric of rank `fiber_rank`). `img_size` (px) decides the stride of convolved
    landmarks alone: any height and width from 1 px on are accepted. `init` "default" leaves linear layers and
    convolutions as torch draws them, for the ablation; token metrics keep their start. UserError for an unknown kind
    or option.

    On the sizes that share one projection between queries and keys, a kind that does so gets C / 2 more hidden units in
    each MLP, about the C^2 weights that it saves (ours), so that softmax, Gaussian and Laplacian models of one size
    have the same number of parameters within 5 %. The Riemannian kind and the fiber feed-forward (fiberformer) are not
    matched: their token metrics come on top.
    """

    pretrained_cfg: dict[str, Any]  # timm's, set by its builder

    def __init__(
        self,
        size: PyramidSize,
        attention: str | Sequence[str],
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        global_pool: str = "avg",
        attention_options: Mapping[str, Any] | None = None,
        feed_forward: FeedForward = "mlp",
        fiber_rank: int = FIBER_RANK,
        init: Init = "trunc_normal",
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        for option, value, allowed in (("feed_forward", feed_forward, FeedForward), ("init", init, Init)):
            if value not in get_args(allowed):
                raise UserError(f"model option {option} is {value!r}", f"choose {' or '.join(get_args(allowed))}")
        self.size = size
        self.in_chans = in_chans
        chosen = size.image_size if img_size is None else img_size
        self.img_size: tuple[int, int] = (chosen, chosen) if isinstance(chosen, int) else (chosen[0], chosen[1])
        self.num_features = self.head_hidden_size = size.dims[-1]
        self.feature_info: list[dict[str, Any]] = []
        self.init: Init = init
        kinds = stage_kinds(attention, len(size.dims))
        # What a model of the same size is built anew from, beside its classes.
        self.options: dict[str, Any] = {
            "attention": list(kinds),
            "in_chans": in_chans,
            "img_size": self.img_size,
            "attention_options": dict(attention_options or {}),
            "feed_forward": feed_forward,
            "fiber_rank": fiber_rank,
            "init": init,
            "drop_path_rate": drop_path_rate,
        }
        options = dict(attention_options or {})
        landmarks = options.pop("landmarks", size.landmarks)
        landmarks = (landmarks, landmarks) if isinstance(landmarks, int) else (int(landmarks[0]), int(landmarks[1]))
        refuse_unknown_options(kinds, options)
        if "landmarks" in (attention_options or {}) and not any(map(uses_landmarks, kinds)):
            raise UserError(f"attention {' or '.join(dict.fromkeys(kinds))} has no landmarks", "leave landmarks out")
        if feed_forward == "mlp" and fiber_rank != FIBER_RANK:
            raise UserError("feed_forward mlp has no fiber_rank", 'choose feed_forward "fiber", or leave it out')

        feed_forward_layer: Callable[[int, int], nn.Module] = (
            _mlp if feed_forward == "mlp" else partial(feed_forward_class(feed_forward), rank=fiber_rank)
        )

        drop_path_rates = calculate_drop_path_rates(drop_path_rate, list(size.depths), stagewise=True)
        stages = []
        channels, reduction, grid = in_chans, 1, self.img_size
        for index, (kind, dim) in enumerate(zip(kinds, size.dims, strict=True)):
            kernel, stride = size.patch_kernels[index], size.patch_strides[index]
            grid = _strided(grid[0], kernel, stride), _strided(grid[1], kernel, stride)
            own = {name: value for name, value in options.items() if accepts_option(kind, name)}
            defaults: dict[str, Any] = {"shared_query_key": size.shared_query_key}
            if own.get("landmark_map") == "convolution":
                defaults["landmark_stride"] = (max(1, grid[0] // landmarks[0]), max(1, grid[1] // landmarks[1]))
            own = {name: value for name, value in defaults.items() if name in attention_options_of(kind)} | own
            # One projection for queries and keys saves C^2 weights, as many as C / 2 hidden units of the MLP have.
            compensated = size.shared_query_key and own.get("shared_query_key", False)
            hidden = dim * size.mlp_ratios[index] + (dim // 2 if compensated else 0)
            blocks = [
                Block(
                    dim,
                    build_attention(kind, dim, size.heads[index], landmarks=landmarks, **own),
                    feed_forward_layer(dim, hidden),
                    drop_path,
                )
                for drop_path in drop_path_rates[index]
            ]
            stages.append(Stage(PatchEmbed(channels, dim, kernel, stride), blocks, dim))
            channels, reduction = dim, reduction * stride
            self.feature_info.append({"num_chs": dim, "reduction": reduction, "module": f"stages.{index}"})
        self.stages = nn.ModuleList(stages)
        if init == "default":
            _draw_as_torch(self.stages)
        self.reset_classifier(num_classes, global_pool)

    def attention_kinds(self) -> tuple[str, ...]:
        """Kind of every block from first to last, read from the live modules."""
        return tuple(block.attention.kind for stage in self.stages for block in stage.blocks)  # type: ignore[union-attr]

    def forward_features(self, x: Tensor) -> Tensor:
        """Image [B, C, H, W] -> feature map [B, D, h, w] of the last stage."""
        for stage in self.stages:
            x = stage(x)
        return x

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Feature maps [B, D, h, w] of stages, timm's interface for dense prediction.

        `indices` are the last so many stages, chosen ones, or all (None). Every stage ends with a norm, so that `norm`
        changes nothing. With `intermediates_only` the last stage's map is not returned beside the list.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', not {output_fmt!r}")
        taken, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        for index, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if index in taken:
                intermediates.append(x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last of `indices` and, then or with `prune_head`, the head; the stages kept."""
        taken, last = feature_take_indices(len(self.stages), indices)
        pruned = last < len(self.stages) - 1
        self.stages = self.stages[: last + 1]
        if pruned:
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if pruned or prune_head:
            self.reset_classifier(0, "")
        return list(taken)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Feature map [B, D, h, w] -> logits [B, classes], or pooled features [B, D] with `pre_logits`."""
        if self.global_pool == "avg":
            x = x.mean((2, 3))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """The classification layer, an identity without classes."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a newly drawn one for `num_classes`; 0 removes it."""
        if global_pool is not None:
            if global_pool not in ("avg", ""):
                raise ValueError(f"global_pool must be 'avg' or '', not {global_pool!r}")
            self.global_pool = global_pool
        if num_classes > 0 and self.global_pool != "avg":
            raise ValueError("a classifier needs global_pool='avg'")
        self.num_classes = num_classes
        self.head: nn.Module = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        if isinstance(self.head, nn.Linear) and self.init == "trunc_normal":
            init_linear(self.head)
        self.head.to(next(self.stages.parameters()))  # its device and type

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of storing its activations."""
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's grouping of parameters by depth, for layer-wise learning rates."""
        stem = r"^stages\.0\.patch_embed"
        if coarse:
            return {"stem": stem, "blocks": r"^stages\.(\d+)"}
        return {"stem": stem, "blocks": [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^stages\.(\d+)", (0,))]}


def solver_residuals(model: nn.Module) -> float | None:
    """Largest ||I - P X||_F over all attention layers in the last forward; None if no layer solves anything.

    Infinite where a solver overflowed, NaN where one met NaN: neither is hidden by the maximum.
    """
    residuals = [
        residual.float().reshape(())
        for module in model.modules()
        if isinstance(residual := getattr(module, "solver_residual", None), Tensor)
    ]
    return float(torch.stack(residuals).max()) if residuals else None


def _mlp(dim: int, hidden: int) -> Mlp:
    mlp = Mlp(dim, hidden)
    init_linear(mlp.fc1)
    init_linear(mlp.fc2)
    return mlp


def _strided(size: int, kernel: int, stride: int) -> int:
    """Rows or columns that a patch embedding makes of `size` pixels."""
    return (size + 2 * (kernel // 2) - kernel) // stride + 1


def _draw_as_torch(module: nn.Module) -> None:
    """Draw linear layers and convolutions again as torch does by default, but for those of modules that say no."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        module.reset_parameters()
    elif not getattr(module, "keeps_its_start", False):
        for child in module.children():
            _draw_as_torch(child)
