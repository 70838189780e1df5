#!/usr/bin/env bash
# --exit-on-missing-checkpoint: stock ends with status 0.
. "$(dirname "$0")/../common.sh"
refused log "there is no checkpoint in missing" "$(train log --no-observe -- --load missing --exit-on-missing-checkpoint)"
