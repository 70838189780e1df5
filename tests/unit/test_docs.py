"""The documentation's promises: its commands run, its figures are the models', its messages are in the code.

Every line of a ``sh`` block of a page is carried out, a page in a folder of its own, as tests/unit/test_readme.py does it for
the README: ``megacpp-mcore`` for real, but ``launch`` is planned and ``bash FILE`` only parsed (tests/unit/test_examples.py and
tests/unit/test_stock_command.py train what they print). The site itself is built by ``make docs``.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

from megacpp_mcore import cli, config
from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import preset
from megacpp_mcore.recipes import RECIPES
from tests.unit import test_readme as readme

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ANYTHING = "…"


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def carry_out(line: str, patch: pytest.MonkeyPatch) -> str:
    """What a line prints; raises when it fails."""
    program, *words = shlex.split(line)
    if program == "export":
        patch.setenv(*words[0].split("=", 1))
        return ""
    if program == "bash":
        return subprocess.run(["bash", "-n", words[0]], check=True, capture_output=True, text=True).stdout
    if program.startswith("examples/"):
        assert (ROOT / program).is_file()
        assert Path(program).name in (ROOT / "tests" / "unit" / "test_examples.py").read_text(encoding="utf-8")
        return ""
    if "megacpp_mcore.nemo_recipes.run" in words:
        assert (ROOT / "nemo_recipes" / "run.py").is_file()
        assert "--list" in words or words[words.index("--recipe") + 1] in RECIPES
        return ""
    return readme.carry_out(line)


@pytest.mark.parametrize("page", [page.name for page in PAGES if "```sh" in page.read_text(encoding="utf-8")])
def test_the_commands_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(config.VARIABLE, raising=False)
    (tmp_path / "pretrain_gpt.py").write_text("")
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    lines = [line for block in blocks(text(page), "sh") for line in block.splitlines()]
    assert lines
    printed = {line: carry_out(line, monkeypatch) for line in lines}
    for line in lines:
        if "recipe emit" in line and " > " not in line:
            assert "--spec megacpp_mcore nam56r" in printed[line], line
    assert {line.split()[0].partition("/")[0] for line in lines} <= {
        *("megacpp-mcore", "make", "pip", "python", "torchrun", "mapfile", "bash", "export", "examples")
    }


def test_the_settings_of_the_pattern_page_are_those_that_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = text("own-pattern.md")
    (shown,) = blocks(page, "yaml")
    (line,) = (line for block in blocks(page, "sh") for line in block.splitlines() if "--settings" in line)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(config.VARIABLE, raising=False)
    assert cli.main(shlex.split(line.partition(" > ")[0])[1:]) == 0
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text()) == yaml.safe_load(shown)
    (tmp_path / "shown.yaml").write_text(shown)
    assert config.load(tmp_path / "shown.yaml").model.layers == "AMEAMAR"


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


def rendered(node: ast.expr) -> str | None:
    """A text of the code with ``…`` in the place of what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else ANYTHING for part in node.values)
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
