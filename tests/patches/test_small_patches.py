"""The small patches, and what sp-norm-gradients refuses and does not touch.

Shape legend: S sequence, B batch, D hidden, E experts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.errors import LaunchError, SpecImportError
from megacpp_mcore.patches import (
    dataset_helpers,
    expert_counts,
    moe_recompute_memory,
    output_layer_fusion,
    sp_norm_gradients,
    spec_import,
)
from tests import forks, micro_batch, stock
from tests.dsa_layer import dsa_config
from tests.errors import raises

Applied = Callable[[Any], Any]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Megatron's modules, imported once, before a test replaces anything that an import uses."""
    with stock.cpu_lane():
        for patch in (spec_import.PATCH, dataset_helpers.PATCH, sp_norm_gradients.PATCH):
            for edit in patch.edits:
                importlib.import_module(edit.target.partition(":")[0])


@pytest.fixture
def applied() -> Iterator[Applied]:
    """Applies the patch of a module, until the test ends."""
    with stock.cpu_lane(), contextlib.ExitStack() as stack:
        yield lambda module: stack.enter_context(stock.patched(module.PATCH))


def upstream_import(words: Any) -> Any:
    return importlib.import_module("megatron.core.transformer.spec_utils").import_module(words)


def test_one_dotted_word_or_two(applied: Applied) -> None:
    applied(spec_import)
    for words in (["json.decoder.JSONDecoder"], ["json.decoder", "JSONDecoder"]):
        assert upstream_import(words) is json.JSONDecoder
    assert upstream_import(("json", "decoder")) is json.decoder


def test_upstream_fails_where_the_patch_does_not() -> None:
    """The faults themselves: not worth a patch once this test fails."""
    with pytest.raises(ValueError, match="not enough values to unpack"):
        upstream_import(["json.decoder.JSONDecoder"])
    with contextlib.suppress(ImportError):  # which newer Megatron raises itself
        assert upstream_import(["no_such_package", "spec"]) is None


NOT_IMPORTED = (
    (["no_such_package", "spec"], "", ["module 'no_such_package'", "spec 'spec'", "No module named"]),
    (["no_such_package.spec"], "", ["module 'no_such_package'", "spec 'spec'", "No module named"]),
    (["json", "nothing"], "", ["spec 'nothing'", "module 'json'"]),
    (["json.nothing"], "", ["spec 'nothing'", "module 'json'"]),
    (["json"], "spec-form", ["--spec 'json'", "--spec megacpp_mcore.PRESET"]),
    (["local"], "spec-form", ["--spec 'local'"]),
    ([], "spec-form", ["--spec ''"]),
    (["a", "b", "c"], "spec-form", ["--spec 'a b c'", "--spec megacpp_mcore PRESET"]),
    (["a", ""], "spec-form", ["--spec 'a '"]),
    ([".spec"], "spec-form", ["--spec ' spec'"]),
    (["broken_spec", "block"], "", ["no_such_module_at_all"]),
    (["angry_spec.block"], "", ["RuntimeError: not today"]),
)


