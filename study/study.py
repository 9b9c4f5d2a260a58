"""
Runs the study of protocol.md, part by part. Every step skips what is done, so an interrupted study continues with the
same command.

$ python study/study.py out/study                          # all parts, two processes at a time
$ python study/study.py out/study --parts 1a 3a --bases 1 2

Bases, data, adapters and the files of eval.py go to OUT. What the report needs of them is collected in
study/results/baseS.json; what is there is neither trained nor measured again.
"""
import contextlib
import json
import multiprocessing
import os
import runpy
import sys
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from report import BASES, CHOSEN_ON, GRID, RATES, RESULTS, results, select

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from util import Parser, stop, write_whole  # noqa: E402

# trajectories: flags of decode.py; {base} is the base's folder
SAMPLED = "--temperature 1 --score entropy"
DATA = {
    "greedy": "--model {base}/model",
    "sampled": "--model {base}/model " + SAMPLED,
    "warm": "--model {base}/model --temperature 0.5 --score entropy",
    # sampled by halves, see half_sampled
    "fixed-forms": "--model {base}/model " + SAMPLED,
    "fixed-digits": "--model {base}/model " + SAMPLED,
    # the second round: own answers of the model of the first
    "again-ce": "--model {base}/round1-ce --limit 1000 " + SAMPLED,
    "again-tabom": "--model {base}/round1-tabom --limit 1000 " + SAMPLED,
}

# run: (its data, flags of tabom.py). An adapter is called RUN@RATE
METHODS = {"sft": "--method sft", "dinfer": "--method dinfer", "t3d": "--method t3d", "ce": "--lam 0", "tabom": ""}
RUNS = {"gt": ("gt", "--method sft"), "gt-mix": ("gt-mix", "--method sft"), "control": ("pretrain", "--method sft"),
        "again-ce": ("again-ce", "--lam 0"), "again-tabom": ("again-tabom", "")}
for source in ("sampled", "greedy", "warm", "fixed-forms", "fixed-digits"):
    for method, flags in METHODS.items():
        RUNS[f"{source}-{method}"] = source, flags
for source in ("sampled", "greedy"):
    for method in ("ce", "tabom"):
        for order in ("ltr", "random", "reversed"):
            RUNS[f"{source}-{method}-{order}"] = source, f"{METHODS[method]} --order {order}"
        RUNS[f"{source}-{method}-600"] = source, f"{METHODS[method]} --max-steps 600"
    RUNS[f"{source}-exact"] = source, "--rank-context exact"
    for flag, values in {"lam": ("0.25", "2"), "window": ("0", "2", "8"), "gamma": ("0.1", "0.3")}.items():
        for value in values:
            RUNS[f"{source}-{flag}-{value}"] = source, f"--{flag} {value}"

# what is measured: flags of eval.py, for "swap" of study/swap.py. A folder of results holds what was measured with the
# same flags
MEASURES = {
    "val": "--prompts {base}/val-long.jsonl --limit 200 --parallel 2",
    "long-1": "--prompts {base}/test-long.jsonl --limit 500 --parallel 1 --tds 32",
    "long": "--prompts {base}/test-long.jsonl --limit 500 --parallel 2 4",
    "kept": "--prompts {base}/test-short.jsonl {base}/test-logic.jsonl --limit 500 --parallel 2",
    "swap": "--prompts {base}/test-long.jsonl --limit 200 --parallel 2 4",
    "pass": "--prompts {base}/test-long.jsonl --limit 100 --parallel 2 --pass-at 1 2 4 8 16 " + SAMPLED,
    "ce": "--limit 500 --ce {base}/gt-mix.jsonl {base}/greedy.jsonl",
}

LONG, ALL = ["long"], ["long", "long-1", "kept"]


def at(rate: str, labels: str) -> list:
    return [f"{label}@{rate}" for label in labels.split()]


