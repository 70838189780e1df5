"""The patches spec-import and dataset-helpers, and what sp-norm-gradients refuses and leaves alone."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.errors import LaunchError, SpecImportError
from megacpp_mcore.patches import dataset_helpers, sp_norm_gradients, spec_import
from tests import stock
from tests.errors import raises


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Megatron's modules, imported once, before a test replaces anything that an import uses."""
    with stock.cpu_lane():
        for patch in (spec_import.PATCH, dataset_helpers.PATCH, sp_norm_gradients.PATCH):
            for edit in patch.edits:
                importlib.import_module(edit.target.partition(":")[0])


@pytest.fixture
def applied() -> Iterator[Callable[[Any], Any]]:
    """Applies the patch of a module, until the test ends."""
    with stock.cpu_lane(), contextlib.ExitStack() as stack:
        yield lambda module: stack.enter_context(stock.patched(module.PATCH))


def upstream_import(words: Any) -> Any:
    return importlib.import_module("megatron.core.transformer.spec_utils").import_module(words)


def test_one_dotted_word_or_two(applied: Callable[[Any], Any]) -> None:
    applied(spec_import)
    for words in (["json.decoder.JSONDecoder"], ["json.decoder", "JSONDecoder"]):
        assert upstream_import(words) is json.JSONDecoder
    assert upstream_import(("json", "decoder")) is json.decoder


def test_upstream_fails_where_the_patch_does_not() -> None:
    """The faults themselves: not worth a patch once this test fails."""
    with pytest.raises(ValueError, match="not enough values to unpack"):
        upstream_import(["json.decoder.JSONDecoder"])
    assert upstream_import(["no_such_package", "spec"]) is None


NOT_IMPORTED = (
    (["no_such_package", "spec"], "", ["no_such_package spec", "'no_such_package'"]),
    (["no_such_package.spec"], "", ["no_such_package spec", "'no_such_package'"]),
    (["json", "nothing"], "", ["json nothing", "'nothing'"]),
    (["json.nothing"], "", ["json nothing", "'nothing'"]),
    (["json"], "spec-form", ["--spec 'json'", "--spec megacpp_mcore.nam56r"]),
    (["local"], "spec-form", ["--spec 'local'"]),
    ([], "spec-form", ["--spec ''"]),
    (["a", "b", "c"], "spec-form", ["--spec 'a b c'", "--spec megacpp_mcore nam56r"]),
    (["a", ""], "spec-form", ["--spec 'a '"]),
    ([".spec"], "spec-form", ["--spec ' spec'"]),
    (["broken_spec", "block"], "", ["no_such_module_at_all"]),
    (["angry_spec.block"], "", ["RuntimeError: not today"]),
)


