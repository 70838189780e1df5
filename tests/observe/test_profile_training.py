"""Profiles a real tiny run: its time is attributed, also under recompute, and training is unaffected.

Run as a program this file is the run, on a GPU as well (tests/gpu/test_profile.py): ``FOLDER FAMILY COMMAND``.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.model import preset, with_overrides
from megacpp_mcore.observe import events, goodput
from megacpp_mcore.observe.steps import read_steps
from tests import stock, tiny_run

STEPS = 3
ON_CPU = {"seq_length": 64}
"""Of the model on a CPU: shorter rows have fewer operators, and all families of them."""


def words(*extra: str, iterations: int = STEPS, **training: Any) -> list[str]:
    """The stock words of a run of nam56r_tiny on mock data, on a CPU unless ``training`` says otherwise."""
    model = with_overrides(preset("nam56r_tiny"), ON_CPU if training.get("device", "cpu") == "cpu" else {})
    return stock.words(model, *extra, train_iters=iterations, **({"global_batch_size": 2} | training))


def train(
    folder: Path,
    run_words: list[str],
    *,
    window: str | None = "2-2",
    device: str = "cpu",
    slow: str = "",
    settings: str = "",
) -> None:
    """Run this file as a program, the steps ``window`` profiled, layers of the family ``slow`` slowed down."""
    folder.mkdir()
    overrides = f"overrides: {json.dumps(ON_CPU)}\n" if device == "cpu" else ""
    (folder / "config.yaml").write_text("model: nam56r_tiny\n" + overrides + settings)
    profile = () if window is None else ("--profile", window)
    options = ("--device", device, "--observe", str(folder), *profile)
    program = ("tests.observe.test_profile_training", str(folder), slow, "launch", *options, "--")
    tiny_run.start(program, run_words, folder).finish()


def table(folder: Path, window: str = "2-2") -> dict[str, Any]:
    """The table of the run in ``folder``."""
    profile: dict[str, Any] = json.loads((folder / "profile" / window / "table.json").read_text())
    return profile


def _main(folder: str, slow: str, *arguments: str) -> int:
    """Give ``arguments`` to the command line; what the profiler must not change is noted in ``hooks.json``."""
    from megacpp_mcore.commands import cli
    from megacpp_mcore.observe.events import Listener
    from megacpp_mcore.observe.loop import Loop

    class Slow(Listener):
        """Slows down every layer of a family."""

        def on_model(self, chunks: Any, optimizer: Any) -> None:
            from megacpp_mcore.observe.profile.ranges import family

            for module in chunks[0].modules():
                if hasattr(module, "layer_number") and hasattr(module, "self_attention") and family(module) == slow:
                    _slow_down(module.self_attention if slow != "E" else module.mlp)

    class Hooks(Listener):
        """Counts the installed hooks and replacements by step."""

        def __init__(self) -> None:
            self.counts: dict[str, Any] = {}

        def on_model(self, chunks: Any, optimizer: Any) -> None:
            self._things = (*chunks, optimizer)
            self.counts["start"] = self._count()

        def on_step(self, step: Any) -> None:
            self.counts[str(step.step)] = self._count()

        def on_step_begin(self, number: int) -> None:
            self.counts[f"in {number}"] = self._count()

        def on_end(self, error: Any) -> None:
            (Path(folder) / "hooks.json").write_text(json.dumps(self.counts))

        def _count(self) -> list[int]:
            from megatron.core.pipeline_parallel import schedules

            chunk, optimizer = self._things
            modules = list(chunk.modules())
            hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
            owned = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups, chunk, optimizer]
            functions = sum(callable(value) for owner in owned for value in vars(owner).values())
            return [hooks, functions, id(schedules.forward_step)]

    gc.disable()  # the time of a collection would be that of the operator it falls into
    stock = Loop.observing
    Loop.observing = lambda self, clock, listeners: stock(self, clock, [*listeners, Hooks(), Slow()])  # type: ignore[method-assign]
    return cli.main(list(arguments))


def _slow_down(module: Any) -> None:
    import torch

    stock = module.forward

    def forward(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        size, times = (8192, 40) if hidden.is_cuda else (640, 6)
        dtype = torch.bfloat16 if hidden.is_cuda else torch.float32
        with torch.no_grad():
            weight = torch.ones(size, size, dtype=dtype, device=hidden.device)
            for _ in range(times):
                weight @ weight
        return stock(hidden, *args, **kwargs)

    module.forward = forward


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile") / "plain"
    train(folder, words())
    return folder


def test_the_time_of_the_steps_belongs_to_families(plain: Path) -> None:
    profile = table(plain)
    assert profile["attributed_share"] >= 0.95
    assert (profile["steps"], profile["phase"], profile["device"]) == ([2, 2], "steady", "CPU")
    families, parts = profile["families"], profile["parts"]
    assert parts.keys() == {"E routing", "E experts", "E shared expert"}
    assert all(0 < row["total_ns"] < families["E"]["total_ns"] for row in parts.values())
    assert sum(row["total_ns"] for row in parts.values()) < families["E"]["total_ns"]
    assert all(row["backward_ns"] and row["forward_ns"] for row in parts.values())
    of_layers = [row["total_ns"] for label, row in profile["layers"].items() if label.startswith("E/")]
    assert (len(of_layers), sum(of_layers)) == (5, families["E"]["total_ns"])
    assert {"A", "M", "E", "R", "MTP", "head", "embedding", "norm", "optimizer", "gradients", "data"} <= families.keys()
    assert {label for label in profile["layers"] if label[1:2] == "/"} == {
        "A/1", "E/2", "M/3", "E/4", "A/5", "E/6", "M/7", "E/8", "A/9", "E/10", "M/11", "R/12"}  # fmt: skip
    for name in ("A", "M", "E", "R", "MTP", "head", "norm", "embedding"):
        row = families[name]
        assert row["forward_ns"] > 0, name
        assert row["backward_ns"] > 0, name
        assert row["optimizer_ns"] == row["other_ns"] == 0, name
    assert families["M"]["recompute_ns"] == families["R"]["recompute_ns"] == 0
    assert families["optimizer"]["optimizer_ns"] == families["optimizer"]["total_ns"] > 0
    assert "Optimizer.step#AdamW.step" in {operator["name"] for operator in families["optimizer"]["top"]}
    assert sum(row["total_ns"] for row in families.values()) == profile["total_ns"] <= profile["window_ns"]
    assert sum(row["total_ns"] for row in profile["layers"].values()) == profile["total_ns"]
    assert profile["host_bound_share"] is None
    assert profile["total_ns"] + profile["no_operator_ns"] == pytest.approx(profile["window_ns"], rel=0.01)
    assert profile["no_operator_ns"] > 0


def test_the_head_is_the_loss_of_every_depth(plain: Path) -> None:
    profile = table(plain)
    names = {operator["name"]: operator["calls"] for operator in profile["families"]["head"]["top"]}
    assert names["_VocabParallelCrossEntropy"] == 4  # two micro-batches, main loss and one depth
    text = (plain / "profile" / "2-2" / "table.txt").read_text()
    assert f"dominant: {profile['dominant']}, " in text
    for label in (*profile["families"], *profile["layers"]):
        assert f"\n{label} " in text


def test_hooks_are_there_in_the_window_and_gone_after_it(plain: Path) -> None:
    counted = json.loads((plain / "hooks.json").read_text())
    before, during = counted.pop("start"), counted.pop("in 2")
    assert all(now > then for now, then in zip(during[:2], before[:2], strict=True))
    assert during[2] != before[2]
    assert counted == dict.fromkeys(("in 1", "1", "2", "in 3", "3"), before)


def test_what_the_profiler_does_outside_of_steps_is_a_class_of_its_own(plain: Path) -> None:
    spent = {span.step: span.phases for span in events.read(plain)[0][0].spans if span.step is not None}
    assert [number for number in spent if spent[number].get("profile")] == [2, 3]  # its start, and its tables
    assert spent[3]["profile"] / 1e9 >= table(plain)["read_s"] > 0
    assert goodput.of_rank(events.read(plain)[0]).record()["seconds"]["profile"] >= table(plain)["read_s"]
    assert spent[3]["idle"] < spent[3]["profile"]  # where all of it was before


@pytest.mark.exhaustive
def test_training_is_the_same_bit_for_bit(plain: Path, tmp_path: Path) -> None:
    train(tmp_path / "none", words(), window=None)
    profiled, without = ([step.values() for step in read_steps(run)] for run in (plain, tmp_path / "none"))
    assert len(profiled) == STEPS
    assert {"lm loss", "mtp_1 loss", "grad norm"} <= set(profiled[0])
    assert profiled == without


@pytest.mark.exhaustive
def test_a_slowed_family_is_dominant_and_what_our_recompute_repeats_is_where_it_was(plain: Path, tmp_path: Path) -> None:
    settings = "recompute: [a, m, experts, r]\n"
    train(tmp_path / "run", words(), window="1-2", slow="E", settings=settings)
    slowed = table(tmp_path / "run", "1-2")
    assert table(plain)["dominant"] != "E"
    assert slowed["dominant"] == "E"
    assert slowed["families"]["E"]["top"][0]["name"] == "aten::mm"
    assert slowed["attributed_share"] >= 0.95
    assert (slowed["phase"], slowed["phase_why"]) == ("warm-up", "step 1 is the first of this process")
    for name in ("A", "M", "R", "E"):
        row = slowed["families"][name]
        assert row["recompute_ns"] > 0, name
        assert row["backward_ns"] > 0, name
    for name in ("M", "R"):
        assert slowed["families"][name]["recompute_ns"] > 0.2 * slowed["families"][name]["forward_ns"]
    assert slowed["families"]["E"]["recompute_ns"] < 0.5 * slowed["families"]["E"]["forward_ns"]  # not what was slowed


@pytest.mark.exhaustive
def test_what_megatron_recomputes_is_where_it_was_and_a_trace_can_be_had(plain: Path, tmp_path: Path) -> None:
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    train(tmp_path / "run", words(*full), window="2-2", settings="observability: {profile_trace: true}\n")
    profile = table(tmp_path / "run", "2-2")
    assert profile["attributed_share"] >= 0.95
    calls, without = ({name: row["kernels"] for name, row in run["families"].items()} for run in (profile, table(plain)))
    for name in ("A", "M", "E", "R", "MTP"):
        row = profile["families"][name]
        assert row["recompute_ns"] > 0, name
        assert row["backward_ns"] > 0, name
        assert calls[name] > 1.2 * without[name], name
    # Were it not attributed, all that is recomputed would be the block's.
    assert calls["block"] < 0.1 * (calls["M"] - without["M"])
    assert (calls["head"], profile["families"]["head"]["recompute_ns"]) == (without["head"], 0)
    with gzip.open(tmp_path / "run" / "profile" / "2-2" / "trace.json.gz", "rt") as stream:
        names = {event.get("name") for event in json.load(stream)["traceEvents"]}
    assert {"megacpp::step/2", "megacpp::A/1", "megacpp::R/12", "megacpp::MTP/1", "megacpp::optimizer"} <= names


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
