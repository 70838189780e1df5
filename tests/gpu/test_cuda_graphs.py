"""Runs with layers replayed as CUDA graphs, compared with the same runs without: equal losses, and receipts that record it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.observe import receipts
from megacpp_mcore.observe.receipts.fields import layers
from megacpp_mcore.observe.steps import read_steps
from tests.forks import PATIENCE_S
from tests.gpu import runs

STEPS = 6
GRAPHS = ("--cuda-graph-impl", "local")
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "mla": {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 64, "v_head_dim": 64},
    "mamba3": {"head_dim": 64, "state": 64, "mimo_rank": 4},
    "m2rnn": {"key_dim": 64, "value_dim": 16},
}
"""A small model of the sizes that kernels cover: no graph can hold a reference."""
SPARSE = {"pattern": "AEMEAMR", "depth": 7, "mtp": {"depth": 0}}
STAGES = {1: "AEAE|AMRA", 2: "AEA|ME|ARA|ME"}
"""Patterns of a pipeline of two by its virtual stages; a stage with two sparse layers has a Full one and its Shared one."""
CUT, DIVIDED = Layout(tensor=2, sequence_parallel=True), Layout(expert=2)
PACKED: tuple[dict[str, Any], tuple[str, ...]] = (
    # Without full MLA, of whose kernels only `triton` has a fixed order of sums; that has not been tried in graphs.
    {**SIZES, **SPARSE, "dsa": {"schedule": "FS", "indexer_head_dim": 64}},
    ("--deterministic-mode", "--dataloader-inter-document-masking"),
)
WHOLE: tuple[dict[str, Any], tuple[str, ...]] = ({**SIZES, "dsa": {"indexer_head_dim": 64}, "mtp": {"depth": 2}}, ())
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "packed": PACKED,
    "block": PACKED,
    "current": PACKED,
    "whole": WHOLE,
    "whole in FP8": WHOLE,
    "packed hybrid": PACKED,
    "whole hybrid": WHOLE,
}
HYBRID_CASES = ("packed hybrid", "whole hybrid")
"""Cases on HybridModel; the others are on GPTModel."""
FP8: dict[str, dict[str, Any]] = {
    recipe: {"fp8": {"recipe": recipe, "blanket": True}, "backends": {"routed_mlp": "triton_fp8", **more}}
    for recipe, more in (("block", {}), ("current", {"mamba3_projection": "triton_fp8"}))
}
"""Settings of the cases in FP8: scopes of every family that has one, routed experts, and once M's input projections."""
SETTINGS: dict[str, dict[str, Any]] = FP8 | {
    "whole in FP8": {
        "fp8": {"recipe": "current", "blanket": True, "mtp": True},
        "backends": dict.fromkeys(("routed_mlp", "mamba3_projection", "feed_forward"), "triton_fp8"),
    }
}
"""And with prediction, whose feed-forward layer and projection are in FP8, too."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)


def begin(
    folder: Path,
    corpus: str,
    overrides: dict[str, Any],
    *words: str,
    layout: Layout = runs.ALONE,
    processes: int = 1,
    model_class: str = GPT,
    **settings: Any,
) -> subprocess.Popen[str]:
    """A training that is under way, recorded in ``folder / "run"``."""
    folder.mkdir()
    model = with_overrides(preset("nam56r_tiny"), overrides)
    arguments = runs.words_of(
        model, *words, corpus=corpus, train_iters=STEPS, learning_rate=1e-3, global_batch_size=4, micro_batch_size=2,
        layout=layout, processes=processes, model_class=model_class,
    )  # fmt: skip
    file = folder / "megacpp.json"
    file.write_text(json.dumps({"model": "nam56r_tiny", "overrides": overrides, **settings}))
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [*runs.LAUNCH, "--nproc", str(processes), "--observe", str(folder / "run"), "--", *arguments],
            cwd=runs.ROOT,
            env=os.environ | {"MEGACPP_CONFIG": str(file)},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def trained(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """The folders of every case without and with graphs, trained side by side."""
    folder = tmp_path_factory.mktemp("graphs")
    runs = {
        (case, with_graphs): begin(
            folder / f"{case}_{with_graphs}",
            corpus,
            overrides,
            *words,
            *(GRAPHS if with_graphs else ()),
            model_class=HYBRID if case in HYBRID_CASES else GPT,
            **SETTINGS.get(case, {}),
        )
        for case, (overrides, words) in CASES.items()
        for with_graphs in (False, True)
    }
    for (case, with_graphs), run in runs.items():
        assert run.wait() == 0, (folder / f"{case}_{with_graphs}" / "log").read_text()[-6000:]
    return {(case, with_graphs): folder / f"{case}_{with_graphs}" for case, with_graphs in runs}


def scalars(folder: Path) -> list[dict[str, float]]:
    steps = [step.values() for step in read_steps(folder / "run")]
    assert len(steps) == STEPS
    return steps


def held(folder: Path) -> set[int | str]:
    """The layers that a run's receipt says graphs held."""
    rows = receipts.read(folder / "run")["backends"]
    held = [row["layers"] for row in rows if (row["op"], row["observed"]) == ("cuda_graph", "local")]
    return {layer for spans in held for layer in layers(spans)}


