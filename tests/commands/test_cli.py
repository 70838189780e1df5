"""The command line: what it hands on, how it ends."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megacpp_mcore.commands import cli, doctor
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.launch import launcher
from tests import forks

ROOT = Path(__file__).parents[2]


def test_every_help_can_be_printed() -> None:
    """argparse fills a help's ``%`` only when it is printed."""
    parsers = [cli._parser()]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += dict.fromkeys(action.choices.values())
    assert len({parser.prog: parser.format_help() for parser in parsers}) > 15


def test_launch_hands_on_everything_after_the_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "launch", launch := mock.Mock(return_value=7))
    stock = ["pretrain_gpt.py", "--device", "x", "--", "--spec", "megacpp_mcore.nam56r", "--traceback"]
    options = ["--device", "cpu", "--nproc", "2", "--allow-spec-from", "mine"]
    options += ["--patch", "linear-cross-entropy", "--patch", "dsa-graph-safety"]
    options += ["--observe", "here"]
    assert cli.main(["launch", *options, "--", *stock]) == 7
    launch.assert_called_once_with(
        stock,
        device="cpu",
        nproc=2,
        allowed_spec_prefixes=("megacpp_mcore", "megatron", "mine"),
        patches=["linear-cross-entropy", "dsa-graph-safety"],
        recording=launcher.Recording(observe="here"),
        verbose=False,
    )


def test_errors_of_the_command_line_alone_come_before_heavy_imports(tmp_path: Path) -> None:
    commands = {
        "launch --profile 5-2 --observe run -- --num-layers 2": "'5-2'",
        "launch --profile 2-3 --no-observe -- --num-layers 2": "steps 2-3 are to be profiled, and nothing is recorded",
        "launch --observe run --no-observe -- --num-layers 2": "--observe run and --no-observe",
        "launch --patch no-such-patch --": "'no-such-patch'",
        "launch -- --sepc megacpp_mcore.nam56r --use-checkpoint-args": "--use-checkpoint-args",
        "bench run no-such-benchmark": "no-such-benchmark",
        "recipe show no-such-recipe": "no-such-recipe",
        "report html no-such-run": "no-such-run",
        "patch status no-such-patch": "'no-such-patch'",
    }
    program = (
        "import json, sys; from megacpp_mcore.commands import cli\n"
        "heavy = {'torch', 'numpy', 'megatron.core', 'transformer_engine'}\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    status = cli.main(words.split())\n"
        "    print(status, sorted(heavy & sys.modules.keys()))\n"
        "from megacpp_mcore.backends import Dispatcher\n"
        "from megacpp_mcore.data import corpus, index, manifest, prepare, score, tokenizer\n"
        "Dispatcher(); cli.main(['bench', 'list'])\n"
        "print(sorted(sys.modules.keys() & {'torch', 'megatron.core', 'tokenizers', 'transformers'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(list(commands))],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, last = done.stdout.splitlines()[: len(commands)], done.stdout.splitlines()[-1]
    assert (first, last) == (["2 []"] * len(commands), "[]"), done.stderr
    errors = done.stderr.splitlines()
    assert all(line.startswith("error: ") for line in errors)
    assert [message in line for message, line in zip(commands.values(), errors, strict=True)] == [True] * len(commands)


NOISY = """
import logging, warnings
warnings.warn("not installed, falling back")
logging.getLogger("torch.utils.cpp_extension").warning("no runtime is found")
PATTERN = "\\d"

def work():
    warnings.warn("it was slow")
"""


def warned(words: list[str]) -> list[str]:
    """Return the warnings that a command shows."""
    caught: list[warnings.WarningMessage] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *args, **_: caught.append(warnings.WarningMessage(*args))
        keep = warnings.showwarning
        assert cli.main(words) == 0
        assert warnings.showwarning is keep
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("trains", [False, True])
def test_a_command_leaves_out_what_others_warn_of_and_a_training_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trains: bool
) -> None:
    """A third-party package warns when it is compiled, imported and used."""
    name = "noisy_package_of_others"
    (tmp_path / f"{name}.py").write_text(NOISY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)

    def run(*args: Any, **options: Any) -> int:
        importlib.import_module(name).work()
        warnings.warn_explicit("ours", UserWarning, "doctor.py", 1, module=doctor.__name__)
        return 0

    monkeypatch.setattr(*((launcher, "launch") if trains else (doctor, "run")), run)
    shown = warned(["launch", "--", "--num-layers", "2"] if trains else ["doctor"])
    logged = ["no runtime is found"] if trains else []
    if trains:
        assert "invalid escape sequence" in shown.pop(0)
        assert (shown.pop(0), shown.pop(0)) == ("not installed, falling back", "it was slow")
    assert shown == ["ours"]
    assert caplog.messages == logged
    logging.getLogger("torch.utils.cpp_extension").warning("afterwards")
    assert caplog.messages == [*logged, "afterwards"]


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Have every launch raise ``error``."""
    monkeypatch.setattr(launcher, "launch", mock.Mock(side_effect=error))


def test_how_errors_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (BrokenPipeError, ZeroDivisionError):  # a training run that loses its pipe has failed
        fail(monkeypatch, error())
        with pytest.raises(error):
            cli.main(["launch", "--", "train.py"])
    fail(monkeypatch, LaunchError("no such device"))
    assert cli.main(["launch", "--", "x.py"]) == 2
    assert capsys.readouterr().err == "error: no such device\n"
    assert cli.main(["--traceback", "launch", "--", "x.py"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("error: no such device\n")
    fail(monkeypatch, KeyboardInterrupt())
    assert cli.main(["launch", "--", "x.py"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its status is."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_full_disk_and_a_closed_output_end_in_a_line() -> None:
    for redirection, status, says in ((">/dev/full", 2, "expected room"), (">&-", 0, "")):
        done = run("sh", "-c", f'"{sys.executable}" -m megacpp_mcore recipe list {redirection}')
        assert (done.returncode, done.stderr.count("\n")) == (status, bool(says)), done.stderr
        assert says in done.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "megacpp_mcore", "recipe", "emit", "nam56r_tiny", "--as", "cli"]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.close()
    _, complaint = writer.communicate(timeout=forks.PATIENCE_S)
    assert (writer.returncode, complaint) == (0, b"")


def test_an_interruption_while_the_commands_are_imported_is_a_word() -> None:
    code = (
        "import runpy, sys, types\n"
        "def find_spec(name, *_):\n"
        "    if name == 'megacpp_mcore.commands': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find_spec))\n"
        "runpy.run_module('megacpp_mcore', run_name='__main__')"
    )
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_python_without_the_dependencies_is_told_what_it_lacks() -> None:
    done = run(sys.executable, "-S", "-m", "megacpp_mcore", "doctor")
    assert done.returncode == 1
    assert "which megacpp-mcore needs; install the package into it" in done.stderr
    assert "Traceback" not in done.stderr
