"""Where the time of a few steps goes, by block family and phase. No torch at import."""

from megacpp_mcore.observe.profile.profiler import FamilyRanges, Profiler

__all__ = ["FamilyRanges", "Profiler"]
