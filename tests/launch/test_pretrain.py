"""Stock Megatron trains on a CPU through the launcher: from the wheel alone, and from an unmodified checkout."""

from __future__ import annotations

import functools
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.training.arguments import add_megatron_arguments

from megacpp_mcore import cpu, patches
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.errors import DataError, LaunchError
from megacpp_mcore.launch import plan as launch_plan
from megacpp_mcore.launch import pretrain
from tests import forks, stock
from tests.data import test_arguments as test_data_arguments
from tests.distributed.comparing import assert_same_bytes
from tests.errors import raises
from tests.saved import tensors_in

fim_folder = test_data_arguments.fim_folder
"""A fixture: the folder of a tokenizer with the tokens of the fill-in-the-middle dataset."""

ITERATIONS = 5

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --rope-type rope --tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 "
    f"--global-batch-size 4 --train-iters {ITERATIONS} --lr 1e-2 --log-interval 1 --eval-iters 1 --eval-interval 100"
).split()
# Stock's local experts know neither the fused GELU nor, on one rank, a bias.
MOE = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"]
MOE += ["--no-bias-gelu-fusion", "--disable-bias-linear"]
CPU = [word for words in cpu.lane.REQUIRED_ARGUMENTS for word in words]


@dataclass(frozen=True)
class Run:
    """The output of a finished training run, and the figures in it."""

    output: str

    @property
    def figures(self) -> dict[int, tuple[str, ...]]:
        """Iteration to what was logged for it, losses and gradient norm, as printed."""
        found = {}
        for line in self.output.splitlines():
            if iteration := re.search(r" iteration +(\d+)/", line):
                found[int(iteration[1])] = tuple(re.findall(r"(?:loss|grad norm): (\S+) \|", line))
        return found


Train = Callable[..., Run]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def run(
        *arguments: str,
        script: Path | None = None,
        nproc: int = 1,
        status: int = 0,
        allow: Sequence[str] = launch_plan.ALLOWED_SPEC_PREFIXES,
    ) -> Run:
        command = [*([str(script)] if script else []), *BASE, *CPU, *arguments]
        options = f"device='cpu', nproc={nproc}, allowed_spec_prefixes={allow!r}, recording=Recording(no_observe=True)"
        call = "import sys; from megacpp_mcore.launch.launcher import Recording, launch; "
        call += f"sys.exit(launch({command!r}, {options}))"
        output = tmp_path / "output"
        output.unlink(missing_ok=True)
        found = forks.start(["-c", call], output, cwd=tmp_path).wait(forks.PATIENCE_S)
        assert found == status, output.read_text()[-4000:]
        return Run(output.read_text())

    return run


@pytest.mark.parametrize("most", [4, 3])
def test_documents_that_masks_tell_are_counted_before_the_batch_is_on_the_device(process: Path, most: int) -> None:
    tokens = torch.arange(32).remainder(9)  # an end in rows 8, 17 and 26
    mask, _, positions = _get_ltor_masks_and_position_ids(tokens, 8, True, True, False, True)
    row = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(32), "position_ids": positions}
    sample = {name: value[None] for name, value in row.items()} | {"attention_mask": mask[None]}
    arguments = stock.parse([*BASE, *CPU, "--mock-data", "--reset-attention-mask"])
    refused = raises(DataError, "4 documents", "32 tokens", "at most 3")
    with mock.patch.object(pretrain, "get_args", return_value=arguments), nullcontext() if most == 4 else refused:
        batch = pretrain.get_batch(iter([sample]), None, {32: most}.__getitem__)
        assert torch.equal(batch["attention_mask"], mask[None])


@pytest.mark.exhaustive
def test_wheel_trains_as_the_checkout_script_does_in_parallel(train: Train, megatron_lm: Path) -> None:
    layout = [*MOE, "--mock-data", "--mtp-num-layers", "1", "--num-layers", "4", "--pipeline-model-parallel-size", "2"]
    layout += ["--num-layers-per-virtual-pipeline-stage", "1"]
    ours = train(*layout, nproc=2)
    stock = train(*layout, nproc=2, script=megatron_lm / "pretrain_gpt.py")
    assert list(stock.figures) == [1, 2, 3, 4, 5]
    assert all(len(figures) >= 3 for figures in stock.figures.values()), "lm loss, mtp loss and gradient norm"
    assert ours.figures == stock.figures


