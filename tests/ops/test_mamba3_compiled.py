"""Mamba-3's kernels compiled for sm_90 without a GPU: nothing spilled, tensor cores where they are counted on.

Every variant that a candidate's request can ask for; the kernels do not depend on the lengths, nor much on the heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from megacpp_mcore.ops.mamba3 import kernels
from megacpp_mcore.ops.mamba3.triton import ROWS, SEGMENT, Plan
from tests.ops.sm90 import compiled

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

INPUTS = ("x", "z", "y", "dy", "dx", "dz", "dd_dt", "dd_A", "trap", "angles", "ddd_dt", "ddd_A", "dtrap", "weight")
PER_HEAD = ("k", "q", "do", "dk", "dq", "state", "dstate")
TABLES = ("bn", "cn", "normed", "b_bias", "c_bias", "bias", "mx", "mz", "mo", "turns")
TYPES = (
    {f"{name}_ptr": "*bf16" for name in INPUTS + PER_HEAD}
    | {f"{name}_ptr": "*fp16" for name in TABLES}
    | {"seq_ptr": "*i32", "restart_ptr": "*i32", "eps": "fp32", "floor": "fp32"}
)
DOTS = ("turn_and_add", "add_gradients", "scan_fwd", "scan_bwd_queries", "scan_bwd_keys")
OTHERS = ("turn", "gate_bwd", "turn_back", "borders", "norm_fwd", "norm_bwd", "tables_fwd", "tables_bwd",
          "angles_bwd", "turn_totals", "turn_carries", "pass_states", "head_norm_fwd", "head_norm_bwd")  # fmt: skip
CHOICES: dict[str, list[dict[str, Any]]] = {
    "norm_fwd": [{"ROWS": 32}],
    "norm_bwd": [{"ROWS": 32}],
    "tables_fwd": [{"FINAL": True}],
    "tables_bwd": [{"FINAL": True, "INITIAL": True}],
    "angles_bwd": [{"TOKENS": 8, "HEADS": 16}],
    "turn_carries": [{"BLOCK": 32, "INITIAL": True}],
    "pass_states": [{"BLOCK": 1024, "INITIAL": True, "REVERSE": reverse} for reverse in (False, True)],
    "head_norm_fwd": [{"ROWS": 16}],
    "head_norm_bwd": [{"ROWS": 64}],
}
"""Compile-time arguments that do not follow from a call's sizes."""

SIZES = [(4, 64), (1, 64), (4, 128), (1, 128)]
SEVERAL_RANKS = ("add_gradients", "scan_bwd_queries", "turn")
"""What rank 1 has no use for."""


def _cases(kernels: tuple[str, ...]) -> list[tuple[str, int, int]]:
    return [(name, *size) for name in kernels for size in SIZES if size[0] > 1 or name not in SEVERAL_RANKS]


def _plan(rank: int, state: int, even: bool) -> Plan:
    tokens = 4 * SEGMENT if even else 4 * SEGMENT - 1
    return Plan(
        tokens, 2, 112, 64, 8, rank, state, state // 4, mimo=rank > 1, packed=True, heavy=False, A_floor=1e-4, eps=1e-5
    )  # fmt: skip


def _chunks(names: list[str], plan: Plan, *, raw: bool) -> dict[str, str]:
    """The types of what is read or written a chunk at a time."""
    widths = {"k_desc": plan.N, "q_desc": plan.N, "dk_desc": plan.N, "dq_desc": plan.N, "do_desc": plan.P}
    types = {name: f"tensordesc<bf16[{ROWS}, {width}]>" for name, width in widths.items() if name in names}
    return types | ({"o_desc": f"tensordesc<bf16[{ROWS}, {plan.P}]>"} if raw else {})


def _check(kernel: str, plan: Plan, folder: Path) -> None:
    function = getattr(kernels, kernel)
    choices = CHOICES.get(kernel, [{}])
    if kernel == "scan_bwd_keys":
        choices = [part | ({} if part["QUERIES"] else {"dq_desc": None}) for part in plan.key_parts]
    elif kernel == "turn_and_add":
        choices = [{"BACK": back} for back in ((False, True) if plan.R == 1 else (False,))]
    elif kernel == "scan_fwd":
        choices = [{"RAW": plan.keeps, "GATED": True} | ({} if plan.keeps else {"o_desc": None})]
        if not plan.keeps:
            choices.append({"RAW": True, "GATED": False, "y_ptr": None})
    every = plan.sizes
    for choice in choices:
        constants = {name: value for name, value in every.items() if name in function.arg_names} | choice
        constants = {name: value for name, value in constants.items() if name not in ("S", "B")}
        run_time = {"NSEG"} if kernel not in ("turn_carries", "pass_states") else set()
        constants = {name: value for name, value in constants.items() if name not in run_time}
        pointers = {name: TYPES.get(name, "*fp32") for name in function.arg_names if name.endswith("_ptr")}
        types = TYPES | pointers | _chunks(function.arg_names, plan, raw=choice.get("RAW", False))
        made = compiled(function, types, constants, folder, **plan.options(kernel))
        assert bool(made.instructions["HGMMA"]) == (kernel in DOTS), (kernel, choice, made)


@pytest.mark.parametrize("even", [True, False], ids=["even", "odd"])
@pytest.mark.parametrize(("kernel", "rank", "state"), _cases(DOTS))
def test_products(tmp_path: Path, kernel: str, rank: int, state: int, even: bool) -> None:
    _check(kernel, _plan(rank, state, even), tmp_path)


@pytest.mark.parametrize(("kernel", "rank", "state"), _cases(OTHERS))
def test_others(tmp_path: Path, kernel: str, rank: int, state: int) -> None:
    _check(kernel, _plan(rank, state, False), tmp_path)
