"""observe/flops/count.py against torch's own counter: on every reference op, and on a model that stock Megatron built.

torch counts the dense products that an op really runs, not the pairs that its mask lets through, so each comparison says
in exact integers how the two are related. Legend: B batch, S sequence, K query-key width, V value width.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import mamba
from megacpp_mcore.model import Model, flops, preset, with_overrides
from megacpp_mcore.model.flops import Work
from megacpp_mcore.model.flops.recompute import Recomputation, recomputed
from megacpp_mcore.model.flops.utilisation import by_precision
from megacpp_mcore.model.precision import PLANS
from megacpp_mcore.model.training import Recompute
from megacpp_mcore.ops.indexer.reference import causal_topk
from tests import stock
from tests.errors import raises
from tests.micro_batch import causal_mask, draw_tokens, losses_of


def _in_place_baddbmm(self_shape: Any, a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """torch's counter knows ``baddbmm`` but not ``baddbmm_``, in which the M²RNN reference takes its steps."""
    return int(2 * a[0] * a[1] * a[2] * b[2])


def counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: _in_place_baddbmm})


@pytest.mark.parametrize("sequence", [1, 2, 7, 32])
@pytest.mark.parametrize("topk", [1, 3, 7, 40])
def test_pairs_are_those_of_the_mask_and_of_the_selection(sequence: int, topk: int) -> None:
    mask = torch.ones(sequence, sequence, dtype=torch.bool).tril()
    assert flops.causal_pairs(sequence) == int(mask.sum())
    index = causal_topk(torch.randn(1, sequence, sequence), topk)
    assert flops.selected_pairs(sequence, topk) == int((index >= 0).sum())


OVERRIDES = {"seq_length": 32, "dsa": {"topk": 8, "loss_coeff": 0.1}, "mtp": {"depth": 2}}
SMALL = with_overrides(preset("nam56r_tiny"), OVERRIDES)
BATCH = 2


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Counter[str]]]:
    """torch's count of the real model by module and operator: ``forward`` without gradient, and ``training``."""
    folder = tmp_path_factory.mktemp("flops")
    tokens, mask = draw_tokens(BATCH, SMALL.seq_length), causal_mask(SMALL.seq_length)

    def loss() -> torch.Tensor:
        return losses_of(model, tokens, attention_mask=mask).mean()

    counts = {}
    with stock.one_process(folder / "store"):
        model = stock.build(OVERRIDES, preset("nam56r_tiny"), folder).train()
        stock.loss_scale(1.0)
        with torch.no_grad(), counter() as forward:
            loss()
        with counter() as training:
            loss().backward()
    for name, count in (("forward", forward), ("training", training)):
        modules = count.get_flop_counts().items()
        counts[name] = {key: Counter({str(op): n for op, n in ops.items()}) for key, ops in modules}
    return counts


def total(measured: dict[str, dict[str, Counter[str]]], module: str) -> int:
    return measured["forward"].get(module, Counter()).total()


def padding() -> flops.Work:
    """What the rows of zeros in the input projection of an M or R layer of nam56r_tiny cost, 4 of them."""
    return flops.product(BATCH * SMALL.seq_length * 4 * SMALL.hidden_size)


def test_each_layer_of_the_real_model_forward(measured: dict[str, dict[str, Counter[str]]]) -> None:
    """E, M and R up to padding; A layers after replacing visible pairs by dense ones."""
    sequence = SMALL.seq_length
    seen = Counter[str]()
    for number, work in enumerate(flops.step(SMALL, BATCH).layers, 1):
        expected = work.total.forward
        role = SMALL.roles[number - 1]
        if role == "-":
            dense = BATCH * (sequence**2 - flops.causal_pairs(sequence))
            expected += flops.full_core(dense, SMALL.heads, SMALL.mla).forward
        elif role is not None:
            dense = BATCH * (sequence * SMALL.dsa.topk - flops.selected_pairs(sequence, SMALL.dsa.topk))
            expected += flops.sparse_core(dense, SMALL.heads, SMALL.mla).forward
        if SMALL.layers[number - 1] in "MR":
            expected += padding().forward
        if role == "F":
            pairs = BATCH * (sequence**2 - flops.causal_pairs(sequence))
            expected += 2 * pairs * SMALL.dsa.indexer_heads * (SMALL.dsa.indexer_head_dim + 1)
        assert total(measured, f"GPTModel.decoder.layers.{number - 1}") == expected, f"layer {number}"
        seen[SMALL.layers[number - 1] + (role or "")] += 1
    assert seen == {"A-": 1, "AF": 1, "AS": 1, "E": 5, "M": 3, "R": 1}


