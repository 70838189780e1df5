"""Which DSA layers may share the indices of another: a greedy search over a trained model's Full layers on held-out text.

Each round tries every Full layer as a Shared one, and keeps the change that raises the held-out loss least. Source: index
cache, arXiv 2603.12201, greedy layer selection. A script for the launcher; ``megacpp-mcore advise`` starts it.
"""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model.pattern import FULL_ATTENTION, FULL_INDEX, SHARED_INDEX


@dataclass(frozen=True)
class Round:
    """A schedule of the search: the layers that are Full, the one that became Shared (None: the start), nats a token."""

    full: frozenset[int]
    became_shared: int | None
    loss: float


def search(full: Sequence[int], loss: Callable[[frozenset[int]], float]) -> Iterator[Round]:
    """The start, then one layer fewer Full a round, until the first is left.

    Args:
        full: the Full layers, ascending; the first one stays.
        loss: of the model when these of them are Full.

    Raises:
        ModelError: no layer is Full.
    """
    if not full:
        raise ModelError("the model has no Full DSA layer, whose indices others could share; see dsa.schedule")
    left = frozenset(full)
    yield Round(left, None, loss(left))
    while len(left) > 1:
        tried = [Round(left - {layer}, layer, loss(left - {layer})) for layer in sorted(left)[1:]]
        best = min(tried, key=lambda one: one.loss)
        left = best.full
        yield best


class Schedules:
    """The DSA schedules that a built model can have without other weights.

    Args:
        model: a GPTModel of one chunk, its sparse layers ours.
    """

    def __init__(self, model: Any) -> None:
        from megacpp_mcore.layer_specs.attention import MLACoreAttention, SparseCoreAttention

        attentions = {
            layer.layer_number: getattr(layer.self_attention, "core_attention", None) for layer in model.decoder.layers
        }
        self.cores = {number: core for number, core in attentions.items() if isinstance(core, SparseCoreAttention)}
        self.dense = [number for number, core in attentions.items() if isinstance(core, MLACoreAttention)]
        self.full = [number for number, core in self.cores.items() if core.indexer is not None]

    def text(self, full: frozenset[int]) -> str:
        """The schedule when these layers are Full: one character an A layer."""
        roles = {number: FULL_INDEX if number in full else SHARED_INDEX for number in self.cores}
        return "".join(roles.get(number, FULL_ATTENTION) for number in sorted([*self.cores, *self.dense]))

    @contextlib.contextmanager
    def chosen(self, full: frozenset[int]) -> Iterator[None]:
        """While it lasts, these layers alone run their indexers, and each serves those up to the next."""
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


def report(schedules: Schedules, rounds: Sequence[Round], tolerance: float) -> Iterator[str]:
    """A line a round, and the schedule with the fewest indexers whose loss is within ``tolerance`` (relative) of the start."""
    start = rounds[0].loss
    for one in rounds:
        what = "as it is" if one.became_shared is None else f"layer {one.became_shared} Shared"
        yield f"{schedules.text(one.full)}  {what:<18} {one.loss:.6f} nats a token  {one.loss / start - 1:+.4%}"
    best = [one for one in rounds if one.loss <= start * (1 + tolerance)][-1]
    if best is rounds[0]:
        yield f"advised: the schedule as it is; every other raises the loss by more than {tolerance:.2%}"
    else:
        yield f"advised: --schedule={schedules.text(best.full)}, {len(best.full)} of {len(rounds[0].full)} indexers"


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's options to those of a parser, Megatron's or the command's."""
    group = parser.add_argument_group("advice")
    group.add_argument("--heldout", required=True, metavar="PREFIX", help="byte dataset to score on")
    group.add_argument("--tokens", type=int, default=65536, metavar="N", help="its first N tokens (default: 65536)")
    group.add_argument("--batch", type=int, default=8, metavar="W", help="windows at a time (default: 8)")
    group.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X", help="rise of the loss to accept (default: 0.001)"
    )
    return parser


def main() -> None:
    """Search as ``sys.argv`` says."""
    import torch
    from megatron.training.arguments import parse_and_validate_args

    from megacpp_mcore.launch.heldout import cut_windows, load_model, read_heldout, score_windows  # brings numpy

    args = parse_and_validate_args(
        add_options, args_defaults={"skip_train": True, "no_load_optim": True, "no_load_rng": True}
    )
    windows = cut_windows(read_heldout(args.heldout, args.tokens), args.seq_length)
    model = load_model(args)
    schedules = Schedules(getattr(model, "module", model))

    def loss(full: frozenset[int]) -> float:
        with schedules.chosen(full), torch.no_grad():
            score = score_windows(model, windows, args.batch, progress=False)
        return score.nats / int(windows.mask_WS.sum())

    rounds = []
    for one in search(schedules.full, loss):
        rounds.append(one)
        print(f"{schedules.text(one.full)}: {one.loss:.6f} nats a token", flush=True)
    print("\n".join(report(schedules, rounds, args.tolerance)), flush=True)


if __name__ == "__main__":
    main()
