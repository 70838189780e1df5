"""The backends of a run for its receipt: the dispatcher's answers, and the classes of the parts that stock builds.

What the modules hold is what they call; a class says whose arithmetic it is. Nothing is read from a flag but the request.
Written against megatron-core 0.19.2. No torch at import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megacpp_mcore.backends import AUTO, Resolution, Speed, probes
from megacpp_mcore.observe.receipts.disqualify import arithmetic

_TE = probes.TRANSFORMER_ENGINE


def layers(chunks: Sequence[Any]) -> Iterator[tuple[int | None, str, Any]]:
    """Every module of a layer or MTP block with the layer's number (None: MTP) and its name in there."""
    for chunk in chunks:
        core = bare(chunk)
        numbered: list[tuple[int | None, Any]] = [
            (getattr(layer, "layer_number", None), layer)
            for layer in getattr(getattr(core, "decoder", None), "layers", ())
        ]
        if getattr(core, "mtp", None) is not None:
            numbered.append((None, core.mtp))
        for number, layer in numbered:
            for name, module in layer.named_modules():
                yield number, name, module


def bare(chunk: Any) -> Any:
    """``chunk`` without the wrappers that Megatron puts around it."""
    while not hasattr(chunk, "decoder") and hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def rows(chunks: Sequence[Any], optimizer: Any) -> list[dict[str, Any]]:
    """One record an op of a layer, and of the run: as :meth:`megacpp_mcore.backends.Resolution.as_record`."""
    return [*_resolved(chunks), *_of_classes(chunks), *_of_loss(chunks), *_of_optimizer(chunks, optimizer)]


def _of_loss(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """Stock's loss where there is a head, and no patch that notes what it does instead."""
    from megacpp_mcore.patches import registry

    has_head = any(getattr(bare(chunk), "output_layer", None) is not None for chunk in chunks)
    applied = {record["name"] for record in registry.default().status() if record["state"] != "not applied"}
    if not has_head or "linear-cross-entropy" in applied:
        return []
    config = bare(chunks[0]).config
    is_te = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te"
    kind = f"{config.cross_entropy_fusion_impl}, fused" if config.cross_entropy_loss_fusion else "plain"
    reason = f"stock's cross-entropy ({kind}); the patch linear-cross-entropy is not applied"
    return [_record("loss", None, AUTO, _TE if is_te else "megatron", Speed.COMPILED, reason)]


def parts(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """The classes of linear layers, norms, experts and routers, and whose they are."""
    found: dict[tuple[str, str, str, str], list[int | str]] = {}
    for number, path, module in layers(chunks):
        name = path.rpartition(".")[2]
        if _computes(name, module) or name in ("experts", "router", "shared_experts", "mixer"):
            asked = _requested(module, chunks)
            key = (name, asked, owner(module), f"{type(module).__module__}.{type(module).__qualname__}")
            numbers = found.setdefault(key, [])
            where = "mtp" if number is None else number
            if where not in numbers:
                numbers.append(where)
    return [
        {"part": part, "requested": asked, "observed": whose, "implementation": kind, "layers": numbers}
        for (part, asked, whose, kind), numbers in found.items()
    ]


def owner(module: Any) -> str:
    """``transformer_engine``, ``apex``, ``torch``, ``megatron`` or ``megacpp_mcore``: whose arithmetic an object is."""
    kinds = type(module).__mro__
    tops = {kind.__module__.partition(".")[0] for kind in kinds}
    if _TE in tops or any(kind.__name__.startswith("TE") for kind in kinds):
        return _TE
    first = type(module).__module__.partition(".")[0]
    return first if first in ("apex", "torch", "megacpp_mcore") else "megatron"


def _resolved(chunks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """What the modules hold of the dispatcher's answers: these are the functions that they call."""
    for number, _, module in layers(chunks):
        for value in vars(module).values():
            if isinstance(value, Resolution):
                yield value.as_record() | {"layer": number}


def _of_classes(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """Linears, norms and experts of each layer, which ``--transformer-impl`` asks for; a record for each owner there."""
    found: dict[tuple[str, int | None, str, str], set[str]] = {}
    for number, path, module in layers(chunks):
        name = path.rpartition(".")[2]
        op = "experts" if name == "experts" else _op(name, module)
        if op is not None:
            implementation = _TE if owner(module) == _TE else "local"
            key = (op, number, _requested(module, chunks), implementation)
            found.setdefault(key, set()).add(type(module).__name__)
    return [
        _record(op, number, asked, have, Speed.KERNEL if have == _TE else Speed.COMPILED, _why(asked, have, kinds))
        for (op, number, asked, have), kinds in found.items()
    ]


def _why(asked: str, have: str, kinds: set[str]) -> str:
    classes = ", ".join(sorted(kinds))
    if asked != _TE or have == _TE:
        return f"asked for by --transformer-impl: {classes}"
    present = probes.requirement(_TE)
    return f"{classes}: {'Megatron builds these classes itself' if present.ok else present.reason}"


def _op(name: str, module: Any) -> str | None:
    if not _computes(name, module):
        return None
    return "norm" if name.endswith("norm") else "linear"


def _computes(name: str, module: Any) -> bool:
    """Whether it is a linear layer or a norm; where a layer has none, Megatron puts a module that does nothing."""
    return arithmetic(name) and type(module).__name__ != "IdentityOp"


def _requested(module: Any, chunks: Sequence[Any]) -> str:
    config = getattr(module, "config", None) or bare(chunks[0]).config
    return str(config.transformer_impl)


def _of_optimizer(chunks: Sequence[Any], optimizer: Any) -> list[dict[str, Any]]:
    """The classes that step the parameters, as Megatron chose them among what it could import."""
    on_gpu = next(bare(chunks[0]).parameters()).device.type == "cuda"
    found = {}
    for stepping in _stepping(optimizer):
        whose = owner(stepping)
        kind = f"{type(stepping).__module__}.{type(stepping).__qualname__}"
        slow = on_gpu and whose == "torch"
        reason = f"{kind}, Megatron's choice among what it could import"
        if slow:
            reason += f"; neither Transformer Engine nor Apex: {probes.apex_parts()['apex.optimizers'].reason}"
        speed = Speed.COMPILED if whose == "torch" else Speed.KERNEL
        found[kind] = _record("optimizer", None, AUTO, whose, speed, reason, slower=slow)
    return list(found.values())


def _stepping(optimizer: Any) -> Iterator[Any]:
    """The innermost optimizers in Megatron's wrappers."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for each in chained:
            yield from _stepping(each)
    elif getattr(optimizer, "optimizer", None) is not None:
        yield from _stepping(optimizer.optimizer)
    elif optimizer is not None and hasattr(optimizer, "param_groups"):
        yield optimizer


def _record(
    op: str, layer: int | None, requested: str, have: str, speed: Speed, reason: str, *, slower: bool = False
) -> dict[str, Any]:
    return Resolution(op, layer, requested, have, speed, slower, reason, fn=print).as_record()
