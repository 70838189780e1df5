"""The definition of the models: presets, checks, overrides, layouts, analytical parameter counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megacpp_mcore.errors import ModelError, PatternError
from megacpp_mcore.model import MTP, Layout, Model, preset, with_overrides
from tests.errors import raises


@pytest.fixture(scope="module")
def nam56r() -> Model:
    return preset("nam56r")


@pytest.fixture(scope="module")
def tiny() -> Model:
    return preset("nam56r_tiny")


SHORT = {"rotary_scaling_factor": 2.0, "original_max_position_embeddings": 250}


def test_overrides_make_a_new_model(tiny: Model) -> None:
    overrides = {"dsa": {"topk": 8}, "rope_theta": 10_000, "m2rnn": {"heads": None}, "hidden_size": 320}
    changed = with_overrides(tiny, overrides)
    assert (changed.dsa.topk, changed.dsa.schedule) == (8, "-FS")
    assert (changed.rope_theta, changed.recurrent_heads) == (10_000.0, 4)
    assert isinstance(changed.rope_theta, float)
    assert tiny.dsa.topk == 32
    assert with_overrides(tiny, {}) == tiny


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        ({"hiden_size": 1}, ["model: unknown key 'hiden_size'", "did you mean 'hidden_size'"]),
        ({"dsa": {"top_k": 1}}, ["model.dsa: unknown key 'top_k'", "did you mean 'topk'"]),
        ({"moe": {"qqq": 1}}, ["model.moe: unknown key 'qqq'", "known: experts, topk"]),
        ({"layers": "A"}, ["model: unknown key 'layers'", "known: name, pattern"]),
        ({3: 1}, ["model: unknown key 3", "known: name"]),
        ({"depth": True}, ["model.depth is True (bool)"]),
        ({"depth": "12"}, ["model.depth is '12' (str)"]),
        ({"depth": 12.0}, ["model.depth is 12.0 (float)"]),
        ({"depth": None}, ["model.depth is None (NoneType)"]),
        ({"rope_theta": True}, ["model.rope_theta is True (bool)"]),
        ({"rope_theta": "1e4"}, ["model.rope_theta is '1e4' (str)"]),
        ({"pattern": ["A"]}, ["model.pattern is ['A'] (list)"]),
        ({"m2rnn": {"heads": "4"}}, ["model.m2rnn.heads is '4' (str)"]),
        ({"m2rnn": {"heads": False}}, ["model.m2rnn.heads is False (bool)"]),
        ({"dsa": "-FS"}, ["model.dsa is '-FS'", "mapping"]),
        ({"dsa": None}, ["model.dsa is None", "mapping"]),
        ({"depth": 0}, ["depth is 0"]),
        ({"hidden_size": -128}, ["hidden_size is -128"]),
        ({"rope_theta": math.nan}, ["rope_theta is nan"]),
        ({"rope_theta": 10_000.5}, [10000.5, "--rotary-base"]),
        ({"norm_eps": math.inf}, ["norm_eps is inf"]),
        ({"start": {"embedding_std": 0.0}}, ["embedding_std is 0.0"]),
        ({"start": {"std": 0.02}}, ["head_gain is 0.5", 0.02]),
        ({"mla": {"qk_pos_emb_head_dim": 15}}, ["qk_pos_emb_head_dim (15)", 16]),
        ({"mla": {"kv_lora_rank": 0}}, ["MLA.kv_lora_rank is 0"]),
        ({"mla": {"window_size": 0}}, ["MLA.window_size is 0"]),
        ({"mla": {"yarn": {"rotary_scaling_factor": 0.5}}}, ["rotary_scaling_factor is 0.5", 1]),
        ({"mla": {"yarn": {"beta_fast": 1.0}}}, ["beta_fast is 1.0", "beta_slow (1.0)"]),
        ({"mla": {"yarn": {"mscale_all_dim": -1.0}}}, ["mscale_all_dim is -1.0"]),
        ({"seq_length": 1000, "mla": {"yarn": SHORT}}, ["seq_length is 1000", 500, "mla.yarn.rotary_scaling_factor is 4"]),
        ({"mtp": {"attention": "F"}}, ["MTP.attention is 'F'", "'-'", "'W'"]),
        ({"dsa": {"indexer_head_dim": 8}}, ["indexer_head_dim is 8", "qk_pos_emb_head_dim", 16]),
        ({"dsa": {"loss_coeff": -1e-3}}, ["DSA.loss_coeff is -0.001"]),
        ({"dsa": {"warmup_steps": -1}}, ["DSA.warmup_steps is -1"]),
        ({"dsa": {"distill": "mean"}}, ["DSA.distill is 'mean'", "served"]),
        ({"dsa": {"topk": 0}}, ["DSA.topk is 0"]),
        ({"mamba3": {"head_dim": 24}}, ["Mamba3.head_dim (24)", 32]),
        ({"mamba3": {"groups": 3}}, ["Mamba3.groups (3)", 4]),
        ({"mamba3": {"rope_fraction": 0.25}}, ["0.5 or 1.0"]),
        ({"mamba3": {"decay_activation": "relu"}}, ["decay_activation is 'relu'"]),
        ({"mamba3": {"state": 18}}, [18, 20]),
        ({"m2rnn": {"heads": 0}}, ["M2RNN.heads is 0"]),
        ({"m2rnn": {"heads": None}}, ["hidden_size", "m2rnn.heads"]),
        ({"moe": {"topk": 5}}, ["topk is 5", 4]),
        ({"moe": {"z_loss_coeff": -1.0}}, ["MoE.z_loss_coeff is -1.0"]),
        ({"mtp": {"depth": -1}}, ["MTP.depth is -1"]),
        ({"mtp": {"loss_scale": math.nan}}, ["MTP.loss_scale is nan"]),
        ({"mtp": {"loss_decay": 0.0}}, ["MTP.loss_decay is 0.0"]),
        ({"mtp": {"loss_decay": math.nan}}, ["MTP.loss_decay is nan"]),
    ],
)  # fmt: skip
def test_what_makes_no_model(tiny: Model, overrides: dict[Any, Any], values: list[object]) -> None:
    """Unknown keys, with the nearest; values of another type; values that do not go together."""
    with raises(ModelError, *values):
        with_overrides(tiny, overrides)


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        ({"pattern": "AEX"}, ["'X' at position 3"]),
        ({"pattern": "AE|ME"}, ["4 layers", 12]),
        ({"pattern": "AEMEAEMEAEMR/A/A"}, ["'/A'"]),
        ({"pattern": "AEMEAEMEAEMR/M"}, ["'/A'"]),
        ({"dsa": {"schedule": "-S"}}, ["Full"]),
        ({"dsa": {"schedule": "-FSF"}}, ["4 entries", "3 A"]),
    ],
)
def test_patterns_that_do_not_fit_the_model(tiny: Model, overrides: dict[str, Any], values: list[object]) -> None:
    with raises(PatternError, *values):
        with_overrides(tiny, overrides)


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        ({"tensor": 0}, ["Layout.tensor is 0"]),
        ({"pipeline": -1}, ["Layout.pipeline is -1"]),
        ({"virtual": 2}, ["virtual", "pipeline"]),
        ({"sequence_parallel": True}, ["sequence_parallel"]),
    ],
)
def test_layouts_that_make_no_sense(layout: dict[str, Any], values: list[str]) -> None:
    with raises(ModelError, *values):
        Layout(**layout)


TWO = {"tensor": 2, "sequence_parallel": True}
TWO_STAGES = {"dsa": {"schedule": "-FFF"}, "pattern": "A" * 26 + "|" + "M" * 26}


@pytest.mark.parametrize(
    ("overrides", "layout", "values"),
    [
        ({}, TWO | {"tensor": 3}, ["attention heads (56)", "tensor parallelism (3)"]),
        ({"heads": 64}, TWO | {"tensor": 16}, ["Mamba-3 groups (8)"]),
        ({}, TWO | {"tensor": 8}, ["M²RNN heads (44)"]),
        ({"ffn_hidden_size": 18945}, TWO, ["dense FFN width (18945)"]),
        ({"moe": {"shared_ffn_hidden_size": 1023}}, TWO, ["shared expert width"]),
        ({}, {"expert": 3}, ["experts (16)", "expert parallelism (3)"]),
        ({"seq_length": 4098}, TWO | {"tensor": 4}, ["sequence length"]),
        ({}, {"context": 16}, ["context parallelism is 16", "56 attention heads", 4]),
        ({}, {"context": 7}, ["context parallelism is 7", "8 Mamba-3 groups", 4]),
        ({}, {"context": 8}, ["context parallelism is 8", "44 M²RNN heads", 4]),
        ({"heads": 64}, TWO | {"context": 8}, ["context parallelism is 8", "22 M²RNN heads", 2]),
        ({"seq_length": 4100}, {"context": 4}, ["sequence length (4100)", "(8)", 4104]),
        ({}, {"tensor": 2}, ["--sequence-parallel"]),
        ({}, {"pipeline": 3}, ["52 layers", 3]),
        ({}, {"pipeline": 2}, ["layer 29"]),
        ({}, {"pipeline": 2, "virtual": 2}, ["layers 29, 41"]),
        (TWO_STAGES, {"pipeline": 4}, ["marks 2 stages"]),
    ],
)
def test_layouts_a_model_cannot_be_cut_into(
    nam56r: Model, overrides: dict[str, Any], layout: dict[str, Any], values: list[object]
) -> None:
    with raises(ModelError, *values):
        with_overrides(nam56r, overrides).check_layout(Layout(**layout))


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        ({}, {}),
        ({}, TWO | {"tensor": 4, "expert": 16}),
        ({}, {"context": 4, "expert": 4}),
        ({"seq_length": 4100}, TWO | {"context": 2}),
        ({"pattern": "AEME"}, {"context": 8}),
        ({"pattern": "AEME", "heads": 112, "mamba3": {"groups": 2}}, {"context": 16}),
        ({"dsa": {"schedule": "-FSS-FSF-FFS-"}}, {"pipeline": 4}),
        ({"dsa": {"schedule": "-FSS-FSF-FSS-"}}, {"pipeline": 2}),
        ({"dsa": {"schedule": "-"}}, TWO | {"pipeline": 2, "virtual": 2}),
    ],
)
def test_layouts_that_fit(nam56r: Model, overrides: dict[str, Any], layout: dict[str, Any]) -> None:
    model, cut = with_overrides(nam56r, overrides), Layout(**layout)
    model.check_layout(cut)
    assert [number for chunk in model.chunks(cut) for number in chunk] == list(range(1, 53))


def test_mtp_weights_of_nam56r(nam56r: Model) -> None:
    assert nam56r.mtp.weights == pytest.approx((0.3 / 1.6, 0.18 / 1.6))
    assert MTP(depth=0).weights == ()


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("vocab", [1, 1023, 1024, 1025, 65536])
def test_the_padded_vocabulary(tiny: Model, vocab: int, tensor: int) -> None:
    padded = with_overrides(tiny, {"vocab_size": vocab}).vocab_size_padded(tensor)
    assert padded % (128 * tensor) == 0
    assert 0 <= padded - vocab < 128 * tensor
