"""Pretrained transformers opened up: loading from a folder, where each family keeps its weights, streamed capture."""