@pytest.mark.parametrize("case", ["packed", "packed hybrid", *FP8])
def test_replays_train_bit_for_bit_as_the_layers_do(trained: dict[tuple[str, bool], Path], case: str) -> None:
    eager, replayed = (trained[case, with_graphs] for with_graphs in (False, True))
    assert any(name.startswith("indexer") for name in scalars(eager)[0])
    assert scalars(replayed) == scalars(eager)
    loads = [receipts.read(folder / "run")["routing"]["layers"] for folder in (eager, replayed)]
    assert loads[0]
    assert loads[1] == loads[0]  # replays add to the routers' sums, what captures them does not
    if case in HYBRID_CASES:
        assert scalars(replayed) == scalars(trained["packed", True])
    if case in FP8:
        precisions = [receipts.read(folder / "run")["precision"] for folder in (eager, replayed)]
        assert scalars(replayed) != scalars(trained["packed", True])
        assert [precision["fp8_scopes"]["captured"] > 0 for precision in precisions] == [False, True]
        assert [precision["dequantised"] for precision in precisions] == [0, 0]
    if case != "packed":
        assert held(replayed) == set(range(1, len(SPARSE["pattern"]) + 1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (runs.ALONE, {}),
        (runs.ALONE, {"backends": {"routed_mlp": "triton_fp8", "mamba3_projection": "triton_fp8"}}),
        (DIVIDED, {}),
        (DIVIDED, {"backends": {"routed_mlp": "triton_fp8"}}),
        (CUT, {}),
        (CUT, {"fp8": {"recipe": "current", "blanket": True}, "backends": {"mamba3_projection": "triton_fp8"}}),
        (dataclasses.replace(CUT, expert=2), {}),
        (Layout(pipeline=2), {}),
        (Layout(pipeline=2, virtual=2), {"backends": {"routed_mlp": "triton_fp8", "mamba3_projection": "triton_fp8"}}),
    ],
    ids=[
        "replicas",
        "replicas, weights kept quantised",
        "divided experts",
        "divided experts in FP8",
        "tensor parallel",
        "tensor parallel, FP8 scopes",
        "tensor parallel and divided experts",
        "pipeline",
        "interleaved pipeline, weights kept quantised",
    ],
)
def test_replays_on_two_gpus_train_bit_for_bit_as_the_layers_do(
    corpus: str, tmp_path: Path, layout: Layout, settings: dict[str, Any]
) -> None:
    """Replicas with the distributed optimizer and both overlaps of data parallelism, whose hooks a replay has to call."""
    overrides, words = CASES["packed"]
    # Packed rows of several samples: their load is balanced one by one, and stages take other shapes.
    words += ("--micro-batch-size", "1") if layout.sequence_parallel or layout.pipeline > 1 else ()
    if layout.pipeline > 1:
        pattern = STAGES[layout.virtual]
        overrides = overrides | {"pattern": pattern, "depth": len(pattern.replace("|", ""))}
    eager, replayed = trained_on_two(corpus, tmp_path, overrides, words, GRAPHS, layout=layout, **settings)
    assert scalars(replayed) == scalars(eager)
    assert held(replayed) == set(range(1, overrides["depth"] + 1))


