"""A family of its own: T, a leaky integrator. Run as a program with a DATASET and a FOLDER, it counts and trains a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from megacpp_mcore.model.families import FAMILIES
from megacpp_mcore.model.families.base import Batch, Count, Family, Shape, Work, divides, product

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


def integrate(x_SBD: torch.Tensor, decay_D: torch.Tensor) -> torch.Tensor:
    """The op: ``y_t = a y_{t-1} + (1 - a) x_t`` with ``a = sigmoid(decay)``."""
    rate_D, rows = torch.sigmoid(decay_D), []
    state_BD = torch.zeros_like(x_SBD[0])
    for x_BD in x_SBD:
        state_BD = rate_D * state_BD + (1 - rate_D) * x_BD
        rows.append(state_BD)
    return torch.stack(rows)


def _parameters(shape: Shape, _: str | None) -> Count:
    return Count(tensor=shape.hidden_size**2, whole=2 * shape.hidden_size)


def _work(shape: Shape, _: str | None, rows: Batch) -> dict[str, Work]:
    return {"integrator": product(rows.tokens * shape.hidden_size**2)}


def _check_layout(shape: Shape, tensor: int, _: int) -> None:
    divides(f"{shape.name}: toys", 1, "tensor parallelism", tensor)


TOY = Family(
    letter="T",
    name="a leaky integrator",
    part="T toy",
    group="toy",
    parameters=_parameters,
    works=("integrator",),
    work=_work,
    check_layout=_check_layout,
    in_fp32="the integrator",
    recompute="t",
    recomputed=("integrator",),
    card=lambda shape: {"toy channels": f"{shape.hidden_size}"},
    papers=(("T", "an integrator that forgets", "Lapicque", "1907.00000"),),
)


def spec(asked: Any) -> ModuleSpec:
    """The layer: norm, integrator, output projection, residual."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megacpp_mcore.layer_specs.parts import Mixer

    class Toy(Mixer):
        family = "T"

        def __init__(self, config: Any, layer_number: int, pg_collection: Any, **_: Any) -> None:
            super().__init__(config, layer_number, pg_collection)
            self.add_parameter("decay", (config.hidden_size,), torch.nn.init.zeros_, axis=None)
            self.out_proj = self.output_projection(asked.parts.row_linear, config.hidden_size)

        def forward(self, hidden_SBD: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            return self.out_proj(integrate(hidden_SBD, self.decay))

    mixed: ModuleSpec = asked.mixer(ModuleSpec(module=Toy))
    return mixed


def main(dataset: str, observed: str) -> int:
    FAMILIES["T"] = TOY  # first, as if it were in the list there
    from megacpp_mcore import settings
    from megacpp_mcore.commands import cli
    from megacpp_mcore.launch import launcher
    from tests import stock

    imported = launcher.import_named

    def import_named(*names: str) -> Any:  # when the CPU lane is there
        modules = imported(*names)
        from megacpp_mcore.layer_specs import nam56r

        nam56r.SPECS["T"] = spec
        return modules

    launcher.import_named = import_named  # type: ignore[assignment]
    chosen = settings.from_environment()
    assert chosen is not None
    cli.main(["recipe", "flops", chosen.model.name, "--recompute", "t"])
    cli.main(["recipe", "list", "--markdown"])
    data = ("--data-path", dataset, "--split", "100,0,0")
    words = stock.words(chosen.model, "--lr-warmup-iters", "0", data=data, train_iters=3, global_batch_size=2)
    return launcher.launch(words, device="cpu", recording=launcher.Recording(observe=observed), verbose=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
