"""
TABOM: post-training of a masked diffusion language model on its own decoding trajectories.

8 GPUs:
$ torchrun --nproc_per_node 8 tabom.py --data traj.jsonl

One GPU, or the CPU, with the same global batch of 32:
$ python tabom.py --data traj.jsonl --grad-accum 8

traj.jsonl comes from decode.py: answers of the base model and, for every token, the step at which it was decoded. A
training sample is one moment of such a trajectory. Tokens decoded before the cut are visible, the rest is masked, and
the model learns
1) to predict the next W tokens of the trajectory (cross-entropy), and
2) to be more certain of tokens it decoded earlier than of tokens it decoded later (pairwise hinge on entropies).
Only a LoRA on q and v learns.

Where we differ from the paper:
1) All entropies of a window come from one forward at the cut, as in the authors' code. The paper takes each in the
   state just before its token was decoded, which needs W forwards: --rank-context exact.
2) lambda is 1 and gamma 0.2 for every task; the paper tunes both per task.
3) Tokens after the first end token are trained on, as in the authors' code. The paper does not say; --tail drop leaves
   them out.
study/departures.md lists every difference.

B: batch, T: prompt + response, N: response, W: window, V: vocabulary
"""
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save as to_bytes

import baselines
import lora
from data import View, data_checksum, load_trajectories, model_of
from model import entropy, load_model, load_tokenizer, log_probs, pack, pad, read_config
from util import (
    Parser,
    about_run,
    all_ranks_agree,
    amount,
    count,
    find_change,
    init_process_group,
    peak_memory,
    setup_device,
    stop,
    sum_over_ranks,
    write_whole,
)

# -----------------------------------------------------------------------------
# settings; the defaults are the paper's, but for the list above

def flags():
    parser = Parser(__doc__)
    flag = parser.add_argument
    # data
    flag("--data", required=True, help="from decode.py; sft also takes prompts with responses")
    flag("--model", help="hub name or folder (default: the model that the trajectories name)")
    flag("--out", default="out/tabom", help="adapters, log.jsonl and the resume file go here")
    flag("--all", action="store_true", help="train on unfinished and wrong responses too")
    flag("--decoded-by", nargs="+", help="only records whose field method is one of these, such as entropy")
    flag("--limit", type=count, default=0, help="only the first records of --data")
    flag("--length", type=count, default=0, help="tokens per reference answer (sft; default: as decode.py's)")
    # objective
    flag("--method", choices=["tabom", *baselines.VIEWS], default="tabom", help="--window, --cut, --lam, --gamma and "
         "--rank-context are for tabom")
    flag("--window", type=count, default=32, help="W; 0 = every token that is still masked")
    flag("--cut", choices=["uniform", "non-ltr"], default="uniform", help="where a window may start: any step, or one "
         "that decoded out of left-to-right order")
    flag("--order", choices=["own", "ltr", "random", "reversed"], default="own", help="a control: train on the same "
         "tokens in another order")
    flag("--lam", type=float, default=1.0, help="weight of the ranking loss; 0 = cross-entropy only")
    flag("--gamma", type=float, default=0.2, help="margin of the hinge, in nats")
    flag("--rank-context", choices=["start", "exact"], default="start", help="exact: W forwards per sample, 238 GB for "
         "Dream-7B at the default batch; use --grad-checkpoint and a small batch")
    flag("--tail", choices=["keep", "drop"], default="keep", help="train on tokens after the first end")
    # LoRA and optimiser
    flag("--lora-r", type=int, default=16)
    flag("--lora-alpha", type=float, default=16)
    flag("--lora-targets", nargs="+", default=["q_proj", "v_proj"], help="last part of the hub's names")
    flag("--lr", type=float, default=2e-5, help="peak learning rate")
    flag("--warmup", type=count, default=50, help="steps of linear warm-up, before a cosine to 0")
    flag("--weight-decay", type=float, default=0.01)
    flag("--clip", type=amount, default=1.0, help="largest gradient norm; 0 = off")
    flag("--epochs", type=count, default=5, help="one window per trajectory per epoch")
    flag("--max-steps", type=count, default=0, help="instead of --epochs; the cosine reaches 0 there")
    flag("--batch-size", type=int, default=4, help="samples per device and forward")
    flag("--grad-accum", type=int, default=1, help="forwards per optimiser step")
    flag("--seed", type=int, default=0, help="of the adapter, the sample order and the cuts")
    # system
    flag("--dtype", choices=["bf16", "fp32"], help="of the base model (default: bf16 if the GPU has it)")
    flag("--grad-checkpoint", action="store_true", help="recompute blocks: less memory, a third slower")
    flag("--compile", action="store_true", help="torch.compile the blocks: faster after a slow start")
    flag("--resume", action="store_true", help="continue the run in --out")
    flag("--save-every", type=int, default=100, help="steps between resume points")
    flag("--log-every", type=int, default=10, help="steps between printed lines; log.jsonl has all")
    flag("--wandb", metavar="PROJECT", help="log to Weights & Biases too")
    flag("--timeout", type=float, default=30, help="minutes until a rank that hangs ends the run")
    return parser


