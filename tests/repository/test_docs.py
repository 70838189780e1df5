"""The promises of README and docs: commands that run (exhaustive: in a real bash, against the ``text`` behind them)."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from megacpp_mcore import policy
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.commands import cli
from megacpp_mcore.model import preset
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.run import Run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
ANYTHING = "…"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


WITH_COMMANDS = [name for name, page in PAGES.items() if blocks(page, "sh")]
TRAINING = [name for name in WITH_COMMANDS if re.search(r"^bash |^megacpp-mcore launch ", PAGES[name], re.MULTILINE)]
OTHERS = {
    "bash", "cat", "cd", "cp", "examples", "export", "git", "mapfile", "mkdir", "ncu", "nsys", "pip", "python", "sbatch",
    "unset",
}  # fmt: skip


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of every command, without leading assignments and output redirections."""
    for line in "".join(blocks(page, "sh")).splitlines():
        words = shlex.split(re.split(r" \| | > | \|\| ", line)[0])
        yield list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_0-9]+=.*", word), words))


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_is_one_that_its_program_takes(page: str) -> None:
    for program, *words in commands(PAGES[page]):
        if program == "torchrun" and "megacpp_mcore" in words:
            program, words = "megacpp-mcore", words[words.index("megacpp_mcore") + 1 :]
        if program == "megacpp-mcore":
            cli.parse(words)
        elif program == "make":
            subprocess.run(["make", "--silent", "--dry-run", "-C", str(ROOT), *words], check=True, capture_output=True)
        elif program.startswith("$"):  # the Python of another environment, or a program installed with it
            named = {word for word in words if word in RECIPES} | {
                name for word in words for name in RECIPES if word.startswith("recipe=") and name.startswith(word[7:])
            }
            assert named or {"--list", "pip"} & set(words), words
        else:
            assert program.partition("/")[0] in OTHERS or "=$(" in program, (page, program)


TOOLS = {
    "megacpp-mcore": """
case " $* " in
    *" --device cuda -- "*|*" --device cuda "*" -- "*) exit ;;
    " checkpoint export "*|" checkpoint import "*) exit ;; # needs safetensors: tests/bridge/test_huggingface.py
    *" launch "*" -- pretrain_"*) [ -d "$MEGATRON_LM" ] || { echo "a checkout is needed"; exit; } ;;
    " data corpus --output corpus ") if [ -d "$DOC_CORPUS" ]; then cp -r "$DOC_CORPUS" corpus; exit; fi ;;
esac
"$DOC_PYTHON" -W ignore -m megacpp_mcore "$@"
""",
    "make": 'case "$*" in *bridge) echo "$DOC_TOOLS/nothing" ;; *nemo-run) echo "$DOC_TOOLS/nothing" ;; esac',
    "python": 'exec "$DOC_PYTHON" "$@"',
    "sbatch": 'bash -n "$1"',
    **dict.fromkeys(("ncu", "nemo", "nothing", "nsys", "pip", "torchrun"), ":"),
}
"""Programs that a session finds before any other."""


def expectations(page: str) -> dict[int, list[str]]:
    """Return the lines of each ``text`` block that follows an ``sh`` block, by the number of the ``sh`` block."""
    outputs = {}
    for number, match in enumerate(re.finditer(r"^```sh\n.*?^```\n", page, re.DOTALL | re.MULTILINE)):
        output = re.match(r"\s*```text\n(.*?)^```", page[match.end() :], re.DOTALL | re.MULTILINE)
        if output is not None:
            outputs[number] = output[1].splitlines()
    return outputs


