"""Where a run is recorded, and that it is taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_mcore.config import Observability, PluginConfig
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model import preset
from megacpp_mcore.observe import run

OFF = PluginConfig(Path("file"), "nam56r_tiny", preset("nam56r_tiny"), observability=Observability(enabled=False))


@pytest.mark.parametrize(
    ("words", "options", "folder", "why"),
    [
        ([], {}, None, "it saves no checkpoint"),
        (["--save", "ck"], {}, "ck/observe", "beside its checkpoints"),
        (["--save=a", "--save", "ck", "--lr", "1"], {}, "ck/observe", "beside its checkpoints"),
        (["--save", "ck"], {"observe": "here"}, "here", "--observe"),
        (["--save", "ck"], {"off": True}, None, "--no-observe"),
        (["--save", "ck"], {"settings": OFF}, None, "observability.enabled is false"),
        ([], {"settings": OFF, "observe": "here"}, "here", "--observe"),
    ],
)
def test_the_folder_of_a_run(words: list[str], options: dict[str, object], folder: str | None, why: str) -> None:
    chosen = run.choose(words, **options)  # type: ignore[arg-type]
    assert chosen.folder == (None if folder is None else Path(folder))
    assert why in chosen.describe()[0]


def test_both_are_refused() -> None:
    with pytest.raises(LaunchError, match="--observe here and --no-observe were both given"):
        run.choose([], observe="here", off=True)
