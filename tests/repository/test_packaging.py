"""Every way to install: wheel, sdist, editable, git archive and a bare PYTHONPATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megacpp_mcore

ROOT = Path(__file__).parents[2]
MOUNTED = ("layer_specs", "patches", "nemo_recipes")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
SHOW = """
import sys
import megacpp_mcore, megacpp_mcore.commands.cli
import megacpp_mcore.layer_specs, megacpp_mcore.patches.machinery.registry, megacpp_mcore.nemo_recipes
assert "torch" not in sys.modules
print(megacpp_mcore.__file__)
"""


def call(*command: str, cwd: Path, **environment: str) -> str:
    """Run a command without network access for pip; returns what it printed, or fails with what it complained about."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**clean, "PIP_NO_INDEX": "1", **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def pip(*arguments: str, cwd: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    options += ["--no-compile"] * (arguments[0] == "install")
    call(sys.executable, "-m", "pip", arguments[0], *options, *arguments[1:], cwd=cwd)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with its symlinks, so that building leaves nothing in the real one."""
    target = tmp_path_factory.mktemp("clone") / "source"
    shutil.copytree(ROOT, target, symlinks=True, ignore=LEFT_OUT)
    return target


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    call(sys.executable, "-c", code, cwd=clone)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``make dist`` builds it, from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", str(folder), str(sdist), cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


def shown(site: Path, where: Path) -> Path:
    """Import the package from ``site``, treated as the first site-packages folder (so that .pth files count)."""
    first = "sys.path = sorted(sys.path, key=lambda path: path in known)"
    code = f"import site, sys; known = {{*sys.path}}; site.addsitedir({str(site)!r}); {first}\n{SHOW}"
    return Path(call(sys.executable, "-c", code, cwd=where).strip())


def sources() -> set[str]:
    """Every module of the package, by its path in an installation."""
    modules = set()
    for folder, inner, names in os.walk(ROOT / "megacpp_mcore", followlinks=True):
        inner[:] = [name for name in inner if name != "__pycache__"]
        modules |= {Path(folder, name).relative_to(ROOT).as_posix() for name in names if name.endswith(".py")}
    return modules


def test_the_wheel_adds_one_package_with_every_module(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        links = [info.filename for info in archive.infolist() if (info.external_attr >> 28) == 0o12]
    assert links == []
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"megacpp_mcore"}
    assert {name for name in names if name.startswith("megacpp_mcore/")} >= sources() | {"megacpp_mcore/py.typed"}
    pip("install", "--target", str(tmp_path / "site"), str(wheel), cwd=tmp_path)
    assert shown(tmp_path / "site", tmp_path).is_relative_to(tmp_path / "site")
    assert (tmp_path / "site" / "bin" / "megacpp-mcore").is_file()


def test_the_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(path))
        assert any(name.endswith("/LICENSE") for name in archive.namelist())
    assert metadata["Version"] == megacpp_mcore.__version__
    assert metadata["Requires-Python"] == ">=3.12"
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = "te ssm tokenizers data huggingface flash4 liger quack nemo demo dev report"
    assert set(metadata.get_all("Provides-Extra")) == set(extras.split())
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    hard = {entry.name.lower(): entry for entry in requirements if entry.marker is None}
    assert set(hard) == {"jinja2", "megatron-core", "numpy", "packaging", "psutil", "pyyaml", "torch"}
    for version, fits in (("0.18.4", False), ("0.19.0", True), ("0.19.2", True), ("0.20.0", True), ("0.21.0", False)):
        assert (version in hard["megatron-core"].specifier) is fits
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    supported = readme.partition("## Supported versions")[2].partition("```")[0]
    pinned = {entry.name: str(entry.specifier).removeprefix("==") for entry in requirements if entry.marker is not None}
    for name in ("flash-attn-4", "liger-kernel", "nemo-run", "quack-kernels"):
        assert pinned[name] in supported, name
    assert "| Megatron-Core | 0.19:" in supported
    assert "| torch | 2.11, " in supported
    for version, fits in (("2.10", False), ("2.11.0", True), ("2.14.1", True), ("2.15.0", True), ("2.16", False)):
        assert (version in hard["torch"].specifier) is fits
    impostors = {"apex", "deep-gemm", "deep_gemm", "megatron-bridge"}
    assert impostors.isdisjoint(entry.name.lower() for entry in requirements)


def test_the_sdist_holds_real_files(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    held = {member.name.partition("/")[2] for member in members}
    assert held >= sources() | {"LICENSE", "README.md", "setup.py", "pyproject.toml"}


@pytest.mark.exhaustive
def test_editable(clone: Path, tmp_path: Path) -> None:
    pip("install", "--prefix", str(tmp_path), "--editable", str(clone), cwd=tmp_path)
    site = sysconfig.get_path("purelib", vars={"base": str(tmp_path), "platbase": str(tmp_path)})
    assert shown(Path(site), tmp_path) == clone / "megacpp_mcore" / "__init__.py"


@pytest.fixture(scope="module")
def repository(clone: Path) -> Path:
    """The copy as a git repository with one commit."""
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "all")):
        named = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        call("git", *named, *words, cwd=clone, GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_SYSTEM=os.devnull)
    return clone


def test_git_archive_and_bare_pythonpath(repository: Path, tmp_path: Path) -> None:
    call("git", "archive", "--output", str(tmp_path / "tree.tar"), "HEAD", cwd=repository)
    unpacked = tmp_path / "unpacked"
    with tarfile.open(tmp_path / "tree.tar") as archive:
        links = {member.name: member.linkname for member in archive.getmembers() if member.issym()}
        archive.extractall(unpacked, filter="data")
    assert links == {f"megacpp_mcore/{name}": f"../{name}" for name in MOUNTED}
    printed = call(sys.executable, "-c", SHOW, cwd=tmp_path, PYTHONPATH=str(unpacked))
    assert Path(printed.strip()) == unpacked / "megacpp_mcore" / "__init__.py"


def test_a_clone_without_symbolic_links_is_refused_by_name_and_mended_as_said(repository: Path, tmp_path: Path) -> None:
    """If git cannot create symlinks, each is a one-line file, and the wheel would lack three folders."""
    clone = tmp_path / "clone"
    call("git", "clone", "-q", "-c", "core.symlinks=false", str(repository), str(clone), cwd=tmp_path)
    links = [clone / "megacpp_mcore" / name for name in MOUNTED]
    assert all(link.is_file() and not link.is_symlink() for link in links)
    version = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(version, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for name in MOUNTED:
        assert f"megacpp_mcore/{name}" in done.stderr
    remedy = done.stderr.partition("`")[2].partition("`")[0]
    call("bash", "-c", remedy, cwd=clone)
    assert call(*version, cwd=clone).strip().endswith(megacpp_mcore.__version__)


def test_locks_pin_everything_with_hashes_and_no_address() -> None:
    """With one hash pip asks for all of them, also of what a requirement needs."""
    pinned: dict[str, set[str]] = {}
    for name in ("bridge", "demo", "dev", "docs", "nemo-run"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
        assert not re.search("://|-index", text)
        lines = [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith(("#", "-r "))]
        for line in lines:
            assert re.fullmatch(r"[^ ]+==[^ ]+( ;.*?)?( +--hash=sha256:[0-9a-f]{64})+ *", line), line
        pinned[name] = {line.partition(" ")[0].lower() for line in lines}
    assert {"torch==2.11.0", "megatron-core==0.19.2"} <= pinned["demo"]
    assert not {pin.partition("==")[0] for pin in pinned["demo"]} & {pin.partition("==")[0] for pin in pinned["dev"]}
    assert (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8").count("\n-r demo.txt\n") == 1


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The real script with an empty lock file, so that no network is needed."""
    (tmp_path / "demo.txt").write_text("# nothing\n")
    (tmp_path / "dev.txt").write_text("-r demo.txt\n")
    return Path(shutil.copy(ROOT / "requirements" / "environment.py", tmp_path))


