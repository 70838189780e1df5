"""Sparse MLA: absorbed multi-query attention over the keys that a DSA indexer selected (imports no torch)."""
