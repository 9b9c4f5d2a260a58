"""
The claims of this project that a CPU can check. Each test is named for its claim and compares with something that
shares no code with it: plain loops, native decoders written out, the real transformers, the real peft and lm_eval.

$ OMP_NUM_THREADS=1 python -m pytest -q test_tabom.py

Checkpoints are tiny, random and made on the fly (`tiny`). B: batch, T: tokens, N: response, W: window, V: vocabulary
"""
import argparse
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import pickle
import re
import runpy
import shutil
import signal
import socket
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bench
import data
import decode
import eval as evaluate
import lora
import model as models
import tabom
import toy
import util

HERE = Path(__file__).parent
torch.set_num_threads(1)                # many small matrix products: a second thread does not help
both = pytest.mark.parametrize("family", ["llada", "Dream"])
SMALL = ["a2d-qwen2", "a2d-qwen3"]
every = pytest.mark.parametrize("family", ["llada", "Dream", *SMALL])


# -----------------------------------------------------------------------------
# what the tests are made of

WIDTH, LAYERS, HEADS, MLP = 32, 2, 4, 48
KV = {"llada": 4, "Dream": 2, "a2d-qwen2": 2, "a2d-qwen3": 2}               # all but LLaDA group their queries
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return {f: tiny(f, tmp_path_factory.mktemp("models") / f) for f in KV}


def load(folder, dtype=torch.float32):
    return models.load_model(models.read_config(str(folder)), "cpu", dtype)


@pytest.fixture(scope="module")
def nets(folders) -> dict[str, models.Model]:
    """Shared and read-only: a test that changes a model loads its own."""
    return {family: load(folder) for family, folder in folders.items()}


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


def ragged(family: str, lengths=(7, 3, 12), seed: int = 1):
    """Left-padded random rows: ids, attend (B, T), and the rows alone."""
    rng, T = np.random.default_rng(seed), max(lengths)
    alone = [rng.integers(0, ids_of(family).vocab, n).tolist() for n in lengths]
    ids = torch.tensor([[5] * (T - len(x)) + x for x in alone])
    return ids, torch.tensor([[False] * (T - len(x)) + [True] * len(x) for x in alone]), alone


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


@pytest.fixture
def command(monkeypatch):
    """command(decode, "--length 8 ..."): a script's main in this process."""
    def call(module, flags):
        monkeypatch.setattr(sys, "argv", [module.__file__, *flags.split()])
        module.main()
    return call


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
# util.py

def test_a_mistake_is_one_line_that_names_the_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as e:
        util.stop("t.jsonl:3: wrong")
    assert e.value.code == 2 and capsys.readouterr().err == "[rank 3] t.jsonl:3: wrong\n"


def test_an_empty_list_of_devices_hides_every_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert util.setup_device()[2] == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert util.setup_device()[2] == "mps"


# -----------------------------------------------------------------------------
# model.py

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


def test_every_family_is_tested():
    assert set(KV) == set(models.FAMILIES)


