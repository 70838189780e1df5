#!/usr/bin/env bash
# needs: root
# Two hosts (here mount namespaces), each with a copy of one dataset at one path: stock builds indices on rank 0 alone.
. "$(dirname "$0")/../common.sh"
mkdir here host0 host1
for h in 0 1; do cp corpus.* "host$h"; done
export WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=$((20000 + RANDOM % 20000))
for h in 0 1; do
    RANK=$h unshare -m bash -c 'mount --bind "host$RANK" here && exec timeout -s KILL 200 "$@" > "log$RANK" 2>&1' - \
        megacpp-mcore launch --device cpu --no-observe -- "${words[@]}" --data-path here/corpus --distributed-timeout-minutes 1 &
done
wait
for h in 0 1; do ls host$h/corpus/cache/*/*-sha256.json > /dev/null || fail "no indices on host $h"; done
! grep -q '^error: ' log1 || fail "$(grep '^error: ' log1)"
