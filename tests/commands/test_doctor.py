"""The doctor on fake packages: it names every fault and checks every claim."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.core import package_info

from megacpp_mcore.backends import vendor_switches
from megacpp_mcore.commands import cli, doctor, trial
from megacpp_mcore.commands.doctor import ABSENT, BROKEN, COMPONENTS, IMPOSTOR, OFF, WORKS, Component, Finding, examine
from megacpp_mcore.patches.machinery import drift
from megacpp_mcore.patches.machinery.checkout import Checkout
from megacpp_mcore.patches.machinery.registry import default
from tests import forks
from tests.trees import copy_modules, edit, wheel_root

ROOT = Path(__file__).parents[2]
BY_NAME = {component.name: component for component in COMPONENTS}


def package(folder: Path, name: str, text: str = "", distribution: str = "", version: str = "") -> Path:
    """A package on disk, with the metadata that pip would leave."""
    place = folder.joinpath(*name.split("."))
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(text)
    if distribution:
        metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    return place


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """First on the path of this process, and so of the children; with a torch that imports at once."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace as Some\n__version__ = '2.11.0'\nversion = Some(cuda='13.0')\n"
        "backends = Some(cudnn=Some(version=lambda: 91900))\n"
    )
    return tmp_path


def only(*names: str) -> list[Finding]:
    """Return the findings about these components."""
    return examine([BY_NAME[name] for name in names], time_limit_s=60)[1:]


ENGINE = ("transformer_engine", "__version__ = '2.20.2'", "transformer-engine", "2.20.2")


def complete_engine(folder: Path, cudnn: str) -> None:
    """Add to :data:`ENGINE` what it needs to work; it has loaded this cuDNN, torch 9.19.0."""
    package(folder, "transformer_engine.pytorch", "Linear = object")
    package(folder, "transformer_engine.pytorch.utils", f"def get_cudnn_version(): return {cudnn}")


def test_an_apex_that_is_not_nvidias_is_named_and_never_imported(folder: Path) -> None:
    place = package(folder, "apex", f"open({str(folder / 'imported')!r}, 'w')", "apex", "0.9.10.dev0")
    (finding,) = only("apex: optimizers")
    assert (finding.state, finding.version, finding.blocks) == (IMPOSTOR, "0.9.10.dev0", True)
    assert str(place) in finding.reason
    assert "RMSNorm" in finding.reason
    assert "pip uninstall apex" in finding.reason
    assert not (folder / "imported").exists()
    assert doctor.is_healthy([finding]) is False


def test_nvidia_apex_with_and_without_its_extensions(folder: Path) -> None:
    package(folder, "apex", "", "apex", "0.1")
    package(folder, "apex.multi_tensor_apply")
    package(folder, "apex.optimizers", "import amp_C")
    amp_c, optimizers = only("apex: amp_C", "apex: optimizers")
    assert (amp_c.state, optimizers.state, optimizers.blocks) == (ABSENT, BROKEN, False)
    assert "No module named 'amp_C'" in optimizers.reason
    (folder / "amp_C.py").write_text("")
    amp_c, optimizers = only("apex: amp_C", "apex: optimizers")
    assert (amp_c.state, amp_c.version, optimizers.state) == (WORKS, "0.1", WORKS)


def test_deep_gemm_of_another_origin(folder: Path) -> None:
    package(folder, "deep_gemm", "", "deep-gemm", "1.0.0")
    (finding,) = only("deep_gemm")
    assert (finding.state, finding.version, finding.blocks) == (IMPOSTOR, "1.0.0", False)
    assert "`pip uninstall deep-gemm`" in finding.reason


@pytest.mark.exhaustive  # torch is imported, the real one: on a GPU a grouped call would be run
def test_a_deep_gemm_with_its_sources_works(folder: Path) -> None:
    (package(folder, "deep_gemm", "", "deep-gemm", "1.0.0") / "include").mkdir()
    (folder / "torch.py").unlink()
    assert [finding.state for finding in only("deep_gemm")] == [WORKS]


