"""What layers give that end a pipeline stage or chunk, where CUDA graphs hold them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from megacpp_mcore.layer_specs import graphs
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.settings import VARIABLE
from tests import stock
from tests.layer_specs.test_graphs import plan


@pytest.mark.parametrize(
    ("pattern", "rank", "ends"),
    [("AEME|AEMEAEMR", 0, [4]), ("AE|MEAE|MEA|EMR", 0, [2, 9]), ("AE|MEAE|MEA|EMR", 1, [6])],
)
def test_the_layer_that_ends_a_stage_gives_a_copy_of_what_its_graph_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pattern: str, rank: int, ends: list[int]
) -> None:
    """The last one of all does not; layers of later chunks have their own number and family."""
    overrides = {"pattern": pattern, "dsa": {"schedule": "-"}, "mtp": {"depth": 0}}
    file = tmp_path / "megacpp.json"
    file.write_text(json.dumps({"model": "nam56r_tiny", "overrides": overrides}))
    monkeypatch.setenv(VARIABLE, str(file))
    model = with_overrides(preset("nam56r_tiny"), overrides)
    layout = Layout(pipeline=2, virtual=pattern.count("|") // 2 + 1)
    with (
        stock.one_rank(rank, 2, layout),
        mock.patch("megacpp_mcore.layer_specs.nam56r.graph_plan", return_value=plan(model)),
        mock.patch("megacpp_mcore.policy.ranks.compare"),
        mock.patch.object(graphs, "GraphManager"),
    ):
        chunks = stock.build_on_meta(model, layout, 2)
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    for layer in layers:
        assert layer.family == stock.family(layer) == model.layers[layer.layer_number - 1]
    layers[0].config.cuda_graph_impl = "local"
    made = torch.ones(4, requires_grad=True) * 2
    with mock.patch.object(graphs.GraphLayer, "run_captured", return_value=(made, None)):
        outputs = {layer.layer_number: layer(hidden_states=made)[0] for layer in layers}
    assert all(torch.equal(output, made) for output in outputs.values())
    copies = [number for number, output in outputs.items() if output.data_ptr() != made.data_ptr()]
    assert copies == ends
