"""Checkpoints between versions of this package: the layout they state, and the conversion of 0.1.0's."""
