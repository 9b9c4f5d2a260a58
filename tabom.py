"""TABOM: trajectory-aligned post-training of masked diffusion language models, and its baselines, in one file.

    python tabom.py --data traj.jsonl                                  # one device, or the CPU
    torchrun --nproc_per_node 8 tabom.py --data traj.jsonl             # 8 GPUs; the defaults are the paper's

--data is what decode.py wrote. LoRA learns to predict the next W tokens of the model's own decoding trajectory (CE) and
to be surer of tokens decoded earlier than of tokens decoded later (pairwise hinge on entropies). Departures from the
paper: README "Departures". Letters: B batch, T length, N canvas, V vocabulary, W window, n positions scored.
"""
import contextlib
import datetime
import fcntl
import functools
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import lora
from data import Bar, first_end, prompt_ids, read_records, safely, total_order, write_whole
from decode import place_of_work, slices
from model import Flags, fingerprint, load, load_tokenizer, read_config, read_json, skeleton, stop

# isort: split
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

# ---------------------------------------------------------------- the objective

class TokenStats(torch.autograd.Function):
    """(n, V) logits, (n,) targets -> (n,) cross-entropy, (n,) entropy, off one log-sum-exp. log p (n, V) is kept; what
    else is as large lives a few rows at a time. dce/dz = p - onehot;  dh/dz = -p (log p + h);  0 log 0 = 0."""
    @staticmethod
    def forward(ctx, logits, x0):
        logp = F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))  # (n, V)  >= fp32
        ce = -logp.gather(-1, x0[:, None])[:, 0]                                                  # (n,)
        h = torch.empty_like(ce)
        for k in slices(logp):
            h[k] = -(logp[k].exp() * logp[k].clamp(min=-1e30)).sum(-1)                            # (n,)  p = 0 counts 0
        ctx.save_for_backward(logp, x0, h)
        ctx.dtype = logits.dtype
        return ce, h

    @staticmethod
    def backward(ctx, g_ce, g_h):
        logp, x0, h = ctx.saved_tensors
        grad, x0, h, g_ce, g_h = torch.empty_like(logp, dtype=ctx.dtype), *(v[:, None] for v in (x0, h, g_ce, g_h))
        for k in slices(logp):
            g = (logp[k].clamp(min=-1e30) + h[k]).mul_(-g_h[k]).add_(g_ce[k]).mul_(logp[k].exp())
            grad[k] = g.scatter_add_(-1, x0[k], -g_ce[k])                # (n, V)  p (g_ce - g_h (...)) - onehot g_ce
        return grad, None


def tabom_loss(ce, h, slot, valid, lam, gamma, h_slot=None):
    """Eq. 9 for each sample, of TokenStats' ce and h (n,); slot (B, W): where the window's w-th token in decoding order
    is among the n; valid (B, W): False where the window is short; h_slot: other places for h (--rank-context exact)."""
    ce    = ce[slot].where(valid, 0).sum(1) / valid.sum(1)                       # (B,)       Eq. 9, first term
    h     = h[slot if h_slot is None else h_slot].where(valid, 0)                # (B, W)     h(r): predictive entropy
    gap   = h[:, :, None] - h[:, None, :] + gamma                                # (B, W, W)  gap[b, r, s] of Eq. 8
    pair  = (valid[:, :, None] & valid[:, None, :]).triu(1)                      # (B, W, W)  r decoded before s
    pairs = pair.sum((1, 2))                                                     # (B,)       W (W - 1) / 2
    rank  = (F.relu(gap) * pair).sum((1, 2)) / pairs.clamp(min=1)                # (B,)       Eq. 8: mean hinge
    right = ((gap < gamma) & pair).sum((1, 2))                                   # (B,)       pairs already in order
    return ce + lam * rank, ce, rank, right, pairs                               # Eq. 9: ce + lambda rank


