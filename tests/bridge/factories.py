"""Builds every recipe function of nemo_recipes, writes its YAML into a folder and reads it back; prints what became of each.

python -m tests.bridge.factories FOLDER       in an environment with Megatron-Bridge; on the CPU lane
"""

import inspect
import json
import sys
from pathlib import Path

from megacpp_mcore import launcher
from megacpp_mcore.nemo_recipes import bridge


def main() -> None:
    found = {}
    with launcher.process_environment(), launcher.cpu_lane():
        bridge.prepare()
        from megatron.bridge.training.config import ConfigContainer

        from megacpp_mcore.nemo_recipes import nam56r

        for name, function in inspect.getmembers(nam56r, inspect.isfunction):
            if not name.endswith("_config"):
                continue
            config = function()
            first, second = (Path(sys.argv[1]) / f"{name}.{copy}.yaml" for copy in (1, 2))
            config.to_yaml(str(first))
            again = ConfigContainer.from_yaml(str(first))
            again.to_yaml(str(second))
            same = first.read_text() == second.read_text() and again.model.transformer_layer_spec is not None
            same &= type(again.model) is type(config.model) and len(inspect.signature(function).parameters) == 0
            found[name.removesuffix("_config")] = "read back" if same else "differs when read back"
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
