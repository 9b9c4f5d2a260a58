"""What a user pays: speed, memory and start-up as ratios, measured in one run on the CPU, and estimates for the real models.

    python bench.py                          # every measurement, about 12 minutes on two quiet cores
    python bench.py --quick                  # the same rows at smaller sizes, 2 minutes: to see that it runs
    python bench.py --only train decode      # some parts; --full decodes 64 prompts one token a step: hours
    python bench.py --plan dream             # or llada: parameters, memory, FLOPs, hours, from the configuration alone

"Ours" is tabom.py and decode.py as they stand; "plain" stands here, compactly, after what the authors of the paper and of
the models publish, on the same Model. Variants take turns on the same data and the best of the repeats counts: noise moves
a ratio less than a time. Letters: B batch, T length, N canvas, C width, V vocabulary, W window, n scored positions.
"""
import argparse
import datetime
import json
import os
import platform
import resource
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
from model import FAMILIES, Model, load, part, stop

# Dream's depth, MLP ratio 18944/3584 and vocabulary ratio 152064/3584 at width 256; 36 M with a tied head, which computes the
# same. Dream's 7 query heads to one k, v head do not divide 256; 8 do. The toy does the toy's work, not the 7B models'.
DREAM = dict(model_type="Dream", layers=28, width=256, heads=8, kv_heads=1, mlp=1352, vocab=10864, tied=True)
TOY = {k: toy.CONFIG[FAMILIES["llada"]["fields"][k]] for k in ("layers", "width", "heads", "kv_heads", "mlp", "tied")}
SHAPES = {"Dream-shaped": DREAM, "Dream-vocabulary": dict(DREAM, layers=4, vocab=152064),
          "toy": dict(TOY, model_type="llada", vocab=len(toy.VOCAB))}
WORK = dict(batch=4, prompt=(40, 250), N=256, W=32)
REAL = {"dream": dict(model_type="Dream", layers=28, width=3584, heads=28, kv_heads=4, mlp=18944, vocab=152064, tied=False),
        "llada": dict(model_type="llada", layers=32, width=4096, heads=32, kv_heads=32, mlp=12288, vocab=126464, tied=False)}
QUESTIONS = {                           # of each benchmark: how many, and the paper's lengths for Dream and LLaDA
    "gsm8k": (1319, 256, 512), "math500": (500, 512, 512), "mbpp": (500, 1024, 256), "humaneval": (164, 768, 512), "ifeval": (541, 512, 512)}
KEPT = {12000: 5100, 17000: 3800}       # valid trajectories of the paper's math and code prompts
MASK, EOS = 0, 1
clock, report, goals = time.perf_counter, {}, []        # report: what --json writes; goals: (what, value, bound, target)


# ---------------------------------------------------------------- what is computed, by arithmetic

def weights(c, r: int = 16):
    """Of one layer: attention, of it q k v, MLP, LoRA on q and v."""
    kv = c.width // c.heads * c.kv_heads
    return 2 * c.width * (c.width + kv), c.width * (c.width + 2 * kv), 3 * c.width * c.mlp, r * (3 * c.width + kv)


def forward_flops(c, T, n) -> float:
    """Rows of T tokens each (an array), n positions scored: the last MLP and the head see those alone."""
    attn, _, mlp, _ = weights(c)
    T = np.asarray(T, float)
    products = 2 * T.sum() * (c.layers * attn + (c.layers - 1) * mlp) + 2 * n * (mlp + c.width * c.vocab)
    return products + 4 * c.layers * c.width * (T ** 2).sum()