def t3d_loss(logits, ref_logits, x0, slot, valid, a=0.5, b=0.1, c=0.2):
    """T3D: discriminative self-distillation against the frozen base, plus a path term that favours early tokens."""
    x1 = ref_logits.argmax(-1)                                                   # (n,)  what the base would say
    ce, _ = TokenStats.apply(logits, x0)                                         # (n,)
    ref, _ = TokenStats.apply(ref_logits, x0)                                    # (n,)
    ce1, ref1 = TokenStats.apply(logits, x1)[0], TokenStats.apply(ref_logits, x1)[0]
    K = valid.sum(1)                                                             # (B,)  masked tokens of each sample
    mean = lambda v: v[slot].where(valid, 0).sum(1) / K                          # (n,) -> (B,)
    good, bad = mean(ref - ce), mean(ref1 - ce1)                                 # (B,)  l(x) - l_ref(x)
    count = torch.arange(1, slot.shape[1] + 1, device=slot.device)               # (K,)
    level = ce[slot].where(valid, 0).cumsum(1) / count                           # (B, K)  mean CE of the first s
    path = (level * valid).sum(1) / K                                            # (B,)  mean over levels s
    return -F.logsigmoid(b * good) - a * F.logsigmoid(-b * bad) + c * path, mean(ce)


# ---------------------------------------------------------------- what the model sees

def view(r, method: str, window: int, rng):
    """One training view of a trajectory: (visible (N,) bool, targets in decoding order). Never a token of the future.
    r.order (N,), -1 = never decoded and always masked; r.rank: the positions that may be targets, in total order."""
    steps = r.order[r.rank]                                                      # ascending
    if method == "sft":                                                          # Eq. 1: t ~ U(0, 1), masked with t
        masked = rng.random(len(r.order)) < rng.random()
        if not masked[r.rank].any():
            masked[rng.choice(r.rank)] = True
        return ~masked & (r.order >= 0), r.rank[masked[r.rank]]
    if method == "dinfer":                                                       # two times, i before j
        i, j = sorted(rng.choice(np.append(np.unique(steps), steps[-1] + 1), 2, replace=False))
        return (r.order >= 0) & (r.order < i), r.rank[(steps >= i) & (steps < j)]
    need = 1 if method == "t3d" else min(2, len(steps)) if window == 0 else min(window, len(steps))
    cut = rng.choice(np.unique(steps[:len(steps) - need + 1]))                   # boundaries that leave enough tokens
    left = r.rank[steps >= cut]
    return (r.order >= 0) & (r.order < cut), left[:window] if method == "tabom" and window else left


def collate(rows: list[tuple], mask_id: int, device):
    """rows: (prompt ids, response ids, visible, targets) -> ids, real, at (B, T); x0 (n,); slot, valid (B, W)."""
    T, W = max(len(p) + len(x) for p, x, _, _ in rows), max(len(t) for *_, t in rows)
    B, n, truth = len(rows), 0, []
    ids, real, at = np.zeros((B, T), np.int64), np.zeros((B, T), bool), np.zeros((B, T), bool)
    slot, valid = np.zeros((B, W), np.int64), np.zeros((B, W), bool)
    for b, (prompt, x, visible, targets) in enumerate(rows):
        start = T - len(x)
        real[b, start - len(prompt):], at[b, start + targets] = True, True
        ids[b, start - len(prompt):start], ids[b, start:] = prompt, np.where(visible, x, mask_id)
        slot[b, :len(targets)] = n + np.argsort(np.argsort(targets))             # logits come in reading order
        valid[b, :len(targets)] = True
        truth.append(x[np.sort(targets)])
        n += len(targets)
    return [torch.from_numpy(a).to(device) for a in (ids, real, at, np.concatenate(truth), slot, valid)]


def exact_rows(r, visible, targets):
    """The definition of h(r): one state for each step of the window, as it was just before that step was decoded.
    Row 0 is U_t and is asked for the whole window (CE); every row for the tokens of its own step (h)."""
    steps = np.unique(r.order[targets])
    rows = [(r.prompt, r.ids, (r.order >= 0) & (r.order < u),
             targets if u == steps[0] else targets[r.order[targets] == u]) for u in steps]
    place = {int(t): (k, w) for k, u in enumerate(steps) for w, t in enumerate(rows[k][3]) if r.order[t] == u}
    return rows, [place[int(t)] for t in targets]