@pytest.mark.exhaustive
def test_the_environment_is_made_once_and_anew_when_half_made(script: Path, tmp_path: Path) -> None:
    """Run the real script from two callers at once."""
    (tmp_path / "demo.txt").write_text("-r more.txt\n")
    command = [sys.executable, str(script)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}

    def both() -> tuple[Path, int]:
        """Return the Python that both callers got, and how many of them created the environment."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        callers = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
        answers = [caller.communicate(timeout=240) for caller in callers]
        assert [caller.returncode for caller in callers] == [0, 0], answers
        (python,) = {out.strip() for out, _ in answers}
        return Path(python), sum("making" in err for _, err in answers)

    failed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "pip ended with status 1" in failed.stderr
    (half_made,) = (tmp_path / "cache" / "megacpp-mcore").glob("venv-*/")
    (half_made / "left-over").write_text("")
    (tmp_path / "more.txt").write_text("# nothing\n")
    assert both() == (half_made / "bin" / "python", 1)
    assert not (half_made / "left-over").exists()
    assert both() == (half_made / "bin" / "python", 0)
    assert "pip" in call(str(half_made / "bin" / "python"), "-m", "pip", "--version", cwd=tmp_path)


# Builds a wheel of its folder and writes into the sources, as setuptools does.
BACKEND = """
import pathlib, zipfile
def build_wheel(folder, settings=None, metadata=None):
    pathlib.Path("build").mkdir()
    name, info = "megatron_core-9.0-py3-none-any.whl", "megatron_core-9.0.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as wheel:
        wheel.write("megatron/core/__init__.py")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: megatron-core\\nVersion: 9.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""


