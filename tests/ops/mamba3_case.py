"""One call of Mamba-3's mixer for the tests of its kernels: inputs as views of one projection, results and gradients by name.

Legend: B batch, S sequence, H heads, P head dim, G groups, N state, R MIMO rank, A rotation angles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megacpp_mcore.ops.mamba3 import reference as ref
from megacpp_mcore.ops.slices import split

NAMES = ("z", "x", "b", "c", "dd_dt", "dd_A", "trap", "angles")
ORDER = ("x", "z", "b", "c", "dd_dt", "dd_A", "trap", "angles")
STATE = ("h", "b_last", "x_last", "theta")


@dataclass(frozen=True)
class Case:
    S: int
    B: int = 2
    H: int = 28
    G: int = 2
    R: int = 4
    N: int = 64
    P: int = 64
    mimo: bool = True
    out_norm: bool = True
    states: bool = False
    documents: tuple[int, ...] = ()
    activation: str = "softplus"
    dtype: torch.dtype = torch.bfloat16
    A: int = 0
    """0: a quarter of the state."""

    @property
    def widths(self) -> list[int]:
        values = self.G * self.R * self.N
        return [self.H * self.P, self.H * self.P, values, values, self.H, self.H, self.H, self.A or self.N // 4]

    @property
    def seq_idx(self) -> torch.Tensor | None:
        """The documents in the first row of the batch; the second is one document."""
        if not self.documents:
            return None
        numbers = torch.repeat_interleave(torch.arange(len(self.documents)), torch.tensor(self.documents))
        return torch.stack([numbers, torch.zeros_like(numbers)])[: self.B].int()


def make_tensors(case: Case, seed: int = 0, device: str = "cuda") -> dict[str, torch.Tensor]:
    """What a projection gives as one tensor ``u``, the parameters away from their initial values, and the entering state."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, mean: float = 0.0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (mean + scale * torch.randn(*size, generator=generator)).to(device, dtype)

    width = sum((part + 7) // 8 * 8 for part in case.widths)
    H, R, N, P = case.H, case.R, case.N, case.P
    tensors = {
        "u": draw(case.S, case.B, width, dtype=case.dtype),
        "dt_bias": draw(H, mean=-4.0, scale=0.5),
        "D": draw(H, mean=1.0, scale=0.2),
        "b_bias": draw(H, R, N, mean=1.0, scale=0.2),
        "c_bias": draw(H, R, N, mean=1.0, scale=0.2),
        "b_norm_weight": draw(N, mean=1.0, scale=0.2, dtype=case.dtype),
        "c_norm_weight": draw(N, mean=1.0, scale=0.2, dtype=case.dtype),
    }
    if case.mimo:
        means = {"mimo_x": 1 / R, "mimo_z": 1.0, "mimo_o": 1 / R}
        tensors |= {name: draw(H, R, P, mean=mean, scale=0.2) for name, mean in means.items()}
    if case.out_norm:
        tensors["out_norm_weight"] = draw(H * P, mean=1.0, scale=0.2)
    if case.states:
        B, A = case.B, case.widths[-1]
        tensors |= {"h": draw(B, H, P, N), "b_last": draw(B, R, H, N), "x_last": draw(B, H, P), "theta": draw(B, H, A)}
    return tensors


def inputs(case: Case, u: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of the projection ``u``, as the op takes them."""
    slots = [slot for name, part in zip(NAMES, case.widths, strict=True) for slot in ((name, part), ("", -part % 8)) if slot[1]]
    parts = dict(zip((name for name, _ in slots), split(u, [size for _, size in slots]), strict=True))
    parts |= {name: parts[name].unflatten(-1, (case.H, case.P)) for name in "xz"}
    parts |= {name: parts[name].unflatten(-1, (case.G, case.R, case.N)) for name in "bc"}
    return {name: parts[name] for name in ORDER}


def run(op: Callable[..., Any], case: Case, tensors: dict[str, torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """The output and, where a state goes in, the last state; ``options`` replace inputs, too."""
    rows = inputs(case, tensors["u"])
    rows |= {name: options.pop(name) for name in ORDER if name in options}
    how = {name: t for name, t in tensors.items() if name not in ("u", *STATE)}
    how |= {"chunk_size": 16, "A_floor": 1e-4, "eps": 1e-5, "activation": case.activation}
    how |= {"seq_idx": None if case.seq_idx is None else case.seq_idx.to(tensors["u"].device)}
    if case.states:
        how |= {"initial_state": ref.Mamba3State(*(tensors[name] for name in STATE)), "return_final_state": True}
    out, last = op(*rows.values(), **how | options)
    return [out, *(last or ())]


def with_gradients(
    op: Callable[..., Any], case: Case, tensors: dict[str, torch.Tensor], **options: Any
) -> dict[str, torch.Tensor]:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    results = run(op, case, leaves, **options)
    generator = torch.Generator().manual_seed(99)
    cotangents = [torch.randn(t.shape, generator=generator).to(case.dtype).to(t.device, t.dtype) for t in results]
    gradients = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), cotangents), strict=True))
    named = dict(zip(("out", "h", "b", "x", "theta"), results, strict=False))
    start = 0
    for name, part in zip(NAMES, case.widths, strict=True):
        named[f"d{name}"] = gradients["u"][..., start : start + part]
        start += (part + 7) // 8 * 8
    return named | {f"d{name}": t for name, t in gradients.items() if name != "u"}
