#!/usr/bin/env bash
# --exit-on-missing-checkpoint, and a folder without any: stock ends with status 0.
. "$(dirname "$0")/../common.sh"
mkdir missing
refused log "there is no checkpoint in missing" "$(train log --no-observe -- --load missing --exit-on-missing-checkpoint)"
