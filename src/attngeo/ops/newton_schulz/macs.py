"""Multiply-accumulates of one inverse of an M x M matrix; residuals are diagnosis and not counted."""


def newton_schulz_macs(size: int, iterations: int) -> int:
    """Two products an iteration."""
    return 2 * iterations * size**3


def spd_macs(size: int) -> int:
    """M^3 in all: a third for the root or the elimination, two thirds for the inverse."""
    return size**3
