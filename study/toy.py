"""
The toy: two domains whose answers can be checked, and a small base model for them.

$ python study/toy.py --out out/toy                       # prompts for the committed base model, study/base
$ python study/toy.py --pretrain --seed 3 --out out/base3 # a base model from nothing: about 10 minutes on one core

math     38a+3swap====  ->  then a+3 gives 68; 86 comes from swap; ####86
         two registers a and b, a chain of maps modulo 10 (~x = 9 - x), each written in one of three forms
logic    rs4312==       ->  do r get 2134; use s see 1234; ####1234
         one or two of reverse, sort, increment, turn on four digits, each in one of two forms

math is what we post-train on, logic is watched for forgetting. The form words are easy and the results are hard, so a
decoder that decodes results too early is wrong. The reference answers for SFT-GT use the third form only, a rare one.
Every prompt belongs to one split by a hash of its text, so no two splits can share one.
"""
import json
import math
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as to_bytes

sys.path.insert(0, str(Path(__file__).parent.parent))
from model import FAMILIES, Config, Model, hub_name  # noqa: E402
from util import Bar, Parser, stop, write_whole  # noqa: E402

UNARY  = ["a+1", "a+3", "a*3", "a~", "b+1", "b+3", "b*3", "b~", "swap"]
BINARY = ["a+b", "b+a", "a-b"]                          # the hard ones
MOVES  = ["r", "s", "i", "t"]
WORDS  = ["then ", " gives ", "now ", " makes ", " comes ", "from ", "; ", "do ", " get ", "use ", " see "]
VOCAB  = ["<|mask|>", "<|endoftext|>", "####", *UNARY, *BINARY, "=", *"0123456789", *MOVES, *WORDS]
MASK, EOS = 0, 1
PROMPT, LENGTH = 8, 34                                  # tokens of every prompt, and of the canvas
FORMS = (0.5, 0.25, 0.25)                               # how often each form of a math clause is used
SPLITS = {"pretrain": range(0, 60), "train": range(60, 80), "val": range(80, 90), "test": range(90, 100)}
CONFIG = {"model_type": "llada", "d_model": 96, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 256,
          "rope_theta": 100.0, "rms_norm_eps": 1e-5, "max_sequence_length": 128, "weight_tying": False,
          "embedding_size": len(VOCAB), "vocab_size": len(VOCAB), "mask_token_id": MASK, "eos_token_id": EOS}

# -----------------------------------------------------------------------------
# the two domains; a task is (prompt tokens, response tokens, answer)

def apply_map(name, a, b):
    results = {"a+1": (a + 1, b), "a+3": (a + 3, b), "a*3": (3 * a, b), "a~": (9 - a, b),
               "b+1": (a, b + 1), "b+3": (a, b + 3), "b*3": (a, 3 * b), "b~": (a, 9 - b),
               "swap": (b, a), "a+b": (a + b, b), "b+a": (a, a + b), "a-b": (a - b, b)}
    a, b = results[name]
    return a % 10, b % 10


def math_clause(form, name, a, b):
    """Six tokens in every form: positions stay the same, which makes the task learnable in minutes."""
    if form == 0:
        return ["then ", name, " gives ", str(a), str(b), "; "]
    if form == 1:
        return ["now ", name, " makes ", str(a), str(b), "; "]
    return [str(a), str(b), " comes ", "from ", name, "; "]


def math_task(rng, chain=(3, 5), hard=0.25, forms=FORMS):
    """chain: the fewest and the most maps. hard: the share of binary ones. forms: the share of each form."""
    a, b = rng.integers(10, size=2).tolist()
    shares = [(1 - hard) / len(UNARY)] * len(UNARY) + [hard / len(BINARY)] * len(BINARY)
    names = rng.choice(UNARY + BINARY, size=rng.integers(chain[0], chain[1] + 1), p=shares).tolist()
    prompt = [str(a), str(b), *names] + ["="] * (PROMPT - 2 - len(names))
    response = []
    for name in names:
        a, b = apply_map(name, a, b)
        response += math_clause(rng.choice(3, p=forms), name, a, b)
    return prompt, [*response, "####", str(a), str(b)], f"{a}{b}"


def apply_move(name, digits):
    if name == "r":
        return digits[::-1]
    if name == "s":
        return sorted(digits)
    if name == "i":
        return [x % 9 + 1 for x in digits]
    return digits[1:] + digits[:1]


def logic_task(rng):
    digits = rng.integers(1, 10, size=4).tolist()
    names = rng.choice(MOVES, size=rng.integers(1, 3)).tolist()
    prompt = [*names, *map(str, digits)] + ["="] * (PROMPT - 4 - len(names))
    response = []
    for name in names:
        digits = apply_move(name, digits)
        before, after = ("do ", " get ") if rng.random() < 0.7 else ("use ", " see ")
        response += [before, name, after, *map(str, digits), "; "]
    return prompt, [*response, "####", *map(str, digits)], "".join(map(str, digits))