class Kept(torch.autograd.Function):
    """Values (m,) whose gradients (m, P) were taken when they were computed, so that their graphs could go."""
    @staticmethod
    def forward(ctx, values, grads, *params):
        ctx.save_for_backward(grads)
        ctx.shapes = [p.shape for p in params]
        return values.clone()

    @staticmethod
    def backward(ctx, g):
        parts = (g @ ctx.saved_tensors[0]).split([s.numel() for s in ctx.shapes])
        return None, None, *(x.view(s) for x, s in zip(parts, ctx.shapes, strict=True))


def by_state(model, rows, place, mask_id: int, device):
    """TokenStats of row 0 (n,), its slots (1, W), and the window's entropies (W,), with the memory of one state and no
    second forward: the hinge's weights want every entropy first, so each one's gradient is kept till then, as large as
    the adapter. Row 0, with the CE, comes last and keeps its graph."""
    params = [p for p in model.parameters() if p.requires_grad]
    later = [at for at in place if at[0] > 0]                                    # in decoding order: so is h
    values, n = params[0].new_empty(len(later)), 0
    grads = params[0].new_empty(len(later), sum(p.numel() for p in params))      # (m, P): m < W
    for k in [*range(1, len(rows)), 0]:
        ids, real, at, x0, slot, _ = collate([rows[k]], mask_id, device)
        ce, h = TokenStats.apply(model(ids, real, at), x0)                       # (n,)
        own = [h[slot[0, w]] for state, w in place if state == k]                # entropies of this step
        for y in own if k else ():
            g = torch.autograd.grad(y, params, retain_graph=y is not own[-1])
            values[n], grads[n], n = y.detach(), torch.cat([x.flatten() for x in g]), n + 1
    return ce, slot, torch.cat([torch.stack(own), Kept.apply(values, grads, *params)])


def batch_loss(model, batch: list, a, mask_id: int, device):
    """Losses (B,) of (record, visible, targets), and what to log: ce, rank, pairs in order, pairs, tokens fed."""
    zero = torch.zeros(len(batch), device=device)
    if a.method == "tabom" and a.rank_context == "exact" and a.lam > 0:
        (r, visible, targets), = batch
        rows, place = exact_rows(r, visible, targets)
        valid = torch.ones(1, len(targets), dtype=torch.bool, device=device)     # (1, W)
        if len(rows) > a.exact_chunk:
            ce, slot, h = by_state(model, rows, place, mask_id, device)          # (n,), (1, W), (W,)
            h_slot = valid.long().cumsum(1) - 1                                  # (1, W): 0 .. W - 1
        else:
            ids, real, at, x0, slot, _ = collate(rows, mask_id, device)          # ids (S, T): S <= W states
            ce, h = TokenStats.apply(model(ids, real, at), x0)                   # (n,)
            slot, h_slot = slot[:1, :len(targets)], torch.stack([slot[k, w] for k, w in place])[None]
        fed = torch.tensor(sum(len(p) + len(x) for p, x, *_ in rows), device=device)
        return *tabom_loss(ce, h, slot, valid, a.lam, a.gamma, h_slot), fed
    ids, real, at, x0, slot, valid = collate([(r.prompt, r.ids, v, t) for r, v, t in batch], mask_id, device)
    logits = model(ids, real, at)                                                # (n, V): the head sees targets alone
    if a.method == "t3d":
        with torch.no_grad(), lora.off(model):
            ref = model(ids, real, at)                                           # (n, V)
        loss, ce = t3d_loss(logits, ref, x0, slot, valid)
        return loss, ce, zero, zero, zero, real.sum()
    ce, h = TokenStats.apply(logits, x0)                                         # (n,)
    return *tabom_loss(ce, h, slot, valid, a.lam if a.method == "tabom" else 0.0, a.gamma), real.sum()


