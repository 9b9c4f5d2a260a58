"""
The toy: tasks whose answers can be checked, and a small base model that solves them.

$ python study/toy.py --out out/toy                       # prompts for the committed base model, study/base
$ python study/toy.py --pretrain --seed 3 --out out/base3 # a base model from nothing: about 15 minutes on one core

math     3 8 Ann+3 swap . .   ->  then Ann+3 gives 1 8; now swap makes 8 1; #### 8 1
         Ann and Bob hold a digit each; a chain of maps modulo 10, each written in one of three forms
logic    sort reverse 4 3 1 2 . .  ->  do sort get 1 2 3 4; use reverse see 4 3 2 1; #### 4 3 2 1
         one or two of reverse, sort, next, turn on four digits, each in one of two forms

Short chains of maps (up to five) are common in pretraining and long ones (six) are rare. Long ones are what we
post-train on; short ones and logic are watched for forgetting. The form words are easy and the results are hard, so a
decoder that decodes results too early is wrong.
Every prompt belongs to one split by a hash of its text, so no two splits can share one.
"""
import json
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

UNARY  = ["Ann+1", "Ann+3", "Ann*3", "9-Ann", "Bob+1", "Bob+3", "Bob*3", "9-Bob", "swap"]
BINARY = ["Ann+Bob", "Bob+Ann", "Ann-Bob"]              # the hard ones
MOVES  = ["reverse", "sort", "next", "turn"]
WORDS  = ["then", "gives", "now", "makes", "comes", "from", ";", "do", "get", "use", "see"]
VOCAB  = ["<|mask|>", "<|endoftext|>", "####", *UNARY, *BINARY, ".", *"0123456789", *MOVES, *WORDS]
MASK, EOS = 0, 1
PROMPT, LENGTH = 8, 40                                  # tokens of every prompt, and of the canvas
FORMS = (0.5, 0.25, 0.25)                               # how often each form of a math clause is used
CHAINS = {"short": (3, 5), "long": (6, 6)}              # the fewest and the most maps
SPLITS = {"pretrain": range(0, 60), "train": range(60, 80), "val": range(80, 90), "test": range(90, 100)}
CONFIG = {"model_type": "llada", "d_model": 96, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 256,
          "rope_theta": 100.0, "rms_norm_eps": 1e-5, "max_sequence_length": 128, "weight_tying": False,
          "embedding_size": len(VOCAB), "vocab_size": len(VOCAB), "mask_token_id": MASK, "eos_token_id": EOS}

# -----------------------------------------------------------------------------
# the tasks; a task is (prompt words, response words, answer words)

def apply_map(name, a, b):
    """What Ann and Bob hold after one map."""
    results = {"Ann+1": (a + 1, b), "Ann+3": (a + 3, b), "Ann*3": (3 * a, b), "9-Ann": (9 - a, b),
               "Bob+1": (a, b + 1), "Bob+3": (a, b + 3), "Bob*3": (a, 3 * b), "9-Bob": (a, 9 - b),
               "swap": (b, a), "Ann+Bob": (a + b, b), "Bob+Ann": (a, a + b), "Ann-Bob": (a - b, b)}
    a, b = results[name]
    return a % 10, b % 10


def math_clause(form, name, a, b):
    """Six words in every form: positions stay the same, which makes the task learnable in minutes."""
    if form == 0:
        return ["then", name, "gives", str(a), str(b), ";"]
    if form == 1:
        return ["now", name, "makes", str(a), str(b), ";"]
    return [str(a), str(b), "comes", "from", name, ";"]


def math_task(rng, chain, hard=0.25, forms=FORMS):
    """chain: the fewest and the most maps. hard: the share of binary ones. forms: the share of each form."""
    a, b = rng.integers(10, size=2).tolist()
    shares = [(1 - hard) / len(UNARY)] * len(UNARY) + [hard / len(BINARY)] * len(BINARY)
    names = rng.choice(UNARY + BINARY, size=rng.integers(chain[0], chain[1] + 1), p=shares).tolist()
    prompt = [str(a), str(b), *names] + ["."] * (PROMPT - 2 - len(names))
    response = []
    for name in names:
        a, b = apply_map(name, a, b)
        response += math_clause(rng.choice(3, p=forms), name, a, b)
    answer = [str(a), str(b)]
    return prompt, [*response, "####", *answer], answer


def apply_move(name, digits):
    if name == "reverse":
        return digits[::-1]
    if name == "sort":
        return sorted(digits)
    if name == "next":
        return [x % 9 + 1 for x in digits]
    return digits[1:] + digits[:1]


