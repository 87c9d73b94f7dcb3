"""Multiply-accumulates of one token's metric, and of the distance of all pairs in it."""


def solve_macs(channels: int, rank: int) -> int:
    """Of `solve` for one token: the R x R Gram matrix, two products with U, the root."""
    return channels * rank**2 + 2 * channels * rank + rank**3


def logdet_macs(channels: int, rank: int) -> int:
    """Of `logdet` for one token: the R x R Gram matrix and its root."""
    return channels * rank**2 + rank**3


def quadratic_form_macs(channels: int, rank: int) -> int:
    """Of `quadratic_form` for one token: the diagonal, R projections and their squares."""
    return channels * (rank + 1) + rank


def inverse_quadratic_form_macs(channels: int, rank: int) -> int:
    """Of `inverse_quadratic_form` for one token: as `logdet`, then a projection and a triangular solve."""
    return logdet_macs(channels, rank) + channels * (rank + 1) + rank**2


def square_root_macs(channels: int, rank: int) -> int:
    """Of `square_root` for one token: the Gram matrix, its eigenproblem (as 10 R^3, ours), two products with U."""
    return channels * rank**2 + 10 * rank**3 + 2 * channels * rank + rank**2


def pairwise_macs(rows: int, columns: int, channels: int, rank: int, metric: str) -> int:
    """Of `pairwise_squared_distance`: R + 2 products of tokens with tokens, twice for the mean of both metrics."""
    products = (rank + 2) * (2 if metric == "mean" else 1)
    return products * rows * columns * channels