@pytest.mark.parametrize(
    ("value", "state", "reason"),
    [("1", OFF, "MEGACPP_DISABLE_TE=1 disables"), ("0", WORKS, "$"), ("yes", WORKS, "MEGACPP_DISABLE_TE is 'yes'; expected 1")],
)  # fmt: skip
def test_the_switch_of_transformer_engine_is_said_and_one_that_a_launch_refuses_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, state: str, reason: str
) -> None:
    monkeypatch.setenv("MEGACPP_DISABLE_TE", value)
    package(folder, *ENGINE)
    (broken,) = only("transformer-engine")
    assert (broken.state, broken.blocks) == (BROKEN, True)  # Megatron imports it all the same
    assert "No module named 'transformer_engine.pytorch'" in broken.reason
    complete_engine(folder, cudnn="9, 19, 0")
    package(folder, "tilelang")
    finding, other = only("transformer-engine", "tilelang")
    assert re.match(reason, finding.reason)
    assert (finding.state, finding.version, finding.blocks) == (state, "2.20.2", value == "yes")
    assert (other.blocks, other.reason) == (False, "")


def test_another_cudnn_than_torchs_is_said(folder: Path) -> None:
    """With it, Transformer Engine's attention silently runs unfused."""
    package(folder, *ENGINE)
    complete_engine(folder, cudnn="9, 1, 2")
    (finding,) = only("transformer-engine")
    assert finding.state == WORKS
    assert "it loaded cuDNN (9, 1, 2), torch uses (9, 19, 0): " in finding.reason
    assert "CUDNN_HOME" in finding.reason


@pytest.mark.parametrize(("version", "state"), [("0.4.1", BROKEN), ("0.5.0", WORKS)])
def test_resiliency(folder: Path, version: str, state: str) -> None:
    package(folder, "nvidia_resiliency_ext", "", "nvidia-resiliency-ext", version)
    (finding,) = only("nvidia-resiliency-ext")
    assert (finding.state, finding.blocks) == (state, state == BROKEN)
    assert ("0.4.1 breaks" in finding.reason) == (state == BROKEN)


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        *(("megatron-core", version, BROKEN) for version in ("0.18.4", "1.0.0rc1", "local")),
        *(("torch", version, BROKEN) for version in ("2.10.0", "3.0.0+cpu")),
        *(("megatron-core", "0.19.1+abc1234", WORKS), ("torch", "2.11.0+cpu", WORKS)),
    ],
)
def test_the_megatron_and_the_torch_that_are_imported_count(folder: Path, name: str, version: str, state: str) -> None:
    package(folder, "imported", f"__version__ = {version!r}")
    probe = "import imported\nversion = imported.__version__"
    finding = examine([component := dataclasses.replace(BY_NAME[name], module="imported", probe=probe)], 60)[1]
    assert (finding.state, finding.version, finding.blocks) == (state, version, state == BROKEN)
    assert (f"{name}{component.versions} is needed" in finding.reason) == (state == BROKEN)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import time; time.sleep(60)", "did not finish within 1 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of signal 11"),
        ("raise ImportError('libfoo.so: undefined symbol: bar')", "libfoo.so: undefined symbol: bar"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("import os; os._exit(0)", "exited with status 0"),
        ("raise SystemExit('no')", "no"),
        ("print('noise'); print('more noise')", ""),
        ("import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)'])", ""),
    ],
)
def test_what_a_package_does_on_import_is_a_line_in_the_report(folder: Path, text: str, reason: str) -> None:
    package(folder, "strange", text)
    component = Component(name="strange", module="strange", probe="import strange\nversion = '1'")
    finding = examine([component], time_limit_s=1 if "sleep(60)" in text else 60)[1]
    assert (finding.state, finding.version) == ((BROKEN, None) if reason else (WORKS, "1"))
    assert reason in finding.reason


def test_transformers_says_what_needs_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    with monkeypatch.context() as absent:
        absent.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
        (finding,) = only("transformers")
    assert (finding.state, finding.blocks) == (ABSENT, False)
    assert "HuggingFaceTokenizer needs it: `pip install megacpp-mcore[tokenizers]`" in finding.reason
    place = package(folder, "transformers", "__version__ = '5.8.0'")
    (finding,) = only("transformers")
    assert (finding.state, finding.blocks) == (BROKEN, False)
    assert "cannot import name 'AutoTokenizer'" in finding.reason
    (place / "__init__.py").write_text("__version__ = '5.8.0'\nAutoTokenizer = object")
    assert [finding.version for finding in only("transformers")] == ["5.8.0"]


