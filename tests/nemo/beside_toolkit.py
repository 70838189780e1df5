"""Imports nemo-toolkit and this package in one process and makes the layers of a model; prints what was found and made.

python -m tests.nemo.beside_toolkit SITE-PACKAGES       SITE-PACKAGES has nemo-toolkit; this Python has Megatron
"""

import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from megacpp_mcore import nam56r_tiny
from megacpp_mcore.model import preset
from tests import stock


def main() -> None:
    sys.path.append(sys.argv[1])
    import nemo

    with tempfile.TemporaryDirectory() as folder, stock.one_process(Path(folder) / "store"):
        block = nam56r_tiny(stock.model_config(stock.words(preset("nam56r_tiny"))))
    versions = {"imported": nemo.__version__, "installed": metadata.version("nemo-toolkit")}
    print("\n" + json.dumps({**versions, "layers": len(block.layer_specs)}))


if __name__ == "__main__":
    main()
