#!/usr/bin/env bash
# TABOM from start to end. Costs are for 2 CPU cores unless GPUs are named; those of GPUs are estimated, never measured.
#   ./run.sh                the whole method on the embedded toy: about 6 minutes
#   ./run.sh test           the tests: about 3 minutes
#   ./run.sh bench          speed and memory as ratios: about 30 minutes
#   ./run.sh study          the study of study/protocol.md, about 3 hours
#   ./run.sh small          the method on a real model of 0.6B and GSM8K: about an hour on one GPU of 24 GB
#   ./run.sh dream-math     a main table of the paper, on 8 GPUs; also dream-code, llada-math, llada-code
#   ./run.sh dream-math parallel    its other tables and figures; also components, grid, windows, tds, ce, best
#   ./run.sh published DIR  scores the four adapters of the authors; DIR is checkpoints/ of their repository
#   ./run.sh d3llm          an adapter of Dream-7B on published trajectories, without decoding: minutes on 8 GPUs
# A command that was interrupted is repeated: what is finished stays. From `small` on, DRY_RUN=1 only prints the
# commands; `python study/bench.py --plan small` (or dream, llada) says what they cost.
set -euo pipefail
cd "$(dirname "$0")"

OUT=${OUT:-out}                 # everything is written here
PYTHON=${PYTHON:-}              # the python of an environment that exists; empty: make .venv
DRY_RUN=${DRY_RUN:-}

# the real models
GPUS=${GPUS:-8}                 # per node. Any 1, 2, 4, 8 or 16 in all train with the same global batch
NNODES=${NNODES:-1}             # with more, start the same command on every node, with one OUT that all of them see
HEAD=${HEAD:-HOST}              # the name of the first node
MODEL=${MODEL:-}                # another checkpoint than the recipe's
PROMPTS=${PROMPTS:-}            # other prompts, a .jsonl file with responses (SFT-GT trains on them)
DATA=${DATA:-}                  # trajectories that exist, such as the authors' dream_prm12k.jsonl: nothing is decoded
EPOCHS=${EPOCHS:-}              # which epochs' adapters are measured, such as "1 3"; empty: the last
LIMIT=${LIMIT:-}                # only the first prompts of each data set and benchmark
TASKS=${TASKS:-}                # a folder of harness tasks to use instead of lm-evaluation-harness's own
RUN_UNSAFE_CODE=${RUN_UNSAFE_CODE:-}    # 1: HumanEval and MBPP may execute what a model wrote
DECODE=${DECODE:-}              # more flags for decode.py,
TRAIN=${TRAIN:-}                # tabom.py
MEASURE=${MEASURE:-}            # and eval.py

# ./run.sh small
METHODS=${METHODS:-sft tabom}                       # of sft, dinfer, t3d, tabom
TEST_PROMPTS=${TEST_PROMPTS:-gsm8k-test}            # questions to measure by
TEST_LIMIT=${TEST_LIMIT:-400}

refuse() {                      # a mistake: one line with the remedy
    echo "$*" >&2
    exit 2
}

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
    run "$PYTHON" tabom.py --model study/base --out "$d/$1" --resume --window 4 --batch-size 32 --warmup 20 --lr 1e-3 \
        --max-steps 200 --log-every 200 "${@:2}"
}

measure() {                     # measure FOLDER FLAGS: accuracy on test prompts, 30 s per adapter
    run "$PYTHON" eval.py --model study/base --batch-size 64 --out "$d/$1" "${@:2}"
}

