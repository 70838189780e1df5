"""What recording a run costs: steps with it and without it, block by block, in one training.

    python -m benchmarks.overhead --recipe nam56r_quarter_pretrain_1gpu_h200_bf16 --data CORPUS/stdlib_train

Two runs of the same command differ by more than what is looked for here, so that one run is observed now and then: blocks of
``--block`` steps alternate, the first and the last without. Recording is switched on as a launch does it, whole (goodput,
steps, routing, live line, receipt), in a folder of its own each time, and switched off by its own end. A step reaches from the
beginning of Megatron's ``train_step`` to that of the next; the first two of a block are left out. Each observed block is
compared with the mean of its two neighbours, which takes out a drift of the machine. Comparisons that follow each other share a
plain block, so that their standard error is made from the blocks' own spread, with every block's weight in the mean comparison.

``listeners_ms`` is free of that noise: the host's time in what records, a step. It has the wait for the device where the
routing is read, and has not the hooks that count it in the forward pass.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from megacpp_mcore import launcher
from megacpp_mcore.bench.measure import Table, device_name, versions
from megacpp_mcore.lowering import lower
from megacpp_mcore.observe import run as observation
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.listener import Listener
from megacpp_mcore.observe.loop import StockLoop, Told
from megacpp_mcore.observe.run import observed  # the real one, whose place this takes in the launch
from megacpp_mcore.policy import LaunchPolicy
from megacpp_mcore.recipe_command import tokenizer_words
from megacpp_mcore.recipes import recipe

SWITCH = 2
"""Steps at each switch that are left out: the one it happens in, and the first whole one, which learns the run's facts."""

LIMIT = 0.01
"""What recording may cost of a step."""

COLUMNS = (
    "recipe", "device", "blocks_observed", "steps_a_block", "left_out_a_block", "plain_ms", "observed_ms", "overhead",
    "standard_error", "listeners_ms", "torch", "megatron-core", "transformer-engine", "commit",
)  # fmt: skip


class Joining(StockLoop):
    """Megatron's loop, observed from its middle."""

    def __init__(self, made: Sequence[Any]) -> None:
        self._made = made

    @contextlib.contextmanager
    def observing(self, clock: Clock, listeners: Sequence[Listener]) -> Iterator[None]:
        """As from the beginning, the model being there."""
        with super().observing(clock, listeners):
            for listener in listeners:
                listener.on_model(*self._made)
            clock.become(Phase.IDLE)
            yield


class Alternation:
    """Stands in for :func:`megacpp_mcore.observe.run.observed`, and takes the time of every step.

    Args:
        folder: where each observed block leaves a run.
        warmup: steps before the first block.
        block: steps of a block.
        blocks: how many there are.
    """

    def __init__(self, folder: Path, warmup: int, block: int, blocks: int) -> None:
        self._folder, self._warmup, self._block, self._blocks = folder, warmup, block, blocks
        self._made: Sequence[Any] = ()
        self._recording = contextlib.ExitStack()
        self._step = 0
        self._began_ns = 0
        self._listened_ns = 0
        self.milliseconds: dict[int, list[float]] = {}
        """Of each block, in order, but for the steps at its beginning."""
        self.listening: list[float] = []
        """Milliseconds that the listeners took in each of those steps of the observed blocks."""

    @contextlib.contextmanager
    def __call__(self, chosen: observation.Observation, launched: LaunchPolicy) -> Iterator[None]:
        """Take the place of what records, until training has ended."""
        from megatron.training import training

        set_up, train_step, tell = training.setup_model_and_optimizer, training.train_step, Told.tell

        def noted(*args: Any, **kwargs: Any) -> Any:
            made = set_up(*args, **kwargs)
            self._made = made[:2]
            return made

        def ticking(*args: Any, **kwargs: Any) -> Any:
            self._tick(chosen, launched)
            return train_step(*args, **kwargs)

        def listening(told: Told, what: Callable[[Listener], None]) -> None:
            began_ns = time.perf_counter_ns()
            tell(told, what)
            self._listened_ns += time.perf_counter_ns() - began_ns

        with contextlib.ExitStack() as replaced:
            for holder, name, ours in (
                (training, "setup_model_and_optimizer", noted),
                (training, "train_step", ticking),
                (Told, "tell", listening),
            ):
                replaced.enter_context(mock.patch.object(holder, name, ours))
            replaced.enter_context(self._recording)
            yield

    def _tick(self, chosen: observation.Observation, launched: LaunchPolicy) -> None:
        """Note the step that has ended; go over to the next block where that begins."""
        now = time.perf_counter_ns()
        block, place = self._place(self._step)
        if block is not None and place >= SWITCH:
            self.milliseconds.setdefault(block, []).append((now - self._began_ns) / 1e6)
            if block % 2:
                self.listening.append(self._listened_ns / 1e6)
        self._listened_ns = 0
        self._step, self._began_ns = self._step + 1, now
        ended, (block, place) = block, self._place(self._step)
        if ended is not None and block != ended:
            kind, mean = "observed" if ended % 2 else "plain", statistics.fmean(self.milliseconds[ended])
            print(f"block {ended}, {kind}: {mean:.1f} ms a step", flush=True)
        if block is not None and place == 0:
            self._recording.close()
            if block % 2 == 1:
                there = dataclasses.replace(chosen, folder=self._folder / f"block_{block}")
                self._recording.enter_context(observed(there, launched, Joining(self._made)))

    def _place(self, step: int) -> tuple[int | None, int]:
        """The block of a step (1-based), None before the first and after the last, and its place there."""
        block, place = divmod(step - 1 - self._warmup, self._block)
        return block if 0 <= block < self._blocks else None, place


