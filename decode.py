"""
Decodes prompts with a masked diffusion model and logs the trajectory: which token came at which step, and how certain
the model was of it.

Look at one decoding, early tokens pale, late ones dark:
$ python decode.py --model study/base --prompt "3 8 Ann+3 swap . ." --show

One GPU, or the CPU:
$ python decode.py --model Dream-org/Dream-v0-Instruct-7B --prompts MixChain-Z-PRM12K --out traj.jsonl

8 GPUs, each with its share of the prompts:
$ torchrun --nproc_per_node 8 decode.py --model ... (the same flags)

The response starts as N masks. Every step: one forward, a score for each masked position, and the best positions get
their token. With the --out of an earlier run it continues that run. Score, schedule and temperature default to the
model's own decoder; where we depart from it: study/departures.md.

B: batch, T: prompt + response, N: response, V: vocabulary, n: masked positions of one row
"""
import argparse
import fcntl
import json
import os
import time
from argparse import Namespace
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lora
from data import Trajectory, View, fill_in_text, first_end, judge, parse_line, prompt_ids, read_item, read_prompts
from model import entropy, load_model, load_tokenizer, pack, read_config
from util import (
    Bar,
    Parser,
    all_ranks_agree,
    amount,
    count,
    find_change,
    naming_lost_ranks,
    setup_device,
    stop,
)

# -----------------------------------------------------------------------------
# settings

# How each family decodes by itself; one that is not listed decodes as LLaDA does. score_filtered: positions are scored
# after temperature, top-p and top-k, not before
LLADA = dict(score="confidence", score_filtered=False, schedule="even", temperature=0.0, top_p=1.0, block=0)
DREAM = dict(score="entropy", score_filtered=True, schedule="dream", temperature=0.1, top_p=0.9, block=0)
OWN_DECODER = {"Dream": DREAM, "a2d-qwen2": LLADA | dict(block=32), "a2d-qwen3": LLADA | dict(block=32)}


def decoding_flags():
    """What decides the result. Every flag here is in the records, and eval.py has it too."""
    parser = argparse.ArgumentParser(add_help=False)
    flag = parser.add_argument
    # how many tokens, and when
    flag("--length", type=count, default=0, help="N, response tokens (default: the model's own, else 256)")
    flag("--steps", type=count, default=0, help="model steps (default: one per token)")
    flag("--tokens-per-step", type=count, default=0, help="instead of --steps; the paper also measures 2")
    flag("--threshold", type=amount, help="unmask all tokens above this confidence, at least one")
    flag("--block", type=count, default=0, help="left to right in blocks of this length (default: the model's own)")
    flag("--schedule", choices=["even", "dream"], help="tokens over steps (default: the model's own)")
    # which position, which token
    flag("--score", choices=["entropy", "confidence", "margin", "random"], help="what is unmasked first")
    flag("--temperature", type=amount, help="0 = greedy (default: the model's own)")
    flag("--top-p", type=amount, help="nucleus, after the temperature (default: the model's own)")
    flag("--top-k", type=count, default=0, help="0 = off")
    flag("--greedy", action="store_true", help="the most probable token; temperature and top-p shape only the score")
    flag("--ties", choices=["entropy", "position"], default="entropy", help="equal scores go to the lower entropy "
         "(the paper), or, scored in the type of the logits, to the leftmost (the models' own code on a GPU)")
    flag("--suppress-eos", choices=["logits", "confidence"],
         help="LLaDA's rules for code: never choose EOS, or choose positions that end the text last")
    flag("--whole", action="store_true", help="decode the whole canvas, also what follows the first end token")
    flag("--raw-prompt", action="store_true", help="feed the bare text, without the chat template")
    flag("--seed", type=int, default=0, help="of all draws, together with the prompt's id")
    return parser


def decoding_settings(args) -> dict:
    """These flags, by name."""
    return {name: getattr(args, name) for name in vars(decoding_flags().parse_args([]))}


