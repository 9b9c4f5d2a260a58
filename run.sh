#!/usr/bin/env bash
# TABOM from start to end. Costs are for 2 CPU cores unless a GPU is named.
#   ./run.sh                the whole method on the embedded toy: about 6 minutes
#   ./run.sh test           the tests: about 3 minutes
#   ./run.sh bench          speed and memory as ratios: about 30 minutes
#   ./run.sh study          the study of study/protocol.md, about 3 hours
#   ./run.sh small          the method on a real model of 0.6B and GSM8K: about an hour on one GPU of 24 GB
#   ./run.sh dream-math     one of the paper's experiments on 8 GPUs; also dream-code, llada-math, llada-code
#   ./run.sh d3llm          an adapter of Dream-7B on published trajectories, without decoding, on 8 GPUs
# With DRY_RUN=1 the last three only print their commands; `python study/bench.py --plan small` (or dream, llada) says
# what they cost.
set -euo pipefail
cd "$(dirname "$0")"

OUT=${OUT:-out}                 # everything is written here
PYTHON=${PYTHON:-}              # the python of an environment that exists; empty: make .venv
GPUS=${GPUS:-8}
DRY_RUN=${DRY_RUN:-}

# ./run.sh small
SMALL_MODEL=${SMALL_MODEL:-dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1}
SMALL_DATA=${SMALL_DATA:-gsm8k}                     # prompts to decode and train on
SMALL_PROMPTS=${SMALL_PROMPTS:-1000}                # how many
SMALL_TEST_DATA=${SMALL_TEST_DATA:-gsm8k-test}      # questions to measure by
SMALL_TEST=${SMALL_TEST:-400}
SMALL_LENGTH=${SMALL_LENGTH:-256}                   # response tokens
SMALL_BLOCK=${SMALL_BLOCK:-32}
SMALL_METHODS=${SMALL_METHODS:-sft tabom}           # of sft, dinfer, t3d, tabom
SMALL_EPOCHS=${SMALL_EPOCHS:-5}
SMALL_TRAIN=${SMALL_TRAIN:-}                        # more flags for tabom.py

environment() {                 # two minutes the first time, and again when the requirements change
    if [ -z "$PYTHON" ]; then
        local stamp
        stamp=$(cat requirements*.txt | cksum)
        if [ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ]; then
            echo "making .venv, about two minutes" >&2
            python3.11 -m venv .venv 2>/dev/null || python3 -m venv .venv
            .venv/bin/pip install -q --disable-pip-version-check -r requirements-dev.txt
            echo "$stamp" > .venv/stamp
        fi
        PYTHON=.venv/bin/python
    fi
    export PYTHON
}

run() {                         # says what it runs; with DRY_RUN=1 only that
    echo "+ $*" >&2
    [ -n "$DRY_RUN" ] || "$@"
}

# ---------------------------------------------------------------- the toy

# Two processes with one thread each are faster than one with two. A GPU rounds differently, so it is hidden.

train() {                       # train NAME FLAGS: one adapter in $d/NAME, 15 s
    run "$PYTHON" tabom.py --model study/base --out "$d/$1" --resume --window 4 --batch-size 32 --warmup 20 \
        --max-steps 200 --log-every 100 "${@:2}"
}

measure() {                     # measure DOMAIN FLAGS: accuracy on test prompts, 30 s per adapter
    run "$PYTHON" eval.py --model study/base --batch-size 64 --prompts "$d/test-$1.jsonl" "${@:2}"
}

adapters() {                    # NAME=FOLDER of these runs
    local folder
    for folder in "$@"; do
        echo "$(basename "$folder")=$folder/last"
    done
}

