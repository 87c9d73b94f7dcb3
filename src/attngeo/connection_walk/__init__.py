"""Attention read as a walk on a graph whose edges transport vectors: claims P3.a to P3.f on pretrained models.

`analyze` measures one model and returns a tidy frame; the rest are its parts: `walk` (graph, gates, the walk itself),
`transport` (isometry of heads and edges), `stationarity` (graphs through depth), `nulls` and `identities`.
"""

from attngeo.connection_walk.analysis import COLUMNS, analyze

__all__ = ["COLUMNS", "analyze"]