def parse_args(argv=None):
    args = flags().parse_args(argv)
    if args.method != "tabom":
        args.lam = 0.0                                     # only tabom ranks
    if args.lam > 0 and args.window == 1:
        stop("--window 1: one token makes no pair to rank; use --window 2 or more, or --lam 0")
    if args.order != "own" and args.method == "sft":
        stop(f"--order {args.order}: sft masks at random and has no order; use tabom, dinfer or t3d, or no --order")
    if args.epochs == 0:
        stop("--epochs 0: trains nothing; give 1 or more")
    if args.wandb and not importlib.util.find_spec("wandb"):
        stop(f"--wandb {args.wandb}: needs a package: pip install wandb")
    return args

# -----------------------------------------------------------------------------
# one moment of a trajectory, and a batch of them

def tabom_view(traj, rng, window=32, cut="uniform"):
    """
    Draws a cut, and takes the next W tokens. traj.step (N,): the step that decoded each position, -1 = never.
    traj.order: the positions that may be targets, sorted by (step, entropy, position).
    """
    order = traj.order
    steps = traj.step[order]                               # ascending
    # a cut leaves at least W targets, with --window 0 two, which make a pair. A shorter response has one cut, its first
    # step; the authors leave it out
    starts = np.unique(steps[:max(1, len(steps) - (window or 2) + 1)])
    if cut == "non-ltr":                                   # at a token that was decoded before one to its left, if any
        jumps = np.intersect1d(starts, traj.step[traj.jumps])
        starts = jumps if len(jumps) else starts
    start = rng.choice(starts)
    targets = order[steps >= start]
    if window:
        targets = targets[:window]                         # the next W tokens, the paper's Delta
    return View(traj, traj.decoded_before(start), targets)


class Batch(NamedTuple):
    """Column w belongs to the w-th target in decoding order. What else a loss wants to know of a target is a column."""
    ids: torch.Tensor                                      # (B, T) tokens, masked where not visible
    attend: torch.Tensor                                   # (B, T) False on the left padding
    pos: torch.Tensor                                      # (B, W) where in T the target is
    x0: torch.Tensor                                       # (B, W) its token
    valid: torch.Tensor                                    # (B, W) False where a sample has fewer than W targets
    step: torch.Tensor                                     # (B, W) the step that decoded it
    entropy: torch.Tensor                                  # (B, W) its entropy when decode.py decoded it, nan = unknown


