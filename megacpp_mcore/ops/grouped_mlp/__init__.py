"""Grouped experts: one two-matrix MLP per expert over tokens sorted by expert (imports no torch)."""
