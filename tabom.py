"""
TABOM: post-training of a masked diffusion language model on its own decoding trajectories.

8 GPUs (the defaults are the paper's):
$ torchrun --nproc_per_node 8 tabom.py --data traj.jsonl

One GPU, or the CPU, with the same global batch of 32:
$ python tabom.py --data traj.jsonl --grad-accum 8

traj.jsonl comes from decode.py: responses of the base model and, for every token, the step at which it was decoded.
A training sample is one moment of a trajectory: tokens decoded before the cut are visible, the rest is masked, and the
model learns
1) to predict the next W tokens of the trajectory (cross-entropy), and
2) to be more certain of tokens it decoded earlier than of tokens it decoded later (pairwise hinge on entropies).
Only a LoRA on q and v learns. The paper's baselines share everything but the cut and the loss: --method sft|dinfer|t3d.
Where the paper is silent we say so in README "Departures".

B: batch, T: prompt + response, N: response, W: window, V: vocabulary
"""
import importlib.util
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save as to_bytes

import lora
from data import load_trajectories, model_of
from model import load_model, load_tokenizer, read_config
from util import about_run, init_process_group, new_parser, peak_memory, setup_device, stop, write_whole

# -----------------------------------------------------------------------------
# settings; the defaults are the paper's

def parse_args(argv=None):
    parser = new_parser(__doc__)
    # data
    parser.add_argument("--data", required=True,
                        help="from decode.py; sft also takes prompts with responses")
    parser.add_argument("--model",
                        help="hub name or folder (default: the model that the trajectories name)")
    parser.add_argument("--out", default="out/tabom",
                        help="adapters, log.jsonl and the resume file go here")
    parser.add_argument("--all", action="store_true",
                        help="train on unfinished and wrong responses too")
    parser.add_argument("--decoder", nargs="+", help="only records with this method, such as entropy or default")
    parser.add_argument("--limit", type=int, default=0, help="only the first records of --data")
    parser.add_argument("--length", type=int, default=256,
                        help="tokens per reference answer (sft), padded with EOS")
    # objective
    parser.add_argument("--method", choices=["tabom", "sft", "dinfer", "t3d"], default="tabom")
    parser.add_argument("--window", type=int, default=32,
                        help="W; 0 = every token that is still masked")
    parser.add_argument("--cut", choices=["uniform", "non-ltr"], default="uniform",
                        help="any step, or one that decoded out of left-to-right order")
    parser.add_argument("--lam", type=float, default=1.0,
                        help="weight of the ranking loss; 0 = cross-entropy only")
    parser.add_argument("--gamma", type=float, default=0.2, help="margin of the hinge, in nats")
    parser.add_argument("--rank-context", choices=["start", "exact"], default="start",
                        help="entropies of one forward at the cut, or each in the state just before its token")
    parser.add_argument("--tail", choices=["keep", "drop"], default="keep",
                        help="train on tokens after the first EOS")
    # LoRA and optimiser
    parser.add_argument("--lora-r", type=int, default=16)
    parser.add_argument("--lora-alpha", type=float, default=16)
    parser.add_argument("--lora-targets", nargs="+", default=["q_proj", "v_proj"],
                        help="last part of the hub's names")
    parser.add_argument("--lr", type=float, default=2e-5, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=50,
                        help="steps of linear warm-up, before a cosine to 0")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0 = off")
    parser.add_argument("--epochs", type=int, default=5, help="one window per trajectory per epoch")
    parser.add_argument("--max-steps", type=int, default=0,
                        help="train this many steps instead of --epochs; the cosine reaches 0 there")
    parser.add_argument("--batch-size", type=int, default=4, help="samples per device and forward")
    parser.add_argument("--grad-accum", type=int, default=1, help="forwards per optimiser step")
    parser.add_argument("--seed", type=int, default=0,
                        help="seeds the adapter, the sample order and the cuts")
    # system
    parser.add_argument("--dtype", choices=["bf16", "fp32"],
                        help="dtype of the base model (default: bf16 if the GPU has it)")
    parser.add_argument("--grad-checkpoint", action="store_true",
                        help="recompute blocks: less memory, a third slower")
    parser.add_argument("--compile", action="store_true",
                        help="torch.compile the blocks: faster steps after a slow start")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--save-every", type=int, default=100, help="steps between resume points")
    parser.add_argument("--log-every", type=int, default=10,
                        help="steps between printed lines; log.jsonl has all")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases too")
    parser.add_argument("--timeout", type=float, default=30,
                        help="minutes until a rank that hangs ends the run")
    args = parser.parse_args(argv)
    if args.method != "tabom":
        args.lam = 0.0                                     # only tabom ranks
    if args.lam > 0 and args.window == 1:
        stop("--window 1: one token makes no pair to rank; use --window 2 or more, or --lam 0")
    if args.wandb and not importlib.util.find_spec("wandb"):
        stop(f"--wandb {args.wandb}: needs a package: pip install wandb")
    return args

