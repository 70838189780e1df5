"""The demo really kills training, leaves no process running, propagates failures, and claims only what it checked."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.observe.events import Step
from megacpp_mcore.observe.steps import read_steps
from tests import forks
from tests.commands.test_report_page import check_self_contained
from tests.leftovers import is_running
from tests.observe.recorded import write_start

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "demo.py"


with pytest.MonkeyPatch.context() as context:
    context.syspath_prepend(str(SCRIPT.parent))
    demo = importlib.import_module("demo")

# A process that records steps as training does, and has a child of its own.
TRAINER = """
import json, os, subprocess, sys, time
path, pids, steps, pause, status = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(pids, "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
for step in range(1, steps + 1):
    record = dict(at=time.time_ns(), step=step, resumed_at=0, time_s=time.time(), tokens=2048 * step, losses={"lm loss": 1.0},
                  grad_norm=1.0, learning_rate=1.0, skipped=False)
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\\n")
    time.sleep(pause)
print("the reason is here", flush=True)
sys.exit(status)
"""


def trainer(plan: object, *, steps: int, pause: float, status: int = 0) -> list[str]:
    pids = plan.folder / "pids"  # type: ignore[attr-defined]
    path = write_start(plan.record, 1, 0)  # type: ignore[attr-defined]
    return [sys.executable, "-c", TRAINER, str(path), str(pids), str(steps), str(pause), str(status)]


def assert_all_gone(folder: Path) -> None:
    pids = [int(word) for word in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    forks.wait_until(lambda: not any(map(is_running, pids)), within_s=30)


@pytest.fixture
def plan(tmp_path: Path) -> object:
    return demo.Plan(tmp_path, "cpu", 20, 0)


def test_the_plan_keeps_its_promises() -> None:
    plan = demo.Plan(Path("x"), "cpu", 200, 0)
    assert (plan.save_at, plan.stop_after) == (100, 110)
    for steps in range(4, 300):
        plan = demo.Plan(Path("x"), "cpu", steps, 0)
        assert 0 < plan.save_at < plan.stop_after < steps
        assert 2 * plan.save_at > plan.stop_after  # no second checkpoint before the kill


def test_training_is_killed_with_all_that_it_started(plan: object, capsys: pytest.CaptureFixture[str]) -> None:
    steps = demo.train(plan, trainer(plan, steps=1000, pause=0.05), kill_after=3)
    assert steps[-1].step >= 3
    assert steps == read_steps(plan.record)
    assert steps[-1].step < 1000
    assert_all_gone(plan.folder)
    assert "step   1/20  loss 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "kill_after"), [(signal.SIGKILL, 3), (signal.SIGSEGV, 0)])
def test_a_leg_that_another_signal_ends_has_the_shells_number(plan: object, number: int, kill_after: int) -> None:
    suicide = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"]
    with pytest.raises(demo.DemoError) as failure:
        demo.train(plan, suicide, kill_after=kill_after)
    assert failure.value.status == 128 + number


@pytest.mark.parametrize(("status", "kill_after", "expected"), [(7, 0, 7), (7, 4, 7), (0, 4, 1)])
def test_training_that_fails_or_ends_early(
    plan: object,
    status: int,
    kill_after: int,
    expected: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = trainer(plan, steps=2, pause=0, status=status)
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)  # this process keeps its own handlers
    monkeypatch.setattr(demo, "run_demo", lambda *_: demo.train(plan, command, kill_after=kill_after))
    assert demo.main(["--device", "cpu"]) == expected
    shown = capsys.readouterr().err
    assert "the reason is here" in shown
    assert "demo FAILED" in shown
    assert_all_gone(plan.folder)


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
import demo
plan = demo.Plan(Path(sys.argv[2]), "cpu", 20, 0)

def run_demo(*_):
    demo.train(plan, sys.argv[3:])

demo.run_demo = run_demo
sys.exit(demo.main(["--device", "cpu"]))
"""


def test_signals_leave_no_process_behind(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    plans = [demo.Plan(tmp_path / number.name, "cpu", 20, 0) for number in numbers]
    running = []
    for plan in plans:
        plan.folder.mkdir()
        command = [sys.executable, "-c", DRIVER, str(SCRIPT), str(plan.folder), *trainer(plan, steps=1000, pause=0.1)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for number, plan, program in zip(numbers, plans, running, strict=True):
        forks.wait_until(lambda plan=plan: read_steps(plan.record))
        program.send_signal(number)
        _, complaint = program.communicate(timeout=forks.PATIENCE_S)
        assert program.returncode == 128 + number, complaint
        assert ("interrupted; nothing is left running" in complaint) is (number == signal.SIGINT)
        assert_all_gone(plan.folder)


def test_a_signal_while_training_starts_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def popen(*words: Any, **keywords: Any) -> subprocess.Popen[bytes]:
        begun.append(start(*words, **keywords))
        signal.raise_signal(signal.SIGINT)
        return begun[0]

    monkeypatch.setattr(demo.subprocess, "Popen", popen)
    with (
        pytest.raises(KeyboardInterrupt),
        demo.started([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log"),
    ):
        pass
    assert begun[0].returncode == -signal.SIGKILL
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def leg(first: int, last: int, resumed_at: int, loss: float = 2.0) -> list[Step]:
    losses = {"lm loss": loss}
    return [Step(number, resumed_at, float(number), 1, losses, 1.0, 1.0, False) for number in range(first, last + 1)]


def test_equal_is_said_only_when_it_is_so(plan: object) -> None:
    first, second = leg(1, 11, 0), leg(11, 20, 10)
    verdict = demo.check_resume(plan, first, second)
    assert verdict == (
        "EQUAL: steps 11 to 11, run before the kill and again after it, agree bit for bit in grad norm, learning rate, lm loss."
    )
    with pytest.raises(demo.DemoError, match=r"step 11 .*lm loss") as failure:
        demo.check_resume(plan, first, leg(11, 20, 10, loss=2.0000000000000004))
    assert failure.value.status == 1


@pytest.mark.parametrize("second", [[], leg(1, 20, 0), leg(12, 20, 11), leg(11, 19, 10)])
def test_a_resume_at_another_step_is_refused(plan: object, second: list[Step]) -> None:
    with pytest.raises(demo.DemoError, match=r"\b11 to 20$"):
        demo.check_resume(plan, leg(1, 11, 0), second)


def test_on_a_gpu_the_difference_is_told_and_bounded(plan: object) -> None:
    plan = replace(plan, device="cuda")  # type: ignore[type-var]
    verdict = demo.check_resume(plan, leg(1, 11, 0), leg(11, 20, 10, loss=2.001))
    assert "differ by at most 0.001 nats" in verdict
    assert "--deterministic-mode" in verdict
    assert "EQUAL" not in verdict
    for loss, distance in ((2.2, r"0\.2"), (float("nan"), "nan")):
        with pytest.raises(demo.DemoError, match=f"up to {distance}"):
            demo.check_resume(plan, leg(1, 11, 0), leg(11, 20, 10, loss=loss))
    later = leg(11, 20, 10)
    later[1] = replace(later[1], losses={"lm loss": float("nan")})
    with pytest.raises(demo.DemoError, match="up to nan"):
        demo.check_resume(plan, leg(1, 12, 0), later)


def test_another_checkpoint_than_the_planned_one_is_refused(plan: object) -> None:
    with pytest.raises(demo.DemoError, match=r"no checkpoint.* 10$"):
        demo.check_checkpoint(plan)
    plan.checkpoints.mkdir()
    tracker = plan.checkpoints / "latest_checkpointed_iteration.txt"
    tracker.write_text("20")
    with pytest.raises(demo.DemoError, match=r" 20.* 10$"):
        demo.check_checkpoint(plan)
    tracker.write_text("10")
    demo.check_checkpoint(plan)


@pytest.mark.parametrize(("reached", "holds"), [(3.0, True), (3.0000001, False), (5.0, False), (float("nan"), False)])
def test_the_score_has_to_be_good_enough(reached: float, holds: bool, capsys: pytest.CaptureFixture[str]) -> None:
    score = {"bits_per_byte": reached, "unigram_bits_per_byte": 4.0, "bytes": 1000}
    if holds:
        demo.report(score)
        line = "held-out bits per byte 3.000; unigram entropy of the same bytes 4.000; 25.0 % under"
        assert line in capsys.readouterr().out
    else:
        with pytest.raises(demo.DemoError, match=r" 25 %$"):
            demo.report(score)


def test_usage_and_a_folder_for_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.parse(["--steps", "3"])
    assert ended.value.code == 2
    assert "--steps is 3; expected 4 or more" in capsys.readouterr().err
    assert (demo.parse([]).output, demo.parse([]).steps) == (ROOT / "runs" / "demo", 120)
    made = [demo.new_folder(tmp_path / "demo") for _ in range(3)]
    assert [folder.name for folder in made] == ["run-1", "run-2", "run-3"]


STEPS, SAVED = 16, 8
"""Of the demo in small: enough to be killed on a busy machine before it ends, and the step of its checkpoint."""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_whole_demo_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps: everything holds but the score, which they cannot reach; then the corpus is used again."""
    output = tmp_path / "demo"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--steps", str(STEPS), "--score-tokens", "2000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEGACPP_CONFIG": str(tmp_path / "not-there.yaml")}
    done = subprocess.run(
        [*command, "--output", str(output)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    steps = read_steps(output / "run-1" / "observe")
    first, second = ([step for step in steps if step.resumed_at == start] for start in (0, SAVED))
    assert [step.step for step in second] == list(range(SAVED + 1, STEPS + 1)), done.stdout + done.stderr
    assert first[-1].step > SAVED
    assert f"after step {first[-1].step}; resuming from the checkpoint of step {SAVED}" in done.stdout
    assert f"EQUAL: steps {SAVED + 1} to {min(STEPS, first[-1].step)}" in done.stdout
    assert "held-out bits per byte" in done.stdout
    assert "demo FAILED: the score is" in done.stderr
    assert "Warning" not in done.stdout + done.stderr

    score = json.loads((output / "run-1" / "score.json").read_text())
    assert (score["step"], score["tokens"]) == (STEPS, 1999)
    dom = check_self_contained(page := (output / "index.html").read_text(encoding="utf-8"))
    assert page == (output / "run-1" / "index.html").read_text(encoding="utf-8")
    assert {"loss-plot", "goodput-bar"} <= dom.parts()
    assert f"resumed at {SAVED}" in dom.text

    prefixes = demo.make_corpus(output / "corpus")
    files = [Path(prefix + ".bin") for prefix in prefixes]
    with open(prefixes[1] + ".bin", "r+b") as damaged:
        damaged.write(b"\x01\x00")
    assert demo.make_corpus(output / "corpus") == prefixes
    assert "corpus: rebuilding, " in capsys.readouterr().out
    times = [file.stat().st_mtime_ns for file in files]
    assert demo.make_corpus(output / "corpus") == prefixes
    assert [file.stat().st_mtime_ns for file in files] == times
