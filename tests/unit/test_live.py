"""The progress line, metrics.jsonl and the writers' scalars: of a real run, and piece by piece."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput, live
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.goodput import rank_file
from megacpp_mcore.observe.listener import Listener
from megacpp_mcore.observe.live import Live, Metrics, read_metrics
from megacpp_mcore.observe.loop import StockLoop, Told
from megacpp_mcore.observe.steps import Step, read_steps
from tests.unit import page_run, tiny_run

STEPS = 5
SECOND = 1_000_000_000


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    data = tiny_run.make_data(tmp_path)
    run = tmp_path / "run"
    said = page_run.train(data, run, STEPS, "--eval-interval", "3", "--eval-iters", "1", fate="writers")
    recorded = {step.step: step for step in read_steps(run / "steps.jsonl")}

    _check_console(said, (run / live.STOCK_LOG).read_text(), recorded)
    metrics = read_metrics(run)
    assert [one.step for one in metrics] == list(range(1, STEPS + 1))
    assert [one.tokens_per_s is None for one in metrics] == [True] + [False] * (STEPS - 1)
    assert all(one.losses == recorded[one.step].losses for one in metrics)
    assert all(one.mfu is None and one.mfu_reason for one in metrics)
    assert "no datasheet peak is known" in metrics[-1].mfu_reason
    assert all(0 < one.goodput < 1 and one.memory_allocated_bytes > 2**20 for one in metrics)
    assert metrics[0].routing_entropy is None
    assert 0 < (metrics[-1].routing_entropy or 0) < 1
    assert 0 < (metrics[-1].index_overlap or 0) < 1
    _check_scalars(run, recorded)
    _check_rates(run, metrics)


class Printing(StockLoop):
    printing = (__name__, "loop_prints")


def loop_prints(line: str) -> None:
    """What the loop prints an iteration's line by."""


@pytest.mark.parametrize("which", ["live", "recorder", "another"])
def test_without_its_times_the_loop_prints_its_own_lines_again(tmp_path: Path, which: str) -> None:
    stock = loop_prints
    recorder = goodput.Recorder(tmp_path, 0, Clock(), heartbeat_s=3600)
    shown = Live(tmp_path, 0, recorder, Printing(), last=True)
    shown.on_step_begin(1)
    assert loop_prints != stock
    failed = {"live": shown, "recorder": recorder, "another": Listener()}[which]
    shown.on_failure(failed, LookupError(), 1)
    shown.on_step_begin(2)
    assert (loop_prints == stock) is (which != "another")
    shown.on_step(Step(2, 0, 0.0, 8, {}, None, None, False))
    shown.on_end(None)
    recorder.on_over()
    assert loop_prints == stock


def _check_rates(run: Path, metrics: Sequence[Metrics]) -> None:
    """Against what the last rank noted between two steps: their time without evaluation and checkpoints."""
    lines = [json.loads(line) for line in rank_file(run, 0).read_text().splitlines()]
    spent = {line["step"]: line["phases"] for line in lines if "step" in line}
    in_steps = {
        number: sum(phases.get(name, 0) for name in ("step", "data", "idle", "compile", "jit"))
        for number, phases in spent.items()
    }
    assert spent[4]["evaluation"] > 0  # after step 3
    assert goodput.read(run)[0].nanoseconds["evaluation"] >= spent[4]["evaluation"]
    for before, one in itertools.pairwise(metrics):
        assert one.tokens_per_s == pytest.approx((one.tokens - before.tokens) / in_steps[one.step] * 1e9, rel=1e-9)


def _check_console(said: str, stock: str, recorded: dict[int, Step]) -> None:
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    assert [line.split("/")[0] for line in lines] == [f"step {number}" for number in recorded]
    for line, step in zip(lines, recorded.values(), strict=True):
        assert f"loss {step.losses['lm loss']:.4f}  mtp_1 {step.losses['mtp_1 loss']:.4f}" in line
        assert f"grad norm {step.grad_norm:.3f}" in line
        assert "goodput" in line
        assert len(line) < 240
    assert "elapsed time per iteration" not in said
    assert "validation loss at iteration 3" in said  # nothing else is taken away
    printed = {
        int(number): float(loss) for number, loss in re.findall(r"iteration +(\d+)/ +5 \|.* lm loss: (\S+) \|", stock)
    }
    assert list(printed) == list(recorded)
    for number in (1, 3, 4, 5):  # the second line is the mean of two steps
        assert printed[number] == pytest.approx(recorded[number].losses["lm loss"], rel=1e-6)


def _check_scalars(run: Path, recorded: dict[int, Step]) -> None:
    scalars = [json.loads(line) for line in (run / "scalars.jsonl").read_text().splitlines()]
    ours = {f"{live.TAG}{name}" for name in live.SCALARS} - {f"{live.TAG}mfu"}
    for writer in ("tensorboard", "wandb"):
        written = Counter((one["tag"], one["step"]) for one in scalars if one["writer"] == writer)
        assert {tag for tag, _ in written if tag.startswith(live.TAG)} == ours
        assert all(count == 1 for (tag, _), count in written.items() if tag.startswith(live.TAG))
        assert {step for tag, step in written if tag == f"{live.TAG}goodput"} == set(recorded)
        for tag in ("lm loss", "mtp_1 loss", "indexer loss", "grad-norm", "learning-rate"):
            assert {step for name, step in written if name == tag} == set(recorded), (writer, tag)


