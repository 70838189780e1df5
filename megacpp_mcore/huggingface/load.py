"""Reads an exported folder back into a checkpoint of the format torch_dist: the weights, for any layout."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megacpp_mcore.arguments import lowering
from megacpp_mcore.checkpoints.folder import RELEASE, TRACKER
from megacpp_mcore.checkpoints.integrity import COMMON, write_manifest
from megacpp_mcore.checkpoints.layout import KEY, LAYOUT, MODEL_KEY, recorded
from megacpp_mcore.checkpoints.staging import new_folder
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.huggingface.export import DIGESTS, INDEX, safetensors
from megacpp_mcore.huggingface.names import PLAIN, configuration, tensors
from megacpp_mcore.model import PRESETS, Model, preset
from megacpp_mcore.settings import VARIABLE, from_environment
from megacpp_mcore.util.files import sha256_of

_EXTRA = "{}_extra_state/shard_{}_{}"
"""Megatron's name of a linear layer's extra state: its prefix, and the expert's number among how many."""


def load(folder: Path, checkpoint: Path, model: Model) -> Path:
    """Write the weights in ``folder`` to ``checkpoint``, for ``--load`` and ``--finetune``: a run then starts at step 0.

    ``folder`` is what :func:`megacpp_mcore.huggingface.export.export` or ``save_pretrained`` wrote for ``model``. Returns the
    folder of the release in ``checkpoint``.

    Raises:
        CheckpointError: ``folder`` is incomplete, damaged, unreadable or of another model; ``checkpoint`` exists;
            safetensors is not installed. Nothing is left behind.
    """
    _check_configuration(_json(folder / "config.json"), str(folder / "config.json"), model)
    state: dict[str, Any] = {}
    values = _read(folder)
    for tensor in tensors(model):
        value = values.pop(tensor.name, None)
        if value is None or tuple(value.shape) != tensor.shape or not value.is_floating_point():
            problem = "is missing" if value is None else f"is {value.dtype} {list(value.shape)}"
            raise CheckpointError(f"{folder}: {tensor.name} {problem}, expected floats {list(tensor.shape)}; export it again")
        state[tensor.key] = value
        if tensor.linear:
            prefix, shards = tensor.key.removesuffix("weight"), tensor.shape[0] if value.dim() == 3 else 1
            state |= {_EXTRA.format(prefix, shard, shards): [None] for shard in range(shards)}
    if values:
        raise CheckpointError(f"{folder} has tensors that {model.name} has not: {', '.join(sorted(values)[:3])}")
    content = {KEY: LAYOUT, MODEL_KEY: recorded(model)}
    run_fields = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "world_size": 1,
        "ckpt_format": "torch_dist",
    }
    fields = {argument.field: argument.expected for argument in lowering.model_arguments(model)}
    sizes = {"vocab_size": model.vocab_size, "num_experts": fields.get("num_moe_experts")}
    arguments = Namespace(**fields | run_fields | sizes, spec=[*lowering.spec_of(model.name)])
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}
    with new_folder(checkpoint) as unfinished:
        target = unfinished / RELEASE
        target.mkdir()
        state[COMMON] = [common]
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(state, storage_writer=FileSystemWriter(target, thread_count=1), planner=planner, no_dist=True)
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
        (target / "metadata.json").write_text(json.dumps(backend | {"common_backend_version": 1}), encoding="utf-8")
        write_manifest(target)
        (unfinished / TRACKER).write_text(RELEASE, encoding="utf-8")
    return checkpoint / RELEASE


def model_of(found: Mapping[str, Any], where: str) -> Model:
    """Return the model of ``MEGACPP_CONFIG``, or the preset, that matches the configuration ``found``.

    Raises:
        CheckpointError: none matches.
    """
    settings = from_environment()
    refused = ""
    for model in (settings.model,) if settings else map(preset, PRESETS):
        try:
            _check_configuration(found, where, model)
        except CheckpointError as error:
            refused = str(error)
        else:
            return model
    raise CheckpointError(refused if settings else f"{where} is of no preset: name its settings file by {VARIABLE}")


def _check_configuration(found: Mapping[str, Any], where: str, model: Model) -> None:
    for name, value in {**PLAIN, **configuration(model)}.items():
        if name in ("architectures", "auto_map", "mtp_depth", "max_position_embeddings"):
            continue  # set by the code, or without a tensor or a size of its own
        if (stored := found.get(name, PLAIN.get(name))) != value:
            raise CheckpointError(
                f"{where}: {name} is {stored!r}, and {value!r} in {model.name}; name the model "
                "that was exported, by MEGACPP_CONFIG if not a preset"
            )


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors, mapped from their files, which are checked against the digests in the index, if it has any."""
    library = safetensors()
    index = folder / INDEX
    is_single_file = (
        folder / "model.safetensors"
    ).is_file()  # transformers reads it first, and leaves an older index next to it
    content = _json(index) if index.is_file() and not is_single_file else {}
    places, digests = content.get("weight_map"), content.get(DIGESTS, {})
    plain = isinstance(places, dict) and all(isinstance(name, str) and Path(name).name == name for name in places.values())
    if index.is_file() and not is_single_file and not (places and plain and isinstance(digests, dict)):
        raise CheckpointError(f"{index} has no weight_map from tensors to files next to it; export it again")
    names = sorted(set(places.values())) if places else ["model.safetensors"]
    values: dict[str, torch.Tensor] = {}
    for name in names:
        path = folder / name
        try:
            values |= library.load_file(str(path))
            is_intact = not digests or sha256_of(path) == digests.get(name)
        except FileNotFoundError:
            which = path if places else f"{path}, or {INDEX} and the files in it,"
            raise CheckpointError(f"{which} is missing; the export is incomplete, export it again") from None
        except Exception as error:  # a damaged header can raise anything
            raise CheckpointError(f"{path} cannot be read ({error}); export it again") from error
        if not is_intact:
            raise CheckpointError(
                f"{path} is not what was exported, by the SHA-256 in {INDEX}; restore it from a copy, or export it again"
            )
    if places and (missing := sorted(places.keys() - values.keys())):
        raise CheckpointError(f"{folder / places[missing[0]]} has no {missing[0]}, which {INDEX} says it has; export it again")
    return values


def _json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; expected an exported folder") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, expected fields by name; export it again")
    return content
