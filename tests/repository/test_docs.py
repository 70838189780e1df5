"""The documentation's promises: its commands run, its figures are the models', its messages are in the code.

A page's ``sh`` blocks are one shell session, in a folder of its own; a ``text`` block right after one is what it prints, with
``…`` for what differs. A real bash runs them, and programs that it starts are one of three:

- ``megacpp-mcore`` is the real one. Its ``launch``, and the ``report`` of what that leaves, are noted instead of run, except
  in :func:`test_the_commands_train`.
- What needs a GPU, a cluster or another environment (``torchrun``, the Python of ``make bridge``) is noted in any case.
- ``make`` says what it would do; ``pip`` and the scripts of ``examples`` are looked up: tests/repository/test_packaging.py and
  tests/repository/test_examples.py run them.

What was noted, and every command that ``recipe emit`` printed, is then given to what would read it: torchrun's parser, the
launcher's plan, Megatron's parser and validation. The site itself is built by ``make docs``.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import dataclasses
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml
from packaging.requirements import Requirement

from megacpp_mcore import policy
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import stock_command
from megacpp_mcore.arguments.lowering import SCRIPTS
from megacpp_mcore.commands import cli
from megacpp_mcore.errors import ModelError
from megacpp_mcore.launch import plan as launch_plan
from megacpp_mcore.model import hybrid, preset
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.nemo_recipes import run as bridge_run
from tests import stock

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ANYTHING = "…"


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


WITH_COMMANDS = [page.name for page in PAGES if blocks(text(page.name), "sh")]
PROGRAMS = {
    "megacpp-mcore",
    "make",
    "pip",
    "torchrun",
    "sbatch",
    "mapfile",
    "bash",
    "export",
    "unset",
    "mkdir",
    "cp",
    "examples",
    "cat",
    "python",
}

_NOTE = r"""
note() {
    local call
    call=$(mktemp "$DOC_NOTES/$(date +%s%N).XXXXXX")
    env -0 > "$call.env"
    printf '%s\0' "$@" > "$call"
    mv "$call" "$call.call"
}
"""

_TOOLS = {
    "megacpp-mcore": r"""
case "$1 $2" in
    doctor*) note doctor; exit ;;
    launch*)
        if [ -z "$DOC_TRAIN" ] || [[ " $* " == *" --device cuda "* ]]; then note "$@"; echo "megacpp-mcore: noted"; exit; fi
        if [ -n "$DOC_NO_CHECKOUT" ] && [[ " $* " == *" -- pretrain_"* ]]; then
            note "$@"; echo "megacpp-mcore: noted"; exit
        fi ;;
    report*) if [ -z "$DOC_TRAIN" ]; then note "$@"; exit; fi ;;
    "data corpus")  # the same corpus for every page: made once
        if [ "$3 $4" = "--output corpus" ] && [ -d "$DOC_CORPUS" ]; then cp -r "$DOC_CORPUS" corpus; exit; fi ;;
    "recipe emit") printed=$(mktemp "$DOC_NOTES/XXXXXX.emitted"); note_emitted="tee $printed" ;;
esac
set -o pipefail
"$DOC_PYTHON" -W ignore -m megacpp_mcore "$@" | ${note_emitted:-cat}
""",
    "torchrun": 'note torchrun "$@"',
    "sbatch": r"""
bash -n "$1"
export DATA_PREFIX=${DATA_PREFIX:-corpus/stdlib_train}
export SLURM_JOB_NUM_NODES=1 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=node
exec bash "$1"
""",
    "srun": '[ "$1" = --kill-on-bad-exit=1 ] || exit 9\nshift\nexec "$@"',
    "scontrol": '[ "$*" = "show hostnames node" ] || exit 9\necho node',
    "make": r"""
"$DOC_MAKE" --silent --dry-run -C "$DOC_ROOT" "$@" > /dev/null
if [[ " $* " == *" bridge "* ]]; then echo "$DOC_TOOLS/python_of_bridge"; fi
if [[ " $* " == *" nemo-run "* ]]; then echo "$DOC_TOOLS/python_of_nemo_run"; fi
""",
    "python": 'exec "$DOC_PYTHON" "$@"',
    "python_of_bridge": 'note bridge "$@"',
    "nemo": 'note nemo "$@"',
    "pip": 'note pip "$@"',
}


@dataclass(frozen=True)
class Call:
    """A program that a page started and this test has to judge."""

    block: int
    words: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Session:
    """What became of a page's commands: the lines that each block printed, and the calls that were noted."""

    printed: list[str]
    calls: list[Call]
    emitted: list[str]


