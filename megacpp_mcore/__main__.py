"""``python -m megacpp_mcore``: the same as the command ``megacpp-mcore``."""

import sys

if __name__ == "__main__":
    try:
        from megacpp_mcore.commands.cli import main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "megacpp_mcore":
            raise
        sys.exit(
            f"error: {sys.executable} has no module {error.name!r}, which megacpp-mcore needs; install the package into it "
            "(pip install .), or use the Python that `make venv` prints"
        )
    sys.exit(main())
