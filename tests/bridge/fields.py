"""Prints, as JSON, where a recipe configures Megatron differently through Bridge than through the stock command line.

    python -m tests.bridge.fields RECIPE       in an environment with Megatron-Bridge; on the CPU lane

For a recipe for GPUs the words that only a GPU run takes are read on the CPU lane as well: nothing is built.
"""

import dataclasses
import json
import sys
from typing import Any

from megacpp_mcore.arguments import lowering
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model.recipes import Recipe, recipe
from tests.bridge.lane import with_bridge
from tests.stock import gpu_host


def stock(chosen: Recipe) -> dict[str, Any]:
    """Megatron's configurations of model, optimizer and DDP for the command line of ``chosen``."""
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    training = dataclasses.replace(chosen.run.training, data=("--mock-data",), tokenizer=tokenizer_words(chosen.model))
    sys.argv = ["pretrain_gpt.py", *lowering.lower(dataclasses.replace(chosen.run, training=training))]
    args = validate_args(parse_args())
    return {
        "model": core_transformer_config_from_args(args),
        "optimizer": get_megatron_optimizer_config(args)[0],
        "ddp": get_megatron_ddp_config(args),
    }


def differences(by_stock: Any, by_bridge: Any) -> dict[str, tuple[str, str]]:
    """Return the shared fields whose values differ: stock's value and Bridge's."""
    differing = {}
    for field in dataclasses.fields(by_stock):
        if hasattr(by_bridge, field.name):
            pair = getattr(by_stock, field.name), getattr(by_bridge, field.name)
            if _plain(pair[0]) != _plain(pair[1]):
                differing[field.name] = (_plain(pair[0]), _plain(pair[1]))
    return differing


def _plain(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


def main() -> None:
    chosen = recipe(sys.argv[1])
    with with_bridge(), gpu_host():
        from megacpp_mcore.nemo_recipes import bridge_recipes

        config = bridge_recipes.container(chosen)
        config.dataset.data_path = "none"
        sections = stock(chosen)
        if config.mixed_precision is not None:
            config.mixed_precision.finalize()
            config.mixed_precision.setup(config.model, config.optimizer, config.ddp)
        config.model.finalize()
        print("\n" + json.dumps({name: differences(one, getattr(config, name)) for name, one in sections.items()}))


if __name__ == "__main__":
    main()
