"""Saves and loads optimizer state in one layout, many times in one process: ``launch -- moving.py TASKS WORDS``.

Nothing is trained: states are filled with numbers that follow from a parameter's name and each number's place in the whole
tensor (by the model's sharded state dict, by no code of a patch), saved, loaded and compared byte for byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.enums import ModelType
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing, global_vars, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args, parse_args, validate_args
from megatron.training.initialize import initialize_megatron

from megacpp_mcore import patches
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.launch.pretrain import get_embedding_ranks

STEP = 7
MAIN, MOMENTS = "main", ("exp_avg", "exp_avg_sq")
EXACT, REFUSED = "exact", "refused"
DEFAULT, FULLY, TORCH, STOCK = "default", "fully", "torch", "stock "
"""Formats: Megatron's default, with ``--dist-ckpt-optim-fully-reshardable``, with ``--ckpt-format torch``; before one of them:
as megatron-core has it without our patch."""


class Trainee:
    """A model and its optimizer as Megatron builds them from these words, with state to be saved and loaded."""

    def __init__(self, words: Sequence[str]) -> None:
        sys.argv[1:] = words
        if global_vars._GLOBAL_ARGS is None:
            self.args = parse_and_validate_args()
            initialize_megatron(get_embedding_ranks=get_embedding_ranks)
        else:
            self.args = parse_args()
            validate_args(self.args)
            global_vars.set_args(self.args)
        self.model, self.optimizer, self.scheduler = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=pretrain_cfg_container_from_args(self.args, gpt_config_from_args(self.args)),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        metadata = {"dp_cp_group": ProcessGroupCollection.use_mpu_process_groups().dp_cp}
        entries = {
            id(value.data): value
            for chunk in unwrap_model(self.model)
            for value in nested_values(chunk.sharded_state_dict(metadata=metadata))
            if isinstance(value, ShardedTensor | ShardedTensorFactory)
        }
        self.keys = {id(parameter): entries[id(parameter)].key for parameter in self.parameters()}
        self.wanted = {
            (id(parameter), state): expected(state, entries[id(parameter)])
            for parameter in self.parameters()
            for state in (MAIN, *MOMENTS)
        }

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Every parameter of this rank's part of the model."""
        return (parameter for chunk in unwrap_model(self.model) for parameter in chunk.parameters())

    def states(self) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor]]:
        """The name, this rank's numbers and the ones expected, of each parameter and each state."""
        for parameter in self.parameters():
            wanted = self.wanted[id(parameter), MAIN].to(parameter.dtype)
            yield f"{self.keys[id(parameter)]} model", parameter.detach(), wanted
        for optimizer in self.optimizer.chained_optimizers:
            for parameter, span, main in mains(optimizer):
                state = optimizer.optimizer.state.get(main, {})
                for kind, found in ((MAIN, main.detach()), *((kind, state.get(kind)) for kind in MOMENTS)):
                    wanted = self.wanted[id(parameter), kind].flatten()[span].view_as(main)
                    yield f"{self.keys[id(parameter)]} {kind}", found, wanted

    def fill(self) -> None:
        """Give every state the numbers expected of it, and Adam its count of steps."""
        for optimizer in self.optimizer.chained_optimizers:
            adam = optimizer.optimizer
            for _, _, main in mains(optimizer):
                adam.state[main] = {name: torch.zeros_like(main.detach()) for name in MOMENTS}
                adam.state[main]["step"] = torch.tensor(float(STEP))
        with torch.no_grad():
            for _, found, wanted in self.states():
                found.copy_(wanted)

    def spoil(self) -> None:
        """Make every state something else, as far as there is any."""
        with torch.no_grad():
            for _, found, _ in self.states():
                if found is not None:
                    found.fill_(math.nan)
        for optimizer in self.optimizer.chained_optimizers:
            for state in optimizer.optimizer.state.values():
                state["step"] = torch.tensor(0.0)

    def differing(self) -> list[str]:
        """The names of the states that are not, byte for byte, as expected."""
        off = [name for name, found, wanted in self.states() if found is None or not same_bytes(found, wanted)]
        for optimizer in self.optimizer.chained_optimizers:
            steps = {float(state["step"]) for state in optimizer.optimizer.state.values()}
            off += [f"step {step}" for step in steps - {float(STEP)}]
        return off

    def save(self, folder: Path, how: str) -> None:
        """Save to ``folder`` in the format that is called ``how``."""
        self.args.dist_ckpt_optim_fully_reshardable = how.endswith(FULLY)
        self.args.save = str(folder)
        with self._format(how):
            checkpointing.save_checkpoint(STEP, self.model, self.optimizer, self.scheduler, 0)

    def load(self, folder: Path, how: str) -> str:
        """Load from ``folder``: ``exact``, or why not."""
        self.args.load = str(folder)
        self.spoil()
        try:
            with self._format(how):
                checkpointing.load_checkpoint(self.model, self.optimizer, self.scheduler)
        except MegacppError as error:
            return f"{REFUSED}: {error}"
        except BaseException as error:  # as torch's CheckpointException is
            return f"{type(error).__name__}: {str(error)[-4000:]}"
        off = self.differing()
        return f"{len(off)} of {len(list(self.states()))} differ: {off[:3]}" if off else EXACT

    @contextlib.contextmanager
    def _format(self, how: str) -> Iterator[None]:
        self.args.ckpt_format = TORCH if how == TORCH else "torch_dist"
        self.args.use_dist_ckpt = how != TORCH
        stock = how.startswith(STOCK)
        if stock:
            patches.revert(["optimizer-resharding"])
        try:
            yield
        finally:
            if stock:
                patches.apply(["optimizer-resharding"])


