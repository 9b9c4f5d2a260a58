"""
What the code costs: measured on this CPU against plain code, and estimated for the real models on GPUs.

$ python study/bench.py                        # every measurement, about half an hour on two quiet cores
$ python study/bench.py --quick                # the same rows at small sizes, about a minute: to see that it runs
$ python study/bench.py --only train decode    # some parts
$ python study/bench.py --plan dream           # or llada, small: time, memory and hours of every stage on three GPUs,
                                               # and how many prompts at once fit the memory while decoding

Figures are ratios within one run. "Ours" is this repository. What it is compared with is written below, after the code
that the authors of the paper and of the models publish, on the same Model, and must compute the same.

B: batch, T: prompt + response, N: response, V: vocabulary, W: window, n: masked positions of one row
"""
import os
import sys

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""              # a GPU is never touched
    os.environ["KINETO_LOG_LEVEL"] = "6"                 # torch's profiler would report every start and stop
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        # keep freed memory: otherwise the plain code, which allocates more, mostly waits for the operating system
        os.environ.update(MALLOC_TRIM_THRESHOLD_="20000000000", MALLOC_MMAP_THRESHOLD_="33554432")
        os.execv(sys.executable, [sys.executable, *sys.argv])

import math
import subprocess
import time
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

sys.path.insert(0, str(Path(__file__).parent.parent))
import decode  # noqa: E402
import lora  # noqa: E402
import tabom  # noqa: E402
from data import Trajectory, View  # noqa: E402
from model import FAMILIES, Config, Model  # noqa: E402
from util import Parser, about_run  # noqa: E402

TARGETS = """
training, Dream's shape: release / ours                     >= 1.4
training, Dream's shape: release, eager attention / ours    >= 2.3
training, Dream's shape: ours / bare model                  <= 1.10
training, Dream's vocabulary: release / ours                >= 10
training, Dream's vocabulary: memory, ours / release        <= 0.1
decoding, without EOS: plain, one batch / ours              >= 1.6
decoding, without EOS: plain, equal batches / ours          >= 1.2
decoding, without EOS: share of padding                     <= 0.1
decoding, answers end at half: plain, one batch / ours      >= 2.5
decoding, answers end at half: share of padding             <= 0.1
--rank-context exact: ours / W forward-backwards            <= 1.6
--rank-context exact: ours, GB                              <= 0.6
scoring, dream, 256 tokens: bytes per logit                 <= 122
scoring, dream, 512 tokens: bytes per logit                 <= 122
scoring, dream, 1024 tokens: bytes per logit                <= 122
scoring, llada, 256 tokens: bytes per logit                 <= 65
scoring, llada, 512 tokens: bytes per logit                 <= 65
scoring, llada, 1024 tokens: bytes per logit                <= 65
tabom.py --help, s                                          <= 2
decode.py --help, s                                         <= 2
eval.py --help, s                                           <= 2
lora.py --help, s                                           <= 2
study/toy.py --help, s                                      <= 2
study/bench.py --help, s                                    <= 2
--plan, Dream's shape: error of FLOPs                       <= 0.15
--plan, Dream's shape: error of peak memory                 <= 0.15
--plan, Dream's vocabulary: error of FLOPs                  <= 0.15
--plan, Dream's vocabulary: error of peak memory            <= 0.15
"""
# scoring: two thirds of what decode.py took when it computed some quantities twice, 184 and 98
RESULTS = {}                                             # what was measured, under the names in TARGETS

# -----------------------------------------------------------------------------
# sizes, and what is assumed about GPUs

