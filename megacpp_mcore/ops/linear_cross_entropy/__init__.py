"""Linear cross-entropy: the output projection and the loss of each token, without its logits (imports no torch)."""
