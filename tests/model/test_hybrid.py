"""The hybrid pattern of a model, and the words that train it on HybridModel; no Megatron."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megacpp_mcore.arguments import lowering
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.errors import ModelError, SpecImportError
from megacpp_mcore.launch import plan as launch_plan
from megacpp_mcore.model import PRESETS, Layout, preset, with_overrides
from megacpp_mcore.model.hybrid import MTP_BLOCK, contradictions, plan
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import GPT, HYBRID, Training
from tests.errors import raises

TINY = preset("nam56r_tiny")
CUDA = Training(data=("--mock-data",), tokenizer=("--tokenizer-type", "NullTokenizer", "--vocab-size", "65536"))


@pytest.mark.parametrize("name", PRESETS)
def test_megatron_reads_the_pattern_as_it_is_meant(name: str) -> None:
    from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_layer_counts, parse_hybrid_pattern

    model = preset(name)
    text = plan(model).text
    parsed = parse_hybrid_pattern(text)
    assert (parsed.mtp_pattern, parsed.mtp_num_depths) == (MTP_BLOCK, model.mtp.depth)
    counts = get_hybrid_layer_counts(parsed.main_pattern)
    assert [counts[symbol] for symbol in "MEG"] == [model.layers.count(letter) for letter in "MER"]
    assert counts["D"] == sum(role in ("F", "S") for role in model.roles)
    assert counts["+"] + counts["D"] == model.layers.count("A")
    if name == "nam56r":
        assert text == "+EMEDEMEDEMGDEME+EMEDEMGDEMEDEME+EMGDEMEDEMEDEMG+EME/+-/+-"


def test_stages_are_those_of_the_layout_or_of_the_pattern() -> None:
    model = with_overrides(TINY, {"dsa": {"schedule": "-FF"}})
    assert plan(model, Layout(pipeline=2)).text == "+EMEDE|MEDEMG/+-"
    assert plan(model, Layout(pipeline=2, virtual=2)).text == "+EM|EDE|MED|EMG/+-"
    marked = with_overrides(model, {"pattern": "AEMEAEM|EAEMR"})
    assert plan(marked).text == plan(marked, Layout(pipeline=2)).text == "+EMEDEM|EDEMG/+-"


@pytest.mark.parametrize(
    "text",
    [
        None, "", "*EM", "+EMEDEMEDEMM/+-", "+EMEDEMEDEMG+/+-", "DEMEDEME+EMG/+-", "+EMEDEMEDEMG", "+EMEDEMEDEMG/D-",
        "+EMEDEMEDEMG/+-/+-", "+EMEDE||MEDEMG/+-", "|+EMEDEMEDEMG/+-",
    ],
)  # fmt: skip
def test_a_contradiction_is_said_with_the_pattern_to_give(text: str | None) -> None:
    (problem,) = contradictions(TINY, text)
    assert f"found {text!r}, expected '+EMEDEMEDEMG/+-'" in problem
    assert "--hybrid-layer-pattern '+EMEDEMEDEMG/+-'" in problem


def test_stages_are_no_contradiction() -> None:
    assert contradictions(TINY, "+EMEDEMEDEMG/+-") == contradictions(TINY, "+EME|DEMEDEMG/+-") == []


SPEC = ["--spec", "megacpp_mcore.nam56r"]


def option(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_both_hosts_get_the_same_words_but_for_what_the_pattern_says() -> None:
    gpt, hybrid_ = (lower(Run(TINY, Layout(), CUDA, model_class)) for model_class in (GPT, HYBRID))
    flags = [{word for word in words if word.startswith("--")} for words in (gpt, hybrid_)]
    assert flags[0] - flags[1] == {"--num-layers", "--moe-layer-freq", "--mtp-num-layers"}
    assert flags[1] - flags[0] == {"--hybrid-layer-pattern"}
    assert option(hybrid_, "--hybrid-layer-pattern") == "+EMEDEMEDEMG/+-"
    assert hybrid_[-3:] == ("--spec", "megacpp_mcore", "nam56r_tiny") == gpt[-3:]
    assert lower(Run(TINY, Layout(), CUDA)) == hybrid_


def test_the_pattern_carries_the_stages_and_no_other_word_does() -> None:
    model = with_overrides(TINY, {"dsa": {"schedule": "-FF"}})
    words = lower(Run(model, Layout(pipeline=2, virtual=2), CUDA, HYBRID))
    assert option(words, "--hybrid-layer-pattern") == "+EM|EDE|MED|EMG/+-"
    assert not {"--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"} & set(words)
    with raises(ModelError, "layer 9"):
        lower(Run(TINY, Layout(pipeline=3), CUDA, HYBRID))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["megacpp_mcore", "nam56r"], "nam56r"), (["megacpp_mcore.nam56r_hybrid"], "nam56r"),
        (["megacpp_mcore", "nam56r_tiny_hybrid"], "nam56r_tiny"), (["megacpp_mcore.nam52"], "nam52"),
        (["megacpp_mcore.layer_specs.hybrid_model", "nam56r_hybrid"], "nam56r"), (None, None), ([], None),
        (["local"], None), (["megacpp_mcore", "nam57"], None), (["megacpp_mcore.layer_specs.nam56r", "nam56r_hybrid"], None),
    ],
)  # fmt: skip
def test_what_a_spec_names(words: list[str] | None, named: str | None) -> None:
    assert lowering.preset_of(words) == named


@pytest.mark.parametrize(("script", "other"), [(GPT, HYBRID), (HYBRID, GPT)])
def test_a_script_of_the_other_class_is_refused(script: str, other: str, tmp_path: Path) -> None:
    """Detected by the pattern, which Megatron itself would miss or ignore."""
    named, instead = lowering.SCRIPTS[script], lowering.SCRIPTS[other]
    (tmp_path / named).touch()
    words = ["--hybrid-layer-pattern=+EM", *SPEC] if other == HYBRID else SPEC
    with raises(SpecImportError, named, "--hybrid-layer-pattern", instead):
        launch_plan.plan([str(tmp_path / named), *words], device="auto", environment={})


@pytest.mark.parametrize("script", [None, "pretrain_hybrid.py", "my_own.py"])
def test_a_hybrid_launch_is_planned(script: str | None, tmp_path: Path) -> None:
    cpu = dataclasses.replace(CUDA, device="cpu", precision="fp32", transformer_impl="local")
    words = list(lower(Run(TINY, Layout(), cpu, HYBRID)))
    if script is not None:
        (tmp_path / script).touch()
        words.insert(0, str(tmp_path / script))
    planned = launch_plan.plan(words, device="cpu", environment={})
    assert planned.spec == ("megacpp_mcore", "nam56r_tiny")
    assert planned.has_own_spec
