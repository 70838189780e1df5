"""``make demo``: trains nam56r_tiny on this machine, kills it, resumes it, and scores it on held-out text.

    python examples/demo.py [--device cpu|cuda] [--steps 120] [--output runs/demo]

The text is the running Python's own standard library. Training is the stock loop of the megatron-core wheel; this script
adds the kill in the middle, the comparison, and one HTML page. Exit status: 0 if every check passed; 1 if
one failed (the resumed steps differ, or the score is not good enough); otherwise that of the process that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import logging
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this clone's package, installed or not

from megacpp_mcore import settings  # noqa: E402
from megacpp_mcore.arguments.lowering import lower  # noqa: E402
from megacpp_mcore.commands import report_page  # noqa: E402
from megacpp_mcore.data.manifest import load_manifest  # noqa: E402
from megacpp_mcore.data.tokenizer import tokenizer_words  # noqa: E402
from megacpp_mcore.errors import DataError, MegacppError  # noqa: E402
from megacpp_mcore.model import preset  # noqa: E402
from megacpp_mcore.model.run import Run  # noqa: E402
from megacpp_mcore.model.training import Training  # noqa: E402
from megacpp_mcore.observe import steps  # noqa: E402

MODEL = preset("nam56r_tiny")
BATCH = 8
LEARNING_RATE = 4e-3
MIN_PERCENT_UNDER = 25
"""The held-out score has to be at least this many percent below the unigram entropy of the same bytes."""
MAX_GPU_DIFFERENCE = 0.1
"""Nats by which a repeated step may differ on a GPU; rounding errors over ten steps are far smaller."""
CPU_SCORE_TOKENS = 2**16
"""Held-out tokens scored on a CPU, in half a minute; all of them would take four."""
LOG_TAIL_LINES = 30
STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class DemoError(Exception):
    """A part of the demo failed; carries the exit status and the log whose end shows why."""

    def __init__(self, message: str, status: int = 1, log: Path | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.log = log


@dataclass(frozen=True)
class Plan:
    """What one demo does, and where its files go."""

    folder: Path
    device: str
    train_steps: int
    score_tokens: int

    @property
    def save_at(self) -> int:
        """The step of the checkpoint from which the second leg resumes."""
        return self.train_steps // 2

    @property
    def stop_after(self) -> int:
        """The step after which the first leg is killed."""
        return self.save_at + max(1, self.train_steps // 20)

    @property
    def log(self) -> Path:
        """The log of all of Megatron's output."""
        return self.folder / "log.txt"

    @property
    def record(self) -> Path:
        """The recorded steps of both legs."""
        return self.folder / "observe"

    @property
    def checkpoints(self) -> Path:
        """Megatron's checkpoint folder."""
        return self.folder / "checkpoints"