# What kernels reach, not what data sheets say. matmul and attention (masked, memory-efficient): TFLOP/s in bf16;
# traffic: TB/s; memory: GB; launch: microseconds that the CPU needs per kernel
GPUS = {
    "H100":      dict(matmul=650, attention=150, traffic=2.8, memory=80, launch=5),
    "A100 80GB": dict(matmul=230, attention=80, traffic=1.7, memory=80, launch=5),
    "RTX 4090":  dict(matmul=140, attention=60, traffic=0.9, memory=24, launch=5),
}
DREAM, LLADA, SMALL = FAMILIES["Dream"], FAMILIES["llada"], FAMILIES["a2d-qwen3"]
MODELS = {
    "dream": dict(family=DREAM, model_type="Dream", width=3584, layers=28, heads=28, kv_heads=4, mlp=18944,
                  vocab=152064, tied=False),
    "llada": dict(family=LLADA, model_type="llada", width=4096, layers=32, heads=32, kv_heads=32, mlp=12288,
                  vocab=126464, tied=False),
    "small": dict(family=SMALL, model_type="a2d-qwen3", width=1024, layers=28, heads=16, kv_heads=8, mlp=3072,
                  vocab=151936, tied=True, head_dim=128),
}
# the share of the response that the longest window of four samples covers on average; tabom's window is fixed
METHODS = {"sft on references": 0.8, "sft": 0.8, "dinfer": 0.6, "t3d": 0.8, "tabom": 0}
PROMPT, LONGEST_PROMPT, WINDOW = 150, 250, 32
DECODED = (256, 512, 768, 1024)                         # response tokens of the benchmarks
MASK, EOS = 1, 2                                        # 0 is what decode.py and tabom.py pad with
ASSUMPTIONS = """
Estimated from the operations of one step of this code in bf16; not measured.
* A kernel takes as long as its arithmetic or its memory traffic, at the rates below. The CPU launches ahead of the GPU:
  only what launching takes longer than all kernels counts. The columns say how the time is divided between these.
* Prompts have 150 tokens on average, 250 at most. No answer ends early; one token per step, 16 prompts per forward.
* Training takes 5 epochs. "evaluate" decodes GSM8K's test questions: all 1,319 with the base and five adapters, for
  small the 400 of ./run.sh small with the base and two.
* GB: weights, adapter, AdamW, the largest batch, 1 for CUDA. "too large": more than 95 % of the card.
* --compile is assumed to join all elementwise kernels of a block that follow one another: at most that is saved.
* Not counted: loading, data, communication between GPUs (one all-reduce of the adapter's gradient per step)."""


def measured_shapes(quick: bool) -> dict:
    """Dream's depth and proportions at width 256, and a few layers with Dream's vocabulary."""
    shape = dict(MODELS["dream"], width=256, heads=8, kv_heads=1, mlp=1352)
    if quick:
        return {"Dream's shape": dict(shape, layers=2, vocab=2000),
                "Dream's vocabulary": dict(shape, layers=1, vocab=20000)}
    return {"Dream's shape": dict(shape, vocab=10864), "Dream's vocabulary": dict(shape, layers=4)}

# -----------------------------------------------------------------------------
# our training step

def make_model(shape: dict, device="cpu", dtype=torch.float32) -> Model:
    config = Config(**shape, theta=1e6, eps=1e-6, positions=4096, mask_id=MASK, eos_id=EOS)
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(config).to(dtype)
    params = lora.add(model, ["q_proj", "v_proj"], r=16, alpha=16)
    # lr 0: a step costs the same, but weights stay as they are, so that all variants must find the same loss
    model.optimizer = torch.optim.AdamW(params.values(), lr=0.0, foreach=True)
    return model


def make_views(vocab: int, prompt_length=PROMPT, N=256, W=WINDOW, B=4) -> list:
    """Samples as tabom.py draws them. It puts similar lengths together; here they are equal."""
    rng = np.random.default_rng(0)
    views = []
    for n in range(B):
        prompt, response = rng.integers(3, vocab, prompt_length), rng.integers(3, vocab, N)
        order = rng.permutation(N)
        traj = Trajectory(n, prompt, response, np.argsort(order), *np.full((2, N), np.nan))
        start = rng.integers(N - W + 1)
        views.append(View(traj, traj.step < start, order[start:start + W]))
    return views


def update(model, loss):
    """The end of a training step: backward, clip, AdamW."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(lora.parameters(model).values(), 1.0)
    model.optimizer.step()
    model.optimizer.zero_grad()
    return loss.detach()


def train_step(model, views, flags=""):
    """A step of tabom.py's loop with these flags."""
    args = tabom.parse_args(["--data=", *flags.split()])
    model.grad_checkpoint = args.grad_checkpoint
    loss, _ = tabom.compute_loss(model, views, args, next(model.parameters()).device)
    return update(model, loss.mean())

# -----------------------------------------------------------------------------
# what training is compared with

