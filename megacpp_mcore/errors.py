"""The errors that users of this package can see; every message says what was found, what was expected and what to do."""

from __future__ import annotations


class MegacppError(Exception):
    """Base of every error that megacpp-mcore raises on purpose; control characters in it are escaped.

    ``code`` distinguishes causes of one class that name no value of their own; it is stable when the wording changes.
    """

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code

    def __str__(self) -> str:
        return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in super().__str__())


class PatternError(MegacppError, ValueError):
    """A layer pattern contains something that the A/M/E/R grammar does not allow."""


class ModelError(MegacppError, ValueError):
    """A model definition, or its combination with a parallel layout, cannot be built."""


class ArgumentMismatchError(MegacppError, ValueError):
    """The arguments of a Megatron run contradict the model that its spec names."""


class ConfigFileError(MegacppError, ValueError):
    """The file named by ``MEGACPP_CONFIG`` cannot be read, or has an unknown key or value."""


class DataError(MegacppError, ValueError):
    """A dataset file is missing, damaged, or does not match its manifest, or its samples do not fit the run."""


class CheckpointError(MegacppError, ValueError):
    """A checkpoint cannot be loaded or converted: it is not a checkpoint, or has the wrong layout or format."""


class CheckoutError(MegacppError, FileNotFoundError):
    """A Megatron-LM checkout or one of its scripts is not at the given path."""


class SpecImportError(MegacppError, ImportError):
    """A ``--spec`` names something that cannot be imported; stock Megatron would train a GPT instead."""


class LaunchError(MegacppError, RuntimeError):
    """A launch cannot proceed as requested (device, processes, environment)."""


class PatchError(MegacppError, RuntimeError):
    """A patch cannot be applied or reverted; nothing was changed."""


class BackendError(MegacppError, RuntimeError):
    """A requested backend cannot run here; the message carries the reason."""


class BenchmarkError(MegacppError, ValueError):
    """A benchmark cannot be run as requested, or its rows cannot be compared with those of a file."""


class NonFiniteError(MegacppError, RuntimeError):
    """A loss or a gradient is NaN or infinite; the run stops before the update."""
