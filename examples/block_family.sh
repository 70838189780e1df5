#!/usr/bin/env bash
# A block family of your own, from a file of your own (block_family.py next to this script): three steps on the CPU.
#
#     examples/block_family.sh FOLDER
set -euo pipefail
folder=${1:?name a folder for the data}
mkdir -p "$folder"
here=$(cd "$(dirname "$0")" && pwd)

megacpp-mcore data prepare "$here/../README.md" --output "$folder/text"
megacpp-mcore recipe emit nam56r_tiny --model-class gpt --as args --data "$folder/text" \
    --set train_iters=3 global_batch_size=2 > "$folder/words"
mapfile -t words < "$folder/words"
# The last --spec counts. A launch imports specs of this package and of Megatron only, unless it is told to.
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" megacpp-mcore launch --device cpu --allow-spec-from block_family -- \
    "${words[@]}" --spec block_family.nam56r_with_convolutions
