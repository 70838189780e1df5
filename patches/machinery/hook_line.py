"""A checkout's ``megatron/core/__init__.py``: its own content, and the one line added to it."""

from __future__ import annotations

import hashlib
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
class Content:
    """The file without the line, and what the line says, if there is one.

    Attributes:
        without: the bytes, which end in a newline.
        names: the patches, in the order of the requests; empty without a line.
        version: of the megacpp-mcore that wrote the line.
        sha256: of the file without the line, when that was added.
    """

    without: bytes
    names: tuple[str, ...] = ()
    version: str = ""
    sha256: str = ""

    @property
    def found_sha256(self) -> str:
        """The SHA-256 of the file without the line, as it is now."""
        return hashlib.sha256(self.without).hexdigest()

    @property
    def is_edited(self) -> bool:
        """Whether the rest of the file was changed after the line was added."""
        return bool(self.names) and self.found_sha256 != self.sha256

    def whole(self) -> bytes:
        """Return the file with the line, one statement and a comment in ASCII, as its last; without, if it names nothing."""
        names = ", ".join(f'"{name}"' for name in self.names)
        line = f'{_CALL}[{names}], version="{self.version}")  # {MARK}; SHA-256 without it {self.sha256}; {_UNDO}\n'
        return self.without + line.encode("ascii") * bool(names)


def take_apart(content: bytes) -> Content:
    """Split a file into its content without our line, and the line; the inverse of :meth:`Content.whole`.

    Raises:
        PatchError: our line is damaged, or occurs twice.
    """
    lines = content.splitlines(keepends=True)  # bytes split only at \n, \r\n and \r, as Python source does
    hooks = [index for index, text in enumerate(lines) if _SUSPECT.search(text)]
    if not hooks:
        return Content(content)
    index = hooks[0]
    match = _WHOLE.fullmatch(lines[index].rstrip(b"\r\n").decode("latin-1"))
    if match is None or len(hooks) > 1:
        raise PatchError(
            f"the hook line of megacpp-mcore is damaged (line {', '.join(str(number + 1) for number in hooks)}): expected one "
            "complete line as `megacpp-mcore patch apply` wrote it; delete it by hand, or restore the file with "
            "`git checkout -- megatron/core/__init__.py`"
        )
    names = tuple(name.strip('"') for name in match["names"].split(", "))
    return Content(b"".join(lines[:index] + lines[index + 1 :]), names, match["version"], match["sha256"])
