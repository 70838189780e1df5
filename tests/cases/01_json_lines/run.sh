#!/usr/bin/env bash
# JSON, one object a line, under the name that Megatron's instructions use, in capitals, and under no name of JSON at all.
. "$(dirname "$0")/../common.sh"
for n in {1..25}; do echo "{\"text\": \"document $n\", \"id\": $n}"; done | tee mine.json MINE.JSONL mine.ndjson > mine.txt
for file in mine.json MINE.JSONL mine.ndjson; do
    megacpp-mcore data prepare "$file" --output "of_$file" 2> /dev/null | grep 25\ documents || fail "$file is not 25 documents"
done
megacpp-mcore data prepare mine.txt --output d > log 2>&1 && fail "braces and keys became text"
refused log "name the file .jsonl"