@every
def test_logits_equal_the_models_own_bidirectional_code_alone_and_left_padded(family, folders, nets):
    theirs, (ids, attend, alone) = reference(family, folders[family]).double(), ragged(family)
    pos = torch.tensor([[11, 5, 7, 5], [9, 11, 10, 10], [0, 11, 1, 6]])      # any order, also twice
    padded, some = full(nets[family], ids, attend), nets[family](ids, attend, pos)
    for b, row in enumerate(alone):
        want = reference_logits(theirs, row).float()
        torch.testing.assert_close(full(nets[family], [row])[0], want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(padded[b, -len(row):], want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(some[b], padded[b, pos[b]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["Dream", *SMALL])
def test_logits_equal_transformers_in_fp32(family, folders, nets):
    theirs = reference(family, folders[family])          # the same precision on both sides: closer than above
    for row in ragged(family)[2]:
        torch.testing.assert_close(full(nets[family], [row])[0], reference_logits(theirs, row), atol=1e-5, rtol=1e-5)


@both
def test_loading_is_strict(family, tmp_path):
    file = Path(tiny(family, tmp_path / "m")) / "model.safetensors"
    w = load_file(file)
    first, *rest = sorted(w)
    for words, new in (("Missing key", {k: w[k] for k in rest}), ("Unexpected key", w | {"extra": torch.zeros(1)}),
                       ("size mismatch", w | {first: torch.zeros(3, 5)})):
        save_file(new, file)
        with pytest.raises(RuntimeError, match=words):
            load(file.parent)


@pytest.mark.parametrize("family, fields, words", [
    ("llada", dict(model_type="gpt2"), ["'gpt2'", "llada, Dream"]),
    ("llada", dict(rope_theta=...), ["rope_theta is missing"]),
    ("Dream", dict(use_sliding_window=True), ["use_sliding_window is True", "False"]),
    ("a2d-qwen3", dict(head_dim=...), ["head_dim is missing"]),
    ("a2d-qwen3", dict(rope_parameters=dict(rope_theta=1e6, rope_type="yarn")), ["rope_type is 'yarn'"]),
])
def test_a_model_that_is_not_built_is_refused_in_one_line(family, fields, words, tmp_path, refused):
    config = Path(tiny(family, tmp_path / "m")) / "config.json"
    edit_json(config, **fields)
    with refused(config, *words):
        models.read_config(str(config.parent))


def test_block_causal_models_and_tokenizers_without_a_mask_are_refused(tmp_path, refused):
    with refused("a2d-bd3lm", "causally between blocks", "mdlm"):
        models.read_config(tiny("a2d-qwen3", tmp_path / "a2d-bd3lm"))
    tokens = Path(tiny("a2d-qwen2", tmp_path / "m")) / "tokenizer.json"
    edit_json(tokens, added_tokens=[])
    with refused(tokens, "no token <|mask|>", "hub page"):
        models.read_config(str(tmp_path / "m"))


@pytest.mark.parametrize("family", SMALL)
def test_small_models_know_their_mask_both_ends_a_block_of_32_and_do_not_think_aloud(family, folders):
    config, tok, i = models.read_config(folders[family]), tokenizer(folders[family]), ids_of(family)
    assert config.mask_id == i.mask and config.eos_id == i.eot and tok.end_ids == [i.eos, i.eot]
    item = dict(prompt="3+4", messages=[dict(role="user", content="3+4")])
    assert tok.decode(data.prompt_ids(tok, item)) == "[user]3+4[assistant]"
    for flags, block in (("--length 64", 32), ("--length 16", 16), ("--length 64 --block 64", 64)):
        args = decode.parse_args(["--model", "-", "--prompts", "-", *flags.split()])
        assert decode.make_settings(args, config, tok.end_ids).block == block


def test_a_hub_model_comes_without_code_and_a_wrong_name_is_one_line(folders, refused, monkeypatch):
    import huggingface_hub
    asked = []

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        if name != "org/good":
            raise ConnectionError("offline\nand more lines")
        return folders["llada"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    models.load_model(models.read_config("org/good"))
    assert asked == [["*.json", "*.txt", "*.jinja"], ["*.safetensors"]]
    with refused("org/bad", "neither a folder nor a hub model", "ConnectionError: offline"):
        models.read_config("org/bad")


@both
def test_neither_code_nor_pickles_in_a_model_folder_are_touched(family, nets, tmp_path, refused):
    folder, i = Path(tiny(family, tmp_path / "m")), ids_of(family)
    for name in ("evil.py", "modeling.py", "tokenization.py", "__init__.py", "transformers.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Evil: pass\n")
    (folder / "pytorch_model.bin").write_text(f"cbuiltins\nopen\n(S'{folder / 'ran'}'\nS'w'\ntR.")      # a pickle
    code = {f"Auto{x}": "evil.Evil" for x in ("Config", "Model", "ModelForCausalLM")}
    code["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]
    edit_json(folder / "config.json", auto_map=code, trust_remote_code=True)
    edit_json(folder / "tokenizer_config.json", auto_map=code, trust_remote_code=True, tokenizer_class="Evil")
    net, tok = load(folder), models.load_tokenizer(models.read_config(str(folder)))
    assert torch.equal(full(net, [[1, 2, 3]]), full(nets[family], [[1, 2, 3]]))
    ids = tok("cab = 3+4", add_special_tokens=False)["input_ids"]
    assert tok.decode(ids) == "cab = 3+4" and len(ids) == 9 - (family == "Dream")       # Dream merges "ab"
    assert tok.end_ids == [i.eos, i.eot] and tok.convert_tokens_to_ids(SPECIALS[family]) == [i.mask, i.eos, i.eot]
    (folder / "model.safetensors").unlink()
    with refused(folder, ".bin", "convert or download"):
        load(folder)
    assert not (folder / "ran").exists() and "evil" not in sys.modules
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert (folder / "ran").exists()                     # the trap works


def test_loading_needs_the_memory_of_the_weights_once(tmp_path):
    """A 200 MB checkpoint loaded in its own process; its peak resident memory."""
    c = config_of("llada") | dict(d_model=1024, n_heads=8, n_kv_heads=8, mlp_hidden_size=4096, n_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(c))
    config = models.read_config(str(tmp_path))
    with torch.device("meta"):
        net = models.Model(config)
    weights = {models.hub_name(name, config.family): torch.zeros(p.shape) for name, p in net.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors")
    size = sum(w.nbytes for w in weights.values())
    code = """if True:
        import sys, torch, safetensors.torch, model
        def memory(line):                                # VmRSS: now, VmHWM: at its highest
            return next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith(line))
        torch.nn.Embedding(4, 4, device="meta")          # its first use imports 80 MB of torch, which is no weight
        before = memory("VmRSS")
        net = model.load_model(model.read_config(sys.argv[1]))
        assert sum(float(p.sum()) for p in net.parameters()) == 0            # every page was really there
        print(memory("VmHWM") - before)"""
    run = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=HERE, capture_output=True, text=True, check=True)
    assert 190e6 < size < 210e6 and 0.9 * size < int(run.stdout) < 1.3 * size, int(run.stdout) / size


def test_compiled_blocks_compute_the_same(folders):
    """By the aot_eager backend, which traces and differentiates as the default one does, and needs no compiler."""
    plain, compiled = adapted(folders["Dream"]), adapted(folders["Dream"])
    compiled.compile_blocks(backend="aot_eager")
    for lengths in ((7, 3, 12), (5, 9)):
        ids, attend, _ = ragged("Dream", lengths)
        results = []
        for net in (plain, compiled):
            y = full(net, ids, attend)
            y.square().mean().backward()
            with torch.no_grad(), lora.disabled(net):
                base = full(net, ids, attend)
            results.append([y, base, *(p.grad for p in lora.parameters(net).values())])
            net.zero_grad()
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    torch._dynamo.reset()


def test_rms_norm_is_the_written_out_norm_bit_for_bit():
    """In fp32 and bf16: normalise in fp32, round, then multiply by the weight."""
    norm = models.RMSNorm(48, 1e-6)
    norm.weight.data = torch.randn(48, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 7, 48, generator=torch.Generator().manual_seed(1)) * 3
    for dtype in (torch.float32, torch.bfloat16):
        y = x.to(dtype).float()
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
        assert torch.equal(norm.to(dtype)(x.to(dtype)), norm.weight * y)


def test_a_tied_head_is_the_embedding_whether_or_not_the_file_holds_a_copy(tmp_path):
    folder = Path(tiny("Dream", tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    with_copy = load(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    for net in (with_copy, load(folder)):
        assert net.head.weight is net.embed.weight
        assert torch.equal(net.embed.weight, weights["model.embed_tokens.weight"])


# -----------------------------------------------------------------------------
# lora.py

TARGETS = {"llada": [*QV, "attn_out"], **dict.fromkeys(["Dream", *SMALL], [*QV, "down_proj"])}


@both
def test_lora_is_on_the_named_layers_only_the_identity_at_first_and_disabled_the_base(family, folders, nets, refused):
    net, base = load(folders[family]), full(nets[family], [[1, 2, 3]])
    with refused("--lora-targets q_porj", "k_proj, ", "q_proj, up_proj, v_proj"):        # lists what there is
        lora.add(net, ["v_proj", "q_porj"], 4, 8)
    params = lora.add(net, QV, 4, 8)
    path = {"llada": "model.transformer.blocks.{}.{}_proj", "Dream": "model.layers.{}.self_attn.{}_proj"}[family]
    paths = [path.format(n, p) for n in range(LAYERS) for p in "qv"]
    assert sorted(params) == sorted(f"base_model.model.{p}.lora_{m}.weight" for p in paths for m in "AB")
    assert {id(p) for p in net.parameters() if p.requires_grad} == {id(p) for p in params.values()}
    assert torch.equal(full(net, [[1, 2, 3]]), base)
    net = adapted(folders[family])
    with pytest.raises(KeyError), lora.disabled(net):
        assert torch.equal(full(net, [[1, 2, 3]]), base)
        raise KeyError
    assert (full(net, [[1, 2, 3]]) - base).abs().max() > 0.1                 # enabled again, also after an error


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


@every
def test_real_peft_loads_ours_and_we_load_real_pefts(family, folders, nets, tmp_path):
    from peft import PeftModel
    row, net = ragged(family)[2][2], load(folders[family])
    theirs = peft_adapter(reference(family, folders[family]), tmp_path / "theirs", target_modules=TARGETS[family])
    lora.load(net, tmp_path / "theirs")
    torch.testing.assert_close(full(net, [row])[0], reference_logits(theirs, row), atol=1e-4, rtol=1e-4)
    assert (full(net, [row]) - full(nets[family], [row])).abs().max() > 0.1
    ours = adapted(folders[family], TARGETS[family], 3, 7.5, seed=1)
    lora.save(ours, tmp_path / "ours", folders[family])
    theirs = PeftModel.from_pretrained(reference(family, folders[family]), tmp_path / "ours").base_model.model
    torch.testing.assert_close(full(ours, [row])[0], reference_logits(theirs, row), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", [dict(use_dora=True), dict(use_rslora=True), dict(rank_pattern={"q_proj": 2}),
                                    dict(modules_to_save=["lm_head"])], ids=lambda option: next(iter(option)))
def test_an_adapter_of_another_formula_is_refused(option, folders, tmp_path, refused):
    peft_adapter(reference("Dream", folders["Dream"]), tmp_path / "a", target_modules=QV, **option)
    with refused(tmp_path / "a" / "adapter_config.json", *option):
        lora.load(load(folders["Dream"]), tmp_path / "a")


@both
def test_a_second_adapter_replaces_the_first(family, folders, tmp_path, refused):
    nets = {"a": adapted(folders[family], TARGETS[family]), "b": adapted(folders[family], ["k_proj"], 2, 3.0, seed=1)}
    net, (ids, attend, _) = load(folders[family]), ragged(family)
    for name in ("a", "b", "a"):
        lora.save(nets[name], tmp_path / name)
        lora.load(net, tmp_path / name)
        assert lora.layers(net).keys() == lora.layers(nets[name]).keys()
        assert torch.equal(full(net, ids, attend), full(nets[name], ids, attend))
    with refused(tmp_path / "a", ".0.", "own base model"):
        lora.load(load(folders["Dream" if family == "llada" else "llada"]), tmp_path / "a")


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_checkpoint_is_the_adapter_in_the_hubs_layout(family, dtype, tmp_path, monkeypatch, refused):
    base, merged = Path(tiny(family, tmp_path / "base", files=2, dtype=dtype)), tmp_path / "merged"
    (base / "pytorch_model.bin").write_bytes(b"x")
    lora.save(adapted(base, alpha=16.0, dtype=dtype), tmp_path / "a", str(base))
    adapter = load_file(tmp_path / "a" / "adapter_model.safetensors")
    monkeypatch.setattr(sys, "argv", f"lora.py --model {base} --adapter {tmp_path / 'a'} --out {merged}/".split())
    runpy.run_path(str(HERE / "lora.py"), run_name="__main__")
    assert {f.name for f in merged.iterdir()} == {f.name for f in base.iterdir()} - {"pytorch_model.bin"}
    for file in base.glob("*.safetensors"):              # same tensors, shards and types; W + 16/4 B A where adapted
        old, new = load_file(file), load_file(merged / file.name)
        assert old.keys() == new.keys()
        for key, want in old.items():
            A, B = (adapter.get("base_model.model." + key.replace("weight", f"lora_{m}.weight")) for m in "AB")
            want = want if A is None else (want.float() + 4.0 * B @ A).to(dtype)
            torch.testing.assert_close(new[key], want, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    with refused(merged, "exists already"):
        runpy.run_path(str(HERE / "lora.py"), run_name="__main__")


# -----------------------------------------------------------------------------
# data.py: prompts

TURNS = [dict(role="system", content="s"), dict(role="user", content="u"), dict(role="assistant", content="a"),
         dict(role="user", content="v")]


@pytest.mark.parametrize("row, want", [
    (dict(prompt="p"), dict(prompt="p", answer=None, response=None, id=0)),
    (dict(question="q", id="a7", answer=12), dict(prompt="q", answer="12", id="a7")),
    (dict(instruction="i", input="x", output="o"), dict(prompt="i\nx", response="o")),
    (dict(prompt="p", gen_text="g", entropy=3, model="m", input=[1]), dict(prompt="p", response="g")),
    (dict(prompt="p", response="r", target=5), dict(response="r")),          # a field we do not need may hold anything
    (dict(question="q", answer="3+4 = 7\n#### 7"), dict(answer="7", response="3+4 = 7\n#### 7")),       # GSM8K
    (dict(question="q", target="so \\boxed{5}"), dict(prompt="q", answer="5", response="so \\boxed{5}")),  # MixChain
    (dict(messages=[dict(role="HUMAN", content="h"), dict(role="ASSISTANT", content="a")]),       # Ling-Coder
     dict(prompt="h", response="a", messages=[dict(role="user", content="h")])),
    (dict(messages=TURNS), dict(prompt="v", response=None, messages=TURNS)),
])
def test_each_prompt_form_is_read_from_jsonl_and_parquet(row, want, tmp_path):
    from pyarrow import Table, parquet
    parquet.write_table(Table.from_pylist([row]), tmp_path / "p.parquet")
    for path, place in ((write_lines(tmp_path / "p.jsonl", [row]), ":1"), (str(tmp_path / "p.parquet"), ": row 1")):
        item, = data.read_prompts(path)
        expected = dict(messages=[dict(role="user", content=item["prompt"])], place=path + place) | want
        assert {k: item[k] for k in expected} == expected


def test_bom_crlf_blank_lines_and_missing_ids_are_no_mistake(tmp_path):
    text = '\ufeff{"prompt": "a"}\r\n\r\n \n{"prompt": "\u00e9\u2028", "id": 0}\r\n{"prompt": "c", "id": null}'
    (tmp_path / "p.jsonl").write_bytes(text.encode())
    items = data.read_prompts(str(tmp_path / "p.jsonl"))
    assert [(item["prompt"], item["id"]) for item in items] == [("a", "row-0"), ("\u00e9\u2028", 0), ("c", 2)]
    assert items[1]["place"] == f"{tmp_path / 'p.jsonl'}:4"


@pytest.mark.parametrize("content, line, words", [
    ('\n', "", "is empty"), ('["a"]', ":1", "not a JSON object"), ('{"promt": "a"}', ":1", "has no prompt"),
    ('{"prompt": 3}', ":1", "prompt is 3"), ('{"prompt": "a", "answer": [1]}', ":1", "answer is [1]"),
    ('{"messages": [{"role": "user"}]}', ":1", "not a role and its content"),
    ('{"prompt": "a", "id": 1}\n\n{"prompt": "b", "id": "1"}', ":3", "id '1' appears twice"),
])
def test_a_prompt_that_cannot_be_read_is_named_with_file_and_line(content, line, words, tmp_path, refused):
    path = tmp_path / "p.jsonl"
    with refused(path, "no such file", "gsm8k"):
        data.read_prompts(str(path))
    path.write_text(content)
    with refused(f"{path}{line}: ", words):
        data.read_prompts(str(path))


# -----------------------------------------------------------------------------
# data.py: trajectory records

def training_args(flags="") -> argparse.Namespace:
    return tabom.parse_args(["--data", "-", *flags.split()])


def read_trajs(folder, source, flags="") -> list[data.Trajectory]:
    """The trajectories as tabom.py reads them with these flags."""
    args = training_args(flags)
    args.data = str(source)
    return data.load_trajectories(args, models.read_config(folder), tokenizer(folder))


def good_record(**fields) -> dict:
    """As decode.py writes it: "ab", EOS, and a mask that was never decoded."""
    i, a = ids_of("llada"), CHARS.index("a")
    return dict(id=0, prompt="p", response="ab", response_token_ids=[a, a + 1, i.eos, i.mask],
                decoding_order=[1, 0, 0, -1], method="entropy", prompt_token_ids=[1, 2], entropy=[0.5, 0.2, 0.1, None],
                confidence=[0.9, 0.8, 1.0, None], answer=None, correct=None, decode=dict(length=4),
                model=dict(name="m", mask_id=i.mask, vocab_size=i.vocab, end_ids=[i.eos, i.eot])) | fields


def test_records_ours_the_authors_and_reference_answers_are_read(folders, tmp_path, capsys, refused):
    folder, eos = folders["llada"], ids_of("llada").eos
    theirs = dict(question="1+2", gen_text="3", response_token_ids=[4, eos], decoding_order=[0, 1], method="entropy")
    a, b = read_trajs(folder, write_lines(tmp_path / "t.jsonl", [good_record(), theirs]))
    assert (a.id, a.prompt.tolist(), a.step.tolist()) == (0, [1, 2], [1, 0, 0, -1])
    assert a.entropy.tolist() == [0.5, 0.2, 0.1, 0]
    assert a.response.tolist() == good_record()["response_token_ids"] and a.order.tolist() == [2, 1, 0]
    assert tokenizer(folder).decode(b.prompt) == "[user]1+2[assistant]"
    assert (b.response.tolist(), b.order.tolist()) == ([4, eos], [0, 1])
    out = capsys.readouterr().out
    assert "2 records" in out and "was decoded by m" in out                  # a warning: another model is trained
    # sft takes reference answers: the answer, end of turn, EOS up to --length
    truth = write_lines(tmp_path / "gt.jsonl", [dict(prompt="1+2", output="3"), dict(prompt="1+2", output="3" * 9)])
    traj, = read_trajs(folder, truth, "--method sft --length 5")
    assert tokenizer(folder).decode(traj.response) == "3<|eot_id|>" + 3 * "<|endoftext|>"
    assert traj.step.tolist() == [0] * 5
    with refused(f"{truth}:1: has no decoding_order", "--method sft"):
        read_trajs(folder, truth)


def test_unfinished_and_wrong_records_are_left_out_unless_all(folders, tmp_path, capsys, refused):
    folder, i = folders["llada"], ids_of("llada")
    left_out = "1 without an end token, 1 judged wrong, 1 shorter than 2 tokens"
    unfinished = good_record(id=1, response_token_ids=[3, i.mask, i.eos, i.mask], decoding_order=[1, -1, 0, -1])
    short = good_record(id=2, response="", response_token_ids=[i.eos], decoding_order=[0], entropy=[0.1])
    rows = [unfinished, good_record(correct=False), short]
    path = write_lines(tmp_path / "t.jsonl", rows)
    with refused(path, left_out, "--all"):
        read_trajs(folder, path)
    assert [traj.id for traj in read_trajs(folder, path, "--all")] == [1, 0]
    write_lines(tmp_path / "t.jsonl", [*rows, good_record(id=3, correct=True)])
    assert [traj.id for traj in read_trajs(folder, path)] == [3]
    assert f"{path}: 1 records, left out: {left_out}\n" in capsys.readouterr().out


def test_records_of_others_are_read_kindly(folders, tmp_path):
    rows = [good_record(), good_record(method="margin"),                     # two decoders answered one prompt
            {k: v for k, v in good_record().items() if k not in ("id", "model", "decode", "entropy", "confidence")},
            good_record(id=2, correct="yes", confidence="high", decode=[1], answer={"a": 1}, prompt=7, extra=None),
            good_record(id="x", model="Dream", response=["ab"])]
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(r).encode() for r in rows))
    trajs = read_trajs(folders["llada"], tmp_path / "t.jsonl")
    assert [t.id for t in trajs] == [0, 0, 2, 2, "x"] and all(t.step.tolist() == [1, 0, 0, -1] for t in trajs)


@pytest.mark.parametrize("fields, value, remedy", [
    (dict(decoding_order=[1, 0, 0]), "has 3 entries, the response 4 tokens", "decode.py"),
    (dict(decoding_order=[1, 0, 0, -2]), "holds -2", "decode.py"),
    (dict(decoding_order=[1, 0, 4, -1]), "holds 4", "decode.py"),
    (dict(decoding_order=None), "has no decoding_order", "decode.py"),
    (dict(decoding_order=[1, 0, 0, 1]), "decoded at step 1", "--model"),     # a mask where the order says decoded
    (dict(response_token_ids=[4, 5, 9, 3]), "position 3 holds token 3", "--model"),
    (dict(response_token_ids=[4, 5, 99, 3]), "holds 99", "--model"),
    (dict(prompt_token_ids=[1, "2"]), "holds '2'", "decode.py"),
    (dict(prompt_token_ids=[1] * 509), "509 + 4 tokens", "delete the line"),
    (dict(entropy=[0.5, 0.2, 0.1]), "entropy is [0.5, 0.2, 0.1]", "decode.py"),
    (dict(entropy=[0.5, 0.2, math.nan, None]), "entropy holds NaN", "decode.py"),
    (dict(model=dict(name="other", mask_id=7, vocab_size=10)), "decoded by other (mask 7, vocabulary 10)", "--model"),
    (dict(response="ba"), "its tokens read 'ab'", "--model"),                # another tokenizer
])
def test_an_unsound_record_is_one_line_with_value_and_remedy(fields, value, remedy, folders, tmp_path, refused):
    path = write_lines(tmp_path / "t.jsonl", [good_record(), good_record(id=1) | fields])
    with refused(f"{path}:2: ", value, remedy):
        read_trajs(folders["llada"], path, "--length 4")


def test_decoder_keeps_records_by_their_method(folders, tmp_path, capsys):
    path = write_lines(tmp_path / "t.jsonl", [good_record(id=n, method=m) for n, m in
                                              ((0, "entropy"), (0, "default"), (1, "credit"), (2, None))])
    trajs = read_trajs(folders["llada"], path, "--decoder entropy default")
    assert [traj.id for traj in trajs] == [0, 0]         # one prompt under two decoders
    assert "left out: 2 of another --decoder" in capsys.readouterr().out


def states_row(folder, text="a=7", **fields) -> dict:
    """A row as d3LLM publishes it: every state of a decoding, prompt included, here from right to left."""
    config, tok = models.read_config(folder), tokenizer(folder)
    prompt = tok("3+4", add_special_tokens=False)["input_ids"]
    response = tok(text, add_special_tokens=False)["input_ids"] + tok.end_ids[:1]
    states = [prompt + [config.mask_id] * (len(response) - n) + response[len(response) - n:]
              for n in range(1, len(response) + 1)]
    return dict(idx=5, question="3+4", prompt_ids=prompt, trajectory=states, final_output=states[-1],
                generated_text=text, llm_answer="7", gt_answer="7", is_correct=True, nfe=len(states)) | fields


@both
def test_d3llm_states_become_orders_and_answers_are_judged_anew(family, folders, tmp_path, capsys, monkeypatch,
                                                               refused):
    from pyarrow import Table, parquet
    folder = folders[family]
    empty = states_row(folder)
    empty["trajectory"].insert(0, empty["prompt_ids"] + [ids_of(family).mask] * 4)       # some begin with the canvas
    rows = [states_row(folder), states_row(folder, "a=8", idx=6), empty]                 # the second one is wrong
    parquet.write_table(Table.from_pylist(rows), tmp_path / "t.parquet")
    for path in (write_lines(tmp_path / "t.jsonl", rows), str(tmp_path / "t.parquet")):
        for traj in read_trajs(folder, path):
            assert (traj.id, traj.step.tolist(), traj.order.tolist()) == (5, [3, 2, 1, 0], [3, 2, 1, 0])
            assert traj.prompt.tolist() == rows[0]["prompt_ids"]
            assert [*traj.prompt, *traj.response] == rows[0]["final_output"]
        assert "2 records, left out: 1 judged wrong" in capsys.readouterr().out
    # by its name it streams, and --limit ends the stream
    import datasets
    read = []

    def stream(name, config, split, streaming):
        assert (name, streaming) == ("d3LLM/trajectory_data_dream_32", True)
        for row in rows:
            read.append(row["idx"])
            yield row
    monkeypatch.setattr(datasets, "load_dataset", stream)
    assert len(read_trajs(folder, "d3LLM/trajectory_data_dream_32", "--limit 1")) == 1 and len(read) <= 2
    # without a network
    def offline(*_, **__):
        raise ConnectionError
    monkeypatch.setattr(datasets, "load_dataset", offline)
    with refused("d3LLM/trajectory_data_dream_32", "ConnectionError", "check the network"):
        read_trajs(folder, "d3LLM/trajectory_data_dream_32")


@pytest.mark.parametrize("place, token, words", [((3, 4), 3, "position 1 holds"), ((3, 6), None, "position 3 holds"),
                                                 ((1, 0), 9, "state 1 is not the prompt")])
def test_inconsistent_states_are_refused_with_their_row(place, token, words, folders, tmp_path, refused):
    """A token that changes, a mask that comes back, another prompt."""
    bad = states_row(folders["llada"])
    bad["trajectory"].append(bad["trajectory"][-1].copy())
    n, i = place
    bad["trajectory"][n + 1 if n == 3 else n][i] = ids_of("llada").mask if token is None else token
    path = write_lines(tmp_path / "t.jsonl", [states_row(folders["llada"]), bad])
    with refused(f"{path}:2: ", words, "leave the row out"):
        read_trajs(folders["llada"], path)


def test_a_torn_line_in_the_middle_is_named(folders, tmp_path, refused):
    whole, path = json.dumps(good_record()), tmp_path / "t.jsonl"
    path.write_text(f"{whole}\n{whole[:90]}\n{whole}\n")
    with refused(f"{path}:2: is not JSON", "delete the line"):
        read_trajs(folders["llada"], path)


# -----------------------------------------------------------------------------
# data.py: the verifier

@pytest.mark.parametrize("text, answer, verdict", [
    ("first \\boxed{3}, no: \\boxed{4}", "4", True), ("\\boxed{3} as above #### 4", "3", True),    # the box comes first
    ("\\boxed{\\dfrac{3}{6}}", "\\frac12", True), ("\\boxed{\\frac12}", "\\frac{1}{3}", False),
    ("\\boxed{x^2+1}", "1+x^2", True), ("\\boxed{7", "7", True),     # never closed: the last number counts
    ("3 + 4 = 7\n#### 7", "7", True), ("#### 1,234", "1234", True), ("#### $18.00", "18", True),
    ("The answer is 3.5.", "3.5", True), ("The answer is 12.", "13", False),
    ("so we have 3 and then 42", "42", True), ("it costs -7 in the end", "-7", True), ("no number", "7", False),
    ("def f(x):\n    return x", None, True), ("```python\nx = 1\n```", None, True), ("def f(:", None, False),
    ("Sure:\n```python\ndef f(:\n```", None, False), ("", None, False),
    ("```javascript\nlet x\n```", None, None),           # nothing that we can parse
])
def test_verifier_finds_the_final_answer_and_parses_code(text, answer, verdict):
    kind = "code" if answer is None else "math"
    assert data.judge(text, True, answer, kind) is verdict
    assert data.judge(text, False, answer, kind) is False                    # unfinished is wrong whatever it says
    assert data.judge(text, True, None, None) is None                        # nothing to judge by


def test_what_a_model_wrote_is_never_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = "__import__('os').system('touch x')"
    for text in (evil, f"\\boxed{{{evil}}}", f"#### {evil}", f"the answer is {evil}", f"```python\n{evil}\n```"):
        for answer, kind in (("1", None), (evil, None), ("x^2", None), (None, "code")):
            data.judge(text, True, answer, kind)
    assert not list(tmp_path.iterdir())


def test_no_source_file_of_ours_reads_pickles_or_runs_text():
    for file in set(HERE.glob("*.py")) - set(HERE.glob("test_*.py")):
        for word in ("import pickle", "torch.load(", "torch.save(", "trust_remote_code=True", "exec(", " eval(",
                     "os.system", "shell=True"):
            assert word not in file.read_text(), f"{file.name} has {word}"


# -----------------------------------------------------------------------------
# decode.py: against the native decoders

def settings(folder: str, flags: str = "", **more) -> decode.Settings:
    args = decode.parse_args(["--model", folder, "--prompts", "none", *flags.split()])
    s = decode.make_settings(args, models.read_config(folder), tokenizer(folder).end_ids)
    return dataclasses.replace(s, **more)


def run(net, prompts, s, batch_size: int = 3) -> list[decode.Row]:
    """The finished rows in the order of the prompts, whose ids are their numbers."""
    return sorted(decode.decode(net, list(enumerate(prompts)), s, batch_size), key=lambda row: row.id)


def prompts_of(family: str) -> list[list[int]]:
    return ragged(family, (9, 4, 15, 6, 11), seed=3)[2]


def native_llada(net, prompt, mask_id, length, steps, block):
    """LLaDA's published loop at temperature 0, one prompt. The mask token is never a candidate."""
    canvas, order, step = [mask_id] * length, [-1] * length, 0
    per_block = steps // (length // block)
    for start in range(0, length, block):
        for i in range(per_block):
            logits = plain_logits(net, prompt, canvas)                       # (N, V)
            p = logits.softmax(-1)
            logits[:, mask_id] = -math.inf
            token = logits.argmax(-1).tolist()
            left = [j for j in range(start, start + block) if order[j] < 0]
            left.sort(key=lambda j: -float(p[j, token[j]]))
            for j in left[:block // per_block + (i < block % per_block)]:
                canvas[j], order[j] = token[j], step
            step += 1
    return canvas, order


def native_dream(net, prompt, mask_id, length, steps, top_p):
    """Dream's published loop at temperature 0, by entropy, one prompt. Ties: raw entropy, then position."""
    canvas, order = [mask_id] * length, [-1] * length
    t = torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        logits = plain_logits(net, prompt, canvas)
        left, score = [j for j in range(length) if order[j] < 0], {}
        for j in left:
            p = logits[j].softmax(-1).sort(descending=True).values
            kept = p[p.cumsum(0) - p <= top_p]           # the nucleus, with the token that crosses top_p
            score[j] = (plain_entropy((kept / kept.sum()).tolist()), plain_entropy(p.tolist()), j)
        count = int(len(left) * (1 - t[i + 1] / t[i])) if i < steps - 1 else len(left)
        logits[:, mask_id] = -math.inf
        for j in sorted(left, key=score.get)[:count]:
            canvas[j], order[j] = int(logits[j].argmax()), i
    return canvas, order


NATIVE = {"llada": native_llada, "Dream": native_dream}


def greedy(**flags) -> str:
    return "--temperature 0 " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())


@pytest.mark.parametrize("family, flags", [
    ("llada", dict(length=24, steps=24, block=24)), ("llada", dict(length=24, steps=10, block=12)),
    ("llada", dict(length=20, steps=20, block=4)), ("Dream", dict(length=20, steps=20, top_p=1.0)),
    ("Dream", dict(length=24, steps=10, top_p=1.0)), ("Dream", dict(length=20, steps=20, top_p=0.5))])
def test_tokens_and_steps_equal_the_native_decoders(family, flags, folders, nets):
    s = settings(folders[family], greedy(**flags), end_ids=[])
    want = [NATIVE[family](nets[family], prompt, s.mask_id, **flags) for prompt in prompts_of(family)]
    for batch_size in (1, 3):                            # alone; in ragged batches that later prompts join
        rows = run(nets[family], prompts_of(family), s, batch_size)
        assert [(row.canvas.tolist(), row.step.tolist()) for row in rows] == want


@both
def test_stopping_at_eos_keeps_the_native_text(family, folders, nets):
    flags = dict(length=24, steps=24) | (dict(block=8) if family == "llada" else dict(top_p=1.0))
    prompts, mask, stopped = prompts_of(family), ids_of(family).mask, 0
    for prompt in prompts:
        tokens, order = NATIVE[family](nets[family], prompt, mask, **flags)
        end = tokens.index(tokens[9])                    # what the native decoder says in mid-answer becomes the EOS
        s = settings(folders[family], greedy(**flags), end_ids=[tokens[9]])
        row = run(nets[family], [prompt, *prompts], s)[0]
        decoded = row.step >= 0
        assert decoded[:end + 1].all() and row.canvas.tolist() == np.where(decoded, tokens, mask).tolist()
        assert row.step.tolist() == np.where(decoded, order, -1).tolist()
        assert row.steps_done == max(order[:end + 1]) + 1        # not one forward more than the text needs
        stopped += not decoded.all()
    assert stopped


# -----------------------------------------------------------------------------
# decode.py: scores, schedules, draws

class Table(torch.nn.Module):
    """A model whose logits depend on the response position alone: every order can be worked out by hand."""
    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table.float(), requires_grad=False)

    def forward(self, ids, attend, pos):
        return self.table[pos - (ids.shape[1] - len(self.table))]


def random_table(family="llada", n: int = 12):
    scale = torch.linspace(1, 5, n)[torch.randperm(n, generator=torch.Generator().manual_seed(1))]
    z = torch.randn(n, ids_of(family).vocab, generator=torch.Generator().manual_seed(5)) * scale[:, None]
    z[:, ids_of(family).mask] = -9.0
    return z


def by_hand(table, score: str) -> list[float]:
    """One value per position; the lowest goes first."""
    values = []
    for p in table.double().softmax(-1):
        first, second = p.topk(2).values.tolist()
        values.append(dict(entropy=plain_entropy(p.tolist()), confidence=-first, margin=second - first)[score])
    return values


@both
@pytest.mark.parametrize("score", ["entropy", "confidence", "margin"])
def test_each_score_orders_as_by_hand(family, score, folders):
    table, want = random_table(family), [0] * 12
    value = by_hand(table, score)
    for block, k in ((12, 1), (12, 5), (4, 1), (6, 4)):
        top_p = 0.5 if family == "llada" else 1          # LLaDA scores the clean distribution, whatever it draws from
        flags = greedy(length=12, schedule="even", top_p=top_p, score=score, block=block, tokens_per_step=k)
        row = run(Table(table), [[1, 2, 3]], settings(folders[family], flags, end_ids=[]))[0]
        for start in range(0, 12, block):
            for n, j in enumerate(sorted(range(start, start + block), key=value.__getitem__)):
                want[j] = start // block * math.ceil(block / k) + n // k
        assert row.step.tolist() == want and row.canvas.tolist() == table.argmax(-1).tolist()


@pytest.mark.parametrize("score", ["confidence", "entropy", "margin"])
def test_threshold_unmasks_all_that_are_sure_and_else_the_best_one(score, folders):
    table = random_table()
    p, value = table.softmax(-1).amax(-1).tolist(), by_hand(table, score)
    threshold = sorted(p)[8] - 1e-4                      # four of twelve are above it
    rest = sorted((j for j in range(12) if p[j] <= threshold), key=value.__getitem__)
    s = settings(folders["llada"], f"--length 12 --score {score} --threshold {threshold}", end_ids=[])
    want = [0 if p[j] > threshold else 1 + rest.index(j) for j in range(12)]
    assert run(Table(table), [[1, 2]], s)[0].step.tolist() == want and len(rest) == 8


@pytest.mark.parametrize("mode, which", [("logits", 0), ("confidence", 0), ("confidence", 1)])
def test_suppressed_eos_is_never_chosen_or_comes_last(mode, which, folders):
    """LLaDA's two rules. The last position ends the text, by EOS or end of turn, and is the most certain of all."""
    ends, z, flags = [ids_of("llada").eos, ids_of("llada").eot], random_table(), greedy(length=12, score="confidence")
    z[11, ends[which]] = 40.0
    assert run(Table(z), [[1]], settings(folders["llada"], flags))[0].step[11] == 0
    row = run(Table(z), [[1]], settings(folders["llada"], f"{flags} --suppress-eos {mode}"))[0]
    rest = z.clone()
    rest[:, ends[:1] if mode == "logits" else ends] = -math.inf
    assert row.canvas.tolist() == (rest if mode == "logits" else z).argmax(-1).tolist()
    value = by_hand(rest, "confidence")
    if mode == "confidence":
        value[11] = 0.0                                  # what is chosen there has no share left
    assert np.argsort(row.step).tolist() == np.argsort(value).tolist()


@both
@pytest.mark.parametrize("flags", ["--temperature 0", "--temperature 1 --top-p 0.5", "--temperature 1 --top-k 1"])
def test_mask_token_is_never_chosen(family, flags, folders):
    """Not even where it is the whole nucleus: the next best token is chosen, not whatever has index 0."""
    z = torch.full((6, ids_of(family).vocab), -30.0)
    z[:, ids_of(family).mask], z[:, 7] = 20.0, 10.0
    assert (run(Table(z), [[1]], settings(folders[family], "--length 6 " + flags))[0].canvas == 7).all()


def test_nucleus_of_a_large_vocabulary_equals_sorting_it_all(folders):
    s, rng = settings(folders["llada"], "--temperature 0.5 --top-p 0.9"), np.random.default_rng(0)
    for scale in (20, 5, 0.1):                           # all, some and none of the nuclei are in the first 64 tokens
        z = torch.from_numpy(scale * rng.normal(size=(5, 300)))
        for row, got in zip(z / 0.5, decode.filter_logits(z, s), strict=True):
            p, index = row.softmax(0).sort(descending=True)
            want = torch.full_like(row, -math.inf)
            kept = index[p.cumsum(0) - p <= 0.9]
            want[kept] = row[kept]
            assert torch.equal(got, want)


@pytest.mark.parametrize("flags, kept", [
    ("--score entropy --tokens-per-step 2", 6), ("--score margin --tokens-per-step 2 --top-p 0.8", 3),
    ("--score random --tokens-per-step 2 --top-p 0.8 --top-k 2", 2), ("--score confidence --steps 1 --top-k 4", 4)])
def test_every_step_draws_anew_by_temperature_then_top_p_then_top_k(flags, kept, folders):
    """1200 positions with the same logits: the tokens' shares against the distribution worked out by hand."""
    N, logits = 1200, [2.0, 1.5, 1.0, 0.5, 0.0, -3.0]
    z = torch.full((N, ids_of("llada").vocab), -math.inf)
    z[:, :6] = torch.tensor(logits)
    row = run(Table(z), [[1]], settings(folders["llada"], f"--length {N} --temperature 0.7 {flags}", end_ids=[]))[0]
    weight = [math.exp(x / 0.7) for x in logits[:kept]] + [0.0] * (6 - kept)         # the third token crosses 0.8
    early, late = np.split(np.argsort(row.step, kind="stable"), 2)
    for half in (early, late):
        for v in range(6):
            p = weight[v] / sum(weight)
            assert abs((row.canvas[half] == v).mean() - p) <= 4.5 * math.sqrt(p * (1 - p) / (N / 2))


@both
@pytest.mark.parametrize("flags", [
    "--score confidence --temperature 0.8 --top-p 0.9 --top-k 20", "--score random --temperature 1",
    "--score entropy --temperature 0.5 --tokens-per-step 3", "--score margin --temperature 1 --threshold 0.5"])
def test_draws_depend_on_the_seed_and_not_on_the_batch(family, flags, folders, nets):
    s, prompts = settings(folders[family], "--length 16 " + flags), prompts_of(family)
    alone = [next(decode.decode(nets[family], [(n, prompt)], s, 4)) for n, prompt in enumerate(prompts)]
    for row, want in zip(run(nets[family], prompts, s, 2), alone, strict=True):
        assert (row.canvas == want.canvas).all() and (row.step == want.step).all()
        assert np.abs(row.entropy - want.entropy).max() < 1e-4
    other = run(nets[family], prompts, dataclasses.replace(s, seed=1), 2)
    assert any((row.canvas != want.canvas).any() for row, want in zip(other, alone, strict=True))


# -----------------------------------------------------------------------------
# decode.py: the command line

TASKS = [dict(id=f"t{n}", prompt=p, answer=a) for n, (p, a) in enumerate(
    [("1+2", "3"), ("what is 12*12 = ", 144), ("a", "b"), ("12 - 7 and then some more", "5"), ("b c d", "e")])]


@pytest.fixture
def cli(command, folders, tmp_path):
    """cli("t.jsonl", "--length 8"): decode.py's main in this process on prompts.jsonl; returns {id: record}."""
    prompts = write_lines(tmp_path / "prompts.jsonl", TASKS)

    def call(out, flags="", family="llada"):
        command(decode, f"--model {folders[family]} --prompts {prompts} --out {tmp_path / out} {flags}")
        return {row["id"]: row for row in read_lines(tmp_path / out)}
    return call


@both
@pytest.mark.parametrize("flags", ["--temperature 0", "--tokens-per-step 3", "--temperature 1 --score random"])
def test_records_replay(family, flags, cli, folders, nets):
    """From all masks, the record's steps lead to its tokens, and the model at each state gives what was logged."""
    tok, i = tokenizer(folders[family]), ids_of(family)
    records = cli("t.jsonl", "--length 16 " + flags, family)
    for task in TASKS:
        r = records.pop(task["id"])
        assert r["prompt"] == task["prompt"] and r["answer"] == str(task["answer"])
        own = {"llada": "default", "Dream": "entropy"}[family]               # as the authors' loader knows LLaDA's own
        assert r["method"] == ("random" if "random" in flags else own)
        assert tok.decode(r["prompt_token_ids"]) == f"[user]{task['prompt']}[assistant]"
        assert r["model"] == dict(name=folders[family], mask_id=i.mask, vocab_size=i.vocab, end_ids=[i.eos, i.eot])
        step, final, canvas = np.array(r["decoding_order"]), r["response_token_ids"], [i.mask] * 16
        for now in range(step.max() + 1):
            logits = plain_logits(nets[family], r["prompt_token_ids"], canvas)
            p = logits.softmax(-1)
            logits[:, i.mask] = -math.inf
            for j in np.flatnonzero(step == now):
                assert abs(r["entropy"][j] - plain_entropy(p[j].tolist())) < 1e-4
                assert abs(r["confidence"][j] - float(p[j, final[j]])) < 1e-4
                assert r["decode"]["temperature"] > 0 or final[j] == logits[j].argmax()
                canvas[j] = final[j]
        assert canvas == final and [h is None for h in r["entropy"]] == (step < 0).tolist()
        end = next((j for j in range(16) if final[j] in (i.eos, i.eot) and (step[:j + 1] >= 0).all()), 16)
        assert r["response"] == tok.decode([t for t in final[:end] if t != i.mask], skip_special_tokens=True)
    assert not records


def test_a_file_that_a_kill_cut_at_any_byte_continues_to_the_same_lines(cli, tmp_path):
    write_lines(tmp_path / "prompts.jsonl", [dict(id="u", prompt="1 {\u00e9} 2"), *TASKS])
    flags, path = "--length 12 --temperature 0.7 --batch-size 2", tmp_path / "t.jsonl"
    records = cli("t.jsonl", flags)
    head = {name: records["u"][name] for name in ("model", "decode")}
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for cut in range(len(lines[0]) + 300):               # all of the first line, and into the second
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        assert decode.read_done(str(path), head, []) == set(list(records)[:whole])
        assert path.read_bytes() == b"".join(lines[:whole])
    for cut in (50, len(lines[0]), len(content) - 300, len(content) - 1, len(content)):
        path.write_bytes(content[:cut])
        cli("t.jsonl", flags)
        assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.parametrize("flags, words", [
    ("--model {other}", "name"), ("--seed 1", "seed 0, now it is 1"), ("--adapter {other}", "adapter None"),
    ("", "has another prompt")])
def test_a_file_of_another_run_or_of_something_else_is_refused_untouched(flags, words, cli, folders, tmp_path, refused):
    """Another model, other settings, another prompt under the same id; whether or not the last line is whole."""
    cli("t.jsonl", "--length 12 --limit 2")
    path, before = tmp_path / "t.jsonl", (tmp_path / "t.jsonl").read_bytes()
    other = shutil.copytree(folders["llada"], tmp_path / "other")
    write_lines(tmp_path / "prompts.jsonl", [task | dict(prompt="z" * 9) for task in TASKS])
    nothing = "holds no trajectories"
    for content, why in ((before, words), (before[:-40], words), (b"id,prompt\n1,a\n", nothing), (b"hello", nothing)):
        path.write_bytes(content)
        with refused(path, why, "give another --out"):
            cli("t.jsonl", "--length 12 " + flags.format(other=other))
        assert path.read_bytes() == content


def test_two_ranks_write_the_records_of_one(cli, tmp_path):
    flags = "--length 12 --temperature 0.7"
    whole = cli("one.jsonl", flags)
    lines = (tmp_path / "one.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "two.jsonl").write_text(lines[2] + lines[4][:30])            # they continue a file that was cut
    run_ranks(2, lambda: cli("two.jsonl", flags + " --batch-size 1"))
    for r in read_lines(tmp_path / "two.jsonl"):
        want = whole.pop(r["id"])
        for name in ("entropy", "confidence"):           # a batch of another shape rounds differently
            assert r.pop(name) == pytest.approx(want.pop(name), abs=1e-4)
        assert r == want
    assert not whole


@pytest.mark.parametrize("flags, words", [
    ("--length 10 --block 3", "--length 10, --block 3"), ("--length 8 --steps 9", "--steps 9"),
    ("--length 8 --steps 4 --tokens-per-step 2", "give one"), ("--schedule dream --block 8", "--schedule dream"),
    ("--length 600", "positions"), ("--adapter nowhere", "nowhere/adapter_config.json")])
def test_wrong_settings_end_with_one_line(flags, words, cli, tmp_path, refused):
    with refused(words):
        cli("t.jsonl", flags)
    assert not (tmp_path / "t.jsonl").exists()


def test_adapter_and_merged_model_decode_alike(cli, folders, tmp_path):
    adapter, merged = str(tmp_path / "adapter"), str(tmp_path / "merged")
    lora.save(adapted(folders["llada"]), adapter, folders["llada"])
    lora.merge_checkpoint(folders["llada"], adapter, merged)
    runs = [cli("a.jsonl", f"--length 12 --adapter {adapter}"), cli("b.jsonl", f"--length 12 --model {merged}"),
            cli("c.jsonl", "--length 12")]
    a, b, base = [{id: (r["response_token_ids"], r["decoding_order"]) for id, r in x.items()} for x in runs]
    assert a == b != base


# -----------------------------------------------------------------------------
# tabom.py: the objective

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


def views_of(trajs, args, seed=0) -> list[tuple]:
    return [(t, *tabom.sample_view(t, args, np.random.default_rng([seed, n]))) for n, t in enumerate(trajs)]


def losses(net, views, args):
    return tabom.compute_loss(net, views, args, "cpu")


@pytest.fixture
def float64(monkeypatch):
    """Where the product code asks for float32 it gets float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


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


def plain_parts(net, base, traj, seen, targets, args) -> dict[str, float]:
    """The losses as their equations are printed: one sample, one token, one pair at a time."""
    x, rows, W = traj.response.tolist(), state_logits(net, traj, seen), len(targets)
    each = [plain_stats(rows[j], x[j])[0] for j in targets]
    ce = sum(each) / W
    if args.method == "t3d":
        ref, good, bad, path = state_logits(base, traj, seen), 0.0, 0.0, 0.0
        for s, j in enumerate(targets, 1):
            choice = max(range(len(ref[j])), key=lambda v: ref[j][v])
            good += (plain_stats(ref[j], x[j])[0] - each[s - 1]) / W
            bad += (plain_stats(ref[j], choice)[0] - plain_stats(rows[j], choice)[0]) / W
            path += sum(each[:s]) / s / W
        log_sigmoid = lambda v: -math.log(1 + math.exp(-v))
        return dict(loss=-log_sigmoid(0.1 * good) - 0.5 * log_sigmoid(-0.1 * bad) + 0.2 * path, ce=ce)
    if args.method != "tabom" or args.lam == 0:
        return dict(loss=ce, ce=ce)
    h = []
    for j in targets:                                    # exact: each token in the state just before its own step
        own = rows if args.rank_context == "start" else state_logits(net, traj, replayed(traj, traj.step[j]))
        h.append(plain_stats(own[j], x[j])[1])
    pairs = [(h[r], h[s]) for r in range(W) for s in range(r + 1, W)]
    rank = sum(max(0, early - late + args.gamma) for early, late in pairs) / len(pairs)
    return dict(loss=ce + args.lam * rank, ce=ce, rank=rank, in_order=sum(a < b for a, b in pairs) / len(pairs))


@both
@pytest.mark.parametrize("tail", ["keep", "drop"])
@pytest.mark.parametrize("flags", METHODS)
def test_loss_and_its_logged_parts_equal_plain_loops(family, flags, tail, float64, folders, tmp_path):
    args, folder, first = training_args(flags), folders[family], 0
    net, base = adapted(folder).double(), load(folder).double()
    views = views_of(read_shapes(folder, tmp_path, f"--tail {tail}") * 3, args)
    loss, parts = losses(net, views, args)
    for n, view in enumerate(views):
        want = plain_parts(net, base, *view, args)
        got = {name: value[n].item() for name, value in {"loss": loss, **parts}.items()}
        assert got.pop("in_order", 0) == pytest.approx(want.pop("in_order", 0), rel=1e-6)        # counts, in fp32
        assert got == pytest.approx(want, rel=1e-9)
        first += not view[1].any()
    assert 0 < first < len(views)                        # windows at the start of a trajectory, and later ones


@pytest.mark.parametrize("flags", METHODS)
def test_gradient_through_the_model_equals_a_finite_difference(flags, float64, folders, tmp_path):
    args, net, g = training_args(flags), adapted(folders["llada"]).double(), torch.Generator().manual_seed(0)
    views = views_of(read_shapes(folders["llada"], tmp_path, ""), args)
    params = lora.parameters(net).values()
    params = [(p, p.detach().clone(), torch.randn(p.shape, generator=g).double()) for p in params]

    def loss_at(eps):
        for p, start, direction in params:
            p.data = start + eps * direction
        return losses(net, views, args)[0].sum()
    loss_at(0).backward()
    slope = sum((p.grad * direction).sum().item() for p, _, direction in params)
    assert slope == pytest.approx((loss_at(1e-6).item() - loss_at(-1e-6).item()) / 2e-6, rel=1e-5)


# -----------------------------------------------------------------------------
# tabom.py: what the model sees

def plain_cuts(traj, need) -> list[int]:
    """The steps that leave at least `need` targets."""
    steps = [int(traj.step[j]) for j in traj.order]
    return sorted({u for u in steps if sum(s >= u for s in steps) >= min(need, len(steps))})


@pytest.mark.parametrize("tail", ["keep", "drop"])
@pytest.mark.parametrize("method, window, need", [
    ("tabom", 4, 4), ("tabom", 32, 32), ("tabom", 0, 2), ("t3d", 4, 1), ("dinfer", 4, 1), ("sft", 4, 1)])
def test_view_is_a_state_of_the_replay_and_the_next_tokens_in_order(method, window, need, tail, folders, tmp_path):
    args, eos = training_args(f"--method {method} --window {window}"), ids_of("llada").eos
    for traj in read_shapes(folders["llada"], tmp_path, f"--tail {tail}"):
        last = traj.response.tolist().index(eos) if tail == "drop" else len(traj.step)
        decoded = [j for j in range(len(traj.step)) if traj.step[j] >= 0]
        order = sorted((traj.step[j], traj.entropy[j], j) for j in decoded if j <= last)
        for seed in range(20):
            seen, targets = tabom.sample_view(traj, args, np.random.default_rng(seed))
            left, first = [j for _, _, j in order if not seen[j]], traj.step[targets[0]]
            if method == "sft":                          # any of the decoded tokens
                assert set(np.flatnonzero(seen)) <= set(decoded)
            else:
                assert first in plain_cuts(traj, need) and seen.tolist() == replayed(traj, first)
            if method == "dinfer":                       # whole steps
                left = [j for j in left if traj.step[j] <= traj.step[targets[-1]]]
            assert targets.tolist() == (left[:window] if method == "tabom" and window else left)


def test_cuts_are_uniform_over_the_boundaries(folders, tmp_path):
    draws, args, rng = 1500, training_args(), np.random.default_rng(0)
    for traj in read_shapes(folders["llada"], tmp_path, "")[:3]:
        for args.method, args.window, need in (("tabom", 4, 4), ("tabom", 0, 2), ("t3d", 4, 1), ("dinfer", 4, 0)):
            counts = dict.fromkeys(plain_cuts(traj, need), 0)
            if args.method == "dinfer":                  # any two times
                counts = {(i, j): 0 for j in range(max(traj.step) + 2) for i in range(j)}
            for _ in range(draws):
                steps = traj.step[tabom.sample_view(traj, args, rng)[1]]
                counts[(steps[0], steps[-1] + 1) if args.method == "dinfer" else steps[0]] += 1
            k = len(counts)                              # chi-square: mean k - 1, deviation sqrt(2 (k - 1))
            chi = sum((n - draws / k) ** 2 / (draws / k) for n in counts.values())
            assert chi < k - 1 + 5 * math.sqrt(2 * (k - 1)) + 1e-9, (args.method, counts)


def test_non_ltr_cuts_start_at_tokens_decoded_out_of_order(folders, tmp_path):
    def plain_jumps(step):
        late = [math.inf if s < 0 else s for s in step]
        return [p for p in range(len(step)) if step[p] >= 0 and any(late[q] > late[p] for q in range(p))]

    args, rng, W = training_args("--cut non-ltr --window 4"), np.random.default_rng(0), 4
    trajs = read_shapes(folders["llada"], tmp_path, "")
    for traj in trajs:
        jumps = plain_jumps(traj.step.tolist())
        assert traj.jumps.tolist() == jumps
        boundaries = set(plain_cuts(traj, W))
        want = {traj.step[p] for p in jumps} & boundaries or boundaries
        assert {traj.step[tabom.sample_view(traj, args, rng)[1][0]] for _ in range(400)} == want
    assert any(len(traj.jumps) for traj in trajs)
    # a record may say itself which positions these are
    given = [good_record(non_ltr_positions=[1]), good_record(id=1, non_ltr_positions=[])]
    a, b = read_trajs(folders["llada"], write_lines(tmp_path / "n.jsonl", given))
    assert a.jumps.tolist() == [1] and b.jumps.tolist() == []


@pytest.mark.parametrize("flags", METHODS)
def test_no_token_of_the_future_reaches_the_model(flags, folders, tmp_path):
    """Another token where the view is masked leaves all that the model is fed as it was; targets are masked."""
    args, mask_id, net, fed = training_args(flags), ids_of("llada").mask, load(folders["llada"]), []
    net.register_forward_pre_hook(lambda _, inputs: fed.append(inputs))
    for traj, seen, targets in views_of(read_shapes(folders["llada"], tmp_path, ""), args):
        def states(response):
            traj.response = response
            fed.clear()
            losses(net, [(traj, seen, targets)], args)
            assert all((ids.gather(1, pos) == mask_id).all() for ids, _, pos in fed)
            return [ids[0].tolist() for ids, _, _ in fed]
        N, x = len(traj.response), traj.response
        now = states(x)
        shown = [[t != mask_id for t in state[-N:]] for state in now]
        assert shown[0] == seen.tolist()
        if args.rank_context == "exact":                 # then one state per step of the window
            assert shown[1:] == [replayed(traj, s) for s in sorted(set(traj.step[targets]))]
        for j in range(N):
            other = np.where(np.arange(N) == j, (x + 1) % len(CHARS), x)
            assert (states(other) != now) == any(state[j] for state in shown)


# -----------------------------------------------------------------------------
# tabom.py: the command

QUICK = "--window 4 --lora-r 4 --lr 1e-3 --warmup 5 --seed 3"


def corpus(folder, count=21) -> list[dict]:
    """Finished trajectories of many lengths."""
    rng, rows = np.random.default_rng(count), []
    for n in range(count):
        N = int(rng.integers(6, 14))
        rows.append(trajectory(f"r{n}", folder, N, 1 + n % 3, int(rng.integers(2, N)), int(rng.integers(2, 9))))
    return rows


@pytest.fixture
def train(command, folders, tmp_path):
    """train("run", "--lam 0"): tabom.py's main in this process on a small corpus; returns the --out folder."""
    def call(out="run", flags="", source=None):
        command(tabom, f"--data {source or call.data} --out {tmp_path / out} {QUICK} {flags}")
        return tmp_path / out
    call.data = write_lines(tmp_path / "corpus.jsonl", corpus(folders["llada"]))
    return call


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
        for key in s.keys() & {"loss", "ce", "rank", "in_order", "gnorm"}:
            assert r[key] == pytest.approx(s[key], rel=2e-4, abs=1e-5), key


def test_run_leaves_adapters_log_and_resume_file(train, folders, capsys):
    out = train("run", "--epochs 2 --log-every 3")       # 21 records, 4 per step: 6 steps per epoch
    shown, (head, rows) = capsys.readouterr().out, log_of(out)
    assert sorted(p.name for p in out.iterdir()) == ["epoch-1", "epoch-2", "log.jsonl", "resume.safetensors"]
    assert head["settings"]["model"] == folders["llada"] and head["settings"]["records"] == 21 and head["steps"] == 12
    assert head["args"]["gamma"] == 0.2 and {"commit", "torch", "python", "device"} <= head.keys()
    assert "1,024 trainable parameters, 12 steps of 4 samples" in shown and f"{out}/epoch-2" in shown
    assert [x.split()[1] for x in shown.splitlines() if x.startswith("step ")] == ["3/12", "6/12", "9/12", "12/12"]
    for epoch in (1, 2):
        seen = [sample for row in rows if row["epoch"] == epoch for sample in row["samples"]]
        assert sorted(seen) == sorted(f"r{n}" for n in range(21))
    for n, row in enumerate(rows):
        assert row["loss"] == pytest.approx(row["ce"] + row["rank"], rel=1e-5) and row["tokens_per_s"] > 0
        assert row["lr"] == pytest.approx(1e-3 * (n + 1) / 5 if n < 5 else 5e-4 * (1 + math.cos(math.pi * (n - 5) / 7)))


@pytest.mark.parametrize("flags", METHODS)
def test_training_equals_a_plain_loop(flags, train, folders):
    """One sample at a time, AdamW written out, a window per (seed, epoch, place in the file): the adapter of main."""
    flags = f"{QUICK} --epochs 3 --batch-size 12 --clip 0.5 --weight-decay 0.1 {flags}"  # 2 steps per epoch, 6 in all
    out, args, net = train("run", flags), training_args(flags), load(folders["llada"])
    params = lora.add(net, QV, 4, 16, seed=3)
    moments = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in params.values()]
    trajs = read_trajs(folders["llada"], train.data)
    for t, row in enumerate(log_of(out)[1], 1):
        net.zero_grad()
        for n in [int(id[1:]) for id in row["samples"]]:
            view = tabom.sample_view(trajs[n], args, np.random.default_rng([3, row["epoch"] - 1, n]))
            (losses(net, [(trajs[n], *view)], args)[0].sum() / len(row["samples"])).backward()
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in params.values()))
        assert row["gnorm"] == pytest.approx(norm, rel=1e-3)
        lr = 1e-3 * t / 5 if t <= 5 else 1e-3            # five steps of warm-up, and the first of the cosine
        for p, m, v in moments:
            g = p.grad * min(1, 0.5 / norm)
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            p.data -= lr * 0.1 * p.data
            p.data -= lr * (m / (1 - 0.9 ** t)) / ((v / (1 - 0.999 ** t)).sqrt() + 1e-8)
    got = load_file(out / "epoch-3" / "adapter_model.safetensors")
    assert got.keys() == params.keys() and max((got[k] - params[k]).abs().max() for k in got) < 1e-5


@pytest.mark.parametrize("flags", ["", "--rank-context exact", "--method t3d"])
def test_accumulation_and_checkpointing_change_nothing(flags, train, monkeypatch):
    calls, checkpoint = [], models.checkpoint
    monkeypatch.setattr(models, "checkpoint", lambda *x, **more: calls.append(x) or checkpoint(*x, **more))
    one = train("one", f"{flags} --max-steps 4 --batch-size 8")
    assert not calls
    assert_close_runs(one, train("many", f"{flags} --max-steps 4 --batch-size 2 --grad-accum 4 --grad-checkpoint"))
    assert calls


def test_wandb_gets_what_the_log_gets_and_is_asked_for_in_one_line(train, monkeypatch, refused, tmp_path):
    with refused("--wandb p", "pip install wandb"):
        training_args("--wandb p")
    fake = "got = []\ninit = lambda **k: got.append(k)\nlog = lambda row, step: got.append(row)"
    (tmp_path / "wandb.py").write_text(fake)
    monkeypatch.syspath_prepend(tmp_path)
    out = train("run", "--wandb p --max-steps 3")
    got = sys.modules.pop("wandb").got
    assert got[0]["project"] == "p" and got[1:] == log_of(out)[1]


def test_bf16_base_trains_an_fp32_adapter(train):
    fine, coarse = train("fine", "--max-steps 2"), train("coarse", "--max-steps 2 --dtype bf16")
    assert all(x.dtype == torch.float32 for x in tensors_of(coarse).values())
    assert log_of(coarse)[1][0]["loss"] == pytest.approx(log_of(fine)[1][0]["loss"], rel=0.05)


def test_the_model_is_the_one_the_trajectories_name_unless_given(train, folders, tmp_path, refused):
    other = shutil.copytree(folders["llada"], tmp_path / "other")
    assert log_of(train("a", "--max-steps 1"))[0]["settings"]["model"] == folders["llada"]
    assert log_of(train("b", f"--max-steps 1 --model {other}"))[0]["settings"]["model"] == str(other)
    nameless = write_lines(tmp_path / "nameless.jsonl", [row | dict(model=None) for row in corpus(folders["llada"])])
    with refused(f"{nameless}: names no model", "--model"):
        train("c", "", nameless)


def test_non_finite_gradient_stops_with_step_and_samples_and_keeps_the_last_good_state(train, tmp_path, refused):
    with refused("step 2: the gradient is not finite", "samples ['r"):       # the first step makes the weights huge
        train("run", "--lr 1e30 --warmup 0 --save-every 1")
    assert len(log_of(tmp_path / "run")[1]) == 1
    assert all(x.isfinite().all() for x in load_file(tmp_path / "run" / "resume.safetensors").values())


def test_out_of_memory_ends_with_the_flags_that_help(train, monkeypatch, tmp_path):
    def too_much(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(models.Model, "forward", too_much)
    monkeypatch.setattr(sys, "argv", f"tabom.py --data {train.data} --out {tmp_path / 'run'}".split())
    with pytest.raises(torch.OutOfMemoryError) as e:
        runpy.run_path(str(HERE / "tabom.py"), run_name="__main__")
    assert "--batch-size" in e.value.__notes__[0] and "--grad-checkpoint" in e.value.__notes__[0]


@pytest.fixture
def pretended_gpu(monkeypatch):
    """
    Tensors say that they are on a GPU and hold no data; torch raises where they meet one of the CPU. What a script
    reads back is made up, and must have been moved to the CPU.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    def load_model(config, device, dtype):
        torch.set_default_dtype(dtype)
        with torch.device(device):
            net = models.Model(config)
        torch.set_default_dtype(torch.float32)
        return net

    def read(x):
        assert x.device.type == "cpu"
        return np.zeros(x.shape)

    class Generator:                                     # a GPU's cannot be made without one
        def __init__(self, device="cpu"):
            pass

        def manual_seed(self, seed):
            return None

    def to_bytes(tensors, metadata):
        assert {x.device.type for x in tensors.values()} == {"cpu"}
        return b""

    for module in (tabom, decode):
        monkeypatch.setattr(module, "setup_device", lambda dtype: (0, 1, "meta", torch.bfloat16))
        monkeypatch.setattr(module, "load_model", load_model)
    for module in (tabom, lora):
        monkeypatch.setattr(module, "to_bytes", to_bytes)
    monkeypatch.setattr(tabom, "peak_memory", lambda device: 0.0)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.Tensor, "numpy", read)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: np.zeros(x.shape).tolist())
    monkeypatch.setattr(torch.Tensor, "item", lambda x: 1.0)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@pytest.mark.parametrize("flags", ["", "--grad-accum 2", "--method sft", "--method dinfer", "--method t3d",
                                   "--rank-context exact --grad-checkpoint"])
def test_training_leaves_no_tensor_on_the_cpu(flags, train, pretended_gpu):
    assert len(log_of(train("run", f"--max-steps 2 {flags}"))[1]) == 2


@pytest.mark.parametrize("family, flags", [
    ("llada", "--score confidence --suppress-eos confidence"),
    ("Dream", "--score entropy --temperature 1 --top-p 0.9 --top-k 5 --suppress-eos logits"),
    ("a2d-qwen2", "--score random"),
    ("a2d-qwen3", "--score margin"),
])
def test_decoding_leaves_no_tensor_on_the_cpu(family, flags, cli, pretended_gpu):
    assert len(cli("t.jsonl", f"--length 6 --block 6 --schedule even {flags}", family)) == 5


def test_out_of_another_run_is_refused(train, folders, refused):
    out, flags = train("run", "--max-steps 4"), "--max-steps 4 --resume"
    files = lambda: {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    before = files()
    with refused(f"--out {out}: holds a run already", "--resume", "another --out"):
        train("run", "--max-steps 4")
    for more, words in (("--lam 2", "lam 1.0, now it is 2.0"), ("--batch-size 8", "global_batch 4, now it is 8")):
        with refused(f"{out / 'resume.safetensors'}: the run there has {words}", "another --out"):
            train("run", f"{flags} {more}")
    write_lines(Path(train.data), corpus(folders["llada"])[:20])
    with refused("records 21, now it is 20"):
        train("run", flags)
    assert files() == before


# -----------------------------------------------------------------------------
# tabom.py: killed against whole, one process against several, and does ranking rank

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


def test_killed_at_any_write_and_resumed_equals_whole(train, tmp_path):
    flags = "--max-steps 3 --batch-size 12 --save-every 1"                   # 2 steps per epoch
    whole, n, killed = train("whole", flags), 0, True
    while killed:
        n += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        child = Fork(target=lambda: (die_at(n), train("run", flags)))
        child.start()
        child.join()
        killed = child.exitcode == -signal.SIGKILL
        out = train("run", flags + " --resume")
        assert same_run(out, whole)
        assert {p.name for p in out.iterdir()} == {"epoch-1", "epoch-2", "log.jsonl", "resume.safetensors"}
    assert child.exitcode == 0 and n > 20                          # the last child was not hit: every write has been


@pytest.mark.parametrize("ranks, flags", [(2, "--batch-size 2 --grad-accum 2"), (4, "--batch-size 2")])
def test_ranks_match_one_process(ranks, flags, train, folders, tmp_path):
    """17 records: the last batch of an epoch has one sample, on rank 0."""
    source = write_lines(tmp_path / "corpus17.jsonl", corpus(folders["llada"], 17))
    run_ranks(ranks, lambda: train("many", f"--max-steps 12 {flags}", source))
    assert_close_runs(tmp_path / "many", train("one", "--max-steps 12 --batch-size 8", source))


CRASH = """import os, signal, torch.distributed as dist
real, calls = dist.all_reduce, [0]
def all_reduce(t):
    calls[0] += 1                        # nine per step: rank 1 dies once, in the middle of its eleventh step
    if calls[0] == 94 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(t)
dist.all_reduce = all_reduce
import tabom
tabom.main()
"""


def test_torchrun_continues_by_itself_when_a_rank_dies(train, tmp_path):
    (tmp_path / "crash.py").write_text(CRASH)
    flags = "--max-steps 14 --save-every 6"
    argv = f"--max-restarts=1 {tmp_path}/crash.py --data {train.data} --out {tmp_path}/crash {QUICK} {flags}"
    p = subprocess.run([*TORCHRUN, *argv.split()], capture_output=True, text=True, env=CHILD, check=False)
    assert p.returncode == 0 and p.stdout.count("trainable parameters") == 2, p.stderr       # it did start twice
    assert_close_runs(tmp_path / "crash", train("one", flags + " --batch-size 8"))


def test_ranking_puts_held_out_pairs_in_order(command, train, tmp_path):
    """The committed toy through decode.py, then tabom.py with and without the ranking term: same data and windows."""
    folder, args, shares = str(HERE / "study" / "base"), training_args("--window 4"), {}
    tasks = toy.draw("math", "train", 210, seed=0)
    source = write_lines(tmp_path / "prompts.jsonl", [dict(prompt="".join(task[0])) for task in tasks])
    command(decode, f"--model {folder} --prompts {source} --out {tmp_path}/all --length 34 --batch-size 64")
    rows = sorted(read_lines(tmp_path / "all"), key=lambda row: row["id"])
    learn, held_out = write_lines(tmp_path / "learn", rows[:140]), write_lines(tmp_path / "held_out", rows[140:])
    for lam, out in ((1, tmp_path / "with"), (0, tmp_path / "without")):
        train(out, f"--lam {lam} --max-steps 80 --batch-size 16 --lr 1e-2 --lora-r 16", learn)
        net = load(folder)
        lora.load(net, out / "epoch-9")
        trajs = read_trajs(folder, held_out, "--all")
        shares[lam] = np.mean([losses(net, views_of(trajs, args, seed), args)[1]["in_order"] for seed in range(20)], 0)
    gain = shares[1] - shares[0]                         # paired: the same trajectories and windows
    error = gain.std(ddof=1) / math.sqrt(len(gain))
    assert gain.mean() > max(0.03, 6 * error), (shares[1].mean(), shares[0].mean(), error)


# -----------------------------------------------------------------------------
# eval.py

@both
def test_tds_equals_its_definition_in_plain_loops(family, cli, folders, nets, tmp_path):
    net, end_ids, want = nets[family], tokenizer(folders[family]).end_ids, {}
    cli("t.jsonl", "--length 10 --tokens-per-step 2", family)
    trajs = read_trajs(folders[family], tmp_path / "t.jsonl", "--all")
    trajs[0].response[4] = net.config.eos_id
    for traj in trajs:
        for step in sorted(set(traj.step.tolist()) - {-1}):
            seen = [0 <= s < step for s in traj.step]
            z, h = state_logits(net, traj, seen), []
            for i, token in enumerate(traj.response):
                if not seen[i]:
                    h.append(plain_stats(z[i], 0)[1])
                elif token in end_ids:                   # decoded by now: nothing to the right of it counts
                    break
            if len(h) >= 2:
                mean = sum(h) / len(h)
                want.setdefault(step, []).append(sum((x - mean) ** 2 for x in h) / len(h))
    got = evaluate.tds_curve(net, trajs, net.config, end_ids, batch_size=3)
    assert [step for step, value in enumerate(got) if value is not None] == sorted(want)
    for step, values in want.items():
        assert got[step] == pytest.approx(np.mean(values), rel=1e-3, abs=1e-5)


def test_order_agreement_counts_pairs(nets, folders, tmp_path):
    net, trajs = nets["llada"], read_shapes(folders["llada"], tmp_path, "")
    args, right, pairs = training_args("--window 3"), 0, 0
    for n, traj in enumerate(trajs):
        for cut in range(4):
            visible, targets = tabom.sample_view(traj, args, np.random.default_rng([cut, n]))
            z = state_logits(net, traj, visible)
            h = [plain_stats(z[j], 0)[1] for j in targets]
            right += sum(h[r] < h[s] for r in range(len(h)) for s in range(r + 1, len(h)))
            pairs += len(h) * (len(h) - 1) // 2
    assert evaluate.order_agreement(net, trajs, net.config, 3, batch_size=5) == pytest.approx(right / pairs)


@pytest.mark.parametrize("k", [1, 3])
def test_swap_equals_a_plain_loop_with_two_models(k, folders):
    """Positions by one network's confidence, tokens by the other's argmax; two separate models, one row, no batch."""
    base, tuned = load(folders["llada"]), adapted(folders["llada"], scale=1.0)
    s = settings(folders["llada"], f"--length 9 --tokens-per-step {k}", end_ids=[-1])
    prompts = [("0", [3, 1, 4]), ("1", [1, 5, 9, 2, 6])]
    inside = evaluate.WithoutAdapter(tuned)
    for order_by, tokens_by, pair in ((base, tuned, (inside, tuned)), (tuned, base, (tuned, inside))):
        got = {row.id: row for row in decode.decode(pair[0], prompts, s, 2, token_model=pair[1])}
        for id, prompt in prompts:
            canvas, step = [s.mask_id] * 9, [-1] * 9
            for now in range(-(-9 // k)):
                p = plain_logits(order_by, prompt, canvas).softmax(-1)
                z = plain_logits(tokens_by, prompt, canvas)
                p[:, s.mask_id], z[:, s.mask_id] = -1, -torch.inf
                left = sorted((j for j in range(9) if step[j] < 0), key=lambda j: -p[j].max().item())
                for j in left[:k]:
                    canvas[j], step[j] = int(z[j].argmax()), now
            assert got[id].step.tolist() == step and got[id].canvas.tolist() == canvas


def test_eval_measures_draws_and_does_not_measure_twice(cli, command, folders, tmp_path, capsys, refused):
    rows, path, out = cli("t.jsonl", "--length 8"), tmp_path / "t.jsonl", tmp_path / "r"
    write_lines(path, [row | {"correct": True} for row in rows.values()])
    lora.save(adapted(folders["llada"], scale=0.0), tmp_path / "same")       # the identity
    flags = (f"--model {folders['llada']} --adapter mine={tmp_path}/same --prompts {tmp_path}/prompts.jsonl --length 8 "
             f"--parallel 1 2 --tds 2 --order {path} --window 3 --ce {path} {path} --swap --pictures --keep "
             f"--out {out}")
    command(evaluate, flags)
    base, mine = (json.loads((out / f"{name}.json").read_text()) for name in ("base", "mine"))
    assert base["accuracy"] == mine["accuracy"] and set(base["accuracy"]) == {"prompts/1", "prompts/2"}
    assert [mine["tds"], mine["in_order"]] == pytest.approx([base["tds"], base["in_order"]])
    for swapped in mine["swap"]["prompts/2"].values():   # the adapter is the identity, so every swap is the base
        assert swapped == base["accuracy"]["prompts/2"]
    assert {"settings", "commit", "torch", "python", "device"} <= base.keys()
    for picture in ("tds", "ce", "map-base"):
        assert (out / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"
    for r in read_lines(out / "base-prompts-1.jsonl"):
        assert r["response_token_ids"] == rows[r["id"]]["response_token_ids"]
    capsys.readouterr()
    command(evaluate, flags)
    assert "per step" not in capsys.readouterr().out
    with refused("base.json", "other settings"):
        command(evaluate, flags + " --seed 5")


@pytest.mark.parametrize("module, flags, words", [
    (tabom, "--data t.jsonl --window -3", "--window -3: must not be negative"),
    (tabom, "--data t.jsonl --lam nan", "--lam nan"),
    (tabom, "--data t.jsonl --window 1", "--window 1"),
    (decode, "--model m --prompts p --tokens-per-step -2", "--tokens-per-step -2"),
    (evaluate, "--model m", "nothing to measure"),
    (evaluate, "--model m --prompts a/test.jsonl b/test.jsonl", "b/test.jsonl: two files have one stem"),
])
def test_flags_that_would_be_silently_wrong_are_refused(module, flags, words, refused):
    with refused(words):
        module.parse_args(flags.split())


TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
generation_kwargs: {{until: {until}, max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
num_fewshot: 0
metadata: {{version: 1}}
"""


def test_harness_runs_our_decoder_on_local_tasks(cli, folders, tmp_path):
    """The real lm_eval, offline, on two ranks: stop strings, chat template, base and adapter, one score per answer."""
    folder, tasks = folders["llada"], tmp_path / "tasks"
    text = {r["prompt"]: r["response"] for r in cli("t.jsonl", "--length 8").values()}
    cut = next(t for t in text.values() if len(t) > 2)[1]                # a character that occurs: it must cut there
    tasks.mkdir()
    rows = [{"question": prompt, "answer": answer.partition(cut)[0]} for prompt, answer in text.items()]
    file = write_lines(tasks / "d.jsonl", rows)
    (tasks / "utils.py").write_text("import os\ndef count(doc, results):\n    open(os.environ['COUNT'], 'a')"
                                    ".write('x')\n    return dict(exact_match=1)\n")
    for name, more in {"gsm8k_like": "", "counted": "process_results: !function utils.count"}.items():
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, file=file, until=json.dumps([cut]), more=more))
    lora.save(adapted(folder, scale=2.0), tmp_path / "a" / "epoch-1")
    env = CHILD | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "COUNT": f"{tmp_path}/count"}
    argv = (f"eval.py --model {folder} --adapter {tmp_path}/a/epoch-1 --tasks gsm8k_like,counted --task-path {tasks} "
            f"--length 8 --keep --out {tmp_path}/r")
    done = subprocess.run([*TORCHRUN, *argv.split()], cwd=HERE, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "r" / "base.json").read_text())
    assert result["tasks"]["gsm8k_like"]["exact_match,none"] == 1.0              # what decode.py wrote, cut
    assert (tmp_path / "r" / "base-tasks.jsonl").read_text() != (tmp_path / "r" / "a-epoch-1-tasks.jsonl").read_text()
    assert (tmp_path / "count").read_text() == "x" * 2 * len(rows)               # scored once, not once per rank


