"""Builds every recipe function of nemo_recipes, writes its YAML into a folder and reads it back; prints what became of each,
the floating-point operations of one step that Bridge counts for it, and what is said of an unknown name.

python -m tests.bridge.factories FOLDER       in an environment with Megatron-Bridge; on the CPU lane
"""

import dataclasses
import json
import sys
from pathlib import Path

from megacpp_mcore import settings
from megacpp_mcore.errors import ConfigFileError
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.nemo_recipes.read_bridge import read
from megacpp_mcore.util import stand_in
from tests.bridge.lane import with_bridge

BATCH = 3


def main() -> None:
    report = {}
    with with_bridge():
        from megatron.bridge.training.config import ConfigContainer
        from megatron.bridge.training.utils.flop_utils import num_floating_point_operations

        from megacpp_mcore.nemo_recipes import bridge_recipes

        for name in RECIPES:
            function = getattr(bridge_recipes, f"{name}_config")
            config = function()
            first, second = (Path(sys.argv[1]) / f"{name}.{copy}.yaml" for copy in (1, 2))
            config.to_yaml(str(first))
            run = RECIPES[name].run
            described = read(run, config, RECIPES[name].processes)
            plan = dataclasses.replace(run.training, cuda_graphs=False)  # which Bridge does not have
            again = ConfigContainer.from_yaml(str(first))
            again.to_yaml(str(second))
            same = first.read_text() == second.read_text() and type(again.model) is type(config.model)
            # As the run does when it has made the tokenizer.
            config.model.vocab_size, config.model.should_pad_vocab = config.tokenizer.vocab_size, True
            report[name] = {
                "same run": described == dataclasses.replace(run, training=plan),
                "yaml": "read back" if same else "differs when read back",
                "environment": config.env_vars,
                "operations": num_floating_point_operations(config, BATCH),
            }
        try:
            bridge_recipes.nam56r_tiny_pretrain_1cpu_fp32_confg  # noqa: B018
        except AttributeError as error:
            report["unknown"] = str(error).partition(" has ")[2]
        without = Path(sys.argv[1]) / "without.yaml"
        without.write_text("model: nam56r\n")
        with stand_in.environment({settings.VARIABLE: str(without)}):
            try:
                bridge_recipes.nam56r_pretrain_8gpu_h200_fp8_config()
            except ConfigFileError as error:
                report["without"] = str(error)
    print("\n" + json.dumps(report))


if __name__ == "__main__":
    main()
