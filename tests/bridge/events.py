"""Prints a run's scalars as JSON, one line per place: each name with its values by step.

python -m tests.bridge.events PLACE...       in an environment with TensorBoard and W&B

A place is a folder or a file of TensorBoard's events, or a file of W&B's, ``run-*.wandb``. A step with two values is an error.
"""

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

Scalar = tuple[str, int, Any]
"""Name, step and value."""


def tensorboard(place: str) -> Iterator[Scalar]:
    """Yield the scalars that TensorBoard's own reader finds."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(place, size_guidance={module.SCALARS: 0}).Reload()
    for name in events.Tags()["scalars"]:
        yield from ((name, scalar.step, scalar.value) for scalar in events.Scalars(name))


def wandb(place: str) -> Iterator[Scalar]:
    """The history, read by W&B's own reader, without what W&B adds to each step (``_step``, ``_runtime``, …)."""
    store = importlib.import_module("wandb.sdk.internal.datastore").DataStore()
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    store.open_for_scan(place)
    while (data := store.scan_data()) is not None:
        history = record.FromString(data).history  # of any other kind of record: empty
        for item in history.item:
            name = item.key or ".".join(item.nested_key)
            if not name.startswith("_"):
                yield name, history.step.num, json.loads(item.value_json)


def by_step(scalars: Iterable[Scalar]) -> dict[str, dict[int, Any]]:
    """Group values by name and step; raise ValueError for a step with two values."""
    values: dict[str, dict[int, Any]] = {}
    for name, step, value in scalars:
        if step in values.setdefault(name, {}):
            raise ValueError(f"{name} has two values for step {step}: {values[name][step]} and {value}")
        values[name][step] = value
    return values


def main() -> None:
    tables = [by_step(wandb(place) if place.endswith(".wandb") else tensorboard(place)) for place in sys.argv[1:]]
    print("\n" + "\n".join(map(json.dumps, tables)))


if __name__ == "__main__":
    main()
