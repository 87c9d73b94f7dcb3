"""What a model costs and what its attention can represent."""