def train_flops(c, T, n, checkpoint=False, attention=2.5, r: int = 16) -> float:
    """A frozen weight wants the gradient of its input alone, the first q, k, v not even that; a LoRA matrix its own as well.
    Attention's backward is 2.5 forwards (flash attention recomputes; 2 if it does not)."""
    _, qkv, _, adapter = weights(c, r)
    T = np.asarray(T, float)
    scores = 4 * c.layers * c.width * (T ** 2).sum()
    return ((3 if checkpoint else 2) * forward_flops(c, T, n) + (attention - 1) * scores - 2 * T.sum() * (qkv + 2 * r * c.width)
            + 6 * T.sum() * c.layers * adapter)


def kept_bytes(c, tokens, n, size, checkpoint=False, r: int = 16) -> float:
    """Kept for the backward pass. Of a token in a layer: both norms' inputs in fp32; h, q, k, v, attention's output, gate,
    silu(gate) and up at `size` bytes; two low-rank products. Of a scored position: log p in fp32."""
    attn, mlp = 4 * (c.width + c.heads) + size * (5 * c.width + 2 * r), 4 * c.width + size * 3 * c.mlp
    last = n * 4 * (c.width + c.vocab)
    if checkpoint:                                       # every layer's input; one layer at a time is computed again
        return tokens * (c.layers * size * c.width + attn + mlp) + last
    return tokens * (c.layers * attn + (c.layers - 1) * mlp) + n * mlp + last


def passing_bytes(c, tokens, n, size) -> float:
    """Alive for a moment at the worst moment: the loss's copies of (n, V), or an MLP's in its backward."""
    return max((12 + size) * n * c.vocab, 4 * size * tokens * c.mlp)


# ---------------------------------------------------------------- models, data, and the training step, ours and plain

