"""
Decodes prompts with a masked diffusion model and logs the trajectory: which token came at which step, and how certain
the model was of it.

One GPU, or the CPU:
$ python decode.py --model Dream-org/Dream-v0-Instruct-7B --prompts MixChain-Z-PRM12K --out traj.jsonl

8 GPUs, each with its share of the prompts:
$ torchrun --nproc_per_node 8 decode.py --model ... (the same flags)

One decoding in colour, early tokens pale, late ones dark:
$ python decode.py --model M --prompts prompts.jsonl --show

The response starts as N masks. Every step: one forward, a score for each masked position, and the best positions get
their token. With the --out of an earlier run it continues that run. Score, schedule and temperature default to the
model's own decoder; where we depart from it: README "Departures".

B: batch, T: prompt + response, N: response, V: vocabulary, n: masked positions of one row
"""
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from zlib import crc32

import numpy as np
import torch

import lora
from data import first_end, judge, parse_line, prompt_ids, read_prompts
from model import load_model, load_tokenizer, read_config
from util import Bar, new_parser, setup_device, stop

# -----------------------------------------------------------------------------
# settings

def add_decoding_flags(parser):
    # how many tokens, and when
    parser.add_argument("--length", type=int, default=256, help="N, response tokens")
    parser.add_argument("--steps", type=int, default=0, help="model steps (default: one per token)")
    parser.add_argument("--tokens-per-step", type=int, default=0,
                        help="instead of --steps; the paper also measures 2")
    parser.add_argument("--threshold", type=float,
                        help="unmask all tokens above this confidence, at least one")
    parser.add_argument("--block", type=int, default=0,
                        help="left to right in blocks of this length (default: the model's own)")
    parser.add_argument("--schedule", choices=["even", "dream"],
                        help="tokens over steps (default: the model's own)")
    # which position, which token
    parser.add_argument("--score", choices=["entropy", "confidence", "margin", "random"],
                        help="what is unmasked first")
    parser.add_argument("--temperature", type=float, help="0 = greedy (default: the model's own)")
    parser.add_argument("--top-p", type=float,
                        help="nucleus, after the temperature (default: the model's own)")
    parser.add_argument("--top-k", type=int, default=0, help="0 = off")
    parser.add_argument("--suppress-eos", choices=["logits", "confidence"],
                        help="LLaDA's rules for code: never choose EOS, or choose positions that end the text last")
    # prompts and machine
    parser.add_argument("--raw-prompt", action="store_true",
                        help="feed the bare text, without the chat template")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts per forward")
    parser.add_argument("--seed", type=int, default=0, help="seeds sampling, together with the prompt's id")
    parser.add_argument("--limit", type=int, default=0, help="only the first prompts")
    parser.add_argument("--dtype", choices=["bf16", "fp32"],
                        help="of the weights (default: bf16 if the GPU has it, else fp32)")


def parse_args(argv=None):
    parser = new_parser(__doc__)
    parser.add_argument("--model", required=True, help="hub name or folder")
    parser.add_argument("--adapter", help="LoRA folder in peft's format")
    parser.add_argument("--prompts", required=True,
                        help=".jsonl, .parquet, gsm8k, MixChain-Z-PRM12K or Ling-Coder-SFT")
    parser.add_argument("--out", help="trajectories, one JSON object per line; continued if it exists")
    parser.add_argument("--show", action="store_true", help="print the first prompt's decoding in colour")
    parser.add_argument("--compile", action="store_true",
                        help="torch.compile the blocks: faster steps after a slow start")
    add_decoding_flags(parser)
    return parser.parse_args(argv)


@dataclass
class Settings:
    """How to decode. A record says it under "decode", but for the last three fields, which are the model's."""
    length: int
    steps: int
    block: int
    tokens_per_step: int
    threshold: float | None
    schedule: str
    score: str
    temperature: float
    top_p: float
    top_k: int
    suppress_eos: str | None
    seed: int
    score_filtered: bool                                 # score the distribution that tokens are drawn from
    mask_id: int
    end_ids: list


