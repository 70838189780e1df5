"""Grouped product of FP8 operands with block scales, forward: the experts' GEMM of DeepGEMM (imports no torch).

No layer uses it: with the torch that this package needs, DeepGEMM's grouped calls fail
(:data:`megacpp_mcore.ops.grouped_fp8.deep_gemm.SEEN_WORKING`).
"""