toy() {
    d=$OUT/toy
    export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
    # keep freed memory: handing it back to the system and fetching it again takes a third of the time
    export MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=1000000000

    # prompts, and the base model's own answers to them (1 minute); two ranks write them in no fixed order
    run "$PYTHON" study/toy.py --out "$d" --test 200
    run "$PYTHON" -m torch.distributed.run --nproc_per_node 2 decode.py --model study/base --prompts "$d/train.jsonl" \
        --batch-size 64 --out "$d/traj.jsonl"
    LC_ALL=C sort -o "$d/traj.jsonl" "$d/traj.jsonl"

    # six ways to post-train it, at two learning rates (2 minutes)
    for rate in 3e-4 1e-3; do
        train sft-gt@$rate --lr $rate --method sft --data "$d/gt.jsonl" & other=$!
        train sft-sd@$rate --lr $rate --method sft --data "$d/traj.jsonl"
        wait $other
        train dinfer@$rate --lr $rate --method dinfer --data "$d/traj.jsonl" & other=$!
        train t3d@$rate --lr $rate --method t3d --data "$d/traj.jsonl"
        wait $other
        train ce-only@$rate --lr $rate --lam 0 --data "$d/traj.jsonl" & other=$!
        train tabom@$rate --lr $rate --data "$d/traj.jsonl"
        wait $other
    done

    # math at 1, 2 and 4 tokens per step, what was forgotten of logic, and the order swap (3 minutes)
    measure math --parallel 1 2 4 --out "$d/math" --adapter $(adapters "$d"/*@3e-4) & other=$!
    measure math --parallel 1 2 4 --out "$d/math" --no-base --adapter $(adapters "$d"/*@1e-3)
    wait $other
    measure logic --out "$d/logic" --adapter $(adapters "$d"/*@*) & other=$!
    measure math --parallel 2 4 --swap --out "$d/swap" --no-base --adapter $(adapters "$d/ce-only@1e-3" "$d/tabom@1e-3")
    wait $other
    measure math --limit 32 --tds 32 --out "$d/tds"
    run "$PYTHON" study/report.py curves "$d/tds"
    run "$PYTHON" study/report.py map "$d/traj.jsonl" "$d/map.png"
    run "$PYTHON" study/report.py demo "$d"
}

study() {                       # resumable; results go to study/results
    "$PYTHON" study/study.py "$OUT/study"
    "$PYTHON" study/report.py study
}

# ---------------------------------------------------------------- a small real model

small() {
    local d=$OUT/small method adapters=() models
    models=$(($(wc -w <<< "$SMALL_METHODS") + 1))
    local answers=$((SMALL_PROMPTS + models * SMALL_TEST))
    local gpu='import torch; raise SystemExit(not (torch.cuda.is_available() or torch.backends.mps.is_available()))'
    if [ -z "$DRY_RUN${SMALL_CPU:-}" ] && ! "$PYTHON" -c "$gpu"; then
        echo "no GPU: $answers answers take about $((answers * SMALL_LENGTH / 1280)) hours on 2 CPU cores;" \
            "SMALL_CPU=1 runs it all the same, SMALL_PROMPTS, SMALL_TEST and SMALL_LENGTH make it smaller" >&2
        exit 2
    fi
    local decode="--length $SMALL_LENGTH --block $SMALL_BLOCK"
    run "$PYTHON" decode.py --model "$SMALL_MODEL" --prompts "$SMALL_DATA" --limit $SMALL_PROMPTS $decode \
        --out "$d/traj.jsonl"
    for method in $SMALL_METHODS; do
        run "$PYTHON" tabom.py --model "$SMALL_MODEL" --out "$d/$method" --resume --method $method \
            --epochs $SMALL_EPOCHS --data "$d/traj.jsonl" $SMALL_TRAIN
        adapters+=("$method=$d/$method/last")
    done
    run "$PYTHON" eval.py --model "$SMALL_MODEL" --adapter "${adapters[@]}" --prompts "$SMALL_TEST_DATA" \
        --limit $SMALL_TEST $decode --tds 32 --out "$d/results"
}

# ---------------------------------------------------------------- the paper's experiments

paper() {                       # paper dream|llada math|code: from the data set's name to the benchmarks
    local model prompts limit flags block="" token="" d=$OUT/$1-$2
    local accum=$((GPUS < 8 ? 8 / GPUS : 1))        # 1, 2, 4 and 8 GPUs have the same global batch, 32
    case $1-$2 in               # as released
        dream-math) flags="--lam 1 --gamma 0.1" ;;
        dream-code) flags="--lam 2 --gamma 0.1 --lr 1e-4 --cut non-ltr --grad-accum $((2 * accum))" ;;
        llada-math) flags="--lam 1 --gamma 0.2" ;;
        llada-code) flags="--lam 1 --gamma 0.3" ;;
    esac
    case $1 in
        dream) model=Dream-org/Dream-v0-Instruct-7B token="--greedy" ;;
        llada) model=GSAI-ML/LLaDA-8B-Instruct block="--block 32" ;;
    esac
    case $2 in math) prompts=MixChain-Z-PRM12K limit=0 ;; code) prompts=Ling-Coder-SFT limit=17000 ;; esac
    local torchrun="$PYTHON -m torch.distributed.run --nproc_per_node $GPUS"

    # decode as released: the whole canvas, ties to the leftmost; then train by each method, baselines as in the paper
    run $torchrun decode.py --model $model --prompts $prompts --limit $limit $block --whole --ties position \
        --out "$d/traj.jsonl"
    local train="$torchrun tabom.py --model $model --resume --grad-accum $accum"
    run $train --out "$d/sft-gt" --method sft --data $prompts --limit $limit
    run $train --out "$d/sft-sd" --method sft --data "$d/traj.jsonl"
    run $train --out "$d/dinfer" --method dinfer --data "$d/traj.jsonl"
    run $train --out "$d/t3d" --method t3d --data "$d/traj.jsonl"
    run $train --out "$d/tabom" $flags --data "$d/traj.jsonl"

    # measure the base and the last epoch of each
    local measure="$torchrun eval.py --model $model --ties position $token --adapter" method
    for method in sft-gt sft-sd dinfer t3d tabom; do
        measure+=" $method=$d/$method/last"
    done
    run $measure --tasks gsm8k_cot,minerva_math500,ifeval --out "$d/results"
    run $measure --tasks gsm8k_cot --tokens-per-step 2 --out "$d/results-2-per-step"
    run $measure --prompts gsm8k-test --limit 256 --tds 64 --out "$d/tds"
    # these two run what the model wrote, inside the harness, so they need your consent: RUN_UNSAFE_CODE=1
    if [ -n "$DRY_RUN${RUN_UNSAFE_CODE:-}" ]; then
        run env HF_ALLOW_CODE_EVAL=1 $measure --tasks humaneval_instruct,mbpp_instruct --confirm-run-unsafe-code \
            --out "$d/results-code"
    fi
}

d3llm() {                       # from nothing to an adapter of Dream-7B on published trajectories, without decoding
    run "$PYTHON" -m torch.distributed.run --nproc_per_node $GPUS tabom.py --model Dream-org/Dream-v0-Instruct-7B \
        --resume --data d3LLM/trajectory_data_dream_32 --limit 5000 --out "$OUT/d3llm"
}

# ----------------------------------------------------------------

tests() {                       # without a GPU, whose rounding differs; some CPUs die of bf16 products without the flag
    export CUDA_VISIBLE_DEVICES= ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
    "$PYTHON" -m ruff check .
    "$PYTHON" -m pytest -q test_tabom.py tests "$@"
}

case ${1:-toy} in
    toy) environment; toy ;;
    small) environment; small ;;
    study) environment; study ;;
    test) environment; tests "${@:2}" ;;
    bench) environment; "$PYTHON" study/bench.py "${@:2}" ;;
    d3llm) environment; d3llm ;;
    dream-math|dream-code|llada-math|llada-code) environment; paper "${1%-*}" "${1#*-}" ;;
    *) echo "$1: unknown; the first lines of run.sh list what there is" >&2; exit 2 ;;
esac
