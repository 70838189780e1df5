"""Mamba-3 (arXiv 2603.15569): the reference of everything between the two projections of an M layer."""
