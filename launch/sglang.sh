#!/usr/bin/env bash
# One SGLang server for rollouts: launch/sglang.sh MODEL PORT [server flags].
# SGLANG_PYTHON: the python of the server's own environment (default: python3). Without an NVIDIA GPU, or with
# SGLANG_CPU=1, the server runs on the CPU from its published wheels (launch/cpu; .ci/sglang.sh makes that environment).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) python=${SGLANG_PYTHON:-python3} model=$1 port=$2
shift 2
# No tokenizer: token ids go in and out. No warm-up request: readiness is /health, and the first weights are ours.
flags=(--model-path "$model" --host "${SGLANG_HOST:-127.0.0.1}" --port "$port" --skip-tokenizer-init
       --skip-server-warmup --trust-remote-code)
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
if [ "${SGLANG_CPU:-}" != 1 ] && command -v nvidia-smi >/dev/null; then
  exec "$python" -m sglang.launch_server "${flags[@]}" "$@"
fi
# On a small machine OpenMP's threads fight over the cores: one thread is 20 times faster than the default.
export PYTHONPATH=$here/cpu SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND=0 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
exec "$python" "$here/cpu/boot.py" "${flags[@]}" --device cpu --attention-backend torch_native \
  --disable-overlap-schedule --mem-fraction-static 0.3 --max-total-tokens "${SGLANG_CPU_TOKENS:-65536}" \
  --max-running-requests "${SGLANG_CPU_REQUESTS:-64}" "$@"
