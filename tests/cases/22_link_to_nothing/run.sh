#!/usr/bin/env bash
# --save or --observe on scratch that is not mounted, or a link to itself: looked for a free name for ever.
. "$(dirname "$0")/../common.sh"
ln -s nowhere/run scratch
ln -s itself itself
refused log "broken or circular link" "$(train log -- --save scratch --save-interval 1)"
refused log "broken or circular link" "$(train log --observe scratch/run --)"
refused log "broken or circular link" "$(train log --observe itself --)"
