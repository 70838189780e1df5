"""The table of tensors and the configuration of an export against the model's own sizes."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

import megacpp_mcore.huggingface
from megacpp_mcore.errors import CheckpointError, ModelError
from megacpp_mcore.huggingface import names
from megacpp_mcore.huggingface.load import model_of
from megacpp_mcore.huggingface.names import PLAIN, configuration, tensors
from megacpp_mcore.model import PRESETS, preset, with_overrides
from tests.errors import raises

HERE = Path(megacpp_mcore.huggingface.__file__).parent


@pytest.mark.parametrize("name", PRESETS)
def test_the_tensors_are_the_models_parameters(name: str) -> None:
    model = preset(name)
    found = list(tensors(model))
    assert len({one.key for one in found}) == len({one.name for one in found}) == len(found)
    padding = 2 * (model.vocab_size_padded(1) - model.vocab_size) * model.hidden_size
    biases = model.moe.experts * model.layers.count("E")  # of the balancing of experts, which is no parameter
    assert sum(math.prod(one.shape) for one in found) - biases + padding == sum(model.parameters().values())


def test_a_letter_of_ones_own_has_no_tensors_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(names._MIXERS, "R")
    with raises(ModelError, "nam56r_tiny", "layers of R", "A, E, M"):
        list(tensors(preset("nam56r_tiny")))


def test_every_size_is_an_argument_of_the_configuration() -> None:
    tree = ast.parse((HERE / "configuration_nam56r.py").read_text(encoding="utf-8"))
    (init,) = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    arguments = {argument.arg for argument in init.args.args} - {"self", "kernels", "use_cache"}
    of_transformers = {"model_type", "architectures", "auto_map", "num_hidden_layers", "tie_word_embeddings"}
    assert configuration(preset("nam56r_long")).keys() - of_transformers == arguments
    assert PLAIN.keys() & configuration(preset("nam56r")).keys() == set()


def test_the_model_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [model_of(configuration(preset(name)), "exported").name for name in PRESETS] == list(PRESETS)
    yarn = {"mla": {"yarn": {"rotary_scaling_factor": 2.0}}}
    with raises(CheckpointError, "exported is of no preset"):  # which no tensor and no role shows
        model_of(configuration(with_overrides(preset("nam56r_tiny"), yarn)), "exported")
    other = with_overrides(preset("nam56r_tiny"), {"dsa": {"topk": 7}}, where="overrides")
    with raises(CheckpointError, "exported is of no preset", "MEGACPP_CONFIG"):
        model_of(configuration(other), "exported")
    (tmp_path / "mine.yaml").write_text("model: nam56r_tiny\noverrides: {dsa: {topk: 7}}\n")
    monkeypatch.setenv("MEGACPP_CONFIG", str(tmp_path / "mine.yaml"))
    assert model_of(configuration(other), "exported") == other
    with raises(CheckpointError, "exported: index_topk is", "and 7 in nam56r_tiny"):
        model_of(configuration(preset("nam56r_tiny")), "exported")
