"""Checkpoints: their recorded layout, and rewriting one for another DSA schedule."""
