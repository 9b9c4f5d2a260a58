"""What a user pays: speed, memory and start-up as ratios, measured in one run on the CPU, and estimates for the real models.

    python bench.py                          # every measurement, about 12 minutes on two quiet cores
    python bench.py --quick                  # the same rows at smaller sizes, 2 minutes: to see that it runs
    python bench.py --only train decode      # some parts; --full decodes 64 prompts one token a step: hours
    python bench.py --plan dream             # or llada: parameters, memory, FLOPs, hours, from the configuration alone

"Ours" is tabom.py and decode.py as they stand; "plain" stands here, compactly, after what the authors of the paper and of
the models publish, on the same Model. Variants take turns on the same data and the best of the repeats counts: noise moves
a ratio less than a time. Letters: B batch, T length, N canvas, P prompt, V vocabulary, W window, n scored positions.
"""
import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import lora
import tabom
import toy
from data import safely, write_whole
from decode import decode
from model import FAMILIES, Model, load, stop

# Dream's depth, MLP ratio 18944/3584 and vocabulary ratio 152064/3584 at width 256; 36 M with a tied head, which computes
# the same. Dream's 7 query heads to one k, v head do not divide 256; 8 do. The toy does the toy's work.
DREAM = dict(model_type="Dream", layers=28, width=256, heads=8, kv_heads=1, mlp=1352, vocab=10864, tied=True)
TOY = {k: toy.CONFIG[FAMILIES["llada"]["fields"][k]] for k in ("layers", "width", "heads", "kv_heads", "mlp", "tied")}
SHAPES = {"Dream-shaped": DREAM, "Dream-vocabulary": dict(DREAM, layers=4, vocab=152064),
          "toy": dict(TOY, model_type="llada", vocab=len(toy.VOCAB))}
WORK = dict(batch=4, prompt=(40, 250), N=256, W=32)
REAL = {"dream": dict(model_type="Dream", layers=28, width=3584, heads=28, kv_heads=4, mlp=18944, vocab=152064),
        "llada": dict(model_type="llada", layers=32, width=4096, heads=32, kv_heads=32, mlp=12288, vocab=126464)}
QUESTIONS = dict(                       # of each benchmark: how many, and the paper's lengths for Dream and LLaDA
    gsm8k=(1319, 256, 512), math500=(500, 512, 512), mbpp=(500, 1024, 256), humaneval=(164, 768, 512), ifeval=(541, 512, 512))
KEPT = {12000: 5100, 17000: 3800}       # valid trajectories of the paper's math and code prompts
MASK, EOS = 0, 1
clock, report, goals = time.perf_counter, {}, []        # report: for --json; goals: (what, value, "at least", target)


# ---------------------------------------------------------------- what is computed, by arithmetic

def weights(c, r: int = 16):
    """Of one layer: attention, of it q k v, MLP, LoRA on q and v."""
    kv = c.width // c.heads * c.kv_heads
    return 2 * c.width * (c.width + kv), c.width * (c.width + 2 * kv), 3 * c.width * c.mlp, r * (3 * c.width + kv)


def forward_flops(c, B, T, n) -> float:
    """B rows of T tokens, n positions scored: the last MLP and the head see those alone."""
    attn, _, mlp, _ = weights(c)
    linear = B * T * (c.layers * attn + (c.layers - 1) * mlp) + n * (mlp + c.width * c.vocab)
    return 2 * linear + 4 * c.layers * B * T * T * c.width


def train_flops(c, B, T, n, checkpoint=False, flash=True, r: int = 16) -> float:
    """A frozen weight wants the gradient of its input alone, the first q, k, v not even that; a LoRA matrix its own as well.
    Flash attention computes its scores again in the backward pass."""
    _, qkv, _, adapter = weights(c, r)
    once, scores = forward_flops(c, B, T, n), 4 * c.layers * B * T * T * c.width
    return once * (3 if checkpoint else 2) + scores * (1.5 if flash else 1) + B * T * (6 * c.layers * adapter - 2 * qkv)