def make_settings(args, config, end_ids) -> Settings:
    """The flags, completed by the model's own decoder. Contradictory flags are refused."""
    own = config.family["decode"]
    chosen = {}
    for name in ("score", "schedule", "temperature", "top_p"):
        given = getattr(args, name)
        chosen[name] = own[name] if given is None else given
    # Dream's own schedule has neither blocks nor a fixed number of tokens per step
    if args.schedule is None and (args.block or args.tokens_per_step or args.threshold is not None):
        chosen["schedule"] = "even"

    # lengths, blocks and steps must fit each other
    block = args.block or min(own["block"], args.length) or args.length
    if args.length % block:
        whose = "--block" if args.block else "the model's own block"
        stop(f"--length {args.length}, {whose} {block}: the length must be a multiple of the block")
    blocks = args.length // block
    if sum([args.steps > 0, args.tokens_per_step > 0, args.threshold is not None]) > 1:
        stop("--steps, --tokens-per-step, --threshold: each says how many tokens a step unmasks; give one of them")
    if args.tokens_per_step > block:
        stop(f"--tokens-per-step {args.tokens_per_step}: a block has only {block} tokens; give a larger --block")
    if chosen["schedule"] == "dream" and (blocks > 1 or args.tokens_per_step or args.threshold is not None):
        stop("--schedule dream: has no blocks, tokens per step or threshold; use --schedule even")
    steps = args.steps or args.length
    if args.tokens_per_step:
        steps = blocks * -(-block // args.tokens_per_step)
    if steps > args.length or steps % blocks:
        stop(f"--steps {steps}: must be at most the length {args.length}, and a multiple of the {blocks} blocks")
    return Settings(args.length, steps, block, args.tokens_per_step, args.threshold, **chosen, top_k=args.top_k,
                    suppress_eos=args.suppress_eos, seed=args.seed, score_filtered=own["score_filtered"],
                    mask_id=config.mask_id, end_ids=end_ids)


def schedule(s: Settings) -> list[int]:
    """How many tokens each step unmasks, over all blocks. Empty with --threshold: the model's confidence decides."""
    if s.threshold is not None:
        return []
    if s.schedule == "dream":
        # step i unmasks a share 1 - t[i+1] / t[i] of the masks, the last step all the rest
        t = torch.linspace(1, 1e-3, s.steps + 1)
        counts, masks = [], s.length
        for i in range(s.steps):
            count = int(masks * (1 - t[i + 1] / t[i])) if i < s.steps - 1 else masks
            counts.append(count)
            masks -= count
        return counts
    # every block is spent before the next one starts
    blocks = s.length // s.block
    # a fixed number per step; the last step of a block takes what is left
    if s.tokens_per_step:
        full, rest = divmod(s.block, s.tokens_per_step)
        counts = [s.tokens_per_step] * full + [rest] * (rest > 0)
    else:
        # as LLaDA: evenly, and the remainder goes to the first steps, one token each
        steps = s.steps // blocks
        counts = [s.block // steps + (i < s.block % steps) for i in range(steps)]
    return counts * blocks

# -----------------------------------------------------------------------------
# one step of one row: which token, and which position first

def entropy(logits):
    """(n, V) -> (n,), in nats."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)   # clamp: 0 * -inf would be nan


def without(logits, tokens):
    """A copy in which these tokens have no probability."""
    logits = logits.clone()
    for token in tokens:
        logits[:, token] = -torch.inf
    return logits


def filter_logits(logits, s):
    """(n, V) logits -> those of the distribution that tokens are drawn from: temperature, then top-p, then top-k."""
    if s.temperature > 0:
        logits = logits / s.temperature
    if s.top_p < 1:
        # the nucleus is nearly always among the first 64 tokens, and sorting the whole vocabulary is slow. But asking
        # whether it is means waiting for the GPU: a few positions are sorted whole
        n, V = logits.shape
        widths = [min(64, V), V] if n > 4 else [V]
        for k in widths:
            top, index = logits.topk(k)
            p = logits.softmax(-1).gather(-1, index)
            if k == V or bool((p.sum(-1) > s.top_p).all()):
                break
        # the token that crosses top_p is kept, and so is every token as probable as it
        smallest = top.masked_fill(p.cumsum(-1) - p > s.top_p, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    # the k-th largest and all that equal it
    if s.top_k:
        logits = logits.masked_fill(logits < logits.topk(min(s.top_k, logits.shape[-1])).values[:, -1:], -torch.inf)
    return logits


def draw_tokens(logits, s, rng):
    """(n, V) -> tokens (n,) and their probability at temperature 1 (n,). The mask token is never drawn."""
    banned = [s.mask_id, s.end_ids[0]] if s.suppress_eos == "logits" else [s.mask_id]
    allowed = filter_logits(without(logits, banned), s)
    if s.temperature > 0:
        # Gumbel-max, in float64 as LLaDA does (Apple's GPUs have fp32 only): argmax of logits - log(-log u)
        dtype = torch.float32 if logits.device.type == "mps" else torch.float64
        noise = torch.rand(logits.shape, dtype=dtype, generator=rng, device=logits.device)
        token = (allowed.to(dtype) - torch.log(-torch.log(noise))).argmax(-1)
    else:
        token = allowed.argmax(-1)
    return token, logits.softmax(-1).gather(-1, token[:, None])[:, 0]


def score_positions(logits, token, s, rng):
    """(n, V) -> (n,): the position with the lowest value is unmasked first (Eq. 2 is the entropy)."""
    # LLaDA's logits_eos_inf, and its confidence_eos_eot_inf, by which positions that end the text come last
    if s.suppress_eos:
        logits = without(logits, s.end_ids[:1] if s.suppress_eos == "logits" else s.end_ids)
    # Dream scores the distribution that it samples from, LLaDA the model's own
    z = filter_logits(logits, s) if s.score_filtered else logits
    if s.score == "entropy":
        return entropy(z)
    if s.score == "confidence":
        return -z.softmax(-1).gather(-1, token[:, None])[:, 0]
    if s.score == "margin":
        top2 = z.softmax(-1).topk(2).values
        return top2[:, 1] - top2[:, 0]
    return torch.rand(len(z), generator=rng, device=z.device)

# -----------------------------------------------------------------------------
# the loop

@dataclass
class Row:
    """One prompt while it is decoded. step[i] is the step at which position i was unmasked, -1 while it is masked."""
    id: str
    prompt: list
    canvas: np.ndarray                                   # (N,) token ids, mask_id where undecided
    step: np.ndarray                                     # (N,)
    entropy: np.ndarray                                  # (N,) at its own step, temperature 1, nats
    confidence: np.ndarray                               # (N,) probability of the chosen token, likewise
    steps_done: int = 0


def new_row(id, prompt, s):
    N = s.length
    return Row(id, prompt, np.full(N, s.mask_id), np.full(N, -1), np.zeros(N), np.zeros(N))


def is_done(row, s):
    """All is decoded, or all before the first EOS: what comes after it cannot change the text."""
    return bool((row.step >= 0).all()) or first_end(row.canvas, row.step, s.end_ids) is not None


def decode_batch(rows, s, device):
    """ids, attend (B, T) and pos (B, n) for the model; each row's masked positions in its first unfinished block."""
    N = s.length
    T = max(len(row.prompt) for row in rows) + N
    ids    = np.zeros((len(rows), T), dtype=np.int64)
    attend = np.zeros((len(rows), T), dtype=bool)        # False on left padding
    pos    = np.full((len(rows), s.block), T - 1)        # a row with fewer masks than others asks for the last position
    masked = []
    # one row per prompt
    for b, row in enumerate(rows):
        start = T - N - len(row.prompt)
        ids[b, start:T - N] = row.prompt
        ids[b, T - N:] = row.canvas
        attend[b, start:] = True
        block = np.argmax(row.step < 0) // s.block * s.block
        masked.append(block + np.flatnonzero(row.step[block:block + s.block] < 0))
        pos[b, :len(masked[b])] = T - N + masked[b]
    pos = pos[:, :max(len(m) for m in masked)]
    return [torch.from_numpy(x).to(device) for x in (ids, attend, pos)], masked


@torch.no_grad()
def decode(model, prompts, s: Settings, batch_size: int = 16, token_model=None):
    """
    prompts: list of (id, token ids). Yields a Row whenever one is finished; the next prompt takes its place. Each row
    is scored alone and has its own random numbers: which rows share a batch changes nothing but the rounding.
    token_model: another model that chooses the tokens, while `model` chooses their positions (eval.py --swap).
    """
    device = next(model.parameters()).device
    counts = schedule(s)
    waiting = sorted(prompts, key=lambda prompt: len(prompt[1]))     # taken from the end: similar lengths share a batch
    live = []
    while waiting or live:
        # fill the batch up
        while waiting and len(live) < batch_size:
            live.append(new_row(*waiting.pop(), s))
        # Dream's first step may unmask nothing: no forward for it
        for row in live:
            while counts and counts[row.steps_done] == 0:
                row.steps_done += 1

        # one forward for all rows
        batch, candidates = decode_batch(live, s, device)
        logits = model(*batch)                                                               # (B, n, V)
        token_logits = token_model(*batch) if token_model else logits

        # per row: which positions, and their tokens
        results = []
        for b, (row, masked) in enumerate(zip(live, candidates, strict=True)):
            z = logits[b, :len(masked)].float()                                              # (n, V)
            h = entropy(z)                                                                   # (n,)  what is logged
            # the seed depends on the prompt and the step, not on the batch
            seed = crc32(f"{s.seed}/{row.id}/{row.steps_done}".encode())
            rng = torch.Generator(device).manual_seed(seed)
            # entropy and margin order positions without knowing the tokens: drawing them all would be the slowest line
            draw_first = s.score == "confidence" or s.threshold is not None
            guess, sure = draw_tokens(z, s, rng) if draw_first else (None, None)             # (n,), (n,)
            score = score_positions(z, guess, s, rng)                                        # (n,)

            # the best first; ties by the raw entropy, then by position
            order = h.argsort(stable=True)
            order = order[score[order].argsort(stable=True)]
            # as many as the schedule says, or all that are certain enough
            if counts:
                chosen = order[:counts[row.steps_done]]
            else:
                chosen = order[sure[order] > s.threshold]
                chosen = chosen if len(chosen) else order[:1]
            # their tokens
            if draw_first and not token_model:
                token, confidence = guess[chosen], sure[chosen]
            else:
                token, confidence = draw_tokens(token_logits[b, chosen].float(), s, rng)
            results.append(torch.stack([chosen.float(), token.float(), h[chosen], confidence]))

        # one copy from the device for all rows; fp32 holds token ids exactly
        sizes = [result.shape[1] for result in results]
        results = torch.cat(results, 1).cpu().split(sizes, 1)
        # unmask; finished rows leave
        unfinished = []
        for row, masked, result in zip(live, candidates, results, strict=True):
            if not result.isfinite().all():
                stop(f"prompt {row.id}: the logits are not finite; the checkpoint, the adapter or its dtype is broken")
            chosen, token, h, confidence = result.numpy()
            where = masked[chosen.astype(int)]
            row.canvas[where] = token.astype(int)
            row.step[where] = row.steps_done
            row.entropy[where] = h
            row.confidence[where] = confidence
            row.steps_done += 1
            if is_done(row, s):
                yield row
            else:
                unfinished.append(row)
        live = unfinished

# -----------------------------------------------------------------------------
# records

def encode_prompts(items, tok, config, s, raw: bool) -> list[tuple]:
    """[(id, token ids)], each checked to fit the model."""
    pairs = []
    for item in items:
        ids = prompt_ids(tok, item, raw)
        if len(ids) + s.length > config.positions:
            stop(f"{item['place']}: {len(ids)} prompt tokens and --length {s.length}, but the model has "
                 f"{config.positions} positions; delete the line, or give a smaller --length")
        pairs.append((str(item["id"]), ids))
    return pairs


def record_head(args, config, s, tok, dtype) -> dict:
    """What every record of one run says about how it was made."""
    settings = asdict(s)
    for name in ("score_filtered", "mask_id", "end_ids"):
        del settings[name]
    model = {"name": config.name, "mask_id": config.mask_id, "vocab_size": config.vocab, "end_ids": tok.end_ids}
    # the authors' loader knows LLaDA's own decoding as "default"
    method = "default" if (config.model_type, s.score) == ("llada", "confidence") else s.score
    settings |= {"raw_prompt": args.raw_prompt, "adapter": args.adapter, "dtype": str(dtype)}
    return {"method": method, "model": model, "decode": settings}


def make_record(row, item, tok, s, head: dict) -> dict:
    """README "Record format"."""
    # the text is what comes before the first EOS
    end = first_end(row.canvas, row.step, s.end_ids)
    shown = row.canvas[row.step >= 0] if end is None else row.canvas[:end]
    text = tok.decode(shown.tolist(), skip_special_tokens=True)
    logged = {}
    for name in ("entropy", "confidence"):
        values = zip(getattr(row, name), row.step, strict=True)
        logged[name] = [float(f"{x:.6g}") if step >= 0 else None for x, step in values]
    return {"id": item["id"], "prompt": item["prompt"], "response": text, "response_token_ids": row.canvas.tolist(),
            "decoding_order": row.step.tolist(), "prompt_token_ids": list(row.prompt), **logged,
            "answer": item["answer"], "correct": judge(text, end is not None, item["answer"], item["kind"]), **head}


def check_same_run(place: str, record: dict, head: dict, prompt_of: dict):
    """A record that this run would not have written must not be continued."""
    for part in ("model", "decode"):
        for key, now in head[part].items():
            before = (record.get(part) or {}).get(key)
            if before != now:
                stop(f"{place}: was decoded with {key} {before!r}, now it is {now!r}; give another --out")
    prompt = prompt_of.get(str(record["id"]), record["prompt_token_ids"])
    if prompt != record["prompt_token_ids"]:
        stop(f"{place}: id {record['id']!r} has another prompt there; give another --out, or other ids")


def read_done(path: str, head: dict, prompts: list[tuple]) -> set:
    """The ids that an earlier run finished. A file of another run, or of something else, is refused, untouched."""
    if not os.path.exists(path):
        return set()
    done, prompt_of = set(), dict(prompts)
    with open(path, "rb+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)                    # other ranks may be writing
        content = f.read()
        first, newline, _ = content.partition(b"\n")
        # a kill may have cut off the very first line
        torn = not newline and first.startswith(b'{"id": '[:len(first)]) and not first.rstrip().endswith(b"}")
        if content and not torn and b'"decoding_order": ' not in first:
            stop(f"--out {path}: exists and holds no trajectories; give another --out")
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            record = parse_line(f"{path}:{number}", line.decode())
            check_same_run(f"{path}:{number}", record, head, prompt_of)
            done.add(str(record["id"]))
        f.truncate(whole)                                # what follows the last line break was cut off by a kill
    return done


def append_record(path: str, record: dict):
    """A whole line, under a lock: several ranks write to one file."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def show_in_colour(row, tok):
    """The response with one shade per token, pale = early, dark = late; a dot was never decoded."""
    # colours of a 256-colour terminal, with black or white text on them
    shades = [231, 194, 157, 120, 83, 47, 41, 35, 29, 23, 22]
    last = max(1, row.step.max())
    for token, step in zip(row.canvas, row.step, strict=True):
        if step < 0:
            print(".", end="")
        else:
            ink = 16 if step < 0.6 * last else 231
            print(f"\033[48;5;{shades[10 * step // last]};38;5;{ink}m{tok.decode([int(token)])}\033[0m", end="")
    print()

# -----------------------------------------------------------------------------

def main():
    args = parse_args()
    if not args.out and not args.show:
        stop("--out: give a file for the trajectories, or --show to look at one decoding")
    rank, world_size, device, dtype = setup_device(args.dtype)

    # prompts, and what an earlier run has done of them
    config = read_config(args.model)
    tok = load_tokenizer(config)
    s = make_settings(args, config, tok.end_ids)
    items = read_prompts(args.prompts, 1 if args.show else args.limit)
    prompts = encode_prompts(items, tok, config, s, args.raw_prompt)
    head = record_head(args, config, s, tok, dtype)
    done = read_done(args.out, head, prompts) if args.out else set()
    by_id = {str(item["id"]): item for item in items}

    # shards of four batches, dealt to the ranks. A shard that was cut short is decoded again in the same batches, so
    # that the same command ends in the same records to the last digit
    size = min(4 * args.batch_size, -(-len(prompts) // world_size))
    shards = [prompts[i:i + size] for i in range(0, len(prompts), size)][rank::world_size]
    shards = [shard for shard in shards if any(id not in done for id, _ in shard)]
    total = sum(id not in done for shard in shards for id, _ in shard)

    # the model, with an adapter if one is given
    model = load_model(config, device, dtype)
    if args.adapter:
        lora.load(model, args.adapter)
    if args.compile:
        model.compile_blocks()

    # decode; every finished row is written at once
    bar, start = Bar(total, "decode"), time.time()
    count = tokens = valid = 0
    for shard in shards:
        for row in decode(model, shard, s, args.batch_size):
            if row.id in done:
                continue
            record = make_record(row, by_id[row.id], tok, s, head)
            if args.out:
                append_record(args.out, record)
            if args.show:
                show_in_colour(row, tok)
            count += 1
            tokens += int((row.step >= 0).sum())
            valid += record["correct"] is not False
            bar(count, f"{tokens / (time.time() - start):,.0f} tok/s | {100 * valid / count:.0f} % valid")
    print(f"rank {rank}: {count} responses decoded, {valid} of them valid; {len(done)} were there before", flush=True)


if __name__ == "__main__":
    main()