def split_of(prompt) -> str:
    bucket = zlib.crc32(("edition 2 " + "".join(prompt)).encode()) % 100
    for name, buckets in SPLITS.items():
        if bucket in buckets:
            return name


def draw(domain, split, count, seed, **grammar) -> list[tuple]:
    """`count` tasks of one split with different prompts."""
    rng = np.random.default_rng([seed, *domain.encode(), *split.encode()])
    tasks, seen = [], set()
    while len(tasks) < count:
        task = math_task(rng, **grammar) if domain == "math" else logic_task(rng)
        key = "".join(task[0])
        if key not in seen and split_of(task[0]) == split:
            seen.add(key)
            tasks.append(task)
    return tasks


def write_prompts(out: Path, seed: int, train: int, test: int):
    """
    train; gt, the same prompts with reference answers in the rarer form; val and test of both domains; and pretrain,
    more of what a base was pretrained on, with answers: a control.
    """
    files = {"train": draw("math", "train", train, seed), "gt": draw("math", "train", train, seed, forms=(0, 0, 1))}
    files["pretrain"] = draw("math", "pretrain", train // 2, seed) + draw("logic", "pretrain", train // 2, seed)
    for domain in ("math", "logic"):
        files[f"val-{domain}"] = draw(domain, "val", 500, seed)
        files[f"test-{domain}"] = draw(domain, "test", test, seed)
    # no prompt may be in two splits
    prompts = {name: {"".join(task[0]) for task in tasks} for name, tasks in files.items()}
    assert prompts["train"] == prompts["gt"]
    assert not prompts["train"] & prompts["val-math"]
    assert not (prompts["train"] | prompts["val-math"]) & prompts["test-math"]
    assert not prompts["val-logic"] & prompts["test-logic"]

    out.mkdir(parents=True, exist_ok=True)
    for name, tasks in files.items():
        lines = []
        for n, (prompt, response, answer) in enumerate(tasks):
            split = "train" if name == "gt" else name    # gt has the ids of train
            item = {"id": f"{split}-{n}", "prompt": "".join(prompt), "answer": answer}
            if name in ("gt", "pretrain"):
                item["response"] = "".join(response)
            lines.append(json.dumps(item) + "\n")
        write_whole(out / f"{name}.jsonl", "".join(lines).encode())
    print(f"{out}: {', '.join(f'{name} {len(tasks)}' for name, tasks in files.items())}")

# -----------------------------------------------------------------------------
# pretraining, in three phases. Binary maps are the hard part: mixed in evenly, some seeds never learn them. A phase
# ends when its aim is reached, at the latest after `steps`, so that all seeds end alike

BOTH = dict(lr=1.8e-3, math=44, logic=44, canvas=LENGTH, power=1, digit_weight=1.0, tasks=60000,
            grammar=dict(chain=(2, 5)))
PHASES = [
    # two maps and no final answer to copy from, most of them binary, results count four times; until the loss is low
    dict(steps=2000, until_loss=0.38, until_accuracy=math.inf, lr=3e-3, math=96, logic=0, canvas=12, power=1.5,
         digit_weight=4.0, tasks=5000, grammar=dict(chain=(2, 2), hard=0.75)),
    # both domains, half of the maps binary, results count twice; until 55 % of the validation prompts are right
    dict(BOTH, steps=2500, until_loss=0, until_accuracy=0.55, digit_weight=2.0,
         grammar=dict(chain=(2, 5), hard=0.5)),
    # both domains as they are, while the learning rate falls to 0
    dict(BOTH, steps=400, until_loss=0, until_accuracy=math.inf),
]


def encode(tasks):
    """(n, PROMPT + LENGTH) token ids; what comes after the response is EOS."""
    number = {word: i for i, word in enumerate(VOCAB)}
    ids = np.full((len(tasks), PROMPT + LENGTH), EOS)
    for row, (prompt, response, _) in zip(ids, tasks, strict=True):
        words = prompt + response
        row[:len(words)] = [number[word] for word in words]
    return torch.from_numpy(ids)


@torch.no_grad()
def accuracy(model, tasks, per_step=4):
    """The share of right answers when several tokens are decoded per step, the most probable first."""
    truth = encode(tasks)
    ids = truth.clone()
    ids[:, PROMPT:] = MASK
    pos = torch.arange(PROMPT, PROMPT + LENGTH).expand(len(ids), -1)
    while (ids == MASK).any():
        logits = model(ids, torch.ones_like(ids, dtype=torch.bool), pos)
        logits[..., MASK] = -torch.inf
        probability, token = logits.softmax(-1).max(-1)
        probability[ids[:, PROMPT:] != MASK] = -1                                         # decoded already
        best = probability.topk(min(per_step, (ids[0] == MASK).sum())).indices
        ids.scatter_(1, PROMPT + best, token.gather(1, best))
    # the last two tokens of a response are its answer
    last = PROMPT + torch.tensor([len(response) for _, response, _ in tasks])[:, None]
    answer = last - torch.tensor([2, 1])
    return (ids.gather(1, answer) == truth.gather(1, answer)).all(1).float().mean().item()


def new_model(seed):
    torch.manual_seed(seed)
    fields = {ours: CONFIG[theirs] for ours, theirs in FAMILIES["llada"]["config"].items()}
    model = Model(Config(FAMILIES["llada"], **fields))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.06)
    # large embeddings around a common vector: the tasks are learned sooner
    torch.nn.init.normal_(model.embed.weight)
    model.embed.weight.data += torch.randn(CONFIG["d_model"])
    return model