def parts(best: dict) -> dict:
    """Part of the protocol: [(data it needs, adapters, measures)]; best: the selected rate of each label of GRID."""
    def chosen(labels):
        return [f"{label}@{best[label]}" for label in labels.split()]

    first = "control sampled-sft sampled-ce sampled-tabom greedy-ce greedy-tabom"
    others = "gt-mix gt sampled-dinfer sampled-t3d greedy-sft"
    orders = {}
    for source in ("greedy", "sampled"):
        names = []
        for order in ("", "-ltr", "-random", "-reversed"):
            names += at("1e-3", f"{source}-ce{order} {source}-tabom{order}")
        orders[source] = names
    lams = at("1e-3", "greedy-lam-0.25 greedy-lam-2 sampled-lam-0.25 sampled-lam-2")
    again, longer = at("1e-3", "again-ce again-tabom"), at("1e-3", "sampled-ce-600 sampled-tabom-600")
    windows = at("1e-3", "greedy-window-0 greedy-window-2 greedy-window-8 greedy-gamma-0.1 greedy-gamma-0.3")
    exact = at("1e-3", "greedy-exact sampled-exact")
    halves = at("1e-3", "fixed-forms-ce fixed-forms-tabom fixed-digits-ce fixed-digits-tabom")
    return {"1a": [([], chosen(first), ALL)],
            "3b": [([], orders["sampled"], LONG)],
            "2d": [(["fixed-forms", "fixed-digits"], halves, LONG)],
            "2c": [([], exact, LONG)],
            "5b": [([], longer, LONG)],
            "7": [(["warm"], at("1e-3", "warm-sft warm-ce warm-tabom"), LONG),
                  ([], at("1e-3", "greedy-dinfer greedy-t3d"), LONG)],
            "1b": [([], chosen(others), ALL)],
            "3a": [([], orders["greedy"], LONG)],
            "2a": [([], at("1e-3", "greedy-ce greedy-tabom"), ["swap"])],
            "5a": [(["again-ce", "again-tabom"], again, LONG)],
            "4": [([], chosen("sampled-sft sampled-ce sampled-tabom"), ["pass"])],
            "6a": [([], [], ["ce"])],
            "2b": [([], lams, LONG)],
            "6b": [([], windows, LONG)]}


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    # keep freed memory: handing it back to the system and fetching it again takes a third of the time
    "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}

# -----------------------------------------------------------------------------
# jobs; each runs in one of two processes

def run(out: Path, script: str, *flags, main=None):
    """
    A script of the repository, in this process, because importing torch takes as long as a fifth of a training. main:
    of a module that was changed, instead of the script's own.
    """
    log = out / f"log-{os.getpid()}.txt"
    words = [word for flag in flags for word in str(flag).split()]
    with open(log, "a") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
        print("+", script, *words, flush=True)
        sys.argv = [script, *words]
        try:
            main() if main else runpy.run_path(script, run_name="__main__")
        except SystemExit as e:                          # util.stop
            if e.code:
                raise RuntimeError(f"{script} failed, the last lines of {log} say why") from None


@contextlib.contextmanager
def half_sampled(fixed: str):
    """
    Inside, decode.py draws only one half of the words. fixed "forms": the most probable word, but a digit is drawn
    among the digits; "digits": a word is drawn, but a digit is the most probable one.
    """
    import torch

    import decode
    from toy import VOCAB
    draw = decode.draw_tokens
    is_digit = torch.tensor([word.isdigit() for word in VOCAB])

    def draw_half(logp, s, rng):
        digits = logp.masked_fill(~is_digit, -torch.inf)
        greedy = Namespace(**vars(s) | {"greedy": True})
        if fixed == "forms":
            token, digit = draw(logp, greedy, rng)[0], draw(digits, s, rng)[0]
        else:
            token, digit = draw(logp, s, rng)[0], draw(digits, greedy, rng)[0]
        token = torch.where(is_digit[token], digit, token)
        return token, logp.gather(-1, token[:, None])[:, 0].exp()

    decode.draw_tokens = draw_half
    try:
        yield decode.main
    finally:
        decode.draw_tokens = draw


def prepare(out: Path, seed: int, data: str | None):
    """The base, its prompts and, if data is a key of DATA, these answers."""
    base = out / f"base{seed}"
    if not (base / "model" / "model.safetensors").exists():
        run(out, "study/toy.py", f"--pretrain --seed {seed} --out {base}/model")
    if not (base / "test-logic.jsonl").exists():
        run(out, "study/toy.py", f"--base {base}/model --seed {2000 + seed} --test 500 --out {base}")
    if data is None:
        return
    method = data.partition("again-")[2]
    if method and not (base / f"round1-{method}").exists():
        adapter = train(out, seed, f"sampled-{method}@1e-3")
        run(out, "lora.py", f"--model {base}/model --adapter {adapter} --out {base}/round1-{method}")
    if not (base / f"{data}.jsonl").exists():
        part = base / f"{data}-unfinished.jsonl"
        flags = DATA[data].format(base=base)
        fixed = data.partition("fixed-")[2]
        with half_sampled(fixed) if fixed else contextlib.nullcontext() as main:
            run(out, "decode.py", f"--prompts {base}/train.jsonl --batch-size 64 --out {part}", flags, main=main)
        part.rename(base / f"{data}.jsonl")


def model_of(name: str) -> str:
    """The folder of the model that a run trains: the second round goes on from the first."""
    return name.partition("@")[0].replace("again", "round1") if name.startswith("again-") else "model"


def train(out: Path, seed: int, name: str) -> Path:
    """Trains the adapter RUN@RATE unless it is there. Returns its folder."""
    label, rate = name.split("@")
    base = out / f"base{seed}"
    folder = base / "runs" / name
    if not (folder / "done").exists():
        data, flags = RUNS[label]
        run(out, "tabom.py", f"--model {base}/{model_of(name)} --data {base}/{data}.jsonl --out {folder} --resume",
            f"--seed {seed} --lr {rate} --window 4 --batch-size 32 --warmup 20 --max-steps 200 --log-every 200", flags)
        (folder / "done").touch()
    return folder / "last"


