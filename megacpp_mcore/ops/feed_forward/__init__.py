"""A dense feed-forward layer with GELU: two products by PyTorch, or all six of its training in FP8 (imports no torch)."""
