"""Packed sequences: where each row of a packed batch stands in its sequence (imports no torch)."""
