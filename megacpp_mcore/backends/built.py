"""Which backend each part of a built model runs on: the function a module calls, the package behind a class.

Read from Megatron's live objects; written against megatron-core 0.19.2. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megacpp_mcore.backends import probes
from megacpp_mcore.backends.candidate import Speed
from megacpp_mcore.backends.dispatcher import AUTO, STOCK, Resolution

_TE = probes.TRANSFORMER_ENGINE


def backends(chunks: Sequence[Any], optimizer: Any, patches: Collection[str]) -> list[dict[str, Any]]:
    """Return the records of a model's chunks and its optimizer, with the layer's number (None: MTP, or none).

    Args:
        chunks: the model's.
        optimizer: Megatron's wrapper.
        patches: names of the applied patches; ``linear-cross-entropy`` records what it runs itself.
    """
    resolved = [made.as_record() | {"layer": number} for number, _, part in _layers(chunks) for made in _answers(part)]
    return [*resolved, *_of_classes(chunks), *_of_loss(chunks, patches), *_of_optimizer(chunks, optimizer)]


def bare(chunk: Any) -> Any:
    """Return ``chunk`` without the wrappers that Megatron puts around it."""
    while not hasattr(chunk, "decoder") and hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def device_type(chunks: Sequence[Any]) -> str:
    """Return the type of the device that holds a model's parameters."""
    return str(next(bare(chunks[0]).parameters()).device.type)


def owner(module: Any) -> str:
    """Return the package behind a module: ``transformer_engine``, ``apex``, ``torch``, ``megatron`` or ``megacpp_mcore``."""
    kinds = type(module).__mro__
    if any(kind.__module__.partition(".")[0] == _TE or kind.__name__.startswith("TE") for kind in kinds):
        return _TE
    first = type(module).__module__.partition(".")[0]
    return first if first in ("apex", "torch", "megacpp_mcore") else "megatron"


def _layers(chunks: Sequence[Any]) -> Iterator[tuple[int | None, str, Any]]:
    """Yield every module of a layer or MTP block with the layer's number (None: MTP) and the last part of its name."""
    for core in map(bare, chunks):
        layers = getattr(getattr(core, "decoder", None), "layers", ())
        numbered: list[tuple[int | None, Any]] = [(getattr(layer, "layer_number", None), layer) for layer in layers]
        if getattr(core, "mtp", None) is not None:
            numbered.append((None, core.mtp))
        for number, layer in numbered:
            for name, module in layer.named_modules():
                yield number, name.rpartition(".")[2], module


def _record(
    op: str, layer: int | None, requested: str, observed: str, is_kernel: bool, reason: str, *, slower: bool = False
) -> dict[str, Any]:
    speed = Speed.KERNEL if is_kernel else Speed.COMPILED
    return Resolution(op, layer, requested, observed, speed, slower, reason).as_record()


def _answers(module: Any) -> list[Resolution]:
    """Return the dispatcher's resolutions that a module holds: the functions it actually calls."""
    return [value for value in vars(module).values() if isinstance(value, Resolution)]


def _of_classes(chunks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield linears, norms and experts of each layer; one record for each combination of request and owner."""
    class_names: dict[tuple[str, int | None, str, str], set[str]] = {}
    for number, name, module in _layers(chunks):
        # mamba-ssm's, such as the gated norm of Megatron's Mamba-2, does not depend on --transformer-impl.
        of_mamba = any(kind.__module__.partition(".")[0] == "mamba_ssm" for kind in type(module).__mro__)
        follows = getattr(module, "follows_transformer_impl", True) and not of_mamba
        is_ours = any(resolution.observed != STOCK for resolution in _answers(module))
        is_missing = type(module).__name__ == "IdentityOp"  # Megatron's placeholder
        computes = (name.startswith("linear_") or name.endswith(("_proj", "norm"))) and not is_missing
        if not is_ours and (computes or (name == "experts" and follows)):
            op = name if name == "experts" else "norm" if name.endswith("norm") else "linear"
            config = getattr(module, "config", None) or bare(chunks[0]).config
            requested = str(config.transformer_impl) if follows else AUTO
            key = (op, number, requested, _TE if owner(module) == _TE else "local")
            class_names.setdefault(key, set()).add(type(module).__name__)
    present = probes.requirement(_TE)
    for (op, number, request, observed), names in class_names.items():
        classes = ", ".join(sorted(names))
        why = f"{classes}: {'Megatron builds these classes itself' if present.ok else present.reason}"
        if request == AUTO:
            why = f"{classes}, whatever --transformer-impl is"
        elif request != _TE or observed == _TE:
            why = f"asked for by --transformer-impl: {classes}"
        yield _record(op, number, request, observed, observed == _TE, why)


def _of_loss(chunks: Sequence[Any], patches: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield Megatron's loss if there is an output layer and no patch that records its own."""
    has_head = any(getattr(bare(chunk), "output_layer", None) is not None for chunk in chunks)
    if has_head and "linear-cross-entropy" not in patches:
        config = bare(chunks[0]).config
        is_te = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te"
        kind = f"{config.cross_entropy_fusion_impl}, fused" if config.cross_entropy_loss_fusion else "plain"
        reason = f"stock's cross-entropy ({kind}); the patch linear-cross-entropy is not applied"
        yield _record("loss", None, AUTO, _TE if is_te else "megatron", False, reason)


def graphs(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return which layers were requested to be captured in CUDA graphs, and which were; empty if none were requested."""
    records = []
    for number, _, module in _layers(chunks):
        if (why := getattr(module, "not_captured", None)) is not None:
            runners = getattr(getattr(module, "cudagraph_manager", None), "cudagraph_runners", ())
            held = sum(graph is not None for runner in runners for graph in (runner.fwd_graph, runner.bwd_graph))
            requested, observed = "none" if why else "local", "local" if held else "none"
            records.append(_record("cuda_graph", number, requested, observed, False, why or f"{held} graphs"))
    return records


def _of_optimizer(chunks: Sequence[Any], optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer classes inside Megatron's wrappers that update the parameters."""
    records, pending = {}, [optimizer]
    for wrapper in pending:
        inner = getattr(wrapper, "chained_optimizers", None) or [getattr(wrapper, "optimizer", None)]
        pending += [inner_optimizer for inner_optimizer in inner if inner_optimizer is not None]
        if inner != [None] or not hasattr(wrapper, "param_groups"):
            continue
        package, name = owner(wrapper), f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"
        slow = device_type(chunks) == "cuda" and package == "torch"
        reason = f"{name}, Megatron's choice among what it could import"
        if slow:
            reason += f"; neither Transformer Engine nor Apex: {probes.apex_parts()['apex.optimizers'].reason}"
        records[name] = _record("optimizer", None, AUTO, package, package != "torch", reason, slower=slow)
    return list(records.values())