def bare_step(model, views):
    """The LoRA model alone on the same tokens: forward, and backward of a made-up gradient. No loss, no update."""
    batch = tabom.collate(views, MASK, "cpu")
    logits = model(batch.ids, batch.attend, batch.pos)
    logits.backward(torch.full_like(logits, 1e-6))


def release_step(model, views):
    """
    The release's way: prompts padded to 256, the head over all positions, an fp32 softmax with 1e-10 in the log over
    all response positions, a loop over samples.
    """
    ids, attend, pos, x0, *_ = tabom.collate(views, MASK, "cpu")
    padding = 512 - ids.shape[1]
    ids, attend = F.pad(ids, (padding, 0)), F.pad(attend, (padding, 0))
    logits = model(ids, attend, torch.arange(512).expand(4, -1)).float()                     # (B, 512, V)
    p = logits[:, 256:].softmax(-1)
    h = -(p * torch.log(p + 1e-10)).sum(-1)                                                  # (B, 256)
    losses = []
    for b, window in enumerate(pos + padding):                                               # (W,)
        gap = h[b, window - 256][:, None] - h[b, window - 256]                               # (W, W)
        rank = F.relu(gap + 0.2).triu(1).sum() / math.comb(len(window), 2)
        losses.append(F.cross_entropy(logits[b, window], x0[b]) + rank)
    return update(model, torch.stack(losses).mean())


def release_step_eager(model, views):
    """With every attention score written out, as the release does unless told otherwise."""
    with sdpa_kernel(SDPBackend.MATH):
        return release_step(model, views)

# -----------------------------------------------------------------------------
# decoding, and what it is compared with

def script_answers(model, N) -> list:
    """
    Random weights would never end, and nearly tie. So a hook makes one logit of every position high, the more to the
    left the higher: EOS from the position on that the prompt's first token names, other tokens before. Returns a list
    to which the hook adds each forward's share of padding.
    """
    padding = []

    def set_logits(model, inputs, logits):
        ids, attend, pos = inputs
        padding.append((~attend).float().mean())
        end = ids.gather(1, (~attend).sum(1, keepdim=True))                                  # (B, 1)
        place = pos - ids.shape[1] + N                                                       # (B, n); prompt: negative
        token = torch.where(place < end, 3 + place * end % 1000, EOS)
        height = 17 - 9 * place / N
        logits.scatter_(2, token[..., None], height[..., None])

    model.register_forward_hook(set_logits)
    return padding


def make_settings(config, flags: str):
    args = decode.flags().parse_args(["--model=", "--prompts=", *flags.split()])
    return decode.make_settings(args, config, [EOS])


def our_decode(model, prompts, s, batch_size):
    trajs = sorted(decode.decode(model, prompts, s, batch_size), key=lambda traj: traj.id)
    return [np.where(traj.step < 0, EOS, traj.response) for traj in trajs]   # what was never needed follows the EOS


@torch.no_grad()
def plain_decode(model, prompts, s, batch_size):
    """The published loop: a batch padded to its longest prompt, head and softmax over all positions, all steps."""
    answers = []
    for i in range(0, len(prompts), batch_size):
        trajs = [decode.new_trajectory(*prompt, s) for prompt in prompts[i:i + batch_size]]
        ids, attend, _ = decode.pack([decode.masked_view(traj, s) for traj in trajs], s.mask_id, "cpu")
        everywhere = torch.arange(ids.shape[1]).expand(len(ids), -1)
        for _ in range(s.steps):
            p = model(ids, attend, everywhere).float().softmax(-1)                           # (B, T, V)
            h = -(p * torch.log(p + 1e-10)).sum(-1)                                          # (B, T)
            h = h.masked_fill(ids != MASK, torch.inf)
            best = h.topk(s.tokens_per_step, largest=False).indices
            ids.scatter_(1, best, p.argmax(-1).gather(1, best))
        answers.append(ids[:, -s.length:])
    return torch.cat(answers)

# -----------------------------------------------------------------------------
# --plan: the model runs at full size on tensors without data, and every operation is priced

# how often a kernel reads its first input, if not once; lookups read only a little of it
READS = {"_softmax": 3, "_log_softmax": 3, "topk": 5, "embedding": 0, "gather": 0}


