"""The table of tensors and the configuration of an export against the model's own sizes."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

import megacpp_mcore.huggingface
from megacpp_mcore.huggingface.names import configuration, tensors
from megacpp_mcore.model import PRESETS, preset

HERE = Path(megacpp_mcore.huggingface.__file__).parent


@pytest.mark.parametrize("name", PRESETS)
def test_the_tensors_are_the_models_parameters(name: str) -> None:
    model = preset(name)
    found = list(tensors(model))
    assert len({one.key for one in found}) == len({one.name for one in found}) == len(found)
    padding = 2 * (model.vocab_size_padded(1) - model.vocab_size) * model.hidden_size
    biases = model.moe.experts * model.layers.count("E")  # of the balancing of experts, which is no parameter
    assert sum(math.prod(one.shape) for one in found) - biases + padding == sum(model.parameters().values())


def test_every_size_is_an_argument_of_the_configuration() -> None:
    tree = ast.parse((HERE / "configuration_nam56r.py").read_text(encoding="utf-8"))
    (init,) = (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == "__init__")
    arguments = {argument.arg for argument in init.args.args} - {"self", "kernels", "use_cache"}
    of_transformers = {"model_type", "architectures", "auto_map", "num_hidden_layers", "tie_word_embeddings"}
    assert configuration(preset("nam56r")).keys() - of_transformers == arguments
