"""Multiply-accumulates of one inverse of an M x M matrix; residuals are diagnosis and not counted."""


def conjugate_gradient_macs(size: int, iterations: int) -> int:
    """One product an iteration; the sums and updates of columns, of order M^2, are not counted."""
    return iterations * size**3