@pytest.mark.exhaustive
def test_another_megatron_is_installed_before_the_packages_of_dev(script: Path) -> None:
    """Rebuilt if its sources have changed; nothing is written into them."""
    tree = script.parent / "tree"
    (tree / "megatron" / "core").mkdir(parents=True)
    command = [sys.executable, str(script), "megatron", str(tree)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(script.parent / "cache"), "PIP_NO_INDEX": "1"}

    def make_environment() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    assert f"{tree} is no Megatron-LM checkout: it has no pyproject.toml" in make_environment().stderr
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["megatron"]\n'
    files = {"pyproject.toml": system, "setup.py": "", "README.md": "", "megatron/backend.py": BACKEND}
    for name, content in files.items():
        (tree / name).write_text(content)
    pythons = []
    for number in (1, 1, 2):
        (tree / "megatron" / "core" / "__init__.py").write_text(f"number = {number}")
        done = make_environment()
        assert done.returncode == 0, done.stderr
        pythons.append(done.stdout.strip())
        printed = call(pythons[-1], "-c", "import megatron.core; print(megatron.core.number)", cwd=tree.parent)
        assert printed.strip() == str(number)
    assert pythons[0] == pythons[1] != pythons[2]
    assert {path.name for path in tree.iterdir()} == {"megatron", "pyproject.toml", "setup.py", "README.md"}


def test_a_missing_python_is_said_plainly() -> None:
    done = subprocess.run(["make", "venv", "BASE_PYTHON=no-such-python"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Python 3.12 or later was not found as 'no-such-python'" in done.stderr


# Stands before the standard library's venv on the script's path: its Python has no ensurepip, as on Debian.
VENV_WITHOUT_ENSUREPIP = """
import importlib.util, subprocess, sysconfig
spec = importlib.util.spec_from_file_location("stock_venv", sysconfig.get_path("stdlib") + "/venv/__init__.py")
stock_venv = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock_venv)
class EnvBuilder(stock_venv.EnvBuilder):
    def _setup_pip(self, context):
        self._call_new_python(context, "-m", "split_off_ensurepip", stderr=subprocess.STDOUT)
def create(target, with_pip):
    EnvBuilder(with_pip=with_pip).create(target)
"""
# No file may hold a byte, as where a disk or a quota is full.
WITHOUT_ROOM = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
runpy.run_path(sys.argv.pop(), run_name="__main__")
"""


def message(*command: str, without: tuple[str, ...] = (), **variables: str) -> str:
    """Return the message of a failing Python; expect status 1, nothing on stdout and no traceback."""
    environment = {name: value for name, value in os.environ.items() if name not in without} | variables
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_python_without_ensurepip_is_not_blamed_on_pip(script: Path, tmp_path: Path) -> None:
    (tmp_path / "venv.py").write_text(VENV_WITHOUT_ENSUREPIP)
    output = message(str(script), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "No module named split_off_ensurepip" in output
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"install python{version}-venv (Debian, Ubuntu), or say make BASE_PYTHON=" in output
    assert "pip ended with" not in output
    assert list((tmp_path / "cache").glob("*/venv-*/finished")) == []


def test_a_home_that_is_no_folder(script: Path) -> None:
    output = message(str(script), without=("XDG_CACHE_HOME",), HOME="/dev/null")
    assert output.startswith("/dev/null/.cache/megacpp-mcore cannot be written to (")
    assert output.endswith("; set XDG_CACHE_HOME to a writable folder\n")


def test_no_room_for_the_environment(script: Path, tmp_path: Path) -> None:
    output = message("-c", WITHOUT_ROOM, str(script), XDG_CACHE_HOME=str(tmp_path))
    assert re.search(rf"^{tmp_path}/megacpp-mcore/venv-\w+ cannot be made \(.*File too large", output, re.MULTILINE)
    assert output.endswith("; make room there, or set XDG_CACHE_HOME to another writable folder\n")
