"""Runs several commands in one process; prints the status, output and remaining patches of each.

python -m tests.bridge.commands MODULE '[["VARIABLE=value", …, "WORD", …], …]'       MODULE has main(WORDS)
"""

import contextlib
import importlib
import io
import itertools
import json
import os
import sys
from unittest import mock

from megacpp_mcore.patches.machinery import registry


def main() -> None:
    module, answers = importlib.import_module(sys.argv[1]), []
    for words in json.loads(sys.argv[2]):
        named = list(itertools.takewhile(lambda word: word.partition("=")[0].isupper(), words))
        variables = mock.patch.dict(os.environ, dict(word.split("=", 1) for word in named))
        with variables, contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            try:
                status = module.main(words[len(named) :])
            except SystemExit as ended:  # argparse
                status = ended.code
        applied = [record["name"] for record in registry.default().status() if record["state"] == "applied"]
        answers.append((status, output.getvalue(), applied))
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
