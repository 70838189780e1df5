"""What each benchmark compares: one module an op, one for the layers."""
