"""The model at its first step: RMS of what each layer adds to the residual and of the residual, and each layer's gradient norm.

Hooks are there during step 1 alone. Each rank writes the sums of what is its own, and :func:`merged` adds them: of activations
every rank's tokens (ranks that hold the same ones leave the mean square as it is), of gradients each element once. No torch at
import.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events
from megacpp_mcore.observe.events import HookErrors, Listener, Log, Step
from megacpp_mcore.util import schema as kinds

_BRANCHES = ("self_attention", "mlp", "mixer")
"""A layer's parts whose outputs are added to the residual."""


class FirstStep(Listener):
    """Writes this rank's sums of step 1 to its log; of a start from a checkpoint, nothing.

    Squares are summed on the device without a copy of what they are of, and read once, when the step has ended. A layer whose
    forward pass is computed again in the backward pass counts once: its first pass builds no graph.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._chunks: Sequence[Any] = ()
        self._optimizer: Any = None
        self._hooks = contextlib.ExitStack()
        self._errors = HookErrors()
        self._sums: dict[tuple[str, str], list[tuple[Any, int]]] = defaultdict(list)

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Remember them."""
        self._chunks, self._optimizer = chunks, optimizer

    def on_step_begin(self, number: int) -> None:
        """Hook the layers, if this is step 1."""
        from megatron.core.transformer.identity_op import IdentityOp

        if number != 1:
            return
        for label, _, layer in _layers(self._chunks):
            hook = layer.register_forward_pre_hook(self._hook(label, "residual"), with_kwargs=True)
            self._hooks.callback(hook.remove)
            for name in _BRANCHES:
                if not isinstance(part := getattr(layer, name, None), IdentityOp | None):
                    hook = part.register_forward_hook(self._hook(label, "branch"), with_kwargs=True)
                    self._hooks.callback(hook.remove)

    def on_step(self, step: Step) -> None:
        """Take the hooks away and write what they summed, and the gradients, which the optimizer leaves where they are."""
        if step.step == 1:
            self._hooks.close()
            self._errors.raise_first()
            self._log.write(first_step={"grad_norm": step.grad_norm, "parts": self._parts()})
        self._let_go()

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        """Let go of the model if it is this one that failed."""
        if failed is self:
            self._let_go()

    def on_end(self, error: BaseException | None) -> None:
        """Let go of the model: training may have ended inside of step 1."""
        self._let_go()

    def _let_go(self) -> None:
        self._hooks.close()
        self._chunks, self._optimizer = (), None
        self._sums.clear()

    def _hook(self, label: str, kind: str) -> Any:
        """A hook that sums the squares of a layer's input or of a part's output."""

        def run(module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Any = None) -> None:
            import torch
            from megatron.core.transformer.cuda_graphs import is_graph_capturing

            # Of a layer that CUDA graphs hold, the step's own runs and not those that capture it after them.
            if module.training and torch.is_grad_enabled() and not is_graph_capturing():
                values = (inputs[0] if inputs else named["hidden_states"]) if kind == "residual" else output
                values = values[0] if isinstance(values, tuple) else values
                self._sums[label, kind].append((_norm(values.detach()), values.numel()))

        return self._errors.guard(run)

    def _parts(self) -> dict[str, dict[str, Any]]:
        """By part of the model: its family, the sums of squares, of branch and residual with their number of values."""
        import torch

        found: dict[str, dict[str, Any]] = {label: {"family": family} for label, family, _ in _layers(self._chunks)}
        for (label, kind), sums in self._sums.items():
            squares = torch.stack([norm for norm, _ in sums]).double().square().sum()
            found[label][kind] = [float(squares), sum(count for _, count in sums)]
        gradients: dict[str, list[Any]] = defaultdict(list)
        for label, parameter in _parameters(self._chunks):
            gradient = _own_gradient(parameter, self._optimizer)
            if gradient is not None:
                gradients[label].append(_norm(gradient))
        for label, norms in gradients.items():
            one = found.setdefault(label, {"family": label})
            one["gradient"] = float(torch.stack(norms).double().square().sum())
        return found