def missing(expected: Sequence[str], printed: str) -> list[str]:
    """Return the lines of ``expected`` that ``printed`` lacks, in order; ``…`` matches anything."""
    lines, absent = iter(printed.splitlines()), []
    for line in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in line.split(ANYTHING)) + r"\s*")
        if line.strip() not in ("", ANYTHING) and not any(pattern.fullmatch(text) for text in lines):
            absent.append(line)
            lines = iter(())
    return absent


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus that the pages build, built once."""
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    assert cli.main(["data", "corpus", "--output", str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if page != "your-text.md"])  # tests/bridge/test_your_text.py
def test_the_commands_run(page: str, corpus: Path, tmp_path: Path) -> None:
    """Every launch on the CPU for real; those of a stock script where MEGATRON_LM names a checkout."""
    tools, here, checkout = tmp_path / "tools", tmp_path / "here", os.environ.get("MEGATRON_LM", "")
    (here / "texts").mkdir(parents=True)
    tools.mkdir()
    for name, body in TOOLS.items():
        (tools / name).write_text(f"#!/bin/bash\nset -e\n{body}\n")
        (tools / name).chmod(0o755)
    (here / "examples").symlink_to(ROOT / "examples")
    if checkout:  # where the README clones it to
        (tmp_path / "Megatron-LM").symlink_to(checkout)
    for number in range(60):
        (here / "texts" / f"{number}.txt").write_text(f"text {number}\n" * 9)
    for name, content in re.findall(r'^```yaml title="([^"\n]*)"\n(.*?)^```', PAGES[page], re.DOTALL | re.MULTILINE):
        (here / name).write_text(content)
    environment = {key: value for key, value in os.environ.items() if key != plugin_config.VARIABLE} | {
        **{"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "MEGATRON_LM": checkout},
        **{"DOC_PYTHON": sys.executable, "DOC_TOOLS": str(tools), "DOC_CORPUS": str(corpus)},
    }
    end = "--- the end of a block ---"
    session = "exec 2>&1\ngit() { :; }\n" + "".join(f"{block}\necho '{end}'\n" for block in blocks(PAGES[page], "sh"))
    command = ["bash", "-euo", "pipefail", "-c", session]
    done = subprocess.run(command, cwd=here, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    printed = done.stdout.split(end)[:-1]
    for number, expected in expectations(PAGES[page]).items():
        block = blocks(PAGES[page], "sh")[number]
        if "a checkout is needed" not in printed[number] and "--device cuda" not in block and "make demo" not in block:
            assert missing(expected, printed[number]) == [], (page, number, printed[number])
    losses = re.findall(r"(?:iteration|step) +(\d+)/ *(\d+)(?: .*?\| lm |  )loss:? (\S+)", done.stdout)
    assert all(float(loss) < 7 for *_, loss in losses)
    if page == "README.md" and not checkout:
        pytest.skip("its training is a checkout's; MEGATRON_LM names none (tag core_v0.19.0)")
    assert page not in TRAINING or any(step == last for step, last, _ in losses)


def test_the_model_card_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change of a model: megacpp-mcore recipe list --markdown > docs/model-card.md"""
    assert cli.main(["recipe", "list", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGES["model-card.md"]
    row = re.search(r"^\| `nam56r` \| (.*) \|$", PAGES["model-card.md"], re.MULTILINE)
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
    assert 1 < float(gflop) * 1e9 / products < 1.15  # the rest: attention and the scans over a sequence


def table(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table under a heading, without its header and separator."""
    section = re.split(r"^#+ ", page.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]
    first = itertools.dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    rows = [line.strip("| ").split(" | ") for line in itertools.takewhile(lambda line: line.startswith("|"), first)]
    return [[cell.strip(" |") for cell in row] for row in rows[2:]]


def test_the_groups_of_the_launch_page_are_those_of_the_file() -> None:
    shown = {key.strip("`"): default for key, default, _ in table(PAGES["launch.md"], "The file")}
    groups = {
        "speed_defaults": plugin_config.SpeedDefaults,
        "experimental_taxes": plugin_config.ExperimentalTaxes,
        "checkpoints": plugin_config.Checkpoints,
        "observability": plugin_config.Observability,
    }
    assert shown == {
        f"{group}.{field.name}": str(yaml.safe_dump(field.default)).splitlines()[0]
        for group, kind in groups.items()
        for field in dataclasses.fields(kind)
    } | {"max_documents": "null"}
    overlaps = {name for name, *_ in table(PAGES["launch.md"], "Overlap")}
    assert overlaps == {overlap.name for overlap in policy.overlap_contract(Run(), None)}


def rendered(node: ast.expr) -> str | None:
    """Return a string of the code with ``…`` for each placeholder."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in node.values)
    return None


def messages() -> Iterator[str]:
    folders = ("megacpp_mcore", "layer_specs", "patches", "nemo_recipes")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            message = rendered(node) if isinstance(node, ast.expr) else None
            if message and " " in message:
                yield message


def test_every_message_of_the_troubleshooting_page_is_in_the_code() -> None:
    page = PAGES["troubleshooting.md"]
    quoted = [line.removeprefix("> ") for line in page.splitlines() if line.startswith("> ")]
    assert len(quoted) > 25
    assert len(set(quoted)) == len(quoted)
    written = "\n".join(messages())
    assert [message for message in quoted if message.rstrip(ANYTHING) not in written] == []
    assert "a message that nobody wrote" not in written


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(["README.md", *re.findall(r"[\w-]+\.md", str(site["nav"]))]) == sorted(PAGES)
    for name, page in PAGES.items():
        folder = ROOT if name == "README.md" else DOCS
        for target in re.findall(r"\]\((?!https://)([^)\s]+)\)", page):
            file, _, anchor = target.partition("#")
            linked = folder / (file or name)
            assert linked.exists(), (name, target)
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w]+", "-", raw.lower()).strip("-") for raw in headings}, target


def test_every_module_in_the_table_of_a_package_exists() -> None:
    packages = ROOT.glob("megacpp_mcore/*/__init__.py")
    tables = {file: re.findall(r":mod:`~?\.(\w+)`", file.read_text()) for file in packages}
    assert sum(map(bool, tables.values())) > 3
    named = [file.with_name(name) for file, names in tables.items() for name in names]
    assert [str(path) for path in named if not (path.with_suffix(".py").exists() or path.is_dir())] == []
