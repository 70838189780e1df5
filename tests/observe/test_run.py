"""Where a run is recorded, and that it is taken back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megacpp_mcore import policy
from megacpp_mcore.errors import DataError, LaunchError
from megacpp_mcore.model import preset
from megacpp_mcore.observe import events, loop, loop_bridge, run
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.events import Listener, Step
from megacpp_mcore.observe.profile import Profiler
from megacpp_mcore.settings import Observability, PluginConfig

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


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        ([], {"observe": ""}, "--observe was given an empty path"),
        ([], {"record_steps": ""}, "--record-steps was given an empty path"),
        (
            ["--train-iters", "99"],
            {"observe": "here", "profile": "100-200"},
            r"steps 100-200 are to be profiled, and the run ends with step 99",
        ),
    ],
)
def test_what_a_run_cannot_do_is_refused_at_its_start(words: list[str], options: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        run.choose(words, **options)  # type: ignore[arg-type]


def test_steps_of_which_the_run_has_some_are_profiled_and_an_empty_save_is_none() -> None:
    assert run.choose(["--train-iters", "100"], observe="here", profile="100-200").details.profile == "100-200"
    assert run.choose(["--save", ""]).folder is None


class Heard(Listener):
    def __init__(self) -> None:
        self.ends: list[BaseException | None] = []
        self.failures: list[tuple[Listener, Exception]] = []

    def on_end(self, error: BaseException | None) -> None:
        self.ends.append(error)

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        self.failures.append((failed, error))


def test_a_megatron_without_a_function_is_refused_and_the_listeners_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def stock() -> str:
        return "stock"

    module = ModuleType("a_training_loop")
    module.train = stock  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    heard = Heard()
    told = loop.Notifier(Clock(), [heard])
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


def test_all_hear_of_the_end_whatever_happens_to_one(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Listener):
        def on_end(self, error: BaseException | None) -> None:
            raise OSError("the disk is full")

    heard = Heard()
    with loop.replaced([], loop.Notifier(Clock(), [Failing(), heard]), {}):
        pass
    assert heard.ends == [None]
    assert "Failing could not end what it records" in caplog.text
    assert "the disk is full" in caplog.text
    assert [(type(failed), str(error)) for failed, error in heard.failures] == [(Failing, "the disk is full")]


def test_whatever_ends_the_making_of_listeners_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what notes compilation only begins once the listeners hear of the end, whatever ends it; nothing stays open."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    settings = dataclasses.replace(OFF, observability=Observability(heartbeat_s=0.01))
    chosen = run.choose([], observe=str(tmp_path), settings=settings)
    launched = policy.resolve(policy.Run(device="cpu", world_size=1), settings=None, environment={})

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    threads = set(threading.enumerate())
    for holder, name in ((run, "Live"), (run.clocks, "compilation_timed")):
        with monkeypatch.context() as changed:
            changed.setattr(holder, name, interrupted)
            with pytest.raises(KeyboardInterrupt), run.observed(chosen, launched):
                raise AssertionError("it records there")
    assert [start.how for start in events.read(tmp_path)[0]] == ["KeyboardInterrupt"] * 2
    assert set(threading.enumerate()) <= threads
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


@pytest.mark.parametrize("place", ["run", "run/steps"])
def test_what_cannot_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    if place == "run":
        (tmp_path / place).write_text("")
    else:
        (tmp_path / place).mkdir(parents=True)
    steps = str(tmp_path / place) if place != "run" else None
    chosen = run.choose([], observe=str(tmp_path / "run"), record_steps=steps)
    launched = policy.resolve(policy.Run(device="cpu", world_size=1), settings=None, environment={})
    with pytest.raises(DataError, match=str(tmp_path / place)), run.observed(chosen, launched):
        raise AssertionError("it records there")


def test_a_step_that_cannot_be_made_out_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    sound = Failing("nowhere")
    told = loop.Notifier(Clock(), [sound])
    given: dict[str, Any] = {"loss_dict": {}, "grad_norm": None, "learning_rate": None, "skipped_iter": 0}
    told.notify_step({**given, "loss_dict": {"lm loss": "none"}}, {}, 1, 8)
    told.notify_step(given, {}, 2, 16)
    assert sound.told == ["on_step"]
    assert "step 1 is not recorded; training is not affected" in caplog.text


def test_a_scalar_that_is_no_number_is_the_writer_s_matter() -> None:
    written: list[object] = []
    writer = SimpleNamespace(add_scalar=lambda *words: written.append(words))
    stock = writer.add_scalar
    with loop.Scalars() as scalars:
        for number in (1, 2):  # it is given out every time that somebody asks
            assert scalars.tapped(writer) is writer
            writer.add_scalar("text", "none", number)
        writer.add_scalar("number", 2, 1)
    assert writer.add_scalar is stock
    assert scalars.values == {"number": 2.0}
    assert written == [("text", "none", 1), ("text", "none", 2), ("number", 2, 1)]
    with loop.Scalars() as scalars:
        scalars.tapped(None).add_scalar("number", 3, 1)
    assert scalars.values == {"number": 3.0}


class Failing(Heard):
    """Raises an error where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.told: list[str] = []
        self.steps: list[int] = []
        self._where = where

    def on_model(self, chunks: Sequence[object], optimizer: object) -> None:
        self._hear("on_model")

    def on_step_begin(self, number: int) -> None:
        self._hear("on_step_begin")

    def on_step(self, step: Step) -> None:
        self._hear("on_step")

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        super().on_failure(failed, error, step)
        self.steps.append(step)
        self._hear("on_failure")

    def _hear(self, what: str) -> None:
        self.told.append(what)
        if what == self._where:
            raise LookupError(f"in {what}")


