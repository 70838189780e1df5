"""Files that a run leaves: what they may be, and what is left where one cannot be written."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.files import Appender, replace


def test_a_pipe_or_a_socket_whose_reader_could_hold_training_up_is_refused(tmp_path: Path) -> None:
    pipe, plug = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(plug))
        for path, kind in ((pipe, "pipe"), (plug, "socket")):
            with pytest.raises(DataError, match=f"{kind} is a {kind}; expected a file"):
                Appender(path)


def test_a_device_is_appended_to() -> None:
    output = Appender(Path(os.devnull))
    output.append("line")
    output.close()


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for text in ("first", "second"):  # the link leads to nothing at first
        replace(tmp_path / "link", text)
        assert (tmp_path / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("name", ["", "pipe", "folder", "loop", "file/below", "nowhere/file"])
def test_what_cannot_be_written_is_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("as it was")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="expected"):
        replace(tmp_path / name if name else Path(), "text")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "as it was"


def test_text_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        replace(tmp_path / "file", "\ud800")
    assert list(tmp_path.iterdir()) == []