def bash(script: str, folder: Path, tools: Path, **variables: str) -> str:
    """What ``script`` prints, where ``tools`` come before anything else."""
    environment = {
        name: value for name, value in os.environ.items() if name not in (plugin_config.VARIABLE, "MEGATRON_LM")
    }
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **variables}
    environment |= {"DOC_PYTHON": sys.executable, "DOC_ROOT": str(ROOT), "DOC_TOOLS": str(tools)}
    environment["DOC_MAKE"] = shutil.which("make") or "make"
    command = ["bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{script}"]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def make_tools(folder: Path) -> Path:
    tools = folder / "tools"
    tools.mkdir()
    for name, body in _TOOLS.items():
        (tools / name).write_text(f"#!/bin/bash\nset -e\n{_NOTE}{body}\n")
        (tools / name).chmod(0o755)
    return tools


def noted(notes: Path) -> list[Call]:
    """The calls in ``notes``, in their order, which are taken away."""
    found = []
    for path in sorted(notes.glob("*.call")):
        pairs = (pair.partition("=") for pair in path.with_suffix(".env").read_text().split("\0") if pair)
        environment = {name: value for name, _, value in pairs}
        found.append(Call(int(environment["DOC_BLOCK"]), tuple(path.read_text().split("\0")[:-1]), environment))
        path.unlink()
    return found


def follow(page: str, folder: Path, corpus: Path, **variables: str) -> Session:
    """Carry out the ``sh`` blocks of a page in a folder of its own, and every command that ``recipe emit`` printed in them."""
    tools, notes, here, checkout = make_tools(folder), folder / "notes", folder / "here", folder / "Megatron-LM"
    for made in (notes, here, checkout):
        made.mkdir()
    (here / "examples").symlink_to(ROOT / "examples")
    (here / "texts").mkdir()
    for number in range(60):
        (here / "texts" / f"{number}.txt").write_text(f"text {number}\n" * 9)
    for name, content in re.findall(r'^```yaml title="([^"\n]*)"\n(.*?)^```', text(page), re.DOTALL | re.MULTILINE):
        (here / name).write_text(content)
    for script in SCRIPTS.values():
        (checkout / script).write_text("")
    usual = {"DOC_TRAIN": "", "DOC_NO_CHECKOUT": "", "MEGATRON_LM": str(checkout)}
    variables = usual | {"DOC_NOTES": str(notes), "DOC_CORPUS": str(corpus)} | variables
    mark = f"--- {folder.name} ---"
    session = "".join(
        f"export DOC_BLOCK={number}\n{block}\necho '{mark}'\n" for number, block in enumerate(blocks(text(page), "sh"))
    )
    printed = bash(session, here, tools, **variables).split(mark)[:-1]
    if not corpus.exists() and (here / "corpus").is_dir():
        shutil.copytree(here / "corpus", corpus)
    calls, emitted = noted(notes), [path.read_text() for path in sorted(notes.glob("*.emitted"))]
    for command in emitted:
        if not command.startswith("--"):  # arguments alone, which a launch of the page takes
            script = commands_of(command)
            bash(
                script, here, tools, DOC_BLOCK="-1", DATA_PREFIX="corpus/stdlib_train", HEAD_NODE="node:1", **variables
            )
            calls += noted(notes)
    return Session(printed, calls, emitted)


def commands_of(emitted: str) -> str:
    """Shell text that carries out what ``recipe emit`` printed, in whatever form."""
    if emitted.startswith("#!"):
        return f"cat > printed.sbatch <<'END_OF_JOB'\n{emitted}END_OF_JOB\nsbatch printed.sbatch"
    if emitted.startswith("recipe:"):
        return stock_command.as_cli(stock_command.parse(emitted))
    return emitted


# --- judging what was noted ---------------------------------------------------------------------------------------------


def judge(call: Call) -> str:
    """What the program that ``call`` is for would say before it runs; raises where it would refuse."""
    program, *words = call.words
    with mock.patch.dict(os.environ, call.environment, clear=True):
        if program == "launch":
            return judge_launch(words)
        if program == "report":
            cli.parse(list(call.words))
            return ""
        if program == "torchrun":
            return judge_torchrun(words)
        if program == "bridge":
            return judge_bridge(words)
        if program == "nemo":
            return judge_nemo(words)
        if program == "pip":
            return judge_pip(words)
        assert (program, words) == ("doctor", [])  # tests/commands/test_doctor.py runs it
        return ""


