"""
What the tests are made of: tiny random checkpoints in the hub's layouts, prompts and trajectories for them, and the
plain arithmetic that everything is compared with. pytest.ini loads it, so its fixtures are known to every test.

B: batch, T: tokens, N: response, W: window, V: vocabulary
"""
import contextlib
import functools
import json
import math
import multiprocessing
import os
import signal
import socket
import string
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import baselines
import data
import decode
import lora
import model as models
import tabom

HERE = Path(__file__).parent.parent
torch.set_num_threads(1)                # many small matrix products: a second thread does not help

# -----------------------------------------------------------------------------
# tiny checkpoints

SMALL = ["a2d-qwen2", "a2d-qwen3"]
both = pytest.mark.parametrize("family", ["llada", "Dream"])
every = pytest.mark.parametrize("family", ["llada", "Dream", *SMALL])

WIDTH, LAYERS, HEADS, MLP = 32, 2, 4, 48
KV = {"llada": 4, "Dream": 2, "a2d-qwen2": 2, "a2d-qwen3": 2}              # all but LLaDA group their queries
HEAD = {"llada": 8, "Dream": 8, "a2d-qwen2": 8, "a2d-qwen3": 12}           # 4 x 12 is not the width

CHARS = sorted(set(string.digits + string.ascii_lowercase + "[]+-*/=.# "))
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
QWENS = ["<|mask|>", "<|endoftext|>", "<|im_end|>"]
SPECIALS = {"llada": ["<|mdm_mask|>", "<|endoftext|>", "<|eot_id|>"], "Dream": QWENS, **dict.fromkeys(SMALL, QWENS)}


def ids_of(family: str) -> SimpleNamespace:
    """The tiny models' special ids; like the real ones they have more embedding rows than the tokenizer has tokens."""
    n = len(CHARS) + (family != "llada")                 # Qwen's tokenizer has one merge, "ab"
    return SimpleNamespace(mask=n, eos=n + 1, eot=n + 2, vocab=n + 6)


def hub_shapes(family: str) -> dict[str, tuple]:
    """Every tensor of a checkpoint under its name on the hub, written out: a second opinion on model.py's table."""
    V, C, M = ids_of(family).vocab, WIDTH, MLP
    D = HEAD[family]
    Q, K = HEADS * D, KV[family] * D
    if family == "llada":
        b = "model.transformer.blocks.{}."
        shapes = {"model.transformer.wte.weight": (V, C), "model.transformer.ln_f.weight": (C,),
                  "model.transformer.ff_out.weight": (V, C)}
        block = dict(attn_norm=(C,), ff_norm=(C,), q_proj=(C, C), k_proj=(K, C), v_proj=(K, C), attn_out=(C, C),
                     ff_proj=(M, C), up_proj=(M, C), ff_out=(C, M))
        block = {f"{k}.weight": v for k, v in block.items()}
    else:
        b = "model.layers.{}."
        shapes = {"model.embed_tokens.weight": (V, C), "model.norm.weight": (C,), "lm_head.weight": (V, C)}
        block = {"input_layernorm.weight": (C,), "post_attention_layernorm.weight": (C,),
                 "self_attn.o_proj.weight": (C, Q), "mlp.gate_proj.weight": (M, C), "mlp.up_proj.weight": (M, C),
                 "mlp.down_proj.weight": (C, M)}
        for p, out in dict(q=Q, k=K, v=K).items():
            block[f"self_attn.{p}_proj.weight"] = (out, C)
            if family != "a2d-qwen3":
                block[f"self_attn.{p}_proj.bias"] = (out,)
        if family == "a2d-qwen3":
            block |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
        if family in SMALL:
            del shapes["lm_head.weight"]                 # tied
    return shapes | {b.format(n) + k: v for n in range(LAYERS) for k, v in block.items()}


