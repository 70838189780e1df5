"""The fixtures that the tests of the patches share."""

from tests.patches.throwaway import modules

__all__ = ["modules"]
