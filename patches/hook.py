"""What the hook line in a checkout imports; that line stands in files of users, so this module keeps its name."""

from megacpp_mcore.patches.machinery.hook import install

__all__ = ["install"]