def test_parts_of_the_real_model_forward(measured: dict[str, dict[str, Counter[str]]]) -> None:
    step = flops.step(SMALL, BATCH)
    experts = SMALL.layer_numbers("E")
    parts = {"router": "router", "experts": "routed_experts", "shared_experts": "shared_experts"}
    for module, family in parts.items():
        operations = sum(total(measured, f"GPTModel.decoder.layers.{number - 1}.mlp.{module}") for number in experts)
        assert operations == getattr(step.trunk, family).forward, family
    assert total(measured, "GPTModel.embedding") == step.families.embedding.forward == 0
    assert total(measured, "GPTModel.output_layer") == step.families.head.forward
    assert len(step.mtp) == 2
    assert step.families.head.forward == 3 * step.trunk.head.forward
    mtp = "GPTModel.mtp.layers.0"
    assert total(measured, f"{mtp}.eh_proj") == step.families.mtp_projection.forward
    assert total(measured, f"{mtp}.mtp_model_layer.mlp") == step.families.dense_ffn.forward
    block = 2 * (step.mtp[0].attention_projections + step.mtp[0].attention_core).forward
    dense = 2 * BATCH * (SMALL.seq_length**2 - flops.causal_pairs(SMALL.seq_length))
    block += flops.full_core(dense, SMALL.heads, SMALL.mla).forward
    assert total(measured, f"{mtp}.mtp_model_layer.self_attention") == block


def test_training_of_the_real_model(measured: dict[str, dict[str, Counter[str]]]) -> None:
    """All matrix products of training: equal to ours, absorbed projections, which are batched products, left out."""
    families = flops.step(SMALL, BATCH).families
    linear = (
        families.attention_projections, families.mamba_projections, families.recurrent_projections, families.router,
        families.routed_experts, families.shared_experts, families.dense_ffn, families.mtp_projection, families.head,
    )  # fmt: skip
    tokens, dsa = BATCH * SMALL.seq_length, SMALL.dsa
    projections = flops.indexer(
        tokens, 0, 0, hidden=SMALL.hidden_size, q_lora_rank=SMALL.mla.q_lora_rank,
        heads=dsa.indexer_heads, head_dim=dsa.indexer_head_dim,
    )  # fmt: skip
    absorbed = flops.product(tokens * SMALL.mla.kv_lora_rank * SMALL.heads * (SMALL.mla.qk_head_dim + SMALL.mla.v_head_dim))
    expected = sum(work.training for work in linear) + projections.training
    expected -= 2 * absorbed.training  # in two DSA layers
    expected += 4 * padding().training  # in three M layers and one R layer
    assert measured["training"]["Global"]["aten.mm"] == expected


def test_batched_products_of_training(measured: dict[str, dict[str, Counter[str]]]) -> None:
    """Attention, scans and recurrence in training, with what the references compute again, each named."""
    sequence, heads, mla, dsa = SMALL.seq_length, SMALL.heads, SMALL.mla, SMALL.dsa
    tokens = BATCH * sequence
    full = flops.full_core(3 * BATCH * sequence**2, heads, mla)  # one trunk layer, two depths
    sparse = flops.sparse_core(2 * tokens * dsa.topk, heads, mla)
    scores = flops.product(BATCH * sequence**2 * dsa.indexer_heads * (dsa.indexer_head_dim + 1))
    selected = flops.product(tokens * dsa.topk * dsa.indexer_heads * (dsa.indexer_head_dim + 1))
    scan = flops.step(SMALL, BATCH).trunk.mamba_scan
    absorbed = flops.product(2 * tokens * mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim))
    rnn = SMALL.m2rnn
    recurrence = flops.m2rnn_recurrence(tokens, SMALL.recurrent_heads, rnn.key_dim, rnn.value_dim)
    outer = 2 * tokens * SMALL.recurrent_heads * rnn.key_dim * rnn.value_dim
    qk, latent = mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.kv_lora_rank
    again = (
        full.forward * Fraction(qk, qk + mla.v_head_dim)  # scores, not the last product
        + sparse.forward * Fraction(latent + mla.qk_pos_emb_head_dim, 2 * latent + mla.qk_pos_emb_head_dim)
        + selected.forward  # scores of the selected keys; their gradient has a product with each weight, of one term
        - 2 * tokens * dsa.topk * dsa.indexer_heads
        + outer * rnn.value_dim + outer  # see test_recurrence_in_chunks
    )  # fmt: skip
    expected = sum(work.training for work in (full, sparse, scan, absorbed, recurrence)) + again
    expected += scores.forward + selected.backward
    operators = measured["training"]["Global"]
    assert operators["aten.bmm"] + operators["aten.baddbmm_"] == expected