def judge_torchrun(words: Sequence[str]) -> str:
    from torch.distributed.run import parse_args

    parsed = parse_args(list(words))
    processes = int(parsed.nproc_per_node) * int(parsed.nnodes.rpartition(":")[2])
    entry, arguments = parsed.training_script, parsed.training_script_args
    if parsed.module and entry == "megacpp_mcore" and arguments[0] == "launch":
        return judge_launch(arguments[1:], processes)
    if parsed.module:
        return judge_recipe(entry, arguments, processes)
    assert Path(entry).name in SCRIPTS.values(), entry
    assert Path(entry).is_file(), entry
    judge_arguments(arguments, processes)
    return ""


def judge_launch(words: Sequence[str], processes: int | None = None) -> str:
    """The launcher's first lines: what runs, and its launch policy."""
    parsed = cli.parse(["launch", *words])
    gpus = SimpleNamespace(is_available=lambda: parsed.device == "cuda", device_count=lambda: processes or parsed.nproc)
    with mock.patch.multiple("torch.cuda", **vars(gpus)):
        prefixes = (*launch_plan.ALLOWED_SPEC_PREFIXES, *parsed.allow_spec_from)
        plan = launch_plan.plan(
            parsed.stock_command,
            device=parsed.device,
            nproc=parsed.nproc,
            allowed_spec_prefixes=prefixes,
            patches=parsed.patch,
        )
    world = processes or plan.nproc
    settings = plugin_config.from_environment()
    run = policy.Run.from_arguments(
        plan.arguments, device=plan.device, world_size=world, model=settings.model if settings else None
    )
    launched = policy.resolve(run, settings=settings, environment=os.environ)
    os.environ.update(launched.environment())
    judge_arguments(plan.arguments, world)
    lines = (plan.describe(world), *launched.lines(settings))
    return "\n".join(f"megacpp-mcore: {line}" for line in lines)


def judge_arguments(words: Sequence[str], processes: int) -> None:
    """Megatron's own parser and validation take ``words``, on a machine with such GPUs as the recipes are for."""
    hopper = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30)
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.get_device_properties", return_value=hopper),
    ):
        parsed = stock.parse(words, processes)
    assert parsed.world_size == processes
    assert "--spec" in words
    assert parsed.data_path or parsed.mock_data or parsed.train_data_path, "no data is named"


def judge_bridge(words: Sequence[str]) -> str:
    """The Python of ``make bridge``: a recipe, or torchrun, which that environment's Python has as a module."""
    assert words[0] == "-m"
    if words[1] == "torch.distributed.run":
        return judge_torchrun(words[2:])
    return judge_recipe(words[1], words[2:], 1)


def judge_nemo(words: Sequence[str]) -> str:
    """The command of nemo-run: a recipe or model, the Python of ``make bridge``, and data (tests/nemo runs it)."""
    assert list(words[:2]) == ["megacpp", "pretrain"]
    given = dict(word.split("=", 1) for word in words[2:] if "=" in word)
    assert any(name.startswith(given["recipe"]) for name in RECIPES)
    assert given["python"].endswith("/python_of_bridge")
    assert given["dataset.data_path"]
    return ""


def judge_recipe(module: str, words: Sequence[str], processes: int) -> str:
    """``--list`` is run; a recipe has to be for that many processes, and to be given data (tests/bridge trains them)."""
    assert module == "megacpp_mcore.nemo_recipes.run"
    printed = io.StringIO()
    if "--list" in words:
        with contextlib.redirect_stdout(printed):
            assert bridge_run.main(words) == 0
        return printed.getvalue()
    chosen = RECIPES[words[words.index("--recipe") + 1]]
    assert chosen.processes == processes
    values = dict(word.split("=", 1) for word in words[2:])
    assert Path(values["dataset.data_path"] + ".idx").is_file()
    return ""


def judge_pip(words: Sequence[str]) -> str:
    """Only the installation of the clone is documented; tests/repository/test_packaging.py builds what it installs."""
    assert list(words) == ["install", "."]
    return ""


# --- the commands -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first page that makes a corpus leaves a copy for the others."""
    return tmp_path_factory.mktemp("corpus") / "corpus"


