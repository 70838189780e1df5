#!/usr/bin/env bash
# A folder without any checkpoint: stock trains from scratch, and with --exit-on-missing-checkpoint ends with status 0.
. "$(dirname "$0")/../common.sh"
mkdir missing
refused log "--load missing holds no checkpoint" "$(train log --no-observe -- --load missing)"
also_saved=(--load missing --save missing --save-interval 2)
refused log "there is no checkpoint in missing" "$(train log --no-observe -- "${also_saved[@]}" --exit-on-missing-checkpoint)"
