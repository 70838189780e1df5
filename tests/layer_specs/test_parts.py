"""The parts of layers without Transformer Engine: what stock has in it alone is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.backends import probes
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.parts import TorchNorm, parts_for


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("quant_recipe", object(), "FP8 experts, which Megatron .* leave --te-precision-config-file out"),
        ("moe_permute_fusion", True, "fused permutation of tokens, .* leave --moe-permute-fusion out"),
        ("moe_router_fusion", True, "a fused router, .* leave --moe-router-fusion out"),
        ("tp_comm_overlap", True, "overlapped tensor-parallel communication, .* leave --tp-comm-overlap out"),
        ("cpu_offloading", True, "activations on the host, .* leave --cpu-offloading-num-layers out"),
        ("use_transformer_engine_op_fuser", True, "fused operations, .* --use-transformer-engine-op-fuser out"),
    ],
)
def test_what_stock_has_in_transformer_engine_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, message: str
) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, transformer_impl="transformer_engine"
    )
    monkeypatch.setenv(probes.DISABLE_TE, "1")
    assert parts_for(config).norm is TorchNorm
    assert config.transformer_impl == "transformer_engine"
    setattr(config, field, value)
    with pytest.raises(ModelError, match=f"the run asks for {message}, or unset the variable"):
        parts_for(config)
    config.transformer_impl = "local"
    monkeypatch.delenv(probes.DISABLE_TE)
    assert parts_for(config).norm is TorchNorm
