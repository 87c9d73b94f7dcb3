"""What the kernel kinds share: projections, normalised rows with a scale, local convolution."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attngeo.errors import UserError
from attngeo.layers.attention import Attention, Grid, full_precision, init_linear, require_one_of
from attngeo.layers.local_convolution import LocalConvolution
from attngeo.ops.nystrom import NORMALIZATIONS, Normalization
from attngeo.ops.precision import product

ScaleStart = Literal["1/N", "one"]

SCALE_STARTS = get_args(ScaleStart)
EPS_RELATIVE, EPS_ABSOLUTE = 1e-3, 1e-12


class KernelAttention(Attention):
    """Z v + local convolution of v, where Z normalises the rows of kernel values between queries and keys.

    Queries are scaled by D^(-1/4) and turned by rotary angles. With `shared_query_key` (ours, after SOFT) keys are the
    queries; otherwise a second projection makes them. `eps_relative` and `eps_absolute` are the eps rule of the
    whitening. The injective forms multiply their whitened part by a scale per head that starts at 1/N (`scale_start`,
    ours; the text has none: "one") and is learned unless `learn_scale` is off.
    Kernel and statistics run in float32 under autocast. `backend` chooses the implementation of the operators.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        landmarks: Grid = (7, 7),
        rotary: bool = True,
        shared_query_key: bool = True,
        normalization: Normalization = "injective",
        eps_relative: float = EPS_RELATIVE,
        eps_absolute: float = EPS_ABSOLUTE,
        scale_start: ScaleStart = "1/N",
        learn_scale: bool = True,
        local_convolution: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, landmarks=landmarks, rotary=rotary)
        require_one_of("normalization", normalization, NORMALIZATIONS)
        require_one_of("scale_start", scale_start, SCALE_STARTS)
        if normalization != "injective" and (eps_relative, eps_absolute) != (EPS_RELATIVE, EPS_ABSOLUTE):
            raise UserError(
                f"normalization {normalization!r} whitens nothing that eps_relative or eps_absolute would count for",
                'choose normalization "injective", or leave them out',
            )
        if not normalization.startswith("injective") and (scale_start != "1/N" or not learn_scale):
            raise UserError(
                f"normalization {normalization!r} has no scale that scale_start or learn_scale would count for",
                'choose normalization "injective" or "injective_row", or leave them out',
            )
        self.normalization: Normalization = normalization
        self.eps_relative = eps_relative
        self.eps_absolute = eps_absolute
        self.scale_start = scale_start
        self.backend = backend
        self.query = init_linear(nn.Linear(dim, dim))
        self.key = None if shared_query_key else init_linear(nn.Linear(dim, dim))
        self.value = init_linear(nn.Linear(dim, dim))
        self.projection = init_linear(nn.Linear(dim, dim))
        self.local_convolution = LocalConvolution(dim) if local_convolution else None
        # In units of the start, so that the scale starts at 1/N on any grid.
        learned = learn_scale and normalization.startswith("injective")
        self.scale = nn.Parameter(torch.ones(heads)) if learned else None

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """Kernel values [B, H, N, M] of rows x [B, H, N, D] and y [B, H, M, D]; symmetric, 1 on the diagonal."""
        raise NotImplementedError

    def kernel_matmul(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """kernel(x, y) v; kinds with an operator for it override this."""
        return product(self.kernel(x, y), v)

    def features(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """Scaled and turned queries of tokens x [B, N, C] and, unless they are shared, keys: [B, H, N, D]."""
        query = self._feature(self.query(x), grid)
        return query, None if self.key is None else self._feature(self.key(x), grid)

    def head_scale(self, rows: Tensor) -> Tensor | None:
        """The scale [H] of the injective forms for N rows [B, H, N, D]; None for 1 and for the other forms."""
        unit = 1 if self.scale_start == "one" else rows.shape[-2]
        if self.scale is not None:
            return full_precision(self.scale) / unit
        if unit == 1 or not self.normalization.startswith("injective"):
            return None
        return rows.new_ones(self.heads) / unit

    def output(self, attended: Tensor, value: Tensor, grid: Grid) -> Tensor:
        """Heads [B, H, N, D] merged, the local convolution of value [B, N, C] added, projected: [B, N, C]."""
        out = self.merge_heads(attended).to(value.dtype)
        if self.local_convolution is not None:
            out = out + self.local_convolution(value, grid)
        projected: Tensor = self.projection(out)
        return projected

    def _feature(self, projected: Tensor, grid: Grid) -> Tensor:
        return self.rotate(full_precision(self.split_heads(projected)) * self.head_dim**-0.25, grid)