def kept_bytes(c, tokens, n, size, checkpoint=False, r: int = 16) -> float:
    """Kept for the backward pass. Of a token in a layer: both norms' inputs in fp32; h, q, k, v, attention's output, gate,
    silu(gate) and up at `size` bytes; two low-rank products. Of a scored position: log p in fp32."""
    attn, mlp = 4 * (c.width + c.heads) + size * (5 * c.width + 2 * r), 4 * c.width + size * 3 * c.mlp
    last = n * (mlp + 4 * (c.width + c.vocab))
    if checkpoint:                                       # every layer's input; one layer at a time is computed again
        return tokens * (c.layers * size * c.width + attn + mlp) + last
    return tokens * (c.layers * attn + (c.layers - 1) * mlp) + last


def passing_bytes(c, tokens, n, size) -> float:
    """Alive for a moment at the worst moment: the loss's copies of (n, V), or an MLP's in its backward."""
    return max((8 + size) * n * c.vocab, 4 * size * tokens * c.mlp)


# ---------------------------------------------------------------- models, data, and the training step, ours and plain

def build(shape: dict, device="cpu") -> Model:
    c = SimpleNamespace(**dict(theta=1e6, eps=1e-6, positions=4096, mask_id=MASK, eos_id=EOS, pad_id=EOS, tied=False) | shape)
    torch.manual_seed(0)
    with torch.device(device):
        return Model(c, FAMILIES[c.model_type]).eval()


def trainer(shape: dict, checkpoint=False):
    model = build(shape)
    params = lora.wrap(model)
    model.train().grad_checkpoint = checkpoint
    return model, params, torch.optim.AdamW(params, lr=2e-5, weight_decay=0.01)


def sizes(name: str, quick: bool) -> tuple[dict, dict]:
    shape, work = SHAPES[name], dict(batch=64, prompt=(toy.PROMPT,) * 2, N=toy.LENGTH, W=4) if name == "toy" else WORK
    return (dict(shape, layers=min(3, shape["layers"]), vocab=min(20000, shape["vocab"])) if quick else shape), work


