"""Experiments on the Fiber Bundle Transformer (arXiv 2608.01283), which its paper leaves to others."""