def pretrain_loss(model, x, phase, rng):
    """Cross-entropy of masked response tokens; a row's mask ratio is u ** power with u ~ U(0, 1)."""
    B, T = x.shape
    ratio = rng.random((B, 1)) ** phase["power"]
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[:, PROMPT:] = torch.from_numpy(rng.random((B, T - PROMPT)) < ratio)
    mask[:, PROMPT] |= ~mask.any(1)                                                       # at least one
    pos = torch.arange(PROMPT, T).expand(B, -1)
    logits = model(x.masked_fill(mask, MASK), torch.ones_like(mask), pos)[mask[:, PROMPT:]]
    targets = x[mask]
    digits = torch.tensor([word.isdigit() for word in VOCAB])[targets]
    weight = torch.where(digits, phase["digit_weight"], 1.0)
    return (F.cross_entropy(logits, targets, reduction="none") * weight).sum() / weight.sum()


def pretrain(seed):
    model = new_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    logic = encode(draw("logic", "pretrain", 40000, seed))
    watched = draw("math", "val", 200, 99)
    bar, step = Bar(sum(phase["steps"] for phase in PHASES), "pretrain"), 0
    for number, phase in enumerate(PHASES):
        maths = encode(draw("math", "pretrain", phase["tasks"], seed, **phase["grammar"]))
        losses = []
        for i in range(phase["steps"]):
            # a batch of both domains
            rng = np.random.default_rng([seed, step])
            math_rows = maths[rng.integers(len(maths), size=phase["math"])]
            logic_rows = logic[rng.integers(len(logic), size=phase["logic"])]
            x = torch.cat([math_rows, logic_rows])[:, :PROMPT + phase["canvas"]]
            loss = pretrain_loss(model, x, phase, rng)
            # warm-up at the start, linear decay in the last phase
            lr = phase["lr"] * min(1, (step + 1) / 50)
            if number == len(PHASES) - 1:
                lr *= 1 - i / phase["steps"]
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            losses.append(loss.item())
            if step % 50 == 0:
                mean_loss = np.mean(losses[-50:])
                right = accuracy(model, watched) if number > 0 else 0.0     # the first phase has no final answers
                bar(step, f"phase {number + 1} of {len(PHASES)} | loss {mean_loss:.3f} | accuracy {right:.0%}")
                if mean_loss < phase["until_loss"] or right >= phase["until_accuracy"]:
                    break
    return model.eval()


def write_model(folder: Path, model):
    """A model folder in LLaDA's layout with a real tokenizer: one token per word of VOCAB."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="="))
    words = r"####|swap|[ab][+*-][0-9ab]|[ab]~| ?[a-z]{2,} |; |."
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(VOCAB[:2])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": VOCAB[0], "eos_token": VOCAB[1],
                "pad_token": VOCAB[1], "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    weights = {hub_name(name, FAMILIES["llada"]): p.detach() for name, p in model.named_parameters()}
    write_whole(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_whole(folder / "tokenizer_config.json", json.dumps(settings, indent=2).encode())
    write_whole(folder / "config.json", json.dumps(CONFIG, indent=2).encode())
    write_whole(folder / "generation_config.json", json.dumps({"max_new_tokens": LENGTH}).encode())
    write_whole(folder / "model.safetensors", to_bytes(weights, metadata={"format": "pt"}))


def main():
    parser = Parser(__doc__)
    parser.add_argument("--out", default="out/toy", help="folder for the prompts, or for the model with --pretrain")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, or of the base model")
    parser.add_argument("--train", type=int, default=1500, help="prompts to post-train on")
    parser.add_argument("--test", type=int, default=1000, help="test prompts per domain")
    parser.add_argument("--pretrain", action="store_true", help="train a base model instead of drawing prompts")
    args = parser.parse_args()
    out = Path(args.out)
    if not args.pretrain:
        write_prompts(out, args.seed, args.train, args.test)
        return
    if (out / "model.safetensors").exists():
        stop(f"--out {out}: holds a model already; give another folder")
    start = time.time()
    model = pretrain(args.seed)
    write_model(out, model)
    size = sum(p.numel() for p in model.parameters())
    print(f"{out}: {size:,} parameters, seed {args.seed}, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
