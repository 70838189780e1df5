#!/usr/bin/env bash
# On one GPU, reference ops, real text: nam56r_tiny for 30 steps as a check, then nam56r_quarter at full width for 20, each
# with Transformer Engine's layers and with Megatron's own. Rows are added to $1 (default: the committed table).
set -euo pipefail
out=${1:-benchmarks/results/train_h200.csv}
corpus=$(mktemp -d)
trap 'rm -rf "$corpus"' EXIT
python3 -W ignore -m megacpp_mcore data corpus --output "$corpus"
data=$corpus/stdlib_train
train() { python3 -W ignore -m benchmarks.train "$@" --data "$data" --output "$out"; }
tiny=(nam56r_tiny --steps 30 --micro-batch-size 8 --global-batch-size 8 --lr 4e-3)
train "${tiny[@]}" --label tiny_te_bf16
train "${tiny[@]}" --impl local --precision fp32 --label tiny_local_fp32
train nam56r_quarter --label quarter_te_bf16
train nam56r_quarter --impl local --label quarter_local_bf16