def epoch_batches(lengths: np.ndarray, size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The epoch's global batches of sample numbers: of (seed, epoch) alone, never of the number of ranks.
    Like lengths go together (sorted within shuffled pools of 50 batches), so that little is padding."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    pools = [order[i:i + 50 * size] for i in range(0, len(order), 50 * size)]
    order = np.concatenate([p[np.argsort(lengths[p], kind="stable")] for p in pools])
    batches = [order[i:i + size] for i in range(0, len(order), size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def learning_rate(step: int, total: int, peak: float, warmup: int) -> float:
    """Linear over the first `warmup` steps, then a cosine to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


# ---------------------------------------------------------------- records and files

def read_data(a, c, tok, rank: int) -> list:
    """Records ready to train on; says how many were left out, and why."""
    kept, out, named, weights = [], {}, None, fingerprint(c.folder)
    for number, (place, r) in enumerate(read_records(a.data, need_order=a.method != "sft")):
        if a.limit and number >= a.limit:
            break
        m = r.get("model")
        if m and (m["mask_id"], m["vocab_size"]) != (c.mask_id, c.vocab):
            stop(f"{place}: decoded by {m['name']} (mask {m['mask_id']}, vocabulary {m['vocab_size']}), but {c.name} "
                 f"has mask {c.mask_id}, vocabulary {c.vocab}; pass the --model of the trajectories")
        if m and m.get("crc32") not in (None, weights):
            stop(f"{place}: decoded by {m['name']} with other weights than {c.name} has; pass the --model of the "
                 f"trajectories, or drop model and decode from the records to train on them all the same")
        if m and m["name"] != (named := named or m["name"]):
            stop(f"{place}: decoded by {m['name']}, those before by {named}; a file must be of one model, split it")
        prompt = r.get("prompt_token_ids") or prompt_ids(place, tok, r)
        if "response_token_ids" in r:
            ids = np.array(r["response_token_ids"])
            order = np.array(r.get("decoding_order", -(ids == c.mask_id).astype(int)))   # sft needs none
        else:                                            # ground truth: answer, end of turn, EOS to the canvas
            ids = tok(r["response"], add_special_tokens=False)["input_ids"] + tok.end_ids[1:] + tok.end_ids[:1]
            if len(ids) > a.length and not a.all:
                out["longer than --length"] = out.get("longer than --length", 0) + 1
                continue
            ids = np.array(ids + [c.eos_id] * (a.length - len(ids)))
            order = np.zeros(len(ids), np.int64)
        if max(ids.max(), max(prompt)) >= c.vocab:
            stop(f"{place}: token {max(ids.max(), max(prompt))} for a vocabulary of {c.vocab}; pass the --model of the "
                 f"trajectories")
        if len(prompt) + len(ids) > c.positions:
            stop(f"{place}: {len(prompt)} + {len(ids)} tokens for the model's {c.positions} positions; drop it, or of "
                 f"ground truth give a smaller --length")
        if ((ids == c.mask_id) & (order >= 0)).any():
            stop(f"{place}: response_token_ids holds the mask token {c.mask_id} where decoding_order is not -1; "
                 f"pass the --model of the trajectories, or drop it")
        end, rank_ = first_end(ids, order, tok.end_ids), total_order(order, r.get("entropy"))
        text = tok.decode(ids[:end].tolist(), skip_special_tokens=True) if m and end is not None else None
        if text not in (None, r.get("response")):
            stop(f"{place}: its tokens read {text[:40]!r} with the tokenizer of {c.name}, its response is "
                 f"{r['response'][:40]!r}; pass the --model of the trajectories")
        if a.tail == "drop" and end is not None:
            rank_ = rank_[rank_ <= end]                  # paper silent on the tail; README "Departures"
        why = "shorter than 2 tokens" if len(rank_) < 2 else None
        if not a.all:
            why = "unfinished" if end is None else "judged wrong" if r.get("correct") is False else why
        if why:
            out[why] = out.get(why, 0) + 1
        else:
            kept.append(SimpleNamespace(id=r["id"], prompt=np.array(prompt), ids=ids, order=order, rank=rank_))
    told = ", ".join(f"{n} {why}" for why, n in out.items())
    if not kept:
        stop(f"{a.data}: no record to train on ({told}); decode more prompts, or --all keeps unfinished and wrong ones")
    if rank == 0:
        print(f"{a.data}: {len(kept)} records" + (f", left out {told}" if told else ""), flush=True)
        if named and not (m or {}).get("crc32") and os.path.normpath(named) != os.path.normpath(c.name):
            print(f"{a.data}: decoded by {named}, not by {c.name}: is it the same model?", flush=True)
    return kept


def write_folder(path: Path, write):
    """write(folder) into a folder that appears whole or not at all."""
    tmp = path.with_name(path.name + ".part")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        write(tmp)
        for file in tmp.iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        os.rename(tmp, path)
    except OSError as e:
        shutil.rmtree(tmp, ignore_errors=True)
        raise OSError(e.errno, e.strerror, str(path)) from None


def step_of(line: str) -> float:
    """Of a line of log.jsonl; one that a kill cut short is of no step."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def lock(file, out: Path):
    """Two runs never write into one folder."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stop(f"--out {out}: another process is training into it; let it end, or give another --out", everywhere=True)
    except OSError:
        pass                             # a file system without locks


@contextlib.contextmanager
def together(place: str, timeout: float):
    """What all ranks do at once: one that is lost or hangs ends the job with a line."""
    try:
        yield
    except RuntimeError as e:
        print(f"{place}: another rank died, or did not answer for --timeout {timeout:g} minutes "
              f"({str(e)[:80].partition(chr(10))[0]}); --resume goes on", file=sys.stderr, flush=True)
        os._exit(1)


def flags():
    p = Flags(__doc__)
    g = p.add_argument_group("data and model")
    g.add_argument("--data", required=True, help="trajectories of decode.py; for sft also prompts with responses")
    g.add_argument("--limit", type=int, default=0, help="only the first records of --data")
    g.add_argument("--model", help="folder or hub name (default: the one named in the trajectories)")
    g.add_argument("--out", default="out/tabom", help="adapters, resume point and log.jsonl (default out/tabom)")
    g.add_argument("--all", action="store_true", help="keep unfinished and wrong records too")
    g.add_argument("--length", type=int, default=256, help="canvas of ground-truth responses (default 256)")
    g = p.add_argument_group("objective")
    g.add_argument("--method", choices=["tabom", "sft", "dinfer", "t3d"], default="tabom")
    g.add_argument("--window", type=int, default=32, help="W tokens; 0 = global, all still masked (default 32)")
    g.add_argument("--lam", type=float, default=1.0, help="weight of the ranking term; 0 = CE only (default 1)")
    g.add_argument("--gamma", type=float, default=0.2, help="margin of the hinge, nats (default 0.2)")
    g.add_argument("--rank-context", choices=["start", "exact"], default="start",
                   help="entropies at U_t, or just before each token")
    g.add_argument("--exact-chunk", type=int, default=8, help="exact: states kept at once; of more, each goes alone")
    g.add_argument("--tail", choices=["keep", "drop"], default="keep", help="tokens after the first EOS as targets")
    g = p.add_argument_group("LoRA and optimiser")
    g.add_argument("--rank", type=int, default=16, help="LoRA r (default 16)")
    g.add_argument("--alpha", type=float, default=16, help="LoRA alpha (default 16)")
    g.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"], help="layers by last name")
    g.add_argument("--lr", type=float, default=2e-5, help="peak (default 2e-5)")
    g.add_argument("--warmup", type=int, default=50, help="steps (default 50)")
    g.add_argument("--weight-decay", type=float, default=0.01)
    g.add_argument("--clip", type=float, default=1.0, help="gradient norm")
    g.add_argument("--epochs", type=int, default=5, help="one window a trajectory and epoch (default 5)")
    g.add_argument("--max-steps", type=int, default=0, help="end here instead; the cosine ends here too")
    g.add_argument("--batch-size", type=int, default=4, help="a device (default 4)")
    g.add_argument("--grad-accum", type=int, default=1)
    g.add_argument("--seed", type=int, default=0, help="of adapters, order and windows")
    g = p.add_argument_group("machine")
    g.add_argument("--dtype", choices=["bf16", "fp32"], help="of the base (default: bf16 on CUDA, fp32 on CPU)")
    g.add_argument("--grad-checkpoint", action="store_true", help="recompute each block: less memory, a third slower")
    g.add_argument("--resume", action="store_true", help="go on from the last resume point in --out")
    g.add_argument("--save-every", type=int, default=100, help="steps between resume points (default 100)")
    g.add_argument("--log-every", type=int, default=10, help="steps between printed lines; log.jsonl has all")
    g.add_argument("--timeout", type=float, default=30, help="minutes until a hanging rank ends the job (default 30)")
    a = p.parse_args()
    for flag, low in dict(window=0, lam=0, gamma=0, exact_chunk=1, rank=1, lr=0, warmup=0, clip=0, epochs=1,
                          max_steps=0, batch_size=1, grad_accum=1, save_every=1, log_every=1, timeout=0.01, length=2,
                          weight_decay=0, seed=0, limit=0).items():
        high = 1e9 if flag != "seed" else 2 ** 63 - 1
        if not low <= getattr(a, flag) <= high:
            stop(f"--{flag.replace('_', '-')} {getattr(a, flag)}: must be at least {low}, at most {high:g}")
    if not 0 < abs(a.alpha) < 1e9:
        stop(f"--alpha {a.alpha}: must be a number other than 0, below 1e9")
    if a.method == "tabom" and a.window == 1 and a.lam > 0:
        stop("--window 1: one token makes no pair to rank; use --window 2 or more, or --lam 0")
    return a


def main():
    with contextlib.ExitStack() as held:                 # the lock on --out, till the end
        run(flags(), held)


def run(a, held):
    rank, world, device, dtype = place_of_work()
    dtype = dict(bf16=torch.bfloat16, fp32=torch.float32).get(a.dtype, dtype)
    out, log = Path(a.out), Path(a.out) / "log.jsonl"
    if out.exists() and not out.is_dir():
        stop(f"--out {out}: is a file; give a folder")
    head = read_json(log, True, "give another --out") if log.exists() else {}
    if head and not isinstance(head.get("settings"), dict):
        stop(f"{log}: does not start with a run's settings; give another --out")
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and head.get("launcher") == os.getppid():
        a.resume = True                  # this torchrun began the run, and has restarted us: go on
    points = sorted(p for p in out.glob("resume-*") if p.suffix != ".part")
    if (head or any(out.glob("*-[0-9]*"))) and not (a.resume and head):
        how = "--resume to go on with it" if head else "its log.jsonl is gone, so nobody can tell whose"
        stop(f"--out {out}: holds a run already; {how}, or give another --out")
    first = next(read_records(a.data, need_order=a.method != "sft"))[1]                  # mistakes before weights
    name = a.model or first.get("model", {}).get("name") or stop(f"{a.data}: names no model; pass --model")
    c, _ = read_config(name)
    tok = load_tokenizer(name)
    lora.wrap(skeleton(name), a.targets, a.rank)
    records = read_data(a, c, tok, rank)
    free = ("out", "resume", "save_every", "log_every", "timeout", "batch_size", "grad_accum", "grad_checkpoint",
            "exact_chunk")                               # may change on the way
    same = {k: v for k, v in vars(a).items() if k not in free}
    content = functools.reduce(lambda crc, x: zlib.crc32(x.tobytes(), crc),
                               (x for r in records for x in (r.prompt, r.ids, r.order, r.rank)), 0)
    same |= dict(data=f"{os.path.basename(a.data)}: {len(records)} records, crc32 {content:08x}",
                 model=f"crc32 {fingerprint(c.folder)}",
                 global_batch=a.batch_size * a.grad_accum * world)
    for k, was in head.get("settings", {}).items():
        if k in same and same[k] != was:
            stop(f"--out {out}: is of a run with {k} {was!r}, now it is {same[k]!r}; "
                 f"use those settings, or another --out")
    if rank == 0:                        # from here on the folder is ours, if it is still as we saw it
        out.mkdir(parents=True, exist_ok=True)
        lock(held.enter_context(open(out / ".lock", "w")), out)
        if head != (read_json(log, True) if log.exists() else {}) or any(not p.exists() for p in points):
            stop(f"--out {out}: another process trained into it just now; give another --out, or --resume")

    if world > 1:                        # torchrun's restarts share one key store: a prefix each
        wait, attempt = datetime.timedelta(minutes=a.timeout), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if os.environ.get("LOCAL_WORLD_SIZE") != str(world):
            attempt = "0"                # nodes count restarts each for itself
        with together(f"rank {rank}, start", a.timeout):
            store = dist.PrefixStore(attempt, next(dist.rendezvous("env://", timeout=wait))[0])
            dist.init_process_group("nccl" if "cuda" in device else "gloo", store=store, rank=rank, world_size=world,
                                    timeout=wait)
            seen, point = torch.zeros(world, dtype=torch.int64, device=device), points[-1].name if points else "nothing"
            seen[rank] = zlib.crc32(json.dumps([point, same]).encode())
            dist.all_reduce(seen)        # and all have looked at --out before rank 0 writes there
        if len(set(seen.tolist())) > 1:
            stop(f"--out {out}: goes on from {point} with {same}, other ranks differ; all must see one --out and "
                 f"--data, and have the same flags", everywhere=True)
    if "cuda" in device:
        torch.set_float32_matmul_precision("high")
    model = load(name, device, dtype)
    params = lora.wrap(model, a.targets, a.rank, a.alpha, a.seed)
    model.train()
    model.grad_checkpoint = a.grad_checkpoint
    opt = torch.optim.AdamW(params, lr=a.lr, weight_decay=a.weight_decay)
    names = list(lora.state(model))                                                      # in the order of params

    size = a.batch_size * a.grad_accum * world                                           # global batch
    lengths = np.array([len(r.prompt) + len(r.ids) for r in records])
    per_epoch = -(-len(records) // size)
    total = a.max_steps or per_epoch * a.epochs
    step = 0
    if points:
        try:
            step = json.loads((points[-1] / "state.json").read_text())["step"]
            saved = load_file(points[-1] / "state.safetensors")
            with torch.no_grad():
                for key, p in zip(names, params, strict=True):
                    p.copy_(saved[key])
            opt.load_state_dict(dict(param_groups=opt.state_dict()["param_groups"], state={
                i: dict(step=torch.tensor(float(step)), exp_avg=saved["m." + k], exp_avg_sq=saved["v." + k])
                for i, k in enumerate(names)}))
        except Exception as e:           # not of ours: those appear whole
            stop(f"{points[-1]}: is damaged ({type(e).__name__}: {' '.join(str(e).split())[:80]}); delete it to start "
                 f"over, or give another --out")

    def save_point():
        if rank == 0 and not (out / f"resume-{step:07d}").exists():
            moments = {f"{mv}.{k}": opt.state[p][key].cpu() for mv, key in (("m", "exp_avg"), ("v", "exp_avg_sq"))
                       for k, p in zip(names, params, strict=True)}
            write_folder(out / f"resume-{step:07d}", lambda f: (
                (f / "state.safetensors").write_bytes(to_bytes(lora.state(model) | moments)),
                (f / "state.json").write_text(json.dumps(dict(step=step)))))
            for old in out.glob("resume-*"):
                if old.name != f"resume-{step:07d}":
                    shutil.rmtree(old)

    if rank == 0:
        for older in points[:-1]:        # a kill came between writing the last one and deleting it
            shutil.rmtree(older)
        old = log.read_text().splitlines()[1:] if log.exists() else []
        old = [x for x in old if step_of(x) <= step]
        head = dict(args=vars(a), settings=same, model=name, records=len(records), steps=total, world=world,
                    launcher=os.getppid(), commit=commit(), torch=torch.__version__, python=platform.python_version(),
                    device=torch.cuda.get_device_name() if "cuda" in device else platform.processor() or "cpu")
        write_whole(log, "".join(x + "\n" for x in [json.dumps(head), *old]).encode())
        print(f"{name}: {sum(p.numel() for p in params):,} LoRA parameters on {len(params) // 2} layers; "
              f"{total} steps of {size}", flush=True)
    bar, batches = Bar(total, "step", step, 0), None
    while step < total:
        clock, epoch = time.time(), step // per_epoch
        if batches is None or step % per_epoch == 0:
            batches = epoch_batches(lengths, size, a.seed, epoch)
        chosen = batches[step % per_epoch]                                               # the global batch's samples
        losses, sums = torch.zeros(len(chosen), device=device), torch.zeros(5, device=device, dtype=torch.float64)
        each = 1 if a.method == "tabom" and a.rank_context == "exact" and a.lam > 0 else a.batch_size
        starts = range(0, len(chosen), a.batch_size)[rank::world]                        # this rank's micro-batches
        mine = [range(i, min(i + a.batch_size, len(chosen))) for i in starts]
        for piece in (m[i:i + each] for m in mine for i in range(0, len(m), each)):
            batch = []
            for i in piece:                                                              # (seed, epoch, sample) decide
                r, rng = records[chosen[i]], np.random.default_rng([a.seed, epoch, int(chosen[i])])
                batch.append((r, *view(r, a.method, a.window, rng)))
            loss, *parts = batch_loss(model, batch, a, c.mask_id, device)                # (B,)
            (loss.sum() / len(chosen)).backward()                                        # mean over all ranks' samples
            losses[piece.start:piece.stop] = loss.detach()
            sums += torch.stack([x.detach().sum().double() for x in parts])
        grad = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
        if world > 1:                                                                    # sums: already global means
            with together(f"rank {rank}, step {step + 1}", a.timeout):
                for t in (grad, losses, sums):
                    dist.all_reduce(t)
        gnorm = grad.norm()
        if not bool(losses.isfinite().all() & gnorm.isfinite()):
            bad = [records[chosen[i]].id for i in (~losses.isfinite()).nonzero()[:, 0].tolist()]
            last = sorted(p.name for p in out.glob("resume-*"))
            stop(f"step {step + 1}: the loss or its gradient is not finite, samples "
                 f"{bad or [records[i].id for i in chosen]}; last good state: {out / last[-1] if last else 'none'}; "
                 f"look at those samples, or lower --lr")
        grad *= (a.clip / gnorm).clamp(max=1.0) if a.clip else 1.0
        for p, g in zip(params, grad.split([p.numel() for p in params]), strict=True):
            p.grad = g.view_as(p)
        lr = opt.param_groups[0]["lr"] = learning_rate(step, total, a.lr, a.warmup)
        opt.step()
        opt.zero_grad()
        step += 1

        loss, (ce, hinge, right, pairs, tokens), B = losses.mean().item(), sums.tolist(), len(chosen)
        ms = 1000 * (time.time() - clock)
        memory = (torch.cuda.max_memory_allocated() / 1e9 if "cuda" in device
                  else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
        if rank == 0:
            row = dict(step=step, epoch=epoch + 1, loss=loss, ce=ce / B, rank=hinge / B,
                       in_order=right / pairs if pairs else None, lr=lr, gnorm=gnorm.item(), ms=ms,
                       tokens_per_s=tokens / ms * 1000, memory_gb=memory, samples=[records[i].id for i in chosen])
            with open(log, "a") as f:
                f.write(json.dumps(row) + "\n")
        if step % a.log_every == 0 or step == total:
            ranked = f" + {a.lam:g} rank {hinge / B:.3f}" if a.method == "tabom" else ""
            bar(step, f"loss {loss:.3f} = ce {ce / B:.3f}{ranked} | {100 * right / max(pairs, 1):.0f} % in order | "
                f"lr {lr:.1e} | gnorm {gnorm.item():.2f} | {ms:.0f} ms | {tokens / ms * 1000:,.0f} tok/s | "
                f"{memory:.1f} GB")
        due, ends = (step % n == 0 or step == total for n in (a.save_every, per_epoch))
        if (due or ends) and not all(bool(p.isfinite().all()) for p in params):
            stop(f"step {step}: the adapter is not finite any more, and not kept; lower --lr {a.lr:g}, --weight-decay "
                 f"{a.weight_decay:g}, --alpha {a.alpha:g}")
        if ends:
            if rank == 0 and not (out / f"epoch-{epoch + 1}").exists():
                write_folder(out / f"epoch-{epoch + 1}", lambda f: lora.save(model, f, name))
        if due:
            save_point()
    if rank == 0:
        print(f"{out}: adapter in {out}/epoch-{(total - 1) // per_epoch + 1}", flush=True)
    if world > 1:
        with together(f"rank {rank}, end", a.timeout):
            dist.barrier()
            dist.destroy_process_group()


def commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() or "none"
    except OSError:
        return "none"


if __name__ == "__main__":
    with safely("--out keeps the last resume point; run the same command with --resume to go on"):
        main()