toy() {
    d=$OUT/toy
    export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
    # keep freed memory: handing it back to the system and fetching it again takes a third of the time
    export MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=1000000000
    local methods=(sft-sd ce-only tabom) answers method other adapters

    # prompts, and the base model's own answers to them: the most probable words, and sampled ones (80 s)
    run "$PYTHON" study/toy.py --out "$d" --test 300
    local decode="$PYTHON decode.py --model study/base --batch-size 64 --prompts"
    run $decode "$d/train.jsonl" --out "$d/greedy.jsonl" & other=$!
    run $decode "$d/train.jsonl" --temperature 1 --score entropy --out "$d/sampled.jsonl"
    wait $other
    for answers in greedy sampled; do                    # a run that was interrupted has them in another order
        LC_ALL=C sort -o "$d/$answers.jsonl" "$d/$answers.jsonl"
    done

    # three methods on both, and as much more pretraining (1 minute)
    for answers in greedy sampled; do
        train $answers/sft-sd --method sft --data "$d/$answers.jsonl" & other=$!
        train $answers/ce-only --lam 0 --data "$d/$answers.jsonl"
        wait $other
    done
    train greedy/tabom --data "$d/greedy.jsonl" & other=$!
    train sampled/tabom --data "$d/sampled.jsonl"
    wait $other
    train control --method sft --data "$d/pretrain.jsonl" & other=$!
    run $decode "$d/val-long.jsonl" --limit 8 --out "$d/heldout.jsonl"
    wait $other

    # long chains at 1, 2 and 4 tokens per step; what was forgotten of short ones and of logic (2 minutes)
    adapters=(control="$d/control/last")
    for answers in greedy sampled; do
        for method in sft-sd ce-only tabom; do
            adapters+=("$answers-$method=$d/$answers/$method/last")
        done
    done
    local long=(--prompts "$d/test-long.jsonl" --parallel 1 2 4)
    measure long "${long[@]}" --adapter "${adapters[@]:0:3}" & other=$!
    measure long "${long[@]}" --no-base --adapter "${adapters[@]:3}"
    wait $other
    measure short --prompts "$d/test-short.jsonl" --tokens-per-step 2 --adapter "${adapters[@]}" & other=$!
    measure logic --prompts "$d/test-logic.jsonl" --tokens-per-step 2 --adapter "${adapters[@]}"
    wait $other

    # a picture, and the page: what base and adapters do on prompts that none of them was trained on (30 s)
    measure tds --prompts "$d/test-long.jsonl" --limit 32 --tds 32 --adapter "${adapters[@]:5}"
    run "$PYTHON" study/report.py curves "$d/tds"
    run "$PYTHON" study/page.py --model study/base --data "$d/heldout.jsonl" --all --window 4 --limit 0 \
        --adapter "CE only=$d/greedy/ce-only/last" "TABOM=$d/greedy/tabom/last" --out "$d/page.html"
    run "$PYTHON" study/report.py demo "$d"
}

study() {                       # resumable; results go to study/results
    "$PYTHON" study/study.py "$OUT/study"
    "$PYTHON" study/report.py study
}

# ---------------------------------------------------------------- a small real model

small() {
    local d=$OUT/small model=${MODEL:-dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1} limit=${LIMIT:-1000} method adapters=""
    local answers=$((limit + ($(wc -w <<< "$METHODS") + 1) * TEST_LIMIT))
    local gpu='import torch; raise SystemExit(not (torch.cuda.is_available() or torch.backends.mps.is_available()))'
    if [ -z "$DRY_RUN${SMALL_CPU:-}" ] && ! "$PYTHON" -c "$gpu"; then
        refuse "no GPU: $answers answers of 256 tokens take about $((answers / 5)) hours on 2 CPU cores; SMALL_CPU=1" \
            "runs it all the same, LIMIT=20 TEST_LIMIT=20 DECODE='--length 64' make it smaller"
    fi
    run "$PYTHON" decode.py --model "$model" --prompts "${PROMPTS:-gsm8k}" --limit $limit --out "$d/traj.jsonl" $DECODE
    for method in $METHODS; do
        run "$PYTHON" tabom.py --model "$model" --data "$d/traj.jsonl" --method $method --out "$d/$method" --resume $TRAIN
        adapters+=" $method=$d/$method/last"
    done
    run "$PYTHON" eval.py --model "$model" --adapter $adapters --prompts "$TEST_PROMPTS" --limit $TEST_LIMIT --tds 32 \
        --out "$d/results" $DECODE $MEASURE
}

# ---------------------------------------------------------------- the paper's experiments

launcher() {                    # what starts a script on all GPUs
    local nodes=""
    if [ "$NNODES" -gt 1 ]; then
        [ -n "$DRY_RUN" ] || [ "$HEAD" != HOST ] || refuse "NNODES=$NNODES: give the first node's name, HEAD=NAME"
        nodes="--nnodes $NNODES --rdzv_backend c10d --rdzv_endpoint $HEAD:29400"
    fi
    echo "$PYTHON -m torch.distributed.run $nodes --nproc_per_node $GPUS"
}

batch() {                       # batch 32: flags of tabom.py for this global batch, at most 4 samples at once per GPU
    local all=$((GPUS * NNODES)) size
    size=$(($1 / all < 4 ? $1 / all : 4))
    [ $size -gt 0 ] && [ $(($1 % (size * all))) = 0 ] ||
        refuse "GPUS=$GPUS NNODES=$NNODES: $all GPUs cannot share a batch of $1; give 1, 2, 4, 8 or 16 in all"
    echo "--batch-size $size --grad-accum $(($1 / (size * all)))"
}

