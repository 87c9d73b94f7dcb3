"""Plain transformers whose attention and feed-forward are chosen by name: images, and tokens in one row.

The paper (arXiv 2608.01283) names the parts of a Fiber Bundle Transformer and no sizes; every size here is ours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from timm.layers import LayerNorm, Mlp, SwiGLU, trunc_normal_
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.layers.attention import Grid, init_linear
from attngeo.layers.fiber_feed_forward import FiberFeedForward
from attngeo.layers.masked_softmax import MaskedSoftmaxAttention
from attngeo.layers.registry import build_attention
from attngeo.layers.riemannian import RiemannianAttention
from attngeo.models.fiber_bundle_sizes import VIT_SIZES, ViTSize
from attngeo.models.pyramid import PatchEmbed

Wiring = Literal["pure", "skip", "skip_mlp"]
FeedForward = Literal["mlp", "gated", "fiber"]

# Parameters of models that are compared agree within this share.
MATCHED_WITHIN = 0.01


@dataclass(frozen=True)
class Variant:
    """What a name stands for: the attention layer with its options, the feed-forward, heads as a multiple."""

    attention: type[nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    feed_forward: FeedForward = "mlp"
    times_heads: int = 1


def _distance(geometry: str, **options: Any) -> Variant:
    return Variant(RiemannianAttention, {"geometry": geometry, **options})


VARIANTS: dict[str, Variant] = {
    "dot": Variant(MaskedSoftmaxAttention),
    "more_heads": Variant(MaskedSoftmaxAttention, times_heads=2),
    "gated": Variant(MaskedSoftmaxAttention, feed_forward="gated"),
    "euclidean": _distance("euclidean"),
    "constant": _distance("constant"),
    "heterogeneous": _distance("heterogeneous"),
    "fiber": Variant(RiemannianAttention, {"geometry": "heterogeneous", "transport": True}, "fiber"),
}


def variant_of(name: str) -> Variant:
    """The variant of that name; UserError naming those there are."""
    if name not in VARIANTS:
        raise UserError(f"no variant is called {name!r}", f"choose one of {', '.join(VARIANTS)}")
    return VARIANTS[name]


class WiredBlock(nn.Module):
    """Pre-norm block of tokens [B, N, C]: attention with or without a skip, then a feed-forward or none.

    x <- attention(norm x), or x <- x + attention(norm x); then x <- x + feed_forward(norm x).
    """

    def __init__(self, dim: int, attention: nn.Module, feed_forward: nn.Module | None, *, skip: bool) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.attention = attention
        self.skip = skip
        self.norm2 = LayerNorm(dim) if feed_forward is not None else None
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        mixed = self.attention(self.norm1(x), grid)
        x = x + mixed if self.skip else mixed
        if self.feed_forward is None or self.norm2 is None:
            return x
        return x + self.feed_forward(self.norm2(x))


class Trunk(nn.Module):
    """Blocks of one width and a final norm: tokens [B, N, C] on a grid -> [B, N, C].

    `variant` is one of `VARIANTS`; its `options` go to the attention layers on top of the variant's own. `hidden` is
    the feed-forward's width, 4 C without it. `wiring` takes away, for studies of rank collapse: "skip" has no
    feed-forward, "pure" neither feed-forward nor skip.
    """

    def __init__(
        self,
        variant: str,
        dim: int,
        depth: int,
        heads: int,
        *,
        hidden: int | None = None,
        wiring: Wiring = "skip_mlp",
        rank: int = 2,
        causal: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if wiring not in get_args(Wiring):
            raise UserError(f"wiring is {wiring!r}", f"choose one of {', '.join(get_args(Wiring))}")
        chosen = variant_of(variant)
        self.variant = variant
        self.wiring = wiring
        own = dict(chosen.options) | ({"causal": True} if causal else {}) | dict(options or {})
        if issubclass(chosen.attention, RiemannianAttention):
            own = {"rank": rank} | own
        # Called by its place, so that the registry's checks of options hold here too.
        place = f"{chosen.attention.__module__}:{chosen.attention.__name__}"
        feed_forwards: list[nn.Module | None] = [
            _feed_forward(chosen.feed_forward, dim, 4 * dim if hidden is None else hidden, rank)
            if wiring == "skip_mlp"
            else None
            for _ in range(depth)
        ]
        self.blocks = nn.ModuleList(
            WiredBlock(
                dim,
                build_attention(place, dim, chosen.times_heads * heads, landmarks=(7, 7), **own),
                feed_forward,
                skip=wiring != "pure",
            )
            for feed_forward in feed_forwards
        )
        self.norm = LayerNorm(dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        for block in self.blocks:
            x = block(x, grid)
        return self.norm(x)

    def states(self, x: Tensor, grid: Grid) -> list[Tensor]:
        """The residual stream by depth: what goes in, and what comes out of every block; each [B, N, C]."""
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1], grid))
        return found


class TokenTransformer(nn.Module):
    """Token ids [B, N] -> logits [B, N, vocabulary], N up to `context`: a decoder if `causal`, else an encoder.

    Learned positions are added to the embedding, beside the rotary ones of the attention layers; the head shares no
    weights with the embedding. UserError for more tokens than the context.
    """

    def __init__(
        self, variant: str, *, vocabulary: int, context: int, dim: int, depth: int, heads: int, **trunk: Any
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.zeros(context, dim))
        # Tokens of length about 1 a feature: at 0.02 the norms of the blocks would hide it, but not skips without one.
        trunc_normal_(self.embedding.weight, std=1.0)
        trunc_normal_(self.position, std=0.5)
        self.trunk = Trunk(variant, dim, depth, heads, **trunk)
        self.head = init_linear(nn.Linear(dim, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(self.embed(tokens), (1, tokens.shape[1])))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings with positions [B, N, C]."""
        if tokens.shape[1] > self.context:
            raise UserError(f"{tokens.shape[1]} tokens are more than the context of {self.context}", "raise context")
        return self.embedding(tokens) + self.position[: tokens.shape[1]]

    def states(self, tokens: Tensor) -> list[Tensor]:
        """The residual stream by depth; each [B, N, C]."""
        return self.trunk.states(self.embed(tokens), (1, tokens.shape[1]))


