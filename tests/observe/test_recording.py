"""Where a run is recorded, what of its loop is timed and as what, and that it is taken back."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.callback import callback_handler

from megacpp_mcore.errors import DataError, LaunchError
from megacpp_mcore.model import preset
from megacpp_mcore.nemo_recipes import bridge_loop
from megacpp_mcore.observe import events, goodput, loop, recording
from megacpp_mcore.observe.clock import Clock, Phase, compilation_timed
from megacpp_mcore.observe.events import Listener
from megacpp_mcore.settings import Observability, PluginConfig
from tests.observe.recorded import LAUNCHED

OFF = PluginConfig(Path("file"), "nam56r_tiny", preset("nam56r_tiny"), observability=Observability(enabled=False))
PROFILED = dataclasses.replace(OFF, observability=Observability(profile="2-3"))


@pytest.mark.parametrize(
    ("words", "options", "folder", "why"),
    [
        (["--save", "ck"], {}, "ck/observe", "next to its checkpoints"),
        (["--save=a", "--save", "ck", "--lr", "1"], {}, "ck/observe", "next to its checkpoints"),
        (["--save", "ck"], {"observe": "here"}, "here", "--observe"),
        (["--save", "ck"], {"no_observe": True}, None, "--no-observe"),
        (["--save", ""], {}, None, "it saves no checkpoint"),
        (["--save", "ck"], {"settings": OFF}, None, "observability.enabled is false"),
        ([], {"settings": OFF, "observe": "here"}, "here", "--observe"),
    ],
)
def test_the_folder_of_a_run(words: list[str], options: dict[str, Any], folder: str | None, why: str) -> None:
    chosen = recording.choose(words, **options)
    assert chosen.folder == (None if folder is None else Path(folder))
    assert why in chosen.describe()


@pytest.mark.parametrize(
    ("words", "options", "named"),
    [
        ([], {"observe": "here", "no_observe": True}, "--observe here and --no-observe"),
        ([], {"observe": ""}, "--observe "),
        (["--train-iters", "99"], {"observe": "here", "profile": "100-200"}, "100-200 .* 99"),
        ([], {"profile": "1-2"}, "1-2 .*--observe DIR"),
        ([], {"observe": "here", "profile": ""}, "''"),
        ([], {"observe": "here", "profile": "", "settings": PROFILED}, "''"),
    ],
)
def test_what_a_run_cannot_do_is_refused_at_its_start(words: list[str], options: dict[str, Any], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        recording.choose(words, **options)


def test_the_steps_that_are_profiled_are_those_of_the_command_line_or_of_the_settings() -> None:
    words = ["--train-iters", "100"]
    assert recording.choose(words, observe="here", profile="100-200", settings=PROFILED).details.profile == "100-200"
    assert recording.choose(words, observe="here", settings=PROFILED).details.profile == "2-3"


def a_listener(**errors: BaseException) -> Any:
    """Return a listener that records its calls and raises ``errors``, by method name."""
    listener = mock.create_autospec(Listener, instance=True)
    for name, error in errors.items():
        getattr(listener, name).side_effect = error
    return listener


def test_a_megatron_without_a_function_is_refused_and_the_listeners_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def stock() -> str:
        return "stock"

    module = ModuleType("a_training_loop")
    module.train = stock  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    heard = a_listener()
    notifier = loop.Notifier(Clock(), [heard])
    seams = [loop.Seam(module.__name__, name, loop.timed(Phase.STEP)) for name in ("train", "Steps.train_step")]
    message = r"a_training_loop has no Steps\.train_step.*--no-observe"
    with pytest.raises(LaunchError, match=message) as refused, loop.replaced(seams, notifier):
        raise AssertionError("it observes a loop that it does not know")
    assert module.train is stock
    assert heard.method_calls == [mock.call.on_end(refused.value)]
    with loop.replaced(seams[:1], notifier):
        assert module.train is not stock
        assert module.train() == "stock"
    assert module.train is stock
    assert heard.method_calls[1:] == [mock.call.on_end(None)]


def test_what_cannot_be_written_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    (tmp_path / "run").write_text("")
    chosen = recording.choose([], observe=str(tmp_path / "run"))
    with pytest.raises(DataError, match=str(tmp_path / "run")), recording.observed(chosen, LAUNCHED):
        raise AssertionError("it records there")


@pytest.mark.parametrize(("where", "step"), [("on_model", 0), ("on_step_begin", 1), ("on_step", 1), ("on_end", 2)])
def test_what_fails_hears_of_nothing_more_but_its_end_and_training_goes_on(
    where: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    error = LookupError("of its own\nand its details")
    failing, sound = a_listener(**{where: error}), a_listener()
    notifier = loop.Notifier(Clock(), [failing, sound])
    with loop.replaced([], notifier):
        notifier.notify(lambda listener: listener.on_model([], None))
        for number in (1, 2):
            notifier.notify_begin(number)
            logged = {"loss_dict": {}, "grad_norm": None, "learning_rate": None, "skipped_iter": 0}
            notifier.notify_step(logged, number, 512 * number)
    steps = ["on_step_begin", "on_step"]
    everything = ["on_model", *steps, *steps, "on_end"]
    names = [call[0] for call in failing.method_calls]
    assert names == [*everything[: everything.index(where) + 1], "on_end"]
    assert failing.on_end.call_args == mock.call(error)
    assert [call[0] for call in sound.method_calls if call[0] != "on_failure"] == everything
    assert sound.on_end.call_args == mock.call(None)
    (failure,) = sound.on_failure.call_args.args
    assert failure.endswith(f" failed in step {step} and recorded nothing more: LookupError: of its own")
    assert f"{failure}; training is not affected" in caplog.text


def test_the_user_s_interrupt_is_no_failure_of_a_listener() -> None:
    interrupted = a_listener(on_step_begin=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        loop.Notifier(Clock(), [interrupted]).notify_begin(1)


@pytest.mark.parametrize("seams", [loop.STOCK, bridge_loop.SEAMS], ids=["stock", "bridge"])
@pytest.mark.parametrize(
    ("name", "around", "phase"),
    [
        ("RerunDataIterator.__next__", Phase.STEP, Phase.DATA),
        ("RerunDataIterator.__next__", Phase.EVALUATION, Phase.EVALUATION),
        ("load_checkpoint", Phase.STARTUP, Phase.LOAD),
        ("save_checkpoint_and_time", Phase.IDLE, Phase.SAVE),
        ("evaluate_and_print_results", Phase.IDLE, Phase.EVALUATION),
    ],
)
def test_what_a_function_of_the_loop_is_timed_as(seams: Sequence[loop.Seam], name: str, around: Phase, phase: Phase) -> None:
    clock = Clock()
    clock.become(around)
    seam = next(seam for seam in seams if seam.name == name)
    assert seam.handler(loop.Notifier(clock, []), lambda: clock.phase) is phase
    assert clock.phase is around


@pytest.mark.parametrize(("asynchronous", "phase"), [(True, Phase.SAVE), (False, Phase.IDLE)])
def test_the_wait_for_an_asynchronous_save_is_part_of_it(
    asynchronous: bool, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.training
    from megatron.training import training

    def finalize(global_state: object = None, ckpt_cfg: object = None, **_: object) -> None:
        phases.append(clock.phase)

    clock, phases = Clock(), []
    settings = SimpleNamespace(async_save=asynchronous)
    monkeypatch.setattr(megatron.training, "get_args", lambda: settings)
    monkeypatch.setattr(training, "maybe_finalize_async_save", finalize)
    with loop.Loop().observing(clock, []):
        clock.become(Phase.IDLE)
        training.maybe_finalize_async_save(blocking=True, terminate=True)
    (seam,) = (seam for seam in bridge_loop.SEAMS if seam.name == "maybe_finalize_async_save")
    seam.handler(loop.Notifier(clock, []), finalize, global_state=None, ckpt_cfg=settings)
    assert phases == [phase, phase]
    assert clock.phase is Phase.IDLE


@pytest.mark.parametrize("where", [(loop.STOCK, "print_datetime"), (bridge_loop.SEAMS, "barrier_and_log")])
def test_an_end_before_the_last_step_is_noted_in_the_words_of_the_loop(
    tmp_path: Path, where: tuple[Sequence[loop.Seam], str]
) -> None:
    seams, name = where
    (seam,) = (seam for seam in seams if seam.name == name)
    stops = [f"exiting program {why}" for why in ("after receiving SIGTERM.", "after 3.1 minutes", "at iteration 3")]
    for number, line in enumerate(["after training is done", *stops]):
        log = events.Log(tmp_path / str(number), 0, 1, Clock())
        notifier, printed = loop.Notifier(log.clock, [goodput.Recorder(log, with_losses=False)]), []
        seam.handler(notifier, printed.append, line)
        notifier.end(SystemExit, SystemExit(0), None)
        log.close()
        ((start,),) = events.read(tmp_path / str(number)).values()
        assert printed == [line]
        assert (start.how, start.facts) == (("stopped", {"stopped": line}) if number else ("finished", {}))


class Writer:
    """Stands for TensorBoard's, which need not be installed."""

    def __init__(self) -> None:
        self.written: list[tuple[str, object]] = []

    def add_scalar(self, tag: str, value: object, step: int) -> None:
        self.written.append((tag, value))


