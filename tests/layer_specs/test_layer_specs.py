"""The layers of the four families as stock Megatron builds them: what they compute, what they leak, what trains them.

Shape legend: S sequence, B batch, D hidden, H heads, P head dim, V value dim, N selected keys.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.gpt import GPTModelBuilder

from megacpp_mcore import nam56r_quarter, patches, settings
from megacpp_mcore.arguments.chunks import model_chunks
from megacpp_mcore.backends import Dispatcher, own_candidates, probes
from megacpp_mcore.errors import ArgumentMismatchError, ModelError
from megacpp_mcore.layer_specs import nam56r
from megacpp_mcore.layer_specs.nam56r import check_layout
from megacpp_mcore.layer_specs.parts import DuplicatedLinear, TorchNorm, backend_needs, parts_for
from megacpp_mcore.model import Model, preset, with_overrides
from megacpp_mcore.ops.m2rnn import reference
from megacpp_mcore.ops.mamba3.reference import mamba3
from megacpp_mcore.ops.mla_projection.reference import indexer_inputs, latents
from tests import stock
from tests.distributed.comparing import assert_same_bytes, differing_tensors
from tests.errors import raises
from tests.lanes import exhaustive_but
from tests.layer_specs.test_distillation import watch_op
from tests.micro_batch import backward, causal_mask, draw_tokens, gradients, losses_of

S, B, D = 32, 2, 128
OVERRIDES = {"seq_length": S, "dsa": {"topk": 8}, "mtp": {"depth": 2}}
WIDE = {**OVERRIDES, "vocab_size": 512}
MASK = causal_mask(S)
FAMILIES = {"A": 1, "F": 5, "S": 9, "M": 3, "R": 12, "E": 2}
"""A layer of each family of nam56r_tiny, by its number."""


@pytest.fixture(scope="module")
def definition() -> Model:
    return with_overrides(preset("nam56r_tiny"), OVERRIDES)


@pytest.fixture(scope="module")
def built(process: Path) -> Any:
    return stock.build(WIDE, preset("nam56r_tiny"), process)


@pytest.fixture(scope="module")
def make(process: Path) -> Callable[..., Any]:
    """Builds equal models with every weight away from its initial value (ones, zeros, identities hide mistakes)."""

    def build(*words: str, mtp_depth: int = 2) -> Any:
        overrides = {**OVERRIDES, "mtp": {"depth": mtp_depth}}
        return stock.stirred(stock.build(overrides, preset("nam56r_tiny"), process, *words))

    return build


@pytest.fixture(scope="module")
def still(make: Callable[[], Any]) -> Any:
    """For tests that change nothing in it."""
    return make()


@pytest.fixture
def model(make: Callable[[], Any]) -> Any:
    """For tests that do."""
    return make()


@pytest.fixture
def tokens() -> torch.Tensor:
    return draw_tokens(B, S)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(model: Any, number: int) -> Any:
    return model.decoder.layers[number - 1]


def run(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Losses ``[B, S]`` of one micro-batch."""
    return losses_of(model, tokens, attention_mask=MASK)


def close(actual: torch.Tensor, truth: torch.Tensor, tolerance: float = 3e-6) -> None:
    """RMS ratio of the worst row, as the parity tests have it."""
    error = (actual.double() - truth.double()).square().mean(-1).sqrt()
    scale = truth.double().square().mean(-1).sqrt().clamp_min(1e-3 * truth.double().square().mean().sqrt())
    assert float((error / scale).max()) < tolerance


