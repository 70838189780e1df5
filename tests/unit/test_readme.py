"""The README's promises: its commands run, its table and drawing are the model's, its links lead somewhere.

Every line of a ``sh`` block is run by bash. ``megacpp-mcore`` is the real command, except that ``launch`` is planned
and checked, not run. ``make`` only prints what it would do; ``pip`` and ``torchrun`` write their arguments down.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_mcore import config
from megacpp_mcore.lowering import SPEC
from megacpp_mcore.model import PRESETS, Layout

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

COMMAND = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(ROOT)!r})
from megacpp_mcore import cli, launcher
arguments = cli.parse(sys.argv[1:])
if arguments.command != "launch":
    sys.exit(cli.main(sys.argv[1:]))
plan = launcher.plan(arguments.stock_command, device=arguments.device, nproc=arguments.nproc)
print("PLANNED", plan.describe(plan.nproc))
"""
RECORDED = """#!/bin/sh
echo RECORDED "$(basename "$0")" "$@"
"""
MAKE = f"""#!/bin/sh
exec /usr/bin/env -u MAKEFLAGS {{make}} --silent -n -C {ROOT} "$@"
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


LINES = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command of the README printed, run in order in one folder."""
    import shutil

    make = shutil.which("make")
    assert make is not None
    folder = tmp_path_factory.mktemp("readme")
    tools, checkout = folder / "bin", folder / "Megatron-LM"
    for made in (tools, checkout, folder / "texts"):
        made.mkdir()
    scripts = {"megacpp-mcore": COMMAND, "pip": RECORDED, "torchrun": RECORDED, "make": MAKE.format(make=make)}
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (checkout / "pretrain_gpt.py").write_text("")
    for number in range(200):
        (folder / "texts" / f"{number}.txt").write_text(f"text {number}\n")
    kept = {name: value for name, value in os.environ.items() if name not in (config.VARIABLE, "PYTHONPATH")}
    environment = {**kept, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "MEGATRON_LM": str(checkout)}
    found = {}
    for line in LINES:
        done = subprocess.run(
            ["bash", "-euc", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        found[line] = done.stdout
    return found


def test_every_command_is_one_that_is_checked() -> None:
    assert len(LINES) >= 15
    assert len(set(LINES)) == len(LINES)
    assert {line.split()[0] for line in LINES} == {"megacpp-mcore", "make", "pip", "torchrun"}


def test_the_commands_run(outputs: dict[str, str]) -> None:
    assert "examples/demo.py" in outputs["make demo"]
    assert "pytest" in outputs["make test"]
    assert outputs["pip install ."].strip() == "RECORDED pip install ."
    assert "nothing stands in the way" in outputs["megacpp-mcore doctor"]
    (score,) = (text for line, text in outputs.items() if "score-unigram" in line)
    assert 3 < float(score) < 6
    (prepared,) = (text for line, text in outputs.items() if "data prepare" in line)
    assert re.search(r"mine_train: \d+ documents", prepared)
    assert re.search(r"mine_valid: \d+ documents", prepared)
    assert '"parameters"' in outputs["megacpp-mcore recipe show nam56r"]


def test_both_routes_to_the_spec_are_literal(outputs: dict[str, str]) -> None:
    planned = {line: text for line, text in outputs.items() if "PLANNED" in text}
    assert len(planned) == 2
    for line, text in planned.items():
        assert "spec megacpp_mcore.nam56r | device cpu" in text, line
        assert ("pretrain_gpt.py |" in text) is ("pretrain_gpt.py" in line)
    assert sum(line.endswith("--spec megacpp_mcore.nam56r") for line in planned) == 1
    (bare,) = (text for line, text in outputs.items() if line.startswith("torchrun"))
    assert bare.strip().endswith("--spec " + " ".join(SPEC))
    assert f"`--spec {' '.join(SPEC)}`" in README


def test_the_emitted_command_is_complete(outputs: dict[str, str]) -> None:
    for line, text in outputs.items():
        if "--as cli" in line:
            assert text.startswith("torchrun --nproc-per-node "), line
            assert "--spec megacpp_mcore nam56r" in text


def test_the_table_is_the_models() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+): ([^|]+) \| (\d+) \| (\d+) \| ([\d,]+) \|", README, re.MULTILINE)
    assert [row[0] for row in rows] == list(PRESETS)
    for name, depth, families, hidden, mtp, parameters in rows:
        model = PRESETS[name]
        assert int(depth) == model.depth
        assert families == ", ".join(f"{model.layers.count(x)} {x}" for x in "AEMR" if x in model.layers)
        assert (int(hidden), int(mtp)) == (model.hidden_size, model.mtp.depth)
        assert int(parameters.replace(",", "")) == sum(model.parameters().values())


def test_the_drawing_is_nam56r() -> None:
    model = PRESETS["nam56r"]
    tiles = [range(start, min(start + 12, model.depth)) for start in range(0, model.depth, 12)]
    letters = " │ ".join(" ".join(model.layers[i] for i in tile) for tile in tiles)
    roles = "   ".join(" ".join(model.roles[i] or " " for i in tile) for tile in tiles).rstrip()
    assert f"\n {letters}\n {roles}\n" in README
    for letter in "AEMR":
        assert re.search(rf"\b{letter} [\w²]+ \({model.layers.count(letter)}\)", README)


def test_the_example_of_the_options_file_works(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    file = tmp_path / "options.yaml"
    file.write_text(text)
    loaded = config.load(file)
    loaded.model.check_layout(Layout(pipeline=2))  # what the README says it is for
    with pytest.raises(ValueError, match="Shared"):
        PRESETS["nam56r"].check_layout(Layout(pipeline=2))


def test_links_and_length() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    assert len(README.splitlines()) <= 150


def test_what_is_said_not_to_be_there_is_not_there() -> None:
    """A sentence of absence has to go when the thing comes."""
    import contextlib
    import io

    from megacpp_mcore import cli

    assert "`megacpp-mcore patch apply --checkout`" in README
    with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        cli.parse(["patch", "apply", "--checkout", "x"])
    assert "Megatron-Bridge recipe functions are not there yet" in README
    assert [path.name for path in (ROOT / "nemo_recipes").glob("*.py")] == ["__init__.py"]
