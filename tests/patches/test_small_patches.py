"""The patches spec-import and dataset-helpers, and what sp-norm-gradients refuses and leaves alone."""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.errors import LaunchError, SpecImportError
from megacpp_mcore.patches import dataset_helpers, sp_norm_gradients, spec_import
from megacpp_mcore.patches.machinery.registry import Registry
from tests import stock


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Megatron's modules, imported once, before a test replaces anything that an import uses."""
    with stock.cpu_lane():
        for patch in (spec_import.PATCH, dataset_helpers.PATCH, sp_norm_gradients.PATCH):
            for edit in patch.edits:
                importlib.import_module(edit.target.partition(":")[0])


@pytest.fixture
def applied() -> Iterator[Callable[[Any], None]]:
    """Applies the patch of a module, until the test ends."""
    with stock.cpu_lane():
        registry = Registry([spec_import.PATCH, dataset_helpers.PATCH])

        def apply(module: Any) -> None:
            registry.apply([module.PATCH.name])
            registry.verify()

        try:
            yield apply
        finally:
            registry.revert()


# --- spec-import -------------------------------------------------------------------------------------------------------


def upstream_import(words: Any) -> Any:
    return importlib.import_module("megatron.core.transformer.spec_utils").import_module(words)


@pytest.mark.parametrize("words", [["json.decoder.JSONDecoder"], ["json.decoder", "JSONDecoder"], ("json", "decoder")])
def test_one_dotted_word_or_two(applied: Callable[[Any], None], words: Any) -> None:
    applied(spec_import)
    found = upstream_import(words)
    assert found is (json.JSONDecoder if "JSONDecoder" in words[-1] else json.decoder)


def test_upstream_fails_where_the_patch_does_not() -> None:
    """The faults themselves: not worth a patch once this test fails."""
    with pytest.raises(ValueError, match="not enough values to unpack"):
        upstream_import(["json.decoder.JSONDecoder"])
    assert upstream_import(["no_such_package", "spec"]) is None


def test_a_checkouts_import_by_name_is_replaced(applied: Callable[[Any], None]) -> None:
    utilities = importlib.import_module("megatron.training.argument_utils")
    before = utilities.import_module
    applied(spec_import)
    assert utilities.import_module is not before
    assert (
        utilities.import_module
        is upstream_import.__globals__["importlib"].import_module("megatron.core.transformer.spec_utils").import_module
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_package", "spec"], "No module named 'no_such_package'"),
        (["no_such_package.spec"], "No module named 'no_such_package'"),
        (["json", "nothing"], "no attribute 'nothing'"),
        (["json.nothing"], "no attribute 'nothing'"),
        (["json"], "names no module and attribute"),
        (["local"], "names no module and attribute"),
        ([], "names no module and attribute"),
        (["a", "b", "c"], "expected one dotted word such as --spec megacpp_mcore.nam56r, or two"),
        (["a", ""], "names no module and attribute"),
        ([".spec"], "names no module and attribute"),
    ],
)
def test_what_cannot_be_imported_ends_the_run(applied: Callable[[Any], None], words: list[str], message: str) -> None:
    applied(spec_import)
    with pytest.raises(SpecImportError, match=message):
        upstream_import(words)


def test_a_failing_module_keeps_its_cause(
    applied: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(spec_import)
    (tmp_path / "broken_spec.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "angry_spec.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecImportError, match="no_such_module_at_all") as raised:
        upstream_import(["broken_spec", "block"])
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)
    with pytest.raises(SpecImportError, match="RuntimeError: not today"):
        upstream_import(["angry_spec.block"])


# --- dataset-helpers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A datasets folder in the place of the installed one: its source, no Makefile, no compiled helper."""
    utils = importlib.import_module("megatron.core.datasets.utils")
    place = tmp_path / "datasets"
    place.mkdir()
    shutil.copy(Path(str(utils.__file__)).parent / "helpers.cpp", place)
    monkeypatch.setattr(utils, "__file__", str(place / "utils.py"))
    return place


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


def test_upstream_runs_make_whatever_is_there(made: list[list[str]]) -> None:
    """The fault itself, on the wheel: its folder has the compiled helper and no Makefile."""
    utils = importlib.import_module("megatron.core.datasets.utils")
    place = Path(str(utils.__file__)).parent
    assert not (place / "Makefile").exists()
    assert importlib.import_module(dataset_helpers.HELPER).__file__
    compile_helpers()
    assert made == [["make", "-C", str(place)]]


