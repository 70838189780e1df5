"""What an export compares with the arguments of the run that saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.checkpoints import layout
from megacpp_mcore.data.tokenizer import ByteTokenizer, folder_checksum
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.huggingface import export
from megacpp_mcore.model import hybrid, preset
from megacpp_mcore.model.training import GPT, HYBRID
from tests import stock
from tests.errors import raises

MODEL = preset("nam56r_tiny")


@pytest.mark.parametrize(
    ("model_class", "name", "wrong", "says"),
    [
        # The first step writes the number of key heads into them; a converted checkpoint has them as they were.
        (GPT, "group_query_attention", lambda _: True, f"num_query_groups is 1, expected {MODEL.heads}"),
        # What a run on HybridModel sets is in Megatron's configuration, not in the arguments that a checkpoint has.
        (HYBRID, "hybrid_layer_pattern", lambda was: was.replace("G", "+", 1), hybrid.plan(MODEL).text),
    ],
)
def test_arguments_of_another_model(model_class: str, name: str, wrong: Callable[[Any], Any], says: str) -> None:
    found = stock.parse(stock.words(MODEL, model_class=model_class))
    saved = {"args": found, "content_metadata": {layout.MODEL_KEY: layout.recorded(MODEL)}}
    export._check_trained(Path("saved"), MODEL, saved)
    setattr(found, name, wrong(getattr(found, name)))
    with raises(CheckpointError, says):
        export._check_trained(Path("saved"), MODEL, saved)


def test_a_tokenizer_of_another_text(tmp_path: Path) -> None:
    receipt, other = tmp_path / "receipt.json", tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    for content in ("", "[]", "{}", json.dumps({"tokenizer": {"checksum": None}})):
        receipt.write_text(content)
        export._check_tokenizer(receipt, other)
    receipt.write_text(json.dumps({"tokenizer": {"checksum": ByteTokenizer().checksum()}}))
    export._check_tokenizer(receipt, None)
    with raises(CheckpointError, f"{other} has the checksum {folder_checksum(other)[:12]}", str(receipt)):
        export._check_tokenizer(receipt, other)
    receipt.write_text(json.dumps({"tokenizer": {"checksum": folder_checksum(other)}}))
    export._check_tokenizer(receipt, other)
    with raises(CheckpointError, "the byte tokenizer"):
        export._check_tokenizer(receipt, None)