def collate(views, mask_id, device):
    def per_target(values, fill=0):
        """One array per view, as long as its targets -> (B, W)."""
        return pad(values, fill).to(device)

    return Batch(
        *pack(views, mask_id, device),
        x0=per_target([v.traj.response[v.targets] for v in views]),
        valid=per_target([np.ones(len(v.targets), dtype=bool) for v in views]),
        step=per_target([v.traj.step[v.targets] for v in views]),
        entropy=per_target([v.traj.entropy[v.targets] for v in views]),
    )


def epoch_batches(lengths, batch_size, seed, epoch):
    """The epoch's global batches of sample numbers. They do not depend on the number of ranks."""
    rng = np.random.default_rng([seed, epoch])
    shuffled = rng.permutation(len(lengths))
    # similar lengths go together, so that little is padding: sort inside pools of 50 batches, then shuffle the batches
    pool = np.arange(len(shuffled)) // (50 * batch_size)
    shuffled = shuffled[np.lexsort((lengths[shuffled], pool))]
    batches = [shuffled[i:i + batch_size] for i in range(0, len(shuffled), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]

# -----------------------------------------------------------------------------
# the objective

def tabom_loss(logp, batch, args, h=None):
    """
    Eq. 9, one value per sample, and its parts. logp (B, W, V): log-probabilities at the targets.
    args: lam and gamma. h (B, W): entropies taken elsewhere (--rank-context exact).
    """
    valid = batch.valid                                                     # (B, W)
    # first term: cross-entropy, mean over the window
    ce = -logp.gather(-1, batch.x0[..., None])[..., 0]                      # (B, W)
    ce = (ce * valid).sum(1) / valid.sum(1)                                 # (B,)
    if args.lam == 0:                                                       # sft, dinfer, the ablation without ranking
        return ce, {"ce": ce}
    # second term: r before s in decoding order should have the lower entropy, by gamma; mean over the pairs (Eq. 8)
    if h is None:
        h = entropy(logp)                                                   # (B, W)     Eq. 10
    gap = h[:, :, None] - h[:, None, :]                                     # (B, W, W)  gap[b, r, s] = h(r) - h(s)
    pair = (valid[:, :, None] & valid[:, None, :]).triu(1)                  # (B, W, W)  r before s, both in the window
    n_pairs = pair.sum((1, 2)).clamp(min=1)                                 # (B,)       W (W - 1) / 2
    rank_loss = ((gap + args.gamma).relu() * pair).sum((1, 2)) / n_pairs    # (B,)
    in_order = ((gap < 0) & pair).sum((1, 2)) / n_pairs                     # (B,)       logged: Eq. 7 holds
    return ce + args.lam * rank_loss, {"ce": ce, "rank_loss": rank_loss, "in_order": in_order}


def exact_entropies(model, views, mask_id, device):
    """h(r) as the paper defines it (Eq. 5): in the state just before r was decoded, one forward per step."""
    rows = []
    for traj, _, targets in views:
        h = []
        for step in np.unique(traj.step[targets]):         # ascending, so h comes out in decoding order
            now = View(traj, traj.decoded_before(step), targets[traj.step[targets] == step])
            h.append(entropy(log_probs(model, collate([now], mask_id, device)))[0])
        rows.append(torch.cat(h))
    W = max(len(row) for row in rows)
    padded = [torch.cat([row, row.new_zeros(W - len(row))]) for row in rows]
    return torch.stack(padded)                                              # (B, W)


def compute_loss(model, views, args, device):
    """One micro-batch: the loss (B,), which is minimised, and by name whatever else (B,) is to be logged."""
    batch = collate(views, model.config.mask_id, device)
    logp = log_probs(model, batch)                                          # (B, W, V)  only targets
    if args.method == "t3d":
        loss, parts = baselines.t3d_loss(model, logp, batch)
    else:
        h = None
        if args.rank_context == "exact" and args.lam > 0:
            h = exact_entropies(model, views, model.config.mask_id, device)
        loss, parts = tabom_loss(logp, batch, args, h)
    # any further term (B,) is added here, to the loss and, if it should be logged, to the parts
    return loss, parts


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
        saved.setdefault("data_checksum", settings["data_checksum"])         # older files do not tell
        changed = find_change(saved, settings, flags())
        if changed:
            stop(f"{path}: the run there has {changed}; give another --out")
        step = int(f.metadata()["step"])
        for name, p in params.items():
            p.data.copy_(f.get_tensor(name))
            optimizer.state[p]["step"] = torch.tensor(float(step))
            optimizer.state[p]["exp_avg"] = f.get_tensor("m." + name).to(p.device)
            optimizer.state[p]["exp_avg_sq"] = f.get_tensor("v." + name).to(p.device)
    return step


def start_log(path, head, keep):
    """log.jsonl: settings first, then one line per step; lines of steps that will be repeated are dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines()[1:1 + keep] if path.exists() else []
    write_whole(path, "".join(line + "\n" for line in [json.dumps(head), *lines]).encode())

# -----------------------------------------------------------------------------

def main():
    args = parse_args()

    # torchrun gives every process a rank and one GPU; without it this is the only process
    rank, world_size, device, dtype = setup_device(args.dtype)
    if world_size > 1:
        init_process_group(device, args.timeout)

    # data; a bad record ends the run with file:line, value and remedy
    config = read_config(args.model or model_of(args.data))
    trajs = load_trajectories(args.data, config, load_tokenizer(config), everything=args.all,
                              decoded_by=args.decoded_by, limit=args.limit, length=args.length or config.length,
                              tail=args.tail, ordered=args.method != "sft")
    if args.order != "own":
        for traj in trajs:
            baselines.reorder(traj, args.order)
    lengths = np.array([len(traj.prompt) + len(traj.response) for traj in trajs])
    global_batch = args.batch_size * args.grad_accum * world_size
    steps_per_epoch = math.ceil(len(trajs) / global_batch)
    total_steps = args.max_steps or args.epochs * steps_per_epoch

    # what an earlier command has left in --out
    out = Path(args.out)
    log_path, resume_path = out / "log.jsonl", out / "resume.safetensors"
    if resume_path.exists() and not args.resume:
        stop(f"--out {out}: holds a run already; continue it with --resume, or give another --out")

    # model: the frozen base, and a LoRA that is kept in fp32; params maps peft's names to the trainable tensors
    model = load_model(config, device, dtype)
    model.grad_checkpoint = args.grad_checkpoint
    params = lora.add(model, args.lora_targets, args.lora_r, args.lora_alpha, args.seed)
    if args.compile:
        model.compile_blocks()
    optimizer = torch.optim.AdamW(params.values(), lr=args.lr, weight_decay=args.weight_decay)

    # resume. No random state is carried from step to step, so a resumed run equals an uninterrupted one: bit for bit on
    # a CPU, up to rounding on a GPU, whose attention adds up gradients in no fixed order
    settings = vars(args) | {"model": config.name, "dtype": str(dtype), "records": len(trajs),
                             "data_checksum": data_checksum(trajs), "global_batch": global_batch}
    settings = {key: value for key, value in settings.items() if key not in MAY_CHANGE}
    start_step = 0
    if resume_path.exists():
        start_step = load_resume(resume_path, params, optimizer, settings)
    if world_size > 1:
        all_ranks_agree(device, start_step=start_step, records=len(trajs), data_checksum=settings["data_checksum"],
                        checksum_of_flags=crc32(json.dumps(settings).encode()),
                        checksum_of_resume_file=crc32(resume_path.read_bytes()) if start_step else 0)
    if rank == 0:
        start_log(log_path, {"args": vars(args), "settings": settings, "steps": total_steps, **about_run()}, start_step)
        trainable = sum(p.numel() for p in params.values())
        print(f"{config.name}: {trainable:,} trainable parameters, steps {start_step + 1} to {total_steps} of "
              f"{global_batch} samples")
        if args.warmup >= total_steps:
            print(f"warning: --warmup {args.warmup}: the run ends in it, and never reaches --lr", flush=True)
        if args.wandb:
            import wandb
            wandb.init(project=args.wandb, name=out.name, config=settings)

    # training loop
    for step in range(start_step, total_steps):
        t0 = time.time()
        epoch, i = divmod(step, steps_per_epoch)
        if i == 0 or step == start_step:
            batches = epoch_batches(lengths, global_batch, args.seed, epoch)
        samples = batches[i]                                                # numbers, the same on every rank
        mine, scale = samples[rank::world_size], 1 / len(samples)           # mean over the global batch
        if len(mine) == 0:                                                  # more ranks than samples: one of no weight
            mine, scale = samples[:1], 0.0

        # set the learning rate for this step
        lr = get_lr(step, args, total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, one micro-batch at a time; gradients add up
        sums = {}
        for j in range(0, len(mine), args.batch_size):
            # the cut of a sample depends on (seed, epoch, sample): it is the same on any number of ranks
            views = []
            for n in mine[j:j + args.batch_size]:
                rng = np.random.default_rng([args.seed, epoch, n])
                if args.method == "tabom":
                    views.append(tabom_view(trajs[n], rng, args.window, args.cut))
                else:
                    views.append(baselines.VIEWS[args.method](trajs[n], rng))
            loss, parts = compute_loss(model, views, args, device)
            (scale * loss.sum()).backward()
            for name, value in {"loss": loss, **parts}.items():
                sums[name] = sums.get(name, 0) + scale * value.detach().sum()

        # sum over ranks, clip, update
        values = torch.stack(list(sums.values()))
        if world_size > 1:
            sum_over_ranks([p.grad for p in params.values()] + [values])
        gnorm = torch.nn.utils.clip_grad_norm_(params.values(), args.clip or math.inf)
        *values, gnorm = torch.cat([values, gnorm[None]]).tolist()          # the only wait for the GPU in a step
        if not math.isfinite(gnorm):
            ids = [trajs[n].id for n in samples]
            stop(f"step {step + 1}: the gradient is not finite, samples {ids}; look at these, or lower --lr")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if rank > 0:                                                        # below, rank 0 is alone
            continue

        # log: every step to log.jsonl, some to the screen
        seconds = time.time() - t0
        row = dict(zip(sums, values, strict=True))
        losses = " | ".join(f"{name} {value:.4g}" for name, value in row.items())
        row |= {"step": done, "epoch": epoch + 1, "lr": lr, "gnorm": gnorm, "ms": 1000 * seconds,
                "tokens_per_s": lengths[samples].sum() / seconds, "memory_gb": peak_memory(device),
                "samples": [trajs[n].id for n in samples]}
        with open(log_path, "a") as f:
            f.write(json.dumps(row) + "\n")
        if args.wandb:
            wandb.log(row, step=done)
        if done % args.log_every == 0 or done == total_steps:
            print(f"step {done}/{total_steps} | {losses} | lr {lr:.1e} | gnorm {gnorm:.2f} | {row['ms']:.0f} ms | "
                  f"{row['tokens_per_s']:,.0f} tok/s | {row['memory_gb']:.1f} GB", flush=True)

        # save: every epoch's adapter, unless --max-steps ends the run; the last one and a resume point more often
        ends_epoch = i == steps_per_epoch - 1
        if ends_epoch and not args.max_steps:
            lora.save(model, out / f"epoch-{epoch + 1}", config.name)
        if ends_epoch or done % args.save_every == 0 or done == total_steps:
            lora.save(model, out / "last", config.name)
            save_resume(resume_path, params, optimizer, done, settings)

    if rank == 0:
        print(f"saved: {out}/last", flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError as e:
        e.add_note("Use a smaller --batch-size with more --grad-accum, or --grad-checkpoint.")
        raise
