"""The versions of other software that this package is made for, each of them once; setup.py reads this file, too.

Fingerprints of Megatron's functions are with the patches that replace them: ``patch status`` says which of them have changed.
"""

PYTHON = ">=3.12"
TORCH = ">=2.11,<2.12"
"""With 2.14 and 2.15 a training on the CPU ends in its first step."""
MEGATRON_CORE = ">=0.19,<0.20"
MEGATRON_CORE_TESTED = ("0.19.1", "0.19.2")
"""Releases whose functions have the fingerprints of the patches."""
CHECKOUT_TAG = "core_v0.19.0"
"""Megatron-LM's tag of the scripts, flags and defaults that are lowered to and read."""
MEGATRON_BRIDGE = "0.6.2"
TRITON_DIRECT = "3.6"
"""The release of Triton whose launcher is called without its look-up (:mod:`megacpp_mcore.ops.triton_launch`)."""
