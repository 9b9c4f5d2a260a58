"""Decodes prompts with a masked diffusion model and logs the trajectory: which token came when, and how sure it was.

    python decode.py --model M --prompts p.jsonl --out traj.jsonl
    torchrun --nproc_per_node 8 decode.py --model M --prompts p.jsonl --out traj.jsonl
    python decode.py --model M --prompts p.jsonl --show              # one decoding in colour: pale came first

Run again with the same --out and it goes on. Score, schedule and temperature default to the model's own. Departures
from the native decoders: ties are broken by the raw entropy, then by position; the mask token is never chosen; a row is
done once everything before its first EOS is filled. Letters: B rows, N canvas, V vocabulary, n scored positions.
"""
import collections
import fcntl
import json
import mmap
import os
import time
import zlib
from types import SimpleNamespace

import lora
from data import Bar, check_record, first_end, judge, lines, prompt_ids, read_prompts, safely
from model import Flags, fingerprint, load, load_tokenizer, read_config, skeleton, stop

# isort: split
import numpy as np
import torch


def schedule(s) -> list[int]:
    """How many tokens each step unmasks, over all blocks; what a block holds is spent before the next one starts."""
    if s.threshold is not None:
        return []                                        # the model's confidence decides
    if s.schedule == "dream":                            # step i: masks * (1 - t[i+1] / t[i]), the last step the rest
        t, left, counts = torch.linspace(1, 1e-3, s.steps + 1), s.length, []
        for i in range(s.steps):
            counts.append(int(left * (1 - t[i + 1] / t[i])) if i < s.steps - 1 else left)
            left -= counts[-1]
        return counts
    if s.tokens_per_step:
        k = s.tokens_per_step
        block = [k] * (s.block // k) + [s.block % k] * (s.block % k > 0)
    else:                                                # even: the remainder goes one each to the first steps
        steps = s.steps * s.block // s.length
        block = [s.block // steps + (i < s.block % steps) for i in range(steps)]
    return block * (s.length // s.block)


def entropy(z):
    """(n, V) logits -> (n,) entropy in nats; an entry at -inf counts 0 log 0 = 0."""
    return -(z.softmax(-1) * z.log_softmax(-1).clamp(min=-1e30)).sum(-1)


def trim(z, s):
    """(n, V) logits -> logits of the distribution tokens are drawn from: temperature, top-p, top-k, in this order."""
    if s.temperature > 0:
        z = z / s.temperature
    if s.top_p < 1:
        for k in (min(64, z.shape[-1]), z.shape[-1]):    # nearly always among the first 64: sorting V is slow
            top, where = z.topk(k)
            p = z.softmax(-1).gather(-1, where)                                           # (n, k)
            if bool((p.sum(-1) > s.top_p).all()):
                break
        low = top.masked_fill(p.cumsum(-1) - p > s.top_p, torch.inf).amin(-1, keepdim=True)   # the one that crosses p
        z = torch.where(z < low, -torch.inf, z)          # and its equals: no sort's whim decides
    if 0 < s.top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(s.top_k).values[:, -1:], -torch.inf)
    return z


def suppress(z, s):
    return z.index_fill(-1, torch.tensor(s.end_ids, device=z.device), -torch.inf) if s.suppress_eos else z


def unsure(logits, s):
    """(n, V) -> raw entropy (n,), and the score that needs no token (n,): low goes first."""
    raw = logits.float()
    H = entropy(raw)
    if s.score not in ("entropy", "margin"):
        return H, H
    z = suppress(raw, s)
    z = z if s.clean else trim(z, s)                     # Dream scores the trimmed distribution, LLaDA the clean one
    if s.score == "entropy":
        return H, H if z is raw else entropy(z)
    top = z.softmax(-1).topk(2).values                                                    # (n, 2)
    return H, top[:, 1] - top[:, 0]


def choose(logits, s, generators=None):
    """(n, V) -> token (n,), its raw probability (n,), the mass beside it (n,): low = confident, to the last bit."""
    if generators:                                       # one V-long draw a position: the same in any chunk and batch
        noise = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        for u, g in zip(noise, generators, strict=True):
            u.uniform_(generator=g)
        noise.log_().neg_().log_()                                                        # (n, V)  log(-log u)

    def draw(z):                                         # Gumbel-max in float64: argmax(z / T - log(-log u))
        z = trim(suppress(z, s), s)
        return (z.double() - noise if generators else z).argmax(-1)

    z = logits.float()
    token = draw(z)
    masks = token == s.mask_id
    if masks.any():                                      # again without it, before the cut: it may be the whole nucleus
        token = torch.where(masks, draw(z.index_fill(-1, token.new_tensor([s.mask_id]), -torch.inf)), token)
    sure = z.softmax(-1).gather(-1, token[:, None])[:, 0]
    if s.score != "confidence":
        return token, sure, sure
    q = (suppress(z, s) if s.clean else trim(suppress(z, s), s)).softmax(-1)
    return token, sure, q.scatter_(-1, token[:, None], 0).sum(-1)


def slices(x):
    """Rows of x (n, V) a few at a time: temporaries of 2^20 entries stay in a CPU's cache, 2^24 keep a GPU busy.
    Never a last row alone: torch adds up a single row in another order, and equals would not stay equal."""
    size = max(2, (1 << (24 if x.is_cuda else 20)) // x.shape[-1])
    ends = [*range(size, len(x) - 1, size), len(x)]
    return [slice(i, j) for i, j in zip([0, *ends[:-1]], ends, strict=True)]


def chunked(f, logits, *rest):
    """f over those slices, put together: the fp32 temporaries stay small whatever batch, block and vocabulary."""
    parts = [f(logits[k], *[r[k] if isinstance(r, list) else r for r in rest]) for k in slices(logits)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


@torch.no_grad()
def decode(model, prompts: list[tuple], s, batch_size: int = 16, on_step=None):
    """prompts: (key, token ids). Yields each finished row: key, ids, canvas, order, entropy, confidence, steps.
    Rows of like length share a batch; a finished row leaves it and the next prompt takes its place."""
    device, plan, N = next(model.parameters()).device, schedule(s), s.length
    waiting = collections.deque(sorted(prompts, key=lambda kp: -len(kp[1])))
    live: list = []
    while waiting or live:
        while waiting and len(live) < batch_size:
            key, ids = waiting.popleft()
            live.append(SimpleNamespace(key=key, ids=ids, step=0, canvas=np.full(N, s.mask_id), order=np.full(N, -1),
                                        entropy=np.zeros(N), confidence=np.zeros(N)))
        for row in live:
            while plan and plan[row.step] == 0:          # Dream's first step may unmask nothing: no forward for it
                row.step += 1
        T = max(len(row.ids) for row in live) + N
        ids, real, at = (np.zeros((len(live), T), kind) for kind in (np.int64, bool, bool))
        for b, row in enumerate(live):
            real[b, T - N - len(row.ids):] = True
            ids[b, T - N - len(row.ids):T - N], ids[b, T - N:] = row.ids, row.canvas
            block = int((row.order < 0).argmax()) // s.block * s.block        # the first block with a mask in it
            row.candidates = block + np.flatnonzero(row.order[block:block + s.block] < 0)
            at[b, T - N + row.candidates] = True
        logits = model(*(torch.from_numpy(x).to(device) for x in (ids, real, at)))        # (n, V)
        if on_step:
            on_step(live, T)
        H, score = chunked(unsure, logits, s)
        if not bool(H.isfinite().all()):
            stop(f"{s.model}: the logits are not finite; the checkpoint or its dtype is broken", everywhere=True)
        first = np.cumsum([0] + [len(row.candidates) for row in live])        # row b's share of n: first[b]:first[b+1]
        token = sure = None
        if s.score == "confidence" or s.threshold is not None:
            token, sure, beside = chunked(choose, logits, s, draws(live, [len(r.candidates) for r in live], device, s))
            score = beside if s.score == "confidence" else score
        if s.score == "random":
            score = torch.cat([torch.rand(len(r.candidates), generator=seeded(r, s, "/order")) for r in live])
        H, score = H.cpu().numpy(), score.double().cpu().numpy()
        picks = []                                       # per row: indices into n, best first
        for b, row in enumerate(live):
            lo, hi = first[b], first[b + 1]
            best = lo + np.lexsort((np.arange(hi - lo), H[lo:hi], score[lo:hi]))          # score, raw entropy, position
            if not plan:                                 # threshold: all that are sure enough, at least the best one
                above = best[sure.cpu().numpy()[best] > s.threshold]
                best = above if len(above) else best[:1]
            picks.append(best[:plan[row.step]] if plan else best)
        if token is None:                                # the order did not need tokens: draw only the chosen ones
            chosen = torch.from_numpy(np.concatenate(picks)).to(device)
            t, p, _ = chunked(choose, logits[chosen], s, draws(live, [len(k) for k in picks], device, s))
            token, sure = t.new_zeros(len(logits)), p.new_zeros(len(logits))
            token[chosen], sure[chosen] = t, p
        token, sure = token.cpu().numpy(), sure.cpu().numpy()
        for b, row in enumerate(live):
            where = row.candidates[picks[b] - first[b]]
            row.canvas[where], row.order[where] = token[picks[b]], row.step
            row.entropy[where], row.confidence[where] = H[picks[b]], sure[picks[b]]
            row.step += 1
            row.done = (row.order >= 0).all() or first_end(row.canvas, row.order, s.end_ids) is not None
        yield from (row for row in live if row.done)
        live = [row for row in live if not row.done]


def seeded(row, s, what="", device="cpu"):
    """A generator for this prompt and step, whoever shares the batch; `what` keeps order and token draws apart."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{s.seed}/{row.key}/{row.step}{what}".encode()))


def draws(live, counts, device, s):
    """For each of n positions the generator of its row, `counts` positions a row; None at temperature 0."""
    if s.temperature > 0:
        return [g for r, c in zip(live, counts, strict=True) for g in [seeded(r, s, device=device)] * c]


def make_settings(a, c, family: dict, end_ids: list[int]):
    """Flags and the family's own defaults, checked before any weight is loaded."""
    own = family["decode"]
    s = SimpleNamespace(length=a.length, steps=a.steps, block=a.block or a.length, tokens_per_step=a.tokens_per_step,
                        threshold=a.threshold, top_k=a.top_k, suppress_eos=a.suppress_eos, seed=a.seed,
                        **{k: own[k] if getattr(a, k) is None else getattr(a, k)
                           for k in ("score", "schedule", "temperature", "top_p")})
    if a.schedule is None and (a.block or a.tokens_per_step or a.threshold is not None):
        s.schedule = "even"                              # Dream's own schedule knows neither blocks nor a fixed k
    if s.length < 1 or s.block < 1 or s.length % s.block:
        stop(f"--length {s.length} --block {s.block}: the length must be a multiple of the block, both at least 1; "
             f"try --block {max(1, s.length)}")
    blocks = s.length // s.block
    if s.tokens_per_step and s.steps:
        stop(f"--steps {s.steps} --tokens-per-step {s.tokens_per_step}: one follows from the other; give one")
    if s.schedule == "dream" and (blocks > 1 or s.tokens_per_step or s.threshold is not None):
        stop("--schedule dream: knows no blocks, tokens per step or threshold; use --schedule even")
    if not 0 <= s.tokens_per_step <= s.block:
        stop(f"--tokens-per-step {s.tokens_per_step}: must lie in 1..{s.block}, the block")
    s.steps = s.steps or (blocks * -(-s.block // s.tokens_per_step) if s.tokens_per_step else s.length)
    if not blocks <= s.steps <= s.length or s.steps % blocks:
        stop(f"--steps {s.steps}: must lie in {blocks}..{s.length} and be a multiple of the {blocks} blocks; "
             f"try --steps {s.length}")
    if not (0 <= (s.threshold or 0) <= 1 and (s.temperature == 0 or 1e-3 <= s.temperature <= 1e3) and 0 < s.top_p <= 1
            and s.top_k >= 0):
        stop(f"--threshold {s.threshold} --temperature {s.temperature} --top-p {s.top_p} --top-k {s.top_k}: the "
             f"threshold lies in 0..1, the temperature is 0 or in 0.001..1000, top-p in (0, 1], top-k is not negative")
    logged = dict(vars(s))                               # what a record's `decode` says
    s.clean, s.mask_id, s.end_ids, s.model = own["clean"], c.mask_id, end_ids, c.name
    return s, logged


def make_record(row, it: dict, tok, s, head: dict) -> dict:
    """The finished row as method and README "Record format" have it."""
    end = first_end(row.canvas, row.order, s.end_ids)
    shown = row.canvas[:end] if end is not None else row.canvas[row.order >= 0]
    text = tok.decode(shown.tolist(), skip_special_tokens=True)
    logged = [[None if step < 0 else float(f"{v:.6g}") for v, step in zip(values, row.order, strict=True)]
              for values in (row.entropy, row.confidence)]
    return dict(id=it["id"], prompt=it["prompt"], response=text, response_token_ids=row.canvas.tolist(),
                decoding_order=row.order.tolist(), method=s.score, prompt_token_ids=list(row.ids), entropy=logged[0],
                confidence=logged[1], answer=it["answer"],
                correct=judge(text, end is not None, it["answer"], it["kind"]), **head)


def finished(path: str, head: dict):
    """What the file holds: done, {id: (place, prompt's ids)}, and its size. Another run's file is refused untouched; a
    last line that a kill cut off is removed, one that only lacks its end gets it."""
    seen = SimpleNamespace(size=0, done={})
    folder = os.path.dirname(path) or "."
    for wrong, fault in ((os.path.isdir(path), "is a folder"), (not os.path.isdir(folder), "its folder is not there"),
                         (os.path.exists(path) and not os.path.isfile(path), "is no ordinary file"),
                         (not os.access(path if os.path.exists(path) else folder, os.W_OK), "may not be written")):
        if wrong:
            stop(f"--out {path}: {fault}; give a file in an existing folder")
    if not os.path.exists(path):
        return seen
    with open(path, "rb+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        seen.size = os.fstat(f.fileno()).st_size
        if not seen.size:
            return seen
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end, first = content.rfind(b"\n") + 1, content[:content.find(b"\n") + 1 or seen.size]
            rest, cut = content[end:], False
        try:
            json.loads(rest or b"0")
        except ValueError:
            cut = True
        if b'"decoding_order": ' not in first and not (cut and not end and rest[:7] == b'{"id": '[:len(rest)]):
            stop(f"--out {path}: is there and holds no trajectories; give another --out")
        for place, r in lines(path, end if cut else seen.size):      # under the lock: no line of a live rank is half
            check_record(place, r)
            for part in ("model", "decode"):
                if r.get(part) != head[part]:
                    old, new = r.get(part) or {}, head[part]
                    odd = next((k for k in {**new, **old} if old.get(k) != new.get(k)), part)
                    stop(f"{place}: was decoded with {odd} {old.get(odd)!r}, now it is {new.get(odd)!r}; "
                         f"give another --out, or those settings")
            seen.done[str(r["id"])] = place, r["prompt_token_ids"]
        if cut:
            f.truncate(end)
        elif rest:
            os.pwrite(f.fileno(), b"\n", seen.size)
        seen.size = os.fstat(f.fileno()).st_size
    return seen


def append(path: str, record: dict, seen) -> bool:
    """One whole line behind whole lines, once an id, whoever else writes: under a lock, after a look at what others
    added, where a killed one may have left half a line; taken back if the disk is full. Was it written?"""
    line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    with open(path, "ab+", buffering=0) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        start = f.seek(seen.size if f.seek(0, os.SEEK_END) >= seen.size else 0)
        new = f.read()
        seen.size = start + new.rfind(b"\n") + 1
        f.truncate(seen.size)
        for r in map(json.loads, new.split(b"\n")[:-1]):
            if (r["model"], r["decode"]) != (record["model"], record["decode"]):
                stop(f"--out {path}: another process decodes into it with other settings; give another --out", True)
            seen.done[str(r["id"])] = None
        if str(record["id"]) in seen.done:
            return False
        try:
            if f.write(line) != len(line):
                raise OSError(28, "No space left on device", path)
        except OSError:
            f.truncate(seen.size)
            raise
        seen.size += len(line)
        return True


def coloured(row, tok) -> str:
    """The response with a shade a token: pale = decoded early, dark = late; what was never needed is a dot."""
    last = max(1, row.order.max())
    shade = [231, 194, 157, 120, 83, 47, 41, 35, 29, 23, 22]
    return "".join(f"\033[48;5;{shade[int(10 * step / last)]};38;5;{16 if step < last * .6 else 231}m"
                   f"{tok.decode([int(t)])}\033[0m" if step >= 0 else "."
                   for t, step in zip(row.canvas, row.order, strict=True))


def add_flags(p):
    """The decoding flags, shared with eval.py."""
    g = p.add_argument_group("decoding")
    g.add_argument("--length", type=int, default=256, help="response tokens, the canvas of masks (default 256)")
    g.add_argument("--steps", type=int, default=0, help="model steps (default: the length)")
    g.add_argument("--block", type=int, default=0, help="block length, left to right (default: the length, one block)")
    g.add_argument("--score", choices=["entropy", "confidence", "margin", "random"],
                   help="what goes first (default: the model's own)")
    g.add_argument("--schedule", choices=["even", "dream"], help="tokens over steps (default: the model's own)")
    g.add_argument("--tokens-per-step", type=int, default=0, help="fixed number of tokens a step, instead of --steps")
    g.add_argument("--threshold", type=float, help="unmask all above this confidence, at least one a step")
    g.add_argument("--temperature", type=float, help="0 = greedy (default: the model's own)")
    g.add_argument("--top-p", type=float, help="nucleus, after the temperature (default: the model's own)")
    g.add_argument("--top-k", type=int, default=0, help="0 = off")
    g.add_argument("--suppress-eos", action="store_true",
                   help="never choose EOS or end of turn (LLaDA's code settings)")
    g.add_argument("--raw-prompt", action="store_true", help="feed the bare text, no chat template")
    g.add_argument("--batch-size", type=int, default=16, help="rows a forward (default 16)")
    g.add_argument("--seed", type=int, default=0, help="with each prompt's id it seeds that prompt's draws")
    g.add_argument("--limit", type=int, default=0, help="only the first prompts")


def place_of_work():
    """(rank, world, device, dtype) of this process, under torchrun or not."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= there:
            stop(f"--nproc_per_node {os.environ['LOCAL_WORLD_SIZE']}: there are {there} GPUs", everywhere=True)
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
        return rank, world, device, torch.bfloat16
    return rank, world, "cpu", torch.float32


def encode_prompts(items: list[dict], tok, c, s, raw: bool) -> list[tuple]:
    """[(item number, token ids)], each checked to fit the model's positions."""
    pairs = [(n, prompt_ids(it["place"], tok, it, raw)) for n, it in enumerate(items)]
    for n, ids in pairs:
        if max(ids) >= c.vocab:
            stop(f"{items[n]['place']}: the tokenizer gives token {max(ids)}, the model has {c.vocab}; "
                 f"they are not of one model, download it again")
        if len(ids) + s.length > c.positions:
            stop(f"{items[n]['place']}: the prompt's {len(ids)} tokens and --length {s.length} do not fit the model's "
                 f"{c.positions} positions; shorten or drop it, or give a smaller --length")
    return pairs


def main():
    p = Flags(__doc__)
    p.add_argument("--model", required=True, help="model folder or hub name")
    p.add_argument("--adapter", help="LoRA folder in peft's format")
    p.add_argument("--prompts", required=True, help=".jsonl or .parquet, or gsm8k, MixChain-Z-PRM12K, Ling-Coder-SFT")
    p.add_argument("--out", help="trajectories, one JSON object a line; continued if it is there")
    p.add_argument("--show", action="store_true", help="print one decoding in colour")
    add_flags(p)
    a = p.parse_args()
    if not a.out and not a.show:
        stop("--out: where shall the trajectories go? Give a file, or --show to look at one decoding")
    if a.batch_size < 1 or a.limit < 0:
        stop(f"--batch-size {a.batch_size} --limit {a.limit}: the batch is at least 1, the limit not negative")
    with safely(f"{a.out} keeps every finished record; run the same command again to go on" if a.out
                else "nothing was to be kept"):
        run(a)


def run(a):
    rank, world, device, dtype = place_of_work()
    c, family = read_config(a.model)
    items = read_prompts(a.prompts, a.limit or (0 if a.out else 1))
    tok = load_tokenizer(a.model)
    s, logged = make_settings(a, c, family, tok.end_ids)
    head = dict(model=dict(name=a.model, mask_id=c.mask_id, vocab_size=c.vocab, end_ids=tok.end_ids),
                decode=dict(logged, raw_prompt=a.raw_prompt, adapter=a.adapter))
    head["model"]["crc32"] = fingerprint(c.folder)
    pairs = encode_prompts(items, tok, c, s, a.raw_prompt)
    if a.adapter:                                        # does it fit? Known before gigabytes are read
        lora.load(skeleton(a.model), a.adapter)
        head["decode"]["adapter_crc32"] = fingerprint(a.adapter)
    # Shards of four batches, smaller if not every rank would get one. A shard that a kill cut short is decoded anew in
    # the same batches: the same command ends in the same records, to the last digit
    pairs = [(str(items[n]["id"]), ids) for n, ids in pairs]
    size = min(4 * a.batch_size, -(-len(pairs) // world)) or 1
    shards = [pairs[i:i + size] for i in range(0, len(pairs), size)][rank::world]
    seen = finished(a.out, head) if a.out else SimpleNamespace(done={})
    done = seen.done
    for key, ids in pairs:
        if key in done and done[key][1] != ids:
            stop(f"{done[key][0]}: id {key!r} is there with another prompt; give another --out, or other ids")
    total, there = sum(map(len, shards)), sum(key in done for shard in shards for key, _ in shard)
    by_id = {str(it["id"]): it for it in items}

    model = load(a.model, device, dtype)
    if a.adapter:
        lora.load(model, a.adapter)
    rows = (row for shard in shards if any(key not in done for key, _ in shard)
            for row in decode(model, shard, s, a.batch_size) if row.key not in done)
    bar, start, tokens, valid, written = Bar(total, "decode", there), time.time(), 0, 0, 0
    for n, row in enumerate(rows, 1):
        record = make_record(row, by_id[row.key], tok, s, head)
        if a.out:
            written += append(a.out, record, seen)
        if a.show and n == 1:
            print(f"{record['prompt']}\n{coloured(row, tok)}\n{row.step} steps; pale = early, dark = late, "
                  f"a dot = never needed; judged {record['correct']}")
        tokens, valid = tokens + int((row.order >= 0).sum()), valid + (record["correct"] is not False)
        bar(there + n, f"{tokens / (time.time() - start):,.0f} tok/s | {100 * valid / n:.0f} % valid")
    if rank == 0 and a.out:
        print(f"{a.out}: {written} decoded now, {total - written} were there"
              + (f" (rank 0 of {world})" if world > 1 else ""))


if __name__ == "__main__":
    main()
