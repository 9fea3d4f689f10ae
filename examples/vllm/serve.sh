#!/usr/bin/env bash
# Serve MODEL from a prefill and a decode instance of vLLM, behind ../router.py on port 8000.
#
#   examples/vllm/serve.sh MODEL [options of vllm serve, for both instances]
#
# Variables, with their defaults:
#   PREFILL_TP=1 DECODE_TP=1            tensor-parallel sizes
#   PREFILL_GPUS= DECODE_GPUS=          as in CUDA_VISIBLE_DEVICES; by default the first GPUs, and those that follow
#   PREFILL_STAGING= DECODE_STAGING=    bytes, the option staging_bytes; on GPUs 1 GiB each
#   PORT=8000 PREFILL_PORT=8100 DECODE_PORT=8200
#   AFTER_PREFILL=                      1: decode is asked once prefill has answered, not at once
#   STRATEGY=auto TRANSPORT=auto        options of the connector
#   RENDEZVOUS=                         the option rendezvous, such as etcd://10.0.0.3:2379/prod
#   STATUS=true                         "disagg-kv top" shows the ranks
#   PREFILL_METRICS= DECODE_METRICS=    HOST:PORT of rank 0, for Prometheus
#   ROLE=                               prefill or decode: this instance alone, without a router, for several hosts
#   HOST= KEYS=                         with ROLE: ADDRESS or ADDRESS:PORT for ranks of the other host; the option keys
#   VLLM=                               what starts a server; by default "vllm serve", or its module where there is no vllm
set -euo pipefail
model=${1:?usage: serve.sh MODEL [options of vllm serve]}
shift
here=$(dirname "$0")
port=${PORT:-8000} prefill_port=${PREFILL_PORT:-8100} decode_port=${DECODE_PORT:-8200}
prefill_tp=${PREFILL_TP:-1} decode_tp=${DECODE_TP:-1} role=${ROLE:-}

say() { echo "serve.sh: $*" >&2; }
fail() { say "$@"; exit 1; }

# The CLI of vLLM needs a package of that name. The one for CPUs has another.
if [ -z "${VLLM:-}" ]; then
    if python3 -c 'from importlib.metadata import version; version("vllm")' 2>/dev/null; then
        VLLM="vllm serve"
    else
        VLLM="python3 -m vllm.entrypoints.openai.api_server --model"
    fi
fi

IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || true)}"
join() { local IFS=,; echo "$*"; }
if [ ${#gpus[@]} -gt 0 ]; then
    first=$([ "$role" = decode ] && echo 0 || echo "$prefill_tp")
    PREFILL_GPUS=${PREFILL_GPUS:-$(join "${gpus[@]:0:prefill_tp}")}
    DECODE_GPUS=${DECODE_GPUS:-$(join "${gpus[@]:first:decode_tp}")}
else
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB of each server
fi

# connector KV_ROLE STAGING METRICS: the value of --kv-transfer-config.
connector() {
    KV_ROLE=$1 STAGING=$2 METRICS=$3 python3 - <<'END'
import json, os

env = os.environ.get
options = {"strategy": env("STRATEGY", "auto"), "transport": env("TRANSPORT", "auto"), "metrics": env("METRICS", "")}
options |= {"status_socket": env("STATUS", "true") == "true", "rendezvous": env("RENDEZVOUS", "")}
if env("STAGING"):
    options["staging_bytes"] = int(env("STAGING"))
if env("HOST"):
    listen = env("HOST") if ":" in env("HOST") else f"{env('HOST')}:0"
    options |= {"channel": "zmq", "listen": f"tcp://{listen}", "keys": env("KEYS", "")}
connector = {"kv_connector": "DisaggKVConnector", "kv_connector_module_path": "disagg_kv.engines.vllm"}
print(json.dumps({**connector, "kv_role": env("KV_ROLE"), "kv_connector_extra_config": options}))
END
}

# start NAME KV_ROLE PORT TP GPUS STAGING METRICS [options]: a server in the background, whose lines begin with its name.
start() {
    local name=$1 kv_role=$2 port=$3 tp=$4 on=$5 staging=$6 metrics=$7 config memory
    shift 7
    local options=(--port "$port" --tensor-parallel-size "$tp")
    if [ ${#gpus[@]} -gt 0 ]; then
        local -a devices
        IFS=, read -ra devices <<<"$on"
        [ ${#devices[@]} -eq "$tp" ] || fail "$name needs $tp GPUs and has '$on': set PREFILL_GPUS and DECODE_GPUS"
        # vLLM takes this part of the GPU. Staging memory is beside it.
        memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i "${devices[0]}")
        options+=(--gpu-memory-utilization "$(awk "BEGIN { printf \"%.3f\", 0.92 - $staging / 1048576 / $memory }")")
        local -x CUDA_VISIBLE_DEVICES=$on
    fi
    config=$(connector "$kv_role" "$staging" "$metrics")
    say "$name is on ${on:+GPU }${on:-the CPU}, port $port"
    # sed ends with the last process of the server, so that no line is lost.
    $VLLM "$model" "${options[@]}" --kv-transfer-config "$config" "$@" > >(trap '' INT TERM; sed -u "s/^/$name | /") 2>&1 &
}
prefill() {
    start prefill kv_producer "$prefill_port" "$prefill_tp" "${PREFILL_GPUS:-}" \
        "${PREFILL_STAGING:-${PREFILL_GPUS:+$((1 << 30))}}" "${PREFILL_METRICS:-}" "$@"
}
decode() {
    start decode kv_consumer "$decode_port" "$decode_tp" "${DECODE_GPUS:-}" \
        "${DECODE_STAGING:-${DECODE_GPUS:+$((1 << 30))}}" "${DECODE_METRICS:-}" "$@"
}

trap 'kill 0' EXIT
case $role in
prefill | decode)
    "$role" "$@"
    wait -n
    ;;
"")
    command -v curl >/dev/null || fail "curl is not installed"
    [ -z "${HOST:-}" ] || fail "HOST needs ROLE: start each instance on its own host"
    declare -A servers
    prefill "$@"
    servers[$prefill_port]=$!
    decode "$@"
    servers[$decode_port]=$!
    for server in "$prefill_port" "$decode_port"; do
        until curl --silent --fail "localhost:$server/health" >/dev/null; do
            kill -0 "${servers[$server]}" 2>/dev/null || fail "the server for port $server has ended: see its lines above"
            sleep 1
        done
    done
    python3 "$here/../router.py" --port "$port" --prefill "vllm=localhost:$prefill_port" \
        --decode "vllm=localhost:$decode_port" ${AFTER_PREFILL:+--after-prefill} &
    router=$!
    until curl --silent "localhost:$port" >/dev/null; do
        kill -0 "$router" 2>/dev/null || fail "the router has ended: see the lines above"
        sleep 0.2
    done
    say "ready: http://localhost:$port/v1/completions"
    wait -n
    fail "one of the three processes has ended: see the lines above"
    ;;
*) fail "ROLE is '$role', not prefill or decode" ;;
esac
