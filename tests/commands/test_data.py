"""The command ``data``: its options, its answers, and that asking for them imports no torch."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.commands import data as command
from megacpp_mcore.data.arguments import verify_arguments
from megacpp_mcore.errors import DataError
from tests import forks
from tests.errors import raises
from tests.saved import flip


def data(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return command.run(parser.parse_args(["data", *words]))


@pytest.fixture
def prefix(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    return str(tmp_path / "data")


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
    assert data("verify", prefix) == 1
    assert "megacpp-mcore data verify --adopt" in capsys.readouterr().err
    assert data("verify", "--adopt", prefix) == 0
    assert "end-of-document id is not known" in capsys.readouterr().out
    (tmp_path / "data.manifest.json").unlink()
    assert data("verify", "--adopt", "--tokenizer", "byte", prefix) == 0
    assert "--null-tokenizer-eod-id 256" in capsys.readouterr().out
    with raises(DataError, "--adopt"):
        data("verify", "--eod-id", "3", prefix)


def test_verify_goes_on_to_the_next_dataset_and_names_every_damaged_one(tmp_path, prefix, capsys):
    data("prepare", str(tmp_path), "--output", prefix, "--split", "train=0.5,valid=0.5")
    sound, damaged, missing = f"{prefix}_train", f"{prefix}_valid", f"{prefix}_test"
    flip(Path(damaged + ".bin"), 1)
    capsys.readouterr()
    assert data("verify", missing, damaged, sound, sound) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{sound}: ")
    assert damaged not in printed.out
    first, *listed = printed.err.splitlines()
    assert first == "datasets with problems: 2 of 3"
    for line, says in zip(listed, (f"there is no dataset {missing} ", f"{damaged}.bin: found SHA-256 "), strict=True):
        assert line.startswith(f"  {says}")
    assert listed[0].endswith(f"there are {Path(sound).name}, {Path(damaged).name}")
    Path(f"{sound}.manifest.json").unlink()
    assert data("verify", sound) == 1
    assert f"{sound}.manifest.json does not exist; expected the manifest" in capsys.readouterr().err


def test_ctrl_c_ends_the_workers_and_the_same_command_starts_anew(tmp_path):
    texts, output = tmp_path / "texts", tmp_path / "out" / "data"
    texts.mkdir()
    for number in range(150):
        (texts / f"{number:03d}.txt").write_text(f"text {number} " * 400)
    (tmp_path / "main.py").write_text(  # slow; the workers import it, too
        "import sys, time\n"
        "from megacpp_mcore.commands import cli\n"
        "from megacpp_mcore.data import tokenizer\n"
        "encode = tokenizer.ByteTokenizer.encode\n"
        "tokenizer.ByteTokenizer.encode = lambda self, text: time.sleep(0.1) or encode(self, text)\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(cli.main(sys.argv[1:]))\n"
    )
    words = [tmp_path / "main.py", "data", "prepare", texts, "--output", output, "--workers", "2"]
    process = forks.start(list(map(str, words)), log := tmp_path / "said")
    forks.wait_until(Path(f"{output}.unfinished", "dataset.0.bin").exists, every_s=0.002)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers are sent it too
    assert process.wait(forks.PATIENCE_S) == 130, log.read_text()
    assert "interrupted" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert list(output.parent.iterdir()) == []
    assert data("prepare", str(texts), "--output", str(output)) == 0


def test_workers_must_be_positive(tmp_path, prefix):
    with raises(DataError, "0 workers"):
        data("prepare", str(tmp_path), "--output", prefix, "--workers", "0")
    with raises(DataError, f"'{tmp_path}/'", f"{tmp_path}/corpus"):
        data("prepare", str(tmp_path), "--output", str(tmp_path) + "/")


@pytest.mark.parametrize("output", [".", "..", "data/."])
def test_an_output_that_is_a_folder_is_refused(tmp_path, prefix, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    with raises(DataError, f"'{output}'", f"{output}/corpus"):
        data("prepare", str(tmp_path), "--output", output)


def test_a_suffix_where_a_prefix_is_expected_is_named(tmp_path, prefix, capsys):
    for suffix in (".bin", ".idx", ".manifest.json"):
        with raises(DataError, f"{prefix}{suffix}", f"give {prefix}"):
            data("prepare", str(tmp_path), "--output", prefix + suffix)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("data")) == []
    data("prepare", str(tmp_path), "--output", prefix)
    assert data("verify", f"{prefix}.bin") == 1
    assert f"give {prefix}\n" in capsys.readouterr().err
    emit = ["recipe", "emit", "nam56r_tiny", "--data"]
    for words in (["data", "verify", "--adopt"], ["data", "score-unigram"], emit):
        assert cli.main([*words, f"{prefix}.bin"]) == 2
        assert capsys.readouterr().err.endswith(f"give {prefix}\n")
    with raises(DataError, f"{prefix}.bin", f"give {prefix}"):
        verify_arguments(["--data-path", f"{prefix}.bin"])
    for path in tmp_path.glob("data.*"):
        path.rename(path.with_name(path.name.replace("data", "data.bin", 1)))
    assert data("verify", f"{prefix}.bin") == 0  # a dataset of that very prefix
