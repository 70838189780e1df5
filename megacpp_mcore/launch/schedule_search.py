"""Finds which DSA layers may share another's indices: a greedy search over a trained model's Full layers on held-out text.

Each round tries every Full layer as a Shared one, and makes the change that raises the held-out loss least. Source: index
cache, arXiv 2603.12201, greedy layer selection. A script for the launcher; ``megacpp-mcore advise`` starts it.
"""

from __future__ import annotations

import contextlib
import math
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model.pattern import FULL_ATTENTION, FULL_INDEX, SHARED_INDEX, WINDOWED
from megacpp_mcore.util import console, flags


@dataclass(frozen=True)
class Round:
    """A schedule of the search: its Full layers, the one made Shared (None: the start), and its loss in nats per token."""

    full: frozenset[int]
    became_shared: int | None
    loss: float


def search(full: Sequence[int], loss: Callable[[frozenset[int]], float]) -> Iterator[Round]:
    """Yield the start, then a schedule with one Full layer fewer each round, until only the first of ``full`` is left.

    ``full`` ascends; ``loss`` returns the model's loss when the given layers are Full.

    Raises:
        ModelError: no layer is Full, or a loss is not finite.
    """
    if not full:
        raise ModelError("the model has no Full DSA layer, whose indices others could share; see dsa.schedule")

    def scored(left: frozenset[int], became_shared: int | None) -> Round:
        value = loss(left)
        if not math.isfinite(value):
            raise ModelError(f"the held-out loss with Full layers {sorted(left)} is {value}; expected a finite one")
        return Round(left, became_shared, value)

    left = frozenset(full)
    yield scored(left, None)
    while len(left) > 1:
        tried = [scored(left - {layer}, layer) for layer in sorted(left)[1:]]
        best = min(tried, key=lambda one: one.loss)
        left = best.full
        yield best


class Schedules:
    """The DSA schedules that a built GPTModel of one chunk, with our sparse layers, can use with its current weights.

    Raises:
        ModelError: its checkpoint is from the dense warm-up, when no layer selects keys.
    """

    def __init__(self, model: Any) -> None:
        from megacpp_mcore.layer_specs.core_attention import MLACoreAttention, SparseCoreAttention

        attentions = {
            layer.layer_number: getattr(layer.self_attention, "core_attention", None) for layer in model.decoder.layers
        }
        self.cores = {number: core for number, core in attentions.items() if isinstance(core, SparseCoreAttention)}
        self.dense = {
            number: FULL_ATTENTION if core.window is None else WINDOWED
            for number, core in attentions.items()
            if isinstance(core, MLACoreAttention)
        }
        for number, core in self.cores.items():
            if core.is_warming_up():
                raise ModelError(
                    f"layer {number} attends densely for the first {core.warmup_steps} steps (dsa.warmup_steps), and the "
                    "checkpoint is of one of them; search in a later one"
                )
        self.full = [number for number, core in self.cores.items() if core.indexer is not None]

    def text(self, full: frozenset[int]) -> str:
        """Return the schedule with these Full layers as text: one character per A layer."""
        roles = self.dense | {number: FULL_INDEX if number in full else SHARED_INDEX for number in self.cores}
        return "".join(roles[number] for number in sorted(roles))

    @contextlib.contextmanager
    def chosen(self, full: frozenset[int]) -> Iterator[None]:
        """Within the context, run only the indexers of these layers; each serves the layers up to the next one."""
        try:
            self._assign(full)
            yield
        finally:
            self._assign(frozenset(self.full))

    def _assign(self, full: frozenset[int]) -> None:
        served_by = {number: max(one for one in full if one <= number) for number in self.cores}
        for number, core in self.cores.items():
            core.shares = number not in full
            core.index_cache.assign({shared: one for shared, one in served_by.items() if shared != one})


def describe(schedules: Schedules, one: Round, start: float) -> str:
    """Describe a round: its schedule, its loss, and the difference from the loss of the start."""
    what = "as it is" if one.became_shared is None else f"layer {one.became_shared} Shared"
    return f"{schedules.text(one.full)}  {what:<18} {one.loss:.6f} nats a token  {one.loss / start - 1:+.4%}"


def advice(schedules: Schedules, rounds: Sequence[Round], tolerance: float) -> str:
    """Choose the schedule with the fewest indexers and a loss within ``tolerance`` (relative) of the start's."""
    best = [one for one in rounds if one.loss <= rounds[0].loss * (1 + tolerance)][-1]
    if len(rounds) == 1:
        return "advised: the schedule as it is; no other was tried"
    if best is rounds[0]:
        return f"advised: the schedule as it is; every other raises the loss by more than {tolerance:.2%}"
    return f"advised: --schedule={schedules.text(best.full)}, {len(best.full)} of {len(rounds[0].full)} indexers"


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's options to those of a parser, Megatron's or the command's."""
    add = parser.add_argument_group("advice").add_argument
    add("--heldout", required=True, metavar="PREFIX", help="byte dataset to score on")
    add("--tokens", type=flags.positive, default=65536, metavar="N", help="its first N tokens (default: 65536)")
    add("--batch", type=flags.positive, default=8, metavar="W", help="windows at a time (default: 8)")
    rise = "rise of the loss to accept (default: 0.001)"
    add("--tolerance", type=flags.not_negative, default=1e-3, metavar="X", help=rise)
    return parser


def main() -> None:
    """Run the search with the options in ``sys.argv``."""
    # These import numpy.
    from megacpp_mcore.launch.heldout import cut_windows, load_model, parsed, read_heldout, score_windows

    args = parsed(add_options)
    windows = cut_windows(read_heldout(args.heldout, args.tokens)[0], args.seq_length)
    model = load_model(args)
    schedules = Schedules(model)

    def loss(full: frozenset[int]) -> float:
        with schedules.chosen(full):
            score = score_windows(model, windows, args.batch, progress=False)
        return score.nats / int(windows.mask_WS.sum())

    rounds: list[Round] = []
    for one in search(schedules.full, loss):
        rounds.append(one)
        console.say(describe(schedules, one, rounds[0].loss))
    console.say(advice(schedules, rounds, args.tolerance))


if __name__ == "__main__":
    main()