def make_batches(shape: dict, work: dict, count: int) -> list[list]:
    """Batches of (record, visible, targets) as tabom.py draws them, like lengths together; `count` of 16, short to long."""
    rng, records = np.random.default_rng(0), []
    low, high = work["prompt"]
    for n in range(16 * work["batch"]):
        prompt, x0 = (rng.integers(2, shape["vocab"], size) for size in (rng.integers(low, high + 1), work["N"]))
        order = rng.permutation(work["N"])
        records.append(SimpleNamespace(id=n, prompt=prompt, ids=x0, order=order, rank=np.argsort(order)))
    order = tabom.epoch_batches(np.array([len(r.prompt) for r in records]), work["batch"], 0, 0)
    order = sorted(order, key=lambda b: len(records[b[-1]].prompt))[8 // count::16 // count]
    seeded = lambda i: np.random.default_rng([0, 0, int(i)])
    return [[(records[i], *tabom.view(records[i], "tabom", work["W"], seeded(i))) for i in b] for b in order]


def finish(params, opt):
    """The end of a step as in tabom.py's loop: one flat gradient, its norm, clip, AdamW."""
    grad = torch.cat([p.grad.flatten() for p in params])
    grad *= (1.0 / grad.norm()).clamp(max=1.0)
    for p, g in zip(params, grad.split([p.numel() for p in params]), strict=True):
        p.grad = g.view_as(p)
    opt.step()
    opt.zero_grad()


def our_loss(model, batch, context="start", chunk=64):
    a = SimpleNamespace(method="tabom", lam=1.0, gamma=0.2, rank_context=context, exact_chunk=chunk)
    return tabom.batch_loss(model, batch, a, MASK, "cpu")[0].mean()


def our_step(model, params, opt, batch, *exact) -> float:
    loss = our_loss(model, batch, *exact)
    loss.backward()
    finish(params, opt)
    return loss.item()


def plain_step(model, params, opt, batch) -> float:
    """The release's way: prompts padded to 256, attention by matrix products, the head over every position, fp32 softmax
    with 1e-10 inside the log over every response position, a loop over samples with a matrix of pairs each."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    B, N = len(batch), len(batch[0][0].ids)
    P = 256 if N == WORK["N"] else len(batch[0][0].prompt)
    ids, real = torch.full((B, P + N), EOS), torch.zeros(B, P + N, dtype=torch.bool)
    x0, window = torch.from_numpy(np.stack([r.ids for r, _, _ in batch])), torch.zeros(B, N, dtype=torch.bool)
    for b, (r, visible, targets) in enumerate(batch):
        real[b, P - len(r.prompt):], window[b, targets] = True, True
        ids[b, P - len(r.prompt):P] = torch.from_numpy(r.prompt)
        ids[b, P:] = torch.where(torch.from_numpy(visible), x0[b], MASK)
    with sdpa_kernel(SDPBackend.MATH):
        logits = torch.nan_to_num(model(ids, real).float())[:, P:]                       # (B, N, V)
    ce = F.cross_entropy(logits[window], x0[window])
    p = logits.softmax(-1)
    h = -(p * torch.log(p + 1e-10)).sum(-1)                                              # (B, N)
    ranks = []
    for b, (_, _, targets) in enumerate(batch):
        e = h[b, torch.from_numpy(targets)]                                              # (W,)
        pairs = F.relu(e[:, None] - e[None, :] + 0.2)                                    # (W, W)
        ranks.append(pairs[torch.ones_like(pairs, dtype=torch.bool).triu(1)].mean())
    loss = ce + torch.stack(ranks).mean()
    loss.backward()
    finish(params, opt)
    return loss.item()


def bare_step(model, batch):
    """The LoRA model alone on the same tokens: forward, and backward of a made-up gradient."""
    ids, real, at, *_ = tabom.collate([(r.prompt, r.ids, v, t) for r, v, t in batch], MASK, "cpu")
    g = torch.full((int(at.sum()), model.config.vocab), 1e-6)
    return lambda: model(ids, real, at).backward(g)


# ---------------------------------------------------------------- decoding, ours and plain

class Scripted(torch.nn.Module):
    """The model, with one logit raised a position, or random weights would tie everywhere: a token of its own, and EOS from
    `ends` on. A prompt's first token is its number + 2. Counts its forwards and their time."""
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
        return logits if at is not None else logits.view(*ids.shape, -1)


@torch.no_grad()
def plain_decode(model, prompts: list[tuple], s):
    """The published loop: one batch padded to the longest prompt, head and softmax everywhere, every step to the last."""
    P, B = max(len(p) for _, p in prompts), len(prompts)
    x, real = torch.full((B, P + s.length), s.mask_id), torch.ones(B, P + s.length, dtype=torch.bool)
    for b, (_, p) in enumerate(prompts):
        x[b, P - len(p):P], real[b, :P - len(p)] = torch.tensor(p), False
    for end in range(P + s.block, P + s.length + 1, s.block):
        for _ in range(s.block // s.tokens_per_step):
            logits = model(x, real)                                                      # (B, T, V)
            p = logits.float().softmax(-1)
            sure, token = p.max(-1)                                                      # (B, T)
            score = sure if s.score == "confidence" else (p * torch.log(p + 1e-10)).sum(-1)
            score = score.masked_fill((x != s.mask_id) | (torch.arange(P + s.length) >= end), -torch.inf)
            best = score.topk(s.tokens_per_step).indices                                 # (B, k)
            x.scatter_(1, best, token.gather(1, best))
    return x[:, P:].numpy()


def decoding(length: int, k: int, **own):
    return SimpleNamespace(**dict(
        length=length, block=length, tokens_per_step=k, threshold=None, schedule="even", score="entropy", temperature=0.0, top_p=1.0,
        top_k=0, suppress_eos=False, clean=False, seed=0, model="bench", mask_id=MASK, end_ids=[EOS]) | own)


# ---------------------------------------------------------------- measuring and printing

def race(variants: dict, repeats: int) -> dict[str, float]:
    """{name: seconds}, the best of `repeats`; in every round each variant has its turn."""
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(repeats):
        for name, f in variants.items():
            start = clock()
            f()
            best[name] = min(best[name], clock() - start)
    return best


def high_water() -> float:
    """Peak MB of this process. Not ru_maxrss: a child inherits its parent's."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1e3


def child(name: str, kind: str, chunk: str, quick: str):
    """Prints the peak MB of one training step above what its process had before: weights, a small step's buffers."""
    shape, work = sizes(name, quick == "True")
    state, batch = trainer(shape, kind == "checkpoint"), make_batches(shape, work, 1)[0]
    our_step(*state, make_batches(shape, dict(batch=1, prompt=(4, 4), N=8, W=2), 1)[0])
    had = high_water()
    if kind == "plain":
        plain_step(*state, batch)
    else:
        our_step(*state, *((batch[:1], "exact", int(chunk)) if kind == "exact" else (batch,)))
    print(high_water() - had)


def peak(name: str, kind: str, quick: bool, chunk: int = 64) -> float:
    done = subprocess.run([sys.executable, __file__, "--child", name, kind, str(chunk), str(quick)], capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else stop(f"{name}, {kind}: the step failed: {done.stderr.strip()[-300:]}")


def table(title: str, columns: list[str], rows: list[list]):
    """Aligned for a README: words to the left, figures to the right."""
    report[title] = [dict(zip(columns, row, strict=True)) for row in rows]
    show = lambda v: v if isinstance(v, str) else f"{v:,.0f}" if isinstance(v, int) or v >= 100 else f"{v:.2f}" if v > 0.1 else f"{v:.2g}"
    text = [columns] + [[show(v) for v in row] for row in rows]
    width = [max(map(len, column)) for column in zip(*text, strict=True)]
    side = [str.ljust if isinstance(v, str) else str.rjust for v in rows[0]]
    print("\n" + title + "".join("\n  " + "  ".join(f(v, w) for f, v, w in zip(side, row, width, strict=True)).rstrip() for row in text), flush=True)


# ---------------------------------------------------------------- the parts

def bench_train(a):
    rows, count = [], 2 if a.quick else 4
    for name in SHAPES:
        shape, work = sizes(name, a.quick)
        state, total = trainer(shape), dict.fromkeys(("ours", "bare", "plain"), 0.0)
        still = (*state[:2], torch.optim.SGD(state[1], lr=0.0))
        for batch in make_batches(shape, work, count):
            ours, plain = our_step(*still, batch), plain_step(*still, batch)             # warms up, too
            assert abs(ours - plain) < 1e-3 * plain, f"{name}: the loss is {ours} ours, {plain} plain"
            best = race({"ours": lambda: our_step(*state, batch), "bare": bare_step(state[0], batch),
                         "plain": lambda: plain_step(*state, batch)}, a.repeats)
            total = {k: total[k] + best[k] for k in total}
        mb = [peak(name, kind, a.quick) for kind in ("ours", "plain")]
        rows.append([name, *(count * work["batch"] / total[k] for k in ("ours", "plain")), total["plain"] / total["ours"],
                     total["ours"] / total["bare"], *mb, mb[1] / mb[0]])
    table("Training step, TABOM: batch 4, prompts 40-250, response 256, W 32 (toy: 64, 9, 26, 4); the same loss, asserted",
          ["shape", "ours, samples/s", "plain", "plain/ours", "ours/bare model", "ours, MB", "plain, MB", "plain/ours"], rows)
    goals.extend([("training, Dream-shaped: times as fast as plain", rows[0][3], "at least", 2.5),
                  ("training, Dream-vocabulary: times as fast as plain", rows[1][3], "at least", 5.0),
                  ("training, Dream-vocabulary: times less memory above the weights", rows[1][7], "at least", 8.0),
                  ("training, Dream-shaped: of the bare LoRA model's time", rows[0][4], "at most", 1.1)])

    (shape, work), name = sizes("Dream-shaped", a.quick), "Dream-shaped"
    state, again, batch = trainer(shape), trainer(shape, True), make_batches(shape, work, 1)[0]
    best = race({"ours": lambda: our_step(*state, batch), "again": lambda: our_step(*again, batch)}, a.repeats + 1)
    rows = [["batch of 4", best["ours"], 1.0, rows[0][5]],
            ["batch of 4, --grad-checkpoint", best["again"], best["again"] / best["ours"], peak(name, "checkpoint", a.quick)]]
    bare = bare_step(state[0], batch[:1])
    for chunk in (64, 8, 2):
        best = race({"bare": bare, "exact": lambda: our_step(*state, batch[:1], "exact", chunk)} | {f"bare {i}": bare for i in range(4)}, 1)
        exact, bares = best.pop("exact"), min(best.values()) * work["W"]
        rows.append([f"one sample, exact, --exact-chunk {chunk}", exact, exact / bares, peak(name, "exact", a.quick, chunk)])
    table("Dream-shaped: what saves memory, and exact entropies (x: of the first row; exact: of W bare forward-backwards)",
          ["step", "s", "x", "MB above weights"], rows)
    goals.append(("--rank-context exact: of W forward-backwards", rows[2][2], "at most", 1.1))


def bench_decode(a):
    count, N, k, batch = (64, 256, 1, 16) if a.full else (8, 64, 8, 2) if a.quick else (32, 256, 32, 8)
    shape, rng, rows = sizes("Dream-shaped", a.quick)[0], np.random.default_rng(0), []
    prompts = [(i, [i + 2, *rng.integers(2, shape["vocab"], rng.integers(40, 251) - 1).tolist()]) for i in range(count)]
    bare, ends = build(shape), rng.permutation(np.linspace(N / 8, 7 * N / 8, count).astype(int))
    for title, ends, s in (("no EOS, by entropy", np.full(count, N), decoding(N, k)),
                           ("answers end at half, by confidence, 8 blocks", ends, decoding(N, min(k, N // 8), block=N // 8, score="confidence", clean=True)),
                           ("no EOS, Dream's temperature 0.1, top-p 0.9", np.full(count, N), decoding(N, k, temperature=0.1, top_p=0.9))):
        model, pads, start = Scripted(bare, ends, N), np.zeros(2), clock()
        on_step = lambda live, T: np.add(pads, (sum(T - N - len(r.ids) for r in live), T * len(live)), out=pads)
        done = {row.key: row for row in decode(model, prompts, s, batch, on_step)}
        ours, inside, forwards = clock() - start, model.seconds, model.forwards
        needed = -(-sum(r.step for r in done.values()) // batch)
        rows.append([title, ours, "", "", ours / inside, forwards, needed, 100 * pads[0] / pads[1], ""])
        if s.temperature == 0:
            start = clock()
            x = plain_decode(model, prompts, s)
            same = sum(bool((done[i].canvas[:e + 1] == x[i][:e + 1]).all()) for i, e in enumerate(ends))
            rows[-1][2:4], rows[-1][8] = [f"{clock() - start:,.1f}", (clock() - start) / ours], f"{same} of {count}"
            if same < 0.95 * count:                      # a tie to the last bit may fall either way
                stop(f"{title}: {count - same} of {count} rows differ from the plain loop; decode.py is broken")
    table(f"Decoding, Dream-shaped: {count} prompts of 40-250 tokens, length {N}, {k} tokens a step, batch {batch}",
          ["", "ours, s", "plain, s", "plain/ours", "ours/its forwards", "forwards", "needed", "padding, %", "same tokens"], rows)
    goals.extend([("decoding, no EOS: times as fast as plain", rows[0][3], "at least", 1.6),
                  ("decoding, answers end at half: times as fast as plain", rows[1][3], "at least", 2.5),
                  ("decoding: of the time of the forwards it needs", max(r[4] * r[5] / r[6] for r in rows), "at most", 1.1),
                  ("decoding: % of positions that are padding", max(r[7] for r in rows), "at most", 10.0)])

    bare, rows, prompts = build(dict(DREAM, layers=4)), [], [(i, [i + 2, *range(2, 101)]) for i in range(16)]
    for N, batch, steps in ((64, 8, 8), (128, 8, 8), (256, 8, 8), (64, 4, 8), (64, 16, 8), (64, 8, 16), (64, 8, 32)):
        model = Scripted(bare, np.full(16, N), N)
        s = race({"": lambda: list(decode(model, prompts, decoding(N, N // steps), batch))}, a.repeats)[""]
        flops = sum(forward_flops(bare.config, 16, 100 + N, 16 * (N - i * N // steps)) for i in range(steps))
        first = (s, flops) if not rows else first
        rows.append([N, batch, steps, s, s / first[0], flops / first[1]])
    table("Decoding cost: 4 layers, 16 prompts of 100 tokens", ["length", "batch", "steps", "s", "x, measured", "x, by arithmetic"], rows)


def bench_start(a):
    here = Path(__file__).resolve().parent
    jobs = {"import torch alone": ("-c", "import torch"), "import tabom": ("-c", "import tabom")}
    jobs |= {f"{f} --help": (f, "--help") for f in ("tabom.py", "decode.py", "eval.py", "toy.py", "lora.py", "bench.py")}
    run = lambda words: subprocess.run([sys.executable, *words], cwd=here, capture_output=True, check=True)
    best = {k: v for k, v in race({name: lambda words=words: run(words) for name, words in jobs.items()}, a.repeats).items()}
    table("Start-up", ["", "s"], list(map(list, best.items())))
    goals.append(("slowest import or --help, s", max(best.values()), "at most", 2.0))
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.torch import save_file
        model, fields = build(dict(SHAPES["Dream-vocabulary"], tied=False, vocab=20000 if a.quick else 152064)), FAMILIES["Dream"]["fields"]
        config = {theirs: getattr(model.config, ours) for ours, theirs in fields.items()}
        write_whole(f"{folder}/config.json", json.dumps(dict(config, model_type="Dream")).encode())
        file = Path(folder) / "model.safetensors"
        save_file(model.state_dict(), file)
        size = file.stat().st_size / 1e6
        best = race({"plain read of the file": file.read_bytes, "load, every weight touched":
                     lambda: [p.view(torch.int32)[..., ::512].sum() for p in load(folder).parameters()]}, a.repeats + 1)
    table(f"Loading {size:,.0f} MB that the system has cached", ["", "MB/s"], [[k, size / v] for k, v in best.items()])


def bench_check(a):
    """The arithmetic behind --plan against small shapes: torch's own count of FLOPs, bytes kept, the peak of a process."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    rows = []
    for name in ("Dream-shaped", "Dream-vocabulary"):
        shape, work = sizes(name, a.quick)
        state, batch, kept = trainer(shape), make_batches(shape, work, 1)[0], {}
        (model, *_), (B, N, W) = state, (work[k] for k in ("batch", "N", "W"))
        c, T = model.config, N + max(len(r.prompt) for r, _, _ in batch)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):    # it knows no flash attention on a CPU
            our_step(*state, batch)
        rows.append([name, "training step, GFLOP", train_flops(c, B, T, B * W, flash=False) / 1e9, counter.get_total_flops() / 1e9])
        keep = lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = our_loss(model, batch)
        for p in model.parameters():
            kept.pop(p.untyped_storage().data_ptr(), None)
        rows.append([name, "kept for the backward pass, MB", kept_bytes(c, B * T, B * W, 4) / 1e6, sum(kept.values()) / 1e6])
        del loss
        for kind in ("ours", "checkpoint"):
            sizes_ = B * T, B * W, 4
            rows.append([name, f"peak above the weights, MB, {kind}", (kept_bytes(c, *sizes_, kind != "ours") + passing_bytes(c, *sizes_)) / 1e6,
                         peak(name, kind, a.quick)])
    rows = [[*r, r[2] / r[3]] for r in rows]
    table("The arithmetic behind --plan, on small shapes in fp32", ["shape", "", "formula", "measured", "formula/measured"], rows)
    goals.append(("--plan's formulas: the worst of formula / measured, either way", max(max(r[4], 1 / r[4]) for r in rows), "at most", 1.15))


# ---------------------------------------------------------------- at the real size

def plan(a):
    model = build(REAL[a.plan], "meta")
    c, B, P, N, W = model.config, 4, 145, 256, 32                                        # prompts: 145 tokens on average, 250 at most
    total = sum(p.numel() for p in model.parameters())
    adapter = sum(p.numel() for p in lora.wrap(model))
    print(f"{a.plan}: {total:,} parameters, LoRA r 16 on q and v {adapter:,}. Everything below is an estimate.")
    fixed, tokens, n = [2 * total, 20 * adapter, 1e9], B * (250 + N), B * W
    parts = [[*fixed, kept_bytes(c, tokens, n, 2, again), passing_bytes(c, tokens, n, 2)] for again in (False, True)]
    names = ["weights, bf16: 2 bytes a parameter", "LoRA: fp32 weights, gradients (twice), AdamW: 20 bytes a parameter", "CUDA context and libraries: assumed",
             f"kept for the backward pass, {tokens:,} tokens", "passing: the loss's copies, or an MLP's"]
    table("Estimate: GB a GPU, batch 4, prompts of 250 tokens, response 256", ["", "as it is", "--grad-checkpoint"],
          [[name, *(p[i] / 1e9 for p in parts)] for i, name in enumerate(names)] + [["sum", *(sum(p) / 1e9 for p in parts)]] +
          [[f"fits {gb:g} GB", *("yes" if sum(p) < 0.95 * gb * 1e9 else "no" for p in parts)] for gb in sorted({24, 40, 80, a.gpu_memory})])
    print("  kept: tokens x layers x (8 C + 4 H + 2 (5 C + 3 M + 2 r)) + n (4 C + 4 V); with checkpoints: tokens x 2 C x layers + one layer's")

    speed = a.gpu_tflops * 1e12
    train = lambda n, **k: train_flops(c, B, P + N, B * n, **k)
    decoded = lambda length, block=0: length * forward_flops(c, 1, P + length, (block or length) / 2)
    kept = KEPT.get(a.prompts, round(0.42 * a.prompts))
    exact = B * W * train_flops(c, 1, P + N, W)
    steps = lambda samples: 5 * -(-samples // (B * a.ranks))
    rows = [[f"decode {a.prompts:,} prompts, length 256, one token a step", decoded(N) / 1e12, a.prompts, a.prompts * decoded(N) / speed / a.ranks / 3600]]
    for name, samples, flops in (("sft on ground truth", a.prompts, train(N // 2)), ("sft on its own answers", kept, train(N // 2)),
                                 ("dinfer", kept, train(N // 3)), ("t3d", kept, train(N // 2) + forward_flops(c, B, P + N, B * N // 2)),
                                 ("tabom", kept, train(W)), ("tabom, --grad-checkpoint", kept, train(W, checkpoint=True)),
                                 ("tabom, --rank-context exact", kept, exact)):
        rows.append([f"train {name}: 5 epochs of {samples:,}", flops / 1e12, steps(samples), steps(samples) * flops / speed / 3600])
    for name, (count, *lengths) in QUESTIONS.items():                                    # 1 and 2 tokens a step: 1.5 times the forwards
        flops = 1.5 * decoded(lengths[a.plan == "llada"])
        rows.append([f"evaluate {name}, base and five adapters, 1 and 2 tokens a step", flops / 1e12, 6 * count, 6 * count * flops / speed / a.ranks / 3600])
    table(f"Estimate: hours on {a.ranks} GPUs at {a.gpu_tflops:g} TFLOP/s each (achieved, not peak); answers that end early cost less",
          ["", "TFLOP a step or answer", "steps or answers", "hours"], [*rows, ["all, without the last two tabom rows", "", "", sum(r[3] for r in rows) - rows[6][3] - rows[7][3]]])


def main():
    global clock
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    g = p.add_argument_group("measuring")
    g.add_argument("--only", nargs="+", choices=["train", "decode", "start", "check"], help="some parts (default: all)")
    g.add_argument("--quick", action="store_true", help="3 layers, short answers: to see that it runs")
    g.add_argument("--full", action="store_true", help="decode 64 prompts at 256 steps: hours on a CPU")
    g.add_argument("--repeats", type=int, default=3, help="rounds, of which the best counts (default 3)")
    g.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for a busy machine; use one thread")
    g.add_argument("--json", help="also write the figures to this file")
    g = p.add_argument_group("estimating")
    g.add_argument("--plan", choices=list(REAL), help="memory, FLOPs and hours of the paper's experiment, nothing is run")
    g.add_argument("--gpu-memory", type=float, default=80, help="GB (default 80)")
    g.add_argument("--gpu-tflops", type=float, default=400, help="that a GPU achieves in bf16 (default 400, an H100's 40 %%)")
    g.add_argument("--ranks", type=int, default=8, help="GPUs (default 8)")
    g.add_argument("--prompts", type=int, default=12000, help="to decode: the paper's 12000 in math, 17000 in code (default 12000)")
    g.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    a = p.parse_args()
    if min(a.repeats, a.ranks, a.prompts) < 1 or not min(a.gpu_memory, a.gpu_tflops) > 0:
        stop("--repeats, --ranks and --prompts are at least 1; --gpu-memory and --gpu-tflops above 0")
    if a.child:
        return child(*a.child)
    clock = time.process_time if a.clock == "cpu" else time.perf_counter
    if a.plan:
        plan(a)
    else:
        print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, "
              f"commit {tabom.commit()}, load {os.getloadavg()[0]:.1f}" + ", --quick" * a.quick)
        for name in a.only or ("check", "train", "decode", "start"):
            globals()[f"bench_{name}"](a)
        table("Targets", ["", "measured", "", "target", " "], [[*g, "met" if (g[1] >= g[3]) == (g[2] == "at least") else "missed"] for g in goals])
    if a.json:
        write_whole(a.json, json.dumps(report, indent=1).encode())


if __name__ == "__main__":
    with safely("nothing was to be kept; run the same command again"):
        main()
