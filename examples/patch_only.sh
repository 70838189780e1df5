#!/usr/bin/env bash
# The patch set: one patch on a stock GPT, without any model of this package: the same losses with and without it, on the CPU.
#
#     examples/patch_only.sh FOLDER
set -euo pipefail
folder=${1:?name a folder for the data and the records}
mkdir -p "$folder"

megacpp-mcore data prepare "$(dirname "$0")/../README.md" --output "$folder/text"
stock_gpt=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --normalization RMSNorm --untie-embeddings-and-output-weights
    --transformer-impl local --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 0.001 --seed 1
    --tokenizer-type NullTokenizer --vocab-size 260 --data-path "$folder/text" --split 100,0,0 --eval-iters 0
    # what a machine without a GPU needs
    --distributed-backend gloo --use-cpu-initialization --num-workers 0 --eval-interval 3
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion
    --no-rope-fusion --no-create-attention-mask-in-dataloader
)
rm -rf "$folder/stock" "$folder/patched"
megacpp-mcore launch --device cpu --observe "$folder/stock" -- "${stock_gpt[@]}"
megacpp-mcore launch --device cpu --patch linear-cross-entropy --observe "$folder/patched" -- "${stock_gpt[@]}"
for run in stock patched; do
    echo "$run: $(grep -o '"lm loss": [0-9.]*' "$folder/$run/start_1/rank_00000.jsonl" | tr '\n' ' ')"
done
