#!/usr/bin/env bash
# --dataloader-fast-cache-load builds no index: without those of this data it is refused, with them it trains.
. "$(dirname "$0")/../common.sh"
more=(--train-data-path corpus --valid-data-path corpus --test-data-path corpus --data-cache-path ahead)
mapfile -t words < <(printf '%s\n' "${words[@]}" | sed -e '/^--data-path$/,+1d' -e '/^--split$/,+1d')
refused log "--dataloader-fast-cache-load" "$(train log --no-observe -- "${more[@]}" --dataloader-fast-cache-load)"
[ "$(train log --no-observe -- "${more[@]}")" = 0 ] || { tail -1 log; fail "no indices made"; }
[ "$(train log --no-observe -- "${more[@]}" --dataloader-fast-cache-load)" = 0 ] || { tail -1 log; fail "not used"; }
