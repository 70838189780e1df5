"""Benchmarks of whole models: scripts that train on a named machine and write their figures to ``benchmarks/results``.

Those of ops and layers are in the package (:mod:`megacpp_mcore.bench`, the command ``megacpp-mcore bench``).
"""
