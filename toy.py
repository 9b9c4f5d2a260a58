"""A toy base model from nothing, in minutes on two cores: a small masked diffusion model with two verifiable domains.

    python toy.py --out out/toy              # out/toy/model (a hub-style folder in LLaDA's layout) and out/toy/*.jsonl

math    5+3*3~=====  ->  +3=8*3=4~=5####5      a chain of 3-7 maps modulo 10 (+1, +3, +7, *3, ~x = 9 - x), worked
logic   rs4312===    ->  r2134s1234####1234    one or two of reverse, sort, increment, turn on four digits, worked

math is post-trained on, logic is watched for forgetting. A quarter of the pretraining's math steps are written
result-first (8=+3): one answer has many surface forms, and the ground truth for SFT-GT is all result-first. Pretraining
stops when the base first passes --target on validation prompts: able at one token a step, at a loss at two. Every
prompt belongs to one split by a hash of its text, so that no two splits can share one.
Killed or interrupted, the same command goes on from its last resume point, bit for bit.
"""
import bisect
import json
import math
import os
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

from data import Bar, judge, safely, write_whole
from decode import decode, first_end
from model import FAMILIES, Flags, Model, load_tokenizer, read_json, stop

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

CONFIG = dict(model_type="llada", d_model=96, n_layers=3, n_heads=4, n_kv_heads=4, mlp_hidden_size=256,
              rope_theta=10000.0, rms_norm_eps=1e-5, max_sequence_length=128, weight_tying=False, include_bias=False,
              include_qkv_bias=False, block_type="llama", layer_norm_type="rms")
OPS = ["+1", "+3", "+7", "*3", "~"]
VOCAB = ["<|mask|>", "<|endoftext|>", "####", *OPS, "=", *"0123456789", *"rsit"]
CHECK = 20                              # steps between looks at the validation accuracy
PROMPT = 9                              # prompt tokens, filled up with "=": every step has its place
LENGTH = 26                             # response tokens: seven steps of three, ####, the result, EOS
MOVES = {"r": lambda d: d[::-1], "s": sorted, "i": lambda d: [x % 9 + 1 for x in d], "t": lambda d: d[1:] + d[:1]}
SPLITS = {"pretrain": range(0, 60), "train": range(60, 80), "val": range(80, 90), "test": range(90, 100)}


def math_task(rng, flip: float):
    """(prompt, response, answer); each step is written result-first with probability flip."""
    x, ops = int(rng.integers(10)), [OPS[i] for i in rng.integers(len(OPS), size=rng.integers(3, 8))]
    prompt, steps = f"{x}{''.join(ops)}{'=' * (PROMPT - 1 - len(ops))}", []
    for op in ops:
        x = (9 - x if op == "~" else x + int(op[1]) if op[0] == "+" else x * int(op[1])) % 10
        steps.append(f"{x}={op}" if rng.random() < flip else f"{op}={x}")
    return prompt, f"{''.join(steps)}####{x}", str(x)


def logic_task(rng, flip: float):
    d = [int(x) for x in rng.integers(1, 10, size=4)]
    moves = [list(MOVES)[i] for i in rng.integers(4, size=rng.integers(1, 3))]
    prompt, steps = f"{''.join(moves)}{''.join(map(str, d))}{'=' * (PROMPT - 4 - len(moves))}", []
    for m in moves:
        d = MOVES[m](d)
        steps.append(m + "".join(map(str, d)))
    answer = "".join(map(str, d))
    return prompt, f"{''.join(steps)}####{answer}", answer


TASKS = {"math": math_task, "logic": logic_task}


def split_of(prompt: str) -> str:
    bucket = zlib.crc32(prompt.encode()) % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def draw(domain: str, split: str, count: int, seed: int, flip: float) -> list[dict]:
    """`count` different prompts of one split, with responses and answers."""
    rng, seen, items = np.random.default_rng([seed, *domain.encode(), *split.encode()]), set(), []
    while len(items) < count:
        prompt, response, answer = TASKS[domain](rng, flip)
        if prompt not in seen and split_of(prompt) == split:
            seen.add(prompt)
            items.append(dict(id=f"{domain}-{split}-{len(items)}", prompt=prompt, response=response, answer=answer))
    return items


