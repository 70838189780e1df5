"""The DSA indexer: scores, causal top-k and the loss that trains it (imports no torch)."""
