"""Attention as a flow on the unit sphere: geometry, flows, action functionals and their Euler-Lagrange checks (P1)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngeo.variational.checks import analyze_sphere

__all__ = ["analyze_sphere"]


def __getattr__(name: str) -> Any:
    if name == "analyze_sphere":
        from attngeo.variational.checks import analyze_sphere

        return analyze_sphere
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