def build(shape: dict, device="cpu") -> Model:
    c = SimpleNamespace(theta=1e6, eps=1e-6, positions=4096, mask_id=MASK, eos_id=EOS, pad_id=EOS, **shape)
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
    for n in range(16 * work["batch"]):
        prompt, order = rng.integers(2, shape["vocab"], rng.integers(work["prompt"][0], work["prompt"][1] + 1)), rng.permutation(work["N"])
        records.append(SimpleNamespace(id=n, prompt=prompt, ids=rng.integers(2, shape["vocab"], work["N"]), order=order, rank=np.argsort(order)))
    chosen = tabom.epoch_batches(np.array([len(r.prompt) for r in records]), work["batch"], 0, 0)
    chosen = sorted(chosen, key=lambda b: len(records[b[-1]].prompt))[8 // count::16 // count]
    return [[(records[i], *tabom.view(records[i], "tabom", work["W"], np.random.default_rng([0, 0, int(i)]))) for i in b] for b in chosen]


def finish(params, opt):
    """The end of a step as in tabom.py's loop: one flat gradient, its norm, clip, AdamW."""
    grad = torch.cat([p.grad.flatten() for p in params])
    grad *= (1.0 / grad.norm()).clamp(max=1.0)
    for p, g in zip(params, grad.split([p.numel() for p in params]), strict=True):
        p.grad = g.view_as(p)
    opt.step()
    opt.zero_grad()


def our_step(model, params, opt, batch, context="start", chunk=64) -> float:
    a = SimpleNamespace(method="tabom", lam=1.0, gamma=0.2, rank_context=context, exact_chunk=chunk)
    loss = tabom.batch_loss(model, batch, a, MASK, "cpu")[0].mean()
    loss.backward()
    finish(params, opt)
    return loss.item()


def plain_step(model, params, opt, batch) -> float:
    """The release's way: prompts padded to 256, attention by matrix products, the head over every position, fp32 softmax with
    1e-10 inside the log over every response position, a loop over samples with a matrix of pairs each."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    B, N = len(batch), len(batch[0][0].ids)
    P = 256 if N == WORK["N"] else len(batch[0][0].prompt)
    ids, real = torch.full((B, P + N), EOS), torch.zeros(B, P + N, dtype=torch.bool)
    x0, window = torch.from_numpy(np.stack([r.ids for r, _, _ in batch])), torch.zeros(B, N, dtype=torch.bool)
    for b, (r, visible, targets) in enumerate(batch):
        real[b, P - len(r.prompt):], window[b, targets] = True, True
        ids[b, P - len(r.prompt):P], ids[b, P:] = torch.from_numpy(r.prompt), torch.where(torch.from_numpy(visible), x0[b], MASK)
    with sdpa_kernel(SDPBackend.MATH):
        logits = torch.nan_to_num(model(ids, real).float())[:, P:]                       # (B, N, V)
    ce = F.cross_entropy(logits[window], x0[window])
    p = logits.softmax(-1)
    h = -(p * torch.log(p + 1e-10)).sum(-1)                                              # (B, N)
    ranks = []
    for b, (_, _, targets) in enumerate(batch):
        e = h[b, torch.from_numpy(targets)]                                              # (W,)
        ranks.append(F.relu(e[:, None] - e[None, :] + 0.2)[torch.ones(len(e), len(e), dtype=torch.bool).triu(1)].mean())
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
    """The model, with one logit a position raised so that it has an answer: its own token, and EOS from `ends` on. A prompt's
    first token is its number + 2. Without it random weights tie everywhere. Counts forwards and their time."""
    def __init__(self, model, ends: list[int], N: int):
        super().__init__()
        rng = np.random.default_rng(1)
        self.model, self.seconds, self.forwards = model, 0.0, 0
        token = np.where(np.arange(N) < np.array(ends)[:, None], rng.integers(2, model.config.vocab, (len(ends), N)), EOS)
        raised = np.stack([rng.permutation(np.linspace(7, 12, N)) for _ in ends])        # surer and less sure places
        self.token, self.raised = torch.from_numpy(token), torch.from_numpy(raised).float()

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
    for stop_at in range(P + s.block, P + s.length + 1, s.block):
        for _ in range(s.block // s.tokens_per_step):
            logits = model(x, real)                                                      # (B, T, V)
            p = logits.float().softmax(-1)
            token = logits.argmax(-1)                                                    # (B, T)
            score = p.gather(-1, token[..., None])[..., 0] if s.score == "confidence" else (p * torch.log(p + 1e-10)).sum(-1)
            score = score.masked_fill((x != s.mask_id) | (torch.arange(P + s.length) >= stop_at), -torch.inf)
            best = score.topk(s.tokens_per_step).indices                                 # (B, k)
            x.scatter_(1, best, token.gather(1, best))
    return x[:, P:]


def decoding(length: int, k: int, block: int = 0, **own):
    return SimpleNamespace(**dict(dict(length=length, block=block or length, tokens_per_step=k, threshold=None, schedule="even", score="entropy",
                                       temperature=0.0, top_p=1.0, top_k=0, suppress_eos=False, clean=False, seed=0, model="bench",
                                       mask_id=MASK, end_ids=[EOS]), **own))


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


def child(name: str, kind: str, chunk: int, quick: bool):
    """Prints the peak bytes above the weights of one training step: what the system gave this process beyond what it had
    after a small step (libraries keep buffers of their own)."""
    shape, work = sizes(name, quick)
    state, batch = trainer(shape, kind == "checkpoint"), make_batches(shape, work, 1)[0]
    our_step(*state, make_batches(shape, dict(batch=1, prompt=(4, 4), N=8, W=2), 1)[0])
    had = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plain_step(*state, batch) if kind == "plain" else our_step(*state, batch[:1], "exact", chunk) if kind == "exact" else our_step(*state, batch)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - had) * (1 if sys.platform == "darwin" else 1024))


def peak(name: str, kind: str, quick: bool, chunk: int = 64) -> float:
    done = subprocess.run([sys.executable, __file__, "--child", name, kind, str(chunk), str(int(quick))], capture_output=True, text=True)
    return int(done.stdout) / 1e6 if done.returncode == 0 else stop(f"{name}, {kind}: the step failed, {done.stderr.strip()[-200:]}")


def table(title: str, columns: list[str], rows: list[list]):
    """Aligned for a README: words to the left, figures to the right."""
    report[title] = [dict(zip(columns, row, strict=True)) for row in rows]
    show = lambda v: v if isinstance(v, str) else f"{v:,.0f}" if isinstance(v, int) or v >= 100 else f"{v:.2f}" if v >= 0.1 else f"{v:.2g}"
    text = [columns] + [[show(v) for v in row] for row in rows]
    width = [max(map(len, column)) for column in zip(*text, strict=True)]
    print(f"\n{title}")
    for row in text:
        print("  " + "  ".join(v.ljust(w) if isinstance(rows[0][i], str) else v.rjust(w) for i, (v, w) in enumerate(zip(row, width, strict=True))).rstrip(),
              flush=True)


# ---------------------------------------------------------------- the four parts

def bench_train(a):
    rows, count = [], 2 if a.quick else 4
    for name in SHAPES:
        shape, work = sizes(name, a.quick)
        state, batches, total = trainer(shape), make_batches(shape, work, count), dict.fromkeys(("ours", "bare", "plain"), 0.0)
        still = torch.optim.SGD(state[1], lr=0.0)
        for batch in batches:
            ours, plain = our_step(*state[:2], still, batch), plain_step(*state[:2], still, batch)   # warms up, too
            assert abs(ours - plain) < 1e-3 * plain, f"{name}: the loss is {ours} ours, {plain} plain"
            best = race({"ours": lambda: our_step(*state, batch), "bare": bare_step(state[0], batch), "plain": lambda: plain_step(*state, batch)}, a.repeats)
            total = {k: total[k] + best[k] for k in total}
        ours, plain = peak(name, "ours", a.quick), peak(name, "plain", a.quick)
        speed = {k: count * work["batch"] / v for k, v in total.items()}
        rows.append([name, speed["ours"], speed["plain"], speed["ours"] / speed["plain"], speed["bare"] / speed["ours"], ours, plain, plain / ours])
    table("Training step, TABOM: batch 4, prompts 40-250, response 256, W 32 (toy: 64, 9, 26, 4); the same loss, asserted",
          ["shape", "ours, samples/s", "plain", "plain / ours, time", "ours / bare model", "ours, MB", "plain, MB", "plain / ours, MB"], rows)

    name = "Dream-shaped"
    (shape, work), rows = sizes(name, a.quick), []
    state = trainer(shape)
    batch = make_batches(shape, work, 1)[0]

    def step(checkpoint):
        state[0].grad_checkpoint = checkpoint
        our_step(*state, batch)
        state[0].grad_checkpoint = False
    best = race({"ours": lambda: step(False), "checkpoint": lambda: step(True)}, a.repeats)
    rows = [[f"batch of {work['batch']}", best["ours"], 1.0, peak(name, "ours", a.quick)],
            ["  with --grad-checkpoint", best["checkpoint"], best["checkpoint"] / best["ours"], peak(name, "checkpoint", a.quick)]]
    one = race({"bare": bare_step(state[0], batch[:1])}, 3 * a.repeats)["bare"] * work["W"]
    rows.append(["W bare forward-backwards of one sample", one, 1.0, ""])
    for chunk in (64, 8, 2):
        seconds = race({"exact": lambda: our_step(*state, batch[:1], "exact", chunk)}, a.repeats)["exact"]
        rows.append([f"  exact, --exact-chunk {chunk}", seconds, seconds / one, peak(name, "exact", a.quick, chunk)])
    table("Dream-shaped: what saves memory, what exact entropies cost (above the weights)", ["step", "s", "x", "MB"], rows)
    (_, _, _, faster, bare, *_), (_, _, _, faster2, *_, less), *_ = list(map(lambda r: list(r.values()), next(iter(report.values()))))
    goals.extend([("training, Dream-shaped: times as fast as plain", faster, "at least", 2.5),
                  ("training, Dream-vocabulary: times as fast as plain", faster2, "at least", 5.0),
                  ("training, Dream-vocabulary: times less memory", less, "at least", 8.0),
                  ("training, Dream-shaped: of the bare LoRA model's time", bare, "at most", 1.1),
                  ("--rank-context exact: of W forward-backwards", rows[3][2], "at most", 1.1)])


def bench_decode(a):
    count, N, k, batch = (64, 256, 1, 16) if a.full else (8, 64, 8, 4) if a.quick else (32, 256, 32, 8)
    shape, rng, rows = sizes("Dream-shaped", a.quick)[0], np.random.default_rng(0), []
    prompts = [(i, [i + 2, *rng.integers(2, shape["vocab"], rng.integers(40, 251) - 1).tolist()]) for i in range(count)]
    bare, half = build(shape), np.linspace(N / 8, 7 * N / 8, count).astype(int)
    for title, ends, s in (("no EOS, entropy", [N] * count, decoding(N, k)),
                           ("answers end at half, 8 blocks", rng.permutation(half), decoding(N, min(k, N // 8), N // 8, score="confidence", clean=True)),
                           ("no EOS, Dream's T 0.1, top-p 0.9", [N] * count, decoding(N, k, temperature=0.1, top_p=0.9))):
        model, seen, done = Scripted(bare, ends, N), np.zeros(2), {}
        on_step = lambda live, T: seen.__iadd__((sum(T - N - len(r.ids) for r in live), T * len(live)))
        start = clock()
        done = {row.key: row for row in decode(model, prompts, s, batch, on_step)}
        ours, inside, forwards = clock() - start, model.seconds, model.forwards
        needed = -(-sum(len(np.unique(r.order[r.order >= 0])) for r in done.values()) // batch)
        plain, same = "", ""
        if s.temperature == 0:
            start = clock()
            x = plain_decode(model, prompts, s).numpy()
            plain = clock() - start
            same = sum(bool((np.where(done[i].order >= 0, done[i].canvas, x[i])[:e + 1] == x[i][:e + 1]).all()) for i, e in enumerate(ends))
            if same < 0.95 * count:                      # a tie to the last bit may fall either way
                stop(f"{title}: {count - same} of {count} rows differ from the plain loop; decode.py is broken")
        rows.append([title, ours, plain, plain / ours if plain else "", ours / inside, forwards, needed, 100 * seen[0] / seen[1], f"{same} of {count}" if plain else ""])
    table(f"Decoding, Dream-shaped: {count} prompts of 40-250 tokens, length {N}, {k} tokens a step, batch {batch}",
          ["", "ours, s", "plain, s", "plain / ours", "ours / its forwards", "forwards", "needed", "padding, %", "same tokens"], rows)
    goals.extend([("decoding, no EOS: times as fast as plain", rows[0][3], "at least", 1.6),
                  ("decoding, answers end at half: times as fast as plain", rows[1][3], "at least", 2.5),
                  ("decoding: of its forwards' time", max(r[4] * r[5] / r[6] for r in rows[:2]), "at most", 1.1),
                  ("decoding: % of positions that are padding", rows[0][7], "at most", 10.0)])

    bare, rows = build(dict(DREAM, layers=4)), []
    for length, size, steps in ((64, 8, 8), (128, 8, 8), (256, 8, 8), (64, 4, 8), (64, 16, 8), (64, 8, 16), (64, 8, 32)):
        prompts = [(i, [i + 2, *range(2, 101)]) for i in range(16)]
        model = Scripted(bare, [length] * 16, length)
        seconds = race({"": lambda: list(decode(model, prompts, decoding(length, length // steps), size))}, a.repeats)[""]
        flops = 16 * sum(forward_flops(bare.config, [100 + length], length - i * (length // steps)) for i in range(steps))
        rows.append([length, size, steps, seconds, seconds / (rows[0][3] if rows else seconds), flops / (rows[0][-1] if rows else flops), flops])
    table("Decoding cost, 4 layers, 16 prompts of 100 tokens", ["length", "batch", "steps", "s", "x measured", "x by arithmetic"], [r[:-1] for r in rows])


def bench_start(a):
    run = lambda *words: subprocess.run([sys.executable, *words], cwd=here, capture_output=True, check=True)
    here = Path(__file__).resolve().parent
    jobs = {"import torch": ("-c", "import torch"), "import tabom": ("-c", "import tabom")}
    jobs |= {f"{f} --help": (f, "--help") for f in ("tabom.py", "decode.py", "eval.py", "toy.py", "lora.py", "bench.py")}
    best = race({name: lambda words=words: run(*words) for name, words in jobs.items()}, a.repeats)
    table("Start-up", ["", "s"], [[name, seconds] for name, seconds in best.items()])
    goals.append(("slowest --help or import, s", max(best.values()), "at most", 2.0))
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.torch import save_file
        shape = dict(SHAPES["Dream-vocabulary"], vocab=20000 if a.quick else 152064, tied=False)
        model, fields = build(shape), FAMILIES["Dream"]["fields"]
        save_file(model.state_dict(), f"{folder}/model.safetensors")
        write_whole(f"{folder}/config.json", json.dumps(dict(model_type="Dream", **{fields[k]: v for k, v in vars(model.config).items() if k in fields})).encode())
        size = os.path.getsize(f"{folder}/model.safetensors") / 1e6
        best = race({"plain read": lambda: len(Path(f"{folder}/model.safetensors").read_bytes()),
                     "load": lambda: sum(p.sum() for p in load(folder).parameters())}, a.repeats + 1)
    table(f"Loading {size:,.0f} MB, every weight touched", ["", "MB/s"], [[name, size / seconds] for name, seconds in best.items()])


def bench_check(a):
    """The arithmetic of --plan against what small shapes do: FLOPs as torch counts them, bytes kept for the backward pass."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    rows = []
    for name in ("Dream-shaped", "Dream-vocabulary"):
        shape, work = sizes(name, a.quick)
        (model, params, opt), batch = trainer(shape), make_batches(shape, work, 1)[0]
        c, n, T = model.config, work["batch"] * work["W"], [work["N"] + max(len(r.prompt) for r, _, _ in batch)] * work["batch"]
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):    # torch counts products, not CPU flash attention
            our_step(model, params, opt, batch)
        rows.append([name, "training FLOPs, 1e9", train_flops(c, T, n, attention=2) / 1e9, counter.get_total_flops() / 1e9])
        for checkpoint in (False, True):
            kept, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

            def keep(t):
                if t.untyped_storage().data_ptr() not in own:
                    kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t
            hooks = [b.register_forward_pre_hook(lambda m, x: keep(x[0]) and None) for b in part(model, model.family["blocks"]) if checkpoint]
            model.grad_checkpoint = checkpoint
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                loss = tabom.batch_loss(model, batch, SimpleNamespace(method="tabom", lam=1.0, gamma=0.2, rank_context="start"), MASK, "cpu")[0]
            del loss
            for h in hooks:
                h.remove()
            again = kept_bytes(c, sum(T), n, 4, checkpoint) - (kept_bytes(dict_to(c, layers=1), sum(T), sum(T), 4) if checkpoint else 0)
            rows.append([name, "kept for the backward pass, MB" + ", --grad-checkpoint" * checkpoint, again / 1e6, sum(kept.values()) / 1e6])
    rows = [[*r, r[2] / r[3]] for r in rows]
    table("The arithmetic behind --plan, on small shapes", ["shape", "", "formula", "measured", "formula / measured"], rows)
    goals.append(("--plan's formulas: worst of formula / measured", max(max(r[-1], 1 / r[-1]) for r in rows), "at most", 1.15))
