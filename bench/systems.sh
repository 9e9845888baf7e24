#!/bin/bash
# The experiments of docs/results.md "The other three systems": three seeds each, on MicroSWE and MicroIF.
#   bash bench/systems.sh prefix | rft | soft | sverl [SEEDS]
# Needs runs/micro/data (python train.py --stage microswe --config configs/micro/recipe.toml) for the first two. Each
# prints its tables at the end; curves are in runs/*/metrics.jsonl. On two free cores: prefix and rft hours, soft and
# sverl below an hour a seed.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?prefix, rft, soft or sverl}
seeds=${2:-"0 1 2"}
run() { python train.py "$@"; }

evaluate() { # CONFIG FOLDER STAGE, with further settings
    local config=$1 folder=$2 stage=$3
    shift 3
    run --stage eval --config "$config" --run.folder "$folder" --model "$folder/$stage/model" "$@"
}

microif() {
    [ -d runs/microif/coding-sft/model ] && return
    run --stage microif --config configs/micro/microif.toml
    run --stage coding-sft --config configs/micro/microif.toml
}

for seed in $seeds; do
    case $what in
    prefix) # resolution over rollouts and seconds: rollout/attempts and perf/step_s summed up to a checkpoint's step
        for name in rl prefix_sampling; do
            folder=runs/systems/$name-$seed
            run --stage rl --config configs/micro/$name.toml --run.seed "$seed" --run.folder "$folder" --train.keep 100
            for checkpoint in "$folder"/rl/checkpoints/step_*; do
                run --stage eval --config configs/micro/$name.toml --run.folder "$folder/at_$(basename "$checkpoint")" \
                    --model "$checkpoint/model"
            done
        done ;;
    rft)
        for select in rubric random outcome; do
            folder=runs/systems/rft-$select-$seed
            run --stage rft --config configs/micro/rft.toml --run.seed "$seed" --run.folder "$folder" --rft.select $select
            evaluate configs/micro/rft.toml "$folder" rft
            run --stage behaviours --config configs/micro/rft.toml --input "$folder/eval/attempts"
        done ;;
    soft) # the report's prediction, then the truth on held-out prompts
        microif
        for reward in checklist holistic; do
            folder=runs/systems/soft-$reward-$seed
            run --stage rl --config configs/micro/soft_rlvr.toml --run.seed "$seed" --run.folder "$folder" --rl.reward $reward
            evaluate configs/micro/soft_rlvr.toml "$folder" rl
        done
        run --stage checklist-report --config configs/micro/soft_rlvr.toml \
            --input "runs/systems/soft-checklist-$seed/rl/attempts" ;;
    sverl) # selfverify/self_minus_gold and selfverify/canary_pass_rate over the steps
        microif
        folder=runs/systems/sverl-free-$seed
        run --stage rl --config configs/micro/soft_sverl.toml --run.seed "$seed" --run.folder "$folder" \
            --verifier.kind policy --selfverify.anchor majority --selfverify.gold 0 --selfverify.penalty 0 \
            --selfverify.alarm 1
        evaluate configs/micro/soft_sverl.toml "$folder" rl
        folder=runs/systems/sverl-held-$seed
        run --stage rl --config configs/micro/soft_sverl.toml --run.seed "$seed" --run.folder "$folder"
        evaluate configs/micro/soft_sverl.toml "$folder" rl ;;
    *) echo "prefix, rft, soft or sverl" >&2; exit 2 ;;
    esac
done
