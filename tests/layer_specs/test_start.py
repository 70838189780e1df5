"""The first step's branches and gradients: what hooks sum, what ranks add up to, what a report says; how a model starts."""

from __future__ import annotations

import argparse
import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore.errors import DataError
from megacpp_mcore.model import preset
from megacpp_mcore.observe import start
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.events import Log, Step
from tests import stock
from tests.observe.recorded import at, write_start
from tests.stock import cpu_words

S, B = 32, 2
OVERRIDES = {"seq_length": S, "dsa": {"topk": 8}}
TINY = preset("nam56r_tiny")


@pytest.fixture(scope="module")
def model(process: Path) -> Any:
    built = stock.build(OVERRIDES, TINY, process).train()
    stock.loss_scale(1.0)
    return built


def losses(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, 256, (B, S + 1), generator=torch.Generator().manual_seed(3))
    positions, mask = torch.arange(S).expand(B, S), torch.ones(B, 1, S, S).triu(1).bool()
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:], loss_mask=torch.ones(B, S))


def step(number: int, grad_norm: float | None = None) -> Step:
    return Step(number, 0, 0.0, 0, {}, grad_norm, None, False)


def hooks(model: Any) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


def test_what_a_layer_adds_and_its_gradient_are_those_of_its_tensors(model: Any, tmp_path: Path) -> None:
    """Against outputs minus inputs and the parameters' own gradients; the losses stay what they are, and no hook stays."""
    before, plain = hooks(model), losses(model)
    listener = start.FirstStep(log_in(tmp_path))
    listener.on_model([model], SimpleNamespace())
    listener.on_step_begin(1)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = [
        layer.register_forward_hook(
            lambda one, _, given, out: seen.update({str(one.layer_number): (given["hidden_states"], out[0])}),
            with_kwargs=True,
        )
        for layer in model.decoder.layers
    ]
    with torch.no_grad():  # a pass whose layers are computed again
        losses(model)
    observed = losses(model)
    observed.mean().backward()
    for handle in handles:
        handle.remove()
    assert torch.equal(observed, plain)
    gradients = {str(layer.layer_number): norm(layer.parameters()) for layer in model.decoder.layers}
    whole = norm(model.parameters())
    listener.on_step(step(1, grad_norm=3 * whole))
    assert hooks(model) == before
    model.zero_grad()

    found = start.read(tmp_path)
    assert "".join(found[str(number)]["family"] for number in range(1, TINY.depth + 1)) == TINY.layers
    for label, (given, out) in seen.items():
        assert found[label]["residual"] == pytest.approx(rms(given), rel=1e-5)
        assert found[label]["branch"] == pytest.approx(rms(out - given), rel=1e-3)
        assert found[label]["gradient"] == pytest.approx(3 * gradients[label], rel=1e-5)
    assert set(found) - set(seen) == {"MTP", "embedding", "final_layernorm", "output_layer"}
    assert math.hypot(*(one["gradient"] for one in found.values())) == pytest.approx(3 * whole)


def rms(values: torch.Tensor) -> float:
    return float(values.detach().square().mean().sqrt())


def norm(parameters: Any) -> float:
    return math.hypot(*(float(one.grad.norm()) for one in parameters if one.grad is not None))


def test_nothing_is_hooked_or_written_beside_the_first_step(model: Any, tmp_path: Path) -> None:
    before = hooks(model)
    listener = start.FirstStep(log_in(tmp_path))
    listener.on_model([model], SimpleNamespace())
    listener.on_step_begin(501)
    assert hooks(model) == before
    listener.on_step(step(501))
    assert start.read(tmp_path) == {}

    ended = start.FirstStep(log_in(tmp_path))
    ended.on_model([model], SimpleNamespace())
    ended.on_step_begin(1)
    assert hooks(model) > before
    ended.on_end(KeyboardInterrupt())
    assert hooks(model) == before


