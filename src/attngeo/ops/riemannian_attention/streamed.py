"""Attention by distance over blocks of queries and keys: an online softmax forward, recomputed blocks backward.

A score is an inner product of features minus squares of low-rank projections (README), so nothing N x M is ever kept.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attngeo.ops.precision import product, without_autocast

# Pairs of one block over all batches and heads, and its keys: on a CPU its scores and projections then stay in the
# second cache (fastest of 2^14 to 2^18 pairs, 128 to 1,024 keys), on a GPU a block keeps all processors busy.
CPU_PAIRS, CPU_COLUMNS = 1 << 17, 256
GPU_PAIRS, GPU_COLUMNS = 1 << 24, 1024
LEAST_ROWS = 32


class Mask(NamedTuple):
    """Which keys a query sees; query i stands at position i + `offset` among the keys."""

    causal: bool
    window: int | None
    offset: int

    def span(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """The keys [begin, end) that any of the queries first .. last - 1 sees."""
        begin, end = 0, keys
        if self.window is not None:
            begin = max(0, first + self.offset - self.window + 1)
            end = min(end, last + self.offset + self.window - 1)
        if self.causal:
            end = min(end, last + self.offset)
        return begin, max(begin, end)

    def hidden(self, rows: range, columns: range, device: torch.device) -> Tensor | None:
        """[rows, columns], True where a key is not seen; None where all are."""
        first, last = rows[0] + self.offset - columns[-1], rows[-1] + self.offset - columns[0]
        ahead = self.causal and first < 0
        beyond = self.window is not None and (last >= self.window or (not self.causal and -first >= self.window))
        if not ahead and not beyond:
            return None
        position = torch.arange(rows.start, rows.stop, device=device) + self.offset
        distance = position[:, None] - torch.arange(columns.start, columns.stop, device=device)
        hidden = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        return hidden if self.window is None else hidden | (distance.abs() >= self.window)


class Scores(NamedTuple):
    """s_ij = x_i . y_j - sum_r (row_factor_ir . y_point_j)^2 - sum_r (x_point_i . column_factor_jr)^2.

    x [Z,N,F], y [Z,M,F]; row_factor [Z,N,R,D] with y_point [Z,M,D]; x_point [Z,N,D] with column_factor [Z,M,R,D];
    factors with R = 0 cost nothing. Z counts batches times heads.
    """

    x: Tensor
    y: Tensor
    row_factor: Tensor
    y_point: Tensor
    x_point: Tensor
    column_factor: Tensor


def attend(scores: Scores, value: Tensor, seen: Tensor | None, mask: Mask) -> Tensor:
    """softmax_j(s_ij) v_j [Z,N,V] for value [Z,M,V]; `seen` [Z,M] is False where no query sees a key.

    A query that sees no key gives zeros.
    """
    output, _ = _Streamed.apply(*scores, value, seen, mask)
    return output


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, value, seen, mask = inputs
        return _forward(Scores(*tensors), value, seen, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, seen, mask = inputs
        ctx.mask = mask
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, seen, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, value, seen, output, log_sum = ctx.saved_tensors
        with without_autocast(grad):
            found = _backward(Scores(*tensors), value, seen, ctx.mask, output, log_sum, grad)
        return (*found, None, None)


def _forward(scores: Scores, value: Tensor, seen: Tensor | None, mask: Mask) -> tuple[Tensor, Tensor]:
    """The output and the logarithm of each row's sum of exponentials, infinite where no key is seen."""
    outputs, log_sums = [], []
    for rows, blocks in _blocks(scores, mask):
        top = scores.x.new_full((scores.x.shape[0], len(rows), 1), -torch.inf)
        total = torch.zeros_like(top)
        mixed = value.new_zeros(value.shape[0], len(rows), value.shape[2])
        for columns in blocks:
            block, *_ = _block(scores, rows, columns, seen, mask)
            raised = torch.maximum(top, block.amax(-1, keepdim=True))
            # Where nothing was seen so far, the maximum is -inf: 0 in its place leaves every weight 0.
            level = raised.masked_fill(raised == -torch.inf, 0.0)
            weights = block.sub_(level).exp_()
            fade = (top - level).exp()
            total = total * fade + weights.sum(-1, keepdim=True)
            mixed = mixed * fade + product(weights, _cut(value, columns))
            top = raised
        empty = total == 0
        outputs.append(mixed / total.masked_fill(empty, 1.0))
        log_sums.append((top + total.log()).masked_fill(empty, torch.inf))
    if not outputs:
        return value.new_zeros(value.shape[0], 0, value.shape[2]), scores.x.new_zeros(scores.x.shape[0], 0, 1)
    return torch.cat(outputs, 1), torch.cat(log_sums, 1)


