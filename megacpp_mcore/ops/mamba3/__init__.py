"""Mamba-3 (arXiv 2603.15569): everything between the two projections of an M layer."""
