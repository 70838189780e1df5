"""The parity criterion: what it finds, at every tolerance that the ops' tests use, and what it does not compare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacpp_mcore.ops.testing import assert_parity

TRUTH = torch.randn(2345, 2, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
ONE_NUMBER = torch.ones_like(TRUTH).index_put_(
    (torch.tensor(99), torch.tensor(1), torch.tensor(3)), torch.tensor(-1.0).double()
)
FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropped row": lambda t: t.index_fill(0, torch.tensor([1717]), 0.0),
    "scale": lambda t: 1.5 * t,
    "small scale": lambda t: 1.006 * t,
    "flipped sign": lambda t: t * ONE_NUMBER,
    "negated": lambda t: -t,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("rms", [1e-12, 1e-6, 5e-3])
def test_one_fault_fails_the_comparison(fault: Callable[[torch.Tensor], torch.Tensor], rms: float) -> None:
    assert_parity(TRUTH.clone(), TRUTH, rms=rms)
    with pytest.raises(AssertionError, match="of its norm"):
        assert_parity(fault(TRUTH), TRUTH, rms=rms, name="y")
    with pytest.raises(AssertionError, match="largest error"):
        assert_parity(fault(TRUTH), TRUTH, rms=10.0, max_abs_factor=2.0, dtype_peer=TRUTH.float(), name="y")


def test_what_cannot_be_compared_is_refused() -> None:
    truth = torch.ones(3, 4)
    with pytest.raises(AssertionError, match="shape"):
        assert_parity(torch.ones(4, 3), truth, rms=1.0)
    for poison in (float("nan"), float("inf")):
        with pytest.raises(AssertionError, match="not finite"):
            assert_parity(torch.where(torch.eye(3, 4) > 0, poison, truth), truth, rms=1e9)
    with pytest.raises(AssertionError, match="inf of its norm"):
        assert_parity(1e-30 * truth, torch.zeros(3, 4), rms=1e9)
    assert_parity(torch.zeros(3, 4), torch.zeros(3, 4), rms=0.0)
    with pytest.raises(ValueError, match="dtype_peer"):
        assert_parity(truth, truth, rms=1.0, max_abs_factor=2.0)
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_parity(torch.ones(0, 4), torch.ones(0, 4), rms=1.0)


def test_a_16_bit_peer_raises_the_limit_and_a_32_bit_one_does_not() -> None:
    truth = torch.ones(2, 4)
    assert_parity(1.011 * truth, truth, rms=5e-3, dtype_peer=(1.01 * truth).bfloat16())
    for peer in (1.01 * truth, truth.bfloat16()):
        with pytest.raises(AssertionError, match="of its norm"):
            assert_parity(1.011 * truth, truth, rms=5e-3, dtype_peer=peer)