def test_only_full_layers_have_an_indexer_and_only_a_loss_trains_it() -> None:
    def indexers(**dsa: Any) -> Work:
        model: Model = with_overrides(SMALL, {"dsa": dsa})
        return flops.step(model).families.indexer

    shared, full, untrained = indexers(), indexers(schedule="-FF"), indexers(loss_coeff=0.0)
    assert full == shared + shared
    assert untrained == Work(shared.forward, 0)
    assert 0 < shared.backward < 2 * shared.forward


@pytest.mark.parametrize("size", [{"batch": 0}, {"seq_length": 0}, {"vocab_size": -1}])
def test_nothing_to_count_is_refused(size: dict[str, int]) -> None:
    with raises(ModelError, *size.keys(), *size.values(), 1):
        flops.step(SMALL, **size)


def test_what_fp8_scopes_contain_is_what_their_linear_layers_compute(
    measured: dict[str, dict[str, Counter[str]]],
) -> None:
    """The products of every layer but the first and last, as a scope finds them; of A and M layers the last one."""
    numbers = range(2, SMALL.depth)
    scoped = [number for number in numbers if SMALL.layers[number - 1] in "AME"]
    parts = by_precision(SMALL, step := flops.step(SMALL, BATCH), PLANS["bf16"], scoped=scoped)
    assert reduce(add, parts.values()) == step.families
    by_letter = Counter[str]()
    for name in measured["forward"]:
        match = re.fullmatch(r"GPTModel\.decoder\.layers\.(\d+)\.(self_attention\.(linear|out)_proj|mlp\.shared_experts)", name)
        if match and (number := int(match[1]) + 1) in scoped:
            by_letter[SMALL.layers[number - 1]] += total(measured, name)
    fp8 = parts["fp8"]
    in_scopes = {"A": fp8.attention_projections, "M": fp8.mamba_projections, "E": fp8.shared_experts}
    assert {letter: work.forward for letter, work in in_scopes.items()} == by_letter
    assert fp8.total.backward == 2 * fp8.total.forward
    core = recomputed(SMALL, step, Recomputation(granularity="selective", modules=("core_attn",)))
    assert by_precision(SMALL, core, PLANS["bf16"], scoped=scoped)["fp8"] == flops.Families()
    recomputing = recomputed(SMALL, step, Recomputation(own=Recompute(a=True, m=True)))
    again = by_precision(SMALL, recomputing, PLANS["bf16"], scoped=scoped)["fp8"]
    assert again.total == Work(by_letter["A"] + by_letter["M"])


def test_wide_inputs_of_mamba_in_fp8_are_their_rows_of_the_projection() -> None:
    """With an FP8 scope they are all of M's projections but the narrow ones; recomputed, they are those of a forward pass."""
    numbers = [number for number, letter in enumerate(SMALL.layers, 1) if letter == "M"]
    step, parts = flops.step(SMALL, BATCH), mamba.projection_parts(SMALL)
    wide, narrow = (sum(part.rows for part in parts if part.exact is exact) for exact in (False, True))
    per_row = 2 * step.tokens * SMALL.hidden_size * len(numbers)
    for gradient in (True, False):
        split = by_precision(SMALL, step, PLANS["bf16"], projected=numbers, gradient=gradient)
        assert reduce(add, split.values()) == step.families
        assert split["fp8"].total == Work(per_row * wide, per_row * wide * (1 + gradient))
    both = by_precision(SMALL, step, PLANS["bf16"], projected=numbers, scoped=numbers)
    assert both["bf16"].mamba_projections == Work(per_row * narrow, 2 * per_row * narrow)
    recomputing = recomputed(SMALL, step, Recomputation(own=Recompute(m=True)))
    assert by_precision(SMALL, recomputing, PLANS["bf16"], projected=numbers)["fp8"].total == Work(per_row * wide)


@pytest.mark.parametrize(("name", "inner"), [("dense_ffn", SMALL.ffn_hidden_size), ("mtp_projection", SMALL.hidden_size)])
def test_products_of_mtp_in_fp8_are_those_of_two_matrices_at_every_depth(name: str, inner: int) -> None:
    step = flops.step(SMALL, BATCH)
    split = by_precision(SMALL, step, PLANS["bf16"], predicted=[name])
    assert reduce(add, split.values()) == step.families
    forward = 2 * step.tokens * SMALL.hidden_size * inner * 2 * SMALL.mtp.depth
    assert split["fp8"].total == getattr(split["fp8"], name) == Work(forward, 2 * forward)
    assert forward
