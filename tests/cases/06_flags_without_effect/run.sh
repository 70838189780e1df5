#!/usr/bin/env bash
# Flags from scripts of other models, which our layers do not read.
. "$(dirname "$0")/../common.sh"
for flag in "--mamba-state-dim 128" "--use-rope-scaling" "--openai-gelu" "--attention-backend flash"; do
    # shellcheck disable=SC2086 # a flag and its value
    refused log "^error: ${flag%% *} " "$(train log --no-observe -- $flag)"
done
