"""AdamW with 6 bytes of state per parameter: bfloat16 moments, and the fp32 main parameter's remainder to the bfloat16 weight.

The interface is that of Transformer Engine's ``FusedAdam`` (2.20) as Megatron's distributed optimizer uses it for
``--use-precision-aware-optimizer``. Unlike there, parameters may have mixed dtypes, an fp32 one is its own main parameter,
states are read without a copy, and the step is one kernel per group and dtype; on a CPU PyTorch does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "master_param"


class PrecisionAwareAdam(torch.optim.Optimizer):
    """AdamW with bias correction; gradients are the parameters' ``decoupled_grad``, float32 or bfloat16.

    Args:
        params: bfloat16, float16 or float32, contiguous.
        dtypes: of both moments, float32 or bfloat16; computed in float32, rounded to nearest.
        remainders: whether the main parameter of a bfloat16 parameter is stored as a 16-bit remainder
            (:func:`joined`); otherwise, and for other dtypes, it is float32.

    Attributes:
        scale: a float32 scalar on the device by which the next step multiplies gradients; None for 1.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        dtypes: tuple[torch.dtype, torch.dtype],
        remainders: bool,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})
        self.dtypes, self.remainders = dict(zip(MOMENTS, dtypes, strict=True)), remainders
        self.scale: torch.Tensor | None = None
        self._tables: dict[tuple[int, ...], Any] = {}

    @property
    def count(self) -> int:
        """The number of parameters."""
        return len(list(self._params()))

    def initialize_state(self, param: torch.Tensor) -> None:
        """Initialise the states of ``param``, unless it has states."""
        if param in self.state:
            return
        main = param.detach()
        if param.dtype == torch.bfloat16 and self.remainders:
            main = torch.zeros_like(main, dtype=torch.int16)
        elif param.dtype != torch.float32:
            main = main.float()
        moments = {name: torch.zeros_like(param.detach(), dtype=dtype) for name, dtype in self.dtypes.items()}
        self.state[param] = moments | {MAIN: main}

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state as it is stored: ``exp_avg``, ``exp_avg_sq``, or ``master_param``, which may be remainders (int16)."""
        state: torch.Tensor = self.state[param][name]
        return state

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Copy ``value`` to a state; an fp32 parameter's ``master_param`` is itself."""
        self.initialize_state(param)
        self.state[param][name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return all states, initialised where there are none; each with the step count, as in PyTorch's Adam."""
        for param in self._params():
            self.initialize_state(param)
        stored = super().state_dict()
        steps = {number: float(group["step"]) for group in stored["param_groups"] for number in group["params"]}
        states = {number: {**state, "step": torch.tensor(steps[number])} for number, state in stored["state"].items()}
        return stored | {"state": states}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returns; PyTorch's method would cast states to the parameters' dtype."""
        own = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = own
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, param in zip(numbers, self._params(), strict=True):
            for name in (*MOMENTS, MAIN):
                if name in state_dict["state"].get(number, {}):
                    self.set_scaled_state(param, name, state_dict["state"][number][name])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update parameters and states by the gradients times :attr:`scale`; skip parameters without a gradient."""
        tables = {}
        for group in self.param_groups:
            group["step"] = int(group["step"]) + 1
            how = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            how |= {"number": group["step"], "scale": self.scale}
            of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for param in group["params"]:
                if getattr(param, "decoupled_grad", None) is not None:
                    self.initialize_state(param)
                    if group["step"] == 1 and param.dtype != self.state[param][MAIN].dtype == torch.float32:
                        self.state[param][MAIN].copy_(param)  # weights may have been loaded since
                    of_dtype.setdefault(param.dtype, []).append(param)
            for params in of_dtype.values():
                if params[0].is_cuda:
                    from megacpp_mcore.ops import adam

                    shards = [adam.Shard(*self._parts(param)) for param in params]
                    places = tuple(adam.addresses(shards))
                    table = self._tables.get(places) or adam.Table(shards)
                    tables[places] = table
                    adam.step(table, **how)
                else:
                    for param in params:
                        _step(*self._parts(param), **how)
        self._tables, self.scale = tables, None

    def _params(self) -> Iterable[torch.Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    def _parts(self, param: Any) -> tuple[Any, ...]:
        state = self.state[param]
        copy = None if param.dtype == torch.float32 else param.detach()
        return state[MAIN], param.decoupled_grad, state["exp_avg"], state["exp_avg_sq"], copy


def _step(
    main: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, copy: torch.Tensor | None, *,
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, number: int, scale: torch.Tensor | None,
) -> None:  # fmt: skip
    """Run the step of :mod:`megacpp_mcore.ops.adam` on a CPU."""
    is_remainder = copy is not None and main.dtype == torch.int16
    weight = joined(copy, main) if is_remainder and copy is not None else main
    g = gradient.float() if scale is None else gradient.float() * scale
    m = betas[0] * exp_avg.float() + (1.0 - betas[0]) * g
    v = betas[1] * exp_avg_sq.float() + (1.0 - betas[1]) * g * g
    unbias1, unbias2 = (1.0 / (1.0 - beta**number) for beta in betas)
    weight = weight - lr * (m * unbias1 / ((v * unbias2).sqrt() + eps) + weight_decay * weight)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if is_remainder and copy is not None:
        upper, rest = split(weight)
        copy.copy_(upper)
        main.copy_(rest)
    else:
        main.copy_(weight)
        if copy is not None:
            copy.copy_(weight)


def joined(copy: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return float32 weights from ``copy``, their upper half rounded to bfloat16, and ``rest``, the int16 remainder."""
    return ((copy.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def split(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 weights into bfloat16 (to nearest, ties away from zero, NaN as NaN) and the int16 remainder."""
    bits = weight.view(torch.int32)
    upper = torch.where(weight == weight, (bits + 0x8000) >> 16, 0x7FC0)
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)
