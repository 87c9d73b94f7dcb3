"""Attention as a flow on the unit sphere: geometry, flows, action functionals and their Euler-Lagrange checks (P1)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngeo.variational.checks import analyze_sphere
    from attngeo.variational.trajectories import analyze_trajectories

__all__ = ["analyze_sphere", "analyze_trajectories"]


def __getattr__(name: str) -> Any:
    if name == "analyze_sphere":
        from attngeo.variational.checks import analyze_sphere

        return analyze_sphere
    if name == "analyze_trajectories":
        from attngeo.variational.trajectories import analyze_trajectories

        return analyze_trajectories
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