def config_of(family: str) -> dict:
    i = ids_of(family)
    if family == "llada":
        return dict(model_type="llada", d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV[family],
                    mlp_hidden_size=MLP, embedding_size=i.vocab, vocab_size=i.vocab, max_sequence_length=512,
                    rope_theta=500000.0, rms_norm_eps=1e-5, weight_tying=False, include_bias=False,
                    include_qkv_bias=False, block_type="llama", layer_norm_type="rms",
                    mask_token_id=i.mask, eos_token_id=i.eos, pad_token_id=i.eos)
    config = dict(model_type=family, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                num_key_value_heads=KV[family], intermediate_size=MLP, vocab_size=i.vocab, max_position_embeddings=512,
                rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=False, hidden_act="silu",
                rope_scaling=None, mask_token_id=i.mask, eos_token_id=i.eos, pad_token_id=i.eos,
                auto_map={"AutoModel": "modeling_dream.DreamModel"})     # as on the hub: known families load without it
    if family in SMALL:                                  # no mask, no padding, and EOS is the end of a turn
        config |= dict(tie_word_embeddings=True, eos_token_id=i.eot)
        del config["mask_token_id"], config["pad_token_id"]
    if family == "a2d-qwen3":                            # as transformers 5 writes it
        config |= dict(head_dim=HEAD[family], rope_parameters=dict(rope_theta=config.pop("rope_theta"),
                                                                   rope_type="default"))
    return config


