#!/usr/bin/env bash
# A job that was submitted twice, or again without --load: one run's checkpoints replaced those of another.
. "$(dirname "$0")/../common.sh"
command=(--train-iters 4 --exit-interval 2 --save saved --save-interval 1)
# digests PATH…: of all files; with what a save changes that writes the same again.
digests() { find "$@" -type f ! -name training.lock -exec sha256sum {} + -printf '%p %i %T@\n' | sort; }
# whole ITERATION…: all files are those of the manifests, and the tracker file names the last.
whole() {
    for made in "${@/#/saved/iter_000000}"; do
        "$PYTHON" -c 'import json; [print(f"{digest}  {name}") for name, digest in json.load(open(0))["files"].items()]' \
            < "$made/integrity.json" > sums
        (cd "$made" && sha256sum --check --strict --quiet "$OLDPWD/sums") || fail "$made is damaged"
        [ "$(cut -d ' ' -f 3 sums | sort)" = "$(ls -A "$made" | grep -v integrity.json | sort)" ] || fail "$made has other files"
    done
    [ "$(cat saved/latest_checkpointed_iteration.txt)" = "${*: -1}" ] || fail "the tracker file does not name iteration ${*: -1}"
}

train first --no-observe -- "${command[@]}" > status &
for _ in {1..1200}; do [ ! -s saved/training.lock ] || break; sleep 0.1; done
holder="$(sed -n 's/^process \([0-9]*\) on .*/\1/p' saved/training.lock)" || { tail -5 first; fail "it does not start"; }
[ "/proc/$holder/cwd" -ef . ] || fail "process $holder is not the first run's"
kill -STOP "$holder" # until the other has been refused
second="$(train log --no-observe -- "${command[@]}")"
kill -CONT "$holder"
refused log "process $holder on .* saves in saved;" "$second"
wait
[ "$(cat status)" = 0 ] || { tail -5 first; fail "the first run ended with status $(cat status)"; }
whole 1 2

digests saved > before
refused log "saved has a checkpoint of iteration 2, and this run, which starts at iteration 0" \
    "$(train log --no-observe -- "${command[@]}")"
digests saved | diff before - || fail "a refused run changed the folder"

[ "$(train log --no-observe -- "${command[@]}" --load saved)" = 0 ] || { tail -5 log; fail "it does not continue"; }
whole 1 2 3 4
digests saved/iter_000000[12] | diff <(grep -F -e /iter_0000001/ -e /iter_0000002/ before) - || fail "earlier checkpoints changed"
! grep "no step was left" log || fail "it trained two"

[ "$(train log --no-observe -- "${command[@]}" --load saved)" = 0 ] || { tail -5 log; fail "it does not end well with nothing left to do"; }
grep "no step was left: the checkpoint in saved is of iteration 4, and --train-iters is 4" log || fail "it does not say that it trained nothing"
whole 1 2 3 4
