"""Versions of other software that this package supports, each stated once; setup.py reads this file, too.

Whether a patch fits is decided by its fingerprints: ``patch status`` lists those that have changed.
"""

PYTHON = ">=3.12"
TORCH = ">=2.11,<2.16"
"""All of this ran on GPUs with 2.11; with 2.12 to 2.15 only the CPU tests did."""
MEGATRON_CORE = ">=0.19,<0.21"
"""Releases 0.19.0 and 0.19.2, and Megatron-LM's main of 2026-08-22, which calls itself 0.20.0."""
MEGATRON_CORE_DEMO = "0.19.2"
"""The release that the extra `demo` and the locked environments pin."""
CHECKOUT_TAG = "core_v0.19.0"
"""The Megatron-LM tag of the scripts, flags and defaults that this package reads and lowers to."""
MEGATRON_BRIDGE = "0.6.2"
TRITON_DIRECT = "3.6"
"""The release of Triton that the kernels were tuned and run with on GPUs; launches skip its argument look-up
(:mod:`megacpp_mcore.ops.triton_launch`)."""
TRITON: dict[str, dict[str, dict[str, int]]] = {
    TRITON_DIRECT: {},
    "3.7": {"mamba3": {"mimo_rank": 4, "state": 128}},
    "3.8": {"sparse_mla": {"qk_dim": 576}},
    "3.9": {"mamba3": {"mimo_rank": 4, "state": 128}},
}
"""The releases of Triton with which the kernels compile for sm_90, and per op the sizes at which they spill registers."""