def rms_norm(x: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def weights_by_part(mixer: Any) -> dict[str, torch.Tensor]:
    """The rows of a mixer's input projection by what they mean, in float64."""
    projection = mixer.in_proj
    rows = projection.weight.detach().double()
    return {slot.part.name: rows[slot.start : slot.start + slot.rows] for slot in projection.slots}


def test_mamba3_mixer_is_its_op_between_two_projections(still: Any, definition: Model) -> None:
    """Which rows and parameters the op gets; that it is the formula: tests/ops/test_mamba3.py."""
    mixer, ssm, heads = layer(still, FAMILIES["M"]).self_attention, definition.mamba3, definition.mamba_heads
    p = {name: parameter.detach().double() for name, parameter in mixer.named_parameters()}
    x_SBD = random(S, B, D)
    rows = {name: x_SBD.double() @ weight.T for name, weight in weights_by_part(mixer).items()}
    rows |= {name: rows[name].unflatten(-1, (heads, ssm.head_dim)) for name in "xz"}
    rows |= {name: rows[name].unflatten(-1, (ssm.groups, ssm.mimo_rank, ssm.state)) for name in "BC"}
    weights = {name: p[name] for name in ("dt_bias", "D", "b_norm_weight", "c_norm_weight", "out_norm_weight")}
    by_head_and_rank = ("b_bias", "c_bias", "mimo_x", "mimo_z", "mimo_o")
    weights |= {name: p[name].view(heads, ssm.mimo_rank, -1) for name in by_head_and_rank}
    parts = (rows[name] for name in ("x", "z", "B", "C", "dt", "A", "trap", "angles"))
    out, _ = mamba3(*parts, **weights, chunk_size=S, A_floor=ssm.a_floor, eps=definition.norm_eps)
    actual, bias = mixer(x_SBD)
    assert bias is None
    close(actual, out.flatten(2) @ p["out_proj.weight"].T)


def test_m2rnn_sums_over_ranks_only_where_there_are_several(model: Any) -> None:
    """Kernels compute the norm by themselves unless they are given a sum."""
    mixer = layer(model, FAMILIES["R"]).self_attention
    calls = watch_op(mixer, "backend")
    for ranks in (1, 2):
        mixer.tp_size = ranks
        mixer(random(S, B, D))
    assert [options["reduce"] is None for _, options in calls] == [True, False]


def test_m2rnn_mixer_is_its_reference_composed_by_hand(still: Any, definition: Model) -> None:
    mixer, rnn, heads = layer(still, FAMILIES["R"]).self_attention, definition.m2rnn, definition.recurrent_heads
    p = {name: parameter.detach().double() for name, parameter in mixer.named_parameters()}
    x_SBD = random(S, B, D)
    x_BSD = x_SBD.double().transpose(0, 1)
    projected = {name: x_BSD @ rows.T for name, rows in weights_by_part(mixer).items()}
    gate, forget = projected["g"], projected["f"]

    def convolved(channels: torch.Tensor, name: str) -> torch.Tensor:
        result = p[f"{name}_conv_bias"].expand_as(channels).clone()
        for back in range(rnn.conv_kernel):  # the last tap is the present token's
            shifted = torch.cat([torch.zeros_like(channels[:, :back]), channels[:, : S - back]], 1)
            result += shifted * p[f"{name}_conv_weight"][:, rnn.conv_kernel - 1 - back]
        return result * torch.sigmoid(result)

    qk, v = convolved(torch.cat((projected["q"], projected["k"]), -1), "qk"), convolved(projected["v"], "v")
    f = torch.exp(-torch.exp(p["A_log"]) * torch.nn.functional.softplus(forget + p["dt_bias"]))
    v_BSHV = v.unflatten(-1, (heads, rnn.value_dim))
    q, k = qk[..., : rnn.key_dim], qk[..., rnn.key_dim :]
    W = p["W"].view(heads, rnn.value_dim, rnn.value_dim)
    y, _ = reference.m2rnn_sequential(q.unsqueeze(2), k.unsqueeze(2), v_BSHV, W, f)
    gated = (y + p["D"].view(v_BSHV.shape[-2:]) * v_BSHV).flatten(2) * gate * torch.sigmoid(gate)
    actual, _ = mixer(x_SBD)
    close(actual.transpose(0, 1), rms_norm(gated, p["norm_weight"]) @ p["out_proj.weight"].T)


def test_full_mla_is_the_formula(still: Any, definition: Model) -> None:
    """Against DeepSeek-V2's equations written out, with plain interleaved rope of base 500,000."""
    attention, mla, heads = layer(still, FAMILIES["A"]).self_attention, definition.mla, definition.heads
    p = {name: parameter.detach().double() for name, parameter in attention.named_parameters()}
    x_SBD = random(S, B, D)
    x = x_SBD.double()

    def rope(t_SBHR: torch.Tensor) -> torch.Tensor:
        half = mla.qk_pos_emb_head_dim // 2
        turns = torch.arange(S).double()[:, None] * definition.rope_theta ** (-torch.arange(half).double() / half)
        pairs = torch.view_as_complex(t_SBHR.unflatten(-1, (half, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)[:, None, None]).flatten(-2)

    q = rms_norm(x @ p["linear_q_down_proj.weight"].T, p["q_layernorm.weight"]) @ p["linear_q_up_proj.weight"].T
    q = q.unflatten(-1, (heads, -1))
    down = x @ p["linear_kv_down_proj.weight"].T
    latent, k_rope = down.split([mla.kv_lora_rank, mla.qk_pos_emb_head_dim], -1)
    kv = (rms_norm(latent, p["kv_layernorm.weight"]) @ p["linear_kv_up_proj.weight"].T).unflatten(-1, (heads, -1))
    k, v = kv.split([mla.qk_head_dim, mla.v_head_dim], -1)
    scores = torch.einsum("sbhk,tbhk->bhst", q[..., : mla.qk_head_dim], k)
    scores = scores + torch.einsum("sbhr,tbhr->bhst", rope(q[..., mla.qk_head_dim :]), rope(k_rope.unsqueeze(2)))
    scores = scores / math.sqrt(mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    weights = scores.masked_fill(MASK, -torch.inf).softmax(-1)
    truth = torch.einsum("bhst,tbhv->sbhv", weights, v).flatten(2) @ p["linear_proj.weight"].T
    actual, _ = attention(x_SBD, MASK)
    close(actual, truth)


def test_sparse_mla_with_every_key_is_full_mla(process: Path) -> None:
    both = stock.build({**OVERRIDES, "dsa": {"topk": S, "schedule": "-F"}}, preset("nam56r_tiny"), process)
    full, sparse = layer(both, FAMILIES["A"]).self_attention, layer(both, FAMILIES["F"]).self_attention
    weights = {name: value for name, value in sparse.state_dict().items() if "core_attention" not in name}
    full.load_state_dict(weights, strict=False)
    x_SBD = random(S, B, D)
    close(sparse(x_SBD, MASK)[0], full(x_SBD, MASK)[0])
    sparse.core_attention.indexer.index_topk = 4
    fewer, _ = sparse(x_SBD, MASK)
    assert not torch.allclose(fewer[8:], full(x_SBD, MASK)[0][8:], rtol=1e-2)
    close(fewer[:4], full(x_SBD, MASK)[0][:4])


def test_ops_in_place_of_projections_and_norms_do_what_these_do(model: Any, tokens: torch.Tensor) -> None:
    run(model, tokens).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    replaced = []
    for name, module in model.named_modules():
        for holder, op, called in (
            ("latents_backend", latents, ("linear_q_down_proj", "linear_kv_down_proj", "q_layernorm", "kv_layernorm")),
            ("inputs_backend", indexer_inputs, ("linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj")),
        ):
            if getattr(module, holder, None) is not None:
                setattr(module, holder, dataclasses.replace(getattr(module, holder), observed="another", fn=op))
                for method in called:
                    getattr(module, method).register_forward_pre_hook(
                        lambda *_, method=method: pytest.fail(f"{method} was called")
                    )
                replaced.append(name.rpartition(".")[2])
    assert set(replaced) == {"self_attention", "indexer"}
    run(model, tokens).sum().backward()
    grads = gradients(model)
    assert grads.keys() == expected.keys()
    for name, gradient in grads.items():
        close(gradient.flatten(), expected[name].flatten(), 1e-5)


def test_expert_layer_is_the_weighted_sum_of_its_experts(still: Any, definition: Model) -> None:
    moe = layer(still, FAMILIES["E"]).mlp
    x_SBD = random(S, B, D)
    actual, _ = moe(x_SBD)
    x = x_SBD.double().flatten(0, 1)

    def ffn(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ first.detach().double().T) @ second.detach().double().T

    scores = torch.sigmoid(x @ moe.router.weight.detach().double().T)
    top = (scores + moe.router.expert_bias.double()).topk(definition.moe.topk, dim=-1).indices
    chosen = torch.zeros_like(scores).scatter(-1, top, scores.gather(-1, top))
    weights = chosen / chosen.sum(-1, keepdim=True)
    truth = ffn(moe.shared_experts.linear_fc1.weight, moe.shared_experts.linear_fc2.weight)
    for index, (first, second) in enumerate(zip(moe.experts.weight1, moe.experts.weight2, strict=True)):
        truth = truth + weights[:, index : index + 1] * ffn(first, second)
    close(actual.flatten(0, 1), truth, 1e-5)


def run_block(model: Any, kind: str, x_SBD: torch.Tensor) -> Any:
    """A layer of this kind by itself; the indices of a Shared one come from the Full layer on the same input, once a reader."""
    if kind == "S":
        layer(model, FAMILIES["F"])(hidden_states=x_SBD, attention_mask=MASK)
    return layer(model, FAMILIES[kind])(hidden_states=x_SBD, attention_mask=MASK)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("changed", [1, 17, S - 1])
def test_no_layer_sees_the_future(still: Any, kind: str, changed: int) -> None:
    x_SBD = random(S, B, D)
    other_SBD = x_SBD.clone()
    other_SBD[changed] = random(B, D, seed=1)
    before, after = (run_block(still, kind, states_SBD)[0].detach() for states_SBD in (x_SBD, other_SBD))
    if kind == "E":  # another number of rows an expert may round otherwise
        close(after[:changed], before[:changed])
    else:
        assert torch.equal(before[:changed], after[:changed])
    assert not torch.equal(before[changed], after[changed])
    sees_the_past = not torch.allclose(before[changed + 1 :], after[changed + 1 :], rtol=1e-4)
    assert sees_the_past is (kind != "E" and changed < S - 1)


def recorded(model: Any) -> Callable[[], dict[str, list[torch.Tensor]]]:
    """Asked later, the index tensors that the sparse layers have attended to from now on, by kind."""
    calls = {kind: watch_op(layer(model, FAMILIES[kind]).self_attention.core_attention, "backend") for kind in "FS"}
    return lambda: {kind: [index for (_, _, index), _ in kind_calls] for kind, kind_calls in calls.items()}


def test_a_shared_layer_attends_to_exactly_the_indices_of_its_full_layer(model: Any, tokens: torch.Tensor) -> None:
    attended = recorded(model)
    run(model, tokens)
    run(model, tokens.flip(0))
    full, shared = attended().values()
    assert len(full) == len(shared) == 2
    assert all(index is shared_index for index, shared_index in zip(full, shared, strict=True))
    assert not torch.equal(full[0], full[1])
    assert full[0].shape == (B, S, 8)
    rows = torch.arange(S)[None, :, None]
    assert bool((full[0] <= rows).all())
    assert bool(((full[0] >= 0).sum(-1) == (rows[..., 0] + 1).clamp(max=8)).all())


def test_a_shared_layer_without_its_full_layer_raises(model: Any, tokens: torch.Tensor) -> None:
    x_SBD, shared = random(S, B, D), layer(model, FAMILIES["S"])
    with raises(ModelError, "layer 9", "layer 5", code="not-published"):
        shared(hidden_states=x_SBD, attention_mask=MASK)
    run(model, tokens)
    with raises(ModelError, "layer 9", "layer 5", code="not-published"):
        shared(hidden_states=x_SBD, attention_mask=MASK)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_layer_adds_what_its_mixer_makes_of_the_normed_input(still: Any, kind: str) -> None:
    block = layer(still, FAMILIES[kind])
    x_SBD = random(S, B, D)
    with torch.no_grad():
        actual, context = run_block(still, kind, x_SBD)
        if kind == "S":
            layer(still, FAMILIES["F"])(x_SBD, attention_mask=MASK)
        if kind == "E":
            mixed, _ = block.mlp(rms_norm(x_SBD, block.pre_mlp_layernorm.weight))
        else:
            mixed, _ = block.self_attention(rms_norm(x_SBD, block.input_layernorm.weight), attention_mask=MASK)
    assert context is None
    close(actual, x_SBD + mixed)


def trained(model: Any, tokens: torch.Tensor, coefficient: float) -> dict[str, torch.Tensor]:
    model.config.dsa_indexer_loss_coeff = coefficient
    run(model, tokens).mean().backward()
    return gradients(model)


def test_only_its_own_loss_trains_the_indexer_and_nothing_else(make: Callable[[], Any], tokens: torch.Tensor) -> None:
    """How it trains the indexer: test_distillation.py."""
    without, with_loss = (trained(make(), tokens, coefficient) for coefficient in (0.0, 1e-3))
    indexer = with_loss.keys() - without.keys()
    assert len(indexer) == 5
    assert all(".indexer." in name and with_loss[name].any() for name in indexer)
    assert_same_bytes(without, {name: with_loss[name] for name in without})


def test_without_training_there_is_no_indexer_loss(model: Any, tokens: torch.Tensor) -> None:
    DSAIndexerLossLoggingHelper.clean_loss_in_tracker()
    with torch.no_grad():
        run(model, tokens)
    run(model.eval(), tokens).mean().backward()
    assert torch.count_nonzero(DSAIndexerLossLoggingHelper.tracker["values"]) == 0


RECOMPUTE = {
    **{name: stock.selective_recompute(name) for name in ("mla_up_proj", "moe", "shared_experts", "core_attn")},
    "every layer": stock.full_recompute("uniform", 1),
    "Full and Shared in two checkpoints": stock.full_recompute("uniform", 6),
    "Full and Shared in one checkpoint": stock.full_recompute("uniform", 12),
    "all layers up to the Full one": stock.full_recompute("block", 5),
    "all layers up to the Shared one": stock.full_recompute("block", 9),
}
ATTENDED_TWICE = dict.fromkeys(RECOMPUTE, "FS") | dict.fromkeys(("mla_up_proj", "moe", "shared_experts"), "")
ATTENDED_TWICE["all layers up to the Full one"] = "F"
"""The sparse layers whose core attention runs again in the backward pass."""


@dataclasses.dataclass(frozen=True)
class InFlight:
    """What two micro-batches left: losses, the indices each kind of layer attended to, gradients, the logged indexer loss."""

    losses: list[torch.Tensor]
    attended: dict[str, list[torch.Tensor]]
    gradients: dict[str, torch.Tensor]
    logged: torch.Tensor


def in_flight(model: Any, tokens: torch.Tensor) -> InFlight:
    """Forward, forward, backward, backward, as a pipeline's first stage does."""
    DSAIndexerLossLoggingHelper.track_indexer_metrics(1.0, 0, None)  # empties the tracker of what other tests left
    attended = recorded(model)
    losses = [run(model, batch) for batch in (tokens, tokens.flip(1))]
    for loss in losses:
        backward(loss.mean())
    logged: dict[str, torch.Tensor] = {}
    DSAIndexerLossLoggingHelper.track_indexer_metrics(1 / len(losses), 1, None, None, logged)
    return InFlight([loss.detach() for loss in losses], attended(), gradients(model), logged["indexer loss"])


@pytest.fixture(scope="module")
def kept(make: Callable[..., Any]) -> Callable[[int], InFlight]:
    """Makes two micro-batches in flight without recompute, for an MTP depth, once."""
    return functools.cache(lambda mtp_depth: in_flight(make(mtp_depth=mtp_depth), draw_tokens(B, S)))


@pytest.mark.parametrize("name", exhaustive_but(RECOMPUTE, "core_attn", "every layer", "all layers up to the Full one"))
def test_recompute_changes_nothing(make: Callable[..., Any], kept: Callable[[int], InFlight], name: str) -> None:
    """Bit for bit, nor what Shared layers attend to; layers run again. Without MTP, which upstream recomputes by layer."""
    model, expected = make(*RECOMPUTE[name], mtp_depth=0), kept(0)
    assert model.config.recompute_granularity == RECOMPUTE[name][1]
    actual = in_flight(model, draw_tokens(B, S))
    assert same(actual.losses, expected.losses)
    for kind in "FS":
        assert same(actual.attended[kind], (1 + (kind in ATTENDED_TWICE[name])) * expected.attended[kind])
    assert len({id(index) for index in actual.attended["S"]}) == 2  # the very indices of the first run
    assert torch.equal(actual.logged, expected.logged)
    assert actual.gradients.keys() == dict(model.named_parameters()).keys()
    assert_same_bytes(expected.gradients, actual.gradients)


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mla_up_proj", "core_attn", "every layer"])
def test_recompute_of_a_block_that_mtp_runs_twice(make: Callable[..., Any], kept: Callable[[int], InFlight], name: str) -> None:
    """The gradients of the two depths are then added up in another order; by default: tests/e2e/test_hybrid_model.py."""
    actual, expected = in_flight(make(*RECOMPUTE[name]), draw_tokens(B, S)), kept(2)
    assert same(actual.losses, expected.losses)
    assert differing_tensors(expected.gradients, actual.gradients, 2e-6) == []


@pytest.mark.parametrize("name", exhaustive_but(["core_attn", "every layer"], "core_attn"))
def test_recompute_without_the_patch_raises(make: Callable[..., Any], tokens: torch.Tensor, name: str) -> None:
    """Without it there is no gradient, rather than a wrong one."""
    model = make(*RECOMPUTE[name], mtp_depth=0)
    patches.revert(["dsa-index-cache"])
    with raises(ModelError, "layer 9", "layer 5", "dsa-index-cache", code="not-published"):
        in_flight(model, tokens)


def test_a_build_applies_patches_keeps_backward_passes_in_the_callers_thread_and_claims_the_save_folder(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    patches.revert()
    with torch.autograd.set_multithreading_enabled(True), mock.patch.object(nam56r, "claim_save_folder") as claimed:
        model = make()
        assert not torch._C._is_multithreading_enabled()
    assert claimed.call_count == 1
    assert {record["name"] for record in patches.status() if record["state"] == "applied"} == set(patches.OF_NAM56R)
    patches.verify()
    assert model.config.experimental_attention_variant is None  # nothing is asked of stock's DSA
    assert (model.config.dsa_indexer_topk_freq or 1) == 1
    flags = {"save": str(tmp_path), "load": None, "ckpt_step": 3, "finetune": False}
    with mock.patch.object(nam56r.checkpoint_folder, "claim") as claim:
        for skipped in (True, False):
            arguments = SimpleNamespace(**flags, skip_train=skipped, distributed_timeout_minutes=4)
            with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", arguments):
                nam56r.claim_save_folder(None)
    assert claim.mock_calls == [mock.call(str(tmp_path), None, 3, finetune=False, timeout_minutes=4)]


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [
        ("cuda", "", {"linear-cross-entropy", "adam-in-one-pass"}),
        ("cuda", "linear_cross_entropy: false", {"adam-in-one-pass"}),
        ("cuda", "adam_in_one_pass: false", {"linear-cross-entropy"}),
        ("cpu", "adam_in_one_pass: true", set()),
    ],
)
def test_patches_for_speed_are_applied_on_gpus_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, asked: str, expected: set[str]
) -> None:
    file = tmp_path / "megacpp.yaml"
    file.write_text(f"model: nam56r_tiny\nspeed_defaults: {{{asked}}}\n")
    monkeypatch.setattr(nam56r, "compute_device", lambda: device)
    patches.revert()
    nam56r.apply_patches(settings.load(file))
    applied = {record["name"] for record in patches.status() if record["state"] == "applied"}
    assert applied - set(patches.OF_NAM56R) == expected
    patches.revert()


FP32 = {"M": {"dt_bias", "D", "b_bias", "c_bias", "mimo_x", "mimo_z", "mimo_o"}, "R": {"W", "A_log", "dt_bias", "D"}}


def test_fp32_parameters_keep_dtype_and_bits_under_a_cast(model: Any) -> None:
    mixers = {kind: layer(model, FAMILIES[kind]).self_attention for kind in FP32}
    for kind, mixer in mixers.items():
        before = {name: (parameter, parameter.detach().clone()) for name, parameter in mixer.named_parameters()}
        for cast in (torch.nn.Module.bfloat16, torch.nn.Module.half, lambda module: module.to(torch.bfloat16)):
            cast(mixer)
            after = dict(mixer.named_parameters())
            assert list(after) == list(before)  # optimizers and buckets go by the order
            assert {name for name, parameter in after.items() if parameter.dtype == torch.float32} == FP32[kind]
            for name in FP32[kind]:
                assert after[name] is before[name][0]
                assert torch.equal(after[name], before[name][1])
                assert not torch.equal(after[name], after[name].bfloat16().float())


def test_a_bf16_run_keeps_them_in_fp32_and_draws_the_same_values(process: Path, built: Any, tokens: torch.Tensor) -> None:
    """Those of other parameters before they are rounded, too."""
    low = stock.build(WIDE, preset("nam56r_tiny"), process, precision="bf16")
    wrapped = Float16Module(low.config, low)
    for kind, names in FP32.items():
        parameters = layer(wrapped.module, FAMILIES[kind]).self_attention.named_parameters()
        assert {name for name, parameter in parameters if parameter.dtype == torch.float32} == names
    drawn = dict(built.named_parameters())
    assert_same_bytes(
        {name: drawn[name].detach().to(parameter.dtype) for name, parameter in low.named_parameters()},
        {name: parameter.detach() for name, parameter in low.named_parameters()},
    )
    losses = run(wrapped, tokens)
    truth = run(built, tokens)
    # A token that another expert or another key goes to is off by more than bf16 rounds; few are.
    assert (losses - truth).square().mean().sqrt() < 5e-3 * truth.square().mean().sqrt()
    losses.mean().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in wrapped.parameters())


def test_initial_values(built: Any) -> None:
    mamba, recurrent = (layer(built, FAMILIES[kind]).self_attention for kind in "MR")
    for mixer in (mamba, recurrent):
        step = torch.nn.functional.softplus(mixer.dt_bias)
        assert bool(((step > 0.99e-3) & (step < 0.101)).all())
        assert bool((mixer.D == 1).all())
    assert bool((mamba.b_bias == 1).all())
    assert bool((mamba.mimo_x == 0.5).all())
    assert torch.equal(recurrent.W.view(4, 8, 8), torch.eye(8).expand(4, 8, 8))
    assert bool(((recurrent.A_log >= 0) & (recurrent.A_log <= math.log(16))).all())
    weights = layer(built, FAMILIES["E"]).mlp.experts.weight1
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


NOT_DRAWN_BY_FAN_IN = ("norm", "bias", "conv", "word_embeddings", "A_log", ".D", ".W", "mimo_")


def test_every_matrix_is_drawn_by_fan_in(built: Any) -> None:
    """1 / √(columns), with 1 / √(2 · depth) on what a layer writes on the residual, a half on the head, 1 on the embedding."""
    (mtp,) = [weight for name, weight in built.named_parameters() if re.match(r"mtp\..*mlp\.linear_fc1\.weight", name)]
    assert mtp.shape == built.output_layer.weight.shape
    seen = set()
    for name, weight in built.named_parameters():
        if any(part in name for part in NOT_DRAWN_BY_FAN_IN):
            continue
        writes = ("linear_proj", "out_proj", "linear_fc2", "experts.weight2")
        seen |= {part for part in (*writes, "in_proj", "router", "output_layer", "eh_proj", "linear_wq_b") if part in name}
        gain = 1 / math.sqrt(2 * 12) if any(part in name for part in writes) else 0.5 if "output_layer" in name else 1.0
        drawn = weight[weight.any(-1)]  # not the rows that fill up
        expected = gain / math.sqrt(weight.shape[-1])
        assert abs(float(drawn.std()) / expected - 1) < 6 / math.sqrt(2 * drawn.numel()), name
    assert len(seen) == 9
    assert abs(float(built.embedding.word_embeddings.weight.std()) - 1) < 0.05


PAGE = Path(__file__).parents[2] / "docs" / "model.md"


def test_weight_decay_is_as_the_page_says(built: Any) -> None:
    """Every parameter of M and R, by stock's own grouping."""
    config = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, weight_decay=0.1)
    groups = _get_param_groups([built], config, get_standard_config_overrides(config))
    decayed = {id(parameter) for group in groups if group["wd_mult"] > 0 for parameter in group["params"]}
    rows = re.findall(r"^\| ([MR]) \| (`.+`) \| (yes|no) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    for kind in "MR":
        documented = {
            name: decays == "yes"
            for letter, names, decays in rows
            if letter == kind
            for name in re.findall(r"`([\w.]+)`", names)
        }
        del documented["in_proj.replicated_weight"]  # in a process of its own all parts are in one weight
        mixer = layer(built, FAMILIES[kind]).self_attention
        assert {name: id(parameter) in decayed for name, parameter in mixer.named_parameters()} == documented


def test_documents_that_a_mask_alone_cannot_keep_apart_are_refused(process: Path) -> None:
    """Which runs these are: test_documents.py."""
    arguments = SimpleNamespace(
        reset_attention_mask=True, dataloader_inter_document_masking=False, create_attention_mask_in_dataloader=True
    )
    refused = raises(ModelError, "--dataloader-inter-document-masking", code="mtp")
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", arguments), refused:
        stock.build({}, preset("nam56r_tiny"), process)


@pytest.mark.parametrize(
    ("overrides", "changes", "values"),
    [
        ({}, {"fp8": "hybrid"}, ["--fp8-format"]),
        ({}, {"fp4": "e2m1"}, ["--fp4-format"]),
        ({}, {"delay_wgrad_compute": True}, ["--delay-wgrad-compute"]),
        ({}, {"mtp_hsm": True}, ["--mtp-hsm"]),
        ({}, {"enable_mhc_connections": True}, ["--enable-mhc-connections"]),
        ({}, {"cuda_graph_impl": "local"}, ["--cuda-graph-impl", "CPU"]),
        ({}, {"expert_tensor_parallel_size": 2}, ["--expert-tensor-parallel-size"]),
        (
            {},
            {"context_parallel_size": 2, "megacpp_preset": "nam56r_tiny"},
            ["context_parallel_size", "Megatron-Bridge"],
        ),
        ({}, {"context_parallel_size": 3}, ["context parallelism is 3", "4 attention heads", "every layer is 4"]),
        ({}, {"tensor_model_parallel_size": 3}, ["attention heads (4)", "parallelism (3)"]),
        # Latents that local layers cannot cut; Transformer Engine's can.
        ({"mla": {"q_lora_rank": 33}}, {"tensor_model_parallel_size": 2}, ["q_lora_rank (33)", "parallelism (2)"]),
    ],
)
def test_what_no_test_covers_yet_is_refused(
    process: Path, overrides: dict[str, Any], changes: dict[str, Any], values: list[str]
) -> None:
    model = with_overrides(preset("nam56r_tiny"), overrides)
    config = stock.model_config(stock.words(model)).transformer
    chunks = model_chunks(config)
    check_layout(model, config, chunks)
    vars(config).update(changes)
    config.sequence_parallel = config.tensor_model_parallel_size > 1
    with raises(ModelError, "nam56r_tiny", *values):
        check_layout(model, config, chunks)
    if overrides:
        config.transformer_impl = "transformer_engine"
        check_layout(model, config, chunks)


def test_every_op_that_can_be_asked_for_by_name_is_one_that_the_model_runs(process: Path) -> None:
    made: list[Dispatcher] = []
    remembered = mock.Mock(side_effect=lambda *args, **kwargs: made.append(Dispatcher(*args, **kwargs)) or made[-1])
    with mock.patch.object(nam56r, "Dispatcher", remembered):
        stock.build({}, preset("nam56r_tiny"), process)
    (dispatcher,) = made
    ops = {candidate.op for candidate in own_candidates()}
    divided = {"grouped_mlp"}  # of experts to which rows are sent
    assert {entry["op"] for entry in dispatcher.observed_backends()} == ops - divided


def test_unknown_implementations_and_norms_are_refused(config: Any) -> None:
    with raises(ModelError, "'inference_optimized'", "'transformer_engine' or 'local'"):
        parts_for(SimpleNamespace(transformer_impl="inference_optimized"))
    with raises(ModelError, "'L2Norm'", "RMSNorm or LayerNorm"):
        TorchNorm(SimpleNamespace(normalization="L2Norm"), 4)
    with raises(ModelError, "bias=True"):
        DuplicatedLinear(4, 4, config=config, init_method=torch.nn.init.zeros_, bias=True)


def test_without_settings_the_arguments_must_describe_a_preset(process: Path, definition: Model) -> None:
    config = stock.model_config(stock.words(definition))
    with raises(ArgumentMismatchError, "nam56r_tiny", "3 places"):
        GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())


