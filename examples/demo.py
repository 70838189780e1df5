"""``make demo``: trains nam56r_tiny on this machine, kills it, resumes it, and scores it on held-out text.

    python examples/demo.py [--device cpu|cuda] [--steps 200] [--output runs/demo]

The text is the running Python's own standard library. Training is the stock loop of the megatron-core wheel; this script
adds the progress line, the kill in the middle, the comparison, and one HTML page. Exit status: 0 if every check passed; 1 if
one failed (the resumed steps differ, or the score is not good enough); otherwise that of the process that failed.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any, NoReturn, TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this clone's package, installed or not

from megacpp_mcore import settings  # noqa: E402
from megacpp_mcore.arguments.lowering import lower  # noqa: E402
from megacpp_mcore.data.manifest import load_manifest, verify  # noqa: E402
from megacpp_mcore.data.tokenizer import tokenizer_words  # noqa: E402
from megacpp_mcore.errors import DataError, MegacppError  # noqa: E402
from megacpp_mcore.model import Layout, preset  # noqa: E402
from megacpp_mcore.model.training import Training  # noqa: E402
from megacpp_mcore.observe import page, steps  # noqa: E402

MODEL = preset("nam56r_tiny")
FAMILIES = {"A": "attention (MLA; DSA with index cache)", "M": "Mamba-3", "E": "experts (MoE)", "R": "M²RNN"}
BATCH = 8
LEARNING_RATE = 4e-3
MIN_PERCENT_UNDER = 25
"""The held-out score has to be at least this many percent below the unigram entropy of the same bytes."""
MAX_GPU_DIFFERENCE = 0.1
"""Nats by which a repeated step may differ on a GPU; rounding errors over ten steps are far smaller."""
CPU_SCORE_TOKENS = 2**17
"""Held-out tokens scored on a CPU, in less than a minute; all of them would take four."""
LOG_TAIL_LINES = 30


class DemoError(Exception):
    """The demo cannot go on; carries the exit status and the log whose tail shows why."""

    def __init__(self, message: str, status: int = 1, log: Path | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.log = log


# --- The plan ---------------------------------------------------------------------------------------------------------


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

    @property
    def score_file(self) -> Path:
        """The held-out score."""
        return self.folder / "score.json"


def megatron_words(plan: Plan, data: Sequence[str], extra: Sequence[str]) -> list[str]:
    """The complete stock arguments of one process of the demo; fp32 on every device."""
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
    return list(lower(MODEL, Layout(), training))


def training_command(plan: Plan, train_prefix: str, *, resume: bool) -> list[str]:
    """The command of one leg."""
    data = ("--data-path", train_prefix, "--split", "100,0,0")
    extra = ["--save", str(plan.checkpoints), "--save-interval", str(plan.save_at)]
    if resume:
        extra += ["--load", str(plan.checkpoints), "--exit-on-missing-checkpoint"]
    return [*launch_words(plan, "--observe", str(plan.record)), *megatron_words(plan, data, extra)]


def scoring_command(plan: Plan, heldout_prefix: str) -> list[str]:
    """The command that scores the last checkpoint."""
    extra = ["--load", str(plan.checkpoints), "--heldout", heldout_prefix, "--score-output", str(plan.score_file)]
    extra += ["--score-tokens", str(plan.score_tokens), "--score-batch", "32" if plan.device == "cpu" else "128"]
    script = str(ROOT / "examples" / "score_heldout.py")
    return [*launch_words(plan), script, *megatron_words(plan, (), extra)]


def launch_words(plan: Plan, *options: str) -> list[str]:
    """``megacpp-mcore launch`` as this Python's module."""
    return [sys.executable, "-m", "megacpp_mcore", "launch", "--verbose", "--device", plan.device, *options, "--"]


