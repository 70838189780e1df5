"""What the launch policy sets is there before CUDA reads it, as the streams and the allocator of a launched script show.

So is what Transformer Engine reads: it has torch's cuDNN, whatever the system has.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import Training

ROOT = Path(__file__).parents[2]

SCRIPT = """
import importlib.util, json, os

import torch

def sleep(stream, milliseconds):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(milliseconds * 1.5e6))

busy, short = torch.cuda.Stream(), torch.cuda.Stream()
for stream in (busy, short):
    sleep(stream, 0.01)
torch.cuda.synchronize()
began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
began.record(short)
sleep(busy, 40)
sleep(busy, 40)
sleep(short, 0.01)
ended.record(short)
torch.cuda.synchronize()
variable = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
kept = torch.ones(1 << 20, device="cuda")
segments = torch.cuda.memory._snapshot()["segments"]
if importlib.util.find_spec("transformer_engine"):
    from transformer_engine.pytorch.utils import get_cudnn_version

    major, rest = divmod(torch.backends.cudnn.version(), 10000)
    assert get_cudnn_version() == (major, *divmod(rest, 100)), os.environ.get("CUDNN_HOME")
print("seen", json.dumps([variable, began.elapsed_time(ended), [segment["is_expandable"] for segment in segments]]))
"""


@pytest.mark.parametrize("tensor", [1, 2])
def test_cuda_obeys_the_policy_s_variables(tmp_path: Path, tensor: int) -> None:
    """Under TP 2 with SP the policy sets one connection: a short kernel then waits for the long ones of another stream."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    layout = Layout(tensor=tensor, sequence_parallel=tensor > 1)
    words = lower(Run(preset("nam56r_tiny"), layout, Training(data=("--mock-data",))))
    words = [word for word in words if word not in ("--spec", "megacpp_mcore", "nam56r_tiny")]
    decided = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDNN_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in decided}
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    environment |= {"WORLD_SIZE": str(tensor), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "megacpp_mcore", "launch", "--verbose", "--device", "cuda", "--", str(script), *words],
            cwd=ROOT, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(tensor)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * tensor, outputs[0][-3000:]
    connections, milliseconds, expandable = json.loads(outputs[0].partition("seen ")[2].splitlines()[0])
    assert connections == ("1" if tensor > 1 else None), outputs[0]
    assert (milliseconds > 20) == (tensor > 1)
    assert expandable
    assert all(expandable)
