"""Imported by the hook line in a checkout; as users' files contain that line, this module must keep its name."""

from megacpp_mcore.patches.machinery.import_hook import install

__all__ = ["install"]
