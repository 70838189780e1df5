"""E layers on a GPU: ours against stock's with Transformer Engine, no host wait, a CUDA graph, and training across both.

Shape legend: S sequence, B batch, T tokens (S × B), D hidden, N experts.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.backends import STOCK, Dispatcher
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.observe.steps import read_steps
from megacpp_mcore.ops.router import triton as fused
from tests import stock
from tests.gpu import runs
from tests.gpu.device import assert_replays, peak
from tests.gpu.runs import ALONE, words_of
from tests.ops.router_case import CASES, Case, compared

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)

S, B, D = 513, 2, 3584


def build(backends: Mapping[str, str], layout: Layout = ALONE, *more: str) -> Any:
    """The MoE layer of layer 2 of nam56r_quarter, from one seed."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random

    from megacpp_mcore.layer_specs.experts import expert_layer_spec
    from megacpp_mcore.layer_specs.initial import set_start
    from megacpp_mcore.layer_specs.parts import parts_for

    model = preset("nam56r_quarter")
    words = words_of(model, "--no-gradient-accumulation-fusion", *more, layout=layout)
    config = stock.model_config(words, layout.processes).transformer
    set_start(model, config)
    torch.manual_seed(1234)  # a router is drawn on the host
    random.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    spec = expert_layer_spec(config, parts_for(config), Dispatcher(backends)).submodules.mlp
    layer = spec(config=config, layer_number=2, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    layer.set_layer_number(2)
    layer.router.expert_bias += 0.02 * torch.randn(16, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    return layer.bfloat16().cuda().train()


@pytest.fixture(scope="module")
def pair(process: None) -> tuple[Any, Any]:
    """Ours, and stock's."""
    ours, stocks = build({}), build({"experts": STOCK, "router": STOCK})
    assert [type(layer.experts).__name__ for layer in (ours, stocks)] == ["StackedExperts", "TEGroupedMLP"]
    assert [type(layer.router).__name__ for layer in (ours, stocks)] == ["Router", "TopKRouter"]
    assert (ours.experts.backend.observed, ours.router_backend.observed) == ("triton", "triton")
    return ours, stocks


def draw(seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden, gradient = (torch.randn(S, B, D, device="cuda", generator=generator).bfloat16() for _ in range(2))
    return hidden.requires_grad_(), gradient


def outcome(layer: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of input, router, both matrices of all experts, and the shared expert."""
    from megacpp_mcore.layer_specs.experts import StackedExperts, expert_matrices

    experts, shared = layer.experts, layer.shared_experts
    stacked = isinstance(experts, StackedExperts)
    first, second = ([experts.weight1], [experts.weight2]) if stacked else expert_matrices(experts)
    leaves = [hidden, layer.router.weight, shared.linear_fc1.weight, shared.linear_fc2.weight, *first, *second]
    output, unadded = layer(hidden)
    output = output if unadded is None else output + unadded
    grads = torch.autograd.grad(output, leaves, gradient)
    if stacked:
        return [output.detach(), *grads]
    return [output.detach(), *grads[:4], torch.stack(grads[4:20]), torch.stack(grads[20:])]


NAMES = ("output", "hidden", "router", "shared fc1", "shared fc2", "first", "second")


def test_initial_values_are_transformer_engines_bit_for_bit(pair: tuple[Any, Any]) -> None:
    from megacpp_mcore.layer_specs.experts import expert_matrices

    ours, stocks = pair
    stacked = torch.equal(ours.experts.weight1, torch.stack(list(expert_matrices(stocks.experts)[0])))
    assert stacked
    assert torch.equal(ours.experts.weight2, torch.stack(list(expert_matrices(stocks.experts)[1])))
    assert torch.equal(ours.router.weight, stocks.router.weight)


def test_parity_with_stocks(pair: tuple[Any, Any]) -> None:
    """Routing to the last bit; all else as far apart as two roundings to bfloat16 are."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker

    hidden, gradient = draw()
    tensors, logged, counted = [], [], []
    for layer in pair:
        destroy_moe_metrics_tracker()
        layer.router.local_tokens_per_expert.zero_()
        tensors.append(outcome(layer, hidden, gradient))
        logged.append({name: entry.values.clone() for name, entry in get_moe_metrics_tracker()._metrics.items()})
        counted.append(layer.router.local_tokens_per_expert.clone())
    with torch.no_grad():
        (probs, routing), (other_probs, other_routing) = (layer.router(hidden) for layer in pair)
    assert torch.equal(routing, other_routing)
    assert torch.equal(*counted)
    torch.testing.assert_close(probs, other_probs, rtol=1e-6, atol=1e-8)
    assert logged[0].keys() == logged[1].keys() == {"z_loss", "seq_load_balancing_loss"}
    for name, values in logged[1].items():
        torch.testing.assert_close(logged[0][name], values, rtol=1e-5, atol=0, msg=name)
    apart = {
        name: float((our_tensor.double() - stock_tensor.double()).norm() / stock_tensor.double().norm())
        for name, our_tensor, stock_tensor in zip(NAMES, *tensors, strict=True)
    }
    print(apart)
    assert max(apart.values()) < 1e-2


def test_nothing_waits_and_a_graph_replays(pair: tuple[Any, Any]) -> None:
    ours, _ = pair
    hidden, gradient = draw()
    assert_replays(lambda: outcome(ours, hidden, gradient), (hidden, gradient), draw(8))


@pytest.mark.parametrize(("ranks", "by", "most"), [(1, "alltoall", 0), (2, "allgather", 0), (2, "alltoall", 1)])
def test_the_host_waits_at_most_once_where_experts_are_divided(ranks: int, by: str, most: int) -> None:
    """For how many rows go to each rank, unless the tokens of all are gathered."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs are needed, and {torch.cuda.device_count()} seen")
    command = [*runs.PYTHON, "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), "-m", "tests.gpu.expert_waits", by],
        cwd=runs.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    counts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(counts) == ranks
    for count in counts:
        assert count["read"]
        assert len(count["layer"]) <= most, count["layer"]


def test_memory_is_not_above_stocks(pair: tuple[Any, Any]) -> None:
    hidden, gradient = draw()
    for layer in pair:
        outcome(layer, hidden, gradient)  # what libraries keep from a process's first call does not count
    ours, stocks = (peak(lambda layer=layer: outcome(layer, hidden, gradient)) for layer in pair)
    print(f"ours {ours / 2**20:.0f} MiB, stock's {stocks / 2**20:.0f} MiB")
    assert ours <= stocks


@pytest.mark.parametrize("case", [*CASES, Case(8192, 2, 16, 4)])
def test_the_routers_kernels(case: Case) -> None:
    compared(fused.route, case, torch.device("cuda"))


STEPS, SAVED = 10, 5


def train(folder: Path, experts: str, *extra: str) -> list[float]:
    """Losses of nam56r_tiny through the stock loop, with the distributed optimizer."""
    folder.mkdir()
    record, file = folder / "steps", folder / "megacpp.yaml"
    model = preset("nam56r_tiny")
    file.write_text(yaml.safe_dump({"model": model.name, "backends": {"experts": experts}}))
    checkpoint = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable", "--ckpt-format", "torch_dist")
    words = words_of(model, *checkpoint, *extra, micro_batch_size=4, global_batch_size=8, train_iters=STEPS, learning_rate=1e-3)
    runs.train(words, record, **{plugin_config.VARIABLE: str(file)})
    return [step.losses["lm loss"] for step in read_steps(record)]


def test_a_run_goes_on_with_transformer_engines_experts(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    ours = train(tmp_path / "ours", "megacpp_mcore", "--save", saved, "--save-interval", str(SAVED))
    continued = train(tmp_path / "theirs", STOCK, "--load", saved, "--ckpt-step", str(SAVED))
    assert len(continued) == STEPS - SAVED
    assert continued[0] == pytest.approx(ours[SAVED], rel=1e-4)
    assert continued == pytest.approx(ours[SAVED:], rel=5e-3)
