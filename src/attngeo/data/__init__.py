"""Embedded data and models, packed image sets and the loaders that read them."""
