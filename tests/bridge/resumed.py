"""Resumes a run from only its checkpoint, with the configuration from ``run_config.yaml``, into a folder of its own.

python -m tests.bridge.resumed FOLDER STEP SAVE       in an environment with Megatron-Bridge; on the CPU lane
"""

import sys

from megacpp_mcore.launch import process
from megacpp_mcore.nemo_recipes.run import PATCHES
from megacpp_mcore.patches.machinery import registry
from tests.bridge.lane import with_bridge


def main() -> None:
    folder, step, save = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with with_bridge(), process.revert_patches_on_exit():
        registry.default().apply(PATCHES)
        from megatron.bridge.training.config import ConfigContainer
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        config = ConfigContainer.from_yaml(f"{folder}/iter_{step:07d}/run_config.yaml")
        print(f"saved in {config.checkpoint.save}")
        config.checkpoint.load, config.checkpoint.ckpt_step, config.checkpoint.save = folder, step, save
        pretrain(config, forward_step)


if __name__ == "__main__":
    main()