@pytest.mark.exhaustive
def test_families_start_alike_at_full_width(process: Path) -> None:
    """One layer of each family of nam56r_quarter on real text: a wide model shows what nam56r_tiny hides."""
    quarter = preset("nam56r_quarter")
    config = stock.model_config(stock.words(quarter))
    specs, groups = nam56r_quarter(config).layer_specs, ProcessGroupCollection.use_mpu_process_groups()
    stock.restart_random(1234)
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()[:192]), dtype=torch.uint8).long()
    table = torch.empty(256, quarter.hidden_size)
    config.transformer.embedding_init_method(table)
    hidden, branches = table[text].unsqueeze(1), {}
    with torch.no_grad():
        for number in (1, 2, 3, 12):
            layer = build_module(specs[number - 1], config=config.transformer, layer_number=number, pg_collection=groups)
            out = layer(hidden_states=hidden, attention_mask=None)[0]
            letter = quarter.layers[number - 1]
            branches[letter] = rms(out - hidden)
            assert branches[letter] < 2 * rms(hidden), f"{letter} drowns what comes before it"
            hidden = out
    assert set(branches) == set("AMER")
    assert max(branches.values()) < 10 * min(branches.values()), branches


def rms(values: torch.Tensor) -> float:
    return float(values.detach().square().mean().sqrt())


