"""Damaged rank files and receipts: each command names the damage or skips it, and none ends in a traceback."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events, receipts
from megacpp_mcore.observe.clock import Clock
from tests.errors import raises
from tests.lanes import exhaustive_but
from tests.observe.recorded import at, facts, file_of, stepped, with_loss, write_start

WRONG = [None, 3, -1, 1.5, "x", [], {}, True, [1], {"a": 1}, float("inf"), 10**30, "\x1b[31m"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two ranks, and its receipt in the parent folder."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    routing = {"tokens_per_expert": [3, 4], "asked": 7, "dropped": 0, "entropy": 0.9, "max_over_mean": 1.1}
    for rank in range(2):
        lines = [facts()]
        for number in range(1, 6):
            line = stepped(number * 1.1, number, data=0.05)
            lines += [with_loss(line) if rank else line, at(number * 1.1 + 0.01)]
            lines.append(at(number * 1.1 + 0.02, metrics={"step": number, "tokens_per_s": 900.5, "mfu": None}))
        lines.append(at(6, facts={"routing": {"layers": {"3": routing}, "failed": None}}))
        write_start(folder, 1, rank, *lines, at(6.5, {"idle": 0.1}, how="finished"), world_size=2)
    (folder.parent / "receipt.json").write_text(json.dumps(receipts.read(folder), indent=1))
    return folder


def changed(content: bytes, rng: random.Random, is_one: bool) -> bytes:
    """``content``, JSON lines or (``is_one``) one JSON object, damaged in some way."""
    lines = [content] if is_one else content.split(b"\n")
    place = rng.randrange(max(1, len(lines) - 1))
    how = rng.choice(["cut", "flip", "flip", "empty", "garbage", "shuffle", "drop", "line", *["value"] * 5])
    if how == "cut":
        return content[: rng.randrange(len(content))]
    if how == "flip":
        bits = bytearray(content)
        bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(8)
        return bytes(bits)
    if how in ("empty", "garbage"):
        return b"" if how == "empty" else rng.randbytes(200) + b"\n"
    if how == "shuffle":
        rng.shuffle(lines)
    elif how == "drop":
        del lines[place]
    elif how == "line":
        lines[place] = json.dumps(rng.choice(WRONG)).encode()
    else:
        value = json.loads(lines[place])
        _spoil(value, rng)
        lines[place] = json.dumps(value).encode()
    return b"\n".join(lines)


def _spoil(value: Any, rng: random.Random) -> None:
    """Replace or remove one value anywhere in ``value``, an object or a list."""
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.6:
        _spoil(value[key], rng)
    elif rng.random() < 0.1:
        del value[key]
    else:
        value[key] = rng.choice(WRONG)


@pytest.mark.parametrize("seed", exhaustive_but(range(40), *range(12)))
def test_no_command_ends_in_a_traceback(run: Path, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng, copy, receipt = random.Random(seed), tmp_path / "run", tmp_path / "receipt.json"
    shutil.copytree(run, copy)
    damaged = file_of(copy, 1, seed % 2)
    damaged.write_bytes(changed(damaged.read_bytes(), rng, is_one=False))
    receipt.write_bytes(changed((run.parent / "receipt.json").read_bytes(), rng, is_one=True))
    for where in (str(copy), str(receipt)):
        for words in (["show", where], ["compare", str(run), where], ["goodput", where]):
            status = cli.main(["report", *words])
            output = capsys.readouterr()
            assert status in (0, 1) or (status == 2 and output.err.startswith("error: ")), output


@pytest.mark.parametrize("key", ["at", "began", "rank", "phases", "losses", "step", "metrics", "facts", "heartbeat_s"])
def test_a_value_of_another_kind_is_named_with_its_line(run: Path, tmp_path: Path, key: str) -> None:
    path = file_of(tmp_path, 1, 1)
    path.parent.mkdir()
    lines = file_of(run, 1, 1).read_text().splitlines()[:4]
    for place, line in enumerate(lines):
        damaged = json.dumps(json.loads(line) | {key: [1, 2]})
        path.write_text("\n".join([*lines[:place], damaged, *lines[place + 1 :], ""]))
        with pytest.raises(DataError, match=rf"rank_00001.jsonl, line {place + 1}: .*{key} is \[1, 2\]"):
            events.read(tmp_path)


@pytest.mark.parametrize("place", ["run", "scratch"])
@pytest.mark.parametrize("to_itself", [False, True])
def test_a_link_to_nothing_or_to_itself_is_no_folder_to_record_in(tmp_path: Path, place: str, to_itself: bool) -> None:
    link = tmp_path / place
    link.symlink_to(link if to_itself else tmp_path / "nowhere")
    with raises(DataError, link):
        events.Log(link if place == "run" else link / "run", 0, 1, Clock())


def test_names_in_errors_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(tmp_path / "\x1b[31mred\x07\udcff ü.json")
    for words in (["report", "show", name], ["data", "prepare", name, "--output", "x"], ["launch", "--", name + ".py"]):
        assert cli.main(words) == 2
        errors = capsys.readouterr().err
        assert "\x1b" not in errors
        assert r"\x1b[31mred\x07\udcff ü.json" in errors