def main() -> int:
    """Train, print and append the row; 0 only where it is shown, by two standard errors, that recording costs 1 % at most."""
    args = arguments()
    table = Table(args.output, COLUMNS)
    blocks = 2 * args.observed_blocks + 1
    chosen = recipe(args.recipe)
    training = dataclasses.replace(
        chosen.training,
        global_batch_size=args.global_batch_size or chosen.training.global_batch_size,
        train_iters=args.warmup + blocks * args.block + 1,
        data=("--data-path", args.data, "--split", "100,0,0"),
        tokenizer=tokenizer_words(chosen.model, data=args.data),
    )
    alternation = Alternation(args.runs, args.warmup, args.block, blocks)
    with mock.patch.object(observation, "observed", alternation):
        words = lower(chosen.model, chosen.layout, training)
        status = launcher.launch(words, device=training.device, recording=launcher.Recording(off=True))
    if status or sorted(alternation.milliseconds) != list(range(blocks)):
        sys.exit(f"training ended with status {status}; of {blocks} blocks ran {sorted(alternation.milliseconds)}")
    plain, seen, overheads = compared(alternation.milliseconds)
    overhead, error = statistics.fmean(overheads), standard_error(alternation.milliseconds)
    print(
        f"plain {plain:.1f} ms, observed {seen:.1f} ms: {overhead:+.2%} with a standard error of {error:.2%}",
        flush=True,
    )
    listeners = statistics.fmean(alternation.listening)
    print(f"of an observed step, its listeners take {listeners:.2f} ms, {listeners / seen:.2%}", flush=True)
    print("each block against its neighbours: " + ", ".join(f"{one:+.2%}" for one in overheads), flush=True)
    row = {
        "recipe": chosen.name,
        "device": device_name(training.device),
        "blocks_observed": args.observed_blocks,
        "steps_a_block": args.block,
        "left_out_a_block": SWITCH,
        "plain_ms": f"{plain:.2f}",
        "observed_ms": f"{seen:.2f}",
        "overhead": f"{overhead:.5f}",
        "standard_error": f"{error:.5f}",
        "listeners_ms": f"{listeners:.3f}",
        **versions("transformer-engine"),
    }
    table.append(row)
    return int(overhead + 2 * error > LIMIT)


def compared(milliseconds: Mapping[int, Sequence[float]]) -> tuple[float, float, list[float]]:
    """Mean step of the plain and of the observed blocks, and each observed block over its two neighbours, less one."""
    means = [statistics.fmean(milliseconds[block]) for block in sorted(milliseconds)]
    overheads = [means[at] / statistics.fmean((means[at - 1], means[at + 1])) - 1 for at in range(1, len(means), 2)]
    return statistics.fmean(means[0::2]), statistics.fmean(means[1::2]), overheads


def standard_error(milliseconds: Mapping[int, Sequence[float]]) -> float:
    """Of the mean of :func:`compared`'s comparisons: the spread of equal blocks, each weighted as it enters that mean.

    The spread is that of the plain blocks around their neighbours' mean, and of the observed ones around theirs, so that a
    drift of the machine is no noise.
    """
    means = [statistics.fmean(milliseconds[block]) for block in sorted(milliseconds)]
    bends = [means[at] - (means[at - 2] + means[at + 2]) / 2 for at in range(2, len(means) - 2)]
    variance = statistics.fmean(bend * bend for bend in bends) / 1.5  # of a block, and of the mean of two others
    observed = len(means) // 2
    weights = [
        1 / observed if at % 2 else (1 if 0 < at < len(means) - 1 else 0.5) / observed for at in range(len(means))
    ]
    return math.sqrt(variance * sum(weight * weight for weight in weights)) / statistics.fmean(means)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", default="nam56r_quarter_pretrain_1gpu_h200_bf16")
    parser.add_argument("--data", required=True, help="dataset prefix")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the first block")
    parser.add_argument("--block", type=int, default=20, help="steps of a block; the routing is read every tenth")
    parser.add_argument("--observed-blocks", type=int, default=4)
    parser.add_argument("--global-batch-size", type=int, help="default: the recipe's")
    parser.add_argument("--runs", type=Path, required=True, help="folder for what the observed blocks record")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/overhead.csv"))
    args = parser.parse_args(words)
    if args.block <= SWITCH or args.observed_blocks < 3 or args.warmup < 1:
        parser.error(
            f"--block {args.block}, --observed-blocks {args.observed_blocks}, --warmup {args.warmup}: expected more than "
            f"{SWITCH} steps a block, 3 observed blocks or more, and a step of warm-up"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
