"""Utilities shared by all parts of the package: files, flags, type checks, nearest names. Standard library only."""
