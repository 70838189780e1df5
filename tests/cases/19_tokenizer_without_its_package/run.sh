#!/usr/bin/env bash
# Tokenizers whose package is not installed: named before the start.
. "$(dirname "$0")/../common.sh"
for kind in HuggingFaceTokenizer:transformers TikTokenizer:tiktoken SentencePieceTokenizer:sentencepiece; do
    "$PYTHON" -c "import ${kind#*:}" 2> /dev/null && { echo "${kind#*:} is installed: not tried"; continue; }
    refused log "pip install ${kind#*:}" "$(train log --no-observe -- --tokenizer-type "${kind%:*}" --tokenizer-model x)"
done
