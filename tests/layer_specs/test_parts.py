"""The parts of layers without Transformer Engine: what stock has in it alone is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.backends import probes
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.parts import TorchNorm, parts_for
from tests.errors import raises


@pytest.mark.parametrize(
    ("field", "setting", "value"),
    [
        ("quant_recipe", object(), "--te-precision-config-file"),
        ("moe_permute_fusion", True, "--moe-permute-fusion"),
        ("moe_router_fusion", True, "--moe-router-fusion"),
        ("tp_comm_overlap", True, "--tp-comm-overlap"),
        ("cpu_offloading", True, "--cpu-offloading-num-layers"),
        ("use_transformer_engine_op_fuser", True, "--use-transformer-engine-op-fuser"),
    ],
)
def test_what_stock_has_in_transformer_engine_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, setting: Any, value: str
) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, transformer_impl="transformer_engine"
    )
    monkeypatch.setenv(probes.DISABLE_TE, "1")
    assert parts_for(config).norm is TorchNorm
    assert config.transformer_impl == "transformer_engine"
    setattr(config, field, setting)
    with raises(ModelError, value, "MEGACPP_DISABLE_TE=1"):
        parts_for(config)
    config.transformer_impl = "local"
    monkeypatch.delenv(probes.DISABLE_TE)
    assert parts_for(config).norm is TorchNorm
