"""The C and C++ corpus, built from existing archives."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from experiments import code_corpus
from megacpp_mcore.errors import DataError
from megacpp_mcore.util.files import sha256_of


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, str]]:
    """A held-out project as the manifest's first row, and one to train on; both are in ``sdists``."""
    (folder := tmp_path / "sdists").mkdir()
    with zipfile.ZipFile(folder / "held-1.zip", "w") as archive:
        archive.writestr("held/own.HPP", "int own;")
        archive.writestr("held/copied.c", "int  shared ;\n")
        archive.writestr("held/setup.py", "print()")
    with tarfile.open(folder / "train-1.tar.gz", "w:gz") as archive:
        for name, content in {
            "shared.h": b"int shared;",
            "tables.c": b"0," * (code_corpus.LARGEST // 2 + 1),
            "latin.c": b"// \xe9",
            "main.cu": "// ümläut\n".encode(),
        }.items():
            (member := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(member, io.BytesIO(content))
    parts = {"held-1.zip": "heldout", "train-1.tar.gz": "train"}
    return [
        {"project": file[:-6], "file": file, "sha256": sha256_of(folder / file), "part": part} for file, part in parts.items()
    ]


def texts(path: Path) -> dict[str, str]:
    return {document["path"]: document["text"] for document in map(json.loads, path.read_text().splitlines())}


def test_each_text_is_in_one_part(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    count = code_corpus.build(rows, tmp_path)
    # Texts that differ only in whitespace go to the first split that has them: training.
    assert texts(tmp_path / "train.jsonl") == {"shared.h": "int shared;", "main.cu": "// ümläut\n"}
    assert texts(tmp_path / "heldout.jsonl") == {"held/own.HPP": "int own;"}
    assert {what: total["files"] for what, total in count.items()} == {
        "train": 2, "heldout": 1, "too large": 1, "no UTF-8": 1, "seen before": 1,
    }  # fmt: skip


def test_another_archive_is_refused(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    with pytest.raises(DataError) as refusal:
        code_corpus.build([rows[1] | {"sha256": "0" * 64}], tmp_path)
    assert "train-1.tar.gz" in str(refusal.value)
    assert "0" * 64 in str(refusal.value)
