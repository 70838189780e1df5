#!/usr/bin/env bash
# needs: minutes and a network
# What `pip install .` brings today, in an environment of its own (VENV names one made before): the README's "Train on your text", and the demo.
. "$(dirname "$0")/../common.sh"
unset MEGACPP_CONFIG PYTHONPATH
if [ -z "${VENV:-}" ]; then
    VENV="$folder/venv"
    (cd "$PROJECT" && "${BASE_PYTHON:-python3.12}" -m venv "$VENV" && "$VENV/bin/pip" install --quiet --disable-pip-version-check .)
fi
export PATH="$VENV/bin:$PATH"
pip list --disable-pip-version-check | grep -E '^(torch|triton|megatron-core|megacpp-mcore) '
megacpp-mcore doctor
megacpp-mcore data prepare texts --output corpus/mine
megacpp-mcore recipe emit nam56r_tiny --as args --data corpus/mine --train-iters 2 > arguments
mapfile -t words < arguments
megacpp-mcore launch --device cpu --no-observe -- ${MEGATRON_LM:+pretrain_hybrid.py} "${words[@]}"
python "$PROJECT/examples/demo.py" --output demo