def test_harness_answers_depend_on_the_question_alone(folders):
    """The same answer alone or beside other tasks, another one for a repeat."""
    from lm_eval.api.instance import Instance
    ask = lambda task, doc: Instance("generate_until", {}, (f"ab{doc}=", {"max_gen_toks": 6}), 0, (task, doc, 1))
    lm = evaluate.new_harness(evaluate.parse_args(["--model", folders["llada"], "--tasks=mine", "--temperature=1"]))
    few = lm.generate_until([ask("mine", 0), ask("mine", 1), ask("mine", 1)])
    many = lm.generate_until([ask("other", 1), ask("mine", 1), ask("other", 0), ask("mine", 1), ask("mine", 0)])
    assert many[4] == few[0] and [many[1], many[3]] == few[1:] and few[1] != few[2]


@pytest.mark.parametrize("task, family, flags, want", [
    ("gsm8k_cot", "Dream", "", (256, 0, None)), ("humaneval_instruct", "Dream", "", (768, 0, None)),
    ("minerva_math500", "llada", "", (512, 64, None)), ("mbpp_instruct", "llada", "", (256, 0, "confidence")),
    ("humaneval_instruct", "llada", "", (512, 0, "logits")), ("gsm8k", "llada", "--length 16", (16, 8, None)),
    ("gsm8k", "llada", "--length 16 --block 4 --suppress-eos logits", (16, 4, "logits")),
    ("mine", "llada", "", (6, 0, None))])
