"""The progress line and what it is made of, piece by piece; of a real run they are in test_real_runs.py."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_mcore.observe import events, goodput
from megacpp_mcore.observe import loop as loops
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.events import Log, Step
from megacpp_mcore.observe.indices import IndexOverlap
from megacpp_mcore.observe.live import Live, line, metrics_of
from megacpp_mcore.observe.receipts.fields import Facts
from megacpp_mcore.observe.routing import Routing
from megacpp_mcore.observe.steps import read_steps
from tests.observe.recorded import SECOND, a_step, at, stepped, write_start

FACTS: tuple[dict[str, Any], dict[str, str]] = ({}, {})


class Loop:
    """The training loop that Live observes, without a model and with a manual clock."""

    def __init__(
        self, run: Path, monkeypatch: pytest.MonkeyPatch, console: str = "progress", facts: Any = FACTS, every: int = 1
    ) -> None:
        options = SimpleNamespace(train_iters=100, log_interval=every)
        monkeypatch.setattr(loops.Loop, "arguments", lambda _: options)
        monkeypatch.setattr(loops.Loop, "writers", lambda _: (None, None))
        self.now = 0
        self.run = run
        self.clock = Clock(now=lambda: self.now)
        self.log = Log(run, 0, 1, self.clock, heartbeat_s=3600)
        self.recorder = goodput.Recorder(self.log, with_losses=True)
        listeners = {"loop": loops.Loop(), "facts": Facts(*facts), "routes": Routing(), "indices": IndexOverlap()}
        self.live = Live(self.recorder, SimpleNamespace(**listeners), console)  # type: ignore[arg-type]

    def step(self, number: int, seconds: float, *, skipped: bool = False, saved: float = 0.0) -> None:
        """One step."""
        with self.clock.within(Phase.STEP):
            self.now += round(seconds * SECOND)
        step = Step(number, 0, float(number), 512 * number, {"lm loss": 2.0, "mtp_1 loss": 3.0}, 1.5, 1e-3, skipped)
        self.recorder.on_step(step)
        self.live.on_step(step)
        with self.clock.within(Phase.SAVE):
            self.now += round(saved * SECOND)

    def metrics(self) -> list[dict[str, Any]]:
        """What was shown."""
        return metrics_of(events.read(self.run))


def test_a_line_has_what_happened_since_the_line_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(tmp_path, monkeypatch, every=3)
    loop.clock.become(Phase.IDLE)
    loop.step(1, 9.0)
    loop.step(2, 2.0, saved=5.0)
    loop.step(3, 2.0, skipped=True)
    loop.step(4, 2.0)
    first, last = loop.metrics()
    assert (first["step"], first["tokens_per_s"], last["step"]) == (1, None, 3)
    assert last["tokens_per_s"] == pytest.approx(1024 / 4)
    assert last["goodput"] == pytest.approx(13 / 18)
    assert last["skipped"] == 1
    _, shown = capsys.readouterr().out.splitlines()
    assert shown.startswith("step 3/100 | 256 tokens/s | no MFU (")
    assert re.fullmatch(r".* \| SKIPPED 1 \| \S+ s/step \| 0:\S+ left \|", shown)
    silent = Loop(tmp_path / "stock", monkeypatch, console="stock")
    silent.step(1, 1.0)
    assert capsys.readouterr().out == ""
    assert len(silent.metrics()) == 1


def _facts(flops: dict[str, int] | None, device: str, why: str = "") -> tuple[dict[str, object], dict[str, str]]:
    counted = None if flops is None else {
        "tokens": 512,
        "by_precision": {name: {"model_flops": count, "hardware_flops": count} for name, count in flops.items()},
    }  # fmt: skip
    return {"flops": counted, "device": device, "parallelism.world_size": 2}, {"flops": why}


@pytest.mark.parametrize(
    ("facts", "mfu", "reason"),
    [
        # 512 tokens in 2 s on two devices of 989.5 TFLOP/s: a tenth of the peak is 2 * 2 * 98.95e12 FLOPs
        (_facts({"bf16": round(4 * 98.95e12)}, "NVIDIA H200"), 0.1, ""),
        (_facts({"bf16": 1}, "a toaster"), None, "no datasheet peak is known of 'a toaster'"),
        (_facts(None, "NVIDIA H200", "documents are kept apart"), None, "documents are kept apart"),
        (FACTS, None, "the work of a step is not known"),
    ],
)
def test_mfu_or_its_reason(facts: Any, mfu: float | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, monkeypatch, facts=facts)
    loop.step(1, 1.0)
    loop.step(2, 2.0)
    _, metrics = loop.metrics()
    assert metrics["mfu"] == (None if mfu is None else pytest.approx(mfu))
    assert metrics["mfu_reason"].startswith(reason)
    assert bool(metrics["mfu_reason"]) == (mfu is None)
    last = read_steps(tmp_path)[-1]
    assert ("MFU 10.0%" in line(last, 9, last, metrics)) == (mfu is not None)


def test_time_left_is_at_the_mean_since_the_first_line() -> None:
    first, step = (Step(number, 0, time_s, 0, {}, None, None, False) for number, time_s in ((3, 100.0), (7, 110.0)))
    assert line(first, 107, first) == "iteration        3/     107 |"
    assert line(step, 107, first) == "iteration        7/     107 | 2.5 s/step | 0:04:10 left |"


def test_a_line_that_stands_alone_has_megatrons_words_and_numbers() -> None:
    step = Step(12, 0, 0.0, 0, {"mtp_1 loss": 3.0, "lm loss": 2.0}, 1.5, 1e-3, False)
    words = "learning rate: 1.000000E-03 | lm loss: 2.000000E+00 | mtp_1 loss: 3.000000E+00 | grad norm: 1.500"
    assert line(step, 107, step) == f"iteration       12/     107 | {words} |"
    assert line(step, 107, step, alone=False) == "step 12/107 |"


def test_a_logged_step_costs_less_than_a_millisecond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a start with many steps, which goodput reads only once."""
    earlier = [stepped(number, number) for number in range(1, 4_001)]
    write_start(tmp_path, 1, 0, *earlier, at(4_000, {}, how="finished"))
    loop = Loop(tmp_path, monkeypatch)

    spent = []
    for number in range(1, 151):
        step = a_step(4_000 + number, resumed_at=4_000)
        began = time.thread_time()  # the machine may be busy with something else
        loop.recorder.on_step(step)
        loop.live.on_step(step)
        spent.append(time.thread_time() - began)
    assert sorted(spent)[len(spent) // 4] < 1e-3
    assert loop.recorder.so_far(4_000).steps == 4_000