# --- Piece by piece ---------------------------------------------------------------------------------------------------


class Loop:
    """What a Live meets, without a model: a clock that is set by hand, and Megatron's module with a printer of our own."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, console: str = "progress") -> None:
        from megatron.training import training

        self.module = training
        self.printed: list[str] = []
        monkeypatch.setattr(training, "print_rank_last", self.printed.append)
        self.stock = training.print_rank_last
        monkeypatch.setattr(StockLoop, "arguments", lambda _: SimpleNamespace(train_iters=100))
        monkeypatch.setattr(StockLoop, "writers", lambda _: (None, None))
        self.now = 0
        self.clock = Clock(now=lambda: self.now)
        self.recorder = goodput.Recorder(run, 0, self.clock)
        self.live = Live(run, 0, self.recorder, StockLoop(), last=True, console=console)

    def step(
        self, number: int, seconds: float, *, line: bool = True, skipped: bool = False, saved: float = 0.0
    ) -> None:
        """One step; with ``line``, Megatron prints."""
        self.live.on_step_begin(number)
        with self.clock.within(Phase.STEP):
            self.now += round(seconds * SECOND)
        if line:
            self.module.print_rank_last(f" iteration {number}")
        step = Step(number, 0, float(number), 512 * number, {"lm loss": 2.0, "mtp_1 loss": 3.0}, 1.5, 1e-3, skipped)
        self.recorder.on_step(step)
        self.live.on_step(step)
        with self.clock.within(Phase.SAVE):
            self.now += round(saved * SECOND)

    def end(self, error: BaseException | None = None) -> None:
        self.recorder.on_end(error)
        self.live.on_end(error)


def test_a_line_has_what_happened_since_the_line_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(tmp_path, monkeypatch)
    loop.clock.become(Phase.IDLE)
    loop.step(1, 9.0, line=False)
    loop.step(2, 2.0, line=False, saved=5.0)
    loop.step(3, 2.0, skipped=True)
    loop.module.print_rank_last("validation")
    loop.end()
    (found,) = read_metrics(tmp_path)
    assert found.tokens_per_s == pytest.approx(1024 / 4)
    assert found.goodput == pytest.approx(13 / 18)
    assert found.skipped == 1
    assert found.mfu_reason == "the run writes no receipt"
    shown = capsys.readouterr().out
    assert shown.startswith(
        "step   3/100  loss 2.0000  mtp_1 3.0000  grad norm 1.500  lr 1.00e-03  256 tokens/s  no MFU ("
    )
    assert shown.rstrip().endswith("SKIPPED 1")
    assert loop.printed == ["validation"]
    assert (tmp_path / live.STOCK_LOG).read_text() == " iteration 3\n"


def test_stock_prints_what_megatron_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(tmp_path, monkeypatch, console="stock")
    loop.step(1, 1.0)
    loop.end()
    assert loop.printed == [" iteration 1"]
    assert capsys.readouterr().out == ""
    assert len(read_metrics(tmp_path)) == 1
    assert not (tmp_path / live.STOCK_LOG).exists()


def test_an_error_in_a_step_gives_the_printer_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, monkeypatch)
    loop.live.on_step_begin(1)
    assert loop.module.print_rank_last is not loop.stock
    loop.end(ArithmeticError())
    loop.module.print_rank_last("what went wrong")
    assert loop.printed == ["what went wrong"]


def test_a_live_line_that_fails_gives_the_printer_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, monkeypatch)
    told = Told(loop.clock, [loop.live])
    monkeypatch.setattr(StockLoop, "writers", lambda _: (SimpleNamespace(add_scalar=None), None))
    loop.module.print_rank_last("before")
    told.tell_begin(1)
    loop.module.print_rank_last(" iteration 1")
    given = {"loss_dict": {"lm loss": 2.0}, "grad_norm": None, "learning_rate": None, "skipped_iter": 0}
    told.tell_step(given, {}, 1, 512)
    assert "Live failed in step 1" in caplog.text
    told.tell_begin(2)
    loop.module.print_rank_last(" iteration 2")
    assert loop.printed == ["before", " iteration 2"]
    loop.end()


def test_other_ranks_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, monkeypatch)
    loop.live.on_end(None)
    loop.live = Live(tmp_path, 0, loop.recorder, StockLoop(), last=False)
    loop.step(1, 1.0)
    loop.end()
    assert loop.printed == [" iteration 1"]
    assert read_metrics(tmp_path) == []


def _part(flops: dict[str, int] | None, device: str, why: str = "") -> dict[str, object]:
    counted = None if flops is None else {
        "tokens": 512, "by_precision": {name: {"model_flops": count} for name, count in flops.items()}
    }  # fmt: skip
    return {"run": {"flops": counted, "device": device, "parallelism.world_size": 2}, "unknown": {"flops": why}}


@pytest.mark.parametrize(
    ("part", "mfu", "reason"),
    [
        # 512 tokens in 2 s on two devices of 989.5 TFLOP/s: a tenth of the peak is 2 * 2 * 98.95e12 FLOPs
        (_part({"bf16": round(4 * 98.95e12)}, "NVIDIA H200"), 0.1, ""),
        (_part({"bf16": 1}, "a toaster"), None, "no datasheet peak is known of 'a toaster'"),
        (_part(None, "NVIDIA H200", "documents are kept apart"), None, "documents are kept apart"),
    ],
)
def test_mfu_or_its_reason(
    part: dict[str, object], mfu: float | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "rank_00000.json").write_text(json.dumps(part))
    loop = Loop(tmp_path, monkeypatch)
    loop.step(1, 1.0)
    loop.step(2, 2.0)
    loop.end()
    _, found = read_metrics(tmp_path)
    assert found.mfu == (None if mfu is None else pytest.approx(mfu))
    assert found.mfu_reason.startswith(reason)
    assert bool(found.mfu_reason) == (mfu is None)
    assert ("MFU 10.0%" in found.line(9)) == (mfu is not None)


def _seconds_a_step(work: Callable[[int], None], steps: int) -> float:
    """The least of three medians, for the machine may be busy with something else."""
    medians = []
    for turn in range(3):
        spent = []
        for number in range(turn * steps + 1, (turn + 1) * steps + 1):
            began = time.perf_counter()
            work(number)
            spent.append(time.perf_counter() - began)
        medians.append(sorted(spent)[steps // 2])
    return min(medians)


def test_a_logged_step_costs_less_than_a_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after a start of many steps, which goodput goes through once."""
    path = rank_file(tmp_path, 0)
    path.parent.mkdir()
    earlier = [{"began": 0, "host": "h", "pid": 1}]
    earlier += [
        {"at": number * SECOND, "phases": {"step": SECOND}, "step": number, "resumed_at": 0}
        for number in range(1, 100_001)
    ]
    path.write_text(
        "".join(
            json.dumps(line) + "\n" for line in [*earlier, {"at": 100_000 * SECOND, "phases": {}, "how": "finished"}]
        )
    )
    loop = Loop(tmp_path, monkeypatch)

    def one_step(number: int) -> None:
        loop.live.on_step_begin(number)
        loop.module.print_rank_last(" iteration")
        step = Step(100_000 + number, 100_000, 0.0, 512 * number, {"lm loss": 2.0}, 1.0, 1e-3, False)
        loop.recorder.on_step(step)
        loop.live.on_step(step)

    assert _seconds_a_step(one_step, 50) < 1e-3
    loop.end()