def test_benchmarks_decode_as_the_papers_table_or_flags_say(task, family, flags, want, folders):
    lm = evaluate.new_harness(evaluate.parse_args(["--model", folders[family], "--tasks", task, *flags.split()]))
    args = lm.task_args(task, own_length=6)
    assert (args.length, args.block, args.suppress_eos) == want


# -----------------------------------------------------------------------------
# toy.py and study/

def test_toy_answers_are_right_and_splits_are_disjoint(tmp_path, monkeypatch):
    """The answers by a second interpreter of the maps; every file of one split, no prompt in two."""
    monkeypatch.setattr(sys, "argv", ["toy.py", "--out", str(tmp_path), "--train", "60", "--test", "40"])
    toy.main()
    files = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.iterdir()}
    prompts = {name: {row["prompt"] for row in rows} for name, rows in files.items()}
    assert prompts["train"] == prompts["gt"]
    for a, b in (("train", "val-math"), ("train", "test-math"), ("val-math", "test-math"), ("val-logic", "test-logic")):
        assert not prompts[a] & prompts[b]
    for row in files["gt"] + files["test-math"]:
        values = {"a": int(row["prompt"][0]), "b": int(row["prompt"][1])}
        for name in re.findall(r"swap|[ab]~|[ab][-+*][0-9ab]", row["prompt"][2:]):
            if name == "swap":
                values = {"a": values["b"], "b": values["a"]}
            elif name[1] == "~":
                values[name[0]] = 9 - values[name[0]]
            else:
                right = values[name[2]] if name[2] in values else int(name[2])
                left = values[name[0]]
                values[name[0]] = {"+": left + right, "-": left - right, "*": left * right}[name[1]] % 10
        assert row["answer"] == f"{values['a']}{values['b']}"
        assert row.get("response", row["answer"]).endswith(row["answer"])
        assert " gives " not in row.get("response", "")          # reference answers: the rarer form only