adapter() {                     # adapter NAME: trains it, 1 to 3 minutes on 8 H100 (estimated); variables are paper's
    local flags size lam gamma
    case $1 in
        # what TABOM is compared with has the paper's common settings, which are the defaults
        sft-gt)      size=32 flags="--data $prompts --limit $first --method sft" ;;
        sft-sd)      size=32 flags="--data $data $kept --method sft" ;;
        dinfer|t3d)  size=32 flags="--data $data $kept --method $1" ;;
        # TABOM has the recipe's, as released
        *)           size=$global flags="--data $data $kept $released" ;;
    esac
    case $1 in
        global-ce)   flags+=" --window 0 --lam 0" ;;
        global)      flags+=" --window 0" ;;
        ce)          flags+=" --lam 0" ;;
        window-*)    flags+=" --window ${1#window-}" ;;
        lam-*)       IFS=- read -r _ lam _ gamma <<< "$1"
                     flags+=" --lam $lam --gamma $gamma" ;;
    esac
    size=$(batch $size)
    run $launch tabom.py --model $model --out "$d/$1" --resume $size $flags $TRAIN
}

# paper RECIPE WORD [ADAPTER]: from the data set's name to the table. Every benchmark has a folder for its results, so
# that what was measured for one table is found again for the next.
paper() {
    local d=$OUT/$1 launch model own="" prompts first blocks="" released kept="" global=32
    case $1 in
        dream-*) model=Dream-org/Dream-v0-Instruct-7B own="--greedy" ;;
        llada-*) model=GSAI-ML/LLaDA-8B-Instruct blocks="--block 32" ;;
    esac
    case $1 in
        *-math) prompts=MixChain-Z-PRM12K first=0 ;;
        *-code) prompts=Ling-Coder-SFT first=17000 ;;
    esac
    case $1 in                  # as released; kept: records by the decoder that made them
        dream-math) released="--lam 1 --gamma 0.1" kept="--decoded-by entropy" ;;
        dream-code) released="--lam 2 --gamma 0.1 --lr 1e-4 --cut non-ltr" global=64 ;;
        llada-math) released="--lam 1 --gamma 0.2" kept="--decoded-by entropy default credit" ;;
        llada-code) released="--lam 1 --gamma 0.3" kept="--decoded-by default" ;;
    esac
    model=${MODEL:-$model} prompts=${PROMPTS:-$prompts} first=${LIMIT:-$first}
    local data=${DATA:-$d/traj.jsonl}

    # per table: adapters, benchmarks, folder of the results, flags of eval.py, questions. Hours of measuring are for
    # Dream on 8 H100 if no answer ended early (estimated)
    local names="" tasks="gsm8k_cot minerva_math500 humaneval_instruct mbpp_instruct" folder=results flags=""
    local questions=${LIMIT:-0} epochs=${EPOCHS:-last} methods="sft-gt sft-sd dinfer t3d tabom"
    case $2 in
        main)        names=$methods tasks+=" ifeval" ;;                                             # 7 hours
        best)        names=$methods tasks+=" ifeval" epochs=${EPOCHS:-1 2 3 4 5} ;;                 # 30 hours
        parallel)    names=$methods folder=parallel flags="--tokens-per-step 2" ;;                  # 3 hours
        components)  names="sft-sd global-ce global ce tabom" ;;                                    # 5 hours
        grid)        names=$(echo lam-{1,2}-gamma-{0.1,0.2,0.3}) tasks="gsm8k_cot" ;;               # 1 hour
        windows)     names="window-16 tabom window-48 window-64 window-256"
                     tasks="gsm8k_cot humaneval_instruct" ;;                                        # 2 hours
        tds)         names="sft-sd tabom" folder=tds flags="--tds 64 --whole" questions=${LIMIT:-64} ;;   # 1 hour
        ce)          tasks="" questions=${LIMIT:-1000} ;;                                           # 1 hour, 1 GPU
        published)   tasks+=" ifeval" ;;                                                            # 2 hours
        *) refuse "./run.sh $1 $2: unknown; it takes parallel, components, grid, windows, tds, ce, best or nothing" ;;
    esac
    if [ -n "$TASKS" ] && [ -z "$(find "$TASKS" -name '*.yaml' 2> /dev/null)" ]; then
        refuse "TASKS=$TASKS: holds no task; give a folder with one .yaml file for each of $tasks"
    fi
    batch $global > /dev/null   # a number of GPUs that does not fit is noticed before hours of decoding
    environment
    launch=$(launcher)

    # the base's own answers, as released: the whole canvas, ties to the leftmost. 1.2 hours on 8 H100 (estimated)
    if [ -z "$DATA" ] && [ $2 != published ]; then
        run $launch decode.py --model $model --prompts $prompts --limit $first $blocks --whole --ties position \
            --out "$data" $DECODE
    fi
    local name epoch folders=""
    for name in $names; do
        adapter $name
        for epoch in $epochs; do
            case $epoch in
                last) folders+=" $name=$d/$name/last" ;;
                *) folders+=" $name-epoch-$epoch=$d/$name/epoch-$epoch" ;;
            esac
        done
    done
    [ $2 != published ] || folders="published=$3"
    for name in $folders; do
        [ -n "$DRY_RUN" ] || [ -e "${name#*=}/adapter_config.json" ] ||
            refuse "${name#*=}: holds no adapter; EPOCHS names epochs that were trained, 1 to 5 without TRAIN"
    done

    # the base and the adapters, one benchmark after the other
    local task before agree
    for task in $tasks; do
        before="" agree=""
        case $task in humaneval*|mbpp*)
            if [ -z "$RUN_UNSAFE_CODE$DRY_RUN" ]; then
                echo "$task: left out, it executes what a model wrote; RUN_UNSAFE_CODE=1 allows it" >&2
                continue
            fi
            before="env HF_ALLOW_CODE_EVAL=1" agree="--confirm-run-unsafe-code" ;;
        esac
        run $before $launch eval.py --model $model --ties position $own --tasks $task ${TASKS:+--task-path "$TASKS"} \
            --limit $questions $flags $agree --adapter $folders --out "$d/$folder/$task" $MEASURE
    done
    if [ $2 = ce ]; then        # of reference answers and of own answers to the same prompts, under the base
        run "$PYTHON" eval.py --model $model --ce $prompts "$data" --limit $questions --out "$d/ce" $MEASURE
    fi
    run "$PYTHON" study/report.py paper "$d"
}

