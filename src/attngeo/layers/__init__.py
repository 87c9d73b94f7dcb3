"""Attention kinds and feed-forwards with parameters; importing the package itself needs no torch."""
