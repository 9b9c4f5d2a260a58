"""What a user pays, as ratios measured in one run on the CPU, and what the real models would cost, as estimates.

    python bench.py                          # every measurement, about 27 minutes on two quiet cores
    python bench.py --quick                  # the same rows at smaller sizes, 2 minutes: to see that it runs
    python bench.py --only train decode      # some parts; --full decodes 64 prompts one token a step: hours
    python bench.py --plan dream             # or llada: parameters, memory, FLOPs, hours, from the configuration alone

"Ours" is tabom.py and decode.py as they stand; "plain" stands here, compactly, after what the authors of the paper and
of the models publish, on the same Model. Variants take turns on the same data and the best of the repeats counts: noise
moves a ratio less than a time; decoding, minutes a row, is timed once. Letters: B batch, T length, N canvas, P prompt,
V vocabulary, W window, n scored.
"""
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lora
import tabom
import toy
from data import safely, write_whole
from decode import decode
from model import FAMILIES, Flags, Model, load, part, stop

# isort: split
import numpy as np
import torch
import torch.nn.functional as F

# Dream's depth, MLP ratio 18944/3584 and vocabulary ratio 152064/3584 at width 256: 36 M weights beside the embedding.
# Its 7 query heads to one k, v head do not divide 256; 8 do. The toy does the toy's work.
DREAM = dict(model_type="Dream", layers=28, width=256, heads=8, kv_heads=1, mlp=1352, vocab=10864)
SHAPES = {"Dream-shaped": DREAM, "Dream-vocabulary": dict(DREAM, layers=4, vocab=152064), "toy": dict(
    {k: toy.CONFIG[FAMILIES["llada"]["fields"][k]] for k in ("layers", "width", "heads", "kv_heads", "mlp")},
    model_type="llada", vocab=len(toy.VOCAB))}
WORK = dict(batch=4, prompt=(40, 250), N=256, W=32)
REAL = {"dream": dict(model_type="Dream", layers=28, width=3584, heads=28, kv_heads=4, mlp=18944, vocab=152064),
        "llada": dict(model_type="llada", layers=32, width=4096, heads=32, kv_heads=32, mlp=12288, vocab=126464)}
KEPT = {12000: 5100, 17000: 3800}       # valid trajectories of the paper's math and code prompts
QUESTIONS = {                           # of each benchmark: how many, and the paper's lengths for Dream and LLaDA
    "gsm8k": (1319, 256, 512), "math500": (500, 512, 512), "mbpp": (500, 1024, 256), "humaneval": (164, 768, 512),
    "ifeval": (541, 512, 512)}
MASK, EOS = 0, 1
clock, report, goals = time.perf_counter, {}, []        # report: for --json; goals: (what, value, "at least", target)
last_told = [time.time()]


