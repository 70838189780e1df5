"""The input projection of a Mamba-3 mixer: one product with all parts, or the wide ones in FP8 (imports no torch)."""
