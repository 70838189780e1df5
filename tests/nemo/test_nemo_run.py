"""nemo-run's command and examples: what they submit, what they refuse, and a recipe that is trained through them."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.observe.steps import read_steps
from tests import forks
from tests.bridge import forked

ROOT = Path(__file__).parents[2]
TINY = "nam56r_tiny_pretrain_1cpu_fp32"
ODD = "dataset.data_path=/data/a b$$c'd\"$HOME/text"
"""An override that a shell, or nemo-run's macros, would change."""

# Stands for the Python with Bridge: is content with itself, then writes its words, one a NUL, and fails.
JOB = '#!/usr/bin/bash\n[ "$1" = -c ] && exit 0\nprintf "%s\\0" "$@" > "$(dirname "$0")/words"\nexit 3\n'
# Stand for Slurm's programs: of srun, what follows its own options is run.
SLURM = {
    "sbatch": '#!/usr/bin/bash\necho "${@: -1}" > "$(dirname "$0")/submitted"; echo 4242\n',
    "scontrol": "#!/usr/bin/bash\necho node7\n",
    "srun": '#!/usr/bin/bash\nfor word; do [ "$word" = hostname ] && { echo 10.0.0.7; exit; }; done\n'
    'until [[ $1 == */python ]]; do shift; done; exec "$@"\n',
    "squeue": "#!/usr/bin/bash\n",
}

# A file that nemo-run reads, from which a command line takes its executor.
WORKSPACE = """import nemo_run as run
@run.cli.factory
def cluster() -> run.Config[run.SlurmExecutor]:
    return run.Config(run.SlurmExecutor, account="me", gpus_per_node=8, packager=run.Config(run.Packager))
"""


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what an installation of this clone tells other packages: its entry points."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture
def environment(site: Path, tmp_path: Path) -> dict[str, str]:
    """Everything that nemo-run writes is under ``tmp_path``; lines are wide enough not to be broken."""
    own = {"PYTHONPATH": f"{site}:{ROOT}", "NEMORUN_HOME": str(tmp_path / "home"), "COLUMNS": "2000", "TERM": "dumb"}
    return os.environ | own | {"OMP_NUM_THREADS": "1"}