def test_an_error_in_a_hook_waits_for_the_end_of_the_step(model: Any, tmp_path: Path) -> None:
    listener = start.FirstStep(log_in(tmp_path))
    listener._hook("1", "branch")(SimpleNamespace(training=True), (), {}, "no tensor")
    with pytest.raises(AttributeError, match="detach"):
        listener.on_step(step(1))
    assert start.read(tmp_path) == {}


def log_in(run: Path) -> Log:
    return Log(run, 0, 1, Clock(), heartbeat_s=3600)


def leave(run: Path, rank: int, **parts: dict[str, Any]) -> None:
    write_start(run, 1, rank, at(1, first_step={"grad_norm": 10.0, "parts": parts}), world_size=3)


def test_ranks_add_up_and_a_family_is_one_line(tmp_path: Path) -> None:
    """Two pipeline stages, the first of two data-parallel ranks, whose gradient the first one has alone."""
    branch = {"family": "A", "branch": [8, 2], "residual": [4, 4]}
    leave(tmp_path, 0, **{"1": branch | {"gradient": 9}, "embedding": {"family": "embedding", "gradient": 7}})
    leave(tmp_path, 1, **{"1": branch | {"branch": [0, 2]}})
    leave(tmp_path, 2, **{"2": {"family": "A", "branch": [1, 4], "residual": [4, 1], "gradient": 9}})
    found = start.read(tmp_path)
    assert found["1"] == {"family": "A", "branch": math.sqrt(2), "residual": 1, "gradient": pytest.approx(6)}
    assert start.describe(found) == [
        "step 1, A         branch RMS 0.5 to 1.41 on 1 to 2, gradient 6",
        "step 1, embedding gradient 5.29",
    ]


def test_damage_is_named(tmp_path: Path) -> None:
    leave(tmp_path, 0, **{"1": {"branch": [8, 2]}})
    with pytest.raises(DataError, match=r"rank_00000\.jsonl: sums of step 1: parts\[1\] has no family"):
        start.read(tmp_path)


def test_the_head_alone_has_its_factor(process: Path) -> None:
    """Where it has as many rows and columns as another matrix, too: here the first of the MTP block's feed-forward part."""
    built = stock.build({**OVERRIDES, "vocab_size": 512}, TINY, process)
    spread = {
        name: float(weight.std()) * weight.shape[-1] ** 0.5
        for name, weight in built.named_parameters()
        if weight.dim() == 2
    }
    (mtp,) = [name for name in spread if name.startswith("mtp.") and name.endswith("mlp.linear_fc1.weight")]
    assert dict(built.named_parameters())[mtp].shape == built.output_layer.weight.shape
    assert spread["output_layer.weight"] == pytest.approx(0.5, rel=0.05)
    assert spread[mtp] == pytest.approx(1.0, rel=0.05)


def test_families_start_alike_at_full_width(process: Path) -> None:
    """One layer of each family of nam56r_quarter, as the model's definition starts it, on real text.

    A wide model shows what nam56r_tiny hides: there an M layer without a norm before its output projection once added 80
    times the residual, and 1,000 times what others add, and nothing else trained.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module

    from megacpp_mcore.layer_specs.nam56r import nam56r

    quarter = preset("nam56r_quarter")
    config = stock.model_config(cpu_words(quarter))
    specs, groups = nam56r(config).layer_specs, ProcessGroupCollection.use_mpu_process_groups()
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()[:192]), dtype=torch.uint8).long()
    table = torch.empty(256, quarter.hidden_size)
    config.transformer.embedding_init_method(table)
    hidden, branches = table[text].unsqueeze(1), {}
    with torch.no_grad():
        for number in (1, 2, 3, 12):
            layer = build_module(
                specs[number - 1], config=config.transformer, layer_number=number, pg_collection=groups
            )
            out = layer(hidden_states=hidden, attention_mask=None)[0]
            letter = quarter.layers[number - 1]
            branches[letter] = rms(out - hidden)
            assert branches[letter] < 2 * rms(hidden), f"{letter} drowns what comes before it"
            hidden = out
    assert set(branches) == set("AMER")
    assert max(branches.values()) < 10 * min(branches.values()), branches
