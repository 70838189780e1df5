"""Linear cross-entropy: output projection and per-token loss without materialising all logits (imports no torch)."""
