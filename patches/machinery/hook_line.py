"""The one line added to a checkout's ``megatron/core/__init__.py``: its text, and adding it to and removing it from bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megacpp_mcore.errors import PatchError

MARK = "megacpp-mcore patch hook"
_NAME = r'"[a-z0-9]+(?:-[a-z0-9]+)*"'
_CALL = '__import__("megacpp_mcore.patches.hook", fromlist=["install"]).install(__file__, '
_UNDO = "undo with: megacpp-mcore patch revert --checkout DIR"
_WHOLE = re.compile(
    re.escape(_CALL) + rf'\[(?P<names>{_NAME}(?:, {_NAME})*)\], version="(?P<version>[\w.+!-]+)"(?:, seal="\w+")?\)  '
    rf"# {MARK}; SHA-256 without it (?P<sha256>[0-9a-f]{{64}}); {re.escape(_UNDO)}"
)
# Anything that resembles our line: it must then be intact.
_SUSPECT = re.compile(rf"megacpp_mcore\.patches\.hook|{MARK}".encode())


@dataclass(frozen=True)
class HookLine:
    """Content of the hook line.

    Attributes:
        names: the patches, in the order of the requests.
        version: of the megacpp-mcore that wrote it.
        sha256: of the file without the line.
    """

    names: tuple[str, ...]
    version: str
    sha256: str

    def render(self) -> str:
        """Write the line, without a newline: one statement and a comment, in ASCII."""
        names = ", ".join(f'"{name}"' for name in self.names)
        return f'{_CALL}[{names}], version="{self.version}")  # {MARK}; SHA-256 without it {self.sha256}; {_UNDO}'


@dataclass(frozen=True)
class Content:
    """A file split into the bytes without the line, and the line, if there is one."""

    without: bytes
    hook: HookLine | None


def add(content: bytes, line: HookLine) -> bytes:
    """``content``, which ends in a newline, with ``line`` as its last line."""
    return content + line.render().encode("ascii") + b"\n"


def take_apart(content: bytes) -> Content:
    """Split a file into its content without our line, and the line; the inverse of :func:`add`.

    Raises:
        PatchError: our line is damaged, or occurs twice.
    """
    lines = content.splitlines(keepends=True)  # bytes split only at \n, \r\n and \r, as Python source does
    found = [index for index, text in enumerate(lines) if _SUSPECT.search(text)]
    if not found:
        return Content(content, None)
    index = found[0]
    match = _WHOLE.fullmatch(lines[index].rstrip(b"\r\n").decode("latin-1"))
    if match is None or len(found) > 1:
        raise PatchError(
            f"the hook line of megacpp-mcore is damaged (line {', '.join(str(number + 1) for number in found)}): expected one "
            "whole line as `megacpp-mcore patch apply` wrote it; take it out by hand, or restore the file with "
            "`git checkout -- megatron/core/__init__.py`"
        )
    names = tuple(name.strip('"') for name in match["names"].split(", "))
    return Content(b"".join(lines[:index] + lines[index + 1 :]), HookLine(names, match["version"], match["sha256"]))
