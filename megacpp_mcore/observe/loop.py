"""The one seam to a training loop: listeners hear what the loop does while it happens; nothing else changes.

:func:`observing` wraps the functions of ``megatron.training.training`` that the loop looks up by name, hands on what they are
given and return, and puts them back. Written against megatron-core 0.19.2 and Megatron-LM core_v0.19.0; a function that is not
there any more is an error before training starts. :class:`Loop` is what others have to know of the loop that trains;
:mod:`megacpp_mcore.observe.loop_bridge` is that of Megatron-Bridge.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model.training import GPT
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.events import Listener, Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seam:
    """One function of the loop.

    Attributes:
        module: where the loop looks it up.
        name: its name there, dotted for a method.
        phase: what the process is in while it runs, or None.
        within: the phases in which that holds; anywhere if empty.
    """

    module: str
    name: str
    phase: Phase | None = None
    within: frozenset[Phase] = frozenset()


_TRAINING = "megatron.training.training"
STOCK = (
    Seam(_TRAINING, "setup_model_and_optimizer"),
    Seam(_TRAINING, "load_checkpoint", Phase.LOAD),
    Seam(_TRAINING, "train"),
    Seam(_TRAINING, "train_step", Phase.STEP),
    Seam(_TRAINING, "training_log"),
    Seam(_TRAINING, "save_checkpoint", Phase.SAVE),
    Seam(_TRAINING, "save_checkpoint_and_time", Phase.SAVE),
    Seam(_TRAINING, "maybe_finalize_async_save", Phase.SAVE),
    Seam(_TRAINING, "evaluate_and_print_results", Phase.EVALUATION),
    Seam("megatron.core.rerun_state_machine", "RerunDataIterator.__next__", Phase.DATA, frozenset({Phase.STEP})),
)
"""The functions of Megatron's own loop."""


class Loop(ABC):
    """A loop that trains, as those see it who record a run."""

    @abstractmethod
    def observing(self, clock: Clock, listeners: Sequence[Listener]) -> AbstractContextManager[None]:
        """Run the clock's phases by what the loop does in this process, and notify ``listeners``, until the context ends.

        Raises:
            LaunchError: the loop has not the functions that it has to have; nothing has been replaced.
        """

    @abstractmethod
    def arguments(self) -> Any:
        """What the run was given, by the names of stock Megatron's arguments; known once there is a model."""

    @abstractmethod
    def describe_model(self, host: str) -> tuple[object, ...]:
        """What :func:`megacpp_mcore.arguments.lowering.matching_preset` knows the run's model by, built on ``host``."""

    @abstractmethod
    def writers(self) -> tuple[Any, Any]:
        """TensorBoard's writer and W&B's run in this process, each None where there is none."""


class StockLoop(Loop):
    """Megatron's own."""

    def observing(self, clock: Clock, listeners: Sequence[Listener]) -> AbstractContextManager[None]:
        """See :func:`observing`."""
        return observing(clock, listeners)

    def arguments(self) -> Any:
        """As Megatron has read them."""
        from megatron.training import get_args

        return get_args()

    def describe_model(self, host: str) -> tuple[object, ...]:
        """The configuration that Megatron makes of its arguments."""
        from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

        described = (gpt_config_from_args if host == GPT else hybrid_config_from_args)(self.arguments())
        return (described.transformer, described)

    def writers(self) -> tuple[Any, Any]:
        """Megatron's global ones."""
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        return get_tensorboard_writer(), get_wandb_writer()


@contextlib.contextmanager
def observing(clock: Clock, listeners: Sequence[Listener]) -> Iterator[None]:
    """Run the clock's phases by what stock Megatron does in this process, and notify ``listeners``, until the context ends.

    Raises:
        LaunchError: Megatron has no function of one of the names; nothing has been replaced.
    """
    seams = _StockSeams(clock, listeners)
    special = {
        "setup_model_and_optimizer": seams.model,
        "train": seams.loop,
        "train_step": seams.step,
        "training_log": seams.logged,
        "maybe_finalize_async_save": seams.finalized,
    }
    with replaced(STOCK, seams, special):
        yield


