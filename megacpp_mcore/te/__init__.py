"""The Transformer Engine bridge: one import firewall, and a typed wrapper for each thing of it that is used.

====================  ================================================================================================
module                what it has
====================  ================================================================================================
:mod:`~.imports`      the firewall: availability, switches by feature, and every entry point by its name
:mod:`~.specs`        feature to class, or None where the feature is off or not there
:mod:`~.attention`    DotProductAttention as an op takes it, and what it cannot do
:mod:`~.block`        LayerNormLinear + DotProductAttention + Linear + LayerNormMLP as one attention block
:mod:`~.linear`       replaces the dense linear layers of a built model, and says what it left and why
:mod:`~.precision`    FP8 scopes: recipe, BF16 zone, amax group, recompute owner
:mod:`~.quantized`    recognises quantised tensors, and counts those that are dequantised
====================  ================================================================================================

No op is known here, and nothing imports torch or Transformer Engine before it is used.
"""
