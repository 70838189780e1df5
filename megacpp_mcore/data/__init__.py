"""Datasets for training: text to Megatron's indexed format, manifests and their checks, and scores in bits per byte."""
