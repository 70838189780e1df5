"""Digests of what recipes and layouts are lowered to, and of the launch policies of these runs: they change only on purpose.

``python -m tests.arguments.test_golden`` prints the file; ``… FOLDER`` writes the texts to FOLDER for comparison.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
from pathlib import Path
from unittest import mock

from megacpp_mcore import policy
from megacpp_mcore.arguments.read import read
from megacpp_mcore.commands import cli
from megacpp_mcore.model import PRESETS
from megacpp_mcore.model.recipes import RECIPES

GOLDEN = Path(__file__).parents[1] / "golden" / "lowered.json"
ROOT = str(Path(__file__).parents[2])
FOUR = ["--gpus-per-node", "4"]
STAGED = ["--set", "dsa.schedule=F"]
RUNS: dict[str, list[str]] = {
    **{name: [name] for name in (*PRESETS, *RECIPES)},
    "tensor": ["nam56r", "--tensor", "2", "--sequence-parallel", *FOUR],
    "expert": ["nam56r", "--expert", "4", *FOUR],
    "many experts": ["nam56r_wide", "--expert", "16", "--gpus-per-node", "16", "--global-batch-size", "16"],
    "pipeline": ["nam56r", "--pipeline", "2", "--virtual", "2", *FOUR, *STAGED],
    "stages": ["nam56r_tiny", "--pipeline", "2", "--gpus-per-node", "2", "--set", "pattern=AEMEA|EMEAEMR", "dsa.schedule=-FF"],
    "hybrid": ["nam56r", "--model-class", "hybrid", "--pipeline", "2", *FOUR, *STAGED],
    "hybrid recipe": ["nam56r_pretrain_8gpu_h200_bf16", "--model-class", "hybrid"],
    "local": ["nam56r_quarter", "--impl", "local", "--set", "precision=fp32", "cuda_graphs=true"],
    "tiny on GPUs": ["nam56r_tiny", "--device", "cuda", "--gpus-per-node", "2", "--lr", "0.0017", "--train-iters", "30"],
    "fp8 experts": ["nam56r", "--expert", "2", "--gpus-per-node", "2", "--set", "precision=bf16_te_fp8_experts"],
    "untrained indexers": ["nam56r_tiny", "--device", "cuda", *FOUR, "--set", "dsa.loss_coeff=0"],
    "dense": ["nam56r_tiny", "--set", "pattern=AMR", "depth=3", "dsa.schedule=-", "mtp.depth=0", "start.std=0.02",
              "start.head_gain=1"],
    "fsdp": ["nam56r", *FOUR, "extra=--use-torch-fsdp2 --recompute-granularity selective"],
}  # fmt: skip


def texts(folder: Path, *, brief: bool = True) -> dict[str, str]:
    """Return each run's arguments, one per line, and its launch policy on GPUs or the CPU."""
    golden = {}
    for name, words in RUNS.items():
        recipe = RECIPES.get(words[0])
        needed = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        needed |= {"MEGACPP_CONFIG": str(recipe.settings)} if recipe and recipe.settings else {}
        with (
            mock.patch.dict(os.environ, needed),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()),
        ):
            settings = ["--settings", str(folder / f"{len(golden)}.yaml")] if _changes_the_model(words) else []
            options = [word for word in words if not word.startswith("extra=")]
            assert cli.main(["recipe", "emit", *options, *settings, "--as", "args", "--data", "corpus"]) == 0, name
        extra = [part for word in words if word.startswith("extra=") for part in word[6:].split()]
        arguments = [*out.getvalue().splitlines(), *extra]
        device = "cpu" if "gloo" in arguments else "cuda"
        usual = recipe.processes if recipe else 1
        processes = int(words[words.index("--gpus-per-node") + 1]) if "--gpus-per-node" in words else usual
        run = read(arguments, device=device, processes=processes)
        golden[f"{name}: words"] = "\n".join(arguments).replace(ROOT, "ROOT")
        launched = policy.resolve(run, environment={})
        decided = [
            *(f"{decision.name}={decision.value} {decision.source}" for decision in launched.values),
            *(f"{decision.name} {decision.possible}" for decision in launched.overlaps),
        ]
        golden[f"{name}: policy"] = "\n".join(decided) if brief else launched.describe()
    return golden


def _changes_the_model(words: list[str]) -> bool:
    return any(word.partition("=")[0].partition(".")[0] in ("pattern", "depth", "dsa", "mtp", "start") for word in words)


def digests(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "MEGACPP_CONFIG"} | {"HOME": "/home"}
    with mock.patch.dict(os.environ, environment, clear=True):
        return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts(folder).items()}


def test_what_recipes_and_layouts_are_lowered_to(tmp_path: Path) -> None:
    assert digests(tmp_path) == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        if len(sys.argv) > 1:
            os.environ["HOME"] = "/home"
            for title, content in texts(Path(place), brief=False).items():
                Path(sys.argv[1], title.replace(": ", ".").replace(" ", "_")).write_text(content)
        else:
            print(json.dumps(digests(Path(place)), indent=1))
