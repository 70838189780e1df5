"""Prints, as JSON, what recipes with other optimizers than Adam tell Bridge, and what is said of one that is set in Python.

python -m tests.bridge.optimizers       in an environment with Megatron-Bridge; on the CPU lane; builds nothing
"""

import json
import operator
from typing import Any
from unittest import mock

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.launch import process
from megacpp_mcore.model.recipes import recipe
from megacpp_mcore.nemo_recipes import bridge
from megacpp_mcore.nemo_recipes.run import changed
from megacpp_mcore.util.stand_in import process_environment

EIGHT = "nam56r_pretrain_8gpu_h200_bf16"
CUT = (
    "ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer", "ddp.overlap_param_gather",
    "optimizer.overlap_param_gather", "checkpoint.dist_ckpt_optim_fully_reshardable",
)  # fmt: skip
UNCUT = dict.fromkeys(CUT, False)
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "as it is": ("muon", {}),
    "cut by hand": ("muon", {"ddp.use_distributed_optimizer": True}),
    "gathered by hand": ("lion", {"optimizer.overlap_param_gather": True}),
    "FSDP by hand": ("muon", {"dist.use_torch_fsdp2": True}),
    "in Python": ("adam", {"optimizer.optimizer": "muon"}),
    "in Python, whole": ("adam", {"optimizer.optimizer": "muon", **UNCUT}),
    "in Python, whole, scaled": (
        "adam",
        {"optimizer.optimizer": "muon", **UNCUT, "optimizer.muon_extra_scale_factor": 1.0},
    ),
    "unknown": ("adam", {"optimizer.optimizer": "dist_muon"}),
    "narrow": ("muon", {"optimizer.use_precision_aware_optimizer": True}),
}
"""Optimizer of the recipe, and keys set afterwards."""


def main() -> None:
    with process_environment(), process.cpu_lane():
        bridge.prepare()
        from megacpp_mcore.nemo_recipes import bridge_recipes

        def of(optimizer: str) -> Any:
            return bridge_recipes.container(changed(recipe(EIGHT), [f"optimizer={optimizer}"]))

        def answer(config: Any, is_installed: object) -> str:
            with mock.patch("importlib.util.find_spec", return_value=is_installed):
                try:
                    config.check_optimizer()
                except MegacppError as error:
                    return str(error)
            return f"{config.model.megacpp_optimizer} at {config.optimizer.muon_extra_scale_factor}"

        says, cut = {}, {}
        for optimizer in ("adam", "sgd", "lion", "muon", "adaptive_muon"):
            cut[optimizer] = [operator.attrgetter(key)(of(optimizer)) for key in CUT]
        for name, (optimizer, changes) in ASKED.items():
            config = of(optimizer)
            for key, value in changes.items():
                section, field = key.split(".")
                setattr(getattr(config, section), field, value)
            says[name] = answer(config, True)
        says["not installed"] = answer(of("muon"), None)
        says["adam, not installed"] = answer(of("adam"), None)
        print("\n" + json.dumps({"cut": cut, "says": says}))


if __name__ == "__main__":
    main()
