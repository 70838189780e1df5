"""The command ``megacpp-mcore``, and ``python -m megacpp_mcore``: the command line, also while its modules are imported."""

import sys


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        from megacpp_mcore.commands import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "megacpp_mcore":
            raise
        sys.exit(
            f"error: {sys.executable} has no module {error.name!r}, which megacpp-mcore needs; install the package into it "
            "(pip install .), or use the Python that `make venv` prints"
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