def test_losses_are_noted_of_what_the_writer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer keeps its class, the only one Megatron writes timers to; values that are not numbers are passed through."""
    from megatron.core import timers

    monkeypatch.setattr(timers, "SummaryWriter", Writer)
    monkeypatch.setattr(timers.Timers, "_get_global_min_max_time", lambda *_: {"forward": (1.0, 2.0)})
    tap, writer = loop.ScalarTap(), Writer()
    for number in (1, 2):  # Megatron hands out the same writer every time
        assert tap.tap(writer) is writer
        writer.add_scalar("a loss", "none", number)
    writer.add_scalar("z_loss", 2, 1)
    timers.Timers(0, "max").write(["forward"], writer, 3)
    assert tap.values == {"z_loss": 2.0}
    assert writer.written == [("a loss", "none"), ("a loss", "none"), ("z_loss", 2), ("forward-time", 2.0)]
    tap.restore()
    assert "add_scalar" not in vars(writer)
    tap.tap(None).add_scalar("z_loss", 3, 1)
    assert tap.values == {"z_loss": 3.0}


def test_torch_compile_forward_and_deferred_backward_are_told() -> None:
    torch._dynamo.reset()
    clock = Clock()
    clock.become(Phase.STEP)
    phases: list[Phase] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        phases.append(clock.phase)
        return graph.forward

    with compilation_timed(clock):
        compiled = torch.compile(lambda x: (x * 2).sin().sum(), backend=backend)
        compiled(torch.ones(3, requires_grad=True)).backward()
        assert clock.phase is Phase.STEP
        compiled(torch.ones(3, requires_grad=True))
    assert phases == [Phase.COMPILE]
    taken = clock.take()
    assert taken[Phase.COMPILE] > 0
    assert callback_handler.start_callbacks == callback_handler.end_callbacks == []


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_kernel_s_compilation_and_tuning_are_told_and_other_hooks_still_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that a third-party hook loads from a cache does not count as compiled."""
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    clock = Clock()
    clock.become(Phase.STEP)
    seen: list[str] = []
    hooks, bench = knobs.runtime, Autotuner._bench
    monkeypatch.setattr(hooks, "jit_cache_hook", lambda key: seen.append("before") or key == "cached")
    monkeypatch.setattr(hooks, "jit_post_compile_hook", lambda key: seen.append("after"))
    with compilation_timed(clock):
        assert not hooks.jit_cache_hook(key="new")
        assert clock.phase is Phase.JIT
        hooks.jit_post_compile_hook(key="new")
        assert clock.phase is Phase.STEP
        assert hooks.jit_cache_hook(key="cached")
        assert clock.phase is Phase.STEP
        assert Autotuner._bench is not bench
    assert seen == ["before", "after", "before"]
    hooks.jit_cache_hook(key="new")
    assert clock.phase is Phase.STEP
    assert Autotuner._bench is bench
