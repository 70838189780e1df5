"""Prints, as JSON, what recipes with other optimizers than Adam tell Bridge, and what is said of one that is set in Python.

python -m tests.bridge.optimizers '[["OPTIMIZER", {"SECTION.FIELD": VALUE, …}], …]'       with Megatron-Bridge; builds nothing

Of each optimizer of a recipe and keys that are set afterwards.
"""

import json
import operator
import sys
from typing import Any
from unittest import mock

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.model.recipes import recipe
from megacpp_mcore.nemo_recipes.run import changed
from tests.bridge.lane import with_bridge

EIGHT = "nam56r_pretrain_8gpu_h200_bf16"
CUT = (
    "ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer", "ddp.overlap_param_gather",
    "optimizer.overlap_param_gather", "checkpoint.dist_ckpt_optim_fully_reshardable",
)  # fmt: skip


def main() -> None:
    with with_bridge():
        from megacpp_mcore.nemo_recipes import bridge_recipes

        def of(optimizer: str) -> Any:
            return bridge_recipes.container(changed(recipe(EIGHT), [f"optimizer={optimizer}"]))

        def answer(config: Any, is_installed: bool) -> str:
            with mock.patch("importlib.util.find_spec", return_value=is_installed or None):
                try:
                    config.check_optimizer()
                except MegacppError as error:
                    return str(error)
            return f"{config.model.megacpp_optimizer} at {config.optimizer.muon_extra_scale_factor}"

        cut = {}
        for optimizer in ("adam", "sgd", "lion", "muon", "adaptive_muon"):
            cut[optimizer] = [operator.attrgetter(key)(of(optimizer)) for key in CUT]
        says = []
        for optimizer, changes in json.loads(sys.argv[1]):
            config, is_installed = of(optimizer), changes.pop("installed", True)
            for key, value in changes.items():
                section, field = key.split(".")
                setattr(getattr(config, section), field, value)
            says.append(answer(config, is_installed))
        print("\n" + json.dumps({"cut": cut, "says": says}))


if __name__ == "__main__":
    main()
