"""Converts an exported model to a checkpoint and back with Bridge's AutoBridge, or through a model sharded over two processes.

python -m tests.bridge.auto_bridge FOLDER BACK [CHECKPOINT]    in an environment with Megatron-Bridge; on the CPU lane
"""

import os
import sys

import torch.distributed as dist

from megacpp_mcore.model import Layout, hybrid
from megacpp_mcore.settings import from_environment
from tests.bridge.lane import with_bridge


def main() -> None:
    folder, back, *checkpoint = sys.argv[1:]
    with with_bridge():
        from megatron.bridge import AutoBridge
        from megatron.bridge.training.model_load_save import temporary_distributed_context

        auto_bridge = AutoBridge.from_hf_pretrained(folder, trust_remote_code=True)
        if checkpoint:
            with temporary_distributed_context(backend="gloo"):
                AutoBridge.import_ckpt(folder, *checkpoint, trust_remote_code=True)
            auto_bridge.export_ckpt(*checkpoint, back)
            return
        dist.init_process_group("gloo")
        provider, layout = auto_bridge.to_megatron_provider(), Layout(**dict.fromkeys(os.environ["SPLIT"].split(), 2))
        provider.tensor_model_parallel_size, provider.expert_model_parallel_size = layout.tensor, layout.expert
        provider.sequence_parallel, provider.pipeline_model_parallel_size = layout.tensor > 1, layout.pipeline
        provider.hybrid_layer_pattern = hybrid.plan(from_environment().model, layout).text
        provider.finalize()
        auto_bridge.save_hf_pretrained(provider.provide_distributed_model(wrap_with_ddp=False), back)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
