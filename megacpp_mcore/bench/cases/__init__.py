"""The comparison of each benchmark: one module per op, one for the layers."""
