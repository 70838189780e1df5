#!/usr/bin/env bash
# A clone without symbolic links (git on Windows, some archives): the wheel must not lack three folders in silence.
. "$(dirname "$0")/../common.sh"
git clone -q -c core.symlinks=false "$PROJECT" clone
"$PYTHON" -m pip wheel -q --no-deps -w . ./clone > log 2>&1 && fail "a wheel was made"
grep -m 1 -i "link" log || fail "refused, without naming the links"
