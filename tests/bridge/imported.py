"""Imports Megatron-Bridge as a run does, without the CPU lane afterwards: for the process that forks (:mod:`tests.forks`)."""

import importlib

from tests.bridge.lane import with_bridge

with with_bridge():
    for name in (
        "megatron.bridge.training.gpt_step",
        "megatron.bridge.training.pretrain",
        "megacpp_mcore.nemo_recipes.run",
    ):
        importlib.import_module(name)
