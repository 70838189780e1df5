"""The Transformer Engine bridge: a typed wrapper for each part that is used, behind :mod:`megacpp_mcore.util.te_imports`.

====================  ================================================================================================
module                contents
====================  ================================================================================================
:mod:`~.specs`        feature to class, or None where the feature is off or unavailable
:mod:`~.dot_product`  DotProductAttention with an op's arguments, and what it does not support
:mod:`~.block`        LayerNormLinear + DotProductAttention + Linear + LayerNormMLP as one attention block
:mod:`~.linear`       replaces the dense linear layers of a built model, and reports which it left and why
:mod:`~.fp8_scopes`   FP8 scopes: recipe, BF16 zone, amax group, recompute owner
:mod:`~.quantized`    recognises quantised tensors, and counts those that are dequantised
====================  ================================================================================================

Nothing here depends on an op, and nothing imports torch or Transformer Engine before it is used.
"""
