"""The README's promises: its commands run, its table and drawing are the model's, its links lead somewhere.

Every line of a ``sh`` block is carried out, in order, in one folder: ``megacpp-mcore`` for real, except that ``launch`` is
planned and checked, not run; ``report`` (see tests/unit/test_docs.py) and ``doctor``, which takes half a minute to import
everything (tests/unit/test_doctor.py does), are only parsed; ``make`` says what it would do; ``pip`` and ``torchrun`` are only
taken apart.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacpp_mcore import cli, config, launcher
from megacpp_mcore.lowering import SPEC
from megacpp_mcore.model import PRESETS, Layout
from megacpp_mcore.patches.registry import default
from tests.unit.trees import copy_modules, wheel_root

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


WORDS: list[str] = []
"""The shell's array ``words``."""

LINES = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each command of the README printed, run in order in one folder."""
    folder = tmp_path_factory.mktemp("readme") / "here"
    folder.mkdir()
    modules = {module for patch in default().patches for module in patch.modules}
    checkout = copy_modules(wheel_root(), folder.parent / "Megatron-LM", modules)
    (checkout / "pretrain_gpt.py").write_text("")
    (folder / "texts").mkdir()
    for number in range(200):
        (folder / "texts" / f"{number}.txt").write_text(f"text {number}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MEGATRON_LM", str(checkout))
        patch.delenv(config.VARIABLE, raising=False)
        yield {line: carry_out(line) for line in LINES}


def carry_out(line: str) -> str:
    """Run one line and return what it printed; ``mapfile``, ``"${words[@]}"`` and ``> FILE`` are the only shell syntax."""
    command, _, target = line.partition(" > ")
    command = command.replace('"${words[@]}"', shlex.join(WORDS))
    program, *arguments = shlex.split(command)
    if program == "mapfile":
        option, array, _, file = arguments
        assert (option, array) == ("-t", "words")
        WORDS[:] = Path(file).read_text().splitlines()
        return ""
    if program == "megacpp-mcore":
        printed = run_ours(arguments)
    elif program == "make":
        make = ["make", "--silent", "--dry-run", "-C", str(ROOT), *arguments]
        printed = subprocess.run(make, capture_output=True, text=True, check=True).stdout
    else:
        printed = " ".join([program, *arguments])
    if target:
        Path(target.strip()).write_text(printed)
    return printed


def run_ours(arguments: list[str]) -> str:
    parsed = cli.parse(arguments)
    if parsed.command == "launch":
        plan = launcher.plan(parsed.stock_command, device=parsed.device, nproc=parsed.nproc)
        return plan.describe(plan.nproc)
    if parsed.command in ("doctor", "report"):
        return ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(arguments)
    assert status == 0, (arguments, printed.getvalue())
    return printed.getvalue()


def test_every_command_is_one_that_is_checked() -> None:
    assert len(LINES) >= 15
    assert len(set(LINES)) == len(LINES)
    assert {line.split()[0] for line in LINES} == {"megacpp-mcore", "make", "pip", "torchrun", "mapfile"}


def test_the_commands_run(outputs: dict[str, str]) -> None:
    assert "examples/demo.py" in outputs["make demo"]
    assert "pytest" in outputs["make test"]
    assert outputs["pip install ."] == "pip install ."
    (score,) = (text for line, text in outputs.items() if "score-unigram" in line)
    assert 3 < float(score) < 6
    (prepared,) = (text for line, text in outputs.items() if "data prepare" in line)
    assert re.search(r"mine_train: \d+ documents", prepared)
    assert re.search(r"mine_valid: \d+ documents", prepared)
    assert '"parameters"' in outputs["megacpp-mcore recipe show nam56r"]


def test_both_routes_to_the_spec_are_literal(outputs: dict[str, str]) -> None:
    planned = {line: text for line, text in outputs.items() if " launch " in line}
    assert len(planned) == 2
    for line, text in planned.items():
        assert "spec megacpp_mcore.nam56r | device cpu" in text, line
        assert ("pretrain_gpt.py |" in text) is ("pretrain_gpt.py" in line)
    assert sum(line.endswith("--spec megacpp_mcore.nam56r") for line in planned) == 1
    bare, patched = (text for line, text in outputs.items() if line.startswith("torchrun"))
    assert bare.strip().endswith("--spec " + " ".join(SPEC))
    assert patched.strip().endswith("--spec megacpp_mcore.nam56r")
    (applied,) = (text for line, text in outputs.items() if "patch apply" in line)
    assert "spec-import, mtp-shared-block: applied" in applied
    (reverted,) = (text for line, text in outputs.items() if "patch revert" in line)
    assert "is hooked for: no patch" in reverted
    assert f"`--spec {' '.join(SPEC)}`" in README


def test_the_emitted_command_is_complete(outputs: dict[str, str]) -> None:
    launched = "-m megacpp_mcore launch --device cuda -- pretrain_gpt.py "
    for line, text in outputs.items():
        if "--as cli" in line:
            assert re.match(rf"torchrun --nproc-per-node \d {launched}", text), line
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
        assert re.search(rf"\b{letter} [\w²-]+ \({model.layers.count(letter)}\)", README)


def test_the_example_of_the_options_file_works(tmp_path: Path) -> None:
    (text,) = blocks("yaml")  # the other key is inline
    (schedule, ordinals) = re.findall(r"`(dsa_index_cache: \{.*?\})`", README)
    for line in (schedule, ordinals):
        (tmp_path / "schedule.yaml").write_text(line)
        assert config.load_index_schedule(tmp_path / "schedule.yaml") is not None
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