def tell(what: str, every: float = 10.0):
    """A sign of life on stderr, at most every 10 seconds; the tables go to stdout."""
    if time.time() > last_told[0] + every:
        last_told[0] = time.time()
        print(f"  ... {what}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- what is computed, by arithmetic

def forward_flops(c, B, T, n) -> float:
    """B rows of T tokens, n positions scored: the last MLP and the head see those alone."""
    kv, mlp = c.width // c.heads * c.kv_heads, 3 * c.width * c.mlp                       # mlp: weights of one layer
    linear = B * T * (c.layers * 2 * c.width * (c.width + kv) + (c.layers - 1) * mlp) + n * (mlp + c.width * c.vocab)
    return 2 * linear + 4 * c.layers * B * T * T * c.width


def train_flops(c, B, T, n, checkpoint=False, flash=True, r: int = 16) -> float:
    """A frozen weight wants the gradient of its input alone, the first q, k, v not even that; LoRA (on q and v) its own
    as well. Flash attention computes its scores again in the backward pass."""
    kv, scores = c.width // c.heads * c.kv_heads, 4 * c.layers * B * T * T * c.width
    adapters = 6 * c.layers * r * (3 * c.width + kv) - 2 * c.width * (c.width + 2 * kv)
    return forward_flops(c, B, T, n) * (3 if checkpoint else 2) + scores * (1.5 if flash else 1) + B * T * adapters


def train_bytes(c, tokens, n, size, checkpoint=False, r: int = 16) -> tuple[float, float]:
    """(kept for the backward pass, peak). A token keeps in a layer both norms' inputs in fp32; h, q, k, v, attention's
    output, gate, silu(gate) and up at `size` bytes; two low-rank products. A scored position keeps log p in fp32.
    The peak is at the loss, with the logits or their gradient and three slices, or in an MLP's backward."""
    attn, mlp = 4 * (c.width + c.heads) + size * (5 * c.width + 2 * r), 4 * c.width + size * 3 * c.mlp
    last = n * (mlp + 4 * (c.width + c.vocab))
    layers = tokens * (c.layers * size * c.width if checkpoint else c.layers * attn + (c.layers - 1) * mlp)
    again = tokens * (attn + mlp) if checkpoint else 0   # one layer at a time is computed again
    loss = size * n * c.vocab + 12 * min(n * c.vocab, 1 << (20 if size == 4 else 24))    # decode.slices: fp32 = a CPU
    return layers + last, max(layers + last + loss, layers + again + 3 * size * tokens * c.mlp)


# ---------------------------------------------------------------- models, data, and the training step, ours and plain

def build(shape: dict, device="cpu") -> Model:
    c = SimpleNamespace(theta=1e6, eps=1e-6, positions=4096, tied=False, mask_id=MASK, eos_id=EOS, pad_id=EOS, **shape)
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(c, FAMILIES[c.model_type]).eval()
    if device == "cpu":                                  # left empty by Model: a checkpoint fills it
        torch.nn.init.normal_(part(model, model.family["embed"]).weight)
    return model


def trainer(shape: dict, checkpoint=False):
    model = build(shape)
    params = lora.wrap(model)
    model.train().grad_checkpoint = checkpoint
    return model, params, torch.optim.AdamW(params, lr=2e-5, weight_decay=0.01)


def sizes(name: str, quick: bool) -> tuple[dict, dict]:
    shape, own = SHAPES[name], dict(batch=64, prompt=(toy.PROMPT, toy.PROMPT), N=toy.LENGTH, W=4)
    small = dict(shape, layers=3, vocab=min(20000, shape["vocab"]))
    return small if quick else shape, own if name == "toy" else WORK


def make_batches(shape: dict, work: dict, count: int) -> list[list]:
    """(record, visible, targets) as tabom.py draws them, like lengths together: `count` of 16 batches, short to long"""
    rng, records, (low, high) = np.random.default_rng(0), [], work["prompt"]
    for n in range(16 * work["batch"]):
        prompt, x0 = (rng.integers(2, shape["vocab"], size) for size in (rng.integers(low, high + 1), work["N"]))
        order = rng.permutation(work["N"])
        records.append(SimpleNamespace(id=n, prompt=prompt, ids=x0, order=order, rank=np.argsort(order)))
    order = tabom.epoch_batches(np.array([len(r.prompt) for r in records]), work["batch"], 0, 0)
    order = sorted(order, key=lambda b: len(records[b[-1]].prompt))[8 // count::16 // count]
    seeded = lambda i: np.random.default_rng([0, 0, int(i)])
    return [[(records[i], *tabom.view(records[i], "tabom", work["W"], seeded(i))) for i in b] for b in order]


def finish(loss, params, opt) -> float:
    """The end of a step as in tabom.py's loop: backward, one flat gradient, its norm, clip, AdamW."""
    loss.backward()
    grad = torch.cat([p.grad.flatten() for p in params])
    grad *= (1.0 / grad.norm()).clamp(max=1.0)
    for p, g in zip(params, grad.split([p.numel() for p in params]), strict=True):
        p.grad = g.view_as(p)
    opt.step()
    opt.zero_grad()
    return loss.item()


def our_loss(model, batch, context="start", chunk=8):
    a = SimpleNamespace(method="tabom", lam=1.0, gamma=0.2, rank_context=context, exact_chunk=chunk)
    return tabom.batch_loss(model, batch, a, MASK, "cpu")[0].mean()


def our_step(model, params, opt, batch, *exact) -> float:
    return finish(our_loss(model, batch, *exact), params, opt)


def eager(q, k, v, attn_mask=None):
    """Attention as the release asks for by default: every score written out, masked, and through an fp32 softmax."""
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])                              # (B, H, T, T)
    scores = scores if attn_mask is None else scores + torch.zeros(()).where(attn_mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def plain_step(model, params, opt, batch) -> float:
    """The release's way: prompts padded to 256, eager attention, the head over every position, Dream's shift as a copy
    of all logits, an fp32 softmax with 1e-10 inside the log over every response position, a loop over samples."""
    B, N = len(batch), len(batch[0][0].ids)
    P = 256 if N == WORK["N"] else len(batch[0][0].prompt)
    ids, real = torch.full((B, P + N), EOS), torch.zeros(B, P + N, dtype=torch.bool)
    x0, window = torch.from_numpy(np.stack([r.ids for r, _, _ in batch])), torch.zeros(B, N, dtype=torch.bool)
    for b, (r, visible, targets) in enumerate(batch):
        real[b, P - len(r.prompt):], window[b, targets] = True, True
        ids[b, P - len(r.prompt):P] = torch.from_numpy(r.prompt)
        ids[b, P:] = torch.where(torch.from_numpy(visible), x0[b], MASK)
    family = model.family
    with mock.patch.object(F, "scaled_dot_product_attention", eager), mock.patch.object(
            model, "family", dict(family, shift=False)):
        logits = torch.nan_to_num(model(ids, real).float())                              # (B, P + N, V)
    if family["shift"]:
        logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
    logits = logits[:, P:]                                                               # (B, N, V)
    p, ranks = logits.softmax(-1), []
    h = -(p * torch.log(p + 1e-10)).sum(-1)                                              # (B, N)
    for b, (_, _, targets) in enumerate(batch):
        e = h[b, torch.from_numpy(targets)]                                              # (W,)
        pairs = F.relu(e[:, None] - e[None, :] + 0.2)                                    # (W, W)
        ranks.append(pairs[torch.ones_like(pairs, dtype=torch.bool).triu(1)].mean())
    return finish(F.cross_entropy(logits[window], x0[window]) + torch.stack(ranks).mean(), params, opt)


def bare_step(model, batch):
    """The LoRA model alone on the same tokens: forward, and backward of a made-up gradient."""
    ids, real, at, *_ = tabom.collate([(r.prompt, r.ids, v, t) for r, v, t in batch], MASK, "cpu")
    g = torch.full((int(at.sum()), model.config.vocab), 1e-6)
    return lambda: model(ids, real, at).backward(g)


# ---------------------------------------------------------------- decoding, ours and plain

class Scripted(torch.nn.Module):
    """The model with one logit raised a position, or random weights would tie everywhere: a token of its own, and EOS
    from `ends` on. A prompt's first token is its number + 2. Counts its forwards and their time."""
    def __init__(self, model, ends, N: int):
        super().__init__()
        rng, self.model, self.seconds, self.forwards = np.random.default_rng(1), model, 0.0, 0
        token = rng.integers(2, model.config.vocab, (len(ends), N))
        self.token = torch.from_numpy(np.where(np.arange(N) < np.array(ends)[:, None], token, EOS))
        self.raised = torch.from_numpy(np.stack([rng.permutation(np.linspace(7, 12, N)) for _ in ends])).float()

    def forward(self, ids, real, at=None):
        start = clock()
        logits = self.model(ids, real, at).flatten(0, -2)                                # (n, V)
        rows, cols = (torch.ones_like(real) if at is None else at).nonzero(as_tuple=True)
        number, place = ids[rows, (~real).sum(1)[rows]] - 2, cols - ids.shape[1] + self.token.shape[1]
        on = (place >= 0).nonzero()[:, 0]
        logits[on, self.token[number[on], place[on]]] += self.raised[number[on], place[on]]
        self.seconds, self.forwards = self.seconds + clock() - start, self.forwards + 1
        tell(f"forward {self.forwards} of a decoding, {len(ids)} rows: {clock() - start:.3g} s")
        return logits if at is not None else logits.view(*ids.shape, -1)


@torch.no_grad()
def plain_decode(model, prompts: list[tuple], s):
    """The published loop: a batch padded to the longest prompt, head and softmax everywhere, all its steps."""
    P, B = max(len(p) for _, p in prompts), len(prompts)
    x, real = torch.full((B, P + s.length), MASK), torch.ones(B, P + s.length, dtype=torch.bool)
    for b, (_, p) in enumerate(prompts):
        x[b, P - len(p):P], real[b, :P - len(p)] = torch.tensor(p), False
    for end in range(P + s.block, P + s.length + 1, s.block):
        for _ in range(s.block // s.tokens_per_step):
            p = model(x, real).float().softmax(-1)                                       # (B, T, V)
            sure, token = p.max(-1)                                                      # (B, T)
            score = sure if s.score == "confidence" else (p * torch.log(p + 1e-10)).sum(-1)
            score = score.masked_fill((x != MASK) | (torch.arange(P + s.length) >= end), -torch.inf)
            best = score.topk(s.tokens_per_step).indices                                 # (B, k)
            x.scatter_(1, best, token.gather(1, best))
    return x[:, P:].numpy()


def settings(length: int, k: int, **own):
    return SimpleNamespace(**dict(
        length=length, block=length, tokens_per_step=k, threshold=None, schedule="even", score="entropy", clean=False,
        temperature=0.0, top_p=1.0, top_k=0, suppress_eos=False, seed=0, model="", mask_id=MASK, end_ids=[EOS]) | own)


# ---------------------------------------------------------------- measuring and printing

def race(what: str, variants: dict, repeats: int) -> dict[str, float]:
    """{name: seconds}, the best of `repeats`; in every round each variant has its turn."""
    best = dict.fromkeys(variants, float("inf"))
    for n in range(repeats):
        for name, f in variants.items():
            start = clock()
            f()
            seconds = clock() - start
            best[name] = min(best[name], seconds)
            tell(f"{what}, round {n + 1} of {repeats}, {name}: {seconds:.3g} s")
    return best


def peak(f) -> float:
    """MB torch holds at the worst moment of f beyond what it held before: max_memory_allocated, for a CPU."""
    from torch.profiler import ProfilerActivity, profile
    error, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)                                     # the profiler talks
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
            f()
    finally:
        os.dup2(error, 2)
        os.close(null)
    events = sorted((e.start_ns(), e.nbytes()) for e in p.profiler.kineto_results.events() if e.name() == "[memory]")
    return np.cumsum([size for _, size in events]).max() / 1e6


def table(title: str, columns: list[str], rows: list[list]):
    """Aligned for a README: words to the left, figures to the right."""
    report[title] = [dict(zip(columns, row, strict=True)) for row in rows]
    show = lambda v: v if isinstance(v, str) else f"{v:,.0f}" if v >= 100 or isinstance(v, int) else f"{v:.3g}"
    text = [columns] + [[show(v) for v in row] for row in rows]
    width = [max(map(len, column)) for column in zip(*text, strict=True)]
    side = [str.ljust if isinstance(v, str) else str.rjust for v in rows[0]]
    print(f"\n{title}")
    for row in text:
        print("  " + "  ".join(f(v, w) for f, v, w in zip(side, row, width, strict=True)).rstrip(), flush=True)


# ---------------------------------------------------------------- the parts

def bench_check(a):
    """The arithmetic behind --plan against small shapes: torch's own counts of FLOPs, bytes kept, bytes at the peak."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    rows = []
    for name in ("Dream-shaped", "Dream-vocabulary"):
        shape, work = sizes(name, a.quick)
        state, batch, kept = trainer(shape), make_batches(shape, work, 1)[0], {}
        c, B, n = state[0].config, work["batch"], work["batch"] * work["W"]
        T = work["N"] + max(len(r.prompt) for r, _, _ in batch)
        with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):    # it cannot count CPU flash
            our_step(*state, batch)
        rows.append([name, "GFLOP a step", train_flops(c, B, T, n, flash=False) / 1e9, counted.get_total_flops() / 1e9])
        keep = lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = our_loss(state[0], batch)             # noqa: F841  the graph must live while storages are told apart
        measured = sum(kept.values()) - sum(kept.get(p.untyped_storage().data_ptr(), 0) for p in state[0].parameters())
        rows.append([name, "MB kept for the backward pass", train_bytes(c, B * T, n, 4)[0] / 1e6, measured / 1e6])
        del loss
        for again in (False, True):
            state[0].grad_checkpoint = again
            rows.append([name, "MB at the peak" + ", --grad-checkpoint" * again,
                         train_bytes(c, B * T, n, 4, again)[1] / 1e6, peak(lambda: our_step(*state, batch))])
    rows = [[*r, r[2] / r[3]] for r in rows]
    table("Formulas of --plan, a training step of small shapes in fp32, above the weights",
          ["shape", "", "formula", "measured", "formula/measured"], rows)
    goals.append(("--plan: worst of formula/measured", max(max(r[4], 1 / r[4]) for r in rows), "at most", 1.15))


def bench_train(a):
    rows, name = [], "Dream-shaped"
    for name in SHAPES:
        (shape, work), count = sizes(name, a.quick), 4 if name != "Dream-vocabulary" and not a.quick else 2
        state, total = trainer(shape), dict.fromkeys(("ours", "bare", "plain"), 0.0)
        still = (*state[:2], torch.optim.SGD(state[1], lr=0.0))
        for batch in make_batches(shape, work, count):
            ours, plain = our_step(*still, batch), plain_step(*still, batch)             # warms up, too
            assert abs(ours - plain) < 1e-3 * plain, f"{name}: the loss is {ours} ours, {plain} plain"
            ways = {"ours": lambda: our_step(*state, batch), "bare": bare_step(state[0], batch),
                    "plain": lambda: plain_step(*state, batch)}
            best = race(f"training, {name}", ways, a.repeats)
            total = {k: total[k] + best[k] for k in total}
        mb = [peak(lambda: step(*state, batch)) for step in (our_step, plain_step)]
        samples = count * work["batch"]
        rows.append([name, samples / total["ours"], samples / total["plain"], total["plain"] / total["ours"],
                     total["ours"] / total["bare"], *mb, mb[1] / mb[0]])
    table("Training step: TABOM, batch 4, prompts 40-250, response 256, W 32 (toy: 64, 9, 26, 4); same loss asserted",
          ["shape", "ours, samples/s", "plain", "ratio", "ours/bare model", "ours, MB", "plain", "ratio "], rows)
    goals.extend([("training, Dream-shaped: times as fast as plain", rows[0][3], "at least", 2.5),
                  ("training, Dream-vocabulary: times as fast as plain", rows[1][3], "at least", 5.0),
                  ("training, Dream-vocabulary: times less memory", rows[1][7], "at least", 8.0),
                  ("training, Dream-shaped: of the bare LoRA model's time", rows[0][4], "at most", 1.1)])

    shape, work = sizes("Dream-shaped", a.quick)
    state, batch = trainer(shape), make_batches(shape, work, 1)[0]

    def step(again):
        state[0].grad_checkpoint = again
        our_step(*state, batch)
    ways = {"batch of 4, --grad-checkpoint": lambda: step(True), "batch of 4": lambda: step(False)}
    best = race("training", ways, a.repeats + 1)
    rows = [[name, best[name], best[name] / best["batch of 4"], peak(f)] for name, f in ways.items()]
    (r, visible, targets), W = batch[0], work["W"]       # the CE's state is asked for W tokens, every other for one
    bare = [bare_step(state[0], [(r, visible, targets[:n])]) for n in (W, *[1] * (W - 1))]
    ways = {f"one sample, --rank-context exact, {title}": lambda n=n: our_step(*state, batch[:1], "exact", n)
            for title, n in (("state by state (default)", 8), ("--exact-chunk 32, all states at once", 32))}
    best = race("training", {"W bare forward-backwards": lambda: [f() for f in bare], **ways}, a.repeats + 1)
    rows += [[name, best[name], best[name] / best["W bare forward-backwards"], peak(f)] for name, f in ways.items()]
    table("Training step, Dream-shaped: what saves memory, and exact entropies (ratio: to W bare forward-backwards)",
          ["", "s", "ratio", "MB"], rows)
    goals.append(("--rank-context exact: of W forward-backwards", rows[2][2], "at most", 1.1))


def bench_decode(a):
    count, N, k, size = (64, 256, 1, 8) if a.full else (8, 64, 8, 2) if a.quick else (64, 256, 32, 8)
    shape, rng, rows = sizes("Dream-shaped", a.quick)[0], np.random.default_rng(0), []
    prompts = [(i, [i + 2, *rng.integers(2, shape["vocab"], rng.integers(39, 250))]) for i in range(count)]
    bare, full, half = build(shape), [N] * count, rng.permutation(np.linspace(N / 8, 7 * N / 8, count).astype(int))
    blocks = settings(N, min(k, N // 8), block=N // 8, score="confidence", clean=True)
    for title, ends, s, batch, others in (               # others: batches of the plain loop
            ("no EOS, by entropy", full, settings(N, k), size, (count, size)),
            ("answers end at half, 8 blocks, by confidence", half, blocks, size, (count,)),
            (f"the same, batches of {2 * size}", half, blocks, 2 * size, ()),
            ("no EOS, temperature 0.1, top-p 0.9", full, settings(N, k, temperature=0.1, top_p=0.9), size, ())):
        model, pads, start = Scripted(bare, ends, N), np.zeros(2), clock()
        on_step = lambda live, T: np.add(pads, (sum(T - N - len(r.ids) for r in live), T * len(live)), out=pads)
        done = {row.key: row for row in decode(model, prompts, s, batch, on_step)}
        ours, needed = clock() - start, -(-sum(r.step for r in done.values()) // batch)
        row = [title, ours, *[""] * 4, ours / model.seconds, model.forwards, needed, 100 * pads[0] / pads[1], ""]
        for n, other in enumerate(others):
            start = clock()
            x = np.concatenate([plain_decode(model, prompts[i:i + other], s) for i in range(0, count, other)])
            plain = clock() - start
            row[2 + 2 * n:4 + 2 * n] = plain, plain / ours
            same = sum(bool((done[i].canvas[:e + 1] == x[i][:e + 1]).all()) for i, e in enumerate(ends))
            row[-1] = f"{same} of {count}"
            if same < count:
                stop(f"{title}: {count - same} of {count} rows differ from the plain loop; decode.py is broken")
        rows.append(row)
    table(f"Decoding, Dream-shaped: {count} prompts of 40-250 tokens, length {N}, {k} tokens a step, batches of {size}",
          ["", "ours, s", "plain, whole", "ratio", f"plain, by {size}", "ratio ", "ours/forwards", "forwards", "needed",
           "padding, %", "same tokens"], rows)
    goals.extend([("decoding, no EOS: times as fast as plain", rows[0][3], "at least", 1.6),
                  ("decoding, answers end at half: times as fast as plain", rows[1][3], "at least", 2.5),
                  ("decoding: time over that of its forwards", max(r[6] for r in rows), "at most", 1.1),
                  (f"decoding by {size}: the same, of the forwards that full batches need",
                   max(r[6] * r[7] / r[8] for r in (rows[0], rows[1], rows[3])), "at most", 1.1),
                  ("decoding: % of positions that are padding", max(r[9] for r in rows), "at most", 10.0)])

    bare, rows, first, count = build(dict(DREAM, layers=1 if a.quick else 4)), [], None, 4 if a.quick else 16
    prompts = [(i, [i + 2, *range(2, 101)]) for i in range(count)]
    for N, batch, steps in ((64, 8, 8), (128, 8, 8), (256, 8, 8), (64, 4, 8), (64, 16, 8), (64, 8, 16), (64, 8, 32)):
        model, s = Scripted(bare, [N] * count, N), settings(N, N // steps)
        seconds, = race("decoding", {f"length {N}": lambda: list(decode(model, prompts, s, batch))}, a.repeats).values()
        flops = sum(forward_flops(bare.config, count, 100 + N, count * (N - i * N // steps)) for i in range(steps))
        first = first if rows else (seconds, flops)
        rows.append([N, batch, steps, seconds, seconds / first[0], flops / first[1]])
    table(f"Decoding {count} prompts of 100 tokens, {bare.config.layers} layers: cost against the first row",
          ["length", "batch", "steps", "s", "measured", "by arithmetic"], rows)


def bench_start(a):
    jobs = {"import torch alone": ("-c", "import torch"), "import tabom": ("-c", "import tabom")}
    scripts, here, best = ("tabom", "decode", "eval", "toy", "lora", "data", "bench"), Path(__file__).parent, {}
    jobs |= {f"{name}.py --help": (f"{name}.py", "--help") for name in scripts}
    for name, words in jobs.items():                     # wall time whatever --clock says: another process works
        for _ in range(a.repeats):
            start = time.perf_counter()
            subprocess.run([sys.executable, *words], cwd=here, capture_output=True, check=True)
            best[name] = min(best.get(name, 1e9), time.perf_counter() - start)
            tell(f"start-up, {name}: {best[name]:.3g} s")
    table("Start-up", ["", "s"], [list(x) for x in best.items()])
    goals.append(("slowest import or --help, s", max(best.values()), "at most", 2.0))
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.torch import save_file
        model, file = build(sizes("Dream-vocabulary", a.quick)[0]), Path(folder) / "model.safetensors"
        fields = {theirs: getattr(model.config, ours) for ours, theirs in FAMILIES["Dream"]["fields"].items()}
        (Path(folder) / "config.json").write_text(json.dumps(dict(fields, model_type="Dream")))
        save_file(model.state_dict(), file)
        mb = file.stat().st_size / 1e6
        ways = {"plain read of the file": file.read_bytes,
                "load, and add up every weight": lambda: [p.sum() for p in load(folder).parameters()]}
        best = race("loading", ways, a.repeats + 1)
    table(f"Loading {mb:,.0f} MB that the system has cached", ["", "MB/s"], [[k, mb / v] for k, v in best.items()])


# ---------------------------------------------------------------- at the real size

def plan(a):
    model, (B, P, N, W) = build(REAL[a.plan], "meta"), (4, 145, 256, 32)                 # P: on average, 250 at most
    c, total = model.config, sum(p.numel() for p in model.parameters())
    adapter, tokens, n = sum(p.numel() for p in lora.wrap(model)), B * (250 + N), B * W
    print(f"{a.plan}: {total:,} parameters, LoRA r 16 on q and v {adapter:,}. All below is estimated.\n"
          "  Bytes kept, token and layer: 8 C + 4 H + 2 (5 C + 3 MLP + 2 r); --grad-checkpoint: 2 C and one layer;\n"
          "  a scored position 4 (C + V), 2 V more at the peak, and 0.2 GB once. FLOPs: 4 a weight and token, or 6.\n"
          f"  --rank-context exact: one state, and W - 1 gradients of the adapter, {4e-9 * (W - 1) * adapter:.2g} GB.\n"
          f"  sft and dinfer score up to N positions, not W: at most {6e-9 * B * (N - W) * c.vocab:.2g} GB more, "
          f"t3d {14e-9 * B * (N - W) * c.vocab:.2g}.")
    kept, peaks = zip(*(train_bytes(c, tokens, n, 2, again) for again in (False, True)), strict=True)
    fixed = {"weights, bf16": 2 * total, "LoRA, its gradient twice, AdamW, fp32": 20 * adapter, "CUDA, assumed": 1e9}
    sums = [sum(fixed.values()) + p for p in peaks]
    table("Estimate, GB a GPU: TABOM, W 32, batch 4, prompts of 250 tokens, response 256",
          ["", "as it is", "--grad-checkpoint"],
          [[name, v / 1e9, v / 1e9] for name, v in fixed.items()] +
          [["kept for the backward pass", *(v / 1e9 for v in kept)],
           ["more at the peak", *((p - k) / 1e9 for p, k in zip(peaks, kept, strict=True))],
           ["sum", *(v / 1e9 for v in sums)]] +
          [[f"fits {gb:g} GB", *("yes" if v < 0.95e9 * gb else "no" for v in sums)]      # 5 % for fragments
           for gb in sorted({24, 40, 80, a.gpu_memory})])

    for title, prompts in ((", math", 12000), (", code", 17000)) if not a.prompts else (("", a.prompts),):
        hours(a, c, title, prompts, B, P, N, W)


def hours(a, c, title: str, prompts: int, B: int, P: int, N: int, W: int):
    kept, hour = KEPT.get(prompts, round(0.42 * prompts)), 3600 * a.gpu_tflops * 1e12
    step = lambda n, **own: train_flops(c, B, P + N, B * n, **own)
    answer = lambda length: length * forward_flops(c, 1, P + length, length / 2)         # one forward a token
    rows = [["decode, length 256", answer(N) / 1e12, prompts, prompts * answer(N) / hour / a.ranks]]
    for name, samples, flops in (("sft, ground truth", prompts, step(N / 2)), ("sft, own answers", kept, step(N / 2)),
                                 ("dinfer", kept, step(N / 3)), ("tabom", kept, step(W)),
                                 ("t3d", kept, step(N / 2) + forward_flops(c, B, P + N, B * N / 2)),
                                 ("tabom --grad-checkpoint *", kept, step(W, checkpoint=True)),
                                 ("tabom --rank-context exact *", kept, W * B * train_flops(c, 1, P + N, 2))):
        steps = 5 * -(-samples // (B * a.ranks))
        rows.append([f"train {name}: 5 epochs of {samples:,}", flops / 1e12, steps, steps * flops / hour])
    for name, (count, *lengths) in QUESTIONS.items():    # gsm8k also at 2 tokens a step: half the forwards again
        flops, count = (1.5 if name == "gsm8k" else 1) * answer(lengths[a.plan == "llada"]), 6 * count
        rows.append([f"evaluate {name}: base and 5 methods", flops / 1e12, count, count * flops / hour / a.ranks])
    count = 6 * (256 + 64 * a.ranks)                     # every rank looks at all 64 trajectories again
    rows.append(["evaluate TDS: base and 5 methods", answer(N) / 1e12, count, count * answer(N) / hour / a.ranks])
    rows.append(["sum, without *", "", "", sum(r[3] for r in rows if "*" not in r[0])])
    table(f"Estimate{title}, {a.ranks} GPUs that achieve {a.gpu_tflops:g} TFLOP/s each; no answer ends early",
          ["", "TFLOP, of a step on one GPU or an answer", "steps or answers", "hours"], rows)


def main():
    global clock
    p = Flags(__doc__)
    g = p.add_argument_group("measuring")
    g.add_argument("--only", nargs="+", choices=["check", "train", "decode", "start"], help="some parts (default: all)")
    g.add_argument("--quick", action="store_true", help="3 layers, short answers: to see that it runs")
    g.add_argument("--full", action="store_true", help="decode 64 prompts, length 256, one token a step: hours")
    g.add_argument("--repeats", type=int, default=2, help="rounds, of which the best counts (default 2)")
    g.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                   help="cpu: processor time, on a busy machine, with OMP_NUM_THREADS=1 (default wall)")
    g.add_argument("--json", help="also write the figures to this file")
    g = p.add_argument_group("estimating")
    g.add_argument("--plan", choices=list(REAL), help="what the paper's experiment costs; nothing is run")
    g.add_argument("--gpu-memory", type=float, default=80, help="GB (default 80)")
    g.add_argument("--gpu-tflops", type=float, default=400, help="achieved in bf16, not peak (default 400: an H100)")
    g.add_argument("--ranks", type=int, default=8, help="GPUs (default 8)")
    g.add_argument("--prompts", type=int, default=0, help="one experiment of so many (default: the paper's two)")
    a = p.parse_args()
    if min(a.repeats, a.ranks, a.prompts + 1) < 1 or not all(0 < x < math.inf for x in (a.gpu_memory, a.gpu_tflops)):
        stop(f"--repeats {a.repeats} --ranks {a.ranks} --prompts {a.prompts} --gpu-memory {a.gpu_memory} "
             f"--gpu-tflops {a.gpu_tflops}: repeats and ranks are at least 1, prompts not negative, the others above 0")
    if a.json and (Path(a.json).is_dir() or not Path(a.json).absolute().parent.is_dir()):
        stop(f"--json {a.json}: is a folder, or its folder is not there; give a file in an existing one")
    clock = time.process_time if a.clock == "cpu" else time.perf_counter
    if a.plan:
        plan(a)
    else:
        cores = f"{torch.get_num_threads()} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        print(f"{datetime.date.today()}, {platform.machine()}, {cores}, torch {torch.__version__}, {tabom.commit()}"
              f"{', --quick' * a.quick}")
        for name in a.only or ("check", "train", "decode", "start"):
            globals()[f"bench_{name}"](a)
        met = lambda value, bound, target: "met" if (value >= target) == (bound == "at least") else "missed"
        table("Targets" + ", not comparable: --quick has other sizes" * a.quick,
              ["", "measured", " ", "target", "  "], [[*g, met(*g[1:])] for g in goals])
    if a.json:
        write_whole(a.json, json.dumps(report, indent=1).encode())


if __name__ == "__main__":
    with safely("nothing was to be kept; run the same command again"):
        main()
