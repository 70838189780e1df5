#!/usr/bin/env bash
# Your own pattern of A, M, E and R layers: seven layers, two of them sparse attention, three steps on the CPU.
#
#     examples/own_pattern.sh FOLDER
set -euo pipefail
folder=${1:?name a folder for the data and the model}
mkdir -p "$folder"
rm -f "$folder/model.yaml"

megacpp-mcore data prepare "$(dirname "$0")/../README.md" --output "$folder/text"
# Values of the model make a model of their own: --settings writes it, and MEGACPP_CONFIG names it to the run.
megacpp-mcore recipe emit nam56r_tiny --data "$folder/text" --via wheel --settings "$folder/model.yaml" \
    --set name=mine pattern=AMEAMAR depth=7 dsa.schedule=-FF train_iters=3 global_batch_size=2 > "$folder/run.sh"
MEGACPP_CONFIG="$folder/model.yaml" megacpp-mcore recipe show mine | grep -E '"(layers|total)"'
bash "$folder/run.sh"