def trained_on_two(
    corpus: str, tmp_path: Path, overrides: dict[str, Any], words: tuple[str, ...], graphs: tuple[str, ...], **run: Any
) -> list[Path]:
    """The folders of a run without and with ``graphs``, trained side by side on the same two GPUs."""
    trainings = [
        begin(tmp_path / f"graphs {bool(more)}", corpus, overrides, *words, *more, processes=2, **run) for more in ((), graphs)
    ]
    folders = [tmp_path / f"graphs {with_graphs}" for with_graphs in (False, True)]
    for training, folder in zip(trainings, folders, strict=True):
        assert training.wait() == 0, (folder / "log").read_text()[-6000:]
    return folders


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_a_pipeline_replays_mixers_and_the_prediction_between_layers_that_are_not_captured(corpus: str, tmp_path: Path) -> None:
    """On HybridModel: one stage ends with a layer that is not captured, the next trains two depths in each micro-batch."""
    sizes, words = WHOLE
    overrides, words = sizes | {"pattern": "AEME|AEMEAEMR"}, (*words, "--micro-batch-size", "1")
    graphs = (*GRAPHS, "--cuda-graph-modules", "attn")
    layout = Layout(pipeline=2)
    eager, replayed = trained_on_two(corpus, tmp_path, overrides, words, graphs, layout=layout, model_class=HYBRID)
    assert_close(scalars(replayed), scalars(eager))
    assert captured(eager) == {}
    # A forward and a backward graph for each of four micro-batches; MTP's layer is applied at two depths.
    assert captured(replayed) == {"1, 3, 5, 7, 9, 11-12": "8 graphs", "mtp": "16 graphs"}


@pytest.mark.parametrize("case", ["whole", "whole in FP8", "whole hybrid"])
def test_replays_train_as_the_layers_do_with_full_attention_and_prediction(
    trained: dict[tuple[str, bool], Path], case: str
) -> None:
    eager, replayed = (trained[case, with_graphs] for with_graphs in (False, True))
    assert_close(scalars(replayed), scalars(eager))
    assert captured(eager) == {}
    # A forward and a backward graph a layer; MTP's layer is applied at two depths.
    assert captured(replayed) == {"1-12": "2 graphs", "mtp": "4 graphs"}
    for receipt in (receipts.read(folder / "run") for folder in (eager, replayed) if case in SETTINGS):
        assert ("feed_forward", "triton_fp8") in {(row["op"], row["observed"]) for row in receipt["backends"]}
        assert "MTP projection" in receipt["precision"]["kernel_fp8"]
        assert receipt["precision"]["dequantised"] == 0


def assert_close(replayed: list[dict[str, float]], eager: list[dict[str, float]]) -> None:
    """Of runs whose sums have no fixed order."""
    for before, after in zip(eager[:2], replayed[:2], strict=True):  # step 2 is the first of replays
        assert after == pytest.approx(before, rel=1e-3)
    for before, after in zip(eager, replayed, strict=True):  # what sums in another order makes of a few steps
        assert after["lm loss"] == pytest.approx(before["lm loss"], rel=0.05)
    assert replayed[-1]["lm loss"] < replayed[0]["lm loss"]


def captured(folder: Path) -> dict[str, str]:
    """How many graphs a run's receipt says that its layers have, of those to be captured."""
    rows = [row for row in receipts.read(folder / "run")["backends"] if row["op"] == "cuda_graph"]
    return {row["layers"]: row["reason"] for row in rows if (row["requested"], row["observed"]) == ("local", "local")}