def _logged(number: int, resumed_at: int = 0) -> str:
    found = Metrics(
        step=number, resumed_at=resumed_at, time_s=0.0, tokens=512 * number, losses={}, grad_norm=None,
        learning_rate=None, skipped=0, tokens_per_s=None, mfu=None, mfu_reason="", goodput=0.5,
        memory_allocated_bytes=0, memory_reserved_bytes=0,
    )  # fmt: skip
    return json.dumps(asdict(found)) + "\n"


def test_what_a_restart_rolled_back_is_not_shown(tmp_path: Path) -> None:
    before = "".join(map(_logged, (1, 2, 3, 4, 5)))
    (tmp_path / live.METRICS).write_text(before + _logged(3, 2))
    assert [(one.step, one.resumed_at) for one in read_metrics(tmp_path)] == [(1, 0), (2, 0), (3, 2)]


def test_a_damaged_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / live.METRICS).write_text('{"step": 1}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: not a logged step"):
        read_metrics(tmp_path)
    (tmp_path / live.METRICS).write_text('{"step": ')
    assert read_metrics(tmp_path) == []
    (tmp_path / live.METRICS).write_text(_logged(1) + _logged(2)[:-20] + "\n" + _logged(2, 1))
    assert [one.step for one in read_metrics(tmp_path)] == [1, 2]
    assert "metrics.jsonl, line 2: cut short" in caplog.text
    (tmp_path / live.METRICS).write_text(_logged(1) + _logged(2)[:-20] + "\n" + _logged(3))
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not a logged step"):
        read_metrics(tmp_path)


def test_a_full_disk_does_not_end_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in (live.METRICS, live.STOCK_LOG):
        (tmp_path / name).symlink_to("/dev/full")
    loop = Loop(tmp_path, monkeypatch)
    loop.step(1, 1.0)
    loop.step(2, 1.0)
    loop.end()
    assert [line[:10] for line in capsys.readouterr().out.splitlines()] == ["step   1/1", "step   2/1"]
    assert caplog.text.count("No space left on device; this process records nothing more there") == 2
