"""The command ``data``: its options, its answers, and that asking for them imports no torch."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from megacpp_mcore.data import command
from megacpp_mcore.errors import DataError


def data(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return command.run(parser.parse_args(["data", *words]))


@pytest.fixture
def prefix(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    return str(tmp_path / "data")


def test_checks_import_no_torch(tmp_path):
    script = (
        "import sys\n"
        "from megacpp_mcore.data import command, corpus, index, manifest, prepare, score, tokenizer\n"
        "loaded = [name for name in ('torch', 'megatron', 'tokenizers', 'transformers') if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})


def test_prepare_verify_and_score(tmp_path, prefix, capsys):
    assert data("prepare", str(tmp_path), "--output", prefix, "--split", "train=0.6,valid=0.4") == 0
    printed = capsys.readouterr().out
    assert f"{prefix}_valid: " in printed
    flags = "--tokenizer-type NullTokenizer --vocab-size 260 --null-tokenizer-eod-id 256 --null-tokenizer-pad-id 258"
    assert flags in printed
    assert data("verify", f"{prefix}_train", f"{prefix}_valid") == 0
    assert flags in capsys.readouterr().out
    assert data("score-unigram", f"{prefix}_train") == 0
    assert 2 < float(capsys.readouterr().out) < 4


def test_adopt_from_the_command_line(tmp_path, prefix, capsys):
    data("prepare", str(tmp_path), "--output", prefix)
    (tmp_path / "data.manifest.json").unlink()
    with pytest.raises(DataError, match="megacpp-mcore data verify --adopt"):
        data("verify", prefix)
    assert data("verify", "--adopt", prefix) == 0
    assert "end-of-document id is not known" in capsys.readouterr().out
    (tmp_path / "data.manifest.json").unlink()
    assert data("verify", "--adopt", "--tokenizer", "byte", prefix) == 0
    assert "--null-tokenizer-eod-id 256" in capsys.readouterr().out
    with pytest.raises(DataError, match="add --adopt"):
        data("verify", "--eod-id", "3", prefix)


def test_skipped_files_are_told(tmp_path, prefix, capsys):
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="--errors skip"):
        data("prepare", str(tmp_path), "--output", prefix)
    assert data("prepare", str(tmp_path), "--output", prefix, "--errors", "skip", "--overwrite") == 0
    assert "20 documents" in (printed := capsys.readouterr().out)
    assert "1 skipped" in printed


def test_interruption_says_how_to_go_on(tmp_path, prefix, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("megacpp_mcore.data.prepare.prepare", interrupt)
    assert data("prepare", str(tmp_path), "--output", prefix) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_workers_must_be_positive(tmp_path, prefix):
    with pytest.raises(DataError, match="expected at least 1"):
        data("prepare", str(tmp_path), "--output", prefix, "--workers", "0")
    with pytest.raises(DataError, match="names a folder"):
        data("prepare", str(tmp_path), "--output", str(tmp_path) + "/")
