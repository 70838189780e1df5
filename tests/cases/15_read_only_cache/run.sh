#!/usr/bin/env bash
# needs: root
# A dataset in a folder that cannot be written, beside which the launch chooses its cache.
. "$(dirname "$0")/../common.sh"
mkdir shared
mv corpus.* shared
unshare -m bash -c 'mount --bind shared shared && mount -o remount,ro,bind shared && exec "$@"' - \
    megacpp-mcore launch --device cpu --no-observe -- "${words[@]}" --data-path shared/corpus > log 2>&1 && fail "nothing to see"
refused log "--data-cache-path"