def test_committed_base_is_able_and_its_tokenizer_fits(tmp_path):
    """Far above chance (1 %) at one and at four tokens per step, on prompts it was not trained on."""
    config = models.read_config(str(HERE / "study" / "base"))
    tok = models.load_tokenizer(config)
    tasks = toy.draw("math", "test", 24, seed=5)
    ids = tok("".join(tasks[0][0] + tasks[0][1]))["input_ids"]
    assert ids == toy.encode(tasks)[0, :len(ids)].tolist() and len(tok) == config.vocab == len(toy.VOCAB)
    net = load(HERE / "study" / "base")
    for k in (1, 4):
        args = decode.parse_args(["--model", "-", "--prompts", "-", "--length", "34", "--tokens-per-step", str(k)])
        s = decode.make_settings(args, config, tok.end_ids)
        prompts = [(str(n), tok("".join(task[0]))["input_ids"]) for n, task in enumerate(tasks)]
        rows = decode.decode(net, prompts, s, 24)
        right = [tok.decode(row.canvas.tolist(), skip_special_tokens=True).endswith("####" + tasks[int(row.id)][2])
                 for row in rows]
        assert np.mean(right) > 0.4


def test_report_of_the_study_is_what_its_results_say(monkeypatch):
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(HERE / "study")
    import report
    assert report.study() == (HERE / "study" / "report.md").read_text()
    # verdicts: 3.2 standard errors from the threshold
    for xs, want in (([1, 2, 3, 2], "shown"), ([1, 4, -1, 3], "not shown"), ([-1, -2, -3, -2], "contrary")):
        assert report.verdict(xs) == want
    assert report.verdict([-1, -0.9, -1.1, -1], above=-2) == "shown"