@pytest.mark.parametrize(("where", "step"), [("on_model", 0), ("on_step_begin", 1), ("on_step", 1)])
def test_what_fails_hears_of_nothing_more_but_the_end_and_training_goes_on(
    where: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    failing, deaf, sound = Failing(where), Failing("on_failure"), Failing("nowhere")
    told = loop.Notifier(Clock(), [failing, deaf, sound])
    given = {"loss_dict": {}, "grad_norm": None, "learning_rate": None, "skipped_iter": 0}
    with loop.replaced([], told, {}):
        told.notify_model([], None)
        for number in (1, 2):
            told.notify_begin(number)
            told.notify_step(given, {}, number, 512 * number)
    steps = ["on_step_begin", "on_step"]
    everything = ["on_model", *steps, *steps]
    until = everything.index(where) + 1
    assert failing.told == [*everything[:until], "on_failure"]
    for other in (deaf, sound):
        assert [one for one in other.told if one != "on_failure"] == everything
        assert other.told.count("on_failure") == 1
        ((failed, error),) = other.failures
        assert (failed, str(error), other.steps) == (failing, f"in {where}", [step])
    assert [one.ends for one in (failing, deaf, sound)] == [[None]] * 3
    assert f"Failing failed in step {step} and records nothing more; training is not affected" in caplog.text
    assert "Failing could not take in that Failing failed" in caplog.text
    assert f"LookupError: in {where}" in caplog.text


def test_the_user_s_interrupt_is_no_failure_of_a_listener() -> None:
    class Interrupted(Listener):
        def on_step_begin(self, number: int) -> None:
            raise KeyboardInterrupt

    told = loop.Notifier(Clock(), [Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        told.notify_begin(1)


def _named(seams: Sequence[loop.Seam], name: str) -> loop.Seam:
    return next(seam for seam in seams if seam.name == name)


@pytest.mark.parametrize("seams", [loop.STOCK, loop_bridge.SEAMS], ids=["stock", "bridge"])
@pytest.mark.parametrize(
    ("name", "around", "phase"),
    [
        ("RerunDataIterator.__next__", Phase.STEP, Phase.DATA),
        ("RerunDataIterator.__next__", Phase.EVALUATION, Phase.EVALUATION),
        ("RerunDataIterator.__next__", Phase.IDLE, Phase.IDLE),
        ("save_checkpoint_and_time", Phase.IDLE, Phase.SAVE),
        ("evaluate_and_print_results", Phase.IDLE, Phase.EVALUATION),
    ],
)
def test_what_a_function_of_the_loop_is_timed_as(
    seams: Sequence[loop.Seam], name: str, around: Phase, phase: Phase
) -> None:
    clock = Clock()
    clock.become(around)
    timed = loop.Notifier(clock, []).timed(lambda: clock.phase, _named(seams, name))
    assert timed() is phase
    assert clock.phase is around


WAITS = pytest.mark.parametrize(("asynchronous", "phase"), [(True, Phase.SAVE), (False, Phase.IDLE)])


@WAITS
def test_the_wait_for_an_asynchronous_save_is_part_of_it(
    asynchronous: bool, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.training
    from megatron.training import training

    clock = Clock()
    found = []
    monkeypatch.setattr(megatron.training, "get_args", lambda: SimpleNamespace(async_save=asynchronous))
    monkeypatch.setattr(training, "maybe_finalize_async_save", lambda **_: found.append(clock.phase))
    with loop.observing(clock, []):
        clock.become(Phase.IDLE)
        training.maybe_finalize_async_save(blocking=True, terminate=True)
        assert clock.phase is Phase.IDLE
    assert found == [phase]


@WAITS
def test_the_wait_for_an_asynchronous_save_of_bridge_is_part_of_it(asynchronous: bool, phase: Phase) -> None:
    def finalize(global_state: object, ckpt_cfg: object, blocking: bool = False, terminate: bool = False) -> Phase:
        return clock.phase

    clock = Clock()
    clock.become(Phase.IDLE)
    told = loop_bridge._BridgeSeams(clock, [])
    settings = SimpleNamespace(async_save=asynchronous)
    assert told.finalized(finalize)(global_state=None, ckpt_cfg=settings, blocking=True) is phase
    assert clock.phase is Phase.IDLE
    seam = _named(loop_bridge.SEAMS, "maybe_finalize_async_save")
    assert seam.module == "megatron.bridge.training.checkpointing"


class Writer:
    """Stands for TensorBoard's, which need not be installed."""

    def __init__(self) -> None:
        self.written: dict[str, float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written[tag] = value


def test_megatron_writes_its_timers_to_a_writer_that_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import timers

    monkeypatch.setattr(timers, "SummaryWriter", Writer)
    monkeypatch.setattr(timers.Timers, "_get_global_min_max_time", lambda *_: {"forward": (1.0, 2.0)})
    writer = Writer()
    with loop.Scalars() as scalars:
        timers.Timers(0, "max").write(["forward"], scalars.tapped(writer), 3)
    assert writer.written == {"forward-time": 2.0}
    assert scalars.values == {"forward-time": 2.0}


def test_no_steps_to_profile_are_refused_and_leave_those_of_the_settings_alone_where_none_are_named() -> None:
    settings = dataclasses.replace(OFF, observability=Observability(profile="2-3"))
    with pytest.raises(LaunchError, match="the steps to profile are ''; expected the first and the last"):
        run.choose([], observe="here", profile="")
    with pytest.raises(LaunchError, match="the steps to profile are ''; expected the first and the last"):
        run.choose([], observe="here", profile="", settings=settings)
    assert run.choose([], observe="here", settings=settings).details.profile == "2-3"
    assert run.choose([], observe="here", profile="4-5", settings=settings).details.profile == "4-5"


def test_the_profiler_of_a_run_is_on_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    clock = Clock()
    chosen = run.choose([], observe=str(tmp_path), profile="1-1")
    launched = policy.resolve(policy.Run(device="cpu", world_size=1), settings=None, environment={})
    phases: list[Phase] = []

    class Model(list[object]):
        def __iter__(self) -> Iterator[object]:
            phases.append(clock.phase)
            return super().__iter__()

    with contextlib.ExitStack() as stack:
        made = list(run._listeners(chosen, launched, clock, loop.StockLoop(), stack))
        (profiler,) = (one for one in made if isinstance(one, Profiler))
        profiler.on_model(Model(), SimpleNamespace())
        try:
            profiler.on_step_begin(1)
        finally:
            profiler.on_end(LookupError())
    assert set(phases) == {Phase.PROFILE}
