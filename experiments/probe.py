"""The probe of ``probe: layers``: every layer's gradient norm in every step, and how often each expert was chosen."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

FILE = "layers.json"
SETTLED, BALANCED = 50, 100
"""The first steps whose gradient norms, and expert loads, count."""


def train(folder: Path, words: list[str]) -> int:
    """Run our command line with a probe around Megatron's ``train_step``; results go into ``folder``."""
    from megacpp_mcore.commands import cli

    finder = _Finder()
    sys.meta_path.insert(0, finder)
    status = int(cli.main(words) or 0)
    (folder / FILE).write_text(json.dumps(finder.steps))
    return status


class _Finder:
    """Wraps ``train_step`` when its module is imported."""

    module = "megatron.training.training"

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.chosen: dict[int, list[Any]] = defaultdict(list)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the other finders find the module, and wrap its function once the module has been executed."""
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module.train_step = self.around(module.train_step)

        spec.loader.exec_module = exec_module
        return spec

    def around(self, train_step: Any) -> Any:
        """``train_step``, followed by measuring the gradients that it left in the model."""
        import torch
        from megatron.core.utils import unwrap_model

        def measured(*args: Any, **kwargs: Any) -> Any:
            layers = unwrap_model(args[2])[0].decoder.layers
            if not self.steps:
                self._watch(layers)
            for counts in self.chosen.values():
                counts.clear()
            result = train_step(*args, **kwargs)
            gradients, chosen = {}, {number: torch.stack(counts).sum(0) for number, counts in self.chosen.items()}
            for layer in layers:  # all scaled by the same clipping
                norms = [one.main_grad.float().norm() for one in layer.parameters()]
                gradients[layer.layer_number] = float(torch.stack(norms).norm())
            step = {"grad_norm": float(result[5]), "gradients": gradients}
            self.steps.append(step | {"chosen": {number: counts.tolist() for number, counts in chosen.items()}})
            return result

        return measured

    def _watch(self, layers: Any) -> None:
        """Hook the routers, whose second output says which token goes to which expert."""
        for layer in layers:
            router = getattr(getattr(layer, "mlp", None), "router", None)
            if router is not None:
                chosen = self.chosen[layer.layer_number]
                router.register_forward_hook(lambda _, __, output, chosen=chosen: chosen.append(output[1].sum(0)))


def summary(folder: Path) -> str:
    """The probe's figures for a run as one cell; empty without a probe."""
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
