#!/usr/bin/env bash
# Runs every case whose folder matches one of the arguments (none: all). Cases with a line "# needs: …" are left out unless NEEDS=1.
here="$(cd "$(dirname "$0")" && pwd)"
setup="$(mktemp -d)"; trap 'rm -rf "$setup"' EXIT
(. "$here/common.sh" && cp -r . "$setup") || exit 2
export CASES_SETUP="$setup"
failed=() left_out=()
for case in "$here"/[0-9]*/run.sh; do
    name="$(basename "$(dirname "$case")")"
    [ $# = 0 ] || [[ " $* " == *" ${name%%_*} "* || " $* " == *" $name "* ]] || continue
    if [ -z "${NEEDS:-}" ] && needs="$(sed -n 's/^# needs: //p' "$case")" && [ -n "$needs" ]; then
        left_out+=("$name ($needs)"); continue
    fi
    began=$SECONDS
    printf '== %s\n' "$name"
    bash "$case" < /dev/null || failed+=("$name")
    printf '   %s s\n' $((SECONDS - began))
done
[ ${#left_out[@]} = 0 ] || printf 'not run, NEEDS=1 runs it: %s\n' "${left_out[@]}"
[ ${#failed[@]} = 0 ] || { printf 'FAILED: %s\n' "${failed[@]}"; exit 1; }
