#!/usr/bin/env bash
# The text under another key than "text" (stock's tool has --json-keys).
. "$(dirname "$0")/../common.sh"
for n in 1 2 3; do echo "{\"content\": \"text number $n\"}"; done > code.jsonl
megacpp-mcore data prepare code.jsonl --output d > log 2>&1 && fail "there is no text"
refused log "'content', a str: --json-key names another"
megacpp-mcore data prepare code.jsonl --output d --json-key content 2> /dev/null | grep "3 documents"