def components(capsys: pytest.CaptureFixture[str], status: int, *options: str) -> list[dict[str, Any]]:
    """Return the findings that ``doctor --json`` prints."""
    assert cli.main(["doctor", "--json", *options]) == status
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["components"]
    return rows


def test_absent(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = Component(name="needed", module="no_such_module.at_all", required=True, versions=">=1")
    wanted = Component(name="wanted", module="no_such_module")
    python, first, second = examine([needed, wanted])
    assert sorted(capsys.readouterr().err.splitlines()) == ["examined needed", "examined wanted"]
    assert (python.name, python.state, python.version) == ("python", WORKS, sys.version.split()[0])
    assert (first.state, first.blocks, first.reason) == (ABSENT, True, "install needed>=1")
    assert (second.state, second.blocks) == (ABSENT, False)


def test_a_file_that_cannot_be_read_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "megacpp.yaml"
    file.write_text("model: nam56r_tiny\nvendors: {flash5: false}\n")
    monkeypatch.setenv("MEGACPP_CONFIG", str(file))
    monkeypatch.setattr(doctor, "examine", lambda **_: [Finding("python", WORKS)])
    *_, finding, step = components(capsys, 1)
    assert (finding["name"], finding["state"]) == ("MEGACPP_CONFIG", BROKEN)
    assert "flash5" in finding["reason"]
    assert "flash4" in finding["reason"]
    assert (step["name"], step["state"], step["reason"]) == (doctor.STEP, OFF, "not trained, because of MEGACPP_CONFIG")


def test_a_megatron_is_judged_by_its_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed, or named by MEGATRON_LM; of another version, with the sources of the patches, and without one of them."""
    modules = {module for patch in default().patches for module in patch.modules}
    tree = copy_modules(wheel_root(), tmp_path / "lm", modules)
    info, target = tree / "megatron/core/package_info.py", tree / "megatron/training/models/gpt.py"
    edit(info, re.sub(rb"MINOR = \d+", b"MINOR = 23", info.read_bytes()))
    version = Checkout(tree).version
    monkeypatch.setattr(Checkout, "installed", lambda: Checkout(tree))
    monkeypatch.setenv("MEGATRON_LM", str(tree))
    monkeypatch.setattr(drift, "examine", lambda checkout: {"head": None, "verdict": "fits"})
    component = dataclasses.replace(BY_NAME["megatron-core"], probe=f"version = {version!r}")
    monkeypatch.setattr(doctor, "examine", functools.partial(examine, [component]))

    def findings(status: int) -> list[dict[str, Any]]:
        rows = components(capsys, status, "--no-step")
        return [row for row in rows if row["name"] in ("megatron-core", "MEGATRON_LM")]

    installed, named = findings(0)
    assert [(row["state"], row["version"]) for row in (installed, named)] == [(WORKS, version), (WORKS, version)]
    assert named["reason"] == "no commits; `compat`: fits"
    edit(target, target.read_bytes().replace(b"def mtp_block_spec(", b"def mtp_block_spec(  # an edit\n"))
    for row in findings(1):
        assert (row["state"], row["blocks"]) == (BROKEN, True)
        assert row["reason"].startswith("mtp-shared-block: ")
        assert f"compat --checkout {tree}" in row["reason"]
    edit(info, b"")
    assert [row["state"] for row in findings(1)] == [BROKEN, BROKEN]


def step_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *findings: Finding, options: str = ""
) -> tuple[int, str]:
    """Return the status and the report of a doctor with these findings."""
    monkeypatch.setattr(doctor, "examine", lambda **_: list(findings))
    status = cli.main(["doctor", *options.split()])
    return status, capsys.readouterr().out


HEALTHY = (Finding("torch", WORKS), Finding("transformer-engine", ABSENT))
GPU = Finding("torch", WORKS, details={"gpus": [{"name": "GPU", "memory_gib": 80.0, "capability": "9.0"}]})


@pytest.mark.parametrize(
    ("trained", "word"),
    [
        (([], ["ended with status 1", "RuntimeError: no driver"]), "ended with status 1 RuntimeError: no driver"),
        (([{"lm loss": float("nan")}], []), "lm loss is nan of 1 recorded steps"),
        (([], []), "lm loss is nan of 0 recorded steps"),
        (([{"lm loss": 6.5}], []), "lm loss 6.5"),
    ],
)
def test_a_step_that_does_not_train_stands_in_the_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: Any, word: str
) -> None:
    monkeypatch.setattr(doctor.trial, "train", lambda *_, **__: trained)
    status, text = step_after(monkeypatch, capsys, *HEALTHY)
    assert f"nam56r_tiny on cpu, local layers: {word}\n" in text
    assert status == ("6.5" not in word)
    assert text.endswith("training would fail on: training step\n" if status else "nothing stands in the way of training\n")


def test_a_step_is_trained_as_launch_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(doctor.trial, "train", lambda *_, **options: calls.append(options) or ([{"lm loss": 6.5}], []))
    (tmp_path / "megacpp.yaml").write_text("model: nam56r_tiny\nvendors: {flash4: false}\n")
    for name, before in vendor_switches._switches.items():
        monkeypatch.setitem(vendor_switches._switches, name, before)
    monkeypatch.setenv("MEGACPP_CONFIG", str(tmp_path / "megacpp.yaml"))
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    for engine in (WORKS, OFF):
        step_after(monkeypatch, capsys, GPU, Finding("transformer-engine", engine), options="--time-limit 60")
    assert [(run["device"], run["engine"], run["script"]) for run in calls] == [("cuda", True, []), ("cuda", False, [])]
    assert calls[0]["switches"]["vendors"] == {"flash4": False, "quack": True, "liger": True}
    step_after(monkeypatch, capsys, *HEALTHY)
    step_after(monkeypatch, capsys, GPU, HEALTHY[1])
    assert [run["timeout_s"] for run in calls] == [60.0, 60.0, 600.0, 3600.0]
    status, text = step_after(monkeypatch, capsys, GPU, options="--no-step")
    assert (status, len(calls)) == (0, 4)
    assert text.endswith("nothing was found that stands in the way of training; no step was trained\n")


def test_a_script_that_ends_in_an_error_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script of MEGATRON_LM runs in its own process; every examined component is fine."""
    (tmp_path / "pretrain_hybrid.py").write_text("raise RuntimeError('CUDA driver version is insufficient')\n")
    monkeypatch.setenv("MEGATRON_LM", str(tmp_path))
    monkeypatch.setattr(doctor, "_checkout", lambda: None)
    monkeypatch.setattr(doctor.trial, "subprocess", forks.trial())
    status, text = step_after(monkeypatch, capsys, *HEALTHY)
    assert status == 1
    assert "ended with status 1 RuntimeError: CUDA driver version is insufficient\n" in text


def test_a_step_that_takes_long_says_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Until the time limit stops it."""
    code = "import sys, time; time.sleep(0.2); print('compiling', file=sys.stderr, flush=True); time.sleep(600)"
    problem, lines = trial.run_quietly([sys.executable, "-S", "-c", code], str(tmp_path), 1.5, report_every_s=0.1)
    assert (problem, lines) == ("did not finish within 1.5 s", [])
    reports = re.findall(r"^\d s: (.+)$", capsys.readouterr().err, re.MULTILINE)
    assert list(dict.fromkeys(reports)) == ["no output yet", "compiling"]


@pytest.mark.exhaustive  # the commands of docs/index.md have doctor in them
def test_on_this_environment_training_is_possible(capsys: pytest.CaptureFixture[str]) -> None:
    states = {row["name"]: row for row in components(capsys, 0, "--time-limit", "180")}
    assert states[doctor.STEP]["details"]["figures"]["lm loss"] == pytest.approx(6.0976, abs=1e-3)
    assert states["torch"]["state"] == states["megatron-core"]["state"] == WORKS
    assert states["megatron-core"]["version"] == package_info.__version__
    assert Path(states["megatron-core"]["details"]["file"]).name == "package_info.py"
