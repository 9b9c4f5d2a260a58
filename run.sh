#!/usr/bin/env bash
# TABOM from start to end. Costs are of 2 CPU cores unless a GPU is named.
#   ./run.sh                     the whole method on the embedded toy, about 10 minutes
#   ./run.sh test                environment and tests, at most 5 minutes after the installation
#   ./run.sh paper-toy           the study behind the README's table: bases x methods, about 1.5 hours, resumable
#   ./run.sh dream-math | dream-code | llada-math | llada-code      the paper's experiments on 8 GPUs; DRY_RUN=1 prints them
#   ./run.sh bench | soak        speed and memory as ratios; the long robustness trials
set -euo pipefail
cd "$(dirname "$0")"

OUT=${OUT:-out}                 # everything is written below it
PYTHON=${PYTHON:-}              # an existing environment's python; empty = make .venv
JOBS=${JOBS:-2}                 # single-thread processes side by side: beats one process with two threads
GPUS=${GPUS:-8}
DRY_RUN=${DRY_RUN:-}
BASES=${BASES:-"0 1 2 3 4"}     # paper-toy: pretraining seeds
SEEDS=${SEEDS:-1}               # paper-toy: training seeds on each base (all different)
TOY="--length 26 --batch-size 64"
TRAIN="--window 4 --batch-size 64 --warmup 20 --max-steps 200 --save-every 1000 --log-every 100"

environment() {                 # two minutes the first time; again only when the requirements change
    [ -n "$PYTHON" ] && return
    local stamp
    stamp=$(cat requirements.txt requirements-dev.txt | cksum)
    if [ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ]; then
        echo "making .venv (Python packages, about two minutes)" >&2
        python3.11 -m venv .venv 2>/dev/null || python3 -m venv .venv
        .venv/bin/pip install -q --disable-pip-version-check -r requirements-dev.txt
        echo "$stamp" > .venv/stamp
    fi
    PYTHON=.venv/bin/python
}

say() { printf '\n== %s\n' "$*" >&2; }

train() {                       # train LABEL BASE-FOLDER SEED FLAGS...: one adapter, 20 s; skipped when it is there
    set -o pipefail
    local label=$1 base=$2 seed=$3; shift 3
    local out="$base/runs/$label@$seed"
    [ -f "$out/done" ] && return
    "$PYTHON" tabom.py --out "$out" --resume --seed "$seed" --model "$base/model" $TRAIN "$@" 2>&1 |
        (trap '' INT; tee "$out.log" | sed -u "s|^step|$label@$seed step|" >&2) || return 1
    touch "$out/done"
}

flags_of() {                    # the flags of a label: every row of every table of the paper is one line here
    case $1 in
        sft-gt)    echo "--method sft --length 26 --data $2/gt-used.jsonl" ;;
        sft-sd)    echo "--method sft --data $2/traj.jsonl" ;;
        dinfer)    echo "--method dinfer --data $2/traj.jsonl" ;;
        t3d)       echo "--method t3d --data $2/traj.jsonl" ;;
        tabom)     echo "--data $2/traj.jsonl" ;;
        ce-only)   echo "--data $2/traj.jsonl --lam 0" ;;
        global)    echo "--data $2/traj.jsonl --window 0" ;;
        global-ce) echo "--data $2/traj.jsonl --window 0 --lam 0" ;;
        exact)     echo "--data $2/traj.jsonl --rank-context exact" ;;
        drop)      echo "--data $2/traj.jsonl --tail drop" ;;
        window*)   echo "--data $2/traj.jsonl --window ${1#window}" ;;
        lam*)      local g=${1#*gamma}; local l=${1%-gamma*}; echo "--data $2/traj.jsonl --lam ${l#lam} --gamma $g" ;;
    esac
}
export -f train flags_of

base() {                        # base SEED FOLDER: pretraining (2 min), its own answers (1 min), ground truth of the same prompts
    mkdir -p "$2/runs" "$2/results" "$2/tune"
    "$PYTHON" toy.py --seed "$1" --out "$2" ${TEST_PROMPTS:+--test-prompts $TEST_PROMPTS}
    "$PYTHON" decode.py --model "$2/model" --prompts "$2/train.jsonl" --out "$2/traj.jsonl" $TOY
    "$PYTHON" decode.py --model "$2/model" --prompts "$2/val-math.jsonl" --out "$2/heldout.jsonl" $TOY
    # SFT-GT sees the prompts whose own answer was right: the same prompts as every other method, in another's words
    "$PYTHON" - "$2" <<'PY'
import json, sys
d = sys.argv[1]
right = {r["id"] for r in map(json.loads, open(f"{d}/traj.jsonl")) if r["correct"]}
open(f"{d}/gt-used.jsonl", "w").writelines(x for x in open(f"{d}/gt.jsonl") if json.loads(x)["id"] in right)
PY
}