# -----------------------------------------------------------------------------
# one moment of a trajectory, and a batch of them

def sample_view(traj, args, rng):
    """
    Draws a cut. Returns visible (N,) bool, the response tokens the model gets to see, and targets, the positions it is
    asked for, in decoding order. traj.step (N,): the step that decoded each position, -1 = never, it stays masked.
    traj.order: the positions that may be targets, sorted by (step, entropy, position).
    eval.py --order calls this too: a change that is not behind a flag changes that measure.
    """
    decoded = traj.step >= 0
    steps = traj.step[traj.order]                          # ascending

    # Eq. 1: mask every token with probability t ~ U(0, 1); at least one target
    if args.method == "sft":
        masked = rng.random(len(traj.step)) < rng.random()
        if not masked[traj.order].any():
            masked[rng.choice(traj.order)] = True
        return decoded & ~masked, traj.order[masked[traj.order]]

    # two times i < j; predict what was decoded in between
    if args.method == "dinfer":
        times = np.append(np.unique(steps), steps[-1] + 1)
        i, j = np.sort(rng.choice(times, 2, replace=False))
        return decoded & (traj.step < i), traj.order[(steps >= i) & (steps < j)]

    # tabom and t3d: a cut among the steps that leave a full window
    need = args.window or 2                                # targets that a cut must leave; --window 0: one pair
    if args.method == "t3d":
        need = 1
    cuts = np.unique(steps[:max(1, len(steps) - need + 1)])    # a short trajectory is one window; the authors drop it
    if args.cut == "non-ltr":                              # start at a token decoded before one to its left, if any
        jumps = np.intersect1d(cuts, traj.step[traj.jumps])
        cuts = jumps if len(jumps) else cuts
    cut = rng.choice(cuts)
    targets = traj.order[steps >= cut]
    if args.method == "tabom" and args.window:
        targets = targets[:args.window]                    # Delta: the next W tokens
    return decoded & (traj.step < cut), targets


def collate(views, mask_id, device):
    """views: list of (traj, visible, targets). Prompts are padded on the left, so all responses end at T."""
    B = len(views)
    T = max(len(traj.prompt) + len(traj.response) for traj, _, _ in views)
    W = max(len(targets) for _, _, targets in views)
    ids    = np.zeros((B, T), dtype=np.int64)
    attend = np.zeros((B, T), dtype=bool)                  # False on padding
    pos    = np.full((B, W), T - 1)                        # where in T the w-th target is, in decoding order
    x0     = np.zeros((B, W), dtype=np.int64)              # its token
    valid  = np.zeros((B, W), dtype=bool)                  # False where a window is shorter than W
    # one row per sample
    for b, (traj, visible, targets) in enumerate(views):
        start, n = T - len(traj.response), len(targets)
        ids[b, start - len(traj.prompt):start] = traj.prompt
        ids[b, start:] = np.where(visible, traj.response, mask_id)
        attend[b, start - len(traj.prompt):] = True
        pos[b, :n] = start + targets
        x0[b, :n] = traj.response[targets]
        valid[b, :n] = True
    return [torch.from_numpy(x).to(device) for x in (ids, attend, pos, x0, valid)]