def tiny_tokenizer(family: str, folder: Path):
    specials = SPECIALS[family]
    if family == "llada":
        from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast
        t = Tokenizer(WordLevel({w: i for i, w in enumerate(CHARS + specials)}, unk_token=" "))
        t.pre_tokenizer, t.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
        fast = PreTrainedTokenizerFast(tokenizer_object=t, eos_token=specials[1], pad_token=specials[1])
        fast.add_special_tokens({"additional_special_tokens": specials})
        fast.chat_template = TEMPLATE
        fast.save_pretrained(folder)
    else:                                                # the hub's files: its class is remote code, ours is Qwen2's
        words = ["\u0120" if c == " " else c for c in CHARS] + ["ab"]
        (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
        (folder / "merges.txt").write_text("#version: 0.2\na b\n")
        added = {len(words) + n: dict(content=w, lstrip=False, normalized=False, rstrip=False, single_word=False,
                                      special=True) for n, w in enumerate(specials)}
        (folder / "tokenizer_config.json").write_text(json.dumps(dict(
            tokenizer_class="DreamTokenizer", auto_map={"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
            added_tokens_decoder=added, eos_token=specials[1], pad_token=specials[1], mask_token=specials[0],
            chat_template=TEMPLATE)))
    if family in SMALL:                                  # as transformers 5 writes it: all in tokenizer.json
        from transformers import Qwen2Tokenizer
        tok = Qwen2Tokenizer.from_pretrained(folder)
        tok.chat_template = TEMPLATE + "{% if enable_thinking is not defined or enable_thinking %}[think]{% endif %}"
        for file in ("vocab.json", "merges.txt", "tokenizer_config.json"):
            (folder / file).unlink()
        tok.save_pretrained(folder)


def tiny(family: str, folder: Path, files: int = 1, dtype=torch.float32, seed: int = 0) -> str:
    """A random checkpoint in the hub's layout, one file or several with an index; wide weights, so it has opinions."""
    folder.mkdir(parents=True)
    g, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in hub_shapes(family).items():
        x = torch.randn(shape, generator=g)
        x = 1 + 0.1 * x if "norm" in name or "ln_f" in name else x * (0.6 if len(shape) == 2 else 0.3)
        tensors[name] = x.to(dtype)
    names = ["model.safetensors"] if files == 1 else [
        f"model-{n + 1:05d}-of-{files:05d}.safetensors" for n in range(files)]
    where = {key: names[n * files // len(tensors)] for n, key in enumerate(tensors)}
    for file in names:
        save_file({k: v for k, v in tensors.items() if where[k] == file}, folder / file, metadata={"format": "pt"})
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=where)))
    (folder / "config.json").write_text(json.dumps(config_of(family)))
    tiny_tokenizer(family, folder)
    return str(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, str]:
    return {f: tiny(f, tmp_path_factory.mktemp("models") / f) for f in KV}


def load(folder, dtype=torch.float32):
    return models.load_model(models.read_config(str(folder)), "cpu", dtype)


@pytest.fixture(scope="session")
def nets(folders) -> dict[str, models.Model]:
    """Shared and read-only: a test that changes a model loads its own."""
    return {family: load(folder) for family, folder in folders.items()}

# -----------------------------------------------------------------------------
# the same checkpoints in code that is not ours

class PlainLLaDA(torch.nn.Module):
    """LLaDA under the hub's module names, written out: one row, one head at a time, RoPE with complex numbers."""
    def __init__(self):
        super().__init__()
        for name, shape in hub_shapes("llada").items():
            module, (*path, last, _) = self, name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            norm, linear = torch.nn.RMSNorm(shape, eps=1e-5), torch.nn.Linear(shape[-1], shape[0], bias=False)
            module.add_module(last, norm if len(shape) == 1 else linear)

    def forward(self, row):
        net, D = self.model.transformer, WIDTH // HEADS
        x = net.wte.weight[row]
        angle = torch.outer(torch.arange(len(row)), 500000.0 ** (-torch.arange(0, D, 2) / D)).to(x.dtype)
        turn = torch.complex(angle.cos(), angle.sin())

        def rope(x):
            y = torch.complex(x[:, :D // 2], x[:, D // 2:]) * turn
            return torch.cat([y.real, y.imag], 1)

        for block in net.blocks.children():
            h, heads = block.attn_norm(x), []
            for j in range(HEADS):
                q, k, v = (m(h)[:, j * D:(j + 1) * D] for m in (block.q_proj, block.k_proj, block.v_proj))
                weight = torch.exp(rope(q) @ rope(k).T / math.sqrt(D))
                heads.append(weight / weight.sum(1, keepdim=True) @ v)
            x = x + block.attn_out(torch.cat(heads, 1))
            h = block.ff_norm(x)
            x = x + block.ff_out(torch.nn.functional.silu(block.ff_proj(h)) * block.up_proj(h))
        return net.ff_out(net.ln_f(x))


def reference(family, folder):
    """The same checkpoint in code that is not ours, where every token sees every other."""
    import transformers
    weights = load_file(Path(folder) / "model.safetensors")
    if family == "llada":
        net = PlainLLaDA()
    else:
        kind = "Qwen3" if family == "a2d-qwen3" else "Qwen2"
        c = {k: v for k, v in config_of(family).items() if k not in ("model_type", "mask_token_id", "auto_map")}
        config = getattr(transformers, kind + "Config")(**c, attn_implementation="eager")
        net = getattr(transformers, kind + "ForCausalLM")(config)
        if family in SMALL:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    net.load_state_dict(weights, strict=True)
    net.shift = family == "Dream"
    return net.eval().requires_grad_(False)


def reference_logits(net, row):
    """(T, V) of one row, at the token that they predict."""
    if isinstance(net, PlainLLaDA):
        return net(row)
    mask = torch.zeros(1, 1, len(row), len(row), dtype=net.dtype)            # 4-D: nothing is causal
    raw = net(torch.tensor([row]), attention_mask=mask).logits[0]
    return torch.cat([raw[:1], raw[:-1]]) if net.shift else raw              # Dream: state i - 1 predicts token i


def peft_adapter(net, folder, **options):
    """An adapter that the real peft put on a reference model and saved; gives the model."""
    from peft import LoraConfig, get_peft_model
    theirs, g = get_peft_model(net, LoraConfig(r=4, lora_alpha=6, **options)), torch.Generator().manual_seed(0)
    for name, p in theirs.named_parameters():
        if "lora_B" in name:
            p.data.copy_(torch.randn(p.shape, generator=g) * 0.3)
    theirs.create_or_update_model_card = lambda _: None  # a README for the hub, made from a transformers config
    theirs.save_pretrained(folder)
    return theirs.base_model.model.requires_grad_(False)

# -----------------------------------------------------------------------------
# files, commands and processes

@pytest.fixture
def refused(capsys):
    """with refused("words", ...): a user's mistake ends with exit code 2 and one line on stderr that has the words."""
    @contextlib.contextmanager
    def check(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            yield
        lines = [x for x in capsys.readouterr().err.splitlines() if x]
        assert e.value.code == 2 and len(lines) == 1, lines
        for w in words:
            assert str(w) in lines[0], (w, lines[0])
    return check


def write_lines(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def edit_json(path: Path, **fields):
    """Sets the fields; those given as ... are deleted."""
    new = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in new.items() if v is not ...}))


@functools.cache
def tokenizer(folder: str):
    return models.load_tokenizer(models.read_config(folder))


def run_main(module, flags):
    """A script's main in this process; flags: as they are typed, or a list."""
    argv, sys.argv = sys.argv, [module.__file__, *(flags.split() if isinstance(flags, str) else flags)]
    try:
        module.main()
    finally:
        sys.argv = argv


CHILD = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}       # the environment of a child process
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
Fork = multiprocessing.get_context("fork").Process       # a child that has all imports already


def run_ranks(count: int, job):
    """job() in that many processes, with the environment that torchrun gives."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]), WORLD_SIZE=str(count))

    def start(rank):
        os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
        job()
    children = [Fork(target=start, args=(rank,)) for rank in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * count


def die_at(n):
    """From now on: SIGKILL at the n-th change to the disk; what is being written then is cut in the middle."""
    count = [0]

    def hook(event, args):
        writes = event == "open" and isinstance(args[0], (str, Path)) and (args[1] or "r")[0] in "aw"
        if writes or event in ("os.rename", "os.mkdir"):
            count[0] += 1
            if count[0] == n:
                if writes:
                    os.write(os.open(args[0], os.O_WRONLY | os.O_APPEND | os.O_CREAT), b'{"step": 3, "epoch": 1, "lo')
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

# -----------------------------------------------------------------------------
# what a model computes, plainly

def ragged(family: str, lengths=(7, 3, 12), seed: int = 1):
    """Left-padded random rows: ids, attend (B, T), and the rows alone."""
    rng, T = np.random.default_rng(seed), max(lengths)
    alone = [rng.integers(0, ids_of(family).vocab, n).tolist() for n in lengths]
    ids = torch.tensor([[5] * (T - len(x)) + x for x in alone])
    return ids, torch.tensor([[False] * (T - len(x)) + [True] * len(x) for x in alone]), alone


QV = ["q_proj", "v_proj"]


def adapted(folder, targets=QV, r=4, alpha=6.0, seed=0, dtype=torch.float32, scale=0.3):
    """A model with an adapter that does something: at first B is 0."""
    net, g = load(folder, dtype), torch.Generator().manual_seed(seed)
    for name, p in lora.add(net, targets, r, alpha, seed).items():
        if "lora_B" in name:
            p.data.copy_(torch.randn(p.shape, generator=g) * scale)
    return net


def full(net, ids, attend=None):
    """Logits at every position, (B, T, V)."""
    ids = torch.as_tensor(ids)
    attend = torch.ones_like(ids, dtype=torch.bool) if attend is None else attend
    return net(ids, attend, torch.arange(ids.shape[1]).expand_as(ids))


def plain_logits(net, prompt, canvas):
    """(N, V) in float64 of one response: alone, no padding, all its positions from left to right."""
    ids = torch.tensor([[*prompt, *canvas]])
    with torch.no_grad():
        return full(net, ids)[0, len(prompt):].double()


def plain_entropy(p) -> float:
    return -sum(q * math.log(q) for q in p if q > 0)


def plain_stats(z, x) -> tuple[float, float]:
    """Cross-entropy of token x and the entropy, of one row of logits."""
    top = max(z)
    total = sum(math.exp(v - top) for v in z)
    return -(z[x] - top - math.log(total)), plain_entropy([math.exp(v - top) / total for v in z])

# -----------------------------------------------------------------------------
# decoding

def settings(folder: str, flags: str = "", **more) -> Namespace:
    args = decode.flags().parse_args(["--model", folder, "--prompts", "none", *flags.split()])
    s = decode.make_settings(args, models.read_config(folder), tokenizer(folder).end_ids)
    return Namespace(**vars(s) | more)


def run(net, prompts, s, batch_size: int = 3) -> list[data.Trajectory]:
    """The finished responses in the order of the prompts, whose ids are their numbers."""
    return sorted(decode.decode(net, list(enumerate(prompts)), s, batch_size), key=lambda traj: traj.id)


def prompts_of(family: str) -> list[list[int]]:
    return ragged(family, (9, 4, 15, 6, 11), seed=3)[2]


TASKS = [dict(id=f"t{n}", prompt=p, answer=a) for n, (p, a) in enumerate(
    [("1+2", "3"), ("what is 12*12 = ", 144), ("a", "b"), ("12 - 7 and then some more", "5"), ("b c d", "e")])]


@pytest.fixture
def cli(folders, tmp_path):
    """cli("t.jsonl", "--length 8"): decode.py's main in this process on prompts.jsonl; returns {id: record}."""
    prompts = write_lines(tmp_path / "prompts.jsonl", TASKS)

    def call(out, flags="", family="llada"):
        run_main(decode, f"--model {folders[family]} --prompts {prompts} --out {tmp_path / out} {flags}")
        return {row["id"]: row for row in read_lines(tmp_path / out)}
    return call

# -----------------------------------------------------------------------------
# tasks of lm-evaluation-harness

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{response}}}}"
generation_kwargs: {{until: {until}, max_gen_toks: 8, do_sample: false}}
filter_list: [{{name: {filter}, filter: [{{function: take_first}}]}}]
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """harness({task: "metric,filter"}, rows, code): a folder of tasks; a function of the code scores its namesake."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(metrics, rows, code, until=()):
        (tmp_path / "tasks").mkdir()
        file = write_lines(tmp_path / "tasks" / "d.jsonl", rows)
        for name, key in metrics.items():
            metric, key = key.split(",")
            text = TASK.format(name=name, file=file, until=json.dumps(until), metric=metric, filter=key)
            if f"def {name}(" in code:
                text += f"process_results: !function utils.{name}\n"
            (tmp_path / "tasks" / f"{name}.yaml").write_text(text)
        (tmp_path / "tasks" / "utils.py").write_text(code)
        return str(tmp_path / "tasks")
    return call

# -----------------------------------------------------------------------------
# trajectories, and views of them

def training_args(flags="") -> Namespace:
    return tabom.parse_args(["--data", "-", *flags.split()])


def read_trajs(folder, source, flags="") -> list[data.Trajectory]:
    """The trajectories as tabom.py reads them with these flags."""
    args = training_args(flags)
    return data.load_trajectories(str(source), models.read_config(folder), tokenizer(folder), args.all, args.decoded_by,
                                  args.limit, args.length or 256, args.tail, ordered=args.method != "sft")


def good_record(**fields) -> dict:
    """As decode.py writes it: "ab", EOS, and a mask that was never decoded."""
    i, a = ids_of("llada"), CHARS.index("a")
    return dict(id=0, prompt="p", response="ab", response_token_ids=[a, a + 1, i.eos, i.mask],
                decoding_order=[1, 0, 0, -1], method="entropy", prompt_token_ids=[1, 2], entropy=[0.5, 0.2, 0.1, None],
                confidence=[0.9, 0.8, 1.0, None], answer=None, correct=None, decode=dict(length=4),
                model=dict(name="m", mask_id=i.mask, vocab_size=i.vocab, end_ids=[i.eos, i.eot])) | fields


def states_row(folder, text="a=7", **fields) -> dict:
    """A row as d3LLM publishes it: every state of a decoding, prompt included, here from right to left."""
    config, tok = models.read_config(folder), tokenizer(folder)
    prompt = tok("3+4", add_special_tokens=False)["input_ids"]
    response = tok(text, add_special_tokens=False)["input_ids"] + tok.end_ids[:1]
    states = [prompt + [config.mask_id] * (len(response) - n) + response[len(response) - n:]
              for n in range(1, len(response) + 1)]
    return dict(idx=5, question="3+4", prompt_ids=prompt, trajectory=states, final_output=states[-1],
                generated_text=text, llm_answer="7", gt_answer="7", is_correct=True, nfe=len(states)) | fields


SHAPES = [(12, 1, 11, 6), (9, 2, 5, 3), (14, 3, 9, 8), (3, 1, 2, 4), (10, 1, 4, 5, 3), (8, 8, 6, 2)]  # of trajectory()
METHODS = ["--window 4", "--window 0 --gamma 0.5", "--lam 0 --window 5", "--window 4 --rank-context exact --lam 2",
           "--method sft", "--method dinfer", "--method t3d"]


def trajectory(id, folder, length, k, end, prompt, undone=0) -> dict:
    """A record as decode.py writes it, of random tokens: k per step, EOS from `end` on, the last `undone` masked."""
    config, rng = models.read_config(str(folder)), np.random.default_rng([*str(id).encode()])
    ids, step = rng.integers(0, len(CHARS), length), np.full(length, -1)
    ids[end:] = config.eos_id
    ids[length - undone:] = config.mask_id
    step[:length - undone] = rng.permutation(length - undone) // k
    entropy = [None if s < 0 else int(rng.integers(0, 4)) / 2 for s in step]             # coarse: there are ties
    text = "".join(CHARS[t] for t in rng.integers(0, len(CHARS), prompt))
    return dict(id=id, prompt=text, response="".join(CHARS[t] for t in ids[:end]), response_token_ids=ids.tolist(),
                decoding_order=step.tolist(), method="entropy", prompt_token_ids=[CHARS.index(c) for c in text],
                entropy=entropy, model=dict(name=str(folder), mask_id=config.mask_id, vocab_size=config.vocab))


def read_shapes(folder, tmp_path, flags) -> list[data.Trajectory]:
    rows = [trajectory(n, folder, *shape) for n, shape in enumerate(SHAPES)]
    return read_trajs(folder, write_lines(tmp_path / "shapes.jsonl", rows), f"--all {flags}")


def view_of(traj, args, rng) -> data.View:
    """The view that tabom.py draws with these flags."""
    if args.method == "tabom":
        return tabom.tabom_view(traj, rng, args.window, args.cut)
    return baselines.VIEWS[args.method](traj, rng)


def views_of(trajs, args, seed=0) -> list[data.View]:
    return [view_of(traj, args, np.random.default_rng([seed, n])) for n, traj in enumerate(trajs)]


def losses(net, views, args):
    return tabom.compute_loss(net, views, args, "cpu")


def replayed(traj, before) -> list[bool]:
    """Unmasks step after step, as decode.py does, and stops just before step `before`."""
    seen = [False] * len(traj.step)
    for now in range(before):
        for j in np.flatnonzero(traj.step == now):
            seen[j] = True
    return seen


def state_logits(net, traj, seen) -> list[list[float]]:
    """(N, V) of one state alone."""
    canvas = [t if s else net.config.mask_id for t, s in zip(traj.response.tolist(), seen, strict=True)]
    return plain_logits(net, traj.prompt.tolist(), canvas).tolist()

# -----------------------------------------------------------------------------
# training runs

QUICK = "--window 4 --lora-r 4 --lr 1e-3 --warmup 5 --seed 3"


def corpus(folder, count=21) -> list[dict]:
    """Finished trajectories of many lengths."""
    rng, rows = np.random.default_rng(count), []
    for n in range(count):
        N = int(rng.integers(6, 14))
        rows.append(trajectory(f"r{n}", folder, N, 1 + n % 3, int(rng.integers(2, N)), int(rng.integers(2, 9))))
    return rows


@pytest.fixture
def train(folders, tmp_path):
    """train("run", "--lam 0"): tabom.py's main in this process on a small corpus; returns the --out folder."""
    def call(out="run", flags="", source=None):
        run_main(tabom, f"--data {source or call.data} --out {tmp_path / out} {QUICK} {flags}")
        return tmp_path / out
    call.data = write_lines(tmp_path / "corpus.jsonl", corpus(folders["llada"]))
    return call