def test_pretraining_writes_a_model_that_loads(tmp_path, monkeypatch, refused):
    small = [dict(phase, steps=1, tasks=20) for phase in toy.PHASES]
    monkeypatch.setattr(toy, "PHASES", small)
    real = toy.draw
    monkeypatch.setattr(toy, "draw", lambda domain, split, count, *a, **k: real(domain, split, min(count, 30), *a, **k))
    monkeypatch.setattr(sys, "argv", ["toy.py", "--pretrain", "--out", str(tmp_path / "m")])
    toy.main()
    assert load(tmp_path / "m").config.vocab == len(toy.VOCAB)
    with refused("holds a model already"):
        toy.main()


# -----------------------------------------------------------------------------
# bench.py

def test_what_bench_compares_with_computes_the_same():
    """The release's training step and the published decoding loop, written out in bench.py, on a tiny model."""
    shape = dict(bench.MODELS["dream"], width=32, layers=1, heads=4, kv_heads=1, mlp=48, vocab=1200)
    model = bench.make_model(shape)
    batch = tabom.collate(bench.make_views(1200), bench.MASK, "cpu")
    ours = bench.train_step(model, batch)
    assert ours.item() == pytest.approx(bench.release_step(model, batch).item(), rel=1e-4)
    assert ours.item() == pytest.approx(bench.release_step_eager(model, batch).item(), rel=1e-4)
    bench.script_answers(model, 16)
    s = bench.make_settings(model.config, "--length 16 --tokens-per-step 2 --score entropy --temperature 0 --top-p 1")
    prompts = [(row, [end, *range(5, 9 + 3 * row)]) for row, end in enumerate((16, 9, 4, 12))]
    plain = bench.plain_decode(model, prompts, s, 4)
    for size in (1, 3):
        assert np.array_equal(bench.our_decode(model, prompts, s, size), plain)


