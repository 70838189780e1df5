"""Where a run is recorded, and that it is taken back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from megacpp_mcore.config import Observability, PluginConfig
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model import preset
from megacpp_mcore.observe import loop, run
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.listener import Listener

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


class Heard(Listener):
    def __init__(self) -> None:
        self.ends: list[BaseException | None] = []

    def on_end(self, error: BaseException | None) -> None:
        self.ends.append(error)


def test_a_megatron_without_a_function_is_refused_and_the_listeners_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def stock() -> str:
        return "stock"

    module = ModuleType("a_training_loop")
    module.train = stock  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    heard = Heard()
    told = loop.Told(Clock(), [heard])
    seams = [loop.Seam(module.__name__, "train"), loop.Seam(module.__name__, "Steps.train_step")]
    said = r"a_training_loop has no Steps\.train_step.*--no-observe"
    with pytest.raises(LaunchError, match=said) as refused, loop.replaced(seams, told, {}):
        raise AssertionError("it observes a loop that it does not know")
    assert module.train is stock
    assert heard.ends == [refused.value]
    with loop.replaced(seams[:1], told, {}):
        assert module.train is not stock
        assert module.train() == "stock"
    assert module.train is stock
    assert heard.ends == [refused.value, None]