def write_tokenizer(folder: Path):
    """A real tokenizer: a token a character, but for #### and the maps; its chat template is the bare prompt."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCAB)}, unk_token="="))
    t.pre_tokenizer = pre_tokenizers.Split(Regex(r"####|\+\d|\*\d|."), "isolated")
    t.decoder = decoders.Fuse()
    t.add_special_tokens(VOCAB[:2])
    write_whole(folder / "tokenizer.json", t.to_str(pretty=True).encode())
    write_whole(folder / "tokenizer_config.json", json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", mask_token=VOCAB[0], eos_token=VOCAB[1], pad_token=VOCAB[1],
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}"), indent=2).encode())


def encode(items: list[dict], tok):
    """(n, P + LENGTH) ids, prompts left-padded to P, responses filled with EOS; and the mask of real tokens."""
    prompts, responses = (tok([it[key] for it in items])["input_ids"] for key in ("prompt", "response"))
    P = max(map(len, prompts))
    ids = np.full((len(items), P + LENGTH), tok.eos_token_id, np.int64)
    real = np.ones(ids.shape, bool)
    for n, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        real[n, :P - len(p)] = False
        ids[n, P - len(p):P], ids[n, P:P + len(r)] = p, r
    return torch.from_numpy(ids), torch.from_numpy(real), P


def accuracy(model, items: list[dict], tok, length: int = LENGTH) -> float:
    """Share of prompts answered right, one token a step."""
    s = SimpleNamespace(length=length, steps=length, block=length, tokens_per_step=1, threshold=None, schedule="even",
                        score="confidence", temperature=0, top_p=1, top_k=0, suppress_eos=False, clean=True, seed=0,
                        model="toy", mask_id=tok.mask_token_id, end_ids=[tok.eos_token_id])
    right = 0
    for row in decode(model, [(n, tok(it["prompt"])["input_ids"]) for n, it in enumerate(items)], s, 64):
        end = first_end(row.canvas, row.order, s.end_ids)
        right += end is not None and judge(tok.decode(row.canvas[:end].tolist()), True, items[row.key]["answer"], None)
    return right / len(items)


def main():
    p = Flags(__doc__)
    p.add_argument("--out", default="out/toy", help="folder for the model and the prompts")
    p.add_argument("--seed", type=int, default=0, help="of the weights, the data and their order")
    p.add_argument("--target", type=float, default=0.80, help="stop at this validation accuracy in math")
    p.add_argument("--max-steps", type=int, default=3000, help="the cosine's length, and the end at the latest")
    p.add_argument("--batch-size", type=int, default=96)
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--save-every", type=int, default=100, help="steps between resume points")
    p.add_argument("--test-prompts", type=int, default=1000, help="a domain")
    a = p.parse_args()
    if not (0 < a.target <= 1 and 0 < a.lr < math.inf and 0 <= a.seed < 2 ** 63 and min(a.max_steps, a.save_every) >= 1
            and 1 <= a.test_prompts <= 10000 and 1 <= a.batch_size <= 10000):
        stop(f"--target {a.target} --lr {a.lr} --seed {a.seed} --test-prompts {a.test_prompts} --batch-size "
             f"{a.batch_size}: the target lies in (0, 1], lr is positive, the seed not negative and below 2^63, steps "
             f"and counts at least 1, test prompts and batch at most 10000")
    out, settings = Path(a.out), {k: v for k, v in vars(a).items() if k not in ("out", "save_every")}
    with safely(f"{out} keeps the last resume point; run the same command again to go on"):
        out.mkdir(parents=True, exist_ok=True)
        if (out / "toy.json").exists():
            old = read_json(out / "toy.json", remedy="give another --out")
            if old.get("settings") != settings:
                stop(f"{out}: holds a toy with other settings {old.get('settings')}; give another --out")
            if {"steps", "math", "logic"} <= old.keys():
                (out / "resume.safetensors").unlink(missing_ok=True)
                print(f"{out}: done already ({old['steps']} steps; on validation math {old['math']:.1%}, "
                      f"logic {old['logic']:.1%})")
                return
        write_whole(out / "toy.json", json.dumps(dict(settings=settings)).encode())
        train(a, out, settings)


def train(a, out: Path, settings: dict):
    c = dict(CONFIG, embedding_size=len(VOCAB), vocab_size=len(VOCAB), mask_token_id=0, eos_token_id=1, pad_token_id=1)
    (out / "model").mkdir(exist_ok=True)
    write_tokenizer(out / "model")
    write_whole(out / "model" / "config.json", json.dumps(c, indent=2).encode())
    tok = load_tokenizer(str(out / "model"))

    files = {"train": draw("math", "train", 3000, a.seed, 0), "gt": draw("math", "train", 3000, a.seed, 1)}
    files |= {f"{split}-{d}": draw(d, split, n, a.seed, 0)
              for d in TASKS for split, n in (("val", 500), ("test", a.test_prompts))}
    corpus = draw("math", "pretrain", 50000, a.seed, 0.25) + draw("logic", "pretrain", 50000, a.seed, 0)
    splits = [{it["prompt"] for it in group} for group in (
        corpus, files["train"], files["val-math"] + files["val-logic"], files["test-math"] + files["test-logic"])]
    for i, one in enumerate(splits):
        for two in splits[:i]:
            assert not one & two, f"splits share prompts: {sorted(one & two)[:3]}"
    assert splits[1] == {it["prompt"] for it in files["gt"]}
    for name, items in files.items():                    # a ground-truth response only where SFT-GT may see it
        write_whole(out / f"{name}.jsonl", "".join(json.dumps(it if name == "gt" else {
            k: v for k, v in it.items() if k != "response"}) + "\n" for it in items).encode())

    torch.manual_seed(a.seed)
    family = FAMILIES["llada"]
    model = Model(SimpleNamespace(**{ours: c[theirs] for ours, theirs in family["fields"].items()}), family)
    for m in model.modules():
        if isinstance(m, (torch.nn.Linear, torch.nn.Embedding)):     # large embeddings: the tasks form sooner
            torch.nn.init.normal_(m.weight, std=1.0 if isinstance(m, torch.nn.Embedding) else 0.06)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.01)
    names, step = dict(model.named_parameters()), 0
    resume = out / "resume.safetensors"                  # weights, moments and the step, replaced as one file
    if resume.exists():
        try:
            saved = load_file(resume)
            step = int(saved["step"])
            model.load_state_dict({k: saved[k] for k in names})
            opt.load_state_dict(dict(param_groups=opt.state_dict()["param_groups"], state={
                i: dict(step=torch.tensor(float(step)), exp_avg=saved["m." + k], exp_avg_sq=saved["v." + k])
                for i, k in enumerate(names)}))
        except Exception as e:           # not of ours: it appears whole
            stop(f"{resume}: is damaged ({type(e).__name__}: {' '.join(str(e).split())[:80]}); delete it to start over")

    ids, real, P = encode(corpus, tok)
    bar, start, first, saved_at, reached, snaps = Bar(a.max_steps, "toy", step), time.time(), step, step, 0.0, []
    while step < a.max_steps and reached < a.target:
        rng = np.random.default_rng([a.seed, step])
        pick = torch.from_numpy(rng.integers(len(ids), size=a.batch_size))
        x, mask = ids[pick], torch.zeros(a.batch_size, ids.shape[1], dtype=torch.bool)
        t = rng.random((a.batch_size, 1))                                                 # mask ratio of each sample
        mask[:, P:] = torch.from_numpy(rng.random((a.batch_size, LENGTH)) < t)
        mask[:, P] |= ~mask.any(1)
        logits = model(x.masked_fill(mask, tok.mask_token_id), real[pick], mask)          # (n, V)
        loss = F.cross_entropy(logits, x[mask])                                           # mean over all masked tokens
        for g in opt.param_groups:
            g["lr"] = a.lr * min(1, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * step / a.max_steps))
        if not bool(loss.isfinite()):
            stop(f"step {step + 1}: the loss is {loss.item()}; lower --lr {a.lr:g}, with another --out")
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        step += 1
        snaps.append((step, {k: v.detach().clone() for k, v in names.items()}))
        if step % CHECK == 0:
            reached = accuracy(model, files["val-math"][:64], tok) if step >= 400 else 0.0
            if reached < a.target:
                snaps = []
                if step - saved_at >= a.save_every:
                    moments = {f"{mv}.{k}": opt.state[v][key] for mv, key in (("m", "exp_avg"), ("v", "exp_avg_sq"))
                               for k, v in names.items()}
                    weights = {k: v.detach() for k, v in names.items()}
                    write_whole(resume, to_bytes(weights | moments | {"step": torch.tensor(step)}))
                    saved_at = step
        ms = 1000 * (time.time() - start) / (step - first)
        bar(step, f"loss {loss.item():.3f} | math {reached:.1%} | {ms:.0f} ms")
    if reached >= a.target:                              # it forms within a few steps: find the first that passes
        def score(snap):
            model.load_state_dict(snap[1])
            return accuracy(model, files["val-math"][:256], tok)
        step, weights = snaps[min(bisect.bisect_left(snaps, a.target, key=score), len(snaps) - 1)]
        model.load_state_dict(weights)
    model.eval()
    weights = {k: v.detach() for k, v in names.items()}
    write_whole(out / "model" / "model.safetensors", to_bytes(weights, metadata={"format": "pt"}))
    scores = {d: accuracy(model, files[f"val-{d}"], tok) for d in TASKS}
    write_whole(out / "toy.json", json.dumps(dict(settings=settings, steps=step, **scores)).encode())
    if resume.exists():
        os.remove(resume)
    print(f"\n{out}/model: {sum(p.numel() for p in model.parameters()):,} parameters, {step} steps; "
          f"math {scores['math']:.1%}, logic {scores['logic']:.1%} on 500 validation prompts each")


if __name__ == "__main__":
    main()
