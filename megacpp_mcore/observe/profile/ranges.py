"""Names the parts of a training step while it runs: ranges for torch's profiler by block family, in profiled steps only.

Every layer has a range (``megacpp::A/3``: family and global number). So have the embedding, the stack's work between its
layers (``block``), the final norm, each depth of multi-token prediction with everything in it (``MTP/1``), the head with
all losses, ``data``, ``gradients`` (their reduction, clearing and scaling), ``pipeline`` (communication between stages), and
``optimizer``. Hooks and wrappers of stock functions on this run's objects open them; all are removed afterwards.

Written against megatron-core 0.19.2.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock, MultiTokenPredictionLayer

from megacpp_mcore.observe.profile.trace import PARTS, PREFIX
from megacpp_mcore.util.stand_in import stand_in

BETWEEN_LAYERS, DATA, EMBEDDING, GRADIENTS, HEAD, NORM, OPTIMIZER, PIPELINE = PARTS
MTP = "MTP"
_OF_EXPERTS = {"router": "routing", "experts": "experts", "shared_experts": "shared expert"}
"""Parts of a layer of experts with a range inside its own, ``megacpp::E/2/routing``, by the attribute of its ``mlp``."""

_STAGES = (DATA, EMBEDDING, BETWEEN_LAYERS, HEAD)
"""Stages of the forward pass, in order."""


class Ranges(threading.local):
    """The open ranges, by thread: the backward pass enters layers in threads of its own."""

    def __init__(self) -> None:
        self.open_now: list[tuple[str, Any]] = []
        """Label and record of the ranges of this thread, outermost first."""
        self.in_forward_step = False

    def open(self, label: str) -> None:
        """Open a range."""
        record = torch.profiler.record_function(PREFIX + label)
        record.__enter__()
        self.open_now.append((label, record))

    def close(self, label: str) -> None:
        """Close the innermost range ``label`` and everything inside it; does nothing if there is none."""
        while any(name == label for name, _ in self.open_now):
            name, record = self.open_now.pop()
            record.__exit__(None, None, None)
            if name == label:
                return

    def begin_stage(self, label: str) -> None:
        """Close the previous forward stage's range and open this one's."""
        if self.open_now and self.open_now[-1][0] in _STAGES:
            self.close(self.open_now[-1][0])
        self.open(label)

    def close_all(self) -> None:
        """Close everything open in this thread: an error may have ended a step."""
        while self.open_now:
            self.close(self.open_now[-1][0])

    def close_stages(self) -> None:
        """Close the open stage."""
        for label in _STAGES:
            self.close(label)


@contextlib.contextmanager
def named(ranges: Ranges, chunks: Sequence[Any], optimizer: Any) -> Iterator[None]:
    """Until the context ends, open ``ranges`` for all parts of a step of these model chunks and this optimizer."""

    def forward_step(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Name one micro-batch's stages: data until the model is called; the last stage lasts until after the loss."""
        ranges.in_forward_step = True
        ranges.open(DATA)
        try:
            return stock(*args, **kwargs)
        finally:
            ranges.close_stages()
            ranges.in_forward_step = False

    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            _name_chunk(stack, ranges, chunk)
            _range_around(stack, ranges, chunk, "zero_grad_buffer", GRADIENTS)
            groups = (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ()))
            for group in groups:
                for name in ("start_grad_sync", "finish_grad_sync"):
                    _range_around(stack, ranges, group, name, GRADIENTS)
                for name in ("start_param_sync", "finish_param_sync"):
                    _range_around(stack, ranges, group, name, OPTIMIZER)
            _range_around(stack, ranges, getattr(chunk, "config", None), "finalize_model_grads_func", GRADIENTS)
        for name in ("step", "zero_grad"):
            _range_around(stack, ranges, optimizer, name, OPTIMIZER)
        _range_around(stack, ranges, P2PCommunicator, "_communicate", PIPELINE)
        stack.enter_context(stand_in(schedules, "forward_step", forward_step))
        yield


def family(layer: torch.nn.Module) -> str:
    """Return a layer's family: the letters of its mixer and feed-forward part; also for Megatron's own layers."""
    mixer, mlp = getattr(layer, "self_attention", None), getattr(layer, "mlp", None)
    if hasattr(layer, "mixer"):  # Megatron's own MambaLayer
        return "M"
    letters = ""
    if mixer is not None and not isinstance(mixer, IdentityOp):
        letters = getattr(mixer, "family", "A")  # our mixers name their family
    if isinstance(mlp, BaseMoELayer):
        letters += "E"
    elif mlp is not None and not isinstance(mlp, IdentityOp):
        letters += "F"
    return letters or "layer"


def _name_chunk(stack: contextlib.ExitStack, ranges: Ranges, chunk: Any) -> None:
    def leave() -> None:
        if not ranges.in_forward_step:  # in a forward step the stage includes the loss
            ranges.close_stages()

    for module in chunk.modules():
        decoder = getattr(module, "decoder", None)
        if isinstance(decoder, torch.nn.Module) and hasattr(module, "pre_process"):
            _hook(stack, module, lambda: ranges.begin_stage(EMBEDDING), leave)
            _hook(stack, decoder, lambda: ranges.begin_stage(BETWEEN_LAYERS), lambda: ranges.begin_stage(HEAD))
            layers: Any = decoder.layers
            parts = [(layer, f"{family(layer)}/{layer.layer_number}") for layer in layers]
            for part, label in (*parts, (getattr(decoder, "final_layernorm", None), NORM)):
                if hasattr(part, "cudagraph_manager"):  # Megatron runs no hooks when it replays this, and refuses them
                    _range_around(stack, ranges, part, "run_captured", label)
                elif part is not None:
                    _name_module(stack, ranges, part, label)
                    for attribute, name in _OF_EXPERTS.items():
                        if (inner := getattr(getattr(part, "mlp", None), attribute, None)) is not None:
                            _name_module(stack, ranges, inner, f"{label}/{name}")
        elif isinstance(module, MultiTokenPredictionBlock):
            _name_depths(stack, ranges, module)


def _name_depths(stack: contextlib.ExitStack, ranges: Ranges, block: MultiTokenPredictionBlock) -> None:
    """Open a range for each depth of multi-token prediction; with a repeated layer, depths are calls of one module."""
    depth = 0

    def begin() -> None:
        nonlocal depth
        depth = 0

    def enter() -> None:
        nonlocal depth
        depth += 1
        ranges.open(f"{MTP}/{depth}")

    _hook(stack, block, begin, lambda: None)
    for module in block.modules():
        if isinstance(module, MultiTokenPredictionLayer):
            _hook(stack, module, enter, lambda: ranges.close(f"{MTP}/{depth}"))


def _name_module(stack: contextlib.ExitStack, ranges: Ranges, module: torch.nn.Module, label: str) -> None:
    _hook(stack, module, functools.partial(ranges.open, label), functools.partial(ranges.close, label))


def _hook(stack: contextlib.ExitStack, module: torch.nn.Module, before: Callable[[], None], after: Callable[[], None]) -> None:
    stack.callback(module.register_forward_pre_hook(lambda *_: before(), prepend=True).remove)
    stack.callback(module.register_forward_hook(lambda *_: after(), always_call=True).remove)


def _range_around(stack: contextlib.ExitStack, ranges: Ranges, holder: Any, name: str, label: str) -> None:
    """Put a range around a function of one object, if it has that function."""

    def run(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ranges.open(label)
        try:
            return stock(*args, **kwargs)
        finally:
            ranges.close(label)

    if getattr(holder, name, None) is not None:
        stack.enter_context(stand_in(holder, name, run))
