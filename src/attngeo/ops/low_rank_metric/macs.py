"""Multiply-accumulates of one token's metric, and of the distance of all pairs in it."""


def solve_macs(channels: int, rank: int) -> int:
    """Of `solve` for one token: the R x R Gram matrix, two products with U, the root."""
    return channels * rank**2 + 2 * channels * rank + rank**3


def pairwise_macs(rows: int, columns: int, channels: int, rank: int, metric: str) -> int:
    """Of `pairwise_squared_distance`: R + 2 products of tokens with tokens, twice for the mean of both metrics."""
    products = (rank + 2) * (2 if metric == "mean" else 1)
    return products * rows * columns * channels