class Price(TorchDispatchMode):
    """Adds up what runs inside: FLOPs, bytes read and written, kernels, and the most memory that is alive at once."""
    def __init__(self):
        super().__init__()
        self.sums = Counter()
        self.live = {}                                   # {storage: bytes} of all that was used and still exists
        self.peak = 0
        self.elementwise = {}                            # {storage: whether an elementwise kernel wrote it}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kernel, name, kwargs = op.overloadpacket, op.overloadpacket.__name__, kwargs or {}
        if name == "_local_scalar_dense":
            return True                                  # filter_logits in decode.py asks whether 64 tokens are enough
        out = op(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]

        # memory: a storage lives until nothing refers to it
        sizes = []
        for x in tensors:
            storage = x.untyped_storage()
            sizes.append(min(x.nbytes, storage.nbytes()))              # an expanded dimension is in memory once
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))

        # time: views and empty memory need no kernel
        if op.is_view or not tensors or "empty" in name or name == "_unsafe_view":
            return out
        sizes[0] *= READS.get(name, 1)
        # what --compile could save: elementwise kernels in a row become one, and what lies between is never stored.
        # Only blocks are compiled, so what is as wide as a vocabulary does not count
        elementwise = torch.Tag.pointwise in op.tags or "layer_norm" in name
        for x in tree_leaves(args):
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] < 100_000:
                if elementwise and self.elementwise.get(x.untyped_storage()._cdata):
                    self.sums["fusable"] += 2 * min(x.nbytes, x.untyped_storage().nbytes())
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elementwise[x.untyped_storage()._cdata] = elementwise
        flops = flop_registry[kernel](*args, **kwargs, out_val=out) if kernel in flop_registry else 0
        kind = "attention" if "attention" in name else "matmul"
        # below about 150 FLOPs per byte all these GPUs wait for their memory
        bound, amount = (kind, flops) if flops > 150 * sum(sizes) else ("traffic", sum(sizes))
        self.sums.update({bound: amount, "launches": 1, "flops": flops})
        return out


def gpu_attention(q, k, v, attn_mask=None):
    bias = q.new_empty(()).expand(*q.shape[:3], k.shape[2])
    grad = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, grad)[0]


# a GPU has one kernel for masked attention, and one for RMS norm with the traffic of a layer norm
GPU_KERNELS = dict(scaled_dot_product_attention=gpu_attention, rms_norm=F.layer_norm)


def decode_step(model, s, views):
    """As in decode.py's loop: one forward, then each row by itself."""
    batch = tabom.collate(views, MASK, "meta")
    logits = model(batch.ids, batch.attend, batch.pos)
    for z in logits:
        decode.choose(z, 1, s, None)


def price_step(step, shape, B, N, largest, mean) -> Price:
    """The peak of steps with the longest prompts and windows, the sums of a mean one."""
    price = Price()
    for prompt, W in ((LONGEST_PROMPT, largest), (LONGEST_PROMPT, largest), (PROMPT, mean)):
        views = make_views(shape["vocab"], prompt, N, W, B)
        price.sums.clear()
        with mock.patch.multiple(F, **GPU_KERNELS), price:
            step(views)
    return price