@pytest.mark.parametrize(
    ("field", "setting", "value"),
    [
        ("quant_recipe", object(), "--te-precision-config-file"),
        ("moe_permute_fusion", True, "--moe-permute-fusion"),
        ("moe_router_fusion", True, "--moe-router-fusion"),
        ("tp_comm_overlap", True, "--tp-comm-overlap"),
        ("cpu_offloading", True, "--cpu-offloading-num-layers"),
        ("use_transformer_engine_op_fuser", True, "--use-transformer-engine-op-fuser"),
    ],
)
def test_what_stock_has_in_transformer_engine_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, setting: Any, value: str
) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, transformer_impl="transformer_engine")
    monkeypatch.setenv(probes.DISABLE_TE, "1")
    assert parts_for(config).norm is TorchNorm
    assert config.transformer_impl == "transformer_engine"
    setattr(config, field, setting)
    with raises(ModelError, value, "MEGACPP_DISABLE_TE=1"):
        parts_for(config)
    config.transformer_impl = "local"
    monkeypatch.delenv(probes.DISABLE_TE)
    assert parts_for(config).norm is TorchNorm


@pytest.mark.parametrize(
    ("reset", "packs", "packed"), [(False, False, False), (True, False, True), (False, True, True), (None, None, None)]
)
def test_rows_are_packed_where_the_arguments_say_so(reset: bool | None, packs: bool | None, packed: bool | None) -> None:
    """Whatever mask Megatron makes; without arguments nothing is known."""
    arguments = SimpleNamespace(
        reset_attention_mask=reset, dataloader_inter_document_masking=packs, create_attention_mask_in_dataloader=True
    )
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", None if reset is None else arguments):
        needs = backend_needs(SimpleNamespace(params_dtype=torch.bfloat16, deterministic_mode=False, cuda_graph_impl="none"))
    assert needs["packed"] is packed