def run(*command: str | Path, environment: dict[str, str], folder: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == status, (done.stdout + done.stderr)[-4000:]
    return done


def nemo(python: Path) -> Path:
    return python.parent / "nemo"


LOCAL = ["LocalExecutor", {}]
NODE = {"account": "me", "gpus_per_node": 8}
TWO_NODES = {"account": "me", "gpus_per_node": 4, "nodes": 2}
ACCEPTED: list[tuple[list[Any], str, list[str]]] = [
    (["nam56r", "PYTHON", [], ["LocalExecutor", {"ntasks_per_node": 8}]], "nam56r_pretrain_8gpu_h200_bf16", []),
    (["nam56r", "PYTHON", [], None], "nam56r_pretrain_1gpu_h200_bf16", []),
    (["nam56r_tiny", "PYTHON", ["train.train_iters=2"], None], TINY, ["train.train_iters=2"]),
    ([f"{TINY}_config", "PYTHON", [], LOCAL], TINY, []),
    (["nam56r", "python", [], ["SlurmExecutor", NODE]], "nam56r_pretrain_8gpu_h200_bf16", []),
    (["nam56r", "python", [], ["SlurmExecutor", TWO_NODES]], "nam56r_pretrain_8gpu_h200_bf16", []),
]  # fmt: skip
REFUSED: list[tuple[list[Any], str]] = [
    (["nam56r_tinny", "PYTHON", [], None], f"ModelError: there is no recipe 'nam56r_tinny'; did you mean '{TINY}'"),
    (["nam56r", "PYTHON", [], ["LocalExecutor", {"ntasks_per_node": 3}]], "nam56r has no recipe for the 3 processes"),
    (
        [TINY, "PYTHON", [], ["LocalExecutor", {"ntasks_per_node": 2}]],
        "needs 1 processes, but the LocalExecutor starts 2",
    ),
    ([TINY, "PYTHON", [], ["LocalExecutor", {"nodes": 2}]], "2 nodes; expected 1, this machine"),
    ([TINY, "PYTHON", [], ["LocalExecutor", {"launcher": "torchrun"}]], "has the launcher 'torchrun'; leave it out"),
    (["nam56r", "python", [], ["SlurmExecutor", {**NODE, "ntasks_per_node": 8}]], "expected ntasks_per_node=1"),
    (["nam56r", "python", [], ["DockerExecutor", {"container_image": "x"}]], "is a DockerExecutor; expected a Local"),
    ([TINY, "PYTHON", ["train.train_iters"], None], "'train.train_iters' is not of the form KEY=VALUE"),
    ([TINY, "PYTHON", ["--list=1"], None], "'--list=1' is not of the form KEY=VALUE"),
    ([TINY, "/nowhere/python", [], None], "python=/nowhere/python is not a program on this machine"),
    ([TINY, "bash", [], None], "python=bash is not called python"),
    ([TINY, "NEMO", [], None], "cannot run the recipes: Megatron-Bridge is not installed"),
]


def test_what_is_submitted_and_what_is_refused(nemo_run_python: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """All of it in one process, which imports neither torch nor Megatron and leaves nothing behind."""
    python = program(tmp_path, "python", JOB)
    names = {"PYTHON": str(python), "NEMO": str(nemo_run_python)}
    cases = [case for case, *_ in (*ACCEPTED, *REFUSED)]
    requests = json.dumps([[name, names.get(word, word), *rest] for name, word, *rest in cases])
    done = run(nemo_run_python, "-m", "tests.nemo.plans", requests, environment=environment, folder=ROOT)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["imported"] == []
    accepted, refused = report["answers"][: len(ACCEPTED)], report["answers"][len(ACCEPTED) :]
    for (case, recipe, overrides), answer in zip(ACCEPTED, accepted, strict=True):
        words = answer["words"]
        assert (answer["recipe"], words[0]) == (recipe, names.get(case[1], case[1]))
        assert words[1:3] == ["-m", "torch.distributed.run"]
        counts = [int(words[words.index(option) + 1]) for option in ("--nnodes", "--nproc-per-node")]
        assert counts[0] * counts[1] == RECIPES[recipe].processes
        assert words[words.index("--recipe") - 2 :] == [
            "-m", "megacpp_mcore.nemo_recipes.run", "--recipe", recipe, *overrides
        ]  # fmt: skip
        assert ("--standalone" in words) is (answer["executor"] == "LocalExecutor")
    assert {accepted[-1]["words"].index("2"), accepted[-1]["words"].index("4")} == {4, 6}
    for (case, says), answer in zip(REFUSED, refused, strict=True):
        assert says in answer["refused"], case
    assert not (tmp_path / "home" / "experiments").exists()


def test_the_command_prints_and_submits_nothing(nemo_run_python: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """--dryrun prints the job's command without prompting."""
    python = program(tmp_path, "python", JOB)
    command = [nemo(nemo_run_python), "megacpp", "pretrain", f"python={python}", "--dryrun"]
    done = run(*command, f"recipe={TINY}", "train.train_iters=2", environment=environment, folder=tmp_path)
    for word in ("torch.distributed.run", "megacpp_mcore.nemo_recipes.run", TINY, "train.train_iters=2"):
        assert f"'{word}'" in done.stdout
    (tmp_path / "workspace.py").write_text(WORKSPACE)
    elsewhere = ("recipe=nam56r", "run.executor=cluster", "run.executor.time=01:00:00", "train.train_iters=2")
    script = run(*command, *elsewhere, environment=environment, folder=tmp_path).stdout
    for line in ("#SBATCH --gpus-per-node=8", "#SBATCH --time=01:00:00", "--nproc-per-node 8", " train.train_iters=2"):
        assert line in script
    assert not (tmp_path / "words").exists()
    assert list((tmp_path / "home").rglob("*_TASKS")) == []


def test_a_job_gets_its_words_and_its_failure_is_the_commands(
    nemo_run_python: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    python = program(tmp_path, "python", JOB)
    done = run(
        nemo(nemo_run_python), "megacpp", "pretrain", f"recipe={TINY}", f"python={python}", ODD, "--yes",
        environment=environment, folder=tmp_path, status=1,
    )  # fmt: skip
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert words[-3:] == ["--recipe", TINY, ODD]
    assert f"job {TINY} ended as FAILED; its log is under {tmp_path / 'home'}" in done.stderr


def test_the_slurm_example_submits_what_it_prints(nemo_run_python: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """The batch script, as it is printed and as it is submitted; run by stand-ins of Slurm, it starts torchrun."""
    python = program(tmp_path, "python", JOB)
    for name, text in SLURM.items():
        program(tmp_path, name, text)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    data = ODD.partition("=")[2]
    command = [nemo_run_python, ROOT / "examples" / "nemo_run_slurm.py", "--account", "me", "--data", data]
    command += ["--python", python, "train.train_iters=5"]
    printed = run(*command, "--dry-run", environment=environment, folder=tmp_path).stdout
    assert not (tmp_path / "submitted").exists()
    run(*command, environment=environment, folder=tmp_path)
    script = Path((tmp_path / "submitted").read_text().strip())
    flags = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script.read_text(), re.MULTILINE))
    assert {flags["nodes"], flags["ntasks-per-node"]} == {"1"}
    assert (flags["gpus-per-node"], flags["account"], flags["time"]) == ("8", "me", "04:00:00")
    for line in ("#SBATCH --gpus-per-node=8", "#SBATCH --nodes=1", "--nproc-per-node 8", "train.train_iters=5"):
        assert line in printed
    done = subprocess.run(
        ["bash", str(script)], env=environment | {"SLURM_JOB_ID": "4242"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr[-2000:]
    assert (tmp_path / "words").read_text().split("\0")[:-1] == [
        *shlex.split("-m torch.distributed.run --nnodes 1 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 4242"),
        *("--rdzv-endpoint", "10.0.0.7:29500", "-m", "megacpp_mcore.nemo_recipes.run"),
        *("--recipe", "nam56r_pretrain_8gpu_h200_bf16", ODD, "train.train_iters=5"),
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_example_trains_on_this_machine(
    nemo_run_python: Path, bridge_python: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Two steps, submitted by a Python without torch and trained by the one with Megatron-Bridge."""
    (prefix,) = prepare([argparse.__file__], str(tmp_path / "text"), overwrite=True)
    command = [nemo_run_python, ROOT / "examples" / "nemo_run_local.py", bridge_python, prefix]
    done = run(*command, "train.train_iters=2", environment=environment, folder=tmp_path)
    losses = re.findall(r"iteration +(\d)/ +2 \|.* lm loss: (\S+)", done.stdout)
    assert [int(step) for step, _ in losses] == [1, 2]
    assert float(losses[1][1]) < float(losses[0][1])


SMALL = {
    "hidden_size": 64, "heads": 2, "ffn_hidden_size": 64, "seq_length": 32, "dsa": {"topk": 16}, "mamba3": {"groups": 2},
}  # fmt: skip
ON_CPU = "train_iters=2 device=cpu precision=fp32 transformer_impl=local"


@pytest.mark.slow
def test_a_model_of_ones_own_trains_through_every_entry_point_from_one_file(
    nemo_run_python: Path, bridge_python: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The file and the commands of docs/extending.md, at small sizes and on the CPU."""
    checkout = os.environ.get("MEGATRON_LM")
    page = (ROOT / "docs" / "extending.md").read_text()
    ((file, commands),) = re.findall(
        r'^```yaml title="half_mamba.yaml"\n(.*?)^```.*?^```sh\n(.*?)^```', page, re.DOTALL | re.MULTILINE
    )
    content, commands = yaml.safe_load(file), commands.replace("train_iters=20", ON_CPU)
    content["overrides"] = SMALL | content["overrides"] | {name: SMALL[name] for name in ("hidden_size", "heads")}
    (tmp_path / "half_mamba.yaml").write_text(yaml.safe_dump(content))
    commands = re.sub(r".*pip install.*\n", "", commands)  # the package is on the path of this environment
    if not checkout:
        commands = re.sub(r".*pretrain_hybrid.py.*\n", "", commands)
    for name, words in (("script", "-- pretrain_hybrid.py "), ("wheel", '-- "$')):
        commands = commands.replace(f"--device cuda {words}", f"--device cpu --observe {name} {words}")
    commands = commands.replace("nemo_recipes.run", "nemo_recipes.run --observe bridge")
    python = program(tmp_path, "python", f'#!/usr/bin/bash\nexec {forked.words(bridge_python)} "$@"\n')
    program(tmp_path, "megacpp-mcore", f'#!/usr/bin/bash\nexec {python} -m megacpp_mcore "$@"\n')
    program(tmp_path, "make", f'#!/usr/bin/bash\n[[ "$*" = *bridge ]] && echo {python} || echo {nemo_run_python}\n')
    (tmp_path / "corpus").mkdir()
    prepare([argparse.__file__], str(tmp_path / "corpus" / "stdlib_train"))
    own = {"PATH": f"{tmp_path}:{environment['PATH']}", **forks.shared(str(bridge_python))}
    done = run("bash", "-euo", "pipefail", "-c", commands, environment=environment | own, folder=tmp_path)

    def of(name: str) -> list[dict[str, float]]:
        return [step.values() for step in read_steps(tmp_path / name)]

    assert "building half_mamba on HybridModel, pattern +MEM" in done.stdout + done.stderr
    assert len(of("wheel")) == 2
    # Bridge's loop counts the layers of experts by which it divides their losses in the log itself (the patch moe-metrics).
    for by_bridge, by_wheel in zip(of("bridge"), of("wheel"), strict=True):
        alike = {name: loss for name, loss in by_wheel.items() if not name.endswith(("balancing_loss", "z_loss"))}
        assert by_bridge | alike == by_bridge
    printed = [float(loss) for loss in re.findall(r"iteration +\d/ +2 \| consumed.* lm loss: (\S+)", done.stdout)]
    by_both = [step["lm loss"] for step in of("wheel")] * 2  # by Bridge, and by nemo-run
    assert printed == pytest.approx(by_both, rel=1e-6)
    if not checkout:
        pytest.skip("its first command is for a checkout's script; MEGATRON_LM names none (tag core_v0.19.0)")
    assert of("script") == of("wheel")


def test_nemo_toolkit_3_beside_us(nemo_run_python: Path) -> None:
    """One process imports both and makes the layers; the environment of nemo-run only lends the toolkit's files."""
    command = [str(nemo_run_python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    done = forks.run(["-m", "tests.nemo.beside_toolkit", packages], megatron=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["imported"] == report["installed"] == "3.0.0"
    assert report["layers"] == RECIPES[TINY].model.depth