@contextlib.contextmanager
def replaced(seams: Sequence[Seam], notifier: Notifier, special: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Put functions that notify in the place of those of ``seams``, and those back when the context ends, of which it notifies.

    Args:
        seams: what is replaced.
        notifier: whose listeners hear of it.
        special: what makes the replacement, by name; of the other seams, only the time is taken.

    Raises:
        LaunchError: a function is not there; nothing has been replaced.
    """
    with contextlib.ExitStack() as stack:
        stack.push(notifier.end)  # first, so that the listeners hear of a missing function, too
        places = [(seam, *_resolve(seam)) for seam in seams]
        for seam, holder, name, stock in places:
            setattr(holder, name, special[seam.name](stock) if seam.name in special else notifier.timed(stock, seam))
            stack.callback(setattr, holder, name, stock)
        yield


def _resolve(seam: Seam) -> tuple[Any, str, Callable[..., Any]]:
    """The object that holds a seam's function, the function's name in it, and the function."""
    __import__(seam.module)
    holder: Any = sys.modules[seam.module]
    *path, name = seam.name.split(".")
    try:
        for part in path:
            holder = vars(holder)[part]
        return holder, name, vars(holder)[name]
    except KeyError as error:
        raise LaunchError(
            f"this Megatron's {seam.module} has no {seam.name}, by which a run is observed; use megatron-core 0.19 (and "
            "megatron-bridge 0.6), or switch it off with --no-observe"
        ) from error


class Notifier:
    """Notifies listeners of what happens in a loop; what stands in for the loop's functions calls it."""

    def __init__(self, clock: Clock, listeners: Sequence[Listener]) -> None:
        self.clock = clock
        self._listeners = tuple(listeners)
        self._sound = list(listeners)
        self._step = 0
        self._resumed_at: int | None = None

    def timed(self, stock: Callable[..., Any], seam: Seam) -> Callable[..., Any]:
        """``stock`` in the seam's phase."""
        clock, phase, within = self.clock, seam.phase, seam.within

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            if phase is None or (within and clock.phase not in within):
                return stock(*args, **kwargs)
            clock.enter(phase)
            try:
                return stock(*args, **kwargs)
            finally:
                clock.leave(phase)

        return run

    def notify_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """The model stands, a checkpoint is loaded."""
        self.notify(lambda listener: listener.on_model(chunks, optimizer))

    def notify_begin(self, number: int) -> None:
        """Step ``number`` begins."""
        self._step = number
        self.notify(lambda listener: listener.on_step_begin(number))

    def notify_step(self, given: Mapping[str, Any], scalars: Mapping[str, float], number: int, tokens: int) -> None:
        """A step was logged.

        Args:
            given: the arguments of ``training_log``, by name.
            scalars: what it gave to a writer; of these, the auxiliary losses that it computes itself are wanted.
            number: of the step, 1-based.
            tokens: trained on since step 0.
        """
        try:
            step = self._step_of(given, scalars, number, tokens)
        except Exception:
            logger.exception("step %d is not recorded; training is not affected", number)
            return
        self.notify(lambda listener: listener.on_step(step))

    def _step_of(self, given: Mapping[str, Any], scalars: Mapping[str, float], number: int, tokens: int) -> Step:
        if self._resumed_at is None:
            self._resumed_at = number - 1
        losses = {name: float(value) for name, value in given["loss_dict"].items()}
        losses |= {name: value for name, value in scalars.items() if name.endswith("loss") and name not in losses}
        grad_norm, learning_rate = given["grad_norm"], given["learning_rate"]
        return Step(
            step=number,
            resumed_at=self._resumed_at,
            time_s=time.time(),
            tokens=tokens,
            losses=losses,
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=None if learning_rate is None else float(learning_rate),
            skipped=bool(given["skipped_iter"]),
        )

    def notify(self, call: Callable[[Listener], None]) -> None:
        """Call those that have not failed; one that does hears of nothing more but the end: recording must not end training."""
        for listener in tuple(self._sound):
            try:
                call(listener)
            except Exception as error:
                logger.exception(
                    "%s failed in step %d and records nothing more; training is not affected",
                    type(listener).__name__,
                    self._step,
                )
                self._sound.remove(listener)
                self._notify_failure(listener, error)

    def _notify_failure(self, failed: Listener, error: Exception) -> None:
        for listener in self._listeners:
            try:
                listener.on_failure(failed, error, self._step)
            except Exception:
                logger.exception("%s could not take in that %s failed", type(listener).__name__, type(failed).__name__)

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Everyone hears of the end, whatever happens to one; a status that a script exits with is no error."""
        quiet = isinstance(error, SystemExit) and not error.code
        for listener in self._listeners:
            try:
                listener.on_end(None if quiet else error)
            except Exception as failure:
                logger.exception("%s could not end what it records; training is not affected", type(listener).__name__)
                self._notify_failure(listener, failure)


class _StockSeams(Notifier):
    """The functions that stand in for Megatron's."""

    def model(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``setup_model_and_optimizer``, which returns the model's chunks and the optimizer first."""

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            made = stock(*args, **kwargs)
            self.notify_model(made[0], made[1])
            return made

        return run

    def loop(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``train``: start-up is over."""

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.clock.become(Phase.IDLE)
            return stock(*args, **kwargs)

        return run

    def step(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``train_step``, whose number is one more than that of the iterations that are done."""
        from megatron.training import get_args

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.notify_begin(get_args().curr_iteration + 1)
            with self.clock.within(Phase.STEP):
                return stock(*args, **kwargs)

        return run

    def finalized(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``maybe_finalize_async_save``, called every step, which is part of a save only with ``--async-save``."""
        from megatron.training import get_args

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.clock.within(Phase.SAVE) if get_args().async_save else contextlib.nullcontext():
                return stock(*args, **kwargs)

        return run

    def logged(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``training_log``, and the scalars that it gives to the writer it asks for."""
        from megatron.training import get_args, training

        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            get_writer, scalars = training.get_tensorboard_writer, Scalars()
            with scalars:
                training.get_tensorboard_writer = lambda: scalars.tapped(get_writer())
                try:
                    result = stock(*args, **kwargs)
                finally:
                    training.get_tensorboard_writer = get_writer
            options = get_args()
            tokens = options.consumed_train_samples * options.seq_length
            self.notify_step(given, scalars.values, given["iteration"], tokens)
            return result

        return run


class Scalars:
    """The named numbers that a TensorBoard writer is given while this is entered; it stands in where there is no writer."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._tapped: dict[int, Any] = {}
        self._restored = contextlib.ExitStack()

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *_: object) -> None:
        self._restored.close()

    def tapped(self, writer: Any) -> Any:
        """``writer``, whose numbers are noted until the end; this object in place of None."""
        if writer is None:
            return self
        if id(writer) not in self._tapped:
            self._tapped[id(writer)] = writer
            stock = writer.add_scalar

            def add_scalar(tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
                self.add_scalar(tag, scalar_value)
                stock(tag, scalar_value, *args, **kwargs)

            with contextlib.suppress(AttributeError):  # one that takes no attribute keeps its numbers to itself
                self._restored.enter_context(mock.patch.object(writer, "add_scalar", add_scalar))
        return writer

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        """Note one named value."""
        with contextlib.suppress(TypeError, ValueError):  # no number: the writer may know what it is
            self.values[tag] = float(scalar_value)
