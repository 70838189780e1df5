"""The versions of other software that this package is made for, each of them once; setup.py reads this file, too.

Whether a patch fits is a question of the fingerprints that it holds: ``patch status`` says which have changed.
"""

PYTHON = ">=3.12"
TORCH = ">=2.11,<2.16"
"""On GPUs all of this ran with 2.11; with 2.12 to 2.15 the tests on the CPU did."""
MEGATRON_CORE = ">=0.19,<0.21"
"""Releases 0.19.0 and 0.19.2, and Megatron-LM's main of 2026-08-22, which calls itself 0.20.0."""
MEGATRON_CORE_DEMO = "0.19.2"
"""The release that the extra `demo` and the locked environments have."""
CHECKOUT_TAG = "core_v0.19.0"
"""Megatron-LM's tag of the scripts, flags and defaults that are lowered to and read."""
MEGATRON_BRIDGE = "0.6.2"
TRITON_DIRECT = "3.6"
"""The release of Triton that the kernels were tuned and run with on GPUs, and whose launcher is called without its look-up
(:mod:`megacpp_mcore.ops.triton_launch`)."""
TRITON: dict[str, dict[str, dict[str, int]]] = {
    TRITON_DIRECT: {},
    "3.7": {"mamba3": {"mimo_rank": 4, "state": 128}},
    "3.8": {"sparse_mla": {"qk_dim": 576}},
    "3.9": {"mamba3": {"mimo_rank": 4, "state": 128}},
}
"""The releases of Triton with which the kernels compile for sm_90, and by op the sizes for which they spill registers there."""
