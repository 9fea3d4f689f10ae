#!/usr/bin/env bash
# Serve MODEL from one prefill and one decode server of SGLang, behind ../router.py on port
# 8000. Other arguments go to both.
#
#   examples/sglang/serve.sh MODEL [options of sglang.launch_server]
#
# PREFILL_TP and DECODE_TP (1) are the tensor-parallel sizes; PREFILL_GPUS and DECODE_GPUS choose the GPUs of each server,
# as in CUDA_VISIBLE_DEVICES; PORT (8000), PREFILL_PORT (30000), DECODE_PORT (31000) and BOOTSTRAP_PORT (8998).
# DISAGG_KV_SGLANG has the options of the plug-in, as JSON.
set -euo pipefail
model=${1:?usage: serve.sh MODEL [options of sglang.launch_server]}
shift
port=${PORT:-8000} prefill_port=${PREFILL_PORT:-30000} decode_port=${DECODE_PORT:-31000} bootstrap=${BOOTSTRAP_PORT:-8998}
here=$(dirname "$0")
trap 'kill 0' EXIT

env ${PREFILL_GPUS:+CUDA_VISIBLE_DEVICES="$PREFILL_GPUS"} \
    python3 -m sglang.launch_server --model-path "$model" --port "$prefill_port" --tp-size "${PREFILL_TP:-1}" \
    --disaggregation-mode prefill --disaggregation-transfer-backend disagg_kv \
    --disaggregation-bootstrap-port "$bootstrap" "$@" &
env ${DECODE_GPUS:+CUDA_VISIBLE_DEVICES="$DECODE_GPUS"} \
    python3 -m sglang.launch_server --model-path "$model" --port "$decode_port" --tp-size "${DECODE_TP:-1}" \
    --disaggregation-mode decode --disaggregation-transfer-backend disagg_kv "$@" &
for server in "$prefill_port" "$decode_port"; do
    until curl --silent --fail "127.0.0.1:$server/model_info" >/dev/null; do
        jobs %1 %2 >/dev/null
        sleep 1
    done
done
python3 "$here/../router.py" --port "$port" --prefill "sglang=127.0.0.1:$prefill_port/$bootstrap" \
    --decode "sglang=127.0.0.1:$decode_port"
