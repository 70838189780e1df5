"""Plans submissions in one process without submitting; prints each command or refusal, and which modules were imported.

python -m tests.nemo.plans '[["RECIPE", "PYTHON", ["KEY=VALUE", …], null or ["Executor", {…}]], …]'       with nemo-run
"""

import json
import sys

import nemo_run as run

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.nemo_recipes import nemo_run


def main() -> None:
    answers = []
    for name, python, overrides, where in json.loads(sys.argv[1]):
        executor = getattr(run, where[0])(**where[1]) if where else None
        try:
            recipe, script, chosen = nemo_run.plan(name, python, overrides, executor)
        except MegacppError as error:
            answers.append({"refused": f"{type(error).__name__}: {error}"})
        else:
            words = [script.entrypoint, *script.to_command()]
            answers.append({"recipe": recipe, "words": words, "executor": type(chosen).__name__})
    imported = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "megatron"})
    print("\n" + json.dumps({"answers": answers, "imported": imported}))


if __name__ == "__main__":
    main()
