"""The probe of ``probe: layers``: every layer's gradient norm in every step, and how often each expert was selected."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from megacpp_mcore.commands import cli
from megacpp_mcore.observe.events import Listener, Step
from megacpp_mcore.observe.loop import Loop

FILE = "layers.json"
SETTLED, BALANCED = 50, 100
"""First step at which gradient norms, and expert loads, count."""


def train(folder: Path, words: list[str]) -> int:
    """Run our command line with a probe among the listeners of its recording; results go into ``folder``."""
    observing, probe = Loop.observing, Probe()

    def with_probe(loop: Loop, clock: Any, listeners: Sequence[Listener]) -> Any:
        return observing(loop, clock, [*listeners, probe])

    with mock.patch.object(Loop, "observing", with_probe):
        status = cli.main(words)
    (folder / FILE).write_text(json.dumps(probe.steps))
    return status or int(probe.error is not None)


class Probe(Listener):
    """Measures the gradients that a step has left in the model, and counts what its routers chose."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._layers: Sequence[Any] = ()
        self._chosen: dict[int, list[Any]] = {}

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Hook the routers, whose second output says which token goes to which expert."""
        from megatron.core.utils import unwrap_model

        self._layers = unwrap_model(chunks[0]).decoder.layers
        for layer in self._layers:
            router = getattr(getattr(layer, "mlp", None), "router", None)
            if router is not None:
                chosen = self._chosen[layer.layer_number] = []
                router.register_forward_hook(lambda _, __, output, chosen=chosen: chosen.append(output[1].sum(0)))

    def on_step_begin(self, number: int) -> None:
        """Clear the counts of the previous step and of evaluation since."""
        for counts in self._chosen.values():
            counts.clear()

    def on_step(self, step: Step) -> None:
        """Record the norm of each layer's gradients, all scaled by the same clipping."""
        import torch

        gradients, chosen = {}, {number: torch.stack(counts).sum(0) for number, counts in self._chosen.items()}
        for layer in self._layers:
            norms = [parameter.main_grad.float().norm() for parameter in layer.parameters()]
            gradients[layer.layer_number] = float(torch.stack(norms).norm())
        record = {"grad_norm": step.grad_norm, "gradients": gradients}
        self.steps.append(record | {"chosen": {number: counts.tolist() for number, counts in chosen.items()}})

    def on_end(self, error: BaseException | None) -> None:
        """Record an error of the run or the probe."""
        self.error = error


def summary(folder: Path) -> str:
    """Return the probe's figures for a run as one cell; empty without a probe."""
    if not (folder / FILE).exists():
        return ""
    steps = json.loads((folder / FILE).read_text())
    settled, balanced = (steps[number - 1 :] or steps[-1:] for number in (SETTLED, BALANCED))
    loads = [
        [sum(counts) for counts in zip(*(step["chosen"][number] for step in balanced), strict=True)]
        for number in balanced[0]["chosen"]
    ]
    figures = {
        "grad_norm_1": steps[0]["grad_norm"],
        "grad_norm_settled": max(step["grad_norm"] for step in settled),
        "layers_apart": max(max(step["gradients"].values()) / min(step["gradients"].values()) for step in steps),
        "busiest_expert": max((max(load) * len(load) / sum(load) for load in loads), default=0.0),
        "idlest_expert": min((min(load) * len(load) / sum(load) for load in loads), default=0.0),
    }
    return " ".join(f"{name}:{value:.3g}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1]), sys.argv[2:]))
