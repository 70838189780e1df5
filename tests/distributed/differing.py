"""One of two processes, the second differs in one way after the other."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

import megacpp_mcore
from megacpp_mcore import settings
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model import preset
from megacpp_mcore.policy import ranks
from megacpp_mcore.util import host
from tests import stock

FILE = {"model": "nam56r_tiny", "overrides": {"dsa": {"topk": 32}}, "speed_defaults": {"cache_root": "/a"}}

ARGUMENTS = {
    "--lr": ("--lr", "0.123"),
    "--tensor-model-parallel-size": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "the datasets, by their manifests' digest": ("--data-cache-path", "/cache/0123456789abcdef"),
}
FILES: dict[str, dict[str, Any]] = {
    "MEGACPP_CONFIG model.dsa.topk": {"overrides": {"dsa": {"topk": 16}}},
    "MEGACPP_CONFIG backends.mamba3": {"backends": {"mamba3": "reference"}},
}
ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "MEGACPP_DISABLE_TE": "1"}
OTHER = ("MEGACPP_CONFIG", "the code of megacpp-mcore", "version of torch")
WAYS = (*ARGUMENTS, *FILES, *ENVIRONMENT, *OTHER)
HOSTS_OWN = (
    *("--data-cache-path", "/of/this/host", "--tensorboard-dir", "/of/this/host", "--wandb-exp-name", "12:34:56"),
    *("--non-persistent-local-ckpt-dir", "/of/this/host", "--memory-snapshot-path", "/of/this/host"),
    *("--result-rejected-tracker-filename", "/of/this/host"),
)
FAILS = "an error of one rank"
SAME = ("nothing", "another path of the file", "what is a rank's own")


@contextlib.contextmanager
def different(way: str, folder: Path) -> Iterator[settings.PluginConfig | None]:
    """This process in that way unlike the other, and its file."""
    from megatron.training import global_vars

    content: dict[str, Any] | None = FILE
    with contextlib.ExitStack() as stack:
        words = ARGUMENTS.get(way, ())
        if way in FILES:
            content = FILE | FILES[way]
        elif way in ENVIRONMENT:
            stack.enter_context(mock.patch.dict(os.environ, {way: ENVIRONMENT[way]}))
        elif way == "MEGACPP_CONFIG":
            content = None
        elif way == "the code of megacpp-mcore":
            code = folder / "code"
            shutil.copytree(Path(megacpp_mcore.__file__).parent, code / "megacpp_mcore")
            with (code / "megacpp_mcore" / "layer_specs" / "mamba.py").open("a") as file:
                file.write("\n")
            (code / "megacpp_mcore" / ".#editor.py").symlink_to("somebody@host.7")
            stack.enter_context(mock.patch.object(megacpp_mcore, "__file__", str(code / "megacpp_mcore/__init__.py")))
        elif way == FAILS:
            denied = PermissionError(13, "Permission denied")
            stack.enter_context(mock.patch.object(ranks, "_digest", side_effect=denied))
        elif way == "version of torch":
            known: Callable[[str], str | None] = host.version
            stack.enter_context(mock.patch.object(host, "version", lambda name: "1.0" if name == "torch" else known(name)))
        elif way == "another path of the file":
            content = FILE | {"speed_defaults": {"cache_root": "/b"}}
        elif way == "what is a rank's own":
            words = HOSTS_OWN
            own = {"CUDA_VISIBLE_DEVICES": "7", "LOCAL_RANK": "5", "NCCL_SOCKET_IFNAME": "a", "CUBLAS_LOGDEST_DBG": "a"}
            stack.enter_context(mock.patch.dict(os.environ, own))
        arguments = stock.parse(stock.words(preset("nam56r_tiny"), *words, processes=2), 2)
        stack.enter_context(mock.patch.object(global_vars, "_GLOBAL_ARGS", arguments))
        path = folder / f"{os.environ['RANK']} {way.replace('/', ' ')}.yaml"
        path.write_text(yaml.safe_dump(content))
        yield None if content is None else settings.load(path)


def main(folder: Path) -> dict[str, str]:
    """The error of this rank in each way."""
    rank, found = int(os.environ["RANK"]), {}
    with stock.one_process(folder / "store", tensor_model_parallel_size=1):
        for way in (*SAME, *WAYS, FAILS):
            with different(way if rank else "nothing", folder) as content:
                try:
                    ranks.compare(content)
                except LaunchError as error:
                    found[way] = str(error)
    return found
