"""The compile policy: what is compiled, whether that happens before step 1, and why not. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

EXPLICIT, SKIPPED = "explicit", "skipped"
"""What happens to the compile warm-up."""

REASONS = ("user-disabled", "not-launched", "not-cuda", "fsdp-eager", "regional-moe")
"""Why a compile warm-up is skipped, in the order in which they are checked; the first that applies is reported."""


@dataclass(frozen=True, kw_only=True)
class CompilePolicy:
    """What is compiled, and whether that is done before step 1.

    Attributes:
        mode: ``off`` or ``regional``.
        warm_up: :data:`EXPLICIT`, or :data:`SKIPPED`: regions are then compiled when step 1 reaches them.
        reason: one of :data:`REASONS` when it is skipped, else empty.
        why: the reason as a sentence.
        precompile: whether the static regions of the layers without experts are compiled before step 1 all the same.
    """

    mode: str
    warm_up: str
    reason: str
    why: str
    precompile: bool = False


def compile_policy(
    *,
    mode: str,
    device: str,
    has_moe: bool,
    fsdp: bool,
    warm_up_asked: bool = True,
    precompile: bool = False,
    launched: bool = True,
    disabled: tuple[str, ...] = (),
) -> CompilePolicy:
    """Decide the compile warm-up; the reasons against it are checked in the order of :data:`REASONS`.

    With regional compile beside experts on CUDA the warm-up has not been tried, and the same run without it trains
    (``experiments/results/regional_h200.csv``); so there it is skipped, whatever was requested.

    Args:
        mode: ``off`` or ``regional``.
        device: ``cuda`` or ``cpu``.
        has_moe: whether the model has E layers.
        fsdp: whether parameters are sharded, so that no layer can be run by itself.
        warm_up_asked: False where the user has turned it off.
        precompile: whether to compile static regions ahead where experts are the only obstacle to the warm-up.
        launched: whether the launcher, which runs the warm-up, has started the script.
        disabled: the variables that turn torch.compile off (:func:`megacpp_mcore.util.host.compile_disabled_by`).
    """
    sentences = {
        "user-disabled": _who_disabled(mode, disabled),
        "not-launched": "`megacpp-mcore launch` brings it, and did not start this script; step 1 compiles",
        "not-cuda": f"the device is {device}; what it costs to start is paid in step 1",
        "fsdp-eager": "with sharded parameters a layer cannot run by itself before the training loop gathers them",
        "regional-moe": "it was not tried beside experts on CUDA; step 1 compiles",
    }
    holds = {
        "user-disabled": mode == "off" or not warm_up_asked or bool(disabled),
        "not-launched": not launched,
        "not-cuda": device != "cuda",
        "fsdp-eager": fsdp,
        "regional-moe": has_moe,
    }
    reason = next((name for name in REASONS if holds[name]), "")
    if not reason:
        return CompilePolicy(mode=mode, warm_up=EXPLICIT, reason="", why="all regions are dense and static")
    ahead = precompile and reason == "regional-moe"
    return CompilePolicy(mode=mode, warm_up=SKIPPED, reason=reason, why=sentences[reason], precompile=ahead)


def _who_disabled(mode: str, disabled: tuple[str, ...]) -> str:
    if mode == "off":
        return "nothing is compiled"
    if disabled:
        return f"{' and '.join(f'{name}=1' for name in disabled)}: torch compiles nothing, and regions run as plain PyTorch"
    return "it was turned off"
