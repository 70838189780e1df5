"""The patch exit-signal: a signal to any rank ends all ranks after the same step, one later."""

from __future__ import annotations

import os

from tests import forks, stock

CODE = """
import json, os, signal, sys
import torch
from megatron.training.dist_signal_handler import DistributedSignalHandler
from megacpp_mcore import patches
patches.apply(["exit-signal"])
torch.distributed.init_process_group("gloo")
stops = []
with DistributedSignalHandler(signal.SIGTERM) as handler:
    for step in range(1, 6):
        if step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        if any(handler.signals_received()):
            stops.append(step)
torch.distributed.destroy_process_group()
print(f"rank {os.environ['RANK']} stops after {stops}")
"""


def test_all_ranks_stop_after_the_same_step() -> None:
    environment = os.environ | {"PYTHONPATH": str(stock.ROOT), "OMP_NUM_THREADS": "1"}
    status, output = forks.run_ranks(["-c", CODE], 2, env=environment)
    assert status == 0, output[-3000:]
    for rank in range(2):
        assert f"rank {rank} stops after [4, 5]" in output
