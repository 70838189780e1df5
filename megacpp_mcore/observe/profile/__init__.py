"""Where the time of a few steps goes, by block family and phase. No torch at import."""

from megacpp_mcore.observe.profile.profiler import EXTERNAL, FOLDER, INTERNAL, Profiler, check_device, on_gpu

__all__ = ["EXTERNAL", "FOLDER", "INTERNAL", "Profiler", "check_device", "on_gpu"]
