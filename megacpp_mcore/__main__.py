"""``python -m megacpp_mcore``: the same as the command ``megacpp-mcore``."""

import sys

from megacpp_mcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
