"""A program, one process a GPU: where the host waits for the device in an E layer whose experts are divided over all of them.

The argument is ``--moe-token-dispatcher-type``. Every rank prints the CUDA calls in which it waited, forward and backward, as a
line of JSON; and for comparison those in which it reads a number.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from megacpp_mcore.model import Layout
from tests.gpu.runs import process_groups
from tests.gpu.test_experts import build, draw, outcome


def waits(run: Callable[[], object]) -> list[str]:
    """The calls of CUDA in which the host waits for the device while ``run`` runs."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record, record_function("the run"):
        run()
    events = record.events()
    (span,) = (event.time_range for event in events if event.name == "the run" and event.device_type == DeviceType.CPU)
    return [event.name for event in events if "Synchronize" in event.name and span.start <= event.time_range.start <= span.end]


def main() -> None:
    """Build the layer, run it until all is compiled, and count."""
    ranks = int(os.environ["WORLD_SIZE"])
    with process_groups(int(os.environ["LOCAL_RANK"]), expert=ranks):
        layer = build({}, Layout(expert=ranks), "--moe-token-dispatcher-type", sys.argv[1])
        assert layer.experts.backend.observed == "triton"
        hidden, gradient = draw()
        for _ in range(2):
            outcome(layer, hidden, gradient)
        counts = {"layer": waits(lambda: outcome(layer, hidden, gradient)), "read": waits(hidden.sum().item)}
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
