"""A Hugging Face folder with a tokenizer of whole words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


def save_words(folder: Path, words: Mapping[str, int], special: Sequence[str] = (), **config: object) -> Path:
    """Write a tokenizer whose first word stands for unknown ones; ``config`` is that of ``tokenizer_config.json``."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(words), unk_token=next(iter(words))))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