measure() {                     # measure FOLDER full|light LABEL@SEED...: 50 s an adapter, 20 s light (in-domain accuracy only)
    local d=$1 kind=$2 flags; shift 2
    flags="--prompts $d/test-math.jsonl --no-base"
    [ "$kind" = full ] && flags="--prompts $d/test-math.jsonl $d/test-logic.jsonl --tds 64 --window 4 --order $d/heldout.jsonl"
    [ $# = 0 ] && flags="$flags --ce $d/gt.jsonl $d/traj.jsonl"
    [ $# != 0 ] && [ "$kind" = full ] && flags="$flags --no-base"
    "$PYTHON" eval.py --model "$d/model" $flags --parallel 1 2 $TOY --out "$d/results" ${PICTURES:+--pictures} \
        --adapter $(for x in "$@"; do echo "$x=$d/runs/$x/$(ls "$d/runs/$x" | grep '^epoch-' | sort -V | tail -n 1)"; done)
}
export -f base measure
export PYTHON OUT TOY TRAIN

toy() {
    local d=$OUT/toy/base1 labels="sft-gt sft-sd dinfer t3d tabom"
    export OMP_NUM_THREADS=1 TEST_PROMPTS=${TEST_PROMPTS:-300} PICTURES=1
    say "1/4 a base model from nothing, and its own answers to 3,000 prompts"
    base 1 "$d"                 # of the study's bases one that can do something at two tokens a step
    say "2/4 five ways to post-train it, 200 steps each"
    for m in $labels; do echo "$m"; done | xargs -P "$JOBS" -I{} bash -ec 'train {} "$0" 0 $(flags_of {} "$0") --lr 3e-3' "$d"
    say "3/4 accuracy at 1 and 2 tokens a step, TDS, order"
    measure "$d" full
    measure "$d" full $(for m in $labels; do echo "$m@0"; done)
    "$PYTHON" eval.py --curves "$d"/runs/*/log.jsonl --out "$d/results"
    say "4/4 the report"
    "$PYTHON" eval.py --report "$OUT/toy"
    echo; echo "report: $OUT/toy/report.md; pictures: $OUT/toy/gains.png, $d/results/*.png; trajectories: $d/traj.jsonl"
}

paper_toy() {                   # $OUT/paper-toy; every stage skips what is done
    local s=$OUT/paper-toy n=0
    export OMP_NUM_THREADS=1 TEST_PROMPTS=${TEST_PROMPTS:-1000} PICTURES=
    say "bases (3 min each)"
    for b in $BASES; do echo "$b"; done | xargs -P "$JOBS" -I{} bash -ec "base {} $s/base{}"
    say "learning rates: one grid for every method, mean of 1 and 2 tokens a step on validation prompts of two bases, a seed of its own"
    for b in $(echo $BASES | cut -d' ' -f1-2); do for m in sft-gt sft-sd dinfer t3d tabom; do for lr in 3e-4 1e-3 3e-3 1e-2; do
        echo "$s/base$b $m $lr"; done; done; done |
        xargs -P "$JOBS" -L1 bash -ec 'train $1_$2 $0 100 $(flags_of $1 $0) --lr $2 && "$PYTHON" eval.py --no-base --model $0/model \
            --prompts $0/val-math.jsonl --limit 256 --parallel 1 2 $TOY --out $0/tune --adapter $1_$2@100=$0/runs/$1_$2@100/epoch-$(ls $0/runs/$1_$2@100 | grep -c ^epoch)'
    "$PYTHON" eval.py --tune "$s" | tee "$s/tuned.txt"
    say "main and component tables: $SEEDS seeds on each base; sensitivity: one"
    for b in $BASES; do for i in $(seq 1 "$SEEDS"); do
        for m in sft-gt sft-sd dinfer t3d tabom ce-only; do echo "$s/base$b $m $n full"; done
        for m in global global-ce; do echo "$s/base$b $m $n light"; done
        [ "$i" = 1 ] && for m in lam1-gamma0.1 lam1-gamma0.3 lam2-gamma0.1 lam2-gamma0.2 lam2-gamma0.3 window2 window6 window8 window26 drop exact; do
            echo "$s/base$b $m $n light"; done
        n=$((n + 1)); done; done > "$s/jobs"
    tuned="$s/tuned.txt" xargs -P "$JOBS" -L1 bash -ec 'm=$1; case $m in sft-*|dinfer|t3d) ;; *) m=tabom ;; esac
        train $1 $0 $2 $(flags_of $1 $0) --lr $(awk -v m=$m "\$1 == m {print \$2}" $tuned)' < "$s/jobs"
    say "measuring: four adapters a process"
    for b in $BASES; do
        echo "$s/base$b full"
        for kind in full light; do
            awk -v d="$s/base$b" -v k=$kind '$1 == d && ($4 == k) {print $2 "@" $3}' "$s/jobs" | xargs -n 4 echo "$s/base$b $kind"
        done
    done | xargs -P "$JOBS" -L1 bash -ec 'measure "$@"' measure
    "$PYTHON" eval.py --report "$s"
}

do_or_say() { if [ -n "$DRY_RUN" ]; then echo "$*"; else "$@"; fi; }

paper() {                       # paper dream|llada math|code: from the data set's name to the benchmark table, each stage resumable
    local family=$1 domain=$2 model data lr=2e-5 lam=1 gamma limit=0 d=$OUT/$1-$2 tasks=gsm8k_cot,minerva_math500,ifeval
    case $family in dream) model=Dream-org/Dream-v0-Instruct-7B ;; llada) model=GSAI-ML/LLaDA-8B-Instruct ;; esac
    case $domain in math) data=MixChain-Z-PRM12K ;; code) data=Ling-Coder-SFT limit=17000 ;; esac
    case $family-$domain in                # the authors' recipes
        dream-math) gamma=0.1 ;; dream-code) lr=1e-4 lam=2 gamma=0.1 ;; llada-math) gamma=0.2 ;; llada-code) gamma=0.3 ;; esac
    "$PYTHON" bench.py --plan "$family" --ranks "$GPUS" --prompts $([ "$domain" = math ] && echo 12000 || echo 17000) >&2   # estimated cost
    do_or_say mkdir -p "$d"
    local run=("$PYTHON" -m torch.distributed.run --nproc_per_node "$GPUS") adapters=() m
    do_or_say "${run[@]}" decode.py --model "$model" --prompts "$data" --limit "$limit" --out "$d/traj.jsonl"
    for m in "sft-gt --method sft --data $data --limit $limit" "sft-sd --method sft" "dinfer --method dinfer" \
             "t3d --method t3d" "tabom --lam $lam --gamma $gamma"; do
        do_or_say "${run[@]}" tabom.py --model "$model" --lr "$lr" --resume --data "$d/traj.jsonl" --out "$d/${m%% *}" ${m#* }   # the last --data counts
        adapters+=("${m%% *}=$d/${m%% *}/epoch-5")
    done
    run+=(eval.py --model "$model" --adapter "${adapters[@]}")
    do_or_say "${run[@]}" --tasks "$tasks" --out "$d/results"
    do_or_say "${run[@]}" --tasks gsm8k_cot --tokens-per-step 2 --out "$d/results-2-a-step"
    do_or_say "${run[@]}" --prompts gsm8k --limit 256 --tds 64 --pictures --out "$d/tds"
    echo "# code tasks run what the model wrote, inside the harness, so they want your consent: RUN_UNSAFE_CODE=1" >&2
    if [ -n "$DRY_RUN${RUN_UNSAFE_CODE:-}" ]; then
        do_or_say env HF_ALLOW_CODE_EVAL=1 "${run[@]}" --tasks humaneval_instruct,mbpp_instruct --confirm-run-unsafe-code --out "$d/results-code"
    fi
}

RECIPES="toy test paper-toy dream-math dream-code llada-math llada-code bench soak"
if ! printf '%s\n' $RECIPES | grep -qxF -- "${1:-toy}"; then
    echo "$1: unknown; ./run.sh [${RECIPES// / | }]" >&2
    exit 2
fi
environment
export PYTHON
case ${1:-toy} in
    toy) toy ;;
    test) "$PYTHON" -m ruff check . && "$PYTHON" -m pytest -q test_tabom.py "${@:2}" ;;
    paper-toy) paper_toy ;;
    dream-math|dream-code|llada-math|llada-code) paper "${1%-*}" "${1#*-}" ;;
    bench) "$PYTHON" bench.py "${@:2}" ;;
    soak) SOAK=1 "$PYTHON" -m pytest -q -s test_tabom.py -k soak "${@:2}" ;;
esac