@pytest.mark.slow
@pytest.mark.exhaustive
def test_wheel_fills_in_the_middle_as_the_checkout_script_does(
    train: Train, fim_folder: Path, tmp_path: Path, megatron_lm: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers, which Megatron's HuggingFaceTokenizer needs, is not installed")
    (tmp_path / "text.md").write_text("".join(f"sentence {number} of the text. " for number in range(400)))
    prepare([str(tmp_path / "text.md")], str(tmp_path / "set"), tokenizer=str(fim_folder))
    data = ["--data-path", str(tmp_path / "set"), "--split", "100,0,0", "--eval-iters", "0"]
    data += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(fim_folder)]
    ours = train(*data, "--fim-data")
    assert ours.figures == train(*data, "--fim-data", script=megatron_lm / "pretrain_gpt.py").figures
    assert len(ours.figures) == ITERATIONS
    assert ours.figures != train(*data).figures


SPEC = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

def block(config):
    print("the spec was called for", config.transformer.num_layers, "layers")
    return get_gpt_layer_local_spec(config.transformer.num_moe_experts)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoint_format", ["torch_dist", "torch"])
def test_resumed_run_repeats_the_uninterrupted_one(train: Train, tmp_path: Path, checkpoint_format: str) -> None:
    """With dropout on (Megatron's default 0.1), so that every generator state has to come back; by a spec of one word."""
    (tmp_path / "our_specs.py").write_text(SPEC)
    common = ["--mock-data", *MOE, "--ckpt-format", checkpoint_format, "--save-interval", "3"]
    common += ["--spec", "our_specs.block"]
    run = functools.partial(train, allow=["our_specs"])
    whole = run(*common, "--save", str(tmp_path / "whole"))
    assert "spec our_specs.block | device cpu | world size 1" in whole.output
    assert "the spec was called for 2 layers" in whole.output
    resumed = run(*common, "--save", str(tmp_path / "resumed"), "--load", str(tmp_path / "whole"), "--ckpt-step", "3")
    assert list(resumed.figures) == [4, 5]
    assert resumed.figures[4] == whole.figures[4]
    # Megatron's first printed loss after a resume stays in the next line's mean, so 5 is compared without its loss.
    assert resumed.figures[5][-1] == whole.figures[5][-1]
    validation = re.compile(r"validation loss at .*")
    assert validation.findall(resumed.output) == validation.findall(whole.output) != []
    if checkpoint_format == "torch_dist":
        last = f"iter_{ITERATIONS:07d}"
        expected, found = (tensors_in(tmp_path / name / last) for name in ("whole", "resumed"))
        assert len(expected) > 20
        assert_same_bytes(expected, found)


def test_refused_arguments_are_named() -> None:
    plain: dict[str, Any] = {"fim_data": False, "mock_data": False, "hybrid_layer_pattern": None}
    plain |= {"dataloader_inter_document_masking": False, "overlap_moe_expert_parallel_comm": False}
    for accepted in ({}, {"fim_data": True, "hybrid_layer_pattern": "M"}):
        pretrain.refuse_unsupported(Namespace(**plain | accepted))
    overlap = {"overlap_moe_expert_parallel_comm": True}
    packed = "--dataloader-inter-document-masking"
    for changes, code, values in (
        ({"fim_data": True, "mock_data": True}, "", ["--fim-data", "--mock-data"]),
        ({**overlap, "dataloader_inter_document_masking": True}, "documents-ignored", [packed]),
        (
            {**overlap, "hybrid_layer_pattern": "M"},
            "",
            ["--overlap-moe-expert-parallel-comm", "--hybrid-layer-pattern"],
        ),
    ):
        with raises(LaunchError, *values, code=code):
            pretrain.refuse_unsupported(Namespace(**plain | changes))


def test_means_of_context_parallel_ranks_are_refused_where_nothing_mends_them(process: Path) -> None:
    """Once: a step asks nothing."""
    args = Namespace(context_parallel_size=2, calculate_per_token_loss=False)
    with mock.patch.object(pretrain, "get_args", return_value=args) as asked:
        pretrain._refuse_means_of_ranks.cache_clear()
        with raises(LaunchError, "masked-losses", "--calculate-per-token-loss"):
            pretrain.forward_step(iter(()), None)
        patches.apply(["masked-losses"])
        for _ in range(2):
            pretrain._refuse_means_of_ranks()
        assert asked.call_count == 2
        patches.revert(["masked-losses"])
        for changed in ({"context_parallel_size": 1}, {"calculate_per_token_loss": True}):
            pretrain._refuse_means_of_ranks.cache_clear()
            with mock.patch.multiple(args, **changed):
                pretrain._refuse_means_of_ranks()
    pretrain._refuse_means_of_ranks.cache_clear()


def test_refused_arguments_exist_upstream() -> None:
    """A renamed argument would be let through in silence."""
    assert set(launch_plan.UNSUPPORTED) <= add_megatron_arguments(ArgumentParser())._option_string_actions.keys()
