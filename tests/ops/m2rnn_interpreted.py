"""M²RNN's kernels under Triton's interpreter, on a CPU, against float64.

``whole`` takes products in float32; ``parts`` in float16 in place of bfloat16, whose products the interpreter gets wrong, and
goes back in two pieces.
"""

from __future__ import annotations

import torch
import triton.language as tl

from megacpp_mcore.ops.m2rnn import recurrence
from megacpp_mcore.ops.m2rnn.reference import m2rnn as reference
from megacpp_mcore.ops.m2rnn.triton import m2rnn
from megacpp_mcore.ops.testing import assert_parity, worst_row
from tests.ops.m2rnn_case import Case, draw, outcome

CASES = {
    "whole": (Case(B=1, S=11, H=1, K=16, dtype=torch.float32, documents=True, state=True, ranks=2), 3e-6),
    "parts": (Case(B=1, S=11, H=1, K=16, dtype=torch.float32, state=True, checkpoint_every=8), 4e-3),
}


def main(name: str) -> None:
    """Fail unless every output and gradient is right, or not much further off than plain PyTorch's in float32."""
    case, rms = CASES[name]
    part = tl.float32 if name == "whole" else tl.float16
    recurrence.products = lambda dtype: {"PART": part, "ASM": False}
    if name == "whole":
        recurrence.CANDIDATES = torch.float32
    else:
        recurrence.PIECE = case.checkpoint_every
    inputs = draw(case)
    truth = outcome(reference, case, inputs, torch.float64)
    plain = outcome(reference, case, inputs)
    for output, tensor in outcome(m2rnn, case, inputs).items():
        assert_parity(tensor, truth[output], rms=max(rms, 4 * worst_row(plain[output], truth[output])), name=output)