def test_what_cannot_be_imported_ends_the_run(applied: Applied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied(spec_import)
    (tmp_path / "broken_spec.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "angry_spec.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for words, code, values in NOT_IMPORTED:
        with raises(SpecImportError, *values, code=code) as raised:
            upstream_import(words)
        if words in (["broken_spec", "block"], ["angry_spec.block"]):
            assert isinstance(raised.value.__cause__, ModuleNotFoundError | RuntimeError)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that upstream's compile_helpers would have run; none of them is."""
    commands: list[list[str]] = []

    def run(command: list[str], *_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def compile_helpers() -> None:
    importlib.import_module("megatron.core.datasets.utils").compile_helpers()


def without_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    # None makes the import fail, as it does in a checkout that has not compiled its helper.
    monkeypatch.setitem(sys.modules, dataset_helpers.HELPER, None)


def test_a_helper_that_is_there_is_not_made(applied: Applied, made: list[list[str]]) -> None:
    """Upstream always runs make: in the wheel's folder, which has the compiled helper and no Makefile."""
    place = Path(str(importlib.import_module("megatron.core.datasets.utils").__file__)).parent
    assert not (place / "Makefile").exists()
    assert importlib.import_module(dataset_helpers.HELPER).__file__
    compile_helpers()
    assert made == [["make", "-C", str(place)]]
    applied(dataset_helpers)
    made.clear()
    compile_helpers()
    assert made == []


@pytest.mark.parametrize("source", ["the wheel's", "another", None])
def test_a_folder_without_a_helper(
    applied: Applied, made: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    """The wheel's helper serves where the source is the same; another source is made; without one there is nothing to make."""
    utils, helper = (importlib.import_module(name) for name in ("megatron.core.datasets.utils", dataset_helpers.HELPER))
    if source is not None:
        text = (Path(str(utils.__file__)).parent / "helpers.cpp").read_text()
        (tmp_path / "helpers.cpp").write_text(text if source == "the wheel's" else "// another\n")
        (tmp_path / "Makefile").touch()
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    applied(dataset_helpers)
    without_helper(monkeypatch)
    if source is None:
        with raises(LaunchError, "Makefile", "megatron-core"):
            compile_helpers()
        return
    compile_helpers()
    if source == "another":
        assert made == [["make", "-C", str(tmp_path)]]
    else:
        assert made == []
        assert sys.modules[dataset_helpers.HELPER].__file__ == helper.__file__
        assert sys.modules[dataset_helpers.HELPER].build_sample_idx_int32 is not None


def test_every_rank_has_the_helper_before_it_is_needed(applied: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's start-up step compiles only on rank 0; here it is rank 1."""
    initialize = importlib.import_module("megatron.training.initialize")
    importlib.import_module(dataset_helpers.HELPER)
    reached: list[bool] = []
    monkeypatch.setattr(initialize, "get_args", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: reached.append(sys.modules[dataset_helpers.HELPER] is not None))
    for patched in (False, True):
        without_helper(monkeypatch)
        if patched:
            applied(dataset_helpers)
        initialize._compile_dependencies()
    assert reached == [False, True]


class Chunk:
    """A model chunk of one marked parameter, with the two things that a schedule reads of it."""

    def __init__(self, **ddp: bool) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        vars(self.weight)["sequence_parallel"] = True
        self.config = types.SimpleNamespace(finalize_model_grads_func=None)
        if ddp:
            self.ddp_config = types.SimpleNamespace(**{"overlap_grad_reduce": False, "use_megatron_fsdp": False} | ddp)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        yield "norm.weight", self.weight


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's reduction on two ranks that are made up; it doubles the gradients that it is asked for."""

    def reduce(model: list[Any], config: Any, tp_group: Any) -> None:
        for chunk in model:
            for _, parameter in chunk.named_parameters():
                parameter.grad.mul_(2)

    finalize = importlib.import_module(sp_norm_gradients._FINALIZE)
    once = sp_norm_gradients._reduce_once.make(reduce)
    monkeypatch.setattr(finalize, "_allreduce_non_tensor_model_parallel_grads", once)
    monkeypatch.setattr(sp_norm_gradients, "_tensor_group", lambda groups: types.SimpleNamespace(size=lambda: 2))


SCHEDULES = [
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
]


def train(chunk: Any, name: str = SCHEDULES[0], **arguments: Any) -> float:
    """A schedule in one line, with what the patch makes of the one of this name; the gradient."""
    schedule = stock.makes(sp_norm_gradients.PATCH)[name](lambda model, **_: model.weight.sum().backward())
    with stock.cpu_lane():
        schedule(model=chunk, **arguments)
    return chunk.weight.grad.mean().item()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("ddp", "arguments", "gradient"),
    [
        ({}, {}, 2.0),
        ({}, {"forward_only": True}, 1.0),  # an evaluation
        # Gradients that are under way to other ranks already.
        ({"overlap_grad_reduce": True}, {}, 1.0),
        ({"use_megatron_fsdp": True}, {}, 1.0),
    ],
)
def test_what_is_summed(ddp: dict[str, bool], arguments: dict[str, Any], gradient: float, schedule: str) -> None:
    """The sum is of this call only: a second one adds as much."""
    chunk = Chunk(**ddp)
    assert train(chunk, schedule, **arguments) == gradient
    assert train(chunk, schedule, **arguments) == 2 * gradient


def test_a_chunk_may_be_any_object() -> None:
    """Megatron's tests of schedules train namespaces, which have no weak references."""
    parts = Chunk()
    chunk = types.SimpleNamespace(config=parts.config, weight=parts.weight, named_parameters=parts.named_parameters)
    assert train(chunk) == 2.0


def test_calls_with_and_without_finalizing_are_not_mixed() -> None:
    chunk = Chunk()
    train(chunk)
    chunk.config.finalize_model_grads_func = lambda *_: None
    with raises(LaunchError, "config.finalize_model_grads_func", code="gradients-left"):
        train(chunk)
    assert chunk.weight.grad.mean() == 2.0
    chunk.weight.grad = None
    assert train(chunk) == 1.0


def test_a_captured_schedule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Chunk()
    schedule = sp_norm_gradients._complete_gradients(lambda model, **_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with raises(LaunchError, "config.finalize_model_grads_func", code="captured"):
        schedule(model=chunk)


EXIT = """
import json, os, signal, sys
import torch
from megatron.training.dist_signal_handler import DistributedSignalHandler
from megacpp_mcore import patches
patches.apply(["exit-signal"])
torch.distributed.init_process_group("gloo")
stops = []
with DistributedSignalHandler(signal.SIGTERM) as handler:
    for step in range(1, 6):
        if step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        if any(handler.signals_received()):
            stops.append(step)
torch.distributed.destroy_process_group()
print(f"rank {os.environ['RANK']} stops after {stops}")
"""


def test_all_ranks_stop_after_the_same_step() -> None:
    status, output = forks.run_ranks(["-c", EXIT], 2, megatron=True)
    assert status == 0, output[-3000:]
    for rank in range(2):
        assert f"rank {rank} stops after [4, 5]" in output


def output_layer(config: Any) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear(48, 64, config=config, init_method=torch.nn.init.normal_, bias=False)


def test_without_apex_the_output_layer_alone_does_not_fuse(process: Path) -> None:
    config = dsa_config(gradient_accumulation_fusion=True)
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        output_layer(config)
    with stock.patched(output_layer_fusion.PATCH):
        layer = output_layer(config)
        assert layer.config is config
        assert (layer.gradient_accumulation_fusion, config.gradient_accumulation_fusion) == (False, True)
        layer(torch.ones(3, 48))[0].sum().backward()
        assert torch.equal(layer.weight.grad, torch.full((64, 48), 3.0))


def test_a_row_parallel_layer_trains_without_apex(process: Path) -> None:
    from megatron.core.tensor_parallel import RowParallelLinear

    def backward() -> torch.Tensor:
        layer = RowParallelLinear(
            48, 64, config=dsa_config(gradient_accumulation_fusion=True), init_method=torch.nn.init.normal_, bias=False,
            input_is_parallel=True, skip_bias_add=False,
        )  # fmt: skip
        layer.weight.main_grad = torch.zeros(64, 48)  # as DistributedDataParallel leaves it
        layer(torch.ones(3, 48))[0].sum().backward()
        return layer.weight.grad

    with pytest.raises(NameError, match="fused_weight_gradient_mlp_cuda"):
        backward()
    with stock.patched(output_layer_fusion.PATCH):
        assert torch.equal(backward(), torch.full((64, 48), 3.0))


def test_with_apex_or_without_the_flag_nothing_is_changed(process: Path) -> None:
    with stock.patched(output_layer_fusion.PATCH):
        assert output_layer(dsa_config(gradient_accumulation_fusion=False)).gradient_accumulation_fusion is False
        with mock.patch("megatron.core.tensor_parallel.layers._grad_accum_fusion_available", True):
            assert output_layer(dsa_config(gradient_accumulation_fusion=True)).gradient_accumulation_fusion is True


S, B, D, E = 64, 2, 16, 4
MICRO_BATCHES = 300
"""More than bf16 counts one by one; of so many tokens, 80 give each expert more than fp16 counts."""


def wrapped_router(ours: bool, **settings: Any) -> Any:
    """A router in Float16Module, as Megatron's set-up leaves it."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models.dist_utils import _wrap_with_mp_wrapper

    from megacpp_mcore.layer_specs.router import Router
    from megacpp_mcore.ops.router.reference import route

    config = TransformerConfig(
        num_layers=1, hidden_size=D, num_attention_heads=2, num_moe_experts=E, moe_router_topk=2,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32",
        use_cpu_initialization=True, **settings,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(3)  # its loads are 4,200 to 6,200 tokens an expert in 80 micro-batches
    router = Router(config, groups, route=route) if ours else TopKRouter(config, groups)
    router.set_layer_number(1)
    return _wrap_with_mp_wrapper([router], config, Float16Module)[0].module.train()


def count(router: Any, micro_batches: int) -> torch.Tensor:
    """Runs so many micro-batches; returns the tokens ``[E]`` of each expert in whole numbers."""
    draw, routed_E = torch.Generator().manual_seed(0), torch.zeros(E, dtype=torch.int64)
    for _ in range(micro_batches):
        hidden_SBD = torch.randn(S, B, D, generator=draw).to(router.weight.dtype)
        routed_E += router(hidden_SBD)[1].sum(0)
    return routed_E


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "ours"])
def test_counts_are_the_tokens_that_were_routed(process: Path, ours: bool, precision: str) -> None:
    """And the buffer stays where the wrapped model has it, as a CUDA graph requires; without the patch counts are rounded."""
    for patches in ((), (expert_counts.PATCH,)):
        with stock.patched(*patches):
            router = wrapped_router(ours, **{precision: True})
            place = router.local_tokens_per_expert.data_ptr()
            routed_E = count(router, 80)
            assert routed_E.min() > 2048
            counted_E = router.local_tokens_per_expert
            assert counted_E.data_ptr() == place
            off = int((counted_E.long() - routed_E).abs().max())
            assert off == 0 if patches else off >= 2
            assert "local_tokens_per_expert" not in router.state_dict()


def test_the_global_loss_divides_by_all_micro_batches(process: Path) -> None:
    with stock.patched(expert_counts.PATCH):
        router = wrapped_router(False, bf16=True, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.01)
        routed_E = count(router, MICRO_BATCHES)
        assert router.ga_steps == MICRO_BATCHES
        assert router.global_tokens_per_expert.sum() == routed_E.sum()


def left_behind(dispatcher: str) -> int:
    """How many inputs of a model's two layers are alive, of which one has experts, after a recomputed backward pass."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    stock.restart_random()
    config = stock.small_config(
        num_layers=2, moe_layer_freq=[0, 1], hidden_size=D, num_moe_experts=E, moe_router_topk=2,
        moe_token_dispatcher_type=dispatcher, add_bias_linear=False, recompute_granularity="full",
        recompute_method="uniform", recompute_num_layers=1,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, 256, S, position_embedding_type="rope")
    inputs: list[weakref.ref[torch.Tensor]] = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(weakref.ref(kwargs["hidden_states"])), with_kwargs=True
        )
    losses = micro_batch.losses_of(model, micro_batch.draw_tokens(B, S), attention_mask=micro_batch.causal_mask(S))
    micro_batch.backward(losses.mean())
    del losses
    assert len(inputs) == 4
    return sum(reference() is not None for reference in inputs)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_recompute_leaves_no_inputs_behind(process: Path, dispatcher: str) -> None:
    assert left_behind(dispatcher) == 1
    with stock.patched(moe_recompute_memory.PATCH):
        assert left_behind(dispatcher) == 0


def test_what_a_dispatcher_s_communication_keeps_has_no_graph() -> None:
    """That of the dispatcher `flex`, which needs DeepEP and several GPUs."""
    makes, kept = stock.makes(moe_recompute_memory.PATCH), torch.ones(2, requires_grad=True) * 2
    layer = types.SimpleNamespace(
        token_dispatcher=types.SimpleNamespace(_comm_manager=types.SimpleNamespace(probs=kept, tokens=3))
    )
    assert makes["MoELayer.postprocess"](lambda self, output: output)(layer, 7) == 7
    manager = layer.token_dispatcher._comm_manager
    assert manager.probs.grad_fn is None
    assert (manager.probs.tolist(), manager.tokens) == ([2.0, 2.0], 3)
    assert kept.grad_fn is not None