def command(plan: Plan, action: Sequence[str], data: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Return the command of one process of the demo, with complete stock arguments; fp32 on every device."""
    training = Training(
        device=plan.device,
        precision="fp32",
        transformer_impl="local",
        data=tuple(data),
        tokenizer=tokenizer_words(MODEL),
        micro_batch_size=BATCH,
        global_batch_size=BATCH,
        train_iters=plan.train_steps,
        learning_rate=LEARNING_RATE,
        extra=tuple(extra),
    )
    program = [sys.executable, "-m", "megacpp_mcore", *action, "--device", plan.device, "--"]
    return [*program, *lower(Run(MODEL, training=training))]


def training_command(plan: Plan, train_prefix: str, *, resume: bool) -> list[str]:
    """Return the command of one leg."""
    extra = ["--save", str(plan.checkpoints), "--save-interval", str(plan.save_at)]
    if resume:
        extra += ["--load", str(plan.checkpoints), "--exit-on-missing-checkpoint"]
    launch = ["launch", "--verbose", "--observe", str(plan.record)]
    return command(plan, launch, ["--data-path", train_prefix, "--split", "100,0,0"], extra)


def scoring_command(plan: Plan, heldout_prefix: str) -> list[str]:
    """Return the command that scores the last checkpoint."""
    score = ["score", "--heldout", heldout_prefix, "--output", str(plan.folder / "score.json")]
    score += ["--tokens", str(plan.score_tokens)] if plan.score_tokens else []
    score += ["--batch", "32" if plan.device == "cpu" else "128"]
    return command(plan, score, [], ["--load", str(plan.checkpoints)])


@contextlib.contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own process group, its output appended to ``log``; no process of it outlives the context."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    threads = min(2, os.cpu_count() or 1)  # layers this small gain 1.3 × from two, little from more
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.pop(settings.VARIABLE, None)  # it may describe another model
    # A signal that came before the process is known here would leave it behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
    try:
        with open(log, "ab") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=unblock,
            )
    except BaseException:
        unblock()
        raise
    try:
        unblock()
        yield process
    finally:
        if process.returncode is None:  # not reaped yet, so its group id cannot have been reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def has_ended(process: subprocess.Popen[bytes], *, wait: bool = False) -> bool:
    """Return whether a process has ended, after waiting for it if ``wait``; :func:`started` reaps it."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)) is not None


def exit_status(code: int) -> int:
    """Return the shell's exit status for a process that ended with ``code`` (negative: by that signal)."""
    return code if code >= 0 else 128 - code


def say(message: str) -> None:
    """Print a line and flush."""
    print(message, flush=True)


def show(plan: Plan, step: steps.Step, seconds: Sequence[float]) -> None:
    """Print the first and every tenth step of a leg, with its rate."""
    if step.step == step.resumed_at + 1 or step.step % 10 == 0 or step.step == plan.train_steps:
        rate = f"  {BATCH * MODEL.seq_length / statistics.median(seconds):,.0f} tokens/s" if seconds else ""
        say(f"step {step.step:>3}/{plan.train_steps}  loss {step.losses.get('lm loss', math.nan):.3f}{rate}")


def make_corpus(folder: Path) -> tuple[str, str]:
    """Build the corpus, or check the existing one; return the prefixes of training and held-out text."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that Megatron lacks
        from megacpp_mcore.data.corpus import prepare_stdlib_corpus

        try:
            prefixes = prepare_stdlib_corpus(str(folder / "stdlib"))
        except DataError as error:
            say(f"corpus: rebuilding, {error}")
            prefixes = prepare_stdlib_corpus(str(folder / "stdlib"), overwrite=True)
    train, heldout = (load_manifest(prefix) for prefix in prefixes)
    say(
        f"corpus: {train.text_bytes:,} bytes in {train.documents} files to train on, {heldout.text_bytes:,} bytes in "
        f"{heldout.documents} other files held out"
    )
    return prefixes


def train(plan: Plan, command: Sequence[str], kill_after: int = 0) -> list[steps.Step]:
    """Run one leg to its end, or until step ``kill_after`` is recorded; return its steps. Raise DemoError otherwise."""
    before = seen = len(recorded(plan))
    with started(command, plan.log) as process:
        while True:
            ended = has_ended(process)  # checked first, so that the last lines of a process ending now are still read
            all_steps = recorded(plan)
            times = [step.time_s for step in all_steps[before:]]
            for step in all_steps[seen:]:
                show(plan, step, [later - earlier for earlier, later in itertools.pairwise(times[-20:])])
            seen, leg = len(all_steps), all_steps[before:]
            if ended or (kill_after and leg and leg[-1].step >= kill_after):
                break
            time.sleep(0.25)  # each poll rereads all steps, on a core that training uses
    leg = recorded(plan)[before:]
    code = process.returncode
    if kill_after and (code != -signal.SIGKILL or not leg or leg[-1].step < kill_after):
        status = exit_status(code)
        raise DemoError(f"training ended (status {status}) before it could be killed", status or 1, plan.log)
    if not kill_after and code:
        raise DemoError(f"training failed with status {exit_status(code)}", exit_status(code), plan.log)
    return leg


def recorded(plan: Plan) -> list[steps.Step]:
    """Return the steps of both legs so far; none until training has created the folder."""
    return steps.read_steps(plan.record) if plan.record.is_dir() else []


def check_resume(plan: Plan, first: list[steps.Step], second: list[steps.Step]) -> str:
    """Compare the steps that both legs ran; return a sentence with the result, or raise DemoError."""
    if not second or second[0].step != plan.save_at + 1 or second[-1].step != plan.train_steps:
        ran = f"steps {second[0].step} to {second[-1].step}" if second else "no step"
        raise DemoError(f"the resumed run made {ran}; expected {plan.save_at + 1} to {plan.train_steps}", log=plan.log)
    before = {step.step: step.values() for step in first}
    both = [(step.step, before[step.step], step.values()) for step in second if step.step in before]
    span = f"steps {both[0][0]} to {both[-1][0]}"
    if plan.device == "cpu":
        names = sorted(set().union(*(before_kill | after_kill for _, before_kill, after_kill in both)))
        for number, before_kill, after_kill in both:
            if differing := [name for name in names if before_kill.get(name) != after_kill.get(name)]:
                raise DemoError(f"NOT EQUAL: step {number} has another {differing[0]} after the resume; see {plan.record}")
        return f"EQUAL: {span}, run before the kill and again after it, agree bit for bit in {', '.join(names)}."
    apart = [abs(before_kill["lm loss"] - after_kill["lm loss"]) for _, before_kill, after_kill in both]
    largest = math.nan if any(map(math.isnan, apart)) else max(apart)
    if not largest <= MAX_GPU_DIFFERENCE:
        raise DemoError(f"{span} differ by up to {largest:.3g} nats after the resume, more than {MAX_GPU_DIFFERENCE}")
    return (
        f"The losses of {span}, run before the kill and again after it, differ by at most {largest:.3g} nats "
        "(on a GPU, bitwise equality is only promised with --deterministic-mode, which this demo does not set)."
    )


def check_checkpoint(plan: Plan) -> None:
    """Raise DemoError unless the newest checkpoint is the one to resume from."""
    tracker = plan.checkpoints / "latest_checkpointed_iteration.txt"
    iteration = tracker.read_text().strip() if tracker.exists() else "no checkpoint"
    if iteration != str(plan.save_at):
        raise DemoError(f"{tracker} contains {iteration}; expected {plan.save_at}", log=plan.log)


def score(plan: Plan, heldout_prefix: str) -> dict[str, Any]:
    """Score the last checkpoint on the held-out text; return the content of ``score.json``, or raise DemoError."""
    with started(scoring_command(plan, heldout_prefix), plan.log) as process:
        has_ended(process, wait=True)
    if process.returncode:
        status = exit_status(process.returncode)
        raise DemoError(f"scoring failed with status {status}", status, plan.log)
    facts: dict[str, Any] = json.loads((plan.folder / "score.json").read_text())
    if facts["step"] != plan.train_steps:
        raise DemoError(f"the checkpoint of step {facts['step']} was scored; expected {plan.train_steps}", log=plan.log)
    return facts


def run_demo(output: Path, device: str, train_steps: int, score_tokens: int) -> None:
    """Run the whole demo and print its results; raise DemoError if a part or a check fails."""
    start = time.monotonic()
    plan = Plan(new_folder(output), device, train_steps, score_tokens)
    machine = f"the CPU ({platform.machine()}, {len(os.sched_getaffinity(0))} cores)"
    if device == "cuda":
        import torch

        machine = f"one {torch.cuda.get_device_name(0)}"
    say(f"{MODEL.name}: {train_steps} steps on {machine}, in {shown(plan.folder)}")
    train_prefix, heldout_prefix = make_corpus(output / "corpus")

    say(f"training from step 0 (Megatron's own log: {shown(plan.log)}); starting takes a moment")
    first = train(plan, training_command(plan, train_prefix, resume=False), kill_after=plan.stop_after)
    check_checkpoint(plan)
    say(f"killed with SIGKILL after step {first[-1].step}; resuming from the checkpoint of step {plan.save_at}")
    second = train(plan, training_command(plan, train_prefix, resume=True))
    say(check_resume(plan, first, second))

    say("scoring the last checkpoint on the held-out text")
    result = score(plan, heldout_prefix)
    text = report_page.html(plan.record)
    for target in (plan.folder, output):
        (target / "index.html").write_text(text, encoding="utf-8")
    report(result)
    say(f"megacpp-mcore here: PYTHONPATH={ROOT} {sys.executable} -m megacpp_mcore COMMAND …")
    seconds = round(time.monotonic() - start)
    say(f"page: {shown(output / 'index.html')}   (all took {seconds // 60}:{seconds % 60:02d})")


def new_folder(output: Path) -> Path:
    """Create ``output/run-N`` with the next free number, so that an earlier run is never overwritten."""
    for number in itertools.count(1):
        folder = output / f"run-{number}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def shown(path: Path) -> str:
    """Return a path as the user would type it."""
    return os.path.relpath(path)


def percent_under(result: dict[str, Any]) -> float:
    """Return by how many percent the score is below the unigram entropy."""
    return 100 * (1 - float(result["bits_per_byte"]) / float(result["unigram_bits_per_byte"]))


def report(result: dict[str, Any]) -> None:
    """Print the score; raise DemoError if it is not good enough."""
    under = percent_under(result)
    say(
        f"scored {result['bytes']:,} held-out bytes in windows of {MODEL.seq_length}, each byte predicted once from its own "
        "window (the first byte has no context and is skipped)"
    )
    say(
        f"held-out bits per byte {result['bits_per_byte']:.3f}; unigram entropy of the same bytes "
        f"{result['unigram_bits_per_byte']:.3f}; {under:.1f} % under"
    )
    if not under >= MIN_PERCENT_UNDER:
        raise DemoError(f"the score is {under:.1f} % under the unigram entropy; expected at least {MIN_PERCENT_UNDER} %")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="demo.py", description="Train nam56r_tiny, kill it, resume it, score it.")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo", help="folder (default: runs/demo)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--steps", type=int, default=120, help="training steps (default: 120, at least 4)")
    parser.add_argument(
        "--score-tokens",
        type=int,
        metavar="N",
        help=f"score the first N held-out tokens, 0: all (default: all on a GPU, {CPU_SCORE_TOKENS:,} on a CPU)",
    )
    options = parser.parse_args(arguments)
    if options.steps < 4:
        parser.error(f"--steps is {options.steps}; expected 4 or more, to have something before and after the kill")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)
    device, tokens = options.device, options.score_tokens
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if tokens is None:
        tokens = CPU_SCORE_TOKENS if device == "cpu" else 0
    for number in STOPPING - {signal.SIGINT}:  # unwind the stack, as Ctrl-C does: no process is left behind
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        run_demo(Path(os.path.realpath(options.output)), device, options.steps, tokens)
    except (DemoError, MegacppError) as error:
        sys.stdout.flush()
        log = getattr(error, "log", None)
        if log is not None and log.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
            print(f"\nthe last {len(lines)} lines of {shown(log)}:", *lines, sep="\n", file=sys.stderr)
        print(f"\ndemo FAILED: {error}", file=sys.stderr)
        return getattr(error, "status", 1)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left running. The corpus is kept: the next run starts with it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