def mains(optimizer: Any) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
    """Each parameter of an optimizer, the part of its numbers that this rank updates, and the fp32 tensor that has them."""
    groups = optimizer.optimizer.param_groups
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, slice(owned.start, owned.end), groups[group]["params"][order]
        return
    of_main = {
        id(main): parameter
        for models, copies in zip(
            getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()), strict=True
        )
        for parameter, main in zip(models, copies, strict=True)
    }
    for group in groups:
        for main in group["params"]:
            yield of_main.get(id(main), main), slice(None), main


def expected(state: str, entry: ShardedTensor | ShardedTensorFactory) -> torch.Tensor:
    """The numbers of a state in the shape of this rank's parameter."""
    local = torch.zeros(entry.data.shape)
    if isinstance(entry, ShardedTensorFactory):
        pieces = list(nested_values(dataclasses.replace(entry, data=local).build()))
    else:
        pieces = [dataclasses.replace(entry, data=local, dtype=local.dtype)]
    for piece in pieces:
        first, at = piece.global_offset[: piece.prepend_axis_num], piece.global_offset[piece.prepend_axis_num :]
        place = (*first, *(slice(start, start + size) for start, size in zip(at, piece.local_shape, strict=True)))
        piece.data.copy_(whole(state, piece)[place].view_as(piece.data))
    return local


def whole(state: str, piece: ShardedTensor) -> torch.Tensor:
    """Numbers of a whole tensor, which follow from its name and their places; a vocabulary's padding is zero, as at a load."""
    shape = (min(piece.global_shape[0], VOCABULARY), *piece.global_shape[1:]) if piece.allow_shape_mismatch else None
    seed = torch.Generator().manual_seed(zlib.crc32(f"{state} {piece.key}".encode()))
    numbers = torch.rand(shape or piece.global_shape, generator=seed)
    if shape is None or shape == piece.global_shape:
        return numbers
    padded = torch.zeros(piece.global_shape)
    padded[: shape[0]] = numbers
    return padded


VOCABULARY = 260


def same_bytes(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    return torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def main() -> None:
    """Do what the file of tasks says, and write what came of it, a file a rank."""
    tasks = json.loads(Path(sys.argv[1]).read_text())
    answers = {}
    for task in tasks["trainees"]:
        trainee = Trainee(task["words"])
        if task["save"]:
            trainee.fill()
        for folder, how in task["save"].items():
            trainee.save(Path(folder), how)
        for folder, how in task["load"]:
            answers[f"{folder} as {how} to {task['name']}"] = trainee.load(Path(folder), how)
    Path(tasks["answers"] + f".{torch.distributed.get_rank()}").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
