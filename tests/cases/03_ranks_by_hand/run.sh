#!/usr/bin/env bash
# Ranks exported by hand, in part: each process waited for two minutes, or trained alone.
. "$(dirname "$0")/../common.sh"
export RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
refused log "MASTER_ADDR, MASTER_PORT" "$(train log --no-observe --)"
refused log "RANK=1 of WORLD_SIZE=1" "$(WORLD_SIZE=1 train log --no-observe --)"
