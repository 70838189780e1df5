"""Packed sequences: documents, and the position of each row in its sequence (imports no torch)."""