def flags():
    parser = Parser(__doc__, parents=[decoding_flags()])
    flag = parser.add_argument
    flag("--model", required=True, help="hub name or folder")
    flag("--adapter", help="LoRA folder in peft's format")
    flag("--prompts", help=".jsonl, .parquet, gsm8k, MixChain-Z-PRM12K or Ling-Coder-SFT")
    flag("--prompt", help="one prompt, as text")
    flag("--limit", type=count, default=0, help="only the first prompts")
    flag("--out", help="trajectories, one JSON object per line; continued if it exists")
    flag("--show", action="store_true", help="print the first prompt's decoding in colour")
    flag("--batch-size", type=int, default=16, help="prompts per forward")
    flag("--dtype", choices=["bf16", "fp32"], help="of the weights (default: bf16 if the GPU has it, else fp32)")
    flag("--compile", action="store_true", help="torch.compile the blocks: faster steps after a slow start")
    return parser


def make_settings(args, config, end_ids) -> Namespace:
    """The decoding flags, completed by the model's own decoder. Contradictory flags are refused."""
    s = Namespace(**decoding_settings(args))
    own = OWN_DECODER.get(config.model_type, LLADA)
    # Dream's own schedule has neither blocks nor a fixed number of tokens per step
    if s.schedule is None and (s.block or s.tokens_per_step or s.threshold is not None):
        s.schedule = "even"
    for name in ("score", "schedule", "temperature", "top_p"):
        if getattr(s, name) is None:
            setattr(s, name, own[name])
    # what the loop needs besides
    filtered = s.temperature not in (0, 1) or s.top_p < 1 or s.top_k > 0
    s.score_filtered = own["score_filtered"] and filtered
    s.mask_id, s.end_ids = config.mask_id, end_ids

    # length, blocks and steps must fit each other
    s.length = s.length or config.length
    whose = "--block" if s.block else "the model's own block"
    s.block = s.block or min(own["block"], s.length) or s.length
    if s.length % s.block:
        stop(f"--length {s.length}, {whose} {s.block}: the length must be a multiple of the block")
    blocks = s.length // s.block
    if sum([s.steps > 0, s.tokens_per_step > 0, s.threshold is not None]) > 1:
        stop("--steps, --tokens-per-step, --threshold: each says how many tokens a step unmasks; give one of them")
    if s.tokens_per_step > s.block:
        stop(f"--tokens-per-step {s.tokens_per_step}: a block has only {s.block} tokens; give a larger --block")
    if s.schedule == "dream" and (blocks > 1 or s.tokens_per_step or s.threshold is not None):
        stop("--schedule dream: has no blocks, tokens per step or threshold; use --schedule even")
    s.steps = s.steps or s.length
    if s.tokens_per_step:
        s.steps = blocks * -(-s.block // s.tokens_per_step)
    if s.steps > s.length or s.steps % blocks:
        stop(f"--steps {s.steps}: must be at most the length {s.length}, and a multiple of the {blocks} blocks")
    return s


def schedule(s) -> np.ndarray | None:
    """(N,): the step that unmasks the first token, the second, ... None with --threshold: the confidence decides."""
    if s.threshold is not None:
        return None
    if s.schedule == "dream":
        # step i unmasks a share 1 - t[i+1] / t[i] of the masks, the last step all the rest
        t = torch.linspace(1, 1e-3, s.steps + 1)
        t[-1] = 0
        step_of = []
        for i in range(s.steps):
            step_of += [i] * int((s.length - len(step_of)) * (1 - t[i + 1] / t[i]))
        return np.array(step_of)
    # every block is spent before the next one starts
    block, i = np.divmod(np.arange(s.length), s.block)
    steps = s.steps * s.block // s.length                # per block
    if s.tokens_per_step:                                # the last step of a block takes what is left
        return block * steps + i // s.tokens_per_step
    return np.sort(block * steps + i % steps)            # as LLaDA: the remainder goes to the first steps, one each

# -----------------------------------------------------------------------------
# one step of one row: which token, and which position first

NEVER = -1e30                   # a logit of probability 0; with -inf, an entropy would be nan


def without(z, tokens):
    """A copy in which these tokens have no probability."""
    z = z.clone()
    for token in tokens:
        z[:, token] = NEVER
    return z


def filter_logits(z, s):
    """
    (n, V) logits or log-probabilities -> (n, k), those of the distribution that tokens are drawn from: temperature,
    then top-p, then top-k. And index (n, k), the tokens that they belong to; None = all, in their order.
    """
    index = None
    if s.temperature > 0:
        z = z / s.temperature
    if s.top_p < 1:
        # the nucleus is nearly always among the first 64 tokens, and sorting the whole vocabulary is slow. But asking
        # whether it is means waiting for the GPU: a few positions are sorted whole
        p = z.softmax(-1)
        n, V = z.shape
        widths = [min(64, V), V] if n > 4 else [V]
        for width in widths:
            top, index = z.topk(width)
            top_probs = p.gather(-1, index)
            if width == V or bool((top_probs.sum(-1) > s.top_p).all()):
                break
        # the token that crosses top_p is kept
        before = F.pad(top_probs.cumsum(-1)[:, :-1], (1, 0))
        z = top.masked_fill(before > s.top_p, NEVER)
    # the k-th largest and all that equal it
    if s.top_k:
        z = z.masked_fill(z < z.topk(min(s.top_k, z.shape[-1])).values[:, -1:], NEVER)
    return z, index


def draw_tokens(logp, s, rng):
    """(n, V) log-probabilities -> tokens (n,) and their probability (n,). The mask token is never drawn."""
    banned = [s.mask_id, s.end_ids[0]] if s.suppress_eos == "logits" else [s.mask_id]
    # taken out and put back, instead of a copy of n x V
    columns = {id: logp[:, id].clone() for id in banned}
    for id in banned:
        logp[:, id] = NEVER
    if s.temperature == 0 or s.greedy:
        token = logp.argmax(-1)
    else:
        z, index = filter_logits(logp, s)
        # Gumbel-max, in float64 as LLaDA does (Apple's GPUs have fp32 only): argmax of logits - log(-log u)
        dtype = torch.float32 if logp.device.type == "mps" else torch.float64
        noise = torch.rand(logp.shape, dtype=dtype, generator=rng, device=logp.device)
        if index is not None:
            noise = noise.gather(-1, index)
        token = (z.to(dtype) - torch.log(-torch.log(noise))).argmax(-1)
        if index is not None:
            token = index.gather(-1, token[:, None])[:, 0]
    for id, column in columns.items():
        logp[:, id] = column
    return token, logp.gather(-1, token[:, None])[:, 0].exp()


def score_positions(z, h, token, confidence, s, rng):
    """
    (n,): the position with the lowest value is unmasked first (Eq. 2 is the entropy). h, token, confidence (n,):
    entropy, token and its probability under the model. z (n, V): log-probabilities; with --ties position, logits.
    """
    if s.score == "random":
        return torch.rand(len(z), generator=rng, device=z.device)
    # LLaDA's options logits_eos_inf and confidence_eos_eot_inf: positions that end the text come last
    if s.suppress_eos:
        z = without(z, s.end_ids[:1] if s.suppress_eos == "logits" else s.end_ids)
    # LLaDA scores the model's own distribution, and that is known by now
    elif s.ties == "entropy" and not s.score_filtered:
        if s.score == "entropy":
            return h
        if s.score == "confidence":
            return -confidence
    # Dream scores the distribution that it samples from
    z, index = filter_logits(z, s) if s.score_filtered else (z, None)
    if s.score == "entropy" and s.ties == "entropy":
        return entropy(z.log_softmax(-1))
    p = z.softmax(-1)
    if s.score == "entropy":
        # Dream's formula; in log-space, entropies that it rounds to 0 would differ
        return -(p * torch.log(p + 1e-10)).sum(-1)
    if s.score == "margin":
        top2 = p.topk(2).values
        return top2[:, 1] - top2[:, 0]
    if index is None:
        return -p.gather(-1, token[:, None])[:, 0]
    return -(p * (index == token[:, None])).sum(-1)


def choose(logits, k, s, rng):
    """
    One step of one row. logits (n, V): at its masked positions; k: how many to unmask, None = by --threshold.
    Returns where (k,), numbers below n; token (k,); and for the record entropy and probability (k,) at temperature 1.
    """
    logp = F.log_softmax(logits, -1, dtype=torch.float32)                                       # (n, V)
    h = entropy(logp)                                                                        # (n,)
    # a confidence belongs to a token, so that is drawn first. Other scores need none, and noise for n x V is slow
    token = confidence = None
    if s.score == "confidence" or s.threshold is not None:
        token, confidence = draw_tokens(logp, s, rng)                                        # (n,), (n,)
    # the best first; ties by position, or before that by the entropy at temperature 1
    if s.ties == "position":
        order = score_positions(logits, h, token, confidence, s, rng).argsort(stable=True)   # (n,)
    else:
        order = h.argsort(stable=True)
        order = order[score_positions(logp, h, token, confidence, s, rng)[order].argsort(stable=True)]
    # as many as the schedule says, or all that are certain enough, at least one
    where = order[:k]
    if s.threshold is not None:
        certain = order[confidence[order] > s.threshold]
        where = certain if len(certain) else order[:1]
    if token is None:
        token, confidence = draw_tokens(logp[where], s, rng)
    else:
        token, confidence = token[where], confidence[where]
    return where, token, h[where], confidence

# -----------------------------------------------------------------------------
# the loop

def new_trajectory(id, prompt, s) -> Trajectory:
    """A response of N masks."""
    N = s.length
    return Trajectory(id, np.array(prompt), response=np.full(N, s.mask_id), step=np.full(N, -1),
                      entropy=np.full(N, np.nan, np.float32), confidence=np.full(N, np.nan, np.float32))


def is_done(traj, s) -> bool:
    """All is decoded, or all before the first end token: what comes after it cannot change the text."""
    return bool(traj.decoded.all()) or (not s.whole and first_end(traj, s.end_ids) is not None)


def next_step(traj, step_of):
    """(number of this step, how many tokens it unmasks); None = by --threshold."""
    if step_of is None:
        return traj.step.max() + 1, None
    step = step_of[traj.decoded.sum()]
    return step, np.sum(step_of == step)


def masked_view(traj, s) -> View:
    """What the model sees of an unfinished response; the targets are the masks of its first unfinished block."""
    masked = np.flatnonzero(~traj.decoded)
    return View(traj, traj.decoded, masked[masked // s.block == masked[0] // s.block])


@torch.no_grad()
def decode(model, prompts, s, batch_size: int = 16):
    """
    prompts: list of (id, token ids). Yields a Trajectory whenever one is finished; the next prompt takes its place.
    Each row is scored alone and has its own random numbers: which rows share a batch changes nothing but the rounding.
    """
    device = next(model.parameters()).device
    step_of = schedule(s)
    waiting = sorted(prompts, key=lambda prompt: len(prompt[1]))     # taken from the end: similar lengths share a batch
    live = []
    while waiting or live:
        # fill the batch up
        while waiting and len(live) < batch_size:
            live.append(new_trajectory(*waiting.pop(), s))

        # one forward for all rows
        views = [masked_view(traj, s) for traj in live]
        logits = model(*pack(views, s.mask_id, device))                                      # (B, most masks, V)

        # each row by itself; the seed depends on the prompt and the step, not on the batch
        chosen = []
        for b, (traj, _, masked) in enumerate(views):
            step, k = next_step(traj, step_of)
            rng = torch.Generator(device).manual_seed(crc32(f"{s.seed}/{traj.id}/{step}".encode()))
            chosen.append((step, choose(logits[b, :len(masked)], k, s, rng)))
        del logits                                                                           # before the next forward

        # unmask; finished rows leave. All rows have been queued above, because .cpu() waits for the device
        live = []
        for (traj, _, masked), (step, results) in zip(views, chosen, strict=True):
            where, token, h, confidence = [x.cpu().numpy() for x in results]
            if not np.isfinite(h).all():
                stop(f"prompt {traj.id}: the logits are not finite; the checkpoint, the adapter or its dtype is broken")
            at = masked[where]
            traj.step[at] = step
            traj.response[at] = token
            traj.entropy[at] = h
            traj.confidence[at] = confidence
            if is_done(traj, s):
                yield traj
            else:
                live.append(traj)


def decode_all(model, tok, config, items, s, batch_size, label) -> list[Trajectory]:
    """All items, decoded and judged, in their order. Every rank decodes its share, and gets the others' too."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    prompts = encode_prompts(items, tok, config, s)
    if world_size > 1:
        all_ranks_agree("cpu", checksum_of_prompts=crc32(repr((s, prompts)).encode()))
    trajs = {id: new_trajectory(id, prompt, s) for id, prompt in prompts}
    mine = sorted(prompts, key=lambda prompt: len(prompt[1]))[rank::world_size]
    bar = Bar(len(mine), label)
    for done, traj in enumerate(decode(model, mine, s, batch_size), 1):
        trajs[traj.id] = traj
        bar(done)
    if world_size > 1:
        # a sum over ranks, to which each adds zeros for what others decode
        ours = {id for id, _ in mine}
        for name in ("response", "step", "entropy", "confidence"):
            table = np.stack([getattr(traj, name) for traj in trajs.values()])               # (items, N)
            table[[id not in ours for id in trajs]] = 0
            with naming_lost_ranks():
                dist.all_reduce(torch.from_numpy(table))             # in place
            for traj, row in zip(trajs.values(), table, strict=True):
                setattr(traj, name, row)
    for traj, item in zip(trajs.values(), items, strict=True):
        judge_answer(traj, item, tok)
    return list(trajs.values())

# -----------------------------------------------------------------------------
# records

def encode_prompts(items, tok, config, s) -> list[tuple]:
    """[(id, token ids)], each checked to fit the model."""
    pairs = []
    for item in items:
        ids = prompt_ids(tok, item, s.raw_prompt)
        if len(ids) + s.length > config.positions:
            stop(f"{item['place']}: {len(ids)} prompt tokens and --length {s.length}, but the model has "
                 f"{config.positions} positions; delete the line, or give a smaller --length")
        pairs.append((str(item["id"]), ids))
    return pairs


def record_head(config, s, tok, dtype, adapter) -> dict:
    """What every record of one run says about how it was made."""
    model = {"name": config.name, "mask_id": config.mask_id, "vocab_size": config.vocab, "end_ids": tok.end_ids}
    # the authors' loader knows LLaDA's own decoding as "default"
    method = "default" if (config.model_type, s.score) == ("llada", "confidence") else s.score
    return {"method": method, "model": model,
            "decode": decoding_settings(s) | {"adapter": adapter, "dtype": str(dtype)}}


def make_record(traj, item, head: dict) -> dict:
    """README "A record"."""
    logged = {}
    for name in ("entropy", "confidence"):
        logged[name] = [None if np.isnan(x) else float(f"{x:.6g}") for x in getattr(traj, name)]
    return {"id": item["id"], "prompt": item["prompt"], "response": traj.text,
            "response_token_ids": traj.response.tolist(), "decoding_order": traj.step.tolist(),
            "prompt_token_ids": traj.prompt.tolist(), **logged, "answer": item["answer"], "kind": item["kind"],
            "correct": traj.correct, **head}


def judge_answer(traj, item, tok):
    """Fills in what the response says, and whether it is right."""
    fill_in_text(traj, tok)
    traj.correct = judge(traj.text, traj.end is not None, item["answer"], item["kind"])


def read_done(path: str, head: dict, prompts: list[tuple]) -> set:
    """The ids that an earlier run finished. A file of another run, or of something else, is refused, untouched."""
    if not os.path.exists(path):
        return set()
    done, prompt_of, parser = set(), dict(prompts), flags()
    with open(path, "rb+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)                    # other ranks may be writing
        *lines, rest = f.read().split(b"\n")             # rest: what a kill has left of a line
        # without a whole line, this may be the beginning of our first record; anything else is not ours
        torn = not lines and rest.startswith(b'{"id": '[:len(rest)]) and not rest.endswith(b"}")
        if not torn and b'"decoding_order": ' not in (lines or [rest])[0]:
            stop(f"--out {path}: exists and holds no trajectories; give another --out")
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            record = parse_line(place, line.decode())
            for part in ("model", "decode"):
                changed = find_change(record.get(part) or {}, head[part], parser)
                if changed:
                    stop(f"{place}: was decoded with {changed}; give another --out")
            id, prompt = str(record["id"]), record["prompt_token_ids"]
            if prompt_of.get(id, prompt) != prompt:
                stop(f"{place}: id {id!r} has another prompt there; give another --out, or other ids")
            done.add(id)
        f.truncate(sum(len(line) + 1 for line in lines))
    return done


def append_record(path: str, record: dict):
    """A whole line, under a lock: several ranks write to one file."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def show_in_colour(traj, tok):
    """The response with one shade per token, pale = early, dark = late; _ ends it, a dot was never decoded."""
    # colours of a 256-colour terminal, with black or white text on them
    shades = [231, 194, 157, 120, 83, 47, 41, 35, 29, 23, 22]
    last = max(1, traj.step.max())
    for token, step in zip(traj.response, traj.step, strict=True):
        if step < 0:
            print(".", end="")
        else:
            ink = 16 if step < 0.6 * last else 231
            word = "_" if token in tok.end_ids else tok.decode([int(token)])
            print(f"\033[48;5;{shades[10 * step // last]};38;5;{ink}m{word}\033[0m", end="")
    print()

# -----------------------------------------------------------------------------

def main():
    args = flags().parse_args()
    if not args.out and not args.show:
        stop("--out: give a file for the trajectories, or --show to look at one decoding")
    if (args.prompts is None) == (args.prompt is None):
        stop('--prompts, --prompt: give one of them, a file or "a text"')
    rank, world_size, device, dtype = setup_device(args.dtype)

    # prompts, and what an earlier run has done of them
    config = read_config(args.model)
    tok = load_tokenizer(config)
    s = make_settings(args, config, tok.end_ids)
    if args.prompt is not None:
        items = [read_item("--prompt", {"id": 0, "prompt": args.prompt})]
    else:
        items = read_prompts(args.prompts, 1 if args.show else args.limit)
    prompts = encode_prompts(items, tok, config, s)
    head = record_head(config, s, tok, dtype, args.adapter)
    done = read_done(args.out, head, prompts) if args.out else set()
    by_id = {str(item["id"]): item for item in items}

    # shards of four batches, dealt to the ranks. A shard that was cut short is decoded again in the same batches, so
    # that the same command ends in the same records to the last digit
    size = min(4 * args.batch_size, -(-len(prompts) // world_size))
    shards = [prompts[i:i + size] for i in range(0, len(prompts), size)][rank::world_size]
    shards = [shard for shard in shards if any(id not in done for id, _ in shard)]

    if not shards:
        print(f"rank {rank}: nothing is left to decode; {len(done)} responses were there before", flush=True)
        return

    # the model, with an adapter if one is given
    model = load_model(config, device, dtype)
    if args.adapter:
        lora.load(model, args.adapter)
    if args.compile:
        model.compile_blocks()

    # decode; every finished response is written at once
    bar, start = Bar(sum(len(shard) for shard in shards), "decode"), time.time()
    decoded = tokens = valid = 0
    for shard in shards:
        for traj in decode(model, shard, s, args.batch_size):
            if traj.id in done:
                continue
            item = by_id[traj.id]
            judge_answer(traj, item, tok)
            if args.out:
                append_record(args.out, make_record(traj, item, head))
            if args.show:
                print(item["prompt"])
                show_in_colour(traj, tok)
                return
            decoded += 1
            tokens += int(traj.decoded.sum())
            valid += traj.correct is not False
            bar(decoded, f"{tokens / (time.time() - start):,.0f} tok/s | {100 * valid / decoded:.0f} % valid")
    print(f"rank {rank}: {decoded} responses decoded, {valid} of them valid; {len(done)} were there before", flush=True)


if __name__ == "__main__":
    main()