def _layers(chunks: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
    """Label, family and module of every layer of these chunks: a trunk layer's number, and ``MTP``."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    from megacpp_mcore.observe.profile.ranges import family

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MultiTokenPredictionBlock):
                yield from (("MTP", "MTP", one) for one in module.modules() if hasattr(one, "self_attention"))
            elif hasattr(module, "pre_process") and hasattr(module, "decoder"):
                yield from ((str(layer.layer_number), family(layer), layer) for layer in module.decoder.layers)


def _norm(values: Any) -> Any:
    """The norm of all values, on their device, summed in fp32 or wider."""
    import torch

    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))


def _parameters(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The part that each parameter belongs to: its layer's label, or the name of a module beside the layers."""
    labels = {
        id(parameter): label
        for label, _, layer in _layers(chunks)
        if label != "MTP"
        for parameter in layer.parameters()
    }
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            words = [word for word in name.split(".") if word != "module"]
            beside = "MTP" if words[0] == "mtp" else words[1] if words[0] == "decoder" else words[0]
            yield labels.get(id(parameter), beside), parameter


def _own_gradient(parameter: Any, optimizer: Any) -> Any:
    """What this rank has of a parameter's gradient that no other rank counts; None where that is nothing.

    With the distributed optimizer it is the shard whose reduction came to this rank, and with FSDP2 this rank's; else the
    first of the ranks that hold the same has it. Written against megatron-core 0.19.2.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    # Under FSDP2 a parameter has no main_grad, and the optimizer of a bf16 model moves its gradient to the fp32 parameter.
    holders = (getattr(parameter, "main_grad", None), parameter.grad)
    main = getattr(parameter, "main_param", None)
    gradient = next((one for one in (*holders, getattr(main, "grad", None)) if one is not None), None)
    is_expert = not getattr(parameter, "allreduce", True)
    if is_expert:
        group, replica = (
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_data_parallel_rank(),
        )
    else:
        group = parallel_state.get_tensor_model_parallel_group()
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if gradient is None or not (
        param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, group)
    ):
        return None
    if hasattr(gradient, "to_local"):
        return gradient.to_local()
    sharded = [
        one for one in getattr(optimizer, "chained_optimizers", [optimizer]) if hasattr(one, "model_param_gbuf_map")
    ]
    if not sharded:
        return gradient if replica == 0 else None
    owner = next((one for one in sharded if parameter in one.model_param_gbuf_map), None)
    if owner is None:
        return None
    part = owner._get_model_param_range_map(parameter)["param"]
    return gradient.view(-1)[part.start : part.end]


# --- Reading ----------------------------------------------------------------------------------------------------------


_SQUARES = kinds.plain("a sum of squares", lambda value: kinds.RESULT.accepts(value) and not value < 0)
_PAIR = kinds.plain(
    "a sum of squares and the number of values",
    lambda pair: kinds.list_of(_SQUARES).accepts(pair) and len(pair) == 2 and kinds.COUNT.accepts(pair[1]),
)
_PART = kinds.record({"family": kinds.TEXT}, {"branch": _PAIR, "residual": _PAIR, "gradient": _SQUARES})
_RECORD = kinds.record({"grad_norm": kinds.nullable(_SQUARES), "parts": kinds.map_of(_PART)})


def read(run: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """As :func:`merged`, of the run in folder ``run``."""
    return merged(events.read(run))


def merged(ranks: Mapping[int, Sequence[events.Start]]) -> dict[str, dict[str, Any]]:
    """What the ranks wrote of a run's first step, by part: ``family``, ``branch`` and ``residual`` (RMS), ``gradient`` (norm).

    A trunk layer has all of them, what is beside the layers only a gradient. Gradients are those before clipping: the shares
    are scaled to the norm that Megatron logged. Of several starts of a rank that did step 1, it is the last.

    Raises:
        DataError: a record has not what a run writes.
    """
    last = {rank: start for rank, starts in ranks.items() for start in starts if start.first_step is not None}
    sums: dict[str, dict[str, Any]] = {}
    logged: float | None = None
    for start in last.values():
        record: Any = start.first_step
        try:
            kinds.check(record, _RECORD)
        except ValueError as error:
            raise DataError(f"{start.path}: sums of step 1: {error}; restore the file, or delete it") from error
        logged = record["grad_norm"] if logged is None else logged
        for label, part in record["parts"].items():
            one = sums.setdefault(
                label, {"family": part["family"], "branch": (0, 0), "residual": (0, 0), "gradient": 0}
            )
            one["gradient"] += part.get("gradient", 0)
            for kind in ("branch", "residual"):
                one[kind] = tuple(a + b for a, b in zip(one[kind], part.get(kind, (0, 0)), strict=True))
    whole = math.sqrt(sum(one["gradient"] for one in sums.values()))
    scale = logged / whole if logged and whole else 1.0
    for one in sums.values():
        one["gradient"] = scale * math.sqrt(one["gradient"])
        for kind in ("branch", "residual"):
            squares, count = one[kind]
            one[kind] = math.sqrt(squares / count) if count else None
    return sums


def describe(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line a family, then one for what has no branch: ranges over the layers of a family."""
    lines = []
    families: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for part in parts.values():
        families[part["family"]].append(part)
    for family, layers in sorted(families.items(), key=lambda pair: pair[1][0]["branch"] is None):
        branch, residual = ([one[kind] for one in layers if one[kind] is not None] for kind in ("branch", "residual"))
        spans = [f"branch RMS {_span(branch)} on {_span(residual)}"] if branch else []
        spans.append(f"gradient {_span([one['gradient'] for one in layers])}")
        lines.append(f"{f'step 1, {family}':18}{', '.join(spans)}")
    return lines


def _span(values: Sequence[float]) -> str:
    low, high = (f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
