"""Runs several commands of the recipe runner in one process; prints the status, message and remaining patches of each.

python -m tests.bridge.refusals '[["--recipe", "NAME", "KEY=VALUE"], …]'       in an environment with Megatron-Bridge
"""

import contextlib
import io
import json
import sys

from megacpp_mcore.nemo_recipes import run
from megacpp_mcore.patches.machinery import registry


def main() -> None:
    answers = []
    for words in json.loads(sys.argv[1]):
        error = io.StringIO()
        with contextlib.redirect_stderr(error):
            status = run.main(words)
        applied = [record["name"] for record in registry.default().status() if record["state"] == "applied"]
        answers.append((status, error.getvalue(), applied))
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