class FiberViT(nn.Module):
    """Plain vision transformer with 2-D rotary positions and average pooling, behind timm's model interface.

    The patch embedding is a convolution one pixel wider than its stride, so that padding is even and any height and
    width from 1 px are accepted. `form` is one of `VARIANTS` (timm keeps that
    word to itself). UserError for an unknown one, and for an unknown wiring or option.
    """

    pretrained_cfg: dict[str, Any]  # timm's, set by its builder

    def __init__(
        self,
        size: ViTSize,
        form: str = "fiber",
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        img_size: int | Sequence[int] | None = None,
        **trunk: Any,
    ) -> None:
        super().__init__()
        self.size = size
        self.img_size = size.image_size if img_size is None else img_size
        self.num_features = self.head_hidden_size = size.dim
        self.patch_embed = PatchEmbed(in_chans, size.dim, size.patch + 1, size.patch)
        self.trunk = Trunk(form, size.dim, size.depth, size.heads, **trunk)
        self.reset_classifier(num_classes, global_pool)

    def forward_features(self, x: Tensor) -> Tensor:
        """Image [B, C, H, W] -> tokens [B, N, D] behind the last norm."""
        tokens, grid = self.patch_embed(x)
        return self.trunk(tokens, grid)

    def states(self, x: Tensor) -> list[Tensor]:
        """The residual stream by depth; each [B, N, D]."""
        return self.trunk.states(*self.patch_embed(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens [B, N, D] -> logits [B, num_classes], or the pooled features."""
        if self.global_pool:
            x = x.mean(1)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head; 0 classes give the features. UserError for a pooling that there is not."""
        if global_pool not in (None, "avg", ""):
            raise UserError(f"global_pool is {global_pool!r}", 'choose "avg" or ""')
        self.num_classes = num_classes
        self.global_pool = getattr(self, "global_pool", "avg") if global_pool is None else global_pool
        self.head = init_linear(nn.Linear(self.num_features, num_classes)) if num_classes else nn.Identity()
        self.head.to(next(self.patch_embed.parameters()))

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay beside vectors: none."""
        return set()


def vision_transformer(size: str = "micro", variant: str = "fiber", **options: Any) -> FiberViT:
    """A plain vision transformer of a size in `VIT_SIZES`, without timm's builder; UserError for another size."""
    if size not in VIT_SIZES:
        raise UserError(f"no size is called {size!r}", f"choose one of {', '.join(VIT_SIZES)}")
    return FiberViT(VIT_SIZES[size], variant, **options)


def parameters_at(make: Callable[[int], nn.Module], hidden: int) -> int:
    """Number of parameters of the model that `make` builds at a hidden width; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        return sum(parameter.numel() for parameter in make(hidden).parameters())


def matched_hidden(make: Callable[[int], nn.Module], target: int, *, within: float = MATCHED_WITHIN) -> int:
    """The hidden width at which `make(hidden)` has the number of parameters nearest to `target`.

    Parameters grow by the same number with every hidden unit. ValueError where no width is within that share of the
    target: the layers besides the feed-forward are too large by themselves, or there is no feed-forward.
    """
    first, second = (parameters_at(make, hidden) for hidden in (1, 2))
    if second == first:
        raise ValueError("the hidden width changes no parameter: there is no feed-forward to match by")
    best = max(1, 1 + round((target - first) / (second - first)))
    found = parameters_at(make, best)
    if abs(found - target) > within * target:
        raise ValueError(f"no hidden width gives {target} parameters within {within:.0%}: {best} gives {found}")
    return best


def _feed_forward(name: FeedForward, dim: int, hidden: int, rank: int) -> nn.Module:
    if name == "fiber":
        return FiberFeedForward(dim, hidden, rank=rank)
    mlp = SwiGLU(dim, hidden) if name == "gated" else Mlp(dim, hidden)
    for layer in mlp.modules():
        if isinstance(layer, nn.Linear):
            init_linear(layer)
    return mlp