def logic_task(rng):
    digits = rng.integers(1, 10, size=4).tolist()
    names = rng.choice(MOVES, size=rng.integers(1, 3)).tolist()
    prompt = [*names, *map(str, digits)] + ["."] * (PROMPT - 4 - len(names))
    response = []
    for name in names:
        digits = apply_move(name, digits)
        before, after = ("do", "get") if rng.random() < 0.7 else ("use", "see")
        response += [before, name, after, *map(str, digits), ";"]
    answer = [str(x) for x in digits]
    return prompt, [*response, "####", *answer], answer


def write(words) -> str:
    """Words as text."""
    return " ".join(words).replace(" ;", ";")


def split_of(prompt: str) -> str:
    bucket = zlib.crc32(prompt.encode()) % 100
    for name, buckets in SPLITS.items():
        if bucket in buckets:
            return name


def draw(domain, split, count, seed, **grammar) -> list[tuple]:
    """`count` tasks of one split with different prompts. domain: short, long or logic."""
    rng = np.random.default_rng([seed, *domain.encode(), *split.encode()])
    tasks, seen = [], set()
    while len(tasks) < count:
        if domain == "logic":
            task = logic_task(rng)
        else:
            task = math_task(rng, **{"chain": CHAINS[domain], **grammar})
        prompt = write(task[0])
        if prompt not in seen and split_of(prompt) == split:
            seen.add(prompt)
            tasks.append(task)
    return tasks


def write_prompts(out: Path, seed: int, train: int, test: int):
    """
    train: long chains to post-train on. gt and gt-mix: the same prompts with reference answers, in the third form only,
    a rare one, and in the forms that a base was pretrained on. pretrain: the control, as many tasks with answers in the
    proportions of the last phase of pretraining. val and test of long, short and logic.
    """
    last = PHASES[-1]
    rows = last["long"] + last["short"] + last["logic"]
    files = {"train": draw("long", "train", train, seed),
             "gt": draw("long", "train", train, seed, forms=(0, 0, 1)),
             "gt-mix": draw("long", "train", train, seed)}
    long, logic = round(train * last["long"] / rows), round(train * last["logic"] / rows)
    files["pretrain"] = [*draw("long", "pretrain", long, seed), *draw("logic", "pretrain", logic, seed),
                         *draw("short", "pretrain", train - long - logic, seed, **last["grammar"])]
    for domain in ("long", "short", "logic"):
        files[f"val-{domain}"] = draw(domain, "val", 500, seed)
        files[f"test-{domain}"] = draw(domain, "test", test, seed)
    # no prompt may be in two splits
    prompts = {name: {write(task[0]) for task in tasks} for name, tasks in files.items()}
    assert prompts["train"] == prompts["gt"] == prompts["gt-mix"]
    for domain in ("long", "short", "logic"):
        val, test = prompts[f"val-{domain}"], prompts[f"test-{domain}"]
        assert not val & test and not (val | test) & (prompts["train"] | prompts["pretrain"])
    assert not prompts["train"] & prompts["pretrain"]

    out.mkdir(parents=True, exist_ok=True)
    for name, tasks in files.items():
        lines = []
        for n, (prompt, response, answer) in enumerate(tasks):
            split = "train" if name.startswith("gt") else name    # gt has the ids of train
            item = {"id": f"{split}-{n}", "prompt": write(prompt), "answer": write(answer)}
            if name in ("gt", "gt-mix", "pretrain"):
                item["response"] = write(response)
            lines.append(json.dumps(item) + "\n")
        write_whole(out / f"{name}.jsonl", "".join(lines).encode())
    print(f"{out}: {', '.join(f'{name} {len(tasks)}' for name, tasks in files.items())}")

# -----------------------------------------------------------------------------
# pretraining, in four phases. Binary maps are the hard part: mixed in evenly, some seeds never learn them. A phase
# ends when its aim is reached, at the latest after `steps`, so that all seeds end alike

# rows of each domain in a batch; canvas: response tokens; power: of the mask ratio; decay: steps in which the learning
# rate falls to 0, and then starts again; watch: the domain whose accuracy on validation prompts ends the phase
BOTH = dict(lr=1.8e-3, short=44, long=0, logic=44, canvas=34, power=1, digit_weight=1.0, decay=None, watch=None,
            until_loss=0, pool=60000, grammar=dict(chain=(2, 5)))
PHASES = [
    # two maps and no final answer to copy from, most of them binary, results count four times; until the loss is low
    dict(BOTH, steps=2000, until_loss=0.38, lr=3e-3, short=96, logic=0, canvas=12, power=1.5, digit_weight=4.0,
         pool=5000, grammar=dict(chain=(2, 2), hard=0.75)),
    # short chains and logic, half of the maps binary, results count twice; until 55 % are right at 4 tokens per step
    dict(BOTH, steps=2500, watch="short", per_step=4, until=0.55, digit_weight=2.0,
         grammar=dict(chain=(2, 5), hard=0.5)),
    # both as they are, while the learning rate falls to 0
    dict(BOTH, steps=400, decay=400),
    # some long chains, in cycles at whose end the learning rate is 0; until 48 % of them are right. A cycle adds up to
    # ten points, so bases end between 48 and 58 %
    dict(BOTH, steps=2000, decay=50, lr=1.5e-3, short=31, long=13, canvas=LENGTH, watch="long", per_step=1, until=0.48),
]
LONG_POOL = 4000                                        # different long prompts in pretraining


