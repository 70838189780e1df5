"""The page from a text to Hugging Face, every command of it, where transformers is installed; its export under lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import forks
from tests.bridge import forked
from tests.bridge.processes import run
from tests.repository.test_docs import PAGES, ROOT, blocks, expectations, missing

pytestmark = [pytest.mark.bridge, pytest.mark.slow]

TASK = """
task: counting
dataset_path: json
dataset_kwargs: {data_files: {test: cases.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
---
task: held_out
dataset_path: json
dataset_kwargs: {data_files: {test: cases.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
"""
END = "--- the end of a block ---"


@pytest.fixture(scope="module")
def session(bridge_python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of the page's commands, run one after the other, and what each block printed."""
    here = tmp_path_factory.mktemp("your_text")
    (here / "texts").mkdir()
    for name, page in PAGES.items():
        (here / "texts" / name).write_text(page[:2000])
    tools = f'pip() {{ :; }}\nmegacpp-mcore() {{ {forked.words(bridge_python)} -m megacpp_mcore "$@"; }}\n'
    commands = "".join(f"{block}\necho '{END}'\n" for block in blocks(PAGES["your-text.md"], "sh"))
    environment = os.environ | forks.shared(str(bridge_python)) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("MEGACPP_CONFIG", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "exec 2>&1\n" + tools + commands], cwd=here, env=environment,
        stdout=subprocess.PIPE, text=True, check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return here, done.stdout.split(END)[:-1]


def test_the_page_runs(session: tuple[Path, list[str]]) -> None:
    here, printed = session
    shown = expectations(PAGES["your-text.md"])
    assert len(shown) >= 2
    for number, expected in shown.items():
        assert missing(expected, printed[number]) == [], printed[number]
    score = json.loads((here / "score.json").read_text())
    assert score["step"] == 6
    assert score["unigram_bits_per_byte"] is None
    manifest = json.loads((here / "corpus" / "mine_heldout.manifest.json").read_text())
    assert score["tokens"] == manifest["tokens"] - 1
    assert 0 <= manifest["text_bytes"] - score["bytes"] < 20  # all but those of the first token
    assert score["bits_per_byte"] < 8
    assert "\ntext " in printed[4]
    assert (here / "run.html").stat().st_size > 10_000


def test_the_export_runs_under_lm_eval(session: tuple[Path, list[str]], bridge_python: Path, tmp_path: Path) -> None:
    here, _ = session
    cases = [{"question": f"text {n} of", "choices": [f" {n * n}", " none"], "answer": n % 2} for n in range(4)]
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    for number, task in enumerate(TASK.split("---")):
        (tmp_path / f"task{number}.yaml").write_text(task)
    words = ["lm_eval", "run", "--model", "hf", "--tasks", "counting,held_out", "--device", "cpu", "--batch_size", "1"]
    words += ["--model_args", f"pretrained={here / 'exported'},trust_remote_code=True", "--include_path", str(tmp_path)]
    words += ["--output_path", str(tmp_path / "found.json")]
    run(bridge_python, *words, folder=tmp_path)
    (file,) = tmp_path.glob("found*.json")
    results = json.loads(file.read_text())["results"]
    assert 0 <= results["counting"]["acc,none"] <= 1
    assert 1 < results["held_out"]["bits_per_byte,none"] < 8
