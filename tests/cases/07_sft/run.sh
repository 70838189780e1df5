#!/usr/bin/env bash
# --sft of a stock script: --data-path is a .jsonl of conversations, not a dataset.
. "$(dirname "$0")/../common.sh"
echo '{"messages": [{"role": "user", "content": "one"}]}' > talks.jsonl
refused log "--sft" "$(train log --no-observe -- --sft --data-path talks.jsonl)"
