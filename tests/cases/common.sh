# Sourced by every case: a temporary folder with a byte corpus and the arguments of a model of five layers that trains a step in a second.
# PYTHON: the interpreter, python3 without it. CASES_SETUP: such a folder made before, which is copied.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHON="${PYTHON:-python3}"
PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$PROJECT" PROJECT
folder="$(mktemp -d)"; trap 'rm -rf "$folder"' EXIT; cd "$folder"
if [ -n "${CASES_SETUP:-}" ]; then cp -r "$CASES_SETUP"/. .; else
    mkdir bin texts
    printf '#!/bin/sh\nexec "%s" -m megacpp_mcore "$@"\n' "$(command -v "$PYTHON")" > bin/megacpp-mcore
    chmod +x bin/megacpp-mcore
    for i in {1..60}; do printf "line %s of text $i, and some words after it\n" {1..40} > "texts/$i.txt"; done
    bin/megacpp-mcore data prepare texts --output corpus > /dev/null 2> prepared || { cat prepared; exit 2; }
    bin/megacpp-mcore recipe emit nam56r_tiny --as args --data corpus --settings small.yaml --set name=small pattern=AEMAR \
        depth=5 dsa.schedule=-F seq_length=64 train_iters=2 global_batch_size=2 > words
fi
export PATH="$folder/bin:$PATH" MEGACPP_CONFIG="$folder/small.yaml"
mapfile -t words < words

fail() { echo "FAIL: $*"; exit 1; }

# train NAME [OPTION…] -- [ARGUMENT…]: launches the small model on the CPU; prints its exit status, its output is in the file NAME.
train() {
    local log=$1 options=() status=0
    shift
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    timeout -s KILL 240 megacpp-mcore launch --device cpu "${options[@]}" -- "${words[@]}" "$@" > "$log" 2>&1 || status=$?
    echo "$status"
}

# refused FILE PATTERN [STATUS]: the command whose output is in FILE ended with an error that says PATTERN, and with STATUS (2).
refused() {
    tail -1 "$1" | cut -c 1-300
    [ "${3:-2}" = 2 ] || fail "exit status $3, expected 2"
    grep -E '^error: ' "$1" | grep -qE -e "$2" || fail "no error says '$2'"
    ! grep -q '^Traceback' "$1" || fail "a traceback"
}