def expectations(page: str) -> dict[int, list[str]]:
    """The lines of the ``text`` block that follows an ``sh`` block, by the number of the latter."""
    found = {}
    for number, match in enumerate(re.finditer(r"^```sh\n.*?^```\n", page, re.DOTALL | re.MULTILINE)):
        output = re.match(r"\s*```text\n(.*?)^```", page[match.end() :], re.DOTALL | re.MULTILINE)
        if output is not None:
            found[number] = output[1].splitlines()
    return found


def missing(expected: Sequence[str], printed: str) -> list[str]:
    """The lines of ``expected`` that ``printed`` has not, in this order; ``…`` stands for anything."""
    lines, absent = iter(printed.splitlines()), []
    for line in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in line.split(ANYTHING)) + r"\s*")
        if line.strip() not in ("", ANYTHING) and not any(pattern.fullmatch(one) for one in lines):
            absent.append(line)
            lines = iter(())
    return absent


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_run(page: str, corpus: Path, tmp_path: Path) -> None:
    session = follow(page, tmp_path, corpus)
    printed = list(session.printed)
    with contextlib.chdir(tmp_path / "here"):
        for call in session.calls:
            said = judge(call)
            if call.block >= 0:
                printed[call.block] += said + "\n"
    of_runs = {call.block for call in session.calls if call.words[0] == "report"}  # compared where there are runs
    for number, expected in expectations(text(page)).items():
        if number in of_runs:
            continue
        before_training = [line for line in expected if " iteration " not in line]
        assert missing(before_training, printed[number]) == [], (page, number, printed[number])


def test_the_check_of_what_is_printed_can_fail() -> None:
    assert missing(["a … c", "…", "d"], "a b c\nx\nd\n") == []
    assert missing(["d", "a b c"], "a b c\nd\n") == ["a b c"]
    assert missing(["a"], "a b") == ["a"]
    assert expectations("```sh\nx\n```\n\n```text\ny\n```\n\n```sh\nz\n```\nwords\n```text\nno\n```\n") == {0: ["y"]}


def test_every_command_is_of_a_program_that_is_checked() -> None:
    for page in WITH_COMMANDS:
        assert text(page).count("```sh\n") == len(blocks(text(page), "sh"))
        for line in (line for block in blocks(text(page), "sh") for line in block.splitlines()):
            word = next(word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_0-9]+=[^$]*", word))
            assert word.partition("/")[0] in PROGRAMS or word in ("$python_with_bridge", "$nemo") or "=$(" in word, (
                page,
                line,
            )


