"""What all scripts share: errors in one line, a progress bar, files that are replaced whole, rank and device."""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def stop(message: str):
    """A user's mistake: one line that says where, what and how to repair it; exit code 2 instead of a traceback."""
    prefix = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    print(prefix + message, file=sys.stderr, flush=True)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """No flag of ours has a meaning below zero; some would be silently wrong."""
    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        for name, value in vars(args).items():
            if isinstance(value, (int, float)) and not value >= 0:
                stop(f"--{name.replace('_', '-')} {value}: must not be negative")
        return args


def new_parser(doc: str) -> Parser:
    """--help shows the docstring and every flag; a wrong flag shows one line of usage, not all forty."""
    return Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                  usage="%(prog)s [flags], --help lists them")


class Bar:
    """Progress of rank 0 on stderr: one line that is rewritten on a terminal, elsewhere a line every 10 seconds."""
    def __init__(self, total: int, name: str):
        self.total, self.name = total, name
        self.start = self.last = time.time()
        self.terminal = sys.stderr.isatty()
        self.visible = os.environ.get("RANK", "0") == "0"

    def __call__(self, done: int, note: str = ""):
        now = time.time()
        wait = 0.2 if self.terminal else 10
        if not self.visible or (done < self.total and now - self.last < wait):
            return
        self.last = now
        left = int((now - self.start) / max(done, 1) * (self.total - done))
        note = f" | {note}" if note else ""
        line = f"{self.name} {done}/{self.total}{note} | {left // 60}m{left % 60:02d}s left"
        if self.terminal:
            end = "\n" if done >= self.total else ""
            print(f"\r\033[K{line}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def write_whole(path, content: bytes):
    """Replaces the file atomically: a process that is killed leaves the old one or the new one, never half of it."""
    part = Path(f"{path}.part")
    part.write_bytes(content)
    os.replace(part, path)


def read_json(path) -> dict:
    try:
        return json.loads(Path(path).read_text("utf-8-sig"))
    except OSError:
        stop(f"{path}: cannot be read; a model or adapter folder needs it")
    except ValueError as e:
        stop(f"{path}: is not JSON ({e}); download or write it again")


def setup_device(dtype: str | None = None):
    """
    Returns rank, world_size, device, dtype. torchrun starts one process per GPU and tells each its rank in the
    environment; without torchrun this is the only process.
    """
    import torch  # here, because data.py does without it
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device, default = "cpu", "fp32"
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            stop(f"--nproc_per_node: there are only {torch.cuda.device_count()} GPUs; start as many processes")
        device = f"cuda:{local_rank}"
        if torch.cuda.is_bf16_supported(False):          # False: cards that only emulate it do not count
            default = "bf16"
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        # cuDNN's masked attention gives NaN gradients on H100 with torch 2.13 (pytorch#196678), and it builds a plan
        # for every new shape, while our shapes change at every step
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif torch.backends.mps.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        device = "mps"                                   # an empty list hides Apple's GPU too
    return rank, world_size, device, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype or default]


def init_process_group(backend: str, minutes: float):
    """torch's own, but safe under torchrun --max-restarts; a rank that is late by `minutes` ends the run."""
    import datetime

    import torch.distributed as dist
    timeout = datetime.timedelta(minutes=minutes)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    # the restarts of one node share one key store, and the keys of the ranks that died would let the new ones hang
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def peak_memory(device: str) -> float:
    """GB that this process has needed so far, on its GPU or in main memory."""
    import resource

    import torch
    if "cuda" in device:
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024       # bytes on a Mac, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def about_run() -> dict:
    """What a result should say about where it comes from."""
    import platform

    import torch
    commit = ""
    if shutil.which("git"):
        command = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    device = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {"commit": commit or "none", "torch": torch.__version__, "python": platform.python_version(),
            "device": device}