published() {                   # published DIR: 9 hours of measuring on 8 H100 (estimated)
    local pair
    [ -n "$1" ] || refuse "./run.sh published DIR: give checkpoints/ of the authors' repository"
    for pair in dream-math=dream_prm12k dream-code=dream_ling_coder llada-math=llada_prm12k \
            llada-code=llada_ling_coder; do
        [ -n "$DRY_RUN" ] || [ -e "$1/${pair#*=}/adapter_config.json" ] ||
            refuse "$1/${pair#*=}: holds no adapter; give checkpoints/ of the authors' repository"
        paper ${pair%=*} published "$1/${pair#*=}"
    done
}

d3llm() {                       # from nothing to an adapter of Dream-7B on published trajectories, without decoding
    # DATA is another data set of d3LLM's form, or a file of such rows; with it goes MODEL, which decoded them
    local d=$OUT/d3llm model=${MODEL:-Dream-org/Dream-v0-Instruct-7B} size launch
    size=$(batch 32)
    environment
    launch=$(launcher)
    run "$PYTHON" study/d3llm.py --model $model --data "${DATA:-d3LLM/trajectory_data_dream_32}" \
        --limit ${LIMIT:-5000} --out "$d/traj.jsonl"
    run $launch tabom.py --model $model --data "$d/traj.jsonl" --out "$d/tabom" --resume $size $TRAIN
}

# ----------------------------------------------------------------

tests() {                       # without a GPU, whose rounding differs; some CPUs die of bf16 products without the flag
    export CUDA_VISIBLE_DEVICES= ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 OMP_NUM_THREADS=1
    local log other first=0 second=0
    log=$(mktemp)
    "$PYTHON" -m ruff check .
    # in two halves, one per core
    "$PYTHON" -m pytest -q tests/test_[efprs]*.py "$@" > "$log" 2>&1 & other=$!
    "$PYTHON" -m pytest -q test_tabom.py tests/test_[cdl]*.py "$@" || first=$?
    wait $other || second=$?
    cat "$log"
    rm "$log"
    # 5: that half has no test of the name asked for
    [ $first = 0 ] || [ $first = 5 -a $second = 0 ] || exit $first
    [ $second = 0 ] || [ $second = 5 -a $first = 0 ] || exit $second
}

case ${1:-toy} in
    toy) environment; toy ;;
    small) environment; small ;;
    study) environment; study ;;
    test) environment; tests "${@:2}" ;;
    bench) environment; "$PYTHON" study/bench.py "${@:2}" ;;
    dream-math|dream-code|llada-math|llada-code) paper "$1" "${2:-main}" ;;
    published) published "${2:-}" ;;
    d3llm) d3llm ;;
    *) refuse "./run.sh $1: unknown; the first lines of run.sh list what there is" ;;
esac