TRAINING = [page for page in WITH_COMMANDS if re.search(r"^bash |^megacpp-mcore launch ", text(page), re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("page", TRAINING)
def test_the_commands_train(page: str, corpus: Path, tmp_path: Path) -> None:
    """Every launch on the CPU for real; those of a stock script where MEGATRON_LM names a checkout."""
    checkout = os.environ.get("MEGATRON_LM")
    real = {"DOC_TRAIN": "yes", "DOC_NO_CHECKOUT": "" if checkout else "yes"}
    session = follow(page, tmp_path, corpus, **real, **({"MEGATRON_LM": checkout} if checkout else {}))
    printed = "".join(session.printed)
    losses = re.findall(r"(?:iteration|step) +(\d+)/ *(\d+)(?: .*?\| lm |  )loss:? (\S+)", printed)
    assert losses
    assert any(step == last for step, last, _ in losses)
    assert all(float(loss) < 7 for *_, loss in losses)
    for number, expected in expectations(text(page)).items():
        if not any(call.block == number for call in session.calls):
            assert missing(expected, session.printed[number]) == [], (page, number)


@pytest.mark.slow
def test_the_recipes_of_bridge_train(bridge_python: Path, corpus: Path, tmp_path: Path) -> None:
    """The lines of the doors page for one process, with the Python that `make bridge` makes."""
    session = follow("doors.md", tmp_path, corpus)
    lines = [call for call in session.calls if call.words[0] == "bridge" and "torch.distributed.run" not in call.words]
    assert len(lines) >= 2
    for call in lines:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [str(bridge_python), *call.words[1:]]
        done = subprocess.run(
            command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        assert "--list" in command or re.search(r"iteration +3/ +3 ", done.stdout), done.stdout[-3000:]


def test_the_settings_of_the_pattern_page_are_those_that_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = text("own-pattern.md")
    (shown,) = blocks(page, "yaml")
    (line,) = (line for block in blocks(page, "sh") for line in block.splitlines() if "--settings" in line)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(plugin_config.VARIABLE, raising=False)
    assert cli.main(shlex.split(line.partition(" > ")[0])[1:]) == 0
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text()) == yaml.safe_load(shown)
    (tmp_path / "shown.yaml").write_text(shown)
    assert plugin_config.load(tmp_path / "shown.yaml").model.layers == "AMEAMAR"


def test_the_model_card_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change of a model: megacpp-mcore recipe list --markdown > docs/model-card.md"""
    assert cli.main(["recipe", "list", "--markdown"]) == 0
    assert capsys.readouterr().out == text("model-card.md")
    row = re.search(r"^\| `nam56r` \| (.*) \|$", text("model-card.md"), re.MULTILINE)
    assert row is not None
    layers, hidden, vocabulary, _, mtp, parameters, active, gflop = row[1].split(" | ")
    model = preset("nam56r")
    assert (int(layers), int(hidden), int(mtp)) == (model.depth, model.hidden_size, model.mtp.depth)
    assert int(vocabulary.replace(",", "")) == model.vocab_size
    total, used = (int(number.replace(",", "")) for number in (parameters, active))
    assert total == sum(model.parameters().values())
    assert total - used == 22 * 12 * 2 * 3584 * 896  # 12 of 16 experts, each two matrices, in each of 22 layers
    once_more = {
        "mtp": 1,
        "head": 2,
        "embedding": -1,
    }  # MTP's block runs twice, the head three times, look-ups are free
    products = 6 * (used + sum(times * model.parameters()[part] for part, times in once_more.items()))
    assert 1 < float(gflop) * 1e9 / products < 1.15  # beside them, attention and the scans over a sequence


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, head and rule left out."""
    section = re.split(r"^#+ ", page.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]
    first = itertools.dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    rows = [line.strip("| ").split(" | ") for line in itertools.takewhile(lambda line: line.startswith("|"), first)]
    return [[cell.strip(" |") for cell in row] for row in rows[2:]]


def test_the_groups_of_the_launch_page_are_those_of_the_file() -> None:
    shown = {key.strip("`"): default for key, default, _ in table(text("launch.md"), "The file")}
    groups = {
        "speed_defaults": plugin_config.SpeedDefaults,
        "experimental_taxes": plugin_config.ExperimentalTaxes,
        "observability": plugin_config.Observability,
    }
    assert shown == {
        f"{group}.{each.name}": str(yaml.safe_dump(each.default)).splitlines()[0]
        for group, kind in groups.items()
        for each in dataclasses.fields(kind)
    } | {"max_documents": "null"}
    overlaps = {name for name, *_ in table(text("launch.md"), "When the word overlap is said")}
    assert overlaps == {one.name for one in policy.overlap_contract(policy.Run(device="cuda"), None)}


def test_the_names_of_the_compile_page_are_the_codes() -> None:
    from megacpp_mcore.layer_specs import regions

    page = text("compile.md")
    assert [row[0].strip("`") for row in table(page, "Warm-up")] == list(policy.REASONS)
    families = [each.name for each in dataclasses.fields(plugin_config.Recompute)]
    assert [row[0].strip("`") for row in table(page, "Recompute by family")] == families
    documented = [(name.strip("`"), layers) for name, layers, _ in table(page, "Regions")]
    described = re.findall(r"^(\w[\w ]*?\w) {2,}((?:[AMER] ?)+) {2,}\w", regions.__doc__ or "", re.MULTILINE)
    assert len(documented) > 2
    assert documented == [(name, layers.strip()) for name, layers in described]


def test_the_figures_of_the_compile_page_are_measured() -> None:
    with (ROOT / "experiments" / "results" / "regional_h200.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["recompute"], row["tax"]) == ("none", "none")]
    columns = ("lane", "compile", "warm_up_s", "first_step_s", "median_step_ms", "tokens_per_s")
    shown = table(text("compile.md"), "What it gave")
    assert len(shown) == 4
    assert shown == [[row[column] or "none" for column in columns] for row in rows]


def test_the_symbols_of_the_hybrid_page_are_the_codes() -> None:
    shown = {
        symbol.strip("`"): (letter, field.strip("`"), who)
        for symbol, letter, field, who in table(text("hybrid.md"), "Symbols")[:6]
    }
    assert list(shown) == [slot.symbol for slot in hybrid.SLOTS]
    for slot in hybrid.SLOTS:
        letter, field, who = shown[slot.symbol]
        assert letter[0] == slot.letter or letter == "one MTP depth"
        assert field == (slot.attribute or "none")
        assert who.startswith("native: " if slot.native else "ours: ")


def rendered(node: ast.expr) -> str | None:
    """A text of the code with ``…`` in the place of what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in node.values)
    return None


def messages() -> Iterator[str]:
    folders = ("megacpp_mcore", "layer_specs", "patches", "nemo_recipes")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = rendered(node) if isinstance(node, ast.expr) else None
            if found and " " in found:
                yield found


def test_every_message_of_the_troubleshooting_page_is_in_the_code() -> None:
    page = text("troubleshooting.md")
    quoted = [line.removeprefix("> ") for line in page.splitlines() if line.startswith("> ")]
    assert len(quoted) > 25
    assert len(set(quoted)) == len(quoted)
    known = "\n".join(messages())
    assert [message for message in quoted if message.rstrip(ANYTHING) not in known] == []
    assert "a message that nobody wrote" not in known


def test_the_refusal_that_the_fp8_page_quotes_is_the_real_one() -> None:
    from megacpp_mcore.layer_specs.nam56r import check_layout

    (quoted,) = blocks(text("fp8.md"), "text")
    settings = {
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1},
        **{"virtual_pipeline_model_parallel_size": None, "sequence_parallel": False, "context_parallel_size": 1},
        **{"expert_tensor_parallel_size": 1, "delay_wgrad_compute": False, "cuda_graph_impl": "none", "fp4": None},
    }
    for format_ in ("e4m3", "hybrid"):
        with pytest.raises(ModelError) as caught:
            check_layout(preset("nam56r"), SimpleNamespace(fp8=format_, **settings), ())  # type: ignore[arg-type]
        assert str(caught.value) == quoted.strip()
    with pytest.raises(ModelError, match="--fp4-format"):
        check_layout(preset("nam56r"), SimpleNamespace(fp8=None, **settings | {"fp4": "e2m1"}), ())  # type: ignore[arg-type]


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = re.findall(r"[\w-]+\.md", str(site["nav"]))
    assert sorted(listed) == [page.name for page in PAGES]
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            linked = DOCS / file if file else page
            assert linked.is_file(), (page.name, target)
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w]+", "-", heading.lower()).strip("-") for heading in headings}
            assert not anchor or anchor in slugs, (page.name, target)


def test_files_that_the_pages_name_exist() -> None:
    named = {
        word for page in PAGES for word in re.findall(r"`((?:examples|megacpp_mcore)/[\w/]+\.\w+)`", page.read_text())
    }
    assert {"examples/block_family.py", "examples/patch_only.sh", "examples/own_pattern.sh"} <= named
    assert [word for word in named if not (ROOT / word).is_file()] == []


def test_the_site_asks_for_nothing_from_a_network() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert site["theme"]["font"] is False
    assert site["plugins"] == ["search"]
    assert {"extra_css", "extra_javascript", "repo_url"}.isdisjoint(site)
    for page in PAGES:
        assert not re.search(r"!\[|<img|<script|<link", page.read_text(encoding="utf-8")), page


def test_the_site_is_built_strictly_from_pinned_packages_without_torch() -> None:
    lines = (ROOT / "requirements" / "docs.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {tuple(spec.operator for spec in pin.specifier) for pin in pins} == {("==",)}
    names = {pin.name.lower() for pin in pins}
    assert "mkdocs-material" in names
    assert not names & {"torch", "megatron-core", "numpy"}
    make = ["make", "--silent", "--dry-run", "-C", str(ROOT), "docs"]
    planned = subprocess.run(make, capture_output=True, text=True, check=True).stdout
    assert "requirements/environment.py docs" in planned
    assert "mkdocs --quiet build --strict" in planned
    assert "make docs" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_environment_of_the_site_is_one_of_its_own(tmp_path: Path) -> None:
    """The real script, with a lock file that asks for nothing (so that no network is needed)."""
    shutil.copy(ROOT / "requirements" / "environment.py", tmp_path)
    (tmp_path / "docs.txt").write_text("# nothing\n")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}

    def made(kind: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "environment.py"), kind]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = made("docs")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()
    assert Path(done.stdout.strip()).parents[1].name.startswith("docs-")
    refused = made("doc")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "there is no environment 'doc'; expected one of dev, docs" in refused.stderr