def forget(path, *names):
    """A resume file as it was before it named these settings."""
    with safe_open(path, "pt") as f:
        metadata = f.metadata()
    settings = json.loads(metadata["settings"])
    settings = {name: value for name, value in settings.items() if name not in names}
    save_file(load_file(path), path, metadata | {"settings": json.dumps(settings)})


def log_of(out) -> tuple[dict, list[dict]]:
    """log.jsonl as (first line, one row per step); every step is there once."""
    head, *rows = read_lines(out / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return head, rows


def tensors_of(out) -> dict[str, torch.Tensor]:
    """The adapters of all epochs, and the weights and moments of the resume file."""
    files = sorted(out.rglob("*.safetensors"))
    return {f"{file.relative_to(out)}: {name}": x for file in files for name, x in load_file(file).items()}


def same_run(a, b) -> bool:
    """To the last bit."""
    x, y = tensors_of(a), tensors_of(b)
    without_time = lambda row: {k: v for k, v in row.items() if k not in ("ms", "tokens_per_s", "memory_gb")}
    logs = [[without_time(row) for row in log_of(out)[1]] for out in (a, b)]
    return logs[0] == logs[1] and x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def assert_close_runs(a, b):
    """The same samples and windows; all else may differ by the order of additions."""
    x, y = tensors_of(a), tensors_of(b)
    assert x.keys() == y.keys() and max((x[k] - y[k]).abs().max() for k in x) < 1e-5
    for r, s in zip(log_of(a)[1], log_of(b)[1], strict=True):
        assert all(r[k] == s[k] for k in ("step", "epoch", "lr", "samples"))
        assert r.keys() == s.keys()
        for key in s.keys() & {"loss", "ce", "rank_loss", "in_order", "gnorm"}:
            assert r[key] == pytest.approx(s[key], rel=2e-4, abs=1e-5), key