def test_a_resumed_run_with_evaluations_replays_as_the_whole_one(corpus: str, tmp_path: Path) -> None:
    """Its first step after the checkpoint is not a replay, where the whole run's is."""
    overrides, words = CASES["packed"]
    words += ("--split", "90,10,0", "--eval-iters", "1", "--eval-interval", "2", "--save-interval", str(STEPS // 2))
    words += ("--ckpt-format", "torch_dist", "--save", str(tmp_path / "saved"))
    load = ("--load", str(tmp_path / "saved"), "--ckpt-step", str(STEPS // 2))
    for name, more in (("whole", ()), ("resumed", load)):
        assert begin(tmp_path / name, corpus, overrides, *words, *GRAPHS, *more).wait() == 0, (
            tmp_path / name / "log"
        ).read_text()[-6000:]
        assert any(row["op"] == "cuda_graph" for row in receipts.read(tmp_path / name / "run")["backends"])
    uninterrupted, resumed = (
        {step.step: step.values() for step in read_steps(tmp_path / name / "run")} for name in ("whole", "resumed")
    )
    assert list(uninterrupted) == list(range(1, STEPS + 1))
    assert resumed == {step: uninterrupted[step] for step in range(STEPS // 2 + 1, STEPS + 1)}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_a_run_that_fails_with_collectives_in_its_graphs_ends(corpus: str, tmp_path: Path) -> None:
    """NCCL destroys no communicator while a graph holds a collective of it. Step 1 makes weights whose products overflow."""
    overrides, words = CASES["packed"]
    words += ("--micro-batch-size", "1", "--lr", "1e38", "--lr-warmup-iters", "0", "--rerun-mode", "disabled")
    run = begin(tmp_path / "run", corpus, overrides, *words, *GRAPHS, layout=CUT, processes=2)
    try:
        assert run.wait(timeout=PATIENCE_S) != 0
    finally:
        run.terminate()  # which ends its ranks, too
    assert "the loss of the local forward pass is NaN" in (tmp_path / "run" / "log").read_text()
    assert read_steps(tmp_path / "run" / "run")


def test_a_backend_that_no_graph_can_hold_ends_the_run_before_its_first_step(corpus: str, tmp_path: Path) -> None:
    sizes, _ = CASES["whole"]
    run = begin(tmp_path / "run", corpus, sizes, *GRAPHS, backends={"mamba3": "reference"})
    assert run.wait() != 0
    log = (tmp_path / "run" / "log").read_text()
    assert "reference" in log
    assert "a CUDA graph cannot hold it" in log
    assert not read_steps(tmp_path / "run" / "run")


@pytest.mark.parametrize(
    ("kind", "rerun", "says"),
    [
        (
            "weight",
            ("--rerun-mode", "disabled"),
            ["no parameter was updated; rank 0: ", "the first layer whose output is not finite is layer 6 (M)"],
        ),
        (
            "layer gradient",
            ("--rerun-mode", "disabled"),
            ["no parameter was updated; rank 0: ", "went wrong in layer 6 (M): the gradients of "],
        ),
        (
            "weight",
            (),
            [
                "step 2: the loss of the local forward pass is NaN; rank 0: the layer is named as the step runs again",
                "as the step is run again, the output of layer 6 (M) is the first that is not finite",
            ],
        ),
    ],
)
def test_a_replay_that_is_not_finite_stops_the_run_before_the_update_and_names_the_layer(
    corpus: str, tmp_path: Path, kind: str, rerun: tuple[str, ...], says: list[str]
) -> None:
    """From step 2 on, the first of replays."""
    overrides, words = CASES["packed"]
    model = with_overrides(preset("nam56r_tiny"), overrides)
    arguments = runs.words_of(
        model, *words, *GRAPHS, *rerun, corpus=corpus, train_iters=STEPS, learning_rate=1e-3,
        global_batch_size=4, micro_batch_size=1, layout=runs.ALONE, processes=1,
    )  # fmt: skip
    (tmp_path / "megacpp.json").write_text(json.dumps({"model": "nam56r_tiny", "overrides": overrides}))
    ended = subprocess.run(
        [*runs.PYTHON, "tests.patches.non_finite", f"M, {kind}, nan", str(tmp_path / "found"), *arguments],
        cwd=runs.ROOT,
        env=os.environ | {"MEGACPP_CONFIG": str(tmp_path / "megacpp.json"), "DEVICE": "cuda"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "CUDA graphs (local) of layers" in output
    for words_said in says:
        assert words_said in output, output[-6000:]
    assert (tmp_path / "found.0").read_text() == "True"
