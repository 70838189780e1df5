"""Functions of Megatron whose contract our layers rely on without replacing them, with the sources that were read for it."""

from __future__ import annotations

_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
SOURCES = {
    # What an input norm may return, and how mixers and experts are called.
    f"{_LAYER}._forward_attention": (
        "257c7c162bd0e11d97baeedcaae09375a7787c942cfd6fb50093d8ca248f92e4",
        "cd954b04f33b9ab8cf1f3750da002779e841f7dfe3ee929ec031b24716f197cc",
    ),
    f"{_LAYER}._forward_mlp": (
        "04ae2df5a64af9d6878cf8b2b090863d0664b2303e71047b00b82426e6b3de8e",
        "c3fba511c02adfa2254de89bb115294316267f5a0d10c046a0b38cd53ca164b5",
    ),
    # How a hybrid model builds its stack, and the stack its layers and MTP.
    "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__": (
        "e7cf7dec1dc7a10d0b969820ea3f93d7a6a7452c136db28f5d9b90d6220eb19f",
        "c7b4e92511b7eebe7eecd45f79cd4068c62f7a3bdfad7a8ddb9706f61a178c0a",
    ),
    "megatron.core.models.hybrid.hybrid_block:HybridStack.forward": (
        "debd25cfb08e553de2d3b056a8034e3f455eb800df518ab4fb93059cfddb10f5",
    ),
    # The layer that RepeatedLayer is.
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__": (
        "2c81012ef48203c3733fe4c03da9971eb133bd3eeb6cae451ac19f6859bc6d93",
        "f6e6af68979108ede246c0053f4a1530b83a2a6227b1f3ba84191f7416158455",
    ),
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.forward": (
        "09140b455726abb5531e8c7d16468bb6b285166806017adaa86383818779139c",
    ),
}
