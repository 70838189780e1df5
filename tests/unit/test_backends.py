"""The backend dispatcher: requested against observed, never a silent fall-back."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore import backends
from megacpp_mcore.backends import Candidate, Dispatcher, ProbeResult, Speed
from megacpp_mcore.errors import BackendError


class Counted:
    """A candidate's three functions, counting their calls."""

    def __init__(self, *, present: bool = True, covers: int = 128, loads: bool = True) -> None:
        self.present, self.covers, self.loads = present, covers, loads
        self.probes = self.loaded = 0

    def probe(self) -> ProbeResult:
        self.probes += 1
        return ProbeResult(self.present, "" if self.present else "no such device")

    def supports(self, needs: Mapping[str, Any]) -> str | None:
        width = needs.get("head_dim", 1)
        return None if width <= self.covers else f"head_dim {width} > {self.covers}"

    def load(self) -> Callable[..., Any]:
        self.loaded += 1
        if not self.loads:
            raise ImportError("undefined symbol")
        return self.covers.__add__

    def candidate(self, name: str, speed: Speed, op: str = "mla") -> Candidate:
        return Candidate(name=name, op=op, speed=speed, load=self.load, probe=self.probe, supports=self.supports)


def dispatcher(requests: Mapping[str, str] | None = None, **fast: Any) -> tuple[Dispatcher, Counted]:
    kernel = Counted(**fast)
    candidates = [Counted(covers=10**9).candidate("slow", Speed.REFERENCE), kernel.candidate("fast", Speed.KERNEL)]
    return Dispatcher(requests, candidates), kernel


def test_auto_takes_the_fastest_and_probes_once() -> None:
    made, kernel = dispatcher()
    answers = [made.request("mla", layer=layer, head_dim=64) for layer in (1, 2, 1)]
    assert {answer.observed for answer in answers} == {"fast"}
    assert answers[0] is answers[2]
    assert answers[0].fn(1) == 129
    assert (kernel.probes, kernel.loaded) == (1, 2)
    assert [row["layer"] for row in made.observed_backends()] == [1, 2]


def test_auto_that_is_slower_than_the_best_present_warns_once_and_is_marked(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = dispatcher()
    answers = [made.request("mla", layer=layer, head_dim=256) for layer in (1, 2, 3)]
    assert all(answer.observed == "slow" and answer.slower_than_best for answer in answers)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "fast does not cover this: head_dim 256 > 128" in caplog.text
    assert made.request("mla", layer=4, head_dim=64).slower_than_best is False


def test_auto_without_the_fast_one_is_not_a_fall_back_but_says_why(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = dispatcher(present=False)
    answer = made.request("mla")
    assert (answer.observed, answer.slower_than_best) == ("slow", False)
    assert answer.reason == "fast is not there: no such device"
    assert caplog.records == []


def test_a_present_candidate_that_does_not_load_is_a_marked_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = dispatcher(loads=False)
    assert made.request("mla").slower_than_best is True
    assert "undefined symbol" in caplog.text


@pytest.mark.parametrize(
    ("fast", "needs", "reason"),
    [
        ({"present": False}, {}, "no such device"),
        ({}, {"head_dim": 256}, "head_dim 256 > 128"),
        ({"loads": False}, {}, "undefined symbol"),
    ],
)
def test_by_name_runs_or_fails_with_the_reason(fast: dict[str, Any], needs: dict[str, Any], reason: str) -> None:
    by_mapping, _ = dispatcher({"mla": "fast"}, **fast)
    by_argument, _ = dispatcher(**fast)
    for ask in (
        lambda: by_mapping.request("mla", layer=7, **needs),
        lambda: by_argument.request("mla", "fast", layer=7, **needs),
    ):
        with pytest.raises(BackendError, match=f"'fast' was asked for by name for op mla in layer 7 .*{reason}"):
            ask()
    assert by_argument.observed_backends() == []


def test_mapping_and_argument() -> None:
    made, _ = dispatcher({"mla": "slow"})
    assert made.request("mla").observed == "slow"
    assert made.request("mla", "fast").observed == "fast"
    assert made.request("mla", "auto").observed == "fast"
    rows = json.loads(json.dumps(made.observed_backends()))
    assert [(row["requested"], row["observed"], row["speed"]) for row in rows] == [
        ("slow", "slow", "reference"),
        ("fast", "fast", "kernel"),
        ("auto", "fast", "kernel"),
    ]


def test_names_that_do_not_exist() -> None:
    for requests, words in (({"mla": "fastt"}, "did you mean fast"), ({"mlaa": "fast"}, "no op called 'mlaa'")):
        with pytest.raises(BackendError, match=words):
            dispatcher(requests)
    with pytest.raises(BackendError, match="expected one of auto, slow, fast"):
        dispatcher()[0].request("mla", "xyz")
    one = Counted().candidate("one", Speed.KERNEL)
    with pytest.raises(BackendError, match="names must be unique"):
        Dispatcher(candidates=[one, one])


def test_nothing_that_covers_the_needs() -> None:
    made = Dispatcher(candidates=[Counted().candidate("only", Speed.KERNEL)])
    with pytest.raises(BackendError, match="no backend can run op mla: only does not cover this: head_dim 500"):
        made.request("mla", head_dim=500)


def test_a_probe_that_raises_is_an_answer() -> None:
    def probe() -> ProbeResult:
        raise OSError("libcuda.so.1")

    made = Dispatcher(candidates=[Candidate(name="a", op="x", speed=Speed.KERNEL, load=lambda: abs, probe=probe)])
    with pytest.raises(BackendError, match=r"libcuda\.so\.1"):
        made.request("x", "a")


@pytest.mark.parametrize("op", ["mla", "sparse_mla", "indexer", "mamba3", "m2rnn"])
def test_every_reference_loads(op: str) -> None:
    answer = Dispatcher({op: "reference"}).request(op, layer=1)
    assert answer.observed == "reference"
    assert answer.fn.__module__ == f"megacpp_mcore.ops.{op}.reference"


def test_no_torch_before_a_backend_is_chosen() -> None:
    code = "import sys; from megacpp_mcore.backends import Dispatcher; Dispatcher(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "False"


def test_apex_parts_are_probed_and_an_impostor_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "apex.py").write_text("raise SystemExit('an impostor was imported')")
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("raise RuntimeError('built for another torch')")
    (tmp_path / "torch.py").write_text("")
    code = "from megacpp_mcore.backends import apex_parts; print({k: v.reason for k, v in apex_parts().items()})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    )
    assert "'amp_C': 'amp_C is not installed', 'apex.optimizers': 'it needs amp_C'" in done.stdout
    assert "built for another torch" in done.stdout
    assert tuple(backends.apex_parts()) == backends.APEX_PARTS
