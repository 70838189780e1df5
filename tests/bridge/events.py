"""Prints, as JSON, the scalars of a TensorBoard folder: name to the values by step.

python -m tests.bridge.events FOLDER       in an environment with TensorBoard
"""

import importlib
import json
import sys


def main() -> None:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(sys.argv[1]).Reload()
    found = {name: {one.step: one.value for one in events.Scalars(name)} for name in events.Tags()["scalars"]}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
