"""The decision rules of the ledger, by paper: pure functions from the records that bear on a claim to a finding."""

from attngeo.paper.decisions import connection_walk, fiber_bundle, laplacian, variational  # noqa: F401 (registers)
from attngeo.paper.decisions.rule import DECISIONS, Finding, Lacking, Number, Outcome, optional_rows

__all__ = ["DECISIONS", "Finding", "Lacking", "Number", "Outcome", "optional_rows"]