def test_what_cannot_be_imported_ends_the_run(
    applied: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(spec_import)
    (tmp_path / "broken_spec.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "angry_spec.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for words, code, values in NOT_IMPORTED:
        with raises(SpecImportError, *values, code=code) as raised:
            upstream_import(words)
        if words in (["broken_spec", "block"], ["angry_spec.block"]):
            assert isinstance(raised.value.__cause__, ModuleNotFoundError | RuntimeError)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that upstream's compile_helpers would have run; none of them is."""
    commands: list[list[str]] = []

    def run(command: list[str], *_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def compile_helpers() -> None:
    importlib.import_module("megatron.core.datasets.utils").compile_helpers()


def without_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    # None makes the import fail, as it does in a checkout that has not compiled its helper.
    monkeypatch.setitem(sys.modules, dataset_helpers.HELPER, None)


def test_a_helper_that_is_there_is_not_made(applied: Callable[[Any], Any], made: list[list[str]]) -> None:
    """Upstream runs make whatever is there: in the wheel's folder, which has the compiled helper and no Makefile."""
    place = Path(str(importlib.import_module("megatron.core.datasets.utils").__file__)).parent
    assert not (place / "Makefile").exists()
    assert importlib.import_module(dataset_helpers.HELPER).__file__
    compile_helpers()
    assert made == [["make", "-C", str(place)]]
    applied(dataset_helpers)
    made.clear()
    compile_helpers()
    assert made == []


@pytest.mark.parametrize("source", ["the wheel's", "another", None])
def test_a_folder_without_a_helper(
    applied: Callable[[Any], Any],
    made: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str | None,
) -> None:
    """The wheel's helper serves where the source is the same; another source is made; without one there is nothing to make."""
    utils, helper = (importlib.import_module(name) for name in ("megatron.core.datasets.utils", dataset_helpers.HELPER))
    if source is not None:
        text = (Path(str(utils.__file__)).parent / "helpers.cpp").read_text()
        (tmp_path / "helpers.cpp").write_text(text if source == "the wheel's" else "// another\n")
        (tmp_path / "Makefile").touch()
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    applied(dataset_helpers)
    without_helper(monkeypatch)
    if source is None:
        with raises(LaunchError, "Makefile", "megatron-core"):
            compile_helpers()
        return
    compile_helpers()
    if source == "another":
        assert made == [["make", "-C", str(tmp_path)]]
    else:
        assert made == []
        assert sys.modules[dataset_helpers.HELPER].__file__ == helper.__file__
        assert sys.modules[dataset_helpers.HELPER].build_sample_idx_int32 is not None


def test_every_rank_has_the_helper_before_it_is_needed(
    applied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's start-up step compiles on rank 0 alone; here it is rank 1."""
    import torch

    initialize = importlib.import_module("megatron.training.initialize")
    importlib.import_module(dataset_helpers.HELPER)
    reached: list[bool] = []
    monkeypatch.setattr(initialize, "get_args", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(
        torch.distributed, "barrier", lambda: reached.append(sys.modules[dataset_helpers.HELPER] is not None)
    )
    for patched in (False, True):
        without_helper(monkeypatch)
        if patched:
            applied(dataset_helpers)
        initialize._compile_dependencies()
    assert reached == [False, True]


class Chunk:
    """A model chunk of one marked parameter, with the two things that a schedule reads of it."""

    def __init__(self, **ddp: bool) -> None:
        import torch

        self.weight = torch.nn.Parameter(torch.ones(2))
        vars(self.weight)["sequence_parallel"] = True
        self.config = types.SimpleNamespace(finalize_model_grads_func=None)
        if ddp:
            self.ddp_config = types.SimpleNamespace(**{"overlap_grad_reduce": False, "use_megatron_fsdp": False} | ddp)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        yield "norm.weight", self.weight

    @property
    def gradient(self) -> float:
        assert self.weight.grad is not None
        return self.weight.grad.mean().item()


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's reduction on two ranks that are made up; it doubles the gradients that it is asked for."""

    def reduce(model: list[Any], config: Any, tp_group: Any) -> None:
        for chunk in model:
            for _, parameter in chunk.named_parameters():
                parameter.grad.mul_(2)

    finalize = importlib.import_module(sp_norm_gradients._FINALIZE)
    once = sp_norm_gradients._reduce_once(reduce)
    monkeypatch.setattr(finalize, "_allreduce_non_tensor_model_parallel_grads", once)
    monkeypatch.setattr(sp_norm_gradients, "_tensor_group", lambda groups: types.SimpleNamespace(size=lambda: 2))


def train(chunk: Chunk, **arguments: Any) -> float:
    """A schedule in one line, with the patch on it; the gradient."""
    schedule = sp_norm_gradients._complete_gradients(lambda model, **_: model.weight.sum().backward())
    with stock.cpu_lane():
        schedule(model=chunk, **arguments)
    return chunk.gradient


@pytest.mark.parametrize(
    ("ddp", "arguments", "gradient"),
    [
        ({}, {}, 2.0),
        ({}, {"forward_only": True}, 1.0),  # an evaluation
        # Gradients that are under way to other ranks already.
        ({"overlap_grad_reduce": True}, {}, 1.0),
        ({"use_megatron_fsdp": True}, {}, 1.0),
    ],
)
def test_what_is_summed(ddp: dict[str, bool], arguments: dict[str, Any], gradient: float) -> None:
    """The sum is of this call only: a second one adds as much."""
    chunk = Chunk(**ddp)
    assert train(chunk, **arguments) == gradient
    assert train(chunk, **arguments) == 2 * gradient


def test_calls_with_and_without_finalizing_are_not_mixed() -> None:
    chunk = Chunk()
    train(chunk)
    chunk.config.finalize_model_grads_func = lambda *_: None
    with raises(LaunchError, "config.finalize_model_grads_func", code="gradients-left"):
        train(chunk)
    assert chunk.gradient == 2.0
    chunk.weight.grad = None
    assert train(chunk) == 1.0


def test_a_captured_schedule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    chunk = Chunk()
    schedule = sp_norm_gradients._complete_gradients(lambda model, **_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with raises(LaunchError, "config.finalize_model_grads_func", code="captured"):
        schedule(model=chunk)
