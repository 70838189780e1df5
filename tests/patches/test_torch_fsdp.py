"""The patch torch-fsdp: what FSDP2 cuts, what stays whole, and what keeps its gathered weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore import patches
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import Training
from megacpp_mcore.patches.torch_fsdp import PATCH
from tests import stock
from tests.errors import raises
from tests.micro_batch import backward, causal_mask, draw_tokens, losses_of

TINY = preset("nam56r_tiny")
FSDP = "--use-torch-fsdp2"

pytestmark = pytest.mark.usefixtures("process")


def wrap(model: Any) -> Any:
    """``model`` as stock's training loop wraps it; the spec, which built it, has applied the patch."""
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = model.config
    inner = Float16Module(config, model) if config.bf16 else model
    return TorchFullyShardedDataParallel(config, TorchFullyShardedDataParallelConfig(), inner)


def test_plan_of_a_bf16_model(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    wrapped = wrap(stock.build({}, TINY, tmp_path, precision="bf16"))
    root = wrapped.module
    units = {name.removeprefix("module."): m for name, m in root.named_modules() if isinstance(m, FSDPModule)}
    kept = ("", "embedding", "mtp.layers.0.mtp_model_layer")
    layers = tuple(f"decoder.layers.{number}" for number in range(TINY.depth))
    assert set(units) == {*kept, *layers}
    resharded = {name for name, m in units.items() if m._get_fsdp_state()._fsdp_param_group._reshard_after_forward}
    assert resharded == set(layers)
    unsharded = {name for name, parameter in root.named_parameters() if not isinstance(parameter, DTensor)}
    assert unsharded == {name for name, parameter in root.named_parameters() if parameter.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in unsharded} >= {"dt_bias", "D", "b_bias", "W", "A_log"}


def test_a_step_of_cut_parameters_is_that_of_whole_ones(tmp_path: Path) -> None:
    """One process, whose cut parameters are whole; tests/distributed cuts them over two, and resumes."""
    from torch.distributed.tensor import DTensor

    tokens = draw_tokens(1, TINY.seq_length)
    mask = {"attention_mask": causal_mask(TINY.seq_length)}
    outcomes = []
    for is_cut in (False, True):
        model = stock.build({}, TINY, tmp_path).train()
        root = wrap(model) if is_cut else model
        stock.loss_scale(1.0)
        loss = losses_of(root, tokens, **mask).mean()
        backward(loss)
        gradients = {name.removeprefix("module."): param.grad for name, param in root.named_parameters()}
        assert any(isinstance(grad, DTensor) for grad in gradients.values()) == is_cut
        outcomes.append((float(loss), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}))
    (loss, unsharded), (cut_loss, cut) = outcomes
    assert cut_loss == loss
    torch.testing.assert_close(cut, unsharded, rtol=1e-5, atol=1e-7)


def test_what_follows_a_step_and_what_a_checkpoint_fills(tmp_path: Path) -> None:
    """tests/distributed trains and resumes with it, on two processes."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

    wrapped = wrap(stock.build({}, TINY, tmp_path, precision="bf16"))
    param = wrapped.whole_parameters[0]
    param.grad = torch.full_like(param, 3.0)
    wrapped.finish_grad_sync()
    assert torch.equal(param.main_grad, torch.full_like(param, 3.0))
    mesh = init_device_mesh("cpu", (1,))
    own = {name: tensor for name, tensor in wrapped.module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in own.items()}
    state = {name: distribute_tensor(torch.full_like(t, 2.0), mesh, [Replicate()]) for name, t in full.items()}
    wrapped.load_state_dict(state, strict=False)
    assert all((parameter == 2).all() for parameter in wrapped.module.parameters())
    adam = torch.optim.Adam([weight := torch.nn.Parameter(torch.ones(2))])
    load = stock.makes(PATCH)["ChainedOptimizer.state_dict"](lambda chained: "stock's")
    assert load(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=adam)]), is_loading=True) == "stock's"
    assert adam.state[weight]["exp_avg"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"calculate_per_token_loss": True}, "calculate_per_token_loss is True"),
        ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl is 'full_iteration'"),
        ({"recompute_granularity": "full", "mtp_num_layers": 2}, "--recompute-granularity full is 2"),
    ],
)
def test_runs_that_it_would_train_wrongly_are_refused(changes: dict[str, Any], value: str, tmp_path: Path) -> None:
    model = stock.build({}, TINY, tmp_path)
    vars(model.config).update(changes)
    with raises(ModelError, "--use-torch-fsdp2", value):
        wrap(model)


class Stock(torch.nn.Module):
    """A model without our spec: one plain layer, and one that stock shards by itself."""

    def __init__(self, config: Any) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear

        super().__init__()
        self.config, self.plain = config, torch.nn.Linear(4, 4)
        self.column = ColumnParallelLinear(4, 4, config=config, init_method=torch.nn.init.ones_)


def test_other_models_are_sharded_as_by_stock() -> None:
    """In 16 bits without ``params_dtype``, and where a run of ours would be refused."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True, calculate_per_token_loss=True,
        use_cpu_initialization=True,
    )  # fmt: skip
    patches.apply(["torch-fsdp"])
    root = wrap(Stock(config)).module
    assert {name for name, module in root.named_modules() if isinstance(module, FSDPModule)} == {"", "module.column"}
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())


def test_lowering() -> None:
    """No fused gradients, no distributed optimizer, no overlap of stock's; a checkpoint that holds it; only replicas."""
    training = Training(processes=8, extra=(FSDP,))
    words = lower(Run(TINY, Layout(), training))
    assert "--no-gradient-accumulation-fusion" in words
    assert words[words.index("--ckpt-format") + 1] == "torch_dcp"
    sharded = {"--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"}
    assert not {*sharded, "--overlap-grad-reduce", "--overlap-param-gather"} & set(words)
    model = with_overrides(TINY, {"dsa": {"schedule": "-FF"}})
    with raises(
        ModelError,
        "pipeline parallelism is 2, expected 1",
        "expert parallelism is 2",
        "Megatron-FSDP",
        "--use-torch-fsdp2",
    ):
        lower(Run(model, Layout(pipeline=2, expert=2), training))
    with pytest.raises(AssertionError, match="expert parallelism"):  # where Megatron has it, the refusal goes
        stock.parse([*stock.words(TINY, layout=Layout(expert=2), processes=2), FSDP], world_size=2)
    with raises(ModelError, "context parallelism is 2, expected 1", "--use-torch-fsdp2"):
        lower(Run(TINY, Layout(context=2), training))
