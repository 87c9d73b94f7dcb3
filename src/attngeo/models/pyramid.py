"""One pyramid backbone; the attention kind is chosen by name and runs in every stage."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from timm.layers import DropPath, LayerNorm, Mlp, calculate_drop_path_rates, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attngeo.errors import UserError
from attngeo.layers.attention import Grid, init_linear
from attngeo.layers.fiber_feed_forward import FiberFeedForward
from attngeo.layers.registry import attention_options as accepted_options
from attngeo.layers.registry import build_attention
from attngeo.models.sizes import PyramidSize

FeedForward = Literal["mlp", "fiber"]


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
    """Pyramid vision transformer with 2-D rotary positions and one attention kind, behind timm's model interface.

    `attention` is a registered kind or "path/to/file.py:Class"; `attention_options` go to its constructor.
    `feed_forward` is "mlp" or "fiber" (preconditioned by a per-token metric of rank `fiber_rank`). `img_size` (px)
    is only noted: any height and width from 1 px on are accepted. UserError for an unknown kind or option.

    On the sizes that share one projection between queries and keys, a kind that does so gets C / 2 more hidden units in
    each MLP, about the C^2 weights that it saves (ours), so that softmax, Gaussian and Laplacian models of one size
    have the same number of parameters within 5 %. The Riemannian kind and the fiber feed-forward (fiberformer) are not
    matched: their token metrics come on top.
    """

    def __init__(
        self,
        size: PyramidSize,
        attention: str,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        global_pool: str = "avg",
        attention_options: Mapping[str, Any] | None = None,
        feed_forward: FeedForward = "mlp",
        fiber_rank: int = 2,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if feed_forward not in ("mlp", "fiber"):
            raise UserError(f"model option feed_forward is {feed_forward!r}", "choose mlp or fiber")
        self.size = size
        self.in_chans = in_chans
        chosen = size.image_size if img_size is None else img_size
        self.img_size: tuple[int, int] = (chosen, chosen) if isinstance(chosen, int) else (chosen[0], chosen[1])
        self.num_features = self.head_hidden_size = size.dims[-1]
        self.feature_info = []
        options = dict(attention_options or {})
        landmarks = options.pop("landmarks", size.landmarks)
        landmarks = (landmarks, landmarks) if isinstance(landmarks, int) else (int(landmarks[0]), int(landmarks[1]))
        if "shared_query_key" in accepted_options(attention):
            options.setdefault("shared_query_key", size.shared_query_key)
        # One projection for queries and keys saves C^2 weights a block, as many as C / 2 hidden units of the MLP have.
        compensated = size.shared_query_key and options.get("shared_query_key", False)

        drop_path_rates = calculate_drop_path_rates(drop_path_rate, list(size.depths), stagewise=True)
        stages = []
        channels, reduction = in_chans, 1
        for index, dim in enumerate(size.dims):
            hidden = dim * size.mlp_ratios[index] + (dim // 2 if compensated else 0)
            blocks = [
                Block(
                    dim,
                    build_attention(attention, dim, size.heads[index], landmarks=landmarks, **options),
                    _mlp(dim, hidden) if feed_forward == "mlp" else FiberFeedForward(dim, hidden, rank=fiber_rank),
                    drop_path,
                )
                for drop_path in drop_path_rates[index]
            ]
            embed = PatchEmbed(channels, dim, size.patch_kernels[index], size.patch_strides[index])
            stages.append(Stage(embed, blocks, dim))
            channels, reduction = dim, reduction * size.patch_strides[index]
            self.feature_info.append({"num_chs": dim, "reduction": reduction, "module": f"stages.{index}"})
        self.stages = nn.ModuleList(stages)
        self.reset_classifier(num_classes, global_pool)

    def attention_kinds(self) -> tuple[str, ...]:
        """Kind of every block from first to last, read from the live modules."""
        return tuple(block.attention.kind for stage in self.stages for block in stage.blocks)  # type: ignore[union-attr]

    def forward_features(self, x: Tensor) -> Tensor:
        """Image [B, C, H, W] -> feature map [B, D, h, w] of the last stage."""
        for stage in self.stages:
            x = stage(x)
        return x

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
        self.head: nn.Module = (
            init_linear(nn.Linear(self.num_features, num_classes)) if num_classes > 0 else nn.Identity()
        )

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
