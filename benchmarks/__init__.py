"""Benchmarks: scripts that measure on a named machine and write their figures to ``benchmarks/results``."""
