#!/usr/bin/env bash
# needs: minutes and a network
# What `pip install .` brings today, then the quick start on a CPU.
. "$(dirname "$0")/../common.sh"
unset MEGACPP_CONFIG
make -C "$PROJECT" test-install