def plan(args):
    print(ASSUMPTIONS)
    shape = MODELS[args.plan]
    model = make_model(shape, "meta", torch.bfloat16)
    B, N = args.batch_size, args.length
    stages = []                                          # name, steps per GPU, price of one

    # decode the prompts, and the questions of the evaluation
    s = make_settings(model.config, f"--length {N} --block {args.block}")
    with torch.no_grad():
        price = price_step(partial(decode_step, model, s), shape, 16, N, s.block, s.block // 2)
    for name, count in (("decode the prompts", args.prompts), ("evaluate", args.answers)):
        stages.append((name, N * math.ceil(count / 16 / args.gpus), price))

    # train by each method
    for flag in ("", "--grad-checkpoint"):
        for name, share in METHODS.items():
            windows = (N, int(share * N)) if share else (WINDOW, WINDOW)
            step = partial(train_step, model, flags=f"--method {name.split()[0]} {flag}")
            price = price_step(step, shape, B, N, *windows)
            count = args.prompts if "references" in name else args.records
            stages.append((f"train {name} {flag}", 5 * math.ceil(count / B / args.gpus), price))

    for title, gpu in GPUS.items():
        saved = {}
        rows = [["", "steps", "ms", "matmul", "attention", "traffic", "launches", "GB", "hours"]]
        for name, steps, price in stages:
            seconds = [price.sums[kind] / gpu[kind] / 1e12 for kind in ("matmul", "attention", "traffic")]
            launches = price.sums["launches"] * gpu["launch"] / 1e6
            seconds.append(max(0.0, launches - sum(seconds)))
            shares = [f"{x / sum(seconds):.0%}" for x in seconds]
            memory = price.peak / 1e9 + 1
            hours = steps * sum(seconds) / 3600 if memory < 0.95 * gpu["memory"] else "too large"
            rows.append([name, steps, 1000 * sum(seconds), *shares, memory, hours])
            if name.strip() in ("decode the prompts", "train tabom"):
                saved[name] = price.sums["fusable"] / gpu["traffic"] / 1e12 / sum(seconds)
        table(f"{args.plan} on {args.gpus} x {title}: {gpu}", rows)
        print("--compile could save", ", ".join(f"{share:.0%} of {name.strip()}" for name, share in saved.items()))

    # the logits of all rows are the largest tensor while decoding: whole canvas, by its length
    rows = [["prompts per forward", *DECODED]]
    for count in (16, 8, 4, 2):
        cells = []
        for length in DECODED:
            s = make_settings(model.config, f"--length {length}")
            with torch.no_grad():
                price = price_step(partial(decode_step, model, s), shape, count, length, length, 1)
            cells.append(price.peak / 1e9 + 1)
        rows.append([str(count), *cells])
    table("GB while decoding in one block, by response tokens", rows)

# -----------------------------------------------------------------------------
# measurements

def table(title: str, rows: list):
    print(f"\n{title}")
    width = max(len(row[0]) for row in rows)
    for name, *cells in rows:
        text = [f"{x:,.3f}" if isinstance(x, float) else str(x) for x in cells]
        print(name.ljust(width), *[x.rjust(9) for x in text])


def measure(run):
    """What it returns, seconds, and the GB that torch holds at the worst moment beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
    events = profile.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return result, seconds, np.cumsum(changes).max() / 1e9


def compare(title: str, variants: dict, rounds: int, rtol=1e-3):
    """By the best round; all take turns. What they return, if anything, must be equal."""
    best, results = {}, {}
    for _ in range(rounds):
        for name, run in variants.items():
            results[name], seconds, memory = measure(run)
            print(f"{title}: {name}: {seconds:.3f} s, {memory:.3f} GB", flush=True)
            best[name] = min(best.get(name, (math.inf, 0)), (seconds, memory))
            if results[name] is not None:
                np.testing.assert_allclose(results[name], results["ours"], rtol=rtol, err_msg=name)
    our_seconds, our_memory = best["ours"]
    RESULTS[f"{title}: ours, GB"] = our_memory
    for name, (seconds, memory) in best.items():
        RESULTS[f"{title}: {name} / ours"] = seconds / our_seconds
        RESULTS[f"{title}: ours / {name}"] = our_seconds / seconds
        RESULTS[f"{title}: memory, ours / {name}"] = our_memory / memory


def bench_train(quick):
    steps = {"ours": train_step, "bare model": bare_step, "release": release_step,
             "release, eager attention": release_step_eager}
    for title, shape in measured_shapes(quick).items():
        model, views = make_model(shape), make_views(shape["vocab"])
        variants = {name: partial(step, model, views) for name, step in steps.items()}
        compare(f"training, {title}", variants, 6)


def bench_decode(quick):
    count, N, batch_size = (8, 64, 2) if quick else (64, 256, 8)
    rng = np.random.default_rng(0)
    for title, low, high in (("without EOS", N, N), ("answers end at half", N // 8, 7 * N // 8)):
        prompts = []
        for row, end in enumerate(rng.integers(low, high + 1, count)):
            words = rng.integers(3, 1000, rng.integers(39, 250))
            prompts.append((row, [end, *words]))
        model = make_model(measured_shapes(quick)["Dream's shape"])
        padding = script_answers(model, N)
        flags = f"--length {N} --tokens-per-step {N // 8} --score entropy --temperature 0 --top-p 1"
        s = make_settings(model.config, flags)
        variants = {"ours": partial(our_decode, model, prompts, s, batch_size),
                    "plain, one batch": partial(plain_decode, model, prompts, s, count),
                    "plain, equal batches": partial(plain_decode, model, prompts, s, batch_size)}
        compare(f"decoding, {title}", variants, 1, rtol=0)
        plain_forwards = s.steps * (1 + count // batch_size)             # ours ran first
        RESULTS[f"decoding, {title}: share of padding"] = np.mean(padding[:-plain_forwards]).item()


def bench_exact(quick):
    shape = measured_shapes(quick)["Dream's shape"]
    model = make_model(shape)
    view = make_views(shape["vocab"])[0]

    def forward_backwards():
        for target in view.targets:
            bare_step(model, [view._replace(targets=target[None])])

    exact = partial(train_step, model, [view], "--rank-context exact --grad-checkpoint")
    compare("--rank-context exact", {"ours": exact, "W forward-backwards": forward_backwards}, 3)


def bench_start(quick):
    for name in ("tabom.py", "decode.py", "eval.py", "lora.py", "study/toy.py", "study/bench.py"):
        command = [sys.executable, name, "--help"]
        start = time.perf_counter()
        subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, check=True)
        RESULTS[f"{name} --help, s"] = time.perf_counter() - start


def bench_scoring(quick):
    """Memory traffic of one step of one row beyond the model, in its own decoder: priced, not timed."""
    for name in ("dream", "llada"):
        config = make_model(MODELS[name], "meta").config
        for N in (256, 512, 1024):
            s = make_settings(config, f"--length {N}")
            z = torch.empty(N // 2, config.vocab, dtype=torch.bfloat16, device="meta")   # half of it is decoded
            price = Price()
            with price, torch.no_grad():
                decode.choose(z, 1, s, None)
            RESULTS[f"scoring, {name}, {N} tokens: bytes per logit"] = price.sums["traffic"] / z.numel()


def bench_plan(quick):
    """What --plan counts, against what torch counts and measures: one training step of small shapes in fp32."""
    for title, shape in measured_shapes(quick).items():
        model = make_model(shape)
        price = price_step(partial(train_step, make_model(shape, "meta")), shape, 4, 256, WINDOW, WINDOW)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            train_step(model, make_views(shape["vocab"]))
        _, _, memory = measure(partial(train_step, model, make_views(shape["vocab"], LONGEST_PROMPT)))
        peak = price.peak - sum(p.nbytes for p in model.parameters())
        RESULTS[f"--plan, {title}: error of FLOPs"] = abs(price.sums["flops"] / counter.get_total_flops() - 1)
        RESULTS[f"--plan, {title}: error of peak memory"] = abs(peak / 1e9 / memory - 1)


def main():
    parts = {"train": bench_train, "decode": bench_decode, "exact": bench_exact, "start": bench_start,
             "scoring": bench_scoring, "plan": bench_plan}
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="some parts")
    parser.add_argument("--plan", choices=MODELS, help="estimate what the experiment costs on GPUs; nothing is run")
    parser.add_argument("--gpus", type=int, default=8, help="8; for the small model 1")
    parser.add_argument("--prompts", type=int, default=12000, help="to decode; sft on references trains on all")
    parser.add_argument("--records", type=int, default=5100, help="valid trajectories among them")
    parser.add_argument("--answers", type=int, default=6 * 1319, help="to decode for the evaluation")
    parser.add_argument("--length", type=int, default=256, help="response tokens")
    parser.add_argument("--block", type=int, default=0, help="as in decode.py")
    parser.add_argument("--batch-size", type=int, default=4, help="training samples per GPU")
    args = parser.parse_args()
    if args.plan == "small":
        parser.set_defaults(gpus=1, prompts=1000, records=290, answers=3 * 400, block=32)
        args = parser.parse_args()
    if args.plan:
        return plan(args)

    print(about_run())
    for name in args.only:
        parts[name](args.quick)
    rows = [["", "measured", "target"]]
    for line in TARGETS.strip().splitlines():
        name, sign, target = line.rsplit(maxsplit=2)
        if name in RESULTS:
            met = RESULTS[name] >= float(target) if sign == ">=" else RESULTS[name] <= float(target)
            rows.append([name, RESULTS[name], f"{sign} {target}", "met" if met else "missed"])
    table("Targets, not comparable: --quick has other sizes" if args.quick else "Targets", rows)


if __name__ == "__main__":
    main()
