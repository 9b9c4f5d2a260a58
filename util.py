"""What all scripts share: errors in one line, flags, a progress bar, files that are replaced whole, rank and device."""
import argparse
import contextlib
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def stop(message: str):
    """A user's mistake: one line that says where, what and how to repair it; exit code 2 instead of a traceback."""
    if "RANK" in os.environ:
        message = f"[rank {os.environ['RANK']}] {message}"
        # mostly all ranks have the same mistake: the first of a node prints it, and torchrun ends the others meanwhile
        time.sleep(int(os.environ.get("LOCAL_RANK", 0)))
    print(message, file=sys.stderr, flush=True)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun ends with a long report, whose last entry is what this file holds
        report = {"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report))
    raise SystemExit(2)

# -----------------------------------------------------------------------------
# flags

class Parser(argparse.ArgumentParser):
    """--help shows the docstring and every flag; a wrong flag is one line, not forty."""
    def __init__(self, doc: str, parents=()):
        super().__init__(description=doc, parents=parents, usage="%(prog)s [flags]",
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        stop(f"{self.prog}: {message}; --help lists the flags")


def count(text: str) -> int:
    """The type of a flag of which a negative value would be silently wrong: a slice [:-3] is valid Python."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return int(text)


def amount(text: str) -> float:
    """Likewise, for fractions."""
    if not float(text) >= 0:                             # nan is refused too
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return float(text)


def find_change(saved: dict, now: dict, parser) -> str | None:
    """The first setting that differs, in words. What the saved run does not name did not exist yet: its default."""
    for name in saved | now:
        if name not in now:
            return f"{name} {saved[name]!r}, which this code does not know"
        before = saved.get(name, parser.get_default(name))
        if before != now[name]:
            return f"{name} {before!r}, now it is {now[name]!r}"
    return None

# -----------------------------------------------------------------------------
# progress and files

class Bar:
    """Progress of rank 0 on stderr: a line every 10 seconds, and one at the end."""
    def __init__(self, total: int, name: str):
        self.total, self.name = total, name
        self.start = self.last = time.time()

    def __call__(self, done: int, note: str = ""):
        rank, _ = rank_and_world_size()
        now = time.time()
        if rank > 0 or (done < self.total and now - self.last < 10):
            return
        self.last = now
        left = int((now - self.start) / done * (self.total - done))
        note = f"{note} | " if note else ""
        line = f"{self.name} {done}/{self.total} | {note}{left // 60}m{left % 60:02d}s left"
        print(line, file=sys.stderr, flush=True)


def write_whole(path, content: bytes):
    """
    Replaces the file atomically, and makes its folder: a process that is killed leaves the old one or the new one,
    never half of it.
    """
    part = Path(f"{path}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    os.replace(part, path)


def read_json(path) -> dict:
    try:
        return json.loads(Path(path).read_text("utf-8-sig"))
    except OSError:
        stop(f"{path}: cannot be read; give the folder of a model or an adapter, which holds it")
    except ValueError as e:
        stop(f"{path}: is not JSON ({e}); download or write it again")

# -----------------------------------------------------------------------------
# rank and device

def rank_and_world_size() -> tuple[int, int]:
    """torchrun tells each process in the environment; without torchrun there is only one."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def setup_device(dtype: str | None):
    """Returns rank, world_size, device, dtype: of several processes on a node, each has a GPU of its own."""
    rank, world_size = rank_and_world_size()
    device, default = "cpu", "fp32"
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            stop(f"--nproc_per_node: there are only {torch.cuda.device_count()} GPUs; start as many processes")
        device = f"cuda:{local_rank}"
        if torch.cuda.is_bf16_supported(False):          # False: cards that only emulate it do not count
            default = "bf16"
        torch.cuda.set_device(device)
        # cuDNN's masked attention gives NaN gradients on H100 with torch 2.13 (pytorch#196678), and it builds a plan
        # for every new shape, while our shapes change at every step
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif torch.backends.mps.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        device = "mps"                                   # an empty list hides Apple's GPU too
    return rank, world_size, device, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype or default]


def init_process_group(device: str, minutes: float):
    """Joins the ranks; one that is late by `minutes` ends the run."""
    timeout = datetime.timedelta(minutes=minutes)
    if "cuda" in device:
        # with device_id a broken network fails here, not at the first step
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device(device))
    else:
        dist.init_process_group("gloo", timeout=timeout)


@contextlib.contextmanager
def naming_lost_ranks():
    """Around an exchange between ranks: if one has died, or hangs, the others end with a line that names it."""
    try:
        yield
    except RuntimeError:
        lost = ", ".join(str(rank) for rank in find_lost_ranks())
        if not lost:
            raise
        stop(f"lost rank {lost}: its own output may say why; give the same command again, tabom.py with --resume")


def find_lost_ranks() -> list[int]:
    """A roll call: the ranks that do not sign in torch's store within 5 seconds."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(address, port, timeout=datetime.timedelta(seconds=10))
        store.set(f"here/{os.environ['RANK']}", "")
        time.sleep(5)
        return [rank for rank in range(int(os.environ["WORLD_SIZE"])) if not store.check([f"here/{rank}"])]
    except RuntimeError:
        return [0]                                       # the store is on the first node


def all_ranks_agree(device: str, **values: int):
    """Ranks that read different files would compute something that nobody asked for."""
    for name, value in values.items():
        ends = torch.tensor([value, -value], device=device)
        with naming_lost_ranks():
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        high, low = ends[0].item(), -ends[1].item()
        if high != low:
            stop(f"{name.replace('_', ' ')} {low} on one rank, {high} on another: all need the same flags and files")


def sum_over_ranks(tensors: list):
    """Adds up each tensor over the ranks, in place: one all-reduce for all of them."""
    flat = torch.cat([x.flatten() for x in tensors])
    with naming_lost_ranks():
        dist.all_reduce(flat)
    for x, summed in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(summed.view_as(x))


def peak_memory(device: str) -> float:
    """GB that this process has needed so far, on its GPU or in main memory."""
    if "cuda" in device:
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024       # bytes on a Mac, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def about_run() -> dict:
    """What a result should say about where it comes from."""
    commit = ""
    if shutil.which("git"):
        command = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    device = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {"commit": commit or "none", "torch": torch.__version__, "python": platform.python_version(),
            "device": device}
