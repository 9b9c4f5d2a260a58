"""
Runs the study of protocol.md. Every step skips what is done, so an interrupted study continues with the same command.

$ python study/study.py out/study           # models, prompts and adapters; results go to study/results, two at a time

A result that is in study/results is neither trained nor measured again.
"""
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from report import BASES, METHODS, RATES, RESULTS, SPEEDS, select, values

ROOT = Path(__file__).parent.parent
VALIDATION, TEST = 200, 250                              # prompts per base and domain

# label: flags of tabom.py; {base} is the base's folder. The last of two equal flags counts. A label that is only here
# is a further run, with a row among the parts of the method; one in METHODS of report.py is in the grid
TABOM = "--data {base}/traj.jsonl"
FLAGS = {
    "sft-gt": "--method sft --data {base}/gt.jsonl",
    "sft-sd": "--method sft --data {base}/traj.jsonl",
    "dinfer": "--method dinfer --data {base}/traj.jsonl",
    "t3d": "--method t3d --data {base}/traj.jsonl",
    "ce-only": f"{TABOM} --lam 0",
    "tabom": TABOM,
    "pretrain": "--method sft --data {base}/pretrain.jsonl",
    # further runs
    "global": f"{TABOM} --window 0",
    "global-ce-only": f"{TABOM} --window 0 --lam 0",
    "window-2": f"{TABOM} --window 2",
    "window-8": f"{TABOM} --window 8",
    "gamma-0.1": f"{TABOM} --gamma 0.1",
    "gamma-0.3": f"{TABOM} --gamma 0.3",
    "lam-2-gamma-0.1": f"{TABOM} --lam 2 --gamma 0.1",
    "lam-2": f"{TABOM} --lam 2",
    "lam-2-gamma-0.3": f"{TABOM} --lam 2 --gamma 0.3",
    "exact": f"{TABOM} --rank-context exact",
    "tail-drop": f"{TABOM} --tail drop",
    "all-records": f"{TABOM} --all",
    "sampled": "--data {base}/sampled.jsonl",
}
FURTHER = [label for label in FLAGS if label not in METHODS]

ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    # keep freed memory: handing it back to the system and fetching it again takes a third of the time
    "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}


def run(script: str, *flags) -> bool:
    """One script of the repository. What it says when it fails is printed; the study goes on without that result."""
    command = [sys.executable, script, *map(str, flags)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        print(f"failed, and left out: {' '.join(command)}\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
    return done.returncode == 0


def prepare(out: Path, seed: int):
    """A base model, its prompts, and its own answers at temperature 0 and 1."""
    from toy import CONFIG
    base = out / f"base{seed}"
    # a base is made once; one of other words or sizes would answer nonsense
    if not (base / "model" / "model.safetensors").exists():
        run("study/toy.py", "--pretrain", "--seed", seed, "--out", base / "model")
    if json.loads((base / "model" / "config.json").read_text()) != CONFIG:
        raise SystemExit(f"{base}/model: was made by another toy.py; delete {base}, or give another folder")
    run("study/toy.py", "--seed", 1000 + seed, "--out", base)
    decode = ["--model", base / "model", "--prompts", base / "train.jsonl", "--batch-size", 64]
    run("decode.py", *decode, "--out", base / "traj.jsonl")
    run("decode.py", *decode, "--temperature", 1, "--out", base / "sampled.jsonl")
    validate(out, seed, [])
    able = [values("base", column, "val", [seed])[0] for column in SPEEDS]
    if min(able) < 30:
        raise SystemExit(f"base {seed}: only {able} % right; put another seed into BASES of study/report.py")
    print(f"base {seed}: ready, {able} % right at 1, 2 and 4 tokens per step", flush=True)


def train(base: Path, seed: int, name: str) -> list:
    """Trains the adapter LABEL@RATE unless it is there. Returns [NAME=FOLDER] for eval.py, [] if training failed."""
    label, rate = name.split("@")
    folder = base / "runs" / name
    if not (folder / "done").exists():
        trained = run("tabom.py", "--model", base / "model", "--out", folder, "--resume", "--seed", seed, "--lr", rate,
                      "--window", 4, "--batch-size", 32, "--warmup", 20, "--max-steps", 200, "--log-every", 200,
                      *FLAGS[label].format(base=base).split())
        if not trained:
            return []
        (folder / "done").touch()
    return [f"{name}={folder}/last"]


def job(out: Path, seed: int, names: list, folder: str, prompts: str, *flags):
    """Trains adapters of one base and measures them, and the base, on one file of prompts."""
    results = RESULTS / f"base{seed}" / folder
    names = [name for name in names if not (results / f"{name}.json").exists()]
    if names or not (results / "base.json").exists():
        base = out / f"base{seed}"
        adapters = sum([train(base, seed, name) for name in names], [])
        run("eval.py", "--model", base / "model", "--prompts", base / f"{prompts}.jsonl", "--batch-size", 64,
            "--out", results, *flags, "--adapter", *adapters)
        print(f"base {seed}, {folder}: {' '.join(names)}", flush=True)


def test(out: Path, seed: int, names: list):
    job(out, seed, names, "test-math", "test-math", "--limit", TEST, "--parallel", 1, 2, 4, "--tds", 64)
    job(out, seed, names, "test-logic", "test-logic", "--limit", TEST)


def validate(out: Path, seed: int, names: list):
    job(out, seed, names, "val-math", "val-math", "--limit", VALIDATION, "--parallel", 1, 2, 4)
    job(out, seed, names, "val-logic", "val-logic", "--limit", VALIDATION)


def others(out: Path, seed: int, names: list):
    """The order swap of the adapters; cross-entropy of references and of own answers under the base."""
    job(out, seed, names, "swap", "test-math", "--limit", 200, "--parallel", 2, 4, "--swap")
    base = out / f"base{seed}"
    job(out, seed, [], "ce", "val-math", "--limit", 1, "--ce", base / "gt.jsonl", base / "traj.jsonl")


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    os.chdir(ROOT)                                       # results name their files relative to the repository
    out = Path(sys.argv[1])
    with ThreadPoolExecutor(max_workers=2) as pool:
        def for_all_bases(what, groups):
            jobs = [pool.submit(what, out, seed, names) for names in groups for seed in BASES]
            for done in jobs:
                done.result()

        for done in [pool.submit(prepare, out, seed) for seed in BASES]:
            done.result()
        # the grid: validation of all first, so that rates are selected before any test prompt is decoded
        grid = [[f"{label}@{rate}" for label in METHODS] for rate in RATES]
        for_all_bases(validate, grid)
        selected = select()
        print("selected:", " ".join(f"{label}@{rate}" for label, rate in selected.items()), flush=True)
        for_all_bases(test, grid)
        # why: the order swap. Then the parts of the method, at 1e-3 and at TABOM's own rate
        for_all_bases(others, [[f"{label}@1e-3" for label in METHODS]])
        rates = dict.fromkeys(["1e-3", selected["tabom"]])
        for_all_bases(test, [[f"{label}@{rate}" for label in FURTHER] for rate in rates])


if __name__ == "__main__":
    main()
