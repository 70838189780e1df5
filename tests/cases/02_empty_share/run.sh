#!/usr/bin/env bash
# --split 969,30,1, Megatron's default, on a small dataset: it counts epochs of a share without documents for ever, and ignores SIGTERM.
. "$(dirname "$0")/../common.sh"
refused log "--split 969,30,1 leaves none for test" "$(train log --no-observe -- --split 969,30,1 --eval-iters 1)"
