"""How often tensor-parallel ranks send each other rows of the hidden size: by family, in a forward and a backward pass."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_mcore.model import Layout, preset
from tests import stock

pytestmark = pytest.mark.slow

RANKS, S, B, D = 2, 64, 2, 128
OVERRIDES = {"pattern": "AEMR", "depth": 4, "dsa": {"schedule": "-"}, "mtp": {"depth": 1}, "seq_length": S}
GATHER, SCATTER = "_allgather_base_", "_reduce_scatter_base_"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """The collectives of both passes, by family."""
    sent: dict[str, list[list[str]]]
    sent, _ = stock.on_ranks("tests.distributed.test_sent_rows", RANKS, tmp_path_factory.mktemp("sent"))
    return sent


@pytest.mark.parametrize(
    ("part", "rows"),
    [("M", [GATHER, SCATTER]), ("R", [GATHER, SCATTER]), ("E", []), ("MTP's projection", [])],
)
def test_what_is_cut_gathers_its_input_and_scatters_its_output_and_what_is_whole_sends_nothing(
    found: dict[str, list[list[str]]], part: str, rows: list[str]
) -> None:
    assert found[part] == [rows, rows]


class _Sent(TorchDispatchMode):
    """Notes collectives of at least a rank's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
            if max(one.numel() for one in tensors) >= S // RANKS * B * D:
                self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def sent(run: Any, *rows: torch.Tensor) -> list[list[str]]:
    """The collectives of ``run`` and of its backward pass."""
    with _Sent() as forward:
        output = run(*rows)
    output = output[0] if isinstance(output, tuple) else output
    with _Sent() as backward:
        output.backward(torch.ones_like(output))
    return [forward.names, backward.names]


def main(folder: Path) -> dict[str, list[list[str]]]:
    (own := folder / os.environ["RANK"]).mkdir()
    layout = Layout(tensor=RANKS, sequence_parallel=True)
    with stock.one_process(folder / "store", tensor_model_parallel_size=RANKS):
        model = stock.build(OVERRIDES, preset("nam56r_tiny"), own, layout=layout).train()
        rows = [torch.randn(S // RANKS, B, D).requires_grad_() for _ in range(2)]
        made = {
            stock.family(layer): sent(lambda x, layer=layer: layer(x, attention_mask=None), rows[0])
            for layer in model.decoder.layers
        }
        return made | {"MTP's projection": sent(model.mtp.layers[0]._concat_embeddings, *rows)}
