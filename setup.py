"""Packaging of megacpp-mcore: one import package, optional parts as extras, no look-alike packages from PyPI."""

import atexit
import re
import runpy
import shutil
import tempfile
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSIONS = runpy.run_path(str(ROOT / "megacpp_mcore" / "versions.py"))

# PyPI's `apex` and `deep-gemm` are neither NVIDIA Apex nor DeepGEMM: they are never named here.
EXTRAS = {
    "te": ["transformer-engine[core-cu13,pytorch]==2.20.2"],
    # mamba-ssm requires this tilelang and this tvm-ffi; tilelang 0.1.15 resolves with `flash4` and `quack`, but not with it.
    "ssm": [
        "mamba-ssm==2.3.2.post1",
        "tilelang==0.1.8",
        "apache-tvm-ffi<=0.1.9",
        "z3-solver>=4.13,<4.15.5",
    ],
    "tokenizers": [
        "tokenizers",
        "transformers>=5.8",
    ],  # for --tokenizer DIR: here and in Megatron's HuggingFaceTokenizer
    "liger": ["liger-kernel==0.8.5"],
    # Together they need apache-tvm-ffi >= 0.1.11, which the tilelang of `ssm` excludes: no environment has all three.
    "quack": ["quack-kernels[cu13]==0.6.5"],
    "flash4": ["flash-attn-4[cu13]==4.0.0b36"],
    # Megatron-Bridge itself comes by `pip install --no-deps -r requirements/bridge.txt`: with its dependencies, pip
    # either fails on a source package or silently goes back to megatron-core 0.13.
    "nemo": [
        "nemo-run==0.11.1",
        "leptonai==0.27.0",
        "accelerate",
        "datasets>=2.20",
        "einops",
        "hydra-core>=1.3.4,<1.4",
        "omegaconf>=2.3",
        "peft>=0.18.1",
        "rich",
        "tensorboard>=2.19",
        "tqdm>=4.67.1",
        "transformers>=5.8,<=5.12.1",
        "wandb==0.29.0",
    ],
    "data": ["pyarrow>=16"],  # Parquet and .zst for `data prepare`
    "huggingface": ["safetensors>=0.5"],  # `checkpoint export` and `import`
    "report": ["matplotlib>=3.10"],  # curves on the page of `report html`, which has tables without it
    "demo": ["torch==2.11.0", f"megatron-core=={VERSIONS['MEGATRON_CORE_DEMO']}"],
    "dev": [
        "hypothesis",
        "import-linter",
        "matplotlib>=3.10",
        "mypy",
        "pytest>=8",
        "pytest-xdist",
        "ruff",
        "setuptools>=77",
        "tokenizers",
        "types-PyYAML",
        "wheel",
    ],
}


def version() -> str:
    """Read the package's version without importing the package."""
    text = (ROOT / "megacpp_mcore" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('megacpp_mcore/__init__.py has no line of the form __version__ = "1.2.3"')
    return match[1]


MOUNTED = [f"megacpp_mcore/{name}" for name in ("layer_specs", "nemo_recipes", "patches")]
if missing := [name for name in MOUNTED if not (ROOT / name).is_dir()]:
    raise RuntimeError(
        f"{', '.join(missing)}: expected symbolic links to folders; git or an archive tool made this copy without links. "
        "In a clone on Linux or WSL: `git config core.symlinks true && git checkout -- megacpp_mcore`, then install again"
    )

# pip builds in the source folder, and would leave build/ and *.egg-info in the clone.
scratch = tempfile.mkdtemp(prefix="megacpp-mcore-build-")
atexit.register(shutil.rmtree, scratch, ignore_errors=True)

setup(
    options={"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}},
    name="megacpp-mcore",
    version=version(),
    description="The hybrid model NAM56R (MLA, Mamba-3, MoE, M2RNN) for stock Megatron-Core, as a plugin package",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The megacpp-mcore maintainers",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=VERSIONS["PYTHON"],
    # The folders layer_specs, patches and nemo_recipes are mounted in the package by symlinks, which find_packages follows.
    packages=find_packages(include=["megacpp_mcore*"]),
    package_data={"megacpp_mcore": ["py.typed", "model/*.yaml", "commands/report_page.html"]},
    install_requires=[
        "Jinja2>=3.1",  # torch requires it, too
        f"megatron-core{VERSIONS['MEGATRON_CORE']}",
        "numpy",
        "packaging>=24.2",
        "psutil",  # megatron-core imports it to save a torch_dist checkpoint, but does not require it
        "PyYAML>=6",
        f"torch{VERSIONS['TORCH']}",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["megacpp-mcore = megacpp_mcore.__main__:main"],
        "nemo_run.cli": ["megacpp = megacpp_mcore.nemo_recipes.nemo_run"],  # the command `nemo megacpp`
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
