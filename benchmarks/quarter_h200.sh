#!/usr/bin/env bash
# nam56r_quarter at full width on one GPU, reference ops: 20 steps on real text, with Transformer Engine's and with
# Megatron's own layers, then nam56r_tiny as a check of both. Rows go to $1 (default benchmarks/results/train.csv).
set -uo pipefail
out=${1:-benchmarks/results/train.csv}
corpus=$(mktemp -d)
python3 -W ignore -m megacpp_mcore data corpus --output "$corpus"
data=$corpus/stdlib_train
python3 -W ignore benchmarks/train.py nam56r_tiny --data "$data" --steps 30 --micro-batch-size 8 --global-batch-size 8 \
  --lr 4e-3 --label tiny_te_bf16 --output "$out"
python3 -W ignore benchmarks/train.py nam56r_tiny --data "$data" --steps 30 --impl local --precision fp32 \
  --micro-batch-size 8 --global-batch-size 8 --lr 4e-3 --label tiny_local_fp32 --output "$out"
python3 -W ignore benchmarks/train.py nam56r_quarter --data "$data" --label quarter_te_bf16 --output "$out"
python3 -W ignore benchmarks/train.py nam56r_quarter --data "$data" --impl local --label quarter_local_bf16 --output "$out"
rm -rf "$corpus"