def job(out: Path, seed: int, names: list, measures: list, with_base: bool):
    """Trains some adapters of one base and measures them, and the base if this is the job that has to."""
    base, known = out / f"base{seed}", results(seed)
    for measure in measures:
        todo = [name for name in names if name not in known.get(measure, {})]
        measure_base = with_base and "base" not in known.get(measure, {})
        # the adapters of one model are measured in one go
        for model in sorted({model_of(name) for name in todo} | ({"model"} if measure_base else set())):
            adapters = [f"{name}={train(out, seed, name)}" for name in todo if model_of(name) == model]
            flags = [] if measure_base and model == "model" else ["--no-base"]
            if adapters:
                flags += ["--adapter", *adapters]
            folder = base / "results" / measure / model
            script = "study/swap.py" if measure == "swap" else "eval.py"
            run(out, script, f"--model {base}/{model} --batch-size 64 --out {folder}",
                MEASURES[measure].format(base=base), *flags)

# -----------------------------------------------------------------------------
# results

def shorten(result: dict) -> dict:
    """What the report needs of a file of eval.py or swap.py."""
    short = {key: result[key] for key in ("accuracy", "pass_at", "swap", "ce") if result.get(key)}
    for domain, value in result.get("tds", {}).items():
        short["tds"] = {domain: value["mean"]}
    return json.loads(json.dumps(short), parse_float=lambda text: round(float(text), 5))


def collect(out: Path, seed: int):
    """Adds what eval.py and swap.py have written for one base to study/results."""
    found = results(seed)
    for path in sorted((out / f"base{seed}" / "results").glob("*/*/*.json")):
        result = json.loads(path.read_text())
        found.setdefault(path.parts[-3], {})[path.stem] = shorten(result)
    RESULTS.mkdir(exist_ok=True)
    lines = []
    for measure, by_name in sorted(found.items()):
        rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(by_name.items())]
        lines.append(f"{json.dumps(measure)}: {{\n" + ",\n".join(rows) + "\n}")
    write_whole(RESULTS / f"base{seed}.json", ("{\n" + ",\n".join(lines) + "\n}\n").encode())

# -----------------------------------------------------------------------------

def main():
    parser = Parser(__doc__)
    parser.add_argument("out", help="folder for bases, data and adapters")
    parser.add_argument("--parts", nargs="+", help="default: all, in the order of the protocol; 0 is the validation")
    parser.add_argument("--bases", type=int, nargs="+", default=BASES)
    args = parser.parse_args()
    os.chdir(ROOT)                                       # results name their files relative to the repository
    os.environ.update(ENVIRONMENT)
    out, start = Path(args.out), time.time()
    out.mkdir(parents=True, exist_ok=True)
    # spawn: MALLOC_* counts from the start of a process
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        def finish(title, jobs: dict):
            """Waits for jobs {future: (base, what)}; one that fails is named and left out."""
            for number, done in enumerate(as_completed(jobs), 1):
                seed, what = jobs[done]
                failure = done.exception()
                collect(out, seed)
                print(f"{(time.time() - start) / 60:.0f} min | {title} | {number} of {len(jobs)} | base {seed}: "
                      f"{failure or what or 'prompts'}", flush=True)

        def make(title, data: list):
            for names in ([None], data):                 # the base and its prompts, then the answers
                finish(title, {pool.submit(prepare, out, seed, name): (seed, name) for name in names
                               for seed in args.bases})

        def measure(title, names: list, measures: list, bases=args.bases):
            jobs = {}
            for i in range(0, max(1, len(names)), 4):
                for seed in bases:
                    some = names[i:i + 4]
                    jobs[pool.submit(job, out, seed, some, measures, i == 0)] = seed, " ".join([*measures, *some])
            finish(title, jobs)

        make("answers", ["sampled", "greedy"])
        for seed in args.bases:
            if not (out / f"base{seed}" / "greedy.jsonl").exists():
                stop(f"{out}/base{seed}: could not be prepared; {out}/log-*.txt say why")
        for part in args.parts or ["0", *parts(dict.fromkeys(GRID))]:
            if part == "0":
                grid = [f"{label}@{rate}" for rate in RATES for label in GRID]
                chosen_on = [seed for seed in args.bases if seed in CHOSEN_ON]
                measure("validation", grid, ["val"], chosen_on)
                continue
            best = select()
            print("selected:", " ".join(f"{label}@{rate}" for label, rate in best.items()), flush=True)
            if len(best) < len(GRID):
                stop("the rates are selected before a test prompt is decoded: run part 0 on all of CHOSEN_ON first")
            for data, names, measures in parts(best)[part]:
                if data:
                    make(f"part {part}, answers", data)
                measure(f"part {part}", names, measures)


if __name__ == "__main__":
    main()
