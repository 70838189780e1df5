"""The one line that a checkout's ``megatron/core/__init__.py`` gets: its text, and how it goes into bytes and out again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megacpp_mcore.errors import PatchError

MARK = "megacpp-mcore patch hook"
_NAME = r'"[a-z0-9]+(?:-[a-z0-9]+)*"'
_CALL = '__import__("megacpp_mcore.patches.hook", fromlist=["install"]).install(__file__, '
_UNDO = "undo with: megacpp-mcore patch revert --checkout DIR"
_WHOLE = re.compile(
    re.escape(_CALL) + rf'\[(?P<names>{_NAME}(?:, {_NAME})*)\], version="(?P<version>[\w.+!-]+)", '
    rf'seal="(?P<seal>[0-9a-f]{{16}})"\)  # {MARK}; SHA-256 without it (?P<sha256>[0-9a-f]{{64}}); {re.escape(_UNDO)}'
)
# Anything that looks as if it had been our line: it must then be whole.
_SUSPECT = re.compile(rf"megacpp_mcore\.patches\.hook|{MARK}".encode())
_NEWLINE = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class HookLine:
    """What the line says.

    Attributes:
        names: the patches, in the order in which they were asked for.
        version: of the megacpp-mcore that wrote it.
        seal: of the named records in that copy (:meth:`megacpp_mcore.patches.machinery.registry.Registry.seal`).
        sha256: of the file without the line.
    """

    names: tuple[str, ...]
    version: str
    seal: str
    sha256: str

    def render(self) -> str:
        """The line, without a newline: one statement and a comment, in ASCII."""
        names = ", ".join(f'"{name}"' for name in self.names)
        return (
            f'{_CALL}[{names}], version="{self.version}", seal="{self.seal}")'
            f"  # {MARK}; SHA-256 without it {self.sha256}; {_UNDO}"
        )


@dataclass(frozen=True)
class Content:
    """A file taken apart: the bytes without the line, and the line, if there is one."""

    without: bytes
    hook: HookLine | None
    last: bool = True
    """Whether nothing follows the line."""


def add(content: bytes, line: HookLine) -> bytes:
    """``content`` with ``line`` as its last line, in its own kind of newline.

    Where ``content`` has no final newline the result has none either: this is how :func:`take_apart` knows.
    """
    text = line.render().encode("ascii")
    newlines = _NEWLINE.findall(content)
    if content.endswith((b"\n", b"\r")):
        return content + text + newlines[-1]
    separator = (newlines or [b"\n"])[0] if content else b""
    return content + separator + text


def take_apart(content: bytes) -> Content:
    """Split a file into what it is without our line, and the line; the inverse of :func:`add`.

    Raises:
        PatchError: there is something of our line that is not whole, or there are two.
    """
    found = [(start, end, text) for start, end, text in _lines(content) if _SUSPECT.search(text)]
    if not found:
        return Content(content, None)
    start, end, text = found[0]
    match = _WHOLE.fullmatch(text.decode("latin-1"))
    if match is None or len(found) > 1:
        shown = ", ".join(str(content[:start].count(b"\n") + 1) for start, _, _ in found)
        raise PatchError(
            f"the hook line of megacpp-mcore is damaged (line {shown}): expected one whole line as "
            "`megacpp-mcore patch apply` wrote it; take it out by hand, or restore the file with "
            "`git checkout -- megatron/core/__init__.py`"
        )
    names = tuple(name.strip('"') for name in match["names"].split(", "))
    line = HookLine(names, match["version"], match["seal"], match["sha256"])
    head, tail = content[:start], content[end:]
    newline = _NEWLINE.match(tail)
    if newline is None:
        # No newline after it: then there was none at the end of the file, and the one before it is ours.
        head = head.removesuffix(b"\r\n") if head.endswith(b"\r\n") else head[:-1]
    return Content(
        head + tail[newline.end() if newline else 0 :], line, last=newline is None or newline.end() == len(tail)
    )


def _lines(content: bytes) -> list[tuple[int, int, bytes]]:
    """(start, end, text) of every line, without its newline; newlines are those of Python source."""
    bounds = [(match.start(), match.end()) for match in _NEWLINE.finditer(content)]
    starts = [0, *(end for _, end in bounds)]
    ends = [*(start for start, _ in bounds), len(content)]
    return [(start, end, content[start:end]) for start, end in zip(starts, ends, strict=True)]