def test_plan_prices_every_stage(monkeypatch, capsys):
    monkeypatch.setitem(bench.MODELS["small"], "layers", 2)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--plan", "small"])
    bench.main()
    printed = capsys.readouterr().out
    for gpu in bench.GPUS:
        assert f"small on 1 x {gpu}" in printed
    for stage in ("decode the prompts", "train tabom", "train t3d, --grad-checkpoint"):
        assert printed.count(stage) >= 3


# -----------------------------------------------------------------------------
# the repository as a whole

def test_recipes_print_commands_whose_flags_exist():
    """DRY_RUN=1 ./run.sh dream-math and the others: every flag of every printed command is known to its script."""
    parsers = {"decode.py": decode.parse_args, "tabom.py": tabom.parse_args, "eval.py": evaluate.parse_args}
    for recipe in ("small", "d3llm", "dream-math", "dream-code", "llada-math", "llada-code"):
        env = os.environ | {"DRY_RUN": "1", "PYTHON": sys.executable}
        done = subprocess.run(["./run.sh", recipe], cwd=HERE, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        commands = [line.split() for line in done.stderr.splitlines() if line.startswith("+ ")]
        assert len(commands) >= {"small": 4, "d3llm": 1}.get(recipe, 10)
        for words in commands:
            script = next(word for word in words if word in parsers)
            parsers[script](words[words.index(script) + 1:])


def test_small_recipe_decodes_trains_measures_and_its_adapter_merges(folders, tmp_path, command):
    """Every stage of ./run.sh small by its own commands, on a random model."""
    family, rows = "a2d-qwen3", [dict(id=n, prompt=f"{n}+1", answer=str(n + 1)) for n in range(6)]
    prompts, d = write_lines(tmp_path / "p.jsonl", rows), tmp_path / "out" / "small"
    env = CHILD | dict(PYTHON=sys.executable, OUT=str(tmp_path / "out"), SMALL_MODEL=folders[family], SMALL_CPU="1",
                       SMALL_DATA=prompts, SMALL_TEST_DATA=prompts, SMALL_PROMPTS="6", SMALL_TEST="3",
                       SMALL_LENGTH="16", SMALL_BLOCK="8", SMALL_EPOCHS="3", SMALL_TRAIN="--all --window 4 --lr 0.01")
    done = subprocess.run(["./run.sh", "small"], cwd=HERE, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {r["decode"]["block"] for r in read_lines(d / "traj.jsonl")} == {8}
    for name in ("base", "sft", "tabom"):
        result = json.loads((d / "results" / f"{name}.json").read_text())
        assert result["accuracy"]["p/1"]["n"] == 3 and result["tds"] > 0
    # the merged checkpoint decodes as the adapter does
    adapter, merged = d / "tabom" / "epoch-3", tmp_path / "merged"
    flags = f"--model {folders[family]} --adapter {adapter} --out {merged}"
    subprocess.run([sys.executable, "lora.py", *flags.split()], cwd=HERE, env=CHILD, check=True)
    decode_flags = f"--prompts {prompts} --length 16 --block 8"
    command(decode, f"--model {folders[family]} --adapter {adapter} {decode_flags} --out {tmp_path}/a.jsonl")
    command(decode, f"--model {merged} {decode_flags} --out {tmp_path}/m.jsonl")
    a, m, base = (sorted((r["id"], r["response_token_ids"]) for r in read_lines(file))
                  for file in (tmp_path / "a.jsonl", tmp_path / "m.jsonl", d / "traj.jsonl"))
    assert a == m != base


def readme_fork(number, folder):
    """A copy of our files with README's diff applied by content: what it removes must occur exactly once."""
    diff = re.findall(r"```diff\n(.*?)```", (HERE / "README.md").read_text(), re.S)[number]
    assert len(diff.splitlines()) <= 15
    folder.mkdir()
    for file in HERE.glob("*.py"):
        shutil.copy(file, folder)
    for part in re.split(r"^--- ", diff, flags=re.M)[1:]:
        name, *lines = part.rstrip("\n").split("\n")
        old = "".join(line[1:] + "\n" for line in lines if line[0] in "- ")
        new = "".join(line[1:] + "\n" for line in lines if line[0] in "+ ")
        source = (folder / name).read_text()
        assert source.count(old) == 1, f"{name} has {source.count(old)} places like\n{old}"
        (folder / name).write_text(source.replace(old, new))
    return folder


def test_fork_a_listwise_ranking_loss(tmp_path):
    """Plackett-Luce: the negative log-probability of the decoding order, drawn one by one with weights exp(-h)."""
    code = """if 1:
        import math, torch, tabom
        logp = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
        valid = torch.tensor([[True, True, True, False]])
        loss, parts = tabom.tabom_loss(logp, torch.zeros(1, 4, dtype=torch.long), valid, 1.0, 0.2)
        h = [-sum(p * math.log(p) for p in row.exp().tolist()) for row in logp[0, :3]]
        want = sum(math.log(sum(math.exp(-x) for x in h[r:])) + h[r] for r in range(3)) / 3
        assert abs(parts["rank"].item() - want) < 1e-5, (parts, want)"""
    subprocess.run([sys.executable, "-c", code], cwd=readme_fork(0, tmp_path / "f"), check=True)


def decode_in(fork, model, tmp_path, *flags) -> dict:
    prompts, out = write_lines(tmp_path / "p.jsonl", [{"prompt": "abc"}]), tmp_path / "t.jsonl"
    argv = [sys.executable, "decode.py", "--model", model, "--prompts", prompts, "--out", out, "--length=8", *flags]
    subprocess.run(argv, cwd=fork, check=True, capture_output=True)
    return json.loads(out.read_text())


def test_fork_another_score(tmp_path, folders, nets):
    record = decode_in(readme_fork(1, tmp_path / "f"), folders["llada"], tmp_path, "--score", "second")
    logits = plain_logits(nets["llada"], record["prompt_token_ids"], [nets["llada"].config.mask_id] * 8)
    second = logits.softmax(-1).sort(-1).values[:, -2]
    assert record["method"] == "second" and record["decoding_order"][int(second.argmin())] == 0


def test_fork_another_model_family(tmp_path, folders, refused):
    """A Llama-shaped diffusion model: Dream's names without the biases, LLaDA's tokenizer, no shift."""
    folder = shutil.copytree(folders["llada"], tmp_path / "m")
    weights = load_file(Path(folders["Dream"]) / "model.safetensors")
    save_file({k: v for k, v in weights.items() if not k.endswith("bias")}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of("Dream") | {"model_type": "llama-mdm"}))
    assert decode_in(readme_fork(2, tmp_path / "f"), folder, tmp_path)["decode"]["schedule"] == "even"
    with refused("llama-mdm"):                           # our own model.py does not know it
        models.read_config(str(folder))
