"""The precision plan of a run in four fields, and stock Megatron's precision file for FP8 experts. Pure Python.

Stock's flag ``--fp8-format`` puts every layer in FP8. Its ``--te-precision-config-file`` selects modules (megatron-core
0.19.2, ``megatron/core/quantization`` and ``extensions/transformer_engine.py``), as FP8 in only the experts requires.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megacpp_mcore.model import Model
from megacpp_mcore.model.families import EXPERTS
from megacpp_mcore.util.te_imports import ALIGNMENT

EXPERTS_FILE = Path(__file__).resolve().with_name("fp8_experts.yaml")
"""Precision file that names the experts' linear layers and their FP8 recipe; the same for every model, layout and class."""


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Model dtype, FP8 kernels, dispatch and checkpoint owner of a run.

    Attributes:
        model_dtype: ``bf16`` or ``fp32``: parameters, activations, and every product that ``kernel_fp8`` does not name.
        kernel_fp8: modules whose GEMMs run in FP8, with operands quantised inside the kernel's call: ``none`` or ``experts``.
        dispatch: what happens if a module named there cannot run in FP8: ``refuse``; ``none`` if none is named.
        checkpoint_owner: whose checkpoint function recomputes activations. ``megatron``: block scaling keeps no state between
            calls, so Megatron's function repeats the forward pass exactly, and saved checkpoints contain no FP8 state.
    """

    model_dtype: str
    kernel_fp8: str = "none"
    dispatch: str = "none"
    checkpoint_owner: str = "megatron"

    @property
    def file(self) -> Path | None:
        """The path for ``--te-precision-config-file``; None without FP8."""
        return None if self.kernel_fp8 == "none" else EXPERTS_FILE


FP8_EXPERTS = "bf16_te_fp8_experts"
PLANS: Mapping[str, PrecisionPlan] = MappingProxyType(
    {
        "bf16": PrecisionPlan(model_dtype="bf16"),
        "fp32": PrecisionPlan(model_dtype="fp32"),
        FP8_EXPERTS: PrecisionPlan(model_dtype="bf16", kernel_fp8="experts", dispatch="refuse"),
    }
)
"""All precision plans by name."""


def expert_layers(model: Model) -> tuple[int, ...]:
    """Return the 1-based numbers of the layers whose experts may run in FP8: E layers other than the model's first and last."""
    return tuple(
        number
        for number, letter in enumerate(model.layers, 1)
        if letter == EXPERTS.letter and not in_bf16_zone(number, model.depth)
    )


def in_bf16_zone(number: int, depth: int) -> bool:
    """Return whether layer ``number`` (1-based) of ``depth`` stays in BF16 in every plan: the first and the last do."""
    return number in (1, depth)


def unfit(model: Model) -> str | None:
    """Return why ``model`` cannot have its experts in FP8, as the end of a sentence; None if it can."""
    if not expert_layers(model):
        return f"{model.name} has no E layer between its first and last, which stay in BF16; leave FP8 out"
    for name, width in (("hidden_size", model.hidden_size), ("moe.ffn_hidden_size", model.moe.ffn_hidden_size)):
        if width % ALIGNMENT:
            return f"{name} of {model.name} is {width}, and an FP8 GEMM needs a multiple of {ALIGNMENT}; leave FP8 out"
    return None


def is_experts_recipe(recipe: Any) -> bool:
    """Return whether Megatron's ``RecipeConfig`` equals the content of :data:`EXPERTS_FILE`, whichever file it is from."""
    content = yaml.safe_load(EXPERTS_FILE.read_text(encoding="utf-8"))
    expected = [(matcher["pattern"], matcher["config"]) for matcher in content["matchers"].values()]
    actual = [(getattr(matcher, "pattern", None), getattr(matcher, "config_key", None)) for matcher in recipe.matchers]
    return bool(actual == expected and recipe.configs == content["configs"])
