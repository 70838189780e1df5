"""Token routing: each token's experts and probabilities, and the sums for the balancing losses (imports no torch)."""
