#!/usr/bin/env bash
# Measure on a GPU host that has Python 3.12, PyTorch 2.11 or newer, Triton and transformers, and no package index.
#
#   OUT=FOLDER COMMIT=$(git rev-parse HEAD) benchmarks/engines_gpu/go.sh 1to1:16 1to1:64 2to1:16 ...
#
# Each argument is a topology and a block size, or SGLang's page size with ENGINE=sglang; or a block size of "turns",
# "trace", "beside" or "serving", commands of benchmarks.engines_gpu. OUT gets a JSON document for each, and logs.txt with the ends
# of the instances' logs. ARCHIVE (.carry/ENGINE.tar.xz) is what pack_ENGINE.py wrote; LIMIT_S (150) the seconds of each
# run; OPTIONS are more options of that command. WORK (/tmp/engines_gpu) and MODEL (/dev/shm/llama) are made once. COMMIT
# names the checkout, which has no .git there.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:?OUT names the folder of the results} work=${WORK:-/tmp/engines_gpu} model=${MODEL:-/dev/shm/llama}
limit=${LIMIT_S:-150} engine=${ENGINE:-vllm} status=0
if [ ! -e "$work/unpacked" ]; then
    mkdir -p "$work/site"
    tar xJf "${ARCHIVE:-.carry/$engine.tar.xz}" -C "$work/site"
    # Two dozen processes import it at once.
    python3 -m compileall -q -j 0 "$work/site" >/dev/null || true
    touch "$work/unpacked"
fi
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=$work/site:$PWD/src PYTHONUNBUFFERED=1
[ -e "$model/config.json" ] || python3 -m benchmarks.engines_gpu.model "$model"
echo "set up in $SECONDS s"
for case in "$@"; do
    logs=$work/logs/${case/:/_}
    if [[ ${case%:*} =~ ^(turns|trace|beside|serving)$ ]]; then
        timeout --signal INT --kill-after 20 "$((limit + 40))" python3 -m "benchmarks.engines_gpu.${case%:*}" \
            --block "${case#*:}" --model "$model" --out "$out/${case/:/_}" ${COMMIT:+--commit "$COMMIT"} ${OPTIONS:-} ||
            status=$?
        echo "$case is over after $SECONDS s, status $status"
        continue
    fi
    # An interrupt lets the run kill its instances, which are process groups of their own.
    timeout --signal INT --kill-after 20 "$((limit + 40))" python3 -m benchmarks.engines_gpu run --engine "$engine" \
        --topology "${case%:*}" --block "${case#*:}" --model "$model" --out "$out" --logs "$logs" --limit-s "$limit" \
        ${COMMIT:+--commit "$COMMIT"} ${OPTIONS:-} || status=$?
    tail -n 40 "$logs"/*.log >>"$out/logs.txt" || true
    echo "$case is over after $SECONDS s, status $status"
done
exit "$status"
