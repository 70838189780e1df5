"""The operators of NAM56R: for each a plain-PyTorch reference, our kernels and thin adapters to vendor ones."""
