"""The README's promises: its commands run, its figures are those of the committed rows, its links lead somewhere.

Every line of a ``sh`` block is carried out, in order, in one folder: ``megacpp-mcore`` for real, except that ``launch`` is
planned and checked, not run, and ``doctor`` only parsed (tests/commands/test_doctor.py runs it); ``make`` says what it
would do; the rest is only taken apart.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megacpp_mcore import settings
from megacpp_mcore.commands import cli
from megacpp_mcore.launch import plan as launch_plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [
    line for block in re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]
ROWS = {
    "MLA core": ("mla", "stock Transformer Engine", "sdpa"),
    "sparse MLA": ("sparse_mla", "stock unfused", "reference"),
    "DSA's indexer": ("indexer", "stock", "reference"),
    "Mamba-3 MIMO": ("mamba3", "triton", "reference"),
    "Mamba-3 SISO": ("mamba3_siso", "mamba-ssm SISO"),
    "M²RNN": ("m2rnn", "triton", "reference"),
    "16 experts": ("grouped_mlp", "torch._grouped_mm", "TE GroupedLinear"),
    "output layer": ("linear_cross_entropy", "stock, fused cross-entropy", "chunked, main_grad"),
}
"""A row's first words; the benchmark and the variants whose milliseconds it gives."""


def carry_out(line: str, words: list[str]) -> str:
    """Run one line and return what it printed; ``mapfile``, ``"${words[@]}"`` and ``> FILE`` are the only shell syntax."""
    command, _, target = line.partition(" > ")
    program, *arguments = shlex.split(command.replace('"${words[@]}"', shlex.join(words)))
    printed = ""
    if program == "mapfile":
        words[:] = Path(arguments[-1]).read_text().splitlines()
    elif program == "megacpp-mcore":
        parsed = cli.parse(arguments)
        if parsed.command == "launch":
            plan = launch_plan.plan(parsed.stock_command, device=parsed.device, nproc=parsed.nproc)
            return plan.describe(plan.nproc)
        if parsed.command != "doctor":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                assert cli.main(arguments) == 0, arguments
            printed = output.getvalue()
    elif program == "make":
        make = ["make", "--silent", "--dry-run", "-C", str(ROOT), *arguments]
        printed = subprocess.run(make, capture_output=True, text=True, check=True).stdout
    else:
        assert program in ("git", "export", "pip"), line
    if target:
        Path(target).write_text(printed)
    return printed


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, words = tmp_path / "Megatron-LM", []
    (tmp_path / "here").mkdir()
    checkout.mkdir()
    (checkout / "pretrain_gpt.py").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MEGATRON_LM", str(checkout))
    monkeypatch.delenv(settings.VARIABLE, raising=False)
    printed = {line: carry_out(line, words) for line in LINES}
    assert "examples/demo.py" in printed["make demo"]
    (launched,) = (text for line, text in printed.items() if " launch " in line)
    assert "pretrain_gpt.py |" in launched
    assert "spec megacpp_mcore.nam56r | device cpu" in launched
    assert words[-3:] == ["--spec", "megacpp_mcore", "nam56r"]


def test_the_figures_are_those_of_the_committed_rows() -> None:
    with (ROOT / "experiments/results/bench_h200.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["work"] == "forward+backward" and row["ms"]]
    measured = {(row["benchmark"], row["variant"]): float(row["ms"]) for row in rows}
    table = re.findall(r"^\| (\S.*?) \| (.*?) \| (.*?) \|$", README, re.MULTILINE)
    assert len(table) == len(ROWS)
    for what, theirs, ours in table:
        benchmark, *variants = next(found for words, found in ROWS.items() if what.startswith(words))
        figures = sorted(float(figure) for figure in re.findall(r"([\d.]+) ms", f"{theirs} {ours}"))
        assert figures == pytest.approx(sorted(measured[benchmark, variant] for variant in variants), rel=0.02), what


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]