# --- Processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own process group, its output appended to ``log``; no process of it outlives the context."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    threads = min(2, os.cpu_count() or 1)  # layers this small gain 1.3 × from two, little from more
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.pop(settings.VARIABLE, None)  # it may describe another model
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process, if it still runs, and whatever it started; then reap it."""
    if process.returncode is None:  # not reaped yet, so its group id cannot have been reused
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended; leaves it to be reaped by :func:`kill_group`."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def exit_status(code: int) -> int:
    """The shell's number for a process that ended with ``code`` (negative: by that signal)."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, so that no process is left behind."""

    def leave(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- Progress ---------------------------------------------------------------------------------------------------------


class Progress:
    """The progress line: live on a terminal, every tenth step elsewhere."""

    def __init__(self, plan: Plan, stream: TextIO | None = None) -> None:
        self.plan = plan
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._seconds: list[float] = []
        self._last: steps.Step | None = None

    def show(self, step: steps.Step) -> None:
        """Show a step that has just been recorded."""
        if self._last is not None and step.resumed_at == self._last.resumed_at:
            self._seconds.append(step.time_s - self._last.time_s)
        self._last = step
        if self._live:
            self._stream.write(f"\r\x1b[K{self.line(step)}")
        elif step.step == step.resumed_at + 1 or step.step % 10 == 0 or step.step == self.plan.train_steps:
            self._stream.write(self.line(step) + "\n")
        self._stream.flush()

    def line(self, step: steps.Step) -> str:
        """The state as text."""
        text = f"step {step.step:>3}/{self.plan.train_steps}  loss {step.losses.get('lm loss', math.nan):.3f}"
        if not self._seconds:
            return text
        typical = statistics.median(self._seconds[-20:])
        left = self.plan.train_steps - step.step
        if step.resumed_at == 0:
            left += self.plan.stop_after - self.plan.save_at  # the steps that are run twice
        rate = BATCH * MODEL.seq_length / typical
        return f"{text}  {rate:,.0f} tokens/s  {clock(left * typical)} of training left"

    def say(self, message: str) -> None:
        """Print a line of its own."""
        self._stream.write("\r\x1b[K" * self._live + message + "\n")
        self._stream.flush()


def clock(seconds: float) -> str:
    """``seconds`` as m:ss."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


# --- The parts --------------------------------------------------------------------------------------------------------


def make_corpus(folder: Path, progress: Progress) -> tuple[str, str]:
    """Build the corpus, or check the existing one; returns the prefixes of training and held-out text."""
    from megacpp_mcore.data.corpus import prepare_stdlib_corpus

    prefixes = (str(folder / "stdlib_train"), str(folder / "stdlib_heldout"))
    there, reason = check_corpus(prefixes)
    if not there:
        progress.say(f"corpus: making it from the standard library of Python {platform.python_version()}{reason}")
        folder.mkdir(parents=True, exist_ok=True)
        with quiet_imports():
            made = prepare_stdlib_corpus(str(folder / "stdlib"), overwrite=True)
        if made != prefixes:
            raise DemoError(f"the corpus was written to {made}; expected {prefixes}")
    train, heldout = (load_manifest(prefix) for prefix in prefixes)
    progress.say(
        f"corpus: {train.text_bytes:,} bytes in {train.documents} files to train on, {heldout.text_bytes:,} bytes in "
        f"{heldout.documents} other files held out" + (" (already there, checked)" if there else "")
    )
    return prefixes


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress the dozen warnings about missing packages that importing Megatron prints."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_corpus(prefixes: Sequence[str]) -> tuple[bool, str]:
    """Whether the datasets exist, are complete and match this Python; and why existing files are unusable."""
    if not any(Path(prefix + ".manifest.json").exists() for prefix in prefixes):
        return False, ""
    try:
        commands = [verify(prefix).command for prefix in prefixes]
    except DataError as error:
        return False, f" again: {error}"
    if not all(command.endswith(f"Python {platform.python_version()}") for command in commands):
        return False, " again: the one that is there is another Python's"
    return True, ""


def train(plan: Plan, command: Sequence[str], progress: Progress, kill_after: int = 0) -> list[steps.Step]:
    """Run one leg to its end, or, with ``kill_after``, until that step is recorded; returns its steps.

    Raises:
        DemoError: it failed, or it ended before it could be killed.
    """
    before = seen = len(recorded(plan))
    with started(command, plan.log) as process:
        while True:
            ended = has_ended(process)  # checked first, so that the last lines of a process ending now are still read
            found = recorded(plan)
            for step in found[seen:]:
                progress.show(step)
            seen, found = len(found), found[before:]
            if ended or (kill_after and found and found[-1].step >= kill_after):
                break
            time.sleep(0.25)  # each poll rereads all steps, on a core that training uses
    found = recorded(plan)[before:]
    code = process.returncode
    if kill_after and (code != -signal.SIGKILL or not found or found[-1].step < kill_after):
        status = exit_status(code)
        raise DemoError(f"training ended (status {status}) before it could be killed", status or 1, plan.log)
    if not kill_after and code:
        raise DemoError(f"training failed with status {exit_status(code)}", exit_status(code), plan.log)
    return found


def recorded(plan: Plan) -> list[steps.Step]:
    """The steps of both legs so far; none until training has created the folder."""
    return steps.read_steps(plan.record) if plan.record.is_dir() else []


def check_resume(plan: Plan, first: list[steps.Step], second: list[steps.Step]) -> str:
    """Compare the steps that both legs ran; returns a sentence with the result.

    Raises:
        DemoError: they differ, or the second leg did not start where it should.
    """
    if not second or second[0].step != plan.save_at + 1 or second[-1].step != plan.train_steps:
        ran = f"steps {second[0].step} to {second[-1].step}" if second else "no step"
        raise DemoError(f"the resumed run made {ran}; expected {plan.save_at + 1} to {plan.train_steps}", log=plan.log)
    before = {step.step: step.values() for step in first}
    both = [(step.step, before[step.step], step.values()) for step in second if step.step in before]
    span = f"steps {both[0][0]} to {both[-1][0]}"
    if plan.device == "cpu":
        names = sorted(set().union(*(one | other for _, one, other in both)))
        for number, one, other in both:
            if differing := [name for name in names if one.get(name) != other.get(name)]:
                raise DemoError(
                    f"NOT EQUAL: step {number} has another {differing[0]} after the resume; see {plan.record}"
                )
        return f"EQUAL: {span}, run before the kill and again after it, agree bit for bit in {', '.join(names)}."
    apart = [abs(one["lm loss"] - other["lm loss"]) for _, one, other in both]
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
    found = tracker.read_text().strip() if tracker.exists() else "no checkpoint"
    if found != str(plan.save_at):
        raise DemoError(f"{tracker} says {found}; expected {plan.save_at}", log=plan.log)


def score(plan: Plan, heldout_prefix: str) -> dict[str, Any]:
    """Score the last checkpoint on the held-out text; returns the content of ``score.json``.

    Raises:
        DemoError: the scoring process failed, or scored another step than the last.
    """
    with started(scoring_command(plan, heldout_prefix), plan.log) as process:
        while not has_ended(process):
            time.sleep(0.05)
    if process.returncode:
        status = exit_status(process.returncode)
        raise DemoError(f"scoring failed with status {status}", status, plan.log)
    found: dict[str, Any] = json.loads(plan.score_file.read_text())
    if found["step"] != plan.train_steps:
        raise DemoError(f"the checkpoint of step {found['step']} was scored; expected {plan.train_steps}", log=plan.log)
    return found


def device_words(device: str) -> str:
    """Human-readable name of the device."""
    if device == "cpu":
        return f"the CPU ({platform.machine()}, {len(os.sched_getaffinity(0))} cores)"
    import torch

    return f"one {torch.cuda.get_device_name(0)}"


# --- The whole --------------------------------------------------------------------------------------------------------


def run_demo(output: Path, device: str, train_steps: int, score_tokens: int) -> None:
    """Run the whole demo and print its results.

    Raises:
        DemoError: something failed, or a check did not pass.
    """
    began = time.monotonic()
    plan = Plan(new_folder(output), device, train_steps, score_tokens)
    progress = Progress(plan)
    progress.say(f"{MODEL.name}: {train_steps} steps on {device_words(device)}, in {shown(plan.folder)}")
    train_prefix, heldout_prefix = make_corpus(output / "corpus", progress)

    progress.say(f"training from step 0 (Megatron's own log: {shown(plan.log)}); starting takes a moment")
    first_command = training_command(plan, train_prefix, resume=False)
    first = train(plan, first_command, progress, kill_after=plan.stop_after)
    check_checkpoint(plan)
    progress.say(
        f"killed with SIGKILL after step {first[-1].step}; resuming from the checkpoint of step {plan.save_at}"
    )
    second = train(plan, training_command(plan, train_prefix, resume=True), progress)
    repeat = check_resume(plan, first, second)
    progress.say(repeat)

    progress.say("scoring the last checkpoint on the held-out text")
    found = score(plan, heldout_prefix)
    write_page(plan, output, first, second, repeat, found)
    report(plan, found, progress)
    progress.say(f"megacpp-mcore here: PYTHONPATH={ROOT} {sys.executable} -m megacpp_mcore COMMAND …")
    progress.say(f"page: {shown(output / 'index.html')}   (all took {clock(time.monotonic() - began)})")


def new_folder(output: Path) -> Path:
    """Create ``output/run-N`` with the next free number, so that an earlier run is never overwritten."""
    output.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = output / f"run-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def shown(path: Path) -> str:
    """A path as the user would type it."""
    return os.path.relpath(path)


def write_page(
    plan: Plan, output: Path, first: list[steps.Step], second: list[steps.Step], repeat: str, found: dict[str, Any]
) -> None:
    """Write the run's page, and a copy to ``output/index.html``."""
    under = 100 * (1 - found["bits_per_byte"] / found["unigram_bits_per_byte"])
    figures = [
        (f"{found['bits_per_byte']:.3f}", "bits per byte, held out"),
        (f"{found['unigram_bits_per_byte']:.3f}", f"unigram entropy of the same {found['bytes']:,} bytes"),
        (f"{abs(under):.1f} %", f"{'under' if under >= 0 else 'over'} the unigram entropy"),
    ]
    addition = page.Addition(
        title=f"{MODEL.name}, {second[-1].step} steps of stock Megatron on {device_words(plan.device)}",
        lead=f"Killed after step {first[-1].step}, resumed from the checkpoint of step {plan.save_at}. {repeat}",
        figures=figures,
        levels=((found["unigram_bits_per_byte"] * math.log(2), "unigram"),),
        loss_note=(
            "The dashed level is the unigram entropy of the held-out bytes, the least that a model without context could "
            "reach on them."
        ),
        tables=(model_table(),),
    )
    text = page.html(plan.record, addition)
    for target in (plan.folder, output):
        (target / "index.html").write_text(text, encoding="utf-8")


def model_table() -> tuple[str, Sequence[str], list[tuple[str, str, str]]]:
    """Title, header and rows of a table of the model's layers and parameters by family."""
    counts = MODEL.parameters()
    rows = [
        (f"{letter}: {name}", str(MODEL.layers.count(letter)), f"{counts[letter]:,}")
        for letter, name in FAMILIES.items()
        if letter in MODEL.layers
    ]
    depth = MODEL.mtp.depth
    if depth:
        rows.append((f"MTP block, applied {depth} time{'s' * (depth > 1)}", "1", f"{counts['mtp']:,}"))
    rest = sum(counts[name] for name in ("embedding", "head", "norm"))
    rows += [("embedding, output layer, final norm", "", f"{rest:,}")]
    rows += [("total", str(MODEL.depth), f"{sum(counts.values()):,}")]
    title = f"Model: {MODEL.layers}, hidden size {MODEL.hidden_size}, sequence {MODEL.seq_length} tokens"
    return title, ("family", "layers", "parameters"), rows


def report(plan: Plan, found: dict[str, Any], progress: Progress) -> None:
    """Print the score; raise DemoError if it is not good enough."""
    reached, unigram = found["bits_per_byte"], found["unigram_bits_per_byte"]
    under = 100 * (1 - reached / unigram)
    progress.say(
        f"scored {found['bytes']:,} held-out bytes in windows of {MODEL.seq_length}, each byte predicted once from its own "
        "window (the very first, which nothing is before, is not)"
    )
    progress.say(
        f"held-out bits per byte {reached:.3f}; unigram entropy of the same bytes {unigram:.3f}; {under:.1f} % under"
    )
    if not under >= MIN_PERCENT_UNDER:
        raise DemoError(
            f"the score is {under:.1f} % under the unigram entropy; expected at least {MIN_PERCENT_UNDER} %"
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="demo.py", description="Train nam56r_tiny, kill it, resume it, score it.")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo", help="folder (default: runs/demo)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200, at least 4)")
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


def choose_device(device: str) -> str:
    """``cpu`` or ``cuda``."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def show_failure(error: DemoError) -> None:
    """Print what failed, and the end of the log that shows why."""
    sys.stdout.flush()
    if error.log is not None and error.log.exists():
        lines = error.log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"\nthe last {min(len(lines), LOG_TAIL_LINES)} lines of {shown(error.log)}:", file=sys.stderr)
        print("\n".join(lines[-LOG_TAIL_LINES:]), file=sys.stderr)
    print(f"\ndemo FAILED: {error}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = parse(arguments)
    try:
        with signals_as_exit():
            device = choose_device(options.device)
            score_tokens = options.score_tokens
            if score_tokens is None:
                score_tokens = CPU_SCORE_TOKENS if device == "cpu" else 0
            run_demo(Path(os.path.realpath(options.output)), device, options.steps, score_tokens)
    except DemoError as error:
        show_failure(error)
        return error.status
    except MegacppError as error:
        print(f"\ndemo FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ninterrupted; nothing is left running. The corpus is kept: the next run starts with it", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
