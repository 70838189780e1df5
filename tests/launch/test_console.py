"""The console of a launch: what is left on it, and the file that has the rest."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.launch import process
from megacpp_mcore.util import console
from tests.errors import raises


@pytest.mark.parametrize(("rank", "size", "whose"), [(0, 1, ""), (0, 3, " of rank 0"), (1, 3, None), (2, 3, " of rank 2")])
def test_the_files_of_the_first_and_the_last_rank_are_named(
    rank: int,
    size: int,
    whose: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last one's has Megatron's lines of steps."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with process.quiet(tmp_path) as log:
        print("Megatron's line")
    assert log.read_text().startswith("Megatron's line\n")
    named = f"megacpp-mcore: Megatron's output{whose} is in {log}; --verbose leaves it on the console\n"
    assert capsys.readouterr().out == ("" if whose is None else named)


@pytest.mark.parametrize("leads_to", ["nowhere", "run"])
def test_a_folder_that_is_a_link_to_nothing_or_to_itself_is_refused(leads_to: str, tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / leads_to)
    with pytest.raises(LaunchError, match=f"{tmp_path / 'run'} .*not a broken or circular link"):
        process.quiet(tmp_path / "run").__enter__()


def test_a_folder_that_cannot_be_written_to_is_not_called_a_link(tmp_path: Path) -> None:
    denied = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with mock.patch.object(Path, "mkdir", side_effect=denied), pytest.raises(LaunchError, match=r"Read-only.*--save") as raised:
        process.quiet(tmp_path / "run").__enter__()
    assert "link" not in str(raised.value)


def test_only_our_lines_and_warnings_are_left_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what Megatron says of arguments, by the first rank."""
    monkeypatch.delenv("RANK", raising=False)
    log = tmp_path / "log"
    torch = logging.getLogger("torch")
    handler = logging.StreamHandler()
    torch.addHandler(handler)
    try:
        before = handler.stream
        with console.redirected(log):
            print("Megatron's line")
            warnings.warn("deprecated", stacklevel=1)
            theirs = "/site/megatron/training/utils/common_utils.py"
            for line, text in enumerate(("Disabling --async-save.", "Overriding default arguments for tokenizer_type:A")):
                warnings.warn_explicit(text, UserWarning, theirs, line)
            warnings.warn_explicit("a function is deprecated", FutureWarning, theirs, 3)
            monkeypatch.setenv("RANK", "1")
            warnings.warn_explicit("Disabling --async-save.", UserWarning, theirs, 4)
            torch.error("torch's line")
            logging.getLogger("megacpp_mcore.observe").warning("ours matters")
            logging.getLogger("megacpp_mcore.observe").info("ours does not")
            console.say("our line")
        assert handler.stream is before
    finally:
        torch.removeHandler(handler)
    print("afterwards")
    printed = capsys.readouterr()
    assert printed.out == "Megatron: Disabling --async-save.\nour line\nafterwards\n"
    assert printed.err == "megacpp-mcore: WARNING: ours matters\n"
    text = log.read_text()
    assert "Megatron's line\n" in text
    assert "torch's line\n" in text


def test_a_closed_console_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with console.redirected(tmp_path / "log"):
            console.say("one")
            print("Megatron's line")
        console.say("two")
        print("three", flush=True)
    assert (tmp_path / "log").read_text() == "Megatron's line\n"


def test_a_closed_terminal_and_a_stream_without_a_file_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, terminal = os.openpty()
    os.close(ours)
    with open(terminal, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        console.say("one")
        console.say("two")

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(self.error, "")

    lost = Gone()
    monkeypatch.setattr(sys, "stdout", lost)
    lost.error = errno.ECONNRESET
    console.say("three")
    lost.error = errno.ENOSPC
    with pytest.raises(OSError, match="28"):
        console.say("four")


def test_a_full_disk_does_not_replace_the_error() -> None:
    torch, handler = logging.getLogger("torch"), logging.StreamHandler()
    torch.addHandler(handler)
    try:
        with raises(LaunchError, "the disk is full"), console.redirected(Path("/dev/full")):
            handler.emit(logging.makeLogRecord({"msg": "torch's line"}))
            raise LaunchError("the disk is full")
    finally:
        torch.removeHandler(handler)
