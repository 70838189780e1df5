"""Checkpoints: the layout that they state, and one rewritten for another DSA schedule."""
