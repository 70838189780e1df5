"""What every test shares: one thread a process, the Megatron-LM checkout, and what the summary says was not run."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Before anything imports torch: several workers share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else all that is imported to collect the tests is gone through again and again.
gc.set_threshold(50_000)
# Else argparse has gettext look for a catalogue of translations for every text of a parser, and asks for the terminal's size.
os.environ |= {"LANGUAGE": "C", "COLUMNS": "80", "LINES": "24"}

# What a user's shell may name is none of the tests' business.
for name in ("MEGACPP_CONFIG", "MEGACPP_DISABLE_TE"):
    os.environ.pop(name, None)

# The same examples in every run, however long one takes.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

# A shell's background jobs start with Ctrl-C ignored, and so would all that they start; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An extension that Megatron builds: in a folder of the tests' own, without what a killed run of them has left there.
_EXTENSIONS = Path(__file__).parents[1] / "build" / "torch_extensions"
os.environ["TORCH_EXTENSIONS_DIR"] = str(_EXTENSIONS)


def forget_the_killed(extensions: Path) -> None:
    """Delete the locks of builds there, but for those that a launch still holds."""
    for lock in extensions.glob("*/lock"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.unlink()


forget_the_killed(_EXTENSIONS)

_GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed each test alike, whatever ran before it: torch's CPU generator has a different seed in every process."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(1234)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The CPU lane and Megatron's process groups for the tests of a module, and a folder for what they write."""
    from tests import stock  # brings torch

    folder = tmp_path_factory.mktemp("process")
    with stock.one_process(folder / "store"):
        yield folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of :mod:`tests.tiny_run` and its file of options, in a folder."""
    from tests import tiny_run

    return tiny_run.make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def megatron_lm() -> Path:
    """The root of the Megatron-LM checkout (core_v0.19.0) that MEGATRON_LM names."""
    named = os.environ.get("MEGATRON_LM")
    if not named:
        pytest.skip("MEGATRON_LM is not set; it names a Megatron-LM checkout (tag core_v0.19.0)")
    root = Path(named).resolve()
    if not (root / "pretrain_gpt.py").is_file() or not (root / "megatron" / "core").is_dir():
        pytest.fail(f"MEGATRON_LM={named} is not a Megatron-LM checkout: no pretrain_gpt.py and megatron/core there")
    return root


@pytest.fixture(scope="session")
def bridge_python() -> Path:
    """The Python of an environment with Megatron-Bridge, which MEGACPP_BRIDGE_PYTHON names; ``make bridge`` prints one."""
    return _python_of("bridge")


@pytest.fixture(scope="session")
def nemo_run_python() -> Path:
    """The Python of an environment with nemo-run, which MEGACPP_NEMO_RUN_PYTHON names; ``make nemo-run`` prints one."""
    return _python_of("nemo-run")


def _python_of(environment: str) -> Path:
    variable = f"MEGACPP_{environment.upper().replace('-', '_')}_PYTHON"
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} is not set; it names the Python that `make {environment}` prints")
    if not os.access(named, os.X_OK):
        pytest.fail(f"{variable}={named} is no program; set it to the Python that `make {environment}` prints")
    return Path(named)


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that forks, whose imports take as long as it does to collect the tests."""
    if hasattr(config, "workerinput") and "not slow" not in config.option.markexpr:
        from tests import forks

        forks.server(sys.executable, os.environ.get("TRITON_INTERPRET"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a GPU by its folder and what needs a checkout by its fixture; without a GPU, say so and skip."""
    gpu_files = {path for path in {item.path for item in items} if _GPU_TESTS in path.parents}
    for item in items:
        if "megatron_lm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.checkout)
        if {"bridge_python", "nemo_run_python"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.bridge)
        if item.path in gpu_files:
            item.add_marker(pytest.mark.gpu)
    # Files with slow tests first, so that --dist loadfile does not end on a single busy worker.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of the garbage collector's way."""
    gc.freeze()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line each for the tests that need what a laptop may lack, whether they ran or not."""
    for marker, tests, needs in (
        ("gpu", "tests in tests/gpu", "run `pytest tests/gpu` on a machine with an NVIDIA GPU"),
        ("checkout", "tests on a Megatron-LM checkout", "set MEGATRON_LM to one"),
        ("bridge", "tests with Megatron-Bridge or nemo-run", "run `make test-bridge`"),
        ("exhaustive", "exhaustive tests", "run `make test-exhaustive`"),
    ):
        ran = _count(terminalreporter, ("passed", "failed", "error"), marker)
        terminalreporter.write_line(f"{tests}: {ran} ran" if ran else f"{tests}: NONE ran; {needs}")


def _count(terminalreporter: pytest.TerminalReporter, outcomes: Iterable[str], marker: str) -> int:
    reports = [report for outcome in outcomes for report in terminalreporter.stats.get(outcome, [])]
    return len({report.nodeid for report in reports if marker in getattr(report, "keywords", {})})
