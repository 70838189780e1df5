"""What an export compares with the arguments of the run that saved."""

from __future__ import annotations

from pathlib import Path

from megacpp_mcore.checkpoints import layout
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.huggingface import export
from megacpp_mcore.model import hybrid, preset
from tests import stock
from tests.errors import raises


def test_arguments_before_the_first_step() -> None:
    """Which writes the number of key heads into them; a converted checkpoint has them as they were."""
    model = preset("nam56r_tiny")
    found = stock.parse(stock.words(model))
    saved = {"args": found, "content_metadata": {layout.MODEL_KEY: layout.recorded(model)}}
    assert found.num_query_groups != model.heads
    export._check_trained(Path("saved"), model, saved)
    found.group_query_attention = True
    with raises(CheckpointError, f"num_query_groups is {found.num_query_groups}, expected {model.heads}"):
        export._check_trained(Path("saved"), model, saved)


def test_the_pattern_of_a_run_on_hybrid_model_is_the_models() -> None:
    """What it sets is in Megatron's configuration, not in the arguments that a checkpoint has."""
    model = preset("nam56r_tiny")
    found = stock.parse(stock.words(model, host="hybrid"))
    saved = {"args": found, "content_metadata": {layout.MODEL_KEY: layout.recorded(model)}}
    export._check_trained(Path("saved"), model, saved)
    found.hybrid_layer_pattern = found.hybrid_layer_pattern.replace("G", "+", 1)
    with raises(CheckpointError, "hybrid_layer_pattern", hybrid.plan(model).text):
        export._check_trained(Path("saved"), model, saved)
