#!/usr/bin/env bash
# Starts train.py with a rank on every GPU of this node; on several nodes, run it on each:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 launch/torchrun.sh --stage coding-sft --config FILE.toml
# Variables (default): NNODES (1), NODE_RANK (0), MASTER_ADDR and MASTER_PORT (needed when NNODES > 1: an address of node
# 0 and a port that is free there), RANKS_PER_NODE (the GPUs; 1 without any), PYTHON (python). run.folder must be one
# folder for all nodes. Hosts with several networks: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the one to use.
#
# SIGTERM, SIGINT or SIGUSR1 to this script: every rank finishes its step, one checkpoint is written, exit code 0;
# --resume goes on. A rank that dies ends the others (torchrun's doing) and this script with its exit code.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
nodes=${NNODES:-1}
ranks=${RANKS_PER_NODE:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
if [ "$nodes" -gt 1 ]; then
    : "${MASTER_ADDR:?is not set: an address of node 0 that the others reach}"
    : "${MASTER_PORT:?is not set: a port that is free on node 0}"
    meet=(--nnodes "$nodes" --node-rank "${NODE_RANK:?is not set: 0 to NNODES - 1}" --master-addr "$MASTER_ADDR"
          --master-port "$MASTER_PORT")
else
    meet=(--standalone)  # a free port of its own
fi

# torchrun would pass on a SIGTERM and kill the ranks 30 s later, in the middle of a long step. So it has a session of its
# own, which no signal of a terminal reaches, ignores USR1, and the ranks are told directly.
(
    trap '' USR1
    exec setsid "$python" -m torch.distributed.run "${meet[@]}" --nproc-per-node "$ranks" "$root/train.py" "$@"
) &
launcher=$!
tell() {
    for pid in $(cat "/proc/$launcher/task/$launcher/children" 2>/dev/null); do kill -USR1 "$pid" 2>/dev/null; done
}
trap tell TERM INT USR1
trap 'kill -TERM "$launcher" 2>/dev/null' EXIT
while :; do
    wait "$launcher"  # comes back early when a signal is trapped
    code=$?
    kill -0 "$launcher" 2>/dev/null || break
done
trap - EXIT
exit "$code"
