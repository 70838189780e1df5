"""Datasets for training: text to Megatron's indexed format, its manifest and checks, and scores in bits per byte."""