def epoch_batches(lengths, batch_size, seed, epoch):
    """The epoch's global batches. They depend on (seed, epoch) only, so any number of ranks sees the same ones."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    # similar lengths go together, so that little is padding: sort inside pools of 50 batches, then shuffle the batches
    size = 50 * batch_size
    for i in range(0, len(order), size):
        pool = order[i:i + size]
        order[i:i + size] = pool[np.argsort(lengths[pool], kind="stable")]
    batches = [order[i:i + batch_size] for i in range(0, len(order), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]

# -----------------------------------------------------------------------------
# the objective

def entropy(logp):
    """Eq. 10, (..., V) -> (...): what the ranking compares."""
    return -(logp.exp() * logp).sum(-1)


def tabom_loss(logp, x0, valid, lam, gamma, h=None):
    """
    Eq. 9, one value per sample. Column w is the w-th token of the window in decoding order; W is the longest window of
    the batch, a sample's own is valid.sum(1).
    logp (B, W, V): log-probabilities. x0, valid (B, W). h (B, W): entropies taken elsewhere (--rank-context exact).
    """
    # first term: cross-entropy, mean over the window
    ce = -logp.gather(-1, x0[..., None])[..., 0]                            # (B, W)
    ce = (ce * valid).sum(1) / valid.sum(1)                                 # (B,)
    if lam == 0:                                                            # sft, dinfer, the ablation without ranking
        return ce, {"ce": ce}
    # second term: r decoded before s should have the lower entropy, by gamma; mean over the pairs (Eq. 8)
    if h is None:
        h = entropy(logp)                                                   # (B, W)     Eq. 10
    gap = h[:, :, None] - h[:, None, :]                                     # (B, W, W)  gap[b, r, s] = h(r) - h(s)
    pair = (valid[:, :, None] & valid[:, None, :]).triu(1)                  # (B, W, W)  r before s, both in the window
    pairs = pair.sum((1, 2)).clamp(min=1)                                   # (B,)       W (W - 1) / 2
    rank = (F.relu(gap + gamma) * pair).sum((1, 2)) / pairs                 # (B,)
    in_order = ((gap < 0) & pair).sum((1, 2)) / pairs                       # (B,)       logged: Eq. 7 holds
    return ce + lam * rank, {"ce": ce, "rank": rank, "in_order": in_order}


def exact_entropies(model, views, mask_id, device):
    """
    h(r) as the paper defines it (Eq. 5): in the state just before r was decoded, one forward per step of the window.
    All these graphs are kept: use --grad-checkpoint and a small batch.
    """
    rows = []
    for traj, _, targets in views:
        h = []
        for step in np.unique(traj.step[targets]):         # ascending, so h comes out in decoding order
            visible = (traj.step >= 0) & (traj.step < step)
            now = targets[traj.step[targets] == step]
            ids, attend, pos, _, _ = collate([(traj, visible, now)], mask_id, device)
            logp = F.log_softmax(model(ids, attend, pos)[0].float(), dim=-1)
            h.append(entropy(logp))
        rows.append(torch.cat(h))
    W = max(len(row) for row in rows)
    return torch.stack([F.pad(row, (0, W - len(row))) for row in rows])     # (B, W)


def t3d_loss(logp, ref_logp, x0, valid, a=0.5, b=0.1, c=0.2):
    """
    T3D, ported to LoRA: prefer the trajectory's tokens to those the frozen base would choose, relative to the base,
    plus a path term in which tokens decoded early weigh more. logp, ref_logp (B, W, V): with and without the adapter.
    """
    n = valid.sum(1)                                                        # (B,)  masked tokens
    x1 = ref_logp.argmax(-1)                                                # (B, W)  the base's own choice
    good = (logp - ref_logp).gather(-1, x0[..., None])[..., 0]              # (B, W)  log p(x) - log p_ref(x)
    bad  = (logp - ref_logp).gather(-1, x1[..., None])[..., 0]              # (B, W)
    good = (good * valid).sum(1) / n                                        # (B,)
    bad  = (bad * valid).sum(1) / n                                         # (B,)
    # path: the mean cross-entropy of the first s tokens in decoding order, mean over s
    ce = -logp.gather(-1, x0[..., None])[..., 0] * valid                    # (B, W)
    first = torch.arange(1, valid.shape[1] + 1, device=valid.device)        # (W,)  s
    path = (ce.cumsum(1) / first * valid).sum(1) / n                        # (B,)
    loss = -F.logsigmoid(b * good) - a * F.logsigmoid(-b * bad) + c * path
    return loss, {"ce": ce.sum(1) / n}


def compute_loss(model, views, args, device):
    """One micro-batch: the loss of every sample (B,), and the parts of it that are logged."""
    mask_id = model.config.mask_id
    ids, attend, pos, x0, valid = collate(views, mask_id, device)
    logp = F.log_softmax(model(ids, attend, pos).float(), dim=-1)           # (B, W, V)  only targets reach the head
    if args.method == "t3d":
        with torch.no_grad(), lora.disabled(model):                         # the reference is the frozen base
            ref_logp = F.log_softmax(model(ids, attend, pos).float(), dim=-1)
        return t3d_loss(logp, ref_logp, x0, valid)
    h = None
    if args.rank_context == "exact" and args.lam > 0:
        h = exact_entropies(model, views, mask_id, device)
    return tabom_loss(logp, x0, valid, args.lam, args.gamma, h)


def get_lr(step, args, total_steps):
    # 1) linear warm-up
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    # 2) cosine decay to 0
    progress = (step - args.warmup) / max(1, total_steps - args.warmup)
    return args.lr * 0.5 * (1.0 + math.cos(math.pi * progress))

# -----------------------------------------------------------------------------
# resume: weights, moments, step and settings are in one file, which is replaced atomically

# flags that may differ when a run is resumed; the global batch must stay the same
MAY_CHANGE = ("out", "resume", "save_every", "log_every", "timeout", "batch_size", "grad_accum", "grad_checkpoint",
              "compile", "wandb")

def save_resume(path, params, optimizer, step, settings):
    tensors = {}
    for name, p in params.items():
        tensors[name] = p.detach().cpu()
        tensors["m." + name] = optimizer.state[p]["exp_avg"].cpu()
        tensors["v." + name] = optimizer.state[p]["exp_avg_sq"].cpu()
    write_whole(path, to_bytes(tensors, metadata={"step": str(step), "settings": json.dumps(settings)}))


def load_resume(path, params, optimizer, settings):
    """Fills the parameters and the optimiser; returns the number of steps done. Another run's file is refused."""
    with safe_open(path, "pt") as f:
        saved = json.loads(f.metadata()["settings"])
        for key, now in settings.items():
            if saved.get(key) != now:
                stop(f"{path}: the run there has {key} {saved.get(key)!r}, now it is {now!r}; give another --out")
        step = int(f.metadata()["step"])
        for name, p in params.items():
            p.data.copy_(f.get_tensor(name))
            optimizer.state[p]["step"] = torch.tensor(float(step))
            optimizer.state[p]["exp_avg"] = f.get_tensor("m." + name).to(p.device)
            optimizer.state[p]["exp_avg_sq"] = f.get_tensor("v." + name).to(p.device)
    return step

