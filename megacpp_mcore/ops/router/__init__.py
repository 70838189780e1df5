"""Routing of tokens: the experts of each, their probabilities, and the sums that balancing losses are made of (no torch)."""
