"""The comparison of each benchmark: modules by op, or by ops that are compared alike; one for the layers."""