# -----------------------------------------------------------------------------

def main():
    args = parse_args()

    # torchrun gives every process a rank and one GPU; without it this is the only process
    rank, world_size, device, dtype = setup_device(args.dtype)
    if world_size > 1:
        init_process_group("nccl" if "cuda" in device else "gloo", args.timeout)

    # data; a bad record ends the run with file:line, value and remedy
    config = read_config(args.model or model_of(args.data))
    trajs = load_trajectories(args, config, load_tokenizer(config))
    lengths = np.array([len(traj.prompt) + len(traj.response) for traj in trajs])
    global_batch = args.batch_size * args.grad_accum * world_size
    steps_per_epoch = math.ceil(len(trajs) / global_batch)
    total_steps = args.max_steps or args.epochs * steps_per_epoch

    # model: frozen base and a LoRA in fp32; params maps peft's names to the trainable tensors
    model = load_model(config, device, dtype)
    model.grad_checkpoint = args.grad_checkpoint
    params = lora.add(model, args.lora_targets, args.lora_r, args.lora_alpha, args.seed)
    if args.compile:
        model.compile_blocks()
    optimizer = torch.optim.AdamW(params.values(), lr=args.lr, weight_decay=args.weight_decay)
    logged = ["loss", "ce", "rank", "in_order"] if args.lam > 0 else ["loss", "ce"]     # as compute_loss returns them

    # resume. Every random number depends only on (seed, epoch, sample), so a resumed run equals an uninterrupted one
    out = Path(args.out)
    log_path = out / "log.jsonl"
    resume_path = out / "resume.safetensors"
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0    # by torchrun, after a rank has died
    if (log_path.exists() or resume_path.exists()) and not args.resume and not restarted:
        stop(f"--out {out}: holds a run already; continue it with --resume, or give another --out")
    settings = vars(args) | {"model": config.name, "dtype": str(dtype), "records": len(trajs),
                             "global_batch": global_batch}
    settings = {key: value for key, value in settings.items() if key not in MAY_CHANGE}
    start_step = 0
    if resume_path.exists():
        start_step = load_resume(resume_path, params, optimizer, settings)
    if world_size > 1:
        dist.barrier()                                     # all ranks have read --out before rank 0 writes there

    # the log: settings first, then one line per step; lines of steps that will be repeated are dropped
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        lines = []
        if log_path.exists():
            lines = log_path.read_text().splitlines()[1:1 + start_step]
        head = {"args": vars(args), "settings": settings, "steps": total_steps, **about_run()}
        lines.insert(0, json.dumps(head))
        write_whole(log_path, "".join(line + "\n" for line in lines).encode())
        trainable = sum(p.numel() for p in params.values())
        print(f"{config.name}: {trainable:,} trainable parameters, {total_steps} steps of {global_batch} samples")
        if args.wandb:
            import wandb
            wandb.init(project=args.wandb, name=out.name, config=settings)

    # training loop
    for step in range(start_step, total_steps):
        t0 = time.time()
        epoch, i = divmod(step, steps_per_epoch)
        if i == 0 or step == start_step:
            batches = epoch_batches(lengths, global_batch, args.seed, epoch)
        batch = batches[i]                                                  # sample numbers, the same on every rank
        mine = batch[rank::world_size]

        # set the learning rate for this step
        lr = get_lr(step, args, total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, one micro-batch at a time; gradients add up
        sums = torch.zeros(len(logged), device=device)
        for j in range(0, len(mine), args.batch_size):
            # the cut of a sample depends on (seed, epoch, sample): it is the same on any number of ranks
            views = []
            for n in mine[j:j + args.batch_size]:
                rng = np.random.default_rng([args.seed, epoch, n])
                views.append((trajs[n], *sample_view(trajs[n], args, rng)))
            loss, parts = compute_loss(model, views, args, device)
            # over the global batch: summed over ranks this is the mean, even if the last batch is short
            (loss.sum() / len(batch)).backward()
            sums += torch.stack([loss, *parts.values()]).detach().sum(1) / len(batch)

        # sum over ranks, clip, update
        if world_size > 1:
            dist.all_reduce(sums)
            for p in params.values():
                if p.grad is None:                                          # this rank had no sample in a short batch
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
        gnorm = torch.nn.utils.clip_grad_norm_(params.values(), args.clip or math.inf)
        *values, gnorm = torch.cat([sums, gnorm[None]]).tolist()            # the only wait for the GPU in a step
        if not math.isfinite(gnorm):
            samples = [trajs[n].id for n in batch]
            stop(f"step {step + 1}: the gradient is not finite, samples {samples}; look at these, or lower --lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        # log: every step to log.jsonl, some to the screen
        done = step + 1
        ms = 1000 * (time.time() - t0)
        if rank == 0:
            row = dict(zip(logged, values, strict=True))
            row |= {"step": done, "epoch": epoch + 1, "lr": lr, "gnorm": gnorm, "ms": ms,
                    "tokens_per_s": lengths[batch].sum() / ms * 1000, "memory_gb": peak_memory(device),
                    "samples": [trajs[n].id for n in batch]}
            with open(log_path, "a") as f:
                f.write(json.dumps(row) + "\n")
            if args.wandb:
                wandb.log(row, step=done)
        if rank == 0 and (done % args.log_every == 0 or done == total_steps):
            losses = " | ".join(f"{name} {row[name]:.3f}" for name in logged)
            print(f"step {done}/{total_steps} | {losses} | lr {lr:.1e} | gnorm {gnorm:.2f} | {ms:.0f} ms | "
                  f"{row['tokens_per_s']:,.0f} tok/s | {row['memory_gb']:.1f} GB", flush=True)

        # save the adapter after every epoch, and a resume point more often
        ends_epoch = i == steps_per_epoch - 1 or done == total_steps
        if rank == 0 and ends_epoch:
            lora.save(model, out / f"epoch-{epoch + 1}", config.name)
        if rank == 0 and (ends_epoch or done % args.save_every == 0):
            save_resume(resume_path, params, optimizer, done, settings)

    if rank == 0:
        print(f"saved: {out}/epoch-{(total_steps - 1) // steps_per_epoch + 1}", flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError as e:
        e.add_note("Use a smaller --batch-size with more --grad-accum, or --grad-checkpoint.")
        raise
