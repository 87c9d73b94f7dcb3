"""The streamed form of attention by distance: its checks, and the factors in which a distance is a few products."""

import torch
from torch import Tensor

from attngeo.ops import backend as _backend
from attngeo.ops.inputs import check_count, check_tensors
from attngeo.ops.precision import compute_dtype, product, result_dtype, without_autocast
from attngeo.ops.riemannian_attention.naive import Metric
from attngeo.ops.riemannian_attention.streamed import Mask, Scores, attend

_OP = "riemannian_attention"


def riemannian_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    U: Tensor,
    tau: Tensor,
    *,
    metric: Metric = "query",
    causal: bool = False,
    window: int | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """softmax_j(-d_ij^2 / (2 tau)) v_j, d_ij^2 = (q_i - k_j)^T (diag(a) + U U^T) (q_i - k_j): [B,H,N,V] (P4).

    q [B,H,N,D], k [B,H,M,D], v [B,H,M,V], tau [H] > 0. The metric is the query's (a [B,H,N,D], U [B,H,N,D,R]), the
    key's (M in place of N), the mean of both (N = M), or one for all (constant: a [B or 1,H or 1,D], U [..,D,R]).
    Query i stands at position i + M - N of the keys; `causal` hides later ones, `window` those `window` or more away,
    `key_mask` [B,M] those where it is False. A query that sees no key gives zeros. Memory is linear in N + M, forward
    and backward; no second derivatives.
    """
    check_tensors(_OP, q=q, k=k, v=v, a=a, U=U, tau=tau)
    _check_shapes(q, k, v, a, U, tau, metric, key_mask)
    if window is not None:
        check_count(_OP, "window", window)
    _backend.resolve(_OP, "naive", q, k, v, a, U)
    dtype, result = compute_dtype(q, k, v, a, U), result_dtype(q, k, v, a, U)
    q, k, v, a, U, tau = (tensor.to(dtype) for tensor in (q, k, v, a, U, tau))
    with without_autocast(q):
        if key_mask is not None:
            # What stands in padding is never seen: not even what is not finite.
            hidden = ~key_mask[:, None, :, None]
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
            if metric == "key":
                a, U = a.masked_fill(hidden, 1.0), U.masked_fill(hidden.unsqueeze(-1), 0.0)
        centre = _centre(k, key_mask)
        scores = _FACTORS[metric](q - centre, k - centre, a, U, tau[:, None, None])
        seen = None if key_mask is None else key_mask[:, None].expand(-1, q.shape[1], -1).flatten(0, 1)
        flat = Scores(*(tensor.flatten(0, 1) for tensor in scores))
        mixed = attend(flat, v.flatten(0, 1), seen, Mask(causal, window, k.shape[-2] - q.shape[-2]))
        return mixed.unflatten(0, q.shape[:2]).to(result)


