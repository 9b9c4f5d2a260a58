"""
Runs the study of protocol.md. Every step skips what is done, so an interrupted study continues with the same command.

$ python study/study.py out/study           # models, prompts and adapters; results go to study/results, two at a time

A result that is in study/results is neither trained nor measured again.
"""
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = Path("study/results")
BASES = [1, 2, 3, 4]
RATES = ["1e-4", "3e-4", "1e-3", "3e-3"]
LENGTH = ["--length", "34"]
TRAIN = ["--window", "4", "--batch-size", "32", "--warmup", "20", "--max-steps", "200", "--log-every", "200"]

# label: flags of tabom.py; {base} is the base's folder. The last of two equal flags counts
METHODS = {
    "sft-gt": "--method sft --data {base}/gt.jsonl",
    "sft-sd": "--method sft --data {base}/traj.jsonl",
    "dinfer": "--method dinfer --data {base}/traj.jsonl",
    "t3d": "--method t3d --data {base}/traj.jsonl",
    "ce-only": "--lam 0 --data {base}/traj.jsonl",
    "tabom": "--data {base}/traj.jsonl",
    "pretrain": "--method sft --data {base}/pretrain.jsonl",
}
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    # keep freed memory: handing it back to the system and fetching it again takes a third of the time
    "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}


def run(script: str, *flags):
    """One script of the repository; what it prints goes to a log, its failure ends the study."""
    command = [sys.executable, script, *map(str, flags)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stderr}", file=sys.stderr, flush=True)
        raise SystemExit(done.returncode)


def prepare(out: Path, seed: int):
    """A base model, its prompts, and its own answers."""
    base = out / f"base{seed}"
    if not (base / "model" / "model.safetensors").exists():
        run("toy.py", "--pretrain", "--seed", seed, "--out", base / "model")
    run("toy.py", "--seed", 1000 + seed, "--out", base)
    decode = ["--model", base / "model", "--prompts", base / "train.jsonl", "--batch-size", 64, *LENGTH]
    run("decode.py", *decode, "--out", base / "traj.jsonl")
    print(f"base {seed}: ready", flush=True)


def measure(base: Path, seed: int, split: str, domain: str, name: str, adapter: Path | None = None):
    folder = RESULTS / f"base{seed}" / f"{split}-{domain}"
    if (folder / f"{name}.json").exists():
        return
    speeds = [1, 2, 4] if domain == "math" else [1]
    flags = ["--no-base", "--adapter", f"{name}={adapter}"] if adapter else []
    run("eval.py", "--model", base / "model", "--prompts", base / f"{split}-{domain}.jsonl", "--batch-size", 64,
        "--parallel", *speeds, "--out", folder, *LENGTH, *flags)


def one_run(out: Path, seed: int, label: str, rate: str, split: str):
    """Trains one adapter and measures it on both domains of a split."""
    base, name = out / f"base{seed}", f"{label}@{rate}"
    if all((RESULTS / f"base{seed}" / f"{split}-{domain}" / f"{name}.json").exists() for domain in ("math", "logic")):
        return
    folder = base / "runs" / name
    flags = METHODS[label].format(base=base).split()
    run("tabom.py", "--model", base / "model", "--out", folder, "--resume", "--seed", seed, "--lr", rate, *TRAIN,
        *LENGTH, *flags)
    last = max(folder.glob("epoch-*"), key=lambda path: int(path.name.removeprefix("epoch-")))
    for domain in ("math", "logic"):
        measure(base, seed, split, domain, "base")
        measure(base, seed, split, domain, name, last)
    print(f"base {seed}, {name}: {split} measured", flush=True)


def main():
    os.chdir(HERE.parent)                                # results name their files relative to the repository
    out = Path(sys.argv[1])
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(lambda seed: prepare(out, seed), BASES))
        # validation of the whole grid first: rates are selected before a method's test prompts are decoded
        for split in ("val", "test"):
            jobs = [(out, seed, label, rate, split) for rate in RATES for label in METHODS for seed in BASES]
            list(pool.map(lambda job: one_run(*job), jobs))


if __name__ == "__main__":
    main()