def _backward(
    scores: Scores, value: Tensor, seen: Tensor | None, mask: Mask, output: Tensor, log_sum: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    found = Scores(*(torch.zeros_like(tensor) for tensor in scores))
    grad_value = torch.zeros_like(value)
    mean_grad = (grad * output).sum(-1, keepdim=True)
    for rows, blocks in _blocks(scores, mask):
        row_grad = _cut(grad, rows)
        for columns in blocks:
            block, row_projection, column_projection = _block(scores, rows, columns, seen, mask)
            weights = block.sub_(_cut(log_sum, rows)).exp_()
            _cut(grad_value, columns).add_(product(weights.mT, row_grad))
            slope = product(row_grad, _cut(value, columns).mT).sub_(_cut(mean_grad, rows)).mul_(weights)
            _cut(found.x, rows).add_(product(slope, _cut(scores.y, columns)))
            _cut(found.y, columns).add_(product(slope.mT, _cut(scores.x, rows)))
            twice = slope.mul_(-2.0).unsqueeze(2)
            if row_projection is not None:
                change = row_projection.mul_(twice).flatten(1, 2)
                point, factor = _cut(scores.y_point, columns), _cut(scores.row_factor, rows)
                _cut(found.row_factor, rows).add_(product(change, point).view_as(factor))
                _cut(found.y_point, columns).add_(product(change.mT, factor.flatten(1, 2)))
            if column_projection is not None:
                change = column_projection.mul_(twice).flatten(2, 3)
                point, factor = _cut(scores.x_point, rows), _by_rank(scores.column_factor, columns)
                _cut(found.x_point, rows).add_(product(change, factor))
                by_rank = product(change.mT, point).unflatten(1, (-1, len(columns)))
                _cut(found.column_factor, columns).add_(by_rank.transpose(1, 2))
    return (*found, grad_value)


def _block(
    scores: Scores, rows: range, columns: range, seen: Tensor | None, mask: Mask
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores [Z,n,m] of a block, -inf where hidden, and the projections [Z,n,R,m] of its queries' and keys' factors."""
    block = product(_cut(scores.x, rows), _cut(scores.y, columns).mT)
    row_projection = column_projection = None
    if scores.row_factor.shape[2]:
        factor = _cut(scores.row_factor, rows).flatten(1, 2)
        row_projection = product(factor, _cut(scores.y_point, columns).mT).unflatten(1, (len(rows), -1))
    if scores.column_factor.shape[2]:
        factor = _by_rank(scores.column_factor, columns)
        column_projection = product(_cut(scores.x_point, rows), factor.mT).unflatten(2, (-1, len(columns)))
    for projection in (row_projection, column_projection):
        if projection is not None:
            for part in projection.unbind(2):
                block.addcmul_(part, part, value=-1.0)
    hidden = mask.hidden(rows, columns, block.device)
    if hidden is not None:
        block.masked_fill_(hidden, -torch.inf)
    if seen is not None:
        block.masked_fill_(~_cut(seen, columns).unsqueeze(1), -torch.inf)
    return block, row_projection, column_projection


def _blocks(scores: Scores, mask: Mask) -> Iterator[tuple[range, list[range]]]:
    """Blocks of queries, each with the blocks of keys that it sees."""
    depth, queries, keys = scores.x.shape[0], scores.x.shape[1], scores.y.shape[1]
    on_gpu = scores.x.device.type == "cuda"
    pairs, columns = (GPU_PAIRS, GPU_COLUMNS) if on_gpu else (CPU_PAIRS, CPU_COLUMNS)
    rows = max(LEAST_ROWS, pairs // max(1, depth * columns))
    for first in range(0, queries, rows):
        last = min(first + rows, queries)
        begin, end = mask.span(first, last, keys)
        yield range(first, last), [range(start, min(start + columns, end)) for start in range(begin, end, columns)]


def _cut(tensor: Tensor, part: range) -> Tensor:
    return tensor[:, part.start : part.stop]


def _by_rank(factor: Tensor, part: range) -> Tensor:
    """[Z,M,R,D] -> [Z,R*m,D] of a block: one product then gives the projections in the order of ranks."""
    return _cut(factor, part).transpose(1, 2).flatten(1, 2)
