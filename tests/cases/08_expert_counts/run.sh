#!/usr/bin/env bash
# A bf16 model counted the tokens of its experts in bf16, which past 256 is rounded.
. "$(dirname "$0")/../common.sh"
cd "$PROJECT"
"$PYTHON" -m pytest -q -p no:cacheprovider -W ignore tests/patches/test_small_patches.py -k "counts_are_the_tokens or global_loss_divides"
