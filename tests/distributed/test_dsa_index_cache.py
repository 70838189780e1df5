"""The patch dsa-index-cache in two-process pipelines, 1F1B and interleaved, against tests/patches' reference, in fp32."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import stock
from tests.patches import test_dsa_index_cache as unit

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

MICRO_BATCHES, LAYERS = 4, 8
PIPELINES: Mapping[str, tuple[int | None, str, str, str]] = {
    "1F1B": (None, "FSSSFSFS", "dsa_index_cache: {schedule: FSSSFSFS}\n", "selective"),
    "interleaved": (2, "FSFSFSFS", "", "full, layer by layer"),
}
"""Virtual stages, the roles of the layers, the file that says them (without one every second shares), what is recomputed."""


def config_of(name: str) -> Any:
    virtual, _, text, recompute = PIPELINES[name]
    return unit.transformer_config(
        layers=LAYERS,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        # As stock's arguments set them.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        dsa_indexer_topk_freq=1 if text else 2,
        **unit.RECOMPUTE[recompute],
    )


def chunks(config: Any) -> list[Any]:
    from megatron.core import parallel_state

    def ends(vp_stage: int | None) -> dict[str, bool]:
        where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
        first, last = parallel_state.is_pipeline_first_stage(**where), parallel_state.is_pipeline_last_stage(**where)
        return {"pre_process": first, "post_process": last}

    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else range(virtual)
    return [unit.build(config, stage, **ends(stage)) for stage in stages]


def run(config: Any, masked: bool) -> dict[str, Any]:
    """One step of stock's pipeline schedule; what this rank saw and computed."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Helper

    Helper.tracker.clear()
    Helper.tracker["values"] = torch.zeros(LAYERS)
    models, spy = chunks(config), unit.Spy()
    events: list[int] = []

    def step(numbers: Iterator[int], model: Any) -> Any:
        output = unit.losses_of(model, next(numbers), unit.causal_mask() if masked else None)
        events.append(1)
        output.register_hook(lambda _: events.append(-1))
        return output, lambda losses: (losses.mean(), {})

    with spy.watching(*models):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(range(MICRO_BATCHES)) for _ in models],
            model=models,
            num_microbatches=MICRO_BATCHES,
            seq_length=unit.S,
            micro_batch_size=unit.B,
            forward_only=False,
        )
    values = Helper.tracker["values"].clone()
    logged: dict[str, torch.Tensor] = {}
    Helper.track_indexer_metrics(1 / MICRO_BATCHES, 1, None, None, logged)
    return {
        "gradients": unit.gradients(*models),
        "first": spy.first,
        "again": spy.again,
        "in flight": max(itertools.accumulate(events)) // len(models),
        "values": values,
        "logged": logged["indexer loss"],
    }


def main(folder: Path) -> dict[str, Any]:
    """What :func:`run` returned of each pipeline, on one rank; a mask is given to the first."""
    results: dict[str, Any] = {}
    for name, (virtual, _, text, _) in PIPELINES.items():
        sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": virtual}
        with (
            stock.one_process(folder / f"store of {name}", **sizes),
            stock.patched(unit.PATCH),
            mock.patch.dict(os.environ),
        ):
            stock.restart_random()
            stock.loss_scale(1.0)
            if text:
                os.environ["MEGACPP_CONFIG"] = str(folder / f"{os.environ['RANK']}.yaml")
                Path(os.environ["MEGACPP_CONFIG"]).write_text(text)
            results[name] = run(config_of(name), masked=bool(text))
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return stock.on_ranks("tests.distributed.test_dsa_index_cache", 2, tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="module")
def process(results: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stock Megatron in this process, for the reference; after the workers, which are done by then."""
    with stock.one_process(tmp_path_factory.mktemp("reference") / "store"):
        stock.restart_random()
        stock.loss_scale(1 / MICRO_BATCHES)
        yield


@pytest.mark.parametrize("name", PIPELINES)
def test_every_gradient(process: None, results: list[dict[str, Any]], name: str) -> None:
    ranks = [result[name] for result in results]
    assert max(rank["in flight"] for rank in ranks) >= 2
    first = ranks[0]["first"] | ranks[1]["first"]
    again = ranks[0]["again"] | ranks[1]["again"]
    assert sorted(first) == [f"d{number}" for number in range(1, LAYERS + 1)]
    sources = unit.sources_of(PIPELINES[name][1])
    unit.Spy(first, again).check(sources, range(MICRO_BATCHES))
    for shared, full in sources.items():
        assert len(again.get(shared, [])) == MICRO_BATCHES
        different = itertools.combinations([index.sort().values for index in first[full]], 2)
        assert not any(torch.equal(one, other) for one, other in different)
    found = ranks[0]["gradients"] | ranks[1]["gradients"]
    assert len(found) == len(ranks[0]["gradients"]) + len(ranks[1]["gradients"])
    scale = 1 / MICRO_BATCHES
    expected = unit.reference_gradients(first, sources, MICRO_BATCHES, scale, layers=LAYERS)
    assert unit.differing(expected, found, sources) == []


def test_logged_loss_is_the_mean_over_the_full_layers_of_all_stages(results: list[dict[str, Any]]) -> None:
    for name, (_, roles, *_) in PIPELINES.items():
        ranks = [result[name] for result in results]
        values = sum(rank["values"] for rank in ranks)
        assert values.nonzero().flatten().tolist() == [i for i, role in enumerate(roles) if role == "F"]
        expected = values.sum().item() / (roles.count("F") * MICRO_BATCHES)
        assert [rank["logged"].item() for rank in ranks] == pytest.approx([expected] * 2, rel=1e-6)