def _centre(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """The mean key [B,H,1,D]: distances do not depend on the origin, and near it products lose the fewest digits."""
    k = k.detach()
    count = k.shape[-2] if key_mask is None else key_mask.sum(-1)[:, None, None, None]
    return torch.nan_to_num(k.sum(-2, keepdim=True) / count, posinf=0.0, neginf=0.0)


def _raised(a: Tensor, U: Tensor, x: Tensor) -> Tensor:
    """G x for a [..,D], U [..,D,R], x [..,D]."""
    return a * x + product(U, product(U.mT, x.unsqueeze(-1))).squeeze(-1)


def _query_factors(q: Tensor, k: Tensor, a: Tensor, U: Tensor, tau: Tensor) -> Scores:
    """-d^2 / (2 tau) up to what is the same for all keys: (G q) . k - a . k^2 / 2 - |U^T k|^2 / 2, over tau."""
    x = torch.cat([_raised(a, U, q), -0.5 * a], -1) / tau
    y = torch.cat([k, k.square()], -1)
    factor = U.mT / (2.0 * tau.unsqueeze(-1)).sqrt()
    return Scores(x, y, factor, k, q, k.new_zeros(*k.shape[:-1], 0, k.shape[-1]))


def _key_factors(q: Tensor, k: Tensor, a: Tensor, U: Tensor, tau: Tensor) -> Scores:
    """(G k) . q - a . q^2 / 2 - |U^T q|^2 / 2 - k . G k / 2, over tau, with the key's metric."""
    raised = _raised(a, U, k)
    x = torch.cat([q, q.square(), torch.ones_like(q[..., :1])], -1)
    y = torch.cat([raised, -0.5 * a, -0.5 * (k * raised).sum(-1, keepdim=True)], -1) / tau
    factor = U.mT / (2.0 * tau.unsqueeze(-1)).sqrt()
    return Scores(x, y, q.new_zeros(*q.shape[:-1], 0, q.shape[-1]), k, q, factor)


def _mean_factors(q: Tensor, k: Tensor, a: Tensor, U: Tensor, tau: Tensor) -> Scores:
    """Half of both."""
    query, key = _query_factors(q, k, a, U, 2.0 * tau), _key_factors(q, k, a, U, 2.0 * tau)
    x, y = torch.cat([query.x, key.x], -1), torch.cat([query.y, key.y], -1)
    return Scores(x, y, query.row_factor, k, q, key.column_factor)


def _constant_factors(q: Tensor, k: Tensor, a: Tensor, U: Tensor, tau: Tensor) -> Scores:
    """(G q) . k - k . G k / 2, over tau: one product of a width of D + 1."""
    a, U = a.unsqueeze(-2), U.unsqueeze(-3)
    x = torch.cat([_raised(a, U, q) / tau, torch.ones_like(q[..., :1])], -1)
    y = torch.cat([k, -0.5 * (k * _raised(a, U, k)).sum(-1, keepdim=True) / tau], -1)
    return Scores(x, y, q.new_zeros(*q.shape[:-1], 0, 1), k, q, k.new_zeros(*k.shape[:-1], 0, 1))


_FACTORS = {"query": _query_factors, "key": _key_factors, "mean": _mean_factors, "constant": _constant_factors}


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, U: Tensor, tau: Tensor, metric: str, key_mask: Tensor | None
) -> None:
    if metric not in _FACTORS:
        raise ValueError(f"{_OP}: metric must be one of {', '.join(_FACTORS)}, not {metric!r}")
    leading, width = q.shape[:2], q.shape[-1:]
    if q.dim() != 4 or k.dim() != 4 or v.shape[:3] != k.shape[:3] or k.shape[:2] != leading or k.shape[-1:] != width:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ValueError(f"{_OP}: q [B,H,N,D], k [B,H,M,D] and v [B,H,M,V] do not fit together: {shapes}")
    if metric == "mean" and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"{_OP}: metric='mean' needs as many queries as keys, not {q.shape[-2]} and {k.shape[-2]}")
    owner = k if metric == "key" else q
    wanted = (*leading, *width) if metric == "constant" else tuple(owner.shape)
    fits = U.shape[:-1] == a.shape and len(a.shape) == len(wanted) and a.shape[2:] == wanted[2:]
    if not fits or any(have not in (1, want) for have, want in zip(a.shape[:2], leading, strict=False)):
        raise ValueError(
            f"{_OP}: metric={metric!r} needs a {list(wanted)} and U of that shape with R more, "
            f"not {tuple(a.shape)} and {tuple(U.shape)}"
        )
    if tau.shape != leading[1:]:
        raise ValueError(f"{_OP}: tau must have one number a head, shape {tuple(leading[1:])}, not {tuple(tau.shape)}")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (leading[0], k.shape[-2])):
        wanted_mask = (leading[0], k.shape[-2])
        raise ValueError(f"{_OP}: key_mask must be bool {wanted_mask}, not {key_mask.dtype} {tuple(key_mask.shape)}")
