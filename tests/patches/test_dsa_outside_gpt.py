"""The patch dsa-index-cache outside of a GPT model's blocks, as in HybridModel: what stock takes, and stock's results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megacpp_mcore.patches.dsa_index_cache import PATCH
from tests import stock
from tests.dsa_layer import dsa_attention, dsa_config, layer_inputs, run_layer

PERIODIC = {"dsa_indexer_topk_freq": 2}


def outputs() -> list[torch.Tensor]:
    """Of a Full layer and of its Shared one, and the gradients of their queries."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config, found = dsa_config(num_layers=2, **PERIODIC), []
    for number in (1, 2):
        attention, inputs = dsa_attention(config, number), layer_inputs(24, 2, seed=number)
        assert (attention.indexer is None, attention.source_layer) == (number == 2, 1)
        found.append(run_layer(attention, inputs))
        found.append(torch.autograd.grad(found[-1].sum(), inputs["query"])[0])
    return found


def test_layers_share_as_in_stock(process: Path) -> None:
    expected = outputs()
    with stock.patched(PATCH):
        assert all(map(torch.equal, outputs(), expected))


@pytest.mark.parametrize("packed", [False, True])
def test_indices_are_where_stock_keeps_them(process: Path, packed: bool) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    with stock.patched(PATCH):
        attention = dsa_attention(dsa_config(num_layers=2, **PERIODIC), 2)
        mask, documents = torch.empty(1), PackedSeqParams(qkv_format="thd")
        given = (documents if packed else None, mask)
        for holder, name in (
            (attention._get_index_share_topk_holder(*given), attention._HOLDER_ATTR),
            (attention._get_index_share_topk_length_holder(*given), attention._LENGTH_HOLDER_ATTR),
        ):
            assert holder is getattr(documents if packed else mask, name)


def test_a_configuration_of_what_stock_reads_is_checked_by_stock(process: Path) -> None:
    """It has no ``num_layers``."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    config = SimpleNamespace(
        experimental_attention_variant="dsa", dsa_indexer_topk_freq=4, dsa_indexer_skip_topk_offset=1
    )
    with stock.patched(PATCH):
        specs._validate_dsa_index_share_pipeline_split(config, [0, 1, 2, 3])
        with pytest.raises(RuntimeError, match="pipeline split is invalid"):
            specs._validate_dsa_index_share_pipeline_split(config, [1, 2, 3, 4])