def test_a_helper_that_is_there_is_not_made(applied: Callable[[Any], None], made: list[list[str]]) -> None:
    applied(dataset_helpers)
    compile_helpers()
    assert made == []


def test_the_wheels_helper_serves_a_folder_with_the_same_source(
    applied: Callable[[Any], None], made: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(dataset_helpers)
    wheels = importlib.import_module(dataset_helpers.HELPER).__file__
    (folder / "Makefile").touch()
    without_helper(monkeypatch)
    assert dataset_helpers.ready_helper(folder) == wheels
    assert sys.modules[dataset_helpers.HELPER].build_sample_idx_int32 is not None
    without_helper(monkeypatch)
    compile_helpers()
    assert made == []


def test_another_source_is_made(
    applied: Callable[[Any], None], made: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(dataset_helpers)
    (folder / "Makefile").touch()
    (folder / "helpers.cpp").write_text("// another\n")
    without_helper(monkeypatch)
    assert dataset_helpers.ready_helper(folder) is None
    compile_helpers()
    assert made == [["make", "-C", str(folder)]]


def test_no_helper_and_no_makefile_is_said(
    applied: Callable[[Any], None], made: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(dataset_helpers)
    (folder / "helpers.cpp").unlink()
    without_helper(monkeypatch)
    with pytest.raises(LaunchError, match=r"no Makefile .* reinstall megatron-core"):
        compile_helpers()
    assert made == []


def test_every_rank_has_the_helper_before_it_is_needed(
    applied: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
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


# --- sp-norm-gradients: what it refuses and leaves alone (its sums: tests/distributed) ----------------------------------


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
    def gradient(self) -> list[float]:
        assert self.weight.grad is not None
        return self.weight.grad.tolist()


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which chunks upstream's reduction was asked for, on two ranks that are made up; it doubles their gradients."""
    asked: list[str] = []

    def reduce(model: list[Any], config: Any, tp_group: Any) -> None:
        for chunk in model:
            asked.append(type(chunk).__name__)
            for _, parameter in chunk.named_parameters():
                parameter.grad.mul_(2)

    finalize = importlib.import_module(sp_norm_gradients._FINALIZE)
    once = sp_norm_gradients._reduce_once(reduce)
    monkeypatch.setattr(finalize, "_allreduce_non_tensor_model_parallel_grads", once)
    group = types.SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(sp_norm_gradients, "_tensor_group", lambda groups: group)
    return asked


def train(chunk: Chunk, **arguments: Any) -> None:
    """A schedule in one line, with the patch on it."""
    schedule = sp_norm_gradients._complete_gradients(lambda model, **_: model.weight.sum().backward())
    with stock.cpu_lane():
        schedule(model=chunk, **arguments)


def test_the_sum_is_of_this_call_only(summed: list[str]) -> None:
    chunk = Chunk()
    train(chunk)
    assert chunk.gradient == [2.0, 2.0]
    train(chunk)
    assert chunk.gradient == [4.0, 4.0]
    assert summed == ["_Undistributed"] * 2


def test_evaluation_is_left_alone(summed: list[str]) -> None:
    chunk = Chunk()
    train(chunk, forward_only=True)
    assert (chunk.gradient, summed) == ([1.0, 1.0], [])


@pytest.mark.parametrize("setting", ["overlap_grad_reduce", "use_megatron_fsdp"])
def test_gradients_under_way_are_left_alone(summed: list[str], setting: str) -> None:
    chunk = Chunk(**{setting: True})
    train(chunk)
    assert (chunk.gradient, summed) == ([1.0, 1.0], [])
    wrapped = Chunk(overlap_grad_reduce=False)
    train(wrapped)
    assert (wrapped.gradient, summed) == ([2.0, 2.0], ["Chunk"])


def test_calls_with_and_without_finalizing_are_not_mixed(summed: list[str]) -> None:
    chunk = Chunk()
    train(chunk)
    chunk.config.finalize_model_grads_func = lambda *_: None
    with pytest.raises(LaunchError, match="zero the gradients between"):
        train(chunk)
    assert chunk.gradient == [2.0, 2.0]
    chunk.weight.grad = None
    train(chunk)
    assert (chunk.gradient, len(summed)) == ([1.0, 1.0], 1)


def test_a_captured_schedule_is_refused(summed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    chunk = Chunk()
    schedule = sp_norm_gradients._complete_gradients(lambda model, **_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match=r"config\.finalize_model_grads_func"):
        schedule(model=chunk)
