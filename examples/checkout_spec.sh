#!/usr/bin/env bash
# The launcher: three steps of nam56r_tiny by the unmodified pretrain_hybrid.py of a Megatron-LM checkout, on the CPU.
#
#     MEGATRON_LM=/path/to/Megatron-LM examples/checkout_spec.sh FOLDER
set -euo pipefail
: "${MEGATRON_LM:?set it to the folder of a Megatron-LM checkout of the tag core_v0.19.0}"
folder=${1:?name a folder for the data}
mkdir -p "$folder"

megacpp-mcore data prepare "$(dirname "$0")/../README.md" --output "$folder/text"
megacpp-mcore recipe emit nam56r_tiny --as args --data "$folder/text" \
    --set train_iters=3 global_batch_size=2 > "$folder/words"
mapfile -t words < "$folder/words"
megacpp-mcore launch --device cpu -- pretrain_hybrid.py "${words[@]}" --spec megacpp_mcore.nam56r_tiny