def encode(tasks):
    """(n, PROMPT + LENGTH) token ids; what comes after the response is EOS."""
    number = {word: i for i, word in enumerate(VOCAB)}
    ids = np.full((len(tasks), PROMPT + LENGTH), EOS)
    for row, (prompt, response, _) in zip(ids, tasks, strict=True):
        words = prompt + response
        row[:len(words)] = [number[word] for word in words]
    return torch.from_numpy(ids)


@torch.no_grad()
def accuracy(model, tasks, per_step, canvas=LENGTH):
    """The share of right answers when several tokens are decoded per step, the most probable first."""
    truth = encode(tasks)[:, :PROMPT + canvas]
    ids = truth.clone()
    ids[:, PROMPT:] = MASK
    pos = torch.arange(PROMPT, PROMPT + canvas).expand(len(ids), -1)
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


def train_phase(model, optimizer, phase, seed, step, label) -> int:
    """Trains until the phase's aim is reached. step: how many there were before; returns how many there are now."""
    pools = []
    for domain, pool, grammar in (("short", phase["pool"], phase["grammar"]), ("long", LONG_POOL, {}),
                                  ("logic", 40000, {})):
        if phase[domain]:
            pools.append((encode(draw(domain, "pretrain", pool, seed, **grammar)), phase[domain]))
    watched = draw(phase["watch"], "val", 200, 99) if phase["watch"] else None
    bar, losses = Bar(phase["steps"], label), []
    for i in range(phase["steps"]):
        # a batch of all domains
        rng = np.random.default_rng([seed, step])
        x = torch.cat([rows[rng.integers(len(rows), size=count)] for rows, count in pools])
        x = x[:, :PROMPT + phase["canvas"]]
        loss = pretrain_loss(model, x, phase, rng)
        # warm-up at the start; in the last phases the rate falls to 0
        lr = phase["lr"] * min(1, (step + 1) / 50)
        if phase["decay"]:
            within = i % phase["decay"]
            lr *= min(1, (within + 1) / 10) * (1 - within / phase["decay"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses.append(loss.item())
        if (i + 1) % 50 == 0:
            mean_loss = np.mean(losses[-50:])
            right = accuracy(model, watched, phase["per_step"], phase["canvas"]) if watched else 0
            bar(i + 1, f"loss {mean_loss:.3f}" + (f" | {phase['watch']} {right:.1%}" if watched else ""))
            if mean_loss < phase["until_loss"] or (watched and right >= phase["until"]):
                break
    return step


def pretrain(seed):
    model = new_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    step = 0
    for number, phase in enumerate(PHASES, 1):
        step = train_phase(model, optimizer, phase, seed, step, f"phase {number} of {len(PHASES)}")
    return model.eval()


def write_model(folder: Path, model):
    """A model folder in LLaDA's layout with a real tokenizer: one token per word of VOCAB."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    folder.mkdir(parents=True, exist_ok=True)
    # every word but ; takes the space before it; a text may begin with one or not. There is no token for unknown words:
    # encoding one raises
    pieces = [word if word in (*VOCAB[:2], ";") else f" {word}" for word in VOCAB]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace(Regex(" +"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[^ ;]+|;"), "isolated")
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


def check_base(folder):
    """A base of an older toy.py has as many words, but others: it would read these prompts as nonsense."""
    words = json.loads((Path(folder) / "tokenizer.json").read_text())["model"]["vocab"]
    if [word.strip() for word in sorted(words, key=words.get)] != VOCAB:
        stop(f"{folder}: its words are not those of this toy.py; make a base with study/toy.py --pretrain")


def main():
    parser = Parser(__doc__)
    parser.add_argument("--out", default="out/toy", help="folder for the prompts, or for the model with --pretrain")
    parser.add_argument("--base", default=Path(__file__).parent / "base", help="model folder that the prompts are for")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, or of the base model")
    parser.add_argument("--train", type=int, default=1500, help="prompts to post-train on")
    parser.add_argument("--test", type=int, default=1000, help="test prompts per domain")
    parser.add_argument("--pretrain", action="store_true", help="train a base model instead of drawing prompts")
    args = parser.parse_args()
    out = Path(args.out)
    if not args.pretrain:
        check_base(args.base)
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
