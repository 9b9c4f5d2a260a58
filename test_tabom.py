"""Every claim of this project that a CPU can check. Each test is named for its claim and compares with something that
shares no code with it: plain loops, hand-written native decoders, the real transformers, the real peft.

    OMP_NUM_THREADS=1 python -m pytest -q test_tabom.py

Checkpoints are tiny, random and made on the fly (`tiny`). Letters: B rows, T length, N canvas, V vocabulary.
"""
import argparse
import builtins
import contextlib
import fcntl
import importlib.util
import json
import math
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import socket
import string
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import data
import decode
import eval as evaluate
import lora
import model as models
import tabom

HERE = Path(__file__).parent
torch.set_num_threads(1)                # many small products: a second thread only waits
both = pytest.mark.parametrize("family", ["llada", "Dream"])


# ---------------------------------------------------------------- what the tests are made of

WIDTH, LAYERS, HEADS, MLP = 32, 2, 4, 48
KV = {"llada": 4, "Dream": 2}           # Dream groups its queries
CHARS = sorted(set(string.digits + string.ascii_lowercase + "[]+-*/=.# "))
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
SPECIALS = {"llada": ["<|mdm_mask|>", "<|endoftext|>", "<|eot_id|>"],
            "Dream": ["<|mask|>", "<|endoftext|>", "<|im_end|>"]}


def ids_of(family: str) -> SimpleNamespace:
    """The tiny models' special ids; like the real ones they have more embedding rows than the tokenizer has tokens."""
    n = len(CHARS) + (family == "Dream")                 # Dream's tokenizer has one merge, "ab"
    return SimpleNamespace(mask=n, eos=n + 1, eot=n + 2, vocab=n + 6)


def hub_shapes(family: str) -> dict[str, tuple]:
    """Every tensor of a checkpoint under its name on the hub, written out: a second opinion on model.py's table."""
    V, C, K, M = ids_of(family).vocab, WIDTH, WIDTH // HEADS * KV[family], MLP
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
                 "self_attn.o_proj.weight": (C, C), "mlp.gate_proj.weight": (M, C), "mlp.up_proj.weight": (M, C),
                 "mlp.down_proj.weight": (C, M)}
        for p, out in dict(q=C, k=K, v=K).items():
            block |= {f"self_attn.{p}_proj.weight": (out, C), f"self_attn.{p}_proj.bias": (out,)}
    return shapes | {b.format(n) + k: v for n in range(LAYERS) for k, v in block.items()}


def config_of(family: str) -> dict:
    i = ids_of(family)
    if family == "llada":
        return dict(model_type="llada", d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV[family],
                    mlp_hidden_size=MLP, embedding_size=i.vocab, vocab_size=i.vocab, max_sequence_length=512,
                    rope_theta=500000.0, rms_norm_eps=1e-5, weight_tying=False, include_bias=False,
                    include_qkv_bias=False, block_type="llama", layer_norm_type="rms",
                    mask_token_id=i.mask, eos_token_id=i.eos, pad_token_id=i.eos)
    return dict(model_type="Dream", hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                num_key_value_heads=KV[family], intermediate_size=MLP, vocab_size=i.vocab, max_position_embeddings=512,
                rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=False, hidden_act="silu",
                rope_scaling=None, mask_token_id=i.mask, eos_token_id=i.eos, pad_token_id=i.eos,
                auto_map={"AutoModel": "modeling_dream.DreamModel"})     # as on the hub: known families load without it


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
    return {f: tiny(f, tmp_path_factory.mktemp("models") / f) for f in ("llada", "Dream")}


@pytest.fixture(scope="module")
def nets(folders) -> dict[str, models.Model]:
    """Shared and read-only: a test that changes a model loads its own."""
    return {f: models.load(folder) for f, folder in folders.items()}


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
    """Left-padded random rows: ids, real (B, T), and the rows alone."""
    rng, T = np.random.default_rng(seed), max(lengths)
    alone = [rng.integers(0, ids_of(family).vocab, n).tolist() for n in lengths]
    ids = torch.tensor([[5] * (T - len(x)) + x for x in alone])
    return ids, torch.tensor([[False] * (T - len(x)) + [True] * len(x) for x in alone]), alone


def write_lines(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


# ---------------------------------------------------------------- model.py

@both
def test_logits_at_chosen_positions_equal_the_full_ones(family, nets):
    ids, real, _ = ragged(family)
    at = real & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.4)
    at[:, -1] = True
    full, some = nets[family](ids, real), nets[family](ids, real, at)
    assert full.shape == (*ids.shape, ids_of(family).vocab)
    torch.testing.assert_close(some, full[at], atol=1e-5, rtol=1e-5)


@both
def test_head_is_computed_for_chosen_positions_only(family, nets):
    ids, real, _ = ragged(family)
    at = torch.zeros_like(real)
    at[0, -2:] = at[2, -5] = True
    rows, head = [], models.part(nets[family], nets[family].family["head"])
    hook = head.register_forward_hook(lambda m, x, y: rows.append(x[0].shape))
    nets[family](ids, real, at)
    hook.remove()
    assert rows == [(3, WIDTH)]


@both
def test_left_padded_rows_equal_the_rows_alone(family, nets):
    ids, real, alone = ragged(family)
    padded = nets[family](ids, real)
    for b, row in enumerate(alone):
        torch.testing.assert_close(padded[b, -len(row):], nets[family](torch.tensor([row]))[0], atol=1e-4, rtol=0)


def test_dream_logits_equal_bidirectional_qwen2_shifted(folders, nets):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    c = {k: v for k, v in config_of("Dream").items() if k not in ("model_type", "mask_token_id", "auto_map")}
    theirs = Qwen2ForCausalLM(Qwen2Config(**c, attn_implementation="eager")).eval()
    theirs.load_state_dict(load_file(Path(folders["Dream"]) / "model.safetensors"), strict=True)
    ids, real, _ = ragged("Dream")
    B, T = ids.shape
    hidden = torch.where(real, 0.0, torch.finfo().min)[:, None, None, :].expand(B, 1, T, T)   # 4-D: nothing is causal
    raw = theirs(ids, attention_mask=hidden.contiguous(), position_ids=(real.cumsum(1) - 1).clamp(min=0)).logits
    ours = nets["Dream"](ids, real)
    for b in range(B):
        start = int((~real[b]).sum())
        want = torch.cat([raw[b, start:start + 1], raw[b, start:-1]])   # state i - 1 tells token i, the first its own
        torch.testing.assert_close(ours[b, start:], want, atol=1e-4, rtol=1e-4)


def test_llada_logits_equal_a_plain_forward(folders, nets):
    """The forward once more, from the raw tensors in float64: no batch, one head at a time, one position at a time."""
    w = {k.removeprefix("model.transformer."): v.double().numpy() for k, v in
         load_file(Path(folders["llada"]) / "model.safetensors").items()}
    ids, D = ragged("llada")[2][2], WIDTH // HEADS

    def norm(x, gain):
        return np.stack([gain * row / math.sqrt((row ** 2).mean() + 1e-5) for row in x])

    def turn(x):                                         # RoPE: (x[i], x[i + D/2]) turned by position / theta^(2i/D)
        y = x.copy()
        for t in range(len(x)):
            for i in range(D // 2):
                angle = t / 500000.0 ** (2 * i / D)
                a, b, cos, sin = x[t, i], x[t, i + D // 2], math.cos(angle), math.sin(angle)
                y[t, i], y[t, i + D // 2] = a * cos - b * sin, b * cos + a * sin
        return y

    x = w["wte.weight"][ids]
    for n in range(LAYERS):
        get = lambda name, n=n: w[f"blocks.{n}.{name}.weight"]               # noqa: E731
        h, heads = norm(x, get("attn_norm")), []
        for j in range(HEADS):
            q, k, v = (h @ get(name)[j * D:(j + 1) * D].T for name in ("q_proj", "k_proj", "v_proj"))
            a = np.exp(turn(q) @ turn(k).T / math.sqrt(D))
            heads.append(a / a.sum(1, keepdims=True) @ v)
        x = x + np.concatenate(heads, 1) @ get("attn_out").T
        h = norm(x, get("ff_norm"))
        gate = h @ get("ff_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ get("up_proj").T)) @ get("ff_out").T
    want = norm(x, w["ln_f.weight"]) @ w["ff_out.weight"].T
    ours = nets["llada"](torch.tensor([ids]))[0]
    torch.testing.assert_close(ours, torch.from_numpy(want).float(), atol=1e-4, rtol=1e-4)


@both
def test_every_token_sees_every_other(family, nets):
    ids = torch.tensor([ragged(family)[2][2]])
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % ids_of(family).vocab
    assert (nets[family](ids) - nets[family](changed)).abs().amax(-1).min() > 1e-4       # the last moves even the first


@both
def test_sharded_checkpoint_equals_single(family, folders, tmp_path):
    one, many = models.load(folders[family]), models.load(tiny(family, tmp_path / "sharded", files=3))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 3
    want = {k: v for k, v in one.state_dict().items()}
    assert want.keys() == hub_shapes(family).keys() == many.state_dict().keys()
    assert all(torch.equal(v, want[k]) for k, v in many.state_dict().items())
    assert not any(p.requires_grad for p in many.parameters()) and not many.training


def test_tied_head_is_the_embedding(folders, tmp_path):
    folder = Path(shutil.copytree(folders["Dream"], tmp_path / "tied"))
    (folder / "config.json").write_text(json.dumps(config_of("Dream") | dict(tie_word_embeddings=True)))
    w = load_file(folder / "model.safetensors")
    del w["lm_head.weight"]
    save_file(w, folder / "model.safetensors")
    net = models.load(str(folder))
    assert net.lm_head.weight is net.model.embed_tokens.weight
    assert torch.equal(net.lm_head.weight, w["model.embed_tokens.weight"])


def break_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    return "model-00002-of-00003.safetensors"


def break_extra(folder):
    key = sorted(load_file(folder / "model-00001-of-00003.safetensors"))[0]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = index["weight_map"][key]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "model.extra.weight"


def break_lacking(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    key = sorted(index["weight_map"])[3]
    del index["weight_map"][key]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return key


def break_shape(folder):
    file = folder / "model-00001-of-00003.safetensors"
    w = load_file(file)
    key = sorted(w)[0]
    save_file(w | {key: torch.zeros(3, 5)}, file)
    return key


def break_half(folder):
    file = folder / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return "model-00003-of-00003.safetensors"


def break_lie(folder):                                   # the index promises what the shard does not hold
    file = folder / "model-00001-of-00003.safetensors"
    w = load_file(file)
    key = sorted(w)[0]
    del w[key]
    save_file(w, file)
    return key


def edit_config(folder, **fields):
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | fields))


def break_family(folder):
    edit_config(folder, model_type="llama", auto_map=None)
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    return "'llama'"


def break_remote(folder):
    edit_config(folder, model_type="evil", auto_map={"AutoModel": "evil.Model"})
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    return "auto_map"


def break_kind(folder):
    config = json.loads((folder / "config.json").read_text())
    field = "block_type" if config["model_type"] == "llada" else "use_sliding_window"
    edit_config(folder, **{field: "sequential"})
    return field


def break_config(folder):
    (folder / "config.json").write_text("{")
    return "config.json"


def break_type(folder):
    edit_config(folder, model_type=["llada"])
    return "['llada']"


def break_size(folder):
    config = json.loads((folder / "config.json").read_text())
    field = "mlp_hidden_size" if config["model_type"] == "llada" else "intermediate_size"
    edit_config(folder, **{field: True})
    return f"{field} is True"


def break_theta(folder):
    edit_config(folder, rope_theta=math.inf)
    return "rope_theta is inf"


def break_folder(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "model.safetensors").mkdir()
    return "model.safetensors"


def break_deep(folder):
    (folder / "config.json").write_text("[" * 100_000)
    return "config.json"


def break_mask(folder):
    edit_config(folder, mask_token_id=9999)
    return "mask_token_id is 9999"


def break_map(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["x"]}')
    return "no weight_map"


def break_bin(folder):
    class Trap:                                          # unpickling it would leave a file behind
        def __reduce__(self):
            return open, (str(folder / "ran"), "w")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    return ".bin"


@both
@pytest.mark.parametrize("broken", [break_shard, break_extra, break_lacking, break_shape, break_half, break_lie,
                                    break_family, break_remote, break_kind, break_config, break_deep, break_mask,
                                    break_type, break_size, break_theta, break_folder, break_map, break_bin])
def test_wrong_checkpoint_is_named_in_one_line(family, broken, tmp_path, refused):
    folder = Path(tiny(family, tmp_path / "broken", files=3))
    with refused(broken(folder)):
        models.load(str(folder))
    assert not (folder / "ran").exists()                 # neither pickle nor remote code was touched


def test_missing_model_is_named(tmp_path, refused, monkeypatch):
    import huggingface_hub
    asked = []

    def no_network(name, allow_patterns):
        asked.extend([name, *allow_patterns])
        raise ConnectionError
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with refused(tmp_path / "nowhere", "no such folder"):
        models.load(str(tmp_path / "nowhere"))
    with refused("org/name", "ConnectionError", "pass its folder"):
        models.load("org/name")
    assert asked == ["org/name", "*.json", "*.txt", "*.jinja"]                # neither code nor pickles, no weights yet


def test_weights_are_asked_for_last(folders, monkeypatch):
    import huggingface_hub
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda name, allow_patterns: asked.append(allow_patterns) or folders["llada"])
    models.load_tokenizer("org/name")
    assert asked == [["*.json", "*.txt", "*.jinja"]]
    models.load("org/name")
    assert asked[1:] == [["*.json", "*.txt", "*.jinja"], ["*.json", "*.txt", "*.jinja", "*.safetensors"]]


@both
def test_traps_in_a_model_folder_are_not_touched(family, nets, tmp_path):
    """A checkpoint that loads, in a folder that also asks for code of its own everywhere it can."""
    folder = Path(tiny(family, tmp_path / "m"))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    for name in ("evil.py", "modeling.py", "tokenization.py", "__init__.py", "transformers.py"):
        (folder / name).write_text(code + "class Evil: pass\n")
    weights = (folder / "model.safetensors").read_bytes()
    break_bin(folder)                                    # a pickle that leaves folder / "ran"
    (folder / "model.safetensors").write_bytes(weights)
    calls = {f"Auto{x}": "evil.Evil" for x in ("Config", "Model", "ModelForCausalLM")}
    edit_config(folder, auto_map=calls | dict(AutoTokenizer=["evil.Evil", "evil.Evil"]), trust_remote_code=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(
        tokenizer_class="Evil", auto_map=dict(AutoTokenizer=["evil.Evil", "evil.Evil"]), trust_remote_code=True)))
    was = {p: p.read_bytes() for p in folder.iterdir()}
    net, tok, x = models.load(str(folder)), models.load_tokenizer(str(folder)), torch.tensor([[1, 2, 3]])
    assert torch.equal(net(x), nets[family](x)) and tok.decode(tok("3+4")["input_ids"]) == "3+4"
    assert not (tmp_path / "ran").exists() and not (folder / "ran").exists()
    assert was == {p: p.read_bytes() for p in folder.iterdir()} and "evil" not in sys.modules


def test_a_rank_may_be_the_only_one_that_knows(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        models.stop("what all ranks see")
    with pytest.raises(SystemExit), data.safely("all is kept"):
        raise OSError(28, "No space left on device", "t.jsonl")
    assert capsys.readouterr().err == "rank 9: t.jsonl: No space left on device; free some space; all is kept\n"


@both
def test_tokenizer_needs_no_remote_code(family, folders):
    tok, i = models.load_tokenizer(folders[family]), ids_of(family)
    text = "cab = 3+4"
    ids = tok(text, add_special_tokens=False)["input_ids"]
    assert tok.decode(ids) == text and len(ids) == len(text) - (family == "Dream")
    assert tok.end_ids == [i.eos, i.eot]
    assert tok.convert_tokens_to_ids(SPECIALS[family]) == [i.mask, i.eos, i.eot]


def test_loading_needs_the_memory_of_the_weights_once(tmp_path):
    """A 200 MB checkpoint (a hole in a file: nothing to write) loaded in its own process; its peak resident memory."""
    c = config_of("llada") | dict(d_model=1024, n_heads=8, n_kv_heads=8, mlp_hidden_size=4096, n_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(c))
    family = models.FAMILIES["llada"]
    with torch.device("meta"):
        net = models.Model(SimpleNamespace(**{ours: c[theirs] for ours, theirs in family["fields"].items()}), family)
    header, end = {}, 0
    for name, p in net.named_parameters():
        header[name] = dict(dtype="F32", shape=list(p.shape), data_offsets=[end, end + 4 * p.numel()])
        end += 4 * p.numel()
    head = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        f.truncate(8 + len(head) + end)
    code = """if True:
        import resource, sys, torch, safetensors.torch, model
        torch.nn.Embedding(4, 4, device="meta")          # its first use imports 80 MB of torch, which is no weight
        before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
        net = model.load(sys.argv[1])
        assert sum(float(p.sum()) for p in net.parameters()) == 0            # every page was really there
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)"""
    run = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=HERE, env=one_thread(), capture_output=True,
                         text=True, check=True)
    assert 190e6 < end < 210e6 and 0.9 * end < int(run.stdout) < 1.3 * end, int(run.stdout) / end


# ---------------------------------------------------------------- lora.py

def filled(net, seed: int = 0, scale: float = 0.3):
    """The wrapped model with something in B: at init it is zero and the adapter silent."""
    g = torch.Generator().manual_seed(seed)
    for m in lora.layers(net).values():
        m.lora_B.data.copy_(torch.randn(m.lora_B.shape, generator=g) * scale)
    return net


@both
def test_lora_is_identity_at_init_and_wraps_the_named_layers_only(family, folders, nets):
    net, (ids, real, _) = models.load(folders[family]), ragged(family)
    params = lora.wrap(net, r=4)
    assert torch.equal(net(ids, real), nets[family](ids, real))
    attn = "model.transformer.blocks.{}.{}_proj" if family == "llada" else "model.layers.{}.self_attn.{}_proj"
    assert sorted(lora.layers(net)) == sorted(attn.format(n, p) for n in range(LAYERS) for p in "qv")
    assert [p for p in net.parameters() if p.requires_grad] == params
    assert all(m.lora_B.abs().sum() == 0 and m.lora_A.abs().max() <= (6 / (1 + 5) / WIDTH) ** 0.5
               for m in lora.layers(net).values())


@both
def test_lora_forward_is_its_formula(family, folders, nets):
    net, (ids, real, _) = models.load(folders[family]), ragged(family)
    lora.wrap(net, ("v_proj",), r=4, alpha=12)
    filled(net)
    plain = models.load(folders[family])
    for name, m in lora.layers(net).items():             # W + (alpha / r) B A, written into a plain model by loops
        w = models.part(plain, name).weight
        for o in range(w.shape[0]):
            for i in range(w.shape[1]):
                w[o, i] += 12 / 4 * sum(m.lora_B[o, k] * m.lora_A[k, i] for k in range(4)).detach()
    want = plain(ids, real)
    torch.testing.assert_close(net(ids, real), want, atol=1e-4, rtol=1e-4)
    assert (want - nets[family](ids, real)).abs().max() > 0.1


def test_unknown_lora_target_lists_what_there_is(folders, refused):
    with refused("q_porj", "attn_out, ff_out, ff_proj, k_proj, q_proj, up_proj, v_proj"):
        lora.wrap(models.load(folders["llada"]), ("q_porj",))
    with refused("--rank 0"):
        lora.wrap(models.load(folders["llada"]), r=0)


@both
def test_lora_off_is_the_base_and_merge_unmerge_go_there_and_back(family, folders, nets):
    net, (ids, real, _) = models.load(folders[family]), ragged(family)
    base = nets[family](ids, real)
    lora.wrap(net, r=4)
    adapted = filled(net)(ids, real)
    assert (adapted - base).abs().max() > 0.1
    with lora.off(net):
        assert torch.equal(net(ids, real), base)
    assert torch.equal(net(ids, real), adapted)
    lora.merge(net)
    torch.testing.assert_close(net(ids, real), adapted, atol=1e-4, rtol=1e-4)
    with lora.off(net):
        pass
    torch.testing.assert_close(net(ids, real), adapted, atol=1e-4, rtol=1e-4)             # off() must not add it again
    lora.unmerge(net)
    torch.testing.assert_close(net(ids, real), adapted, atol=1e-4, rtol=1e-4)
    with lora.off(net):
        torch.testing.assert_close(net(ids, real), base, atol=1e-4, rtol=1e-4)


def test_adapter_is_fp32_over_a_bf16_base(folders):
    net = models.load(folders["llada"], dtype=torch.bfloat16)                # types only: bf16 matmul dies on some CPUs
    lora.wrap(net, r=4)
    for name, p in net.named_parameters():
        assert p.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    lora.merge(filled(net))
    assert all(m.base.weight.dtype == torch.bfloat16 for m in lora.layers(net).values())


TARGETS = {"llada": ["q_proj", "v_proj", "attn_out"], "Dream": ["q_proj", "v_proj", "down_proj"]}


@both
def test_real_peft_loads_what_we_save(family, folders, tmp_path):
    from peft import PeftModel
    net, (ids, real, _) = models.load(folders[family]), ragged(family)
    lora.wrap(net, TARGETS[family], r=4, alpha=6)
    lora.save(filled(net), tmp_path / "adapter", folders[family])
    theirs = PeftModel.from_pretrained(models.load(folders[family]), tmp_path / "adapter")
    torch.testing.assert_close(theirs.base_model.model(ids, real), net(ids, real), atol=1e-5, rtol=1e-5)
    assert (net(ids, real) - models.load(folders[family])(ids, real)).abs().max() > 0.1


@both
def test_we_load_what_real_peft_saves(family, folders, tmp_path):
    from peft import LoraConfig, get_peft_model
    ids, real, _ = ragged(family)
    theirs = get_peft_model(models.load(folders[family]), LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS[family]))
    g = torch.Generator().manual_seed(0)
    for name, p in theirs.named_parameters():
        if "lora_B" in name:
            p.data.copy_(torch.randn(p.shape, generator=g) * 0.3)
    theirs.create_or_update_model_card = lambda _: None  # a README for the hub, made from a transformers config
    theirs.save_pretrained(tmp_path / "adapter")
    net = models.load(folders[family])
    lora.load(net, tmp_path / "adapter")
    torch.testing.assert_close(net(ids, real), theirs.base_model.model(ids, real), atol=1e-5, rtol=1e-5)


def test_wrong_adapter_is_named_in_one_line(folders, tmp_path, refused):
    net = models.load(folders["llada"])
    lora.wrap(net, r=4)
    lora.save(net, tmp_path / "a")
    with refused(tmp_path / "none", "no such folder"):
        lora.load(models.load(folders["llada"]), tmp_path / "none")
    with refused("blocks.0.q_proj", "has no such layer"):
        lora.load(models.load(folders["Dream"]), tmp_path / "a")
    w = load_file(tmp_path / "a" / "adapter_model.safetensors")
    key = "base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight"
    assert w[key].shape == (4, WIDTH)
    save_file(w | {key: torch.zeros(4, 7)}, tmp_path / "a" / "adapter_model.safetensors")
    with refused("blocks.0.q_proj", f"{WIDTH} x 7"):
        lora.load(models.load(folders["llada"]), tmp_path / "a")
    with refused("blocks.0.q_proj", f"{WIDTH} x 7"):
        lora.merge_checkpoint(folders["llada"], tmp_path / "a", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    save_file({k: v for k, v in w.items() if k != key}, tmp_path / "a" / "adapter_model.safetensors")
    with refused("blocks.0.q_proj", "lacks a matrix"):
        lora.load(models.load(folders["llada"]), tmp_path / "a")
    of_norm = {key.replace("blocks.0.q_proj", "ln_f"): torch.zeros(4, WIDTH),
               key.replace("blocks.0.q_proj.lora_A", "ln_f.lora_B"): torch.zeros(WIDTH, 4)}
    for more, words in (({key: w[key] / 0}, "no numbers"), (of_norm, f"does not fit: the model has {WIDTH} there")):
        save_file(w | more, tmp_path / "a" / "adapter_model.safetensors")
        with refused(words):
            lora.merge_checkpoint(folders["llada"], tmp_path / "a", tmp_path / "merged")
    save_file(w, tmp_path / "a" / "adapter_model.safetensors")
    half = Path(tiny("llada", tmp_path / "half", files=3))
    shard = json.loads((half / "model.safetensors.index.json").read_text())["weight_map"][
        key.removeprefix("base_model.model.").replace("lora_A.", "")]
    (half / shard).write_bytes((half / shard).read_bytes()[:100])
    with refused(half / shard, "download it again"):
        lora.merge_checkpoint(str(half), tmp_path / "a", tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))
    (Path(tiny("llada", tmp_path / "no-model")) / "config.json").unlink()
    with refused(tmp_path / "no-model" / "config.json", "not there"):
        lora.merge_checkpoint(str(tmp_path / "no-model"), tmp_path / "a", tmp_path / "merged")
    lora.merge_checkpoint(folders["llada"], tmp_path / "a", f"{tmp_path}/merged/")       # a shell completes the slash
    assert models.load(str(tmp_path / "merged")) and not (tmp_path / "merged" / ".part").exists()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | dict(lora_alpha=math.nan)))
    with refused("lora_alpha nan"):
        lora.load(models.load(folders["llada"]), tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | dict(use_dora=True)))
    with refused("use_dora"):
        lora.load(models.load(folders["llada"]), tmp_path / "a")


def merge_cli(monkeypatch, **flags):
    monkeypatch.setattr(sys, "argv", ["lora.py"] + [x for k, v in flags.items() for x in (f"--{k}", str(v))])
    runpy.run_path(str(HERE / "lora.py"), run_name="__main__")


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_checkpoint_is_the_adapter_in_the_hubs_layout(family, dtype, tmp_path, monkeypatch, refused):
    base, merged = Path(tiny(family, tmp_path / "base", files=2, dtype=dtype)), tmp_path / "merged"
    (base / "modeling_x.py").write_text("raise SystemExit('never imported')")
    (base / "pytorch_model.bin").write_bytes(b"x")
    net, (ids, real, _) = models.load(str(base)), ragged(family)
    lora.wrap(net, r=4)
    lora.save(filled(net), tmp_path / "adapter", str(base))
    merge_cli(monkeypatch, model=base, adapter=tmp_path / "adapter", out=merged)
    assert {f.name for f in merged.iterdir()} == {f.name for f in base.iterdir()} - {"pytorch_model.bin"}
    for file in base.glob("*.safetensors"):              # same tensors, shards and types; W + 16/4 B A where adapted
        old, new = load_file(file), load_file(merged / file.name)
        assert old.keys() == new.keys()
        for key, w in old.items():
            m = lora.layers(net).get(key.removesuffix(".weight"))
            want = w if m is None else (w.float() + 4.0 * (m.lora_B @ m.lora_A).detach()).to(dtype)
            assert new[key].dtype == dtype
            torch.testing.assert_close(new[key].float(), want.float(), atol=1e-6,
                                       rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    if dtype == torch.float32:
        torch.testing.assert_close(models.load(str(merged))(ids, real), net(ids, real), atol=1e-4, rtol=1e-4)
    assert models.load_tokenizer(str(merged))("12")["input_ids"] == models.load_tokenizer(str(base))("12")["input_ids"]
    with refused(merged, "is there already"):
        merge_cli(monkeypatch, model=base, adapter=tmp_path / "adapter", out=merged)


# ---------------------------------------------------------------- data.py: prompts and records

@pytest.mark.parametrize("row, want", [
    (dict(prompt="p"), dict(prompt="p", answer=None, response=None, id=0)),
    (dict(question="q", id="a7", answer=12), dict(prompt="q", answer="12", id="a7")),
    (dict(instruction="i", input="x", output="o"), dict(prompt="i\nx", response="o")),
    (dict(prompt="p", gen_text="g"), dict(response="g")),
    (dict(prompt="p", response=""), dict(response="")),   # what a canvas full of EOS leaves
    (dict(question="q", answer="3 + 4 = <<3+4=7>>7\n#### 7"),                                 # GSM8K
     dict(prompt="q", answer="7", response="3 + 4 = <<3+4=7>>7\n#### 7")),
    (dict(question="q", target="so it is \\boxed{5}"),                                        # MixChain
     dict(prompt="q", answer="5", response="so it is \\boxed{5}")),
    (dict(messages=[dict(role="HUMAN", content="h"), dict(role="ASSISTANT", content="a")]),   # Ling-Coder
     dict(prompt="h", response="a", messages=[dict(role="user", content="h")])),
    (dict(messages=[dict(role="system", content="s"), dict(role="user", content="u"),
                    dict(role="assistant", content="a"), dict(role="user", content="v")]),
     dict(prompt="v", response=None, messages=[dict(role="system", content="s"), dict(role="user", content="u"),
                                               dict(role="assistant", content="a"), dict(role="user", content="v")])),
])
def test_each_prompt_shape_is_read(row, want, tmp_path):
    it, = data.read_prompts(write_lines(tmp_path / "p.jsonl", [row]))
    assert {k: it[k] for k in want} == want
    assert want.get("messages") or it["messages"] == [dict(role="user", content=it["prompt"])]


def test_parquet_reads_like_jsonl(tmp_path):
    from pyarrow import Table, parquet
    rows = [dict(question=f"q{n}", answer=f"so #### {n}") for n in range(5)]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "p.parquet")
    one, two = (data.read_prompts(f) for f in (str(tmp_path / "p.parquet"), write_lines(tmp_path / "p.jsonl", rows)))
    assert one[2]["place"].endswith("p.parquet: row 3") and two[2]["place"].endswith("p.jsonl:3")
    assert [it | dict(place="") for it in one] == [it | dict(place="") for it in two]
    assert [it["answer"] for it in data.read_prompts(str(tmp_path / "p.parquet"), limit=3)] == ["0", "1", "2"]


def test_papers_data_sets_go_by_name(monkeypatch):
    import datasets
    asked = []
    code = dict(messages=[dict(role="HUMAN", content="h"), dict(role="ASSISTANT", content="a")])
    monkeypatch.setattr(datasets, "load_dataset",
                        lambda *a, **k: asked.append((*a, k["split"], k["streaming"])) or [code, code, code])
    it = data.read_prompts("Ling-Coder-SFT", limit=2)
    assert asked == [("inclusionAI/Ling-Coder-SFT", None, "train", True)]
    assert len(it) == 2 and it[1]["kind"] == "code" and it[1]["prompt"] == "h"


@pytest.mark.parametrize("content, line, words", [
    (b"", None, "is empty"),
    (b'{"prompt": "a"}\n{"prompt": "b"\n', 2, "is not JSON"),
    (b'{"prompt": "a"}\n{"prompt": "b', 2, "is cut off"),
    (b'{"prompt": "a"}\r\n', 1, "CR LF"),
    (b'\xef\xbb\xbf{"prompt": "a"}\n', 1, "byte-order mark"),
    (b'{"prompt": "\xff"}\n', 1, "not UTF-8"),
    (b'{"prompt": "a", "answer": NaN}\n', 1, "NaN"),
    (b'["a"]\n', 1, "not a JSON object"),
    (b'{"promt": "a"}\n', 1, "has no prompt"),
    (b'{"prompt": 3}\n', 1, "prompt is 3"),
    (b'{"prompt": " "}\n', 1, "not a text"),
    (b'{"messages": []}\n', 1, "messages is []"),
    (b'{"messages": [{"role": "user"}]}\n', 1, "not a list of role and content"),
    (b'{"messages": [{"role": "assistant", "content": "a"}]}\n', 1, "has no prompt"),
    (b'{"prompt": "a", "answer": [1]}\n', 1, "answer is [1]"),
    (b'{"prompt": "a", "kind": 3}\n', 1, "kind is 3"),
    (b'{"instruction": "add", "input": [5]}\n', 1, "input is [5]"),
    (b'{"prompt": "a \\ud83d\\ude00"}\n{"prompt": "a", "answer": "\\uD800"}\n', 2, "\\ud800 stands alone"),
    (b'{"prompt": "a", "id": null}\n', 1, "id is null"),
    (b'{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}\n', 2, "stands twice"),
])
def test_read_errors_name_file_and_line(content, line, words, tmp_path, refused):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with refused(f"{path}:{line}: " if line else path, words):
        data.read_prompts(str(path))


def test_missing_and_broken_files_are_named(tmp_path, refused):
    with refused(tmp_path / "no.jsonl", "gsm8k"):
        data.read_prompts(str(tmp_path / "no.jsonl"))
    (tmp_path / "p.parquet").write_bytes(b"not parquet")
    with refused(tmp_path / "p.parquet", "not a parquet file"):
        data.read_prompts(str(tmp_path / "p.parquet"))
    with open(tmp_path / "long.jsonl", "wb") as f:
        f.truncate(50 << 20)
    with refused(f"{tmp_path / 'long.jsonl'}:1: the line is longer than 16 MB"):
        data.read_prompts(str(tmp_path / "long.jsonl"))


def test_empty_parquet_and_a_stream_that_drops_are_named(train, tmp_path, refused, monkeypatch):
    import datasets
    from pyarrow import Table, parquet
    parquet.write_table(Table.from_pydict(dict(prompt=[], response=[])), tmp_path / "e.parquet")
    for read in (data.read_prompts, lambda path: train("run", "", path)):
        with refused(tmp_path / "e.parquet", "is empty"):
            read(str(tmp_path / "e.parquet"))

    def dropping(*_, **__):
        yield dict(question="q")
        raise ConnectionError
    monkeypatch.setattr(datasets, "load_dataset", dropping)
    with refused("gsm8k", "broke off after row 1 (ConnectionError)", "network"):
        data.read_prompts("gsm8k")


@both
def test_prompts_go_through_the_chat_template_or_raw(family, folders):
    tok, it = models.load_tokenizer(folders[family]), data.item("here", dict(prompt="1+2"), 0)
    assert tok.decode(data.prompt_ids("here", tok, it)) == "[user]1+2[assistant]"
    assert tok.decode(data.prompt_ids("here", tok, it, raw=True)) == "1+2"


def good_record() -> dict:
    return dict(id=0, prompt="p", response="ab", response_token_ids=[4, 5, 9, 7], decoding_order=[1, 0, 0, -1],
                method="entropy", prompt_token_ids=[1, 2], entropy=[0.5, 0.2, 0.1, None],
                confidence=[0.9, 0.8, 1.0, None], answer=None, correct=None,
                model=dict(name="m", mask_id=7, vocab_size=10, end_ids=[9]), decode=dict(length=4))


@pytest.mark.parametrize("field, value, words", [
    ("decoding_order", [1, 0, 0], "decoding_order has 3 entries, the response 4 tokens"),
    ("decoding_order", [1, 0, 0, -2], "decoding_order"), ("decoding_order", [1, 0, 9, -1], "decoding_order"),
    ("decoding_order", None, "decoding_order"), ("response_token_ids", [4, 5, 9, 3], "mask token 7"),
    ("response_token_ids", [4, 5, 10, 7], "response_token_ids"),
    ("response_token_ids", [4, 5, 9.0, 7], "response_token_ids"),
    ("entropy", [0.5, 0.2, 0.1], "entropy has 3 entries"), ("entropy", [0.5, 0.2, None, None], "entropy"),
    ("entropy", [-0.5, 0.2, 0.1, None], "entropy"), ("confidence", [0.9, 0.8, 1.5, None], "confidence"),
    ("prompt_token_ids", [1, "2"], "prompt_token_ids"), ("model", dict(name="m"), "model"),
    ("correct", "yes", "correct"), ("method", 3, "method"), ("id", 0, "id 0 stands twice"),
])
def test_unsound_record_is_refused_with_file_and_line(field, value, words, tmp_path, refused):
    path = write_lines(tmp_path / "t.jsonl", [good_record(), good_record() | {"id": 1, field: value}])
    with refused(f"{path}:2: ", words):
        list(data.read_records(path))


def test_records_ours_and_the_authors_are_read(tmp_path, refused):
    theirs = dict(question="1+2", gen_text="3", response_token_ids=[4, 9], decoding_order=[0, 1], method="entropy")
    path = write_lines(tmp_path / "t.jsonl", [good_record(), theirs])
    (_, a), (place, b) = data.read_records(path)
    assert a == good_record() and place == f"{path}:2" and b["messages"] == [dict(role="user", content="1+2")]
    truth = write_lines(tmp_path / "gt.jsonl", [dict(prompt="1+2", output="3")])
    assert next(data.read_records(truth, need_order=False))[1]["response"] == "3"
    with refused(f"{truth}:1: has no decoding_order", "--method sft"):
        list(data.read_records(truth))


def test_data_py_says_what_a_file_holds(tmp_path, monkeypatch, capsys):
    path = write_lines(tmp_path / "t.jsonl", [good_record() | dict(answer="3", correct=True),
                                              good_record() | dict(id=1, correct=False)])
    monkeypatch.setattr(sys, "argv", ["data.py", path])
    runpy.run_path(str(HERE / "data.py"), run_name="__main__")
    assert "2 items, 2 of them trajectories, 1 with a gold answer, 1 judged right, 1 wrong" in capsys.readouterr().out


def test_total_order_breaks_ties_by_entropy_then_position():
    order, entropy = [2, 0, 1, 1, 1, -1, 0], [.1, .5, .3, .2, .3, None, .5]
    assert data.total_order(order, entropy).tolist() == [1, 6, 3, 2, 4, 0]
    assert data.total_order(order).tolist() == [1, 6, 2, 3, 4, 0]
    rng = np.random.default_rng(0)
    for _ in range(50):
        order, entropy = rng.integers(-1, 4, 12), rng.integers(0, 3, 12) / 2
        want = sorted((o, e, i) for i, (o, e) in enumerate(zip(order, entropy, strict=True)) if o >= 0)
        assert data.total_order(order, entropy).tolist() == [i for _, _, i in want]


def test_first_end_needs_everything_before_it():
    assert data.first_end([3, 9, 9], [0, 1, -1], [9]) == 1
    assert data.first_end([3, 9, 9], [-1, 1, 2], [9]) is None
    assert data.first_end([3, 4, 5], [0, 1, 2], [9]) is None
    assert data.first_end([8, 9], [0, 1], [9, 8]) == 0


# ---------------------------------------------------------------- data.py: the verifier

@pytest.mark.parametrize("text, answer, verdict", [
    ("first \\boxed{3}, no: \\boxed{4}", "4", True),
    ("\\boxed{\\frac{1}{2}}", "0.5", True),
    ("\\boxed{\\dfrac{3}{6}}", "\\frac12", True),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{3}", False),
    ("\\boxed{x^2+1}", "1+x^2", True),
    ("\\boxed{\\sqrt{4}}", "2", True),
    ("\\boxed{3} as above #### 4", "3", True),            # the box comes first
    ("3 + 4 = 7\n#### 7", "7", True),
    ("#### 1,234", "1234", True),
    ("#### $18.00", "18", True),
    ("The answer is 3.5.", "3.5", True),
    ("the Answer is: 12\nthank you", "12", True),
    ("The answer is 12.", "13", False),
    ("so we have 3 and then 42", "42", True),
    ("it costs -7 in the end", "-7", True),
    ("no number here", "7", False),
    ("", "7", False),
    ("\\boxed{7", "7", True),                            # never closed: the last number stands
])
def test_verifier_finds_the_final_answer(text, answer, verdict):
    assert data.judge(text, True, answer, "math") is verdict
    assert data.judge(text, False, answer, "math") is False                  # unfinished is wrong whatever it says


@pytest.mark.parametrize("text, verdict", [
    ("def f(x):\n    return x", True), ("```python\nx = 1\n```", True), ("Sure:\n```python\ndef f(:\n```", False),
    ("def f(:", False), ("", False), ("```javascript\nlet x\n```", None), ("```\nx = (\n```", False),
])
def test_code_must_parse(text, verdict):
    assert data.judge(text, True, None, "code") is verdict
    assert data.judge(text, False, None, "code") is False


def test_latex_without_its_package_is_refused_at_once(monkeypatch, tmp_path, refused):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name))
    for answer in ("\\frac{2}{4}", "x^2"):
        with refused("p.jsonl:2", answer[1:], "pip install math-verify"):
            data.read_prompts(write_lines(tmp_path / "p.jsonl", [dict(prompt="a", answer="2"),
                                                                 dict(prompt="b", answer=answer)]))
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert data.judge("#### 7", True, "7", "math") and not data.judge("#### yes", True, "no", "math")


def test_nothing_to_judge_by_is_null():
    assert data.judge("whatever", True, None, None) is None


def test_what_a_model_wrote_is_never_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = "__import__('os').system('touch x')"
    for text in (evil, f"\\boxed{{{evil}}}", f"#### {evil}", f"the answer is {evil}", f"```python\n{evil}\n```"):
        for answer, kind in (("1", None), (evil, None), (None, "code")):
            data.judge(text, True, answer, kind)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- decode.py: against the native decoders

def settings(folder: str, flags: str = "", **more):
    p = argparse.ArgumentParser()
    decode.add_flags(p)
    c, family = models.read_config(folder)
    s, _ = decode.make_settings(p.parse_args(flags.split()), c, family, models.load_tokenizer(folder).end_ids)
    vars(s).update(more)
    return s


def run(net, prompts, s, batch_size: int = 3) -> dict:
    """{key: finished row}; keys are the prompts' places."""
    return {row.key: row for row in decode.decode(net, list(enumerate(prompts)), s, batch_size)}


def prompts_of(family: str, lengths=(9, 4, 15, 6, 11), seed: int = 3) -> list[list[int]]:
    return ragged(family, lengths, seed)[2]


@torch.no_grad()
def native_llada(net, prompt, length, steps, block, mask_id):
    """LLaDA's published loop at temperature 0, one prompt, by the book. The mask token is never a candidate."""
    x, order, step = torch.tensor([prompt + [mask_id] * length]), [-1] * length, 0
    each = steps // (length // block)
    for start in range(0, length, block):
        for i in range(each):
            logits = net(x)[0, len(prompt):].double()                        # (N, V)
            p = logits.softmax(-1)
            logits[:, mask_id] = -math.inf
            token = logits.argmax(-1)
            left = [j for j in range(start, start + block) if order[j] < 0]
            left.sort(key=lambda j: -float(p[j, token[j]]))
            for j in left[:block // each + (i < block % each)]:
                x[0, len(prompt) + j], order[j] = token[j], step
            step += 1
    return x[0, len(prompt):].tolist(), order


@torch.no_grad()
def native_dream(net, prompt, length, steps, mask_id, top_p=1.0):
    """Dream's published loop at temperature 0, by entropy, one prompt. Ties (topk's there): raw entropy, position."""
    def H(p):
        return -sum(q * math.log(q) for q in p if q > 0)

    x, order = torch.tensor([prompt + [mask_id] * length]), [-1] * length
    t = torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        logits = net(x)[0, len(prompt):].double()
        left, rank = [j for j in range(length) if order[j] < 0], {}
        for j in left:
            p = logits[j].softmax(-1).tolist()
            kept, mass = {}, 0.0
            for v in sorted(range(len(p)), key=lambda v: -p[v]):             # the nucleus with the token crossing top_p
                if mass > top_p and kept:
                    break
                kept[v], mass = p[v], mass + p[v]
            rank[j] = (H([q / mass for q in kept.values()]), H(p), j)
        count = int(len(left) * (1 - t[i + 1] / t[i])) if i < steps - 1 else len(left)
        logits[:, mask_id] = -math.inf
        for j in sorted(left, key=rank.get)[:count]:
            x[0, len(prompt) + j], order[j] = logits[j].argmax(), i
    return x[0, len(prompt):].tolist(), order


@pytest.mark.parametrize("length, steps, block", [(24, 24, 24), (24, 10, 12), (24, 12, 8), (20, 20, 4)])
def test_llada_tokens_and_order_equal_the_native_decoders(length, steps, block, folders, nets):
    s = settings(folders["llada"], f"--length {length} --steps {steps} --block {block}", end_ids=[])
    prompts = prompts_of("llada")
    want = [native_llada(nets["llada"], p, length, steps, block, s.mask_id) for p in prompts]
    for rows in (run(nets["llada"], prompts, s), run(nets["llada"], prompts, s, 1)):     # ragged with newcomers; alone
        assert [(rows[n].canvas.tolist(), rows[n].order.tolist()) for n in range(len(prompts))] == want


@pytest.mark.parametrize("length, steps, top_p", [(20, 20, 1.0), (24, 10, 1.0), (24, 1, 1.0), (20, 20, 0.5)])
def test_dream_tokens_and_order_equal_the_native_decoders(length, steps, top_p, folders, nets):
    s = settings(folders["Dream"], f"--length {length} --steps {steps} --temperature 0 --top-p {top_p}", end_ids=[])
    prompts = prompts_of("Dream")
    want = [native_dream(nets["Dream"], p, length, steps, s.mask_id, top_p) for p in prompts]
    for rows in (run(nets["Dream"], prompts, s), run(nets["Dream"], prompts, s, 1)):
        assert [(rows[n].canvas.tolist(), rows[n].order.tolist()) for n in range(len(prompts))] == want
    if length == steps and top_p == 1:                   # method.md: the first step unmasks none, the last one two
        assert sorted(want[0][1]) == [*range(1, steps - 1), steps - 1, steps - 1]


@both
def test_stopping_at_eos_keeps_the_native_text(family, folders, nets):
    net, prompts = nets[family], prompts_of(family)
    s = settings(folders[family], "--length 24 --temperature 0 --top-p 1" + (" --block 8" if family == "llada" else ""))
    native = [native_llada(net, p, 24, 24, 8, s.mask_id) if family == "llada" else
              native_dream(net, p, 24, 24, s.mask_id) for p in prompts]
    stopped = 0
    for n, (tokens, order) in enumerate(native):         # make an EOS of what the native decoder says in mid-answer
        s.end_ids = [tokens[9]]
        end = tokens.index(tokens[9])
        row = run(net, [prompts[n], *prompts], s)[0]
        assert row.canvas[:end + 1].tolist() == tokens[:end + 1]
        assert row.step == max(order[:end + 1]) + 1      # not one forward more than the text needed
        came = row.order >= 0
        assert row.order[came].tolist() == np.array(order)[came].tolist() and (row.canvas[~came] == s.mask_id).all()
        assert row.canvas[came].tolist() == np.array(tokens)[came].tolist()
        stopped += not came.all()
    assert stopped


# ---------------------------------------------------------------- decode.py: scores, schedules, draws

class Table(torch.nn.Module):
    """A model whose logits depend on the canvas position alone: every order can be worked out by hand."""
    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(torch.as_tensor(table, dtype=torch.float32), requires_grad=False)

    def forward(self, ids, real, at):
        _, cols = at.nonzero(as_tuple=True)
        return self.table[cols - (ids.shape[1] - len(self.table))]


def by_hand(table, score: str) -> list[float]:
    """What goes first has the lowest number."""
    out = []
    for row in table.double().softmax(-1).tolist():
        top = sorted(row, reverse=True)
        out.append(dict(entropy=-sum(p * math.log(p) for p in row), confidence=-top[0], margin=top[1] - top[0])[score])
    return out


@pytest.fixture(scope="module")
def table():
    i = ids_of("llada")
    wide = torch.linspace(1, 5, 12).flip(0)[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    z = torch.randn(12, i.vocab, generator=torch.Generator().manual_seed(5)) * wide[:, None]
    z[:, [i.mask, i.eos, i.eot]] = -9.0
    return z


@both
@pytest.mark.parametrize("score", ["entropy", "confidence", "margin"])
def test_each_score_orders_as_by_hand(family, score, folders, table):
    orders = {}
    for flags, sizes in (("", [1] * 12), (" --tokens-per-step 5", [5, 5, 2]), (" --block 4", [1] * 4),
                         (" --block 6 --steps 4", [3, 3])):
        s = settings(folders[family], f"--length 12 --schedule even --temperature 0 --top-p 1 --score {score}{flags}",
                     mask_id=ids_of("llada").mask, end_ids=[])
        row = run(Table(table), [[1, 2, 3]], s)[0]
        want, step, key = [-1] * 12, 0, by_hand(table, score)
        for start in range(0, 12, s.block):
            left = sorted(range(start, start + s.block), key=key.__getitem__)
            for size in sizes:
                for j in left[:size]:
                    want[j] = step
                left, step = left[size:], step + 1
        assert row.order.tolist() == want and row.canvas.tolist() == table.argmax(-1).tolist()
        np.testing.assert_allclose(row.entropy, by_hand(table, "entropy"), atol=1e-5, rtol=0)
        np.testing.assert_allclose(-row.confidence, by_hand(table, "confidence"), atol=1e-5, rtol=0)
        orders[flags] = want
    assert orders[""] != orders[" --block 4"]


def test_random_order_is_a_seeded_permutation(folders, table):
    orders = []
    for seed in (0, 0, 1):
        s = settings(folders["llada"], f"--length 12 --score random --seed {seed}", end_ids=[])
        rows = run(Table(table), [[1], [2, 3]], s)
        orders.append([rows[n].order.tolist() for n in (0, 1)])
        assert all(sorted(o) == list(range(12)) for o in orders[-1])
    assert orders[0] == orders[1] != orders[2] and orders[0][0] != orders[0][1]


@pytest.mark.parametrize("score", ["confidence", "entropy", "margin"])
def test_threshold_unmasks_all_that_are_sure_and_else_the_best_one(score, folders, table):
    p, key = table.softmax(-1).amax(-1).tolist(), by_hand(table, score)
    limit = sorted(p)[8] - 1e-4                          # four of twelve are surer
    s = settings(folders["llada"], f"--length 12 --score {score} --threshold {limit}", end_ids=[])
    rest = sorted((j for j in range(12) if p[j] <= limit), key=key.__getitem__)
    want = [0 if p[j] > limit else 1 + rest.index(j) for j in range(12)]
    assert run(Table(table), [[1, 2]], s)[0].order.tolist() == want and len(rest) == 8


@both
def test_suppressed_eos_is_never_chosen_nor_counted(family, folders):
    i = ids_of(family)
    z = torch.randn(8, i.vocab, generator=torch.Generator().manual_seed(2))
    z[:, i.eos], z[:, i.eot], z[:, i.mask] = 6.0, 5.0, -9.0
    flags = "--length 8 --schedule even --temperature 0 --top-p 1 --score confidence"
    assert (run(Table(z), [[1]], settings(folders[family], flags))[0].canvas == i.eos).sum() >= 1
    row = run(Table(z), [[1]], settings(folders[family], flags + " --suppress-eos"))[0]
    without = z.clone()
    without[:, [i.eos, i.eot]] = -math.inf
    assert row.canvas.tolist() == without.argmax(-1).tolist()
    assert row.order.tolist() == np.argsort(np.argsort(-without.double().softmax(-1).amax(-1).numpy())).tolist()


@both
@pytest.mark.parametrize("flags", ["--temperature 0", "--temperature 1 --top-p 0.5", "--temperature 1 --top-k 1",
                                   "--temperature 1"])
def test_mask_token_is_never_chosen(family, flags, folders):
    """Not even where it holds all of the nucleus: the next best token comes, not whatever has index 0."""
    i = ids_of(family)
    z = torch.full((6, i.vocab), -30.0)
    z[:, i.mask], z[:, 7] = 20.0, 10.0
    assert (run(Table(z), [[1]], settings(folders[family], "--length 6 " + flags))[0].canvas == 7).all()


def test_nucleus_of_a_large_vocabulary_equals_sorting_it_all():
    s, rng = SimpleNamespace(temperature=0.5, top_p=0.9, top_k=0), np.random.default_rng(0)
    tied = torch.cat([torch.zeros(1, 300), torch.full((1, 300), -50.0)])     # the sharp row has 40 equals at its edge
    tied[1, :40], tied[1, 7] = 0.0, 1.0
    alone, beside = decode.trim(tied[1:], s)[0], decode.trim(tied, s)[1]
    assert torch.equal(alone, beside) and (alone > -math.inf).sum() == 40    # whoever shares the batch
    for sharp in (20, 5, 0.1):                           # within the first 64 tokens, in part, nowhere near
        z = torch.from_numpy(sharp * rng.normal(size=(5, 300)))
        for row, got in zip(z / 0.5, decode.trim(z, s), strict=True):
            p, mass, kept = row.softmax(0), 0.0, set()
            for v in p.argsort(descending=True).tolist():
                if mass <= 0.9:
                    kept.add(v)
                mass += p[v].item()
            assert set((got > -math.inf).nonzero()[:, 0].tolist()) == kept and all(got[v] == row[v] for v in kept)


def test_draws_follow_temperature_then_top_p_then_top_k(folders):
    """4000 positions with the same logits: shares of the tokens against the distribution worked out by hand."""
    i, N = ids_of("llada"), 4000
    z = torch.full((N, i.vocab), -math.inf)
    z[:, :6] = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -3.0])
    for flags, kept in (("--temperature 0.7", 6), ("--temperature 0.7 --top-p 0.8", 3),
                        ("--temperature 0.7 --top-p 0.8 --top-k 2", 2), ("--temperature 0.7 --top-k 4", 4)):
        s = settings(folders["llada"], f"--length {N} --steps 1 {flags}", end_ids=[])
        row = run(Table(z), [[1]], s)[0]
        weight = [math.exp(x / 0.7) for x in (2.0, 1.5, 1.0, 0.5, 0.0, -3.0)][:kept]     # 0.8 is crossed by the third
        for v in range(6):
            p = weight[v] / sum(weight) if v < kept else 0.0
            assert abs((row.canvas == v).mean() - p) <= 4.5 * math.sqrt(p * (1 - p) / N), (flags, v)
        full = z[0, :6].softmax(-1)                      # logged: raw, at temperature 1, nothing cut off
        assert np.allclose(row.entropy, -float((full * full.log()).sum()), atol=1e-5)
        assert np.allclose(row.confidence, full.numpy()[row.canvas], atol=1e-6)


@pytest.mark.parametrize("score", ["entropy", "confidence", "random"])
def test_every_step_draws_anew(score, folders):
    """One token a step from equal logits: the shares are equal, and a position's token tells nothing about its step."""
    i, N = ids_of("llada"), 500
    z = torch.full((N, i.vocab), -math.inf)
    z[:, :4] = 0.0
    s = settings(folders["llada"], f"--length {N} --temperature 1 --score {score}", end_ids=[])
    row = run(Table(z), [[1]], s)[0]
    for part in (np.arange(N) % 2 == 0, row.order < N // 2, row.order >= N // 2):
        for v in range(4):
            assert abs((row.canvas[part] == v).mean() - 0.25) <= 4.5 * math.sqrt(0.25 * 0.75 / part.sum())


@both
@pytest.mark.parametrize("flags", [
    "", "--score confidence --temperature 0.8 --top-p 0.9 --top-k 20", "--score random --temperature 1",
    "--score entropy --temperature 0.5 --tokens-per-step 3", "--score margin --temperature 1 --threshold 0.5"])
def test_draws_do_not_depend_on_the_batch(family, flags, folders, nets):
    s = settings(folders[family], "--length 16 " + flags)
    prompts = prompts_of(family)
    want = run(nets[family], prompts, s, 1)
    for batch in (2, 5):
        rows = run(nets[family], prompts, s, batch)
        for n in want:
            assert (rows[n].canvas == want[n].canvas).all() and (rows[n].order == want[n].order).all()
            assert np.abs(rows[n].entropy - want[n].entropy).max() < 1e-4
    alone = {row.key: row for row in decode.decode(nets[family], [(3, prompts[3])], s, 4)}
    assert alone[3].canvas.tolist() == want[3].canvas.tolist()               # other mates, or none
    if s.temperature:
        s.seed = 1
        assert any((row.canvas != want[n].canvas).any() for n, row in run(nets[family], prompts, s, 5).items())


def test_draws_do_not_depend_on_the_chunks(folders):
    s, z = settings(folders["llada"], "--length 8 --temperature 0.9"), torch.randn(6, ids_of("llada").vocab)
    s.score, rows = "confidence", [SimpleNamespace(key=k, step=3) for k in "ab"]
    g, h = (decode.draws(rows, [4, 2], "cpu", s) for _ in "gh")
    parts = [decode.choose(z[i:j], s, h[i:j]) for i, j in ((0, 1), (1, 3), (3, 6))]
    for whole, pieces in zip(decode.choose(z, s, g), zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces))


def test_finished_rows_leave_and_waiting_prompts_take_their_place(folders, nets):
    s, sizes, forwards = settings(folders["llada"], "--length 8", end_ids=[]), [], []
    prompts = list(enumerate(prompts_of("llada")))
    hook = nets["llada"].register_forward_hook(lambda m, x, y: forwards.append(x[0].shape[0]))
    rows = list(decode.decode(nets["llada"], prompts, s, 2, on_step=lambda live, T: sizes.append(len(live))))
    hook.remove()
    assert sorted(r.key for r in rows) == list(range(5)) and sizes == forwards == [2] * 16 + [1] * 8


# ---------------------------------------------------------------- decode.py: the command line

TASKS = [dict(id=f"t{n}", prompt=p, answer=a) for n, (p, a) in enumerate(
    [("1+2", "3"), ("what is 12*12 = ", 144), ("a", None), ("12 - 7 and then some more", "5"), ("b c d", None),
     ("0", "0"), ("9/3 =", "3")])]


def one_thread() -> dict:
    return os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(HERE))


@pytest.fixture
def cli(monkeypatch, folders, tmp_path):
    """cli("traj.jsonl", "--length 8", ...): decode.py's main in this process; gives the records."""
    prompts = write_lines(tmp_path / "prompts.jsonl", TASKS)

    def call(out, flags="", family="llada"):
        monkeypatch.setattr(sys, "argv", call.argv(out, flags, family))
        decode.main()
        return read(tmp_path / out) if out else None
    call.argv = lambda out, flags, family="llada": [
        str(HERE / "decode.py"), "--model", folders[family], "--prompts", prompts,
        *(["--out", str(tmp_path / out)] if out else []), *flags.split()]
    return call


def read(path) -> dict:
    rows = [json.loads(x) for x in Path(path).read_text().splitlines()]
    assert len({r["id"] for r in rows}) == len(rows)
    return {r["id"]: r for r in rows}


def same(a: dict, b: dict):
    """The same records: everything equal, the logged floats to 1e-4 (a batch of another shape rounds otherwise)."""
    assert a.keys() == b.keys()
    for id in a:
        x, y = ({k: v for k, v in r[id].items() if k not in ("entropy", "confidence")} for r in (a, b))
        assert x == y
        for field in ("entropy", "confidence"):
            assert a[id][field] == pytest.approx(b[id][field], abs=1e-4)


@both
@pytest.mark.parametrize("flags", ["--length 16", "--length 16 --tokens-per-step 3",
                                   "--length 16 --temperature 1 --score random --block 4"])
def test_record_replays(family, flags, cli, folders, nets):
    """From all masks, the record's steps give its final ids, and the model at each state gives back what was logged."""
    tok, i = models.load_tokenizer(folders[family]), ids_of(family)
    for id, r in cli("t.jsonl", flags, family).items():
        task = next(t for t in TASKS if t["id"] == id)
        assert set(r) == set(data.FIELDS) and data.check_record("here", r)
        assert r["prompt"] == task["prompt"] and r["answer"] == (task["answer"] and str(task["answer"]))
        assert tok.decode(r["prompt_token_ids"]) == f"[user]{task['prompt']}[assistant]"
        assert r["model"] == dict(name=folders[family], mask_id=i.mask, vocab_size=i.vocab, end_ids=[i.eos, i.eot],
                                  crc32=models.fingerprint(folders[family]))
        assert r["decode"]["length"] == 16 and r["decode"]["seed"] == 0 and r["method"] == r["decode"]["score"]
        order, final, canvas = np.array(r["decoding_order"]), np.array(r["response_token_ids"]), np.full(16, i.mask)
        for step in range(order.max() + 1):
            logits = nets[family](torch.tensor([r["prompt_token_ids"] + canvas.tolist()]))[0, -16:].double()
            logp = logits.log_softmax(-1)
            for j in np.flatnonzero(order == step):
                assert abs(r["entropy"][j] + float((logp[j].exp() * logp[j]).sum())) < 1e-4
                assert abs(r["confidence"][j] - float(logp[j, final[j]].exp())) < 1e-4
                canvas[j] = final[j]
        assert canvas.tolist() == final.tolist()
        end = next((j for j in range(16) if final[j] in (i.eos, i.eot) and (order[:j + 1] >= 0).all()), None)
        text = tok.decode(final[:end][order[:end] >= 0].tolist(), skip_special_tokens=True)
        assert r["response"] == text and (r["correct"] is False or end is not None)


def test_run_again_goes_on_where_it_was_cut(cli, tmp_path, capsys):
    whole = cli("whole.jsonl", "--length 12")
    cli("t.jsonl", "--length 12 --limit 4")
    path = tmp_path / "t.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:len(lines[3]) // 2])     # killed while it wrote the fourth
    capsys.readouterr()
    same(cli("t.jsonl", "--length 12"), whole)
    shown = capsys.readouterr()
    assert path.read_bytes().startswith(b"".join(lines[:3])) and "4 decoded now, 3 were there" in shown.out
    assert re.search(r"decode 7/7 \| [\d,]+ tok/s \| \d+ % valid \| 0m00s left", shown.err)
    before = path.read_bytes()
    same(cli("t.jsonl", "--length 12"), whole)
    assert path.read_bytes() == before
    path.write_bytes(lines[0][:20])                      # not one line is whole
    same(cli("t.jsonl", "--length 12"), whole)


def test_a_last_line_without_its_end_is_kept(cli, tmp_path, refused):
    cli("t.jsonl", "--length 12 --limit 3")
    path = tmp_path / "t.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    for lines in (3, 1):
        path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:lines]))
        before = path.read_bytes()
        with refused("seed 0, now it is 1"):
            cli("t.jsonl", "--length 12 --seed 1")
        assert path.read_bytes() == before
        same(cli("t.jsonl", "--length 12"), cli(f"whole{lines}.jsonl", "--length 12"))
        assert path.read_bytes().startswith(before + b"\n")


def test_weights_or_adapter_replaced_in_place_are_refused(cli, folders, nets, train, tmp_path, refused):
    """The path is the same, what lies there is not: decode.py does not go on, tabom.py neither trains nor resumes."""
    model = Path(shutil.copytree(folders["llada"], tmp_path / "m"))
    net = models.load(str(model))
    lora.wrap(net)
    lora.save(net, tmp_path / "a")
    flags = f"--length 8 --model {model} --limit 4 --suppress-eos"
    cli("t.jsonl", flags)
    cli("with.jsonl", f"{flags} --adapter {tmp_path / 'a'}")
    train("run", "--all --max-steps 2", tmp_path / "t.jsonl")
    lora.save(filled(net, scale=3.0), tmp_path / "a")
    with refused("with.jsonl:1: was decoded with adapter_crc32"):
        cli("with.jsonl", f"{flags} --adapter {tmp_path / 'a'}")
    weights = load_file(model / "model.safetensors")
    save_file({k: 2 * v for k, v in weights.items()}, model / "model.safetensors", metadata={"format": "pt"})
    with refused("t.jsonl:1: was decoded with crc32"):
        cli("t.jsonl", flags)
    with refused("t.jsonl:1: decoded by", "with other weights than", "pass the --model"):
        train("other", "--all --max-steps 2", tmp_path / "t.jsonl")
    moved = shutil.copytree(folders["llada"], tmp_path / "moved")
    train("moved-run", f"--all --max-steps 2 --model {moved}", tmp_path / "t.jsonl")


def test_the_same_id_with_another_prompt_is_refused(cli, tmp_path, refused):
    """Two files without ids of their own number their prompts alike."""
    cli("t.jsonl", "--length 12 --limit 2")
    before = (tmp_path / "t.jsonl").read_bytes()
    write_lines(tmp_path / "prompts.jsonl", [t | dict(prompt="z" * 9) for t in TASKS])
    with refused(f"{tmp_path / 't.jsonl'}:", ": id 't0' is there with another prompt", "another --out"):
        cli("t.jsonl", "--length 12")
    assert (tmp_path / "t.jsonl").read_bytes() == before


def test_writers_share_a_file_and_survive_a_killed_one(tmp_path, refused):
    """Another process has written record 1 and died in the middle of record 2; nobody may lose or double a line."""
    path, head = str(tmp_path / "t.jsonl"), dict(model=good_record()["model"], decode=good_record()["decode"])
    seen, rows = decode.finished(path, head), [good_record() | dict(id=n) for n in range(4)]
    decode.append(path, rows[0], seen)
    with open(path, "a") as f:
        f.write(json.dumps(rows[1]) + "\n" + json.dumps(rows[2])[:30])
    for r in rows[1:3]:
        decode.append(path, r, seen)
    other = decode.finished(path, head)
    decode.append(path, rows[3], other)
    decode.append(path, rows[3], seen)
    assert [r for _, r in data.lines(path)] == rows and list(other.done) == ["0", "1", "2"]
    with open(path, "a") as f:
        f.write(json.dumps(good_record() | dict(id=5, decode=dict(length=9))) + "\n")
    with refused(f"--out {path}: another process decodes into it with other settings"):
        decode.append(path, good_record() | dict(id=6), seen)
    os.truncate(path, 0)                                 # somebody emptied it: not filled up with zeros
    decode.append(path, good_record() | dict(id=4), seen)
    assert list(data.lines(path)) == [(f"{path}:1", good_record() | dict(id=4))]


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
@pytest.mark.parametrize("when", ["at work", "starting"])
def test_a_killed_torchrun_takes_its_ranks_along(when, cli, tmp_path):
    """Else they would go on and write beside those of the next start, or wait for each other till --timeout."""
    write_lines(tmp_path / "prompts.jsonl", [dict(id=n, prompt="abc") for n in range(20_000)])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    job = subprocess.Popen([*launch, *cli.argv("t.jsonl", "--length 64")], env=one_thread(), stderr=subprocess.DEVNULL)
    ranks: list = []
    while len(ranks) < 2 or (when == "at work" and not (tmp_path / "t.jsonl").exists()):
        assert job.poll() is None
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        ranks = [p for p in (Path(f"/proc/{pid}") for pid in children) if b"decode.py" in (p / "cmdline").read_bytes()]
        time.sleep(0.01)
    job.kill()
    job.wait()
    end = time.time() + 60
    while any(p.exists() and "(zombie)" not in (p / "status").read_text() for p in ranks):
        assert time.time() < end, "a rank lives on"
        time.sleep(0.05)
    assert len(ranks) == 2


def test_more_ranks_than_gpus_is_told(monkeypatch, refused):
    for name, value in dict(is_available=True, device_count=2, set_device=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert decode.place_of_work() == (0, 1, "cuda:0", torch.bfloat16)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with refused("--nproc_per_node 3: there are 2 GPUs"):
        decode.place_of_work()


def test_prompts_a_model_cannot_take_are_named(cli, folders, tmp_path, refused):
    strange = Path(shutil.copytree(folders["llada"], tmp_path / "strange"))
    (strange / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with refused("prompts.jsonl:1: the model's chat template", "no system role", "--raw-prompt"):
        cli("t.jsonl", f"--length 8 --model {strange}")
    (strange / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    write_lines(tmp_path / "prompts.jsonl", [dict(prompt="a"), dict(messages=[dict(role="user", content="")])])
    with refused("prompts.jsonl:2: the prompt '' has no tokens"):
        cli("t.jsonl", f"--length 8 --model {strange}")
    edit_config(strange, embedding_size=8, mask_token_id=7, eos_token_id=6)
    write_lines(tmp_path / "prompts.jsonl", [dict(prompt="z" * 9)])
    with refused("prompts.jsonl:1: the tokenizer gives token", "the model has 8"):
        cli("t.jsonl", f"--length 8 --model {strange}")
    assert not (tmp_path / "t.jsonl").exists()


def test_any_batch_size_gives_the_same_records(cli):
    same(cli("a.jsonl", "--length 12 --temperature 0.7 --batch-size 1"),
         cli("b.jsonl", "--length 12 --temperature 0.7 --batch-size 4"))


@pytest.mark.parametrize("flags, words", [
    ("--length 12 --seed 1", "seed 0, now it is 1"), ("--length 8", "length 12, now it is 8"),
    ("--length 12 --raw-prompt", "raw_prompt")])
def test_file_of_other_settings_is_refused(flags, words, cli, tmp_path, refused):
    cli("t.jsonl", "--length 12 --limit 2")
    before = (tmp_path / "t.jsonl").read_bytes()
    with refused(f"{tmp_path / 't.jsonl'}:1", words, "another --out"):
        cli("t.jsonl", flags)
    assert (tmp_path / "t.jsonl").read_bytes() == before


def test_two_ranks_write_the_records_of_one(cli, tmp_path):
    whole = cli("one.jsonl", "--length 12 --temperature 0.7")
    lines = (tmp_path / "one.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "two.jsonl").write_text(lines[2] + lines[5][:30])             # and they go on with a file that was cut
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                    *cli.argv("two.jsonl", "--length 12 --temperature 0.7 --batch-size 1")],    # a shard each
                   env=one_thread(), check=True, capture_output=True, timeout=120)
    same(read(tmp_path / "two.jsonl"), whole)


def ctrl_c(argv: list, ready) -> str:
    """Ctrl-C once ready(pid): exit code 130 and, last on stderr, the one line that it gives."""
    was = signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell's background job ignores it, p too
    p = subprocess.Popen([sys.executable, *map(str, argv)], cwd=HERE, env=one_thread(),
                         stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, was)
    end = time.time() + 60
    while time.time() < end and p.poll() is None and not ready(p.pid):
        time.sleep(0.01)
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=60)
    assert p.returncode == 130 and "Traceback" not in err and err.count("interrupted") == 1, err
    return err.splitlines()[-1]


@pytest.mark.parametrize("script", ["data.py", "lora.py", "decode.py", "tabom.py", "toy.py", "eval.py", "bench.py"])
def test_ctrl_c_while_torch_is_imported_is_one_line(script):
    assert "run the same command again" in ctrl_c(
        [HERE / script], lambda pid: "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text())


def test_ctrl_c_keeps_what_is_finished_and_the_run_goes_on(cli, tmp_path):
    flags, path = "--length 128 --batch-size 1", tmp_path / "t.jsonl"
    said = ctrl_c(cli.argv("t.jsonl", flags), lambda _: path.exists() and path.stat().st_size)
    assert "keeps every finished record; run the same command again" in said
    assert 1 <= len(read(path)) < len(TASKS)
    same(cli("t.jsonl", flags), cli("whole.jsonl", flags))


@pytest.mark.parametrize("content", ['{"id": 1, "prompt": "a"}', '{"id": 1, "prompt": "a"}\n{"id": 2, "prom', "hello",
                                     '{"peft_type": "LORA"}', "{\n}"])
def test_out_that_holds_something_else_stays_untouched(content, cli, tmp_path, refused):
    (tmp_path / "t.jsonl").write_text(content)
    with refused("t.jsonl: is there and holds no trajectories"):
        cli("t.jsonl", "--length 8")
    assert (tmp_path / "t.jsonl").read_text() == content


def test_a_file_cut_anywhere_goes_on_to_the_same_lines(cli, tmp_path):
    flags = "--length 40 --temperature 0.7 --batch-size 2"
    cli("whole.jsonl", flags)
    whole = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    for kept in (0, 1, 5, len(whole) - 1):
        (tmp_path / "t.jsonl").write_text("".join(whole[:kept]) + whole[kept][:50])
        cli("t.jsonl", flags)
        assert sorted((tmp_path / "t.jsonl").read_text().splitlines(keepends=True)) == sorted(whole)


@pytest.mark.parametrize("moment", ["read_prompts", "load"])
def test_ctrl_c_before_the_first_step_is_no_traceback_either(moment, cli, monkeypatch, capfd):
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(decode, moment, interrupted)
    monkeypatch.setattr(os, "_exit", sys.exit)           # the real one would end the tests as well
    with pytest.raises(SystemExit) as e:
        cli("t.jsonl")
    assert e.value.code == 130 and "interrupted" in capfd.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback(cli, tmp_path):
    """... | head: standard output is closed before we write to it."""
    for argv in ([HERE / "data.py", tmp_path / "prompts.jsonl"], cli.argv("t.jsonl", "--length 8"),
                 cli.argv(None, "--length 8 --show")):
        job = subprocess.Popen([sys.executable, *argv], env=one_thread(), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
        job.stdout.close()
        said = job.stderr.read()
        assert job.wait() == 130 and "interrupted; " in said and "Traceback" not in said, said
    assert len(read(tmp_path / "t.jsonl")) == len(TASKS)


@pytest.mark.parametrize("flags, words", [
    ("--length 10 --block 3", "multiple of the block"), ("--length 0", "--length 0"),
    ("--length 8 --steps 9", "--steps 9"), ("--length 8 --block 2 --steps 3", "--steps 3"),
    ("--length 8 --steps 4 --tokens-per-step 2", "one follows from the other"),
    ("--length 8 --tokens-per-step 9", "--tokens-per-step 9"),
    ("--length 8 --tokens-per-step -1", "--tokens-per-step -1"),
    ("--schedule dream --block 8", "--schedule dream"), ("--schedule dream --threshold 0.5", "--schedule dream"),
    ("--threshold 1.5", "--threshold 1.5"), ("--temperature -1", "--temperature -1"),
    ("--temperature nan", "--temperature nan"), ("--temperature inf", "--temperature inf"),
    ("--top-p 0", "--top-p 0"), ("--top-k -1", "--top-k -1"),
    ("--batch-size 0", "--batch-size 0"), ("--limit -1", "--limit -1"),
    ("--length 500", "do not fit the model's 512 positions"), ("--prompts nowhere.jsonl", "nowhere.jsonl"),
    ("--model nowhere", "nowhere"), ("--out no/such/t.jsonl", "its folder is not there"), ("--out .", "is a folder"),
    ("--adapter nowhere", "nowhere"),
])
def test_wrong_settings_end_with_one_line_before_anything_is_written(flags, words, cli, tmp_path, monkeypatch, refused):
    monkeypatch.setattr(decode, "load", None)            # all is known before any weight is read
    monkeypatch.chdir(tmp_path)
    with refused(words):
        cli("t.jsonl", flags)
    assert [f.name for f in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_no_out_and_no_show_asks_for_one(cli, refused):
    with refused("--out", "--show"):
        cli(None)


def test_show_prints_one_decoding_in_colour(cli, capsys):
    cli(None, "--show --length 8 --suppress-eos")
    out = capsys.readouterr().out
    assert "1+2" in out and len(re.findall(r"\033\[48;5;\d+;38;5;\d+m", out)) == 8 and "\033[0m" in out
    shades = [int(x) for x in re.findall(r"48;5;(\d+)", out)]
    assert 231 in shades and 22 in shades                # the first token is the palest, the last the darkest


def test_adapter_and_merged_model_decode_alike(cli, folders, tmp_path, nets):
    net = models.load(folders["llada"])
    lora.wrap(net, r=4)
    lora.save(filled(net), tmp_path / "adapter", folders["llada"])
    lora.merge_checkpoint(folders["llada"], str(tmp_path / "adapter"), str(tmp_path / "merged"))
    a = cli("a.jsonl", f"--length 12 --adapter {tmp_path / 'adapter'}")
    b, base = cli("b.jsonl", f"--length 12 --model {tmp_path / 'merged'}"), cli("c.jsonl", "--length 12")
    tokens = [{id: (r["response_token_ids"], r["decoding_order"]) for id, r in x.items()} for x in (a, b, base)]
    assert tokens[0] == tokens[1] != tokens[2] and a["t0"]["decode"]["adapter"] == str(tmp_path / "adapter")


# ---------------------------------------------------------------- trajectories to train on

SHAPES = [    # canvas, tokens a step, first EOS, positions never decoded, prompt: ragged on purpose
    dict(length=12, k=1, end=11, prompt=6), dict(length=9, k=2, end=5, prompt=3), dict(length=14, k=3, end=9, prompt=8),
    dict(length=3, k=1, end=2, prompt=4), dict(length=10, k=1, end=4, undone=3), dict(length=8, k=8, end=6, prompt=2)]


def trajectory(id, length: int, k: int = 1, end: int = 0, undone: int = 0, prompt: int = 5, family="llada") -> dict:
    """A record as decode.py writes it, of random tokens: k a step, EOS from `end` on, the last `undone` still masks."""
    i, rng = ids_of(family), np.random.default_rng([*str(id).encode()])
    ids, order = rng.integers(0, len(CHARS), length), np.full(length, -1)
    ids[end:], ids[length - undone:] = i.eos, i.mask
    order[:length - undone] = rng.permutation(length - undone) // k
    coarse = rng.integers(0, 4, length) / 2              # so that there are ties
    H = [None if s < 0 else float(h) for s, h in zip(order, coarse, strict=True)]
    text = "".join(CHARS[t] for t in rng.integers(0, len(CHARS), prompt))
    return dict(id=id, prompt=text, response="".join(CHARS[t] for t in ids[:end]), response_token_ids=ids.tolist(),
                decoding_order=order.tolist(), method="entropy", prompt_token_ids=[CHARS.index(x) for x in text],
                entropy=H, confidence=[None if h is None else 0.5 for h in H], answer=None, correct=None, decode={},
                model=dict(name="", mask_id=i.mask, vocab_size=i.vocab))


def settings_of(flags: str = "") -> argparse.Namespace:
    """tabom.py's own reading of a command line."""
    argv, sys.argv = sys.argv, ["tabom.py", "--data", "-", "--all", *flags.split()]
    try:
        return tabom.flags()
    finally:
        sys.argv = argv


def read_shapes(folder: str, a, tmp_path, family: str = "llada"):
    """The trajectories of SHAPES as they are in the file, and as tabom.py reads them."""
    raws = [trajectory(n, family=family, **shape) for n, shape in enumerate(SHAPES)]
    a.data = write_lines(tmp_path / "t.jsonl", [r | dict(model=r["model"] | dict(name=folder)) for r in raws])
    records = tabom.read_data(a, models.read_config(folder)[0], models.load_tokenizer(folder), 0)
    assert [r.id for r in records] == [r["id"] for r in raws]
    return raws, records


def views_of(records: list, a, seed: int = 0) -> list[tuple]:
    return [(r, *tabom.view(r, a.method, a.window, np.random.default_rng([seed, n]))) for n, r in enumerate(records)]


def losses(net, views: list, a, family: str = "llada"):
    """(B,) as the loop of main computes them: exact one by one, the rest as one batch."""
    batches = [[v] for v in views] if a.rank_context == "exact" else [views]
    return torch.cat([tabom.batch_loss(net, b, a, ids_of(family).mask, "cpu")[0] for b in batches])


def plain_order(raw: dict, tail: str = "keep", ends=()) -> list[int]:
    """Positions that may be targets, in the total order."""
    ids, order = raw["response_token_ids"], raw["decoding_order"]
    last = next((j + 1 for j in range(len(ids)) if tail == "drop" and ids[j] in ends), len(ids))
    return [j for _, _, j in sorted((order[j], raw["entropy"][j], j) for j in range(last) if order[j] >= 0)]


def plain_cuts(raw: dict, targets: list[int], need: int) -> list[int]:
    """Step boundaries that leave at least `need` targets."""
    steps = [raw["decoding_order"][j] for j in targets]
    return sorted({u for u in steps if sum(s >= u for s in steps) >= need})


def replayed(order: list[int], before: int) -> list[bool]:
    """Unmasks step after step, as decode.py does, and stops just before step `before`."""
    seen = [False] * len(order)
    for step in range(before):
        for j, s in enumerate(order):
            if s == step:
                seen[j] = True
    return seen


def adapted(folder: str):
    """A model with something in its adapter, and the adapter's parameters."""
    net = models.load(folder)
    params = lora.wrap(net, r=4)
    return filled(net).train(), params


@pytest.fixture
def wide(monkeypatch, folders):
    """wide(family): a model with an adapter, and its base alone, wholly in float64, norms and RoPE too."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return lambda family="llada": (adapted(folders[family])[0].double(), models.load(folders[family]).double())


# ---------------------------------------------------------------- the losses against plain loops

def plain_stats(z: list[float], x: int) -> tuple[float, float]:
    """Cross-entropy of x and the entropy, of one row of logits."""
    top = max(z)
    total = sum(math.exp(v - top) for v in z)
    p = [math.exp(v - top) / total for v in z]
    return -(z[x] - top - math.log(total)), -sum(q * math.log(q) for q in p if q > 0)


def forward(net, raw: dict, seen, mask_id: int) -> list[list[float]]:
    """(N, V) logits of one unpadded state, by the model's other path: neither `real` nor `at`."""
    ids = [t if s else mask_id for t, s in zip(raw["response_token_ids"], seen, strict=True)]
    with torch.no_grad():
        return net(torch.tensor([raw["prompt_token_ids"] + ids]))[0, -len(ids):].tolist()


def plain_t3d(rows, ref, x, targets) -> float:
    sides = []                                           # l(x) - l_ref(x), of the truth and of what the base would say
    for say in (lambda j: x[j], lambda j: max(range(len(ref[j])), key=lambda v: ref[j][v])):
        gains = [plain_stats(ref[j], say(j))[0] - plain_stats(rows[j], say(j))[0] for j in targets]
        sides.append(sum(gains) / len(gains))
    ce, path = [plain_stats(rows[j], x[j])[0] for j in targets], 0
    for s in range(1, len(ce) + 1):
        path += sum(ce[:s]) / s / len(ce)
    sigmoid = lambda v: 1 / (1 + math.exp(-v))
    return -math.log(sigmoid(0.1 * sides[0])) - 0.5 * math.log(1 - sigmoid(0.1 * sides[1])) + 0.2 * path


def plain_loss(net, base, raw: dict, seen, targets, a, mask_id: int) -> float:
    x, order, rows = raw["response_token_ids"], raw["decoding_order"], forward(net, raw, seen, mask_id)
    if a.method == "t3d":
        return plain_t3d(rows, forward(base, raw, seen, mask_id), x, targets)
    ce = sum(plain_stats(rows[j], x[j])[0] for j in targets) / len(targets)
    if a.method != "tabom":
        return ce
    h = []
    for j in targets:                                    # exact: a forward of its own for each token of the window
        at = rows if a.rank_context == "start" else forward(net, raw, replayed(order, order[j]), mask_id)
        h.append(plain_stats(at[j], x[j])[1])
    W, hinge = len(h), 0
    for r in range(W):
        for s in range(r + 1, W):
            hinge += max(0, h[r] - h[s] + a.gamma)
    return ce + (a.lam * 2 / (W * (W - 1)) * hinge if W > 1 else 0)


@both
@pytest.mark.parametrize("flags", [
    "--window 4", "--window 2 --lam 2 --gamma 0.7 --tail drop", "--window 0", "--window 0 --tail drop", "--window 32",
    "--lam 0 --window 5", "--method sft", "--method sft --tail drop", "--method dinfer", "--method dinfer --tail drop",
    "--method t3d", "--method t3d --tail drop", "--window 4 --rank-context exact", "--window 0 --rank-context exact",
    "--window 5 --rank-context exact --exact-chunk 2 --tail drop"])
def test_loss_equals_plain_loops(family, flags, wide, folders, tmp_path):
    a, mask_id, ends = settings_of(flags), ids_of(family).mask, set()
    raws, records = read_shapes(folders[family], a, tmp_path, family)
    net, base = wide(family)
    for seed in range(3):
        views = views_of(records, a, seed)
        for raw, (r, seen, targets), loss in zip(raws, views, losses(net, views, a, family).tolist(), strict=True):
            assert loss == pytest.approx(plain_loss(net, base, raw, seen, targets, a, mask_id), rel=1e-9)
            ends |= {"start"} if not seen.any() else set()
            ends |= {"end"} if targets[-1] == r.rank[-1] else set()
    assert ends == {"start", "end"}                      # windows at both ends of a trajectory


def test_logged_parts_equal_plain_counts(wide, folders, tmp_path):
    """ce, rank, pairs in order, pairs and tokens fed, as batch_loss hands them to the log."""
    a, mask_id = settings_of("--window 4 --gamma 0.3 --lam 2"), ids_of("llada").mask
    (raws, records), (net, _) = read_shapes(folders["llada"], a, tmp_path), wide()
    views = views_of(records, a)
    loss, ce, rank, right, pairs, tokens = tabom.batch_loss(net, views, a, mask_id, "cpu")
    assert tokens == sum(len(r["prompt"]) + len(r["response_token_ids"]) for r in raws)
    assert torch.allclose(loss, ce + 2 * rank)
    for n, (raw, (_, seen, targets)) in enumerate(zip(raws, views, strict=True)):
        rows = forward(net, raw, seen, mask_id)
        stats = [plain_stats(rows[j], raw["response_token_ids"][j]) for j in targets]
        inside = [(r, s) for r in range(len(stats)) for s in range(r + 1, len(stats))]
        assert ce[n].item() == pytest.approx(sum(s[0] for s in stats) / len(stats))
        assert pairs[n] == len(inside) and right[n] == sum(stats[r][1] < stats[s][1] for r, s in inside)


def test_head_is_fed_the_window_alone(folders, tmp_path):
    a, net, fed = settings_of("--window 4"), models.load(folders["llada"]), []
    _, records = read_shapes(folders["llada"], a, tmp_path)
    models.part(net, net.family["head"]).register_forward_hook(lambda _m, x, _y: fed.append(x[0].shape[0]))
    losses(net, views_of(records, a), a)
    assert fed == [sum(min(4, len(r.rank)) for r in records)]


# ---------------------------------------------------------------- gradients against finite differences, extremes

def loss_of(z, x0, *rest):
    return tabom.tabom_loss(*tabom.TokenStats.apply(z, x0), *rest)


def slots(rng, sizes: list[int]):
    """Random slot (B, W) and valid (B, W) for windows of these sizes."""
    slot, n = torch.zeros(len(sizes), max(sizes), dtype=torch.long), 0
    for b, size in enumerate(sizes):
        slot[b, :size] = n + torch.from_numpy(rng.permutation(size))
        n += size
    return slot, torch.arange(max(sizes))[None] < torch.tensor(sizes)[:, None]


def test_gradients_of_the_losses_equal_finite_differences():
    rng, check = np.random.default_rng(0), torch.autograd.gradcheck
    z, ref = (torch.from_numpy(rng.normal(size=(8, 7)) * 2) for _ in range(2))
    x0, (slot, valid) = torch.from_numpy(rng.integers(0, 7, 8)), slots(rng, [4, 1, 3])
    other = torch.from_numpy(rng.integers(0, 8, tuple(slot.shape)))
    z.requires_grad_()
    assert check(lambda z: tabom.TokenStats.apply(z, x0), z)
    for lam, gamma in ((1.0, 0.2), (0.0, 0.2), (2.0, 5.0)):                  # 5: every pair is inside the margin
        assert check(lambda z: loss_of(z, x0, slot, valid, lam, gamma)[0], z)
    assert check(lambda z: loss_of(z, x0, slot, valid, 1.0, 0.3, other)[0], z)
    assert check(lambda z: tabom.t3d_loss(z, ref, x0, slot, valid)[0], z)


@pytest.mark.parametrize("n, V", [(20, 50), (5, 400_000)])                  # 400,000: two rows a slice
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_token_stats_equal_torch_in_every_type(dtype, n, V):
    """fp32 at least inside: against torch's own Categorical, in float64 from the same numbers."""
    g = torch.Generator().manual_seed(0)
    z, x0 = (torch.randn(n, V, generator=g) * 4).to(dtype).requires_grad_(), torch.randint(0, V, (n,), generator=g)
    y = z.detach().double().requires_grad_()
    ce, h = tabom.TokenStats.apply(z, x0)
    categorical = torch.distributions.Categorical(logits=y)
    want = -categorical.log_prob(x0), categorical.entropy()
    assert ce.dtype == h.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    atol = 1e-5 if V < 1000 or dtype == torch.float64 else 5e-4             # fp32's own sum over so many
    assert torch.allclose(ce.double(), want[0], atol=atol) and torch.allclose(h.double(), want[1], atol=atol)
    (2 * ce.sum() - 3 * h.sum()).backward()
    (2 * want[0].sum() - 3 * want[1].sum()).backward()
    assert z.grad.dtype == dtype
    assert torch.allclose(z.grad.double(), y.grad, atol=1e-2 if dtype == torch.bfloat16 else atol)


@pytest.mark.parametrize("n, V", [(1, 9), (2, 9), (7, 152_064), (13, 152_064), (12, 152_064), (3, 3_000_000)])
def test_equal_rows_stay_equal_in_slices(n, V):
    """Torch adds up one row alone, on several threads, in another order than rows of a matrix."""
    rows, threads = torch.randn(V, generator=torch.Generator().manual_seed(0)).expand(n, V), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = [k.indices(n)[:2] for k in decode.slices(rows)]
        assert [i for a, b in got for i in range(a, b)] == list(range(n)) and all(b - a > 1 for a, b in got[n < 2:])
        h = decode.chunked(decode.unsure, rows, SimpleNamespace(score="entropy", clean=True, suppress_eos=False))[0]
        assert len(set(h.tolist())) == 1
        assert len(set(tabom.TokenStats.apply(rows, torch.zeros(n, dtype=torch.long))[1].tolist())) == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("flags", [
    "--window 4", "--window 4 --lam 0", "--window 0 --gamma 0.5", "--window 4 --rank-context exact", "--method sft",
    "--window 6 --rank-context exact --exact-chunk 2", "--method dinfer", "--method t3d"])
def test_gradient_through_the_model_equals_a_finite_difference(flags, wide, folders, tmp_path):
    a, g = settings_of(flags), torch.Generator().manual_seed(0)
    (_, records), (net, _) = read_shapes(folders["llada"], a, tmp_path), wide()
    views, params = views_of(records, a), [p for p in net.parameters() if p.requires_grad]
    here, way = [p.detach().clone() for p in params], [torch.randn(p.shape, generator=g).double() for p in params]

    def loss(eps):
        with torch.no_grad():
            for p, x, d in zip(params, here, way, strict=True):
                p.copy_(x + eps * d)
        return losses(net, views, a).sum()
    loss(0).backward()
    slope = sum((p.grad * d).sum().item() for p, d in zip(params, way, strict=True))
    assert slope == pytest.approx((loss(1e-6).item() - loss(-1e-6).item()) / 2e-6, rel=1e-5)


def test_extreme_logits_give_finite_losses_and_gradients():
    V, inf = 40, math.inf
    rows = torch.zeros(6, V)                             # uniform, one-hot, a steep ladder, cut by one, cut to 7, sure
    rows[1, 3], rows[2], rows[3, 5], rows[4, 7:], rows[5, 2] = 1e4, torch.linspace(-1e4, 1e4, V), -inf, -inf, 80.0
    z, x0 = rows.clone().requires_grad_(), torch.tensor([0, 3, V - 1, 0, 6, 2])
    ce, h = tabom.TokenStats.apply(z, x0)
    for got in (ce, h):
        assert got.tolist() == pytest.approx([math.log(V), 0, 0, math.log(V - 1), math.log(7), 0], abs=1e-5)
    slot, valid = torch.tensor([[1, 0, 2], [5, 4, 3]]), torch.ones(2, 3, dtype=torch.bool)
    loss = loss_of(z, x0, slot, valid, 1.0, 0.2)[0]
    loss.sum().backward()
    assert loss.isfinite().all() and z.grad.isfinite().all() and z.grad[3, 5] == 0 and (z.grad[4, 7:] == 0).all()
    x0[2], z.grad = 0, None                              # a target 2e4 nats away: a large loss, not an infinite one
    loss = loss_of(z, x0, slot, valid, 1.0, 0.2)[0]
    t3d = tabom.t3d_loss(z, rows.roll(1, 0), x0, slot[:1], valid[:1])[0]     # no -inf in these rows of the base
    (loss.sum() + t3d.sum()).backward()
    assert loss[0].item() == pytest.approx((2e4 + math.log(V)) / 3 + (0.2 + 0.2 + math.log(V)) / 3, rel=1e-6)
    assert loss.isfinite().all() and t3d.isfinite().all() and z.grad.isfinite().all()


def test_a_broken_sample_does_not_touch_its_neighbours():
    """Samples of other sizes share the batch's arrays; the loss names the broken one only if it alone is not finite."""
    rng = np.random.default_rng(0)
    z, x0 = torch.from_numpy(rng.normal(size=(7, 9))), torch.from_numpy(rng.integers(0, 9, 7))
    slot, valid = slots(rng, [4, 1, 2])
    both_of = lambda y: [loss_of(y, x0, slot, valid, 1.0, 0.2)[0], tabom.t3d_loss(y, z, x0, slot, valid)[0]]
    for value in (math.nan, -math.inf):
        y = z.clone()
        y[0, x0[0]] = value
        for got, want in zip(both_of(y), both_of(z), strict=True):
            assert not got[0].isfinite() and torch.equal(got[1:], want[1:])


# ---------------------------------------------------------------- what the model sees

@pytest.mark.parametrize("tail", ["keep", "drop"])
def test_view_is_a_state_of_the_replay_and_the_next_tokens_in_order(tail, folders, tmp_path):
    a, i = settings_of(f"--tail {tail}"), ids_of("llada")
    for raw, r in zip(*read_shapes(folders["llada"], a, tmp_path), strict=True):
        order, step = plain_order(raw, tail, (i.eos, i.eot)), raw["decoding_order"]
        for window in (1, 2, 4, 5, 32, 0):
            cuts = plain_cuts(raw, order, min(window or 2, len(order)))
            for seed in range(20):
                seen, targets = tabom.view(r, "tabom", window, np.random.default_rng(seed))
                left = [j for j in order if not seen[j]]
                assert targets.tolist() == (left[:window] if window else left)
                assert step[targets[0]] in cuts and seen.tolist() == replayed(step, step[targets[0]])
        for seed in range(40):
            seen, targets = tabom.view(r, "t3d", 4, np.random.default_rng(seed))
            assert seen.tolist() == replayed(step, step[targets[0]])
            assert targets.tolist() == [j for j in order if not seen[j]]
            seen, targets = tabom.view(r, "dinfer", 4, np.random.default_rng(seed))
            assert seen.tolist() == replayed(step, step[targets[0]])
            assert targets.tolist() == [j for j in order if step[targets[0]] <= step[j] <= step[targets[-1]]]
            seen, targets = tabom.view(r, "sft", 4, np.random.default_rng(seed))
            assert targets.tolist() == [j for j in order if not seen[j]] and len(targets)
            assert not any(seen[j] for j in range(len(seen)) if step[j] < 0)


def test_cuts_are_uniform_over_the_boundaries(folders, tmp_path):
    draws, a = 3000, settings_of()

    def flat(counts: dict, weight=lambda key: 1):        # chi-square: mean k - 1, deviation sqrt(2 (k - 1))
        k, unit = len(counts), draws / sum(map(weight, counts))
        chi = sum((n - unit * weight(key)) ** 2 / (unit * weight(key)) for key, n in counts.items())
        return chi < k - 1 + 5 * math.sqrt(2 * (k - 1)) + 1e-9

    for raw, r in list(zip(*read_shapes(folders["llada"], a, tmp_path), strict=True))[:3]:
        rng, step, N = np.random.default_rng(0), raw["decoding_order"], len(raw["decoding_order"])
        for method, window in (("tabom", 4), ("tabom", 0), ("t3d", 4)):
            need = 1 if method == "t3d" else window or 2
            counts = dict.fromkeys(plain_cuts(raw, r.rank.tolist(), need), 0)
            for _ in range(draws):
                counts[step[tabom.view(r, method, window, rng)[1][0]]] += 1
            assert flat(counts), (method, window, counts)
        counts = {(u, v): 0 for v in range(max(step) + 2) for u in range(v)}             # dinfer: any two times alike
        for _ in range(draws):
            targets = tabom.view(r, "dinfer", 4, rng)[1]
            counts[step[targets[0]], step[targets[-1]] + 1] += 1
        assert flat(counts), counts
        counts = dict.fromkeys(range(1, N + 1), 0)       # sft: t ~ U(0, 1) makes any number of masks alike; 0 is 1
        for _ in range(draws):
            counts[len(tabom.view(r, "sft", 4, rng)[1])] += 1
        assert flat(counts, lambda n: 1 + (n == 1)), counts


def test_no_token_of_the_future_reaches_the_model(folders, tmp_path):
    """Another token anywhere outside U_t leaves the ids that the model is fed as they were; one inside U_t does not."""
    i = ids_of("llada")
    for r in read_shapes(folders["llada"], settings_of(), tmp_path)[1]:
        for method in ("tabom", "sft", "dinfer", "t3d"):
            for seed in range(4):
                seen, targets = tabom.view(r, method, 4, np.random.default_rng(seed))
                rows = [(r.prompt, r.ids, seen, targets)]
                if method == "tabom":                    # exact: row k is the replay just before its step
                    rows = tabom.exact_rows(r, seen, targets)[0]
                    steps = sorted(set(r.order[targets].tolist()))
                    assert [v.tolist() for _, _, v, _ in rows] == [replayed(r.order.tolist(), s) for s in steps]
                for prompt, x, visible, wanted in rows:
                    ids, _, at = tabom.collate([(prompt, x, visible, wanted)], i.mask, "cpu")[:3]
                    assert not set(wanted) & set(np.flatnonzero(visible))    # what is asked for is never shown
                    assert at[0, len(prompt):].nonzero()[:, 0].tolist() == sorted(wanted.tolist())
                    for j in range(len(x)):
                        y = x.copy()
                        y[j] = (y[j] + 1) % len(CHARS)
                        moved = tabom.collate([(prompt, y, visible, wanted)], i.mask, "cpu")[0]
                        assert torch.equal(moved, ids) == (not visible[j])


def test_collate_slots_equal_a_plain_loop():
    rng, mask_id = np.random.default_rng(0), 99
    rows = [(rng.integers(0, 50, P), rng.integers(0, 50, N), rng.random(N) < 0.5, rng.permutation(N)[:W])
            for P, N, W in ((3, 7, 4), (6, 5, 1), (1, 9, 9), (4, 2, 2))]
    ids, real, at, x0, slot, valid = tabom.collate(rows, mask_id, "cpu")
    T = max(len(p) + len(x) for p, x, _, _ in rows)
    flat = []                                            # (row, column) of each logit, in reading order
    for b in range(len(rows)):
        for t in range(T):
            if at[b, t]:
                flat.append((b, t))
    for b, (prompt, x, visible, targets) in enumerate(rows):
        pad = T - len(prompt) - len(x)
        assert real[b].tolist() == [t >= pad for t in range(T)]
        assert ids[b, pad:].tolist() == [*prompt, *(t if v else mask_id for t, v in zip(x, visible, strict=True))]
        assert valid[b].tolist() == [w < len(targets) for w in range(9)]
        for w, target in enumerate(targets):
            assert flat[slot[b, w]] == (b, pad + len(prompt) + target) and x0[slot[b, w]] == x[target]
    assert len(flat) == len(x0) == sum(len(t) for *_, t in rows)


# ---------------------------------------------------------------- exact and t3d

class Placed(torch.nn.Module):
    """Ignores its context, but not the position: logits off a table."""
    def __init__(self, length: int, vocab: int):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(length, vocab, generator=torch.Generator().manual_seed(0)))

    def forward(self, ids, real, at):
        rows, cols = at.nonzero(as_tuple=True)
        return self.table[cols - (~real).sum(1)[rows]]


def test_exact_equals_start_where_it_must(folders, tmp_path):
    """With one token there is no pair; without context every state is the same state. Else they differ."""
    start, exact, i = settings_of(), settings_of("--rank-context exact"), ids_of("llada")
    net, deaf, table = models.load(folders["llada"]), models.load(folders["llada"]), Placed(40, i.vocab)
    for block in models.part(deaf, deaf.family["blocks"]):                   # nobody hears the other positions
        models.part(block, deaf.family["block"]["o"]).weight.data.zero_()
    _, records = read_shapes(folders["llada"], start, tmp_path)
    for module, window, same in ((net, 1, True), (deaf, 6, True), (deaf, 0, True), (table, 6, True), (net, 6, False)):
        start.window = exact.window = window
        views, gaps = views_of(records, start), []
        for v in views:
            (x, *one), (y, *two) = (tabom.batch_loss(module, [v], a, i.mask, "cpu") for a in (start, exact))
            gaps.append((x - y).abs().item() + (one[1] - two[1]).abs().item())
            if module is table:
                assert torch.equal(one[2], two[2]) and torch.equal(one[3], two[3])
        assert max(gaps) < 1e-5 if same else max(gaps) > 0.01


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_exact_in_chunks_equals_exact_whole(chunk, folders, tmp_path):
    whole, parts = (settings_of(f"--window 6 --rank-context exact {x}") for x in ("", f"--exact-chunk {chunk}"))
    (_, records), (net, params), fed = read_shapes(folders["llada"], whole, tmp_path), adapted(folders["llada"]), []
    net.register_forward_pre_hook(lambda _m, x: fed.append(len(x[0])))
    for view in views_of(records, whole):
        got = []
        for a in (whole, parts):
            fed.clear()
            loss, *rest = tabom.batch_loss(net, [view], a, ids_of("llada").mask, "cpu")
            loss.sum().backward()
            states = len(set(view[0].order[view[2]]))    # memory is bounded, and nothing is computed twice
            assert fed == ([states] if states <= a.exact_chunk else [1] * states)
            got.append([loss, *rest, *(p.grad.clone() for p in params)])
            net.zero_grad()
        assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(*got, strict=True))


def test_t3d_reference_is_the_base(folders, tmp_path, monkeypatch):
    a, mask_id, seen, real = settings_of("--method t3d"), ids_of("llada").mask, {}, tabom.t3d_loss
    (_, records), (net, _) = read_shapes(folders["llada"], a, tmp_path), adapted(folders["llada"])
    monkeypatch.setattr(tabom, "t3d_loss", lambda z, ref, *x: seen.update(z=z, ref=ref) or real(z, ref, *x))
    views = views_of(records, a)
    losses(net, views, a)
    inputs = tabom.collate([(r.prompt, r.ids, v, t) for r, v, t in views], mask_id, "cpu")[:3]
    assert torch.equal(seen["ref"], models.load(folders["llada"])(*inputs)) and not seen["ref"].requires_grad
    assert seen["z"].requires_grad and (seen["z"] - seen["ref"]).abs().max() > 0.1
    assert torch.equal(net(*inputs), seen["z"])          # and the adapter is on again


# ---------------------------------------------------------------- schedule and data order

def test_learning_rate_warms_up_and_follows_the_cosine():
    total, peak, warmup = 200, 2e-5, 50
    curve = [tabom.learning_rate(s, total, peak, warmup) for s in range(total)]
    assert curve[0] == peak / 50 and curve[24] == pytest.approx(peak / 2) and curve[49] == curve[50] == peak
    assert curve[125] == pytest.approx(peak / 2) and curve[100] == pytest.approx(peak * math.cos(math.pi / 6) ** 2)
    assert curve[:50] == sorted(curve[:50]) and curve[50:] == sorted(curve[50:], reverse=True)
    assert tabom.learning_rate(total, total, peak, warmup) == pytest.approx(0)
    assert tabom.learning_rate(0, 10, 1.0, 0) == 1.0 and tabom.learning_rate(9, 10, 1.0, 50) == 0.2     # none, too long


def test_epoch_has_every_sample_once_and_is_of_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(10, 400, 1003)
    for size in (1, 8, 32):
        batches = tabom.epoch_batches(lengths, size, 7, 3)
        assert sorted(np.concatenate(batches)) == list(range(1003)) and len(batches) == -(-1003 // size)
        assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1)
        np.random.seed(1)                                # noqa: NPY002   global generators are not read
        random.seed(1)
        torch.manual_seed(1)
        again = tabom.epoch_batches(lengths, size, 7, 3)
        assert all((x == y).all() for x, y in zip(batches, again, strict=True))
        for seed, epoch in ((7, 4), (8, 3)):
            assert (np.concatenate(tabom.epoch_batches(lengths, size, seed, epoch)) != np.concatenate(batches)).any()


def test_like_lengths_share_a_batch_and_batches_are_mixed():
    lengths = np.random.default_rng(0).integers(10, 400, 1003)
    waste = lambda batches: sum(len(b) * lengths[b].max() - lengths[b].sum() for b in batches) / lengths.sum()
    batches = tabom.epoch_batches(lengths, 8, 7, 3)
    assert waste(batches) < 0.1 * waste(np.array_split(np.random.default_rng(0).permutation(1003), len(batches)))
    assert abs(np.corrcoef([lengths[b].mean() for b in batches], range(len(batches)))[0, 1]) < 0.3


# ---------------------------------------------------------------- the command

QUICK = "--window 4 --rank 4 --lr 1e-3 --warmup 5 --seed 3 --log-every 1000".split()


def corpus(folder: str, count: int = 21) -> list[dict]:
    """Finished trajectories of many lengths, naming the model they come from."""
    rng, rows = np.random.default_rng(count), []
    for n in range(count):
        N = int(rng.integers(6, 14))
        r = trajectory(f"r{n}", N, k=1 + n % 3, end=int(rng.integers(2, N)), prompt=int(rng.integers(2, 9)))
        rows.append(r | dict(model=r["model"] | dict(name=folder)))
    return rows


@pytest.fixture
def train(monkeypatch, folders, tmp_path):
    """train("run", "--lam 0"): tabom.py's main in this process on a small corpus; gives the --out folder."""
    rows = write_lines(tmp_path / "corpus.jsonl", corpus(folders["llada"]))

    def call(out="run", flags="", source=rows):
        argv = ["tabom.py", "--data", str(source), "--out", str(tmp_path / out), *QUICK, *flags.split()]
        monkeypatch.setattr(sys, "argv", argv)
        with data.safely("kept"):
            tabom.main()
        return tmp_path / out
    call.data = rows
    return call


def log_of(out) -> tuple[dict, list[dict]]:
    """log.jsonl as (first line, one row a step); every step is there once."""
    head, *rows = map(json.loads, (Path(out) / "log.jsonl").read_text().splitlines())
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1))
    return head, rows


def adapter_folder(out) -> Path:
    """The last epoch's."""
    return max(Path(out).glob("epoch-*"), key=lambda p: int(p.name[6:]))


def adapter_of(out) -> dict[str, torch.Tensor]:
    return load_file(adapter_folder(out) / "adapter_model.safetensors")


def assert_same_run(a, b):
    """To the last bit."""
    x, y = adapter_of(a), adapter_of(b)
    assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
    same = ("step", "epoch", "loss", "ce", "rank", "in_order", "lr", "gnorm", "samples")
    assert [[r[k] for k in same] for r in log_of(a)[1]] == [[r[k] for k in same] for r in log_of(b)[1]]


def assert_close_runs(a, b):
    """The same samples, windows and adapter, but for the order of additions."""
    x, y = adapter_of(a), adapter_of(b)
    assert x.keys() == y.keys() and max((x[k] - y[k]).abs().max() for k in x) < 1e-5
    for r, s in zip(log_of(a)[1], log_of(b)[1], strict=True):
        assert all(r[k] == s[k] for k in ("step", "epoch", "lr", "samples"))
        for key in (k for k in ("loss", "ce", "rank", "in_order", "gnorm") if r[k] is not None):
            assert r[key] == pytest.approx(s[key], rel=2e-4, abs=1e-5), key


def test_run_leaves_adapters_log_and_resume_point(train, folders, capsys):
    out = train("run", "--epochs 2 --batch-size 4 --log-every 3 --save-every 5")
    shown, (head, rows) = capsys.readouterr(), log_of(out)                   # 21 records: 6 steps an epoch
    assert sorted(p.name for p in out.glob("[!.]*")) == ["epoch-1", "epoch-2", "log.jsonl", "resume-0000012"]
    assert head["model"] == folders["llada"] and head["records"] == 21 and head["steps"] == 12 and head["world"] == 1
    assert head["args"]["lam"] == 1 and head["args"]["gamma"] == 0.2
    assert {"commit", "torch", "python", "device"} <= head.keys()
    assert "21 records\n" in shown.out and "1,024 LoRA parameters on 4 layers; 12 steps of 4" in shown.out
    assert f"adapter in {out}/epoch-2" in shown.out
    for epoch in (1, 2):                                 # every record once an epoch
        seen = [s for r in rows if r["epoch"] == epoch for s in r["samples"]]
        assert sorted(seen) == sorted(f"r{n}" for n in range(21))
    for n, r in enumerate(rows):
        assert r["loss"] == pytest.approx(r["ce"] + r["rank"], rel=1e-5) and 0 <= r["in_order"] <= 1 and r["gnorm"] > 0
        assert r["lr"] == pytest.approx(1e-3 * (n + 1) / 5 if n < 5 else 5e-4 * (1 + math.cos(math.pi * (n - 5) / 7)))
        assert r["tokens_per_s"] > 0 and r["memory_gb"] > 0 and r["ms"] > 0
    lines = [x for x in shown.err.splitlines() if x.startswith("step ")]
    assert [x.split()[1] for x in lines] == ["3/12", "6/12", "9/12", "12/12"]
    for name in ("loss", "= ce", "+ 1 rank", "% in order", "lr", "gnorm", "ms", "tok/s", "GB", "left"):
        assert name in lines[0]
    first, last = load_file(out / "epoch-1" / "adapter_model.safetensors"), adapter_of(out)
    assert any(not torch.equal(first[k], last[k]) for k in last)


def test_real_peft_loads_a_trained_adapter(train, folders):
    from peft import PeftModel
    out = train("run", "--max-steps 6 --lr 5e-2")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, ids_of("llada").vocab, (2, 11)))
    ours = models.load(folders["llada"])
    theirs, base = PeftModel.from_pretrained(models.load(folders["llada"]), out / "epoch-1"), ours(ids)
    lora.load(ours, out / "epoch-1")
    torch.testing.assert_close(theirs.base_model.model(ids), ours(ids), atol=1e-5, rtol=1e-5)
    assert (ours(ids) - base).abs().max() > 0.1


def test_only_the_adapters_of_q_and_v_learn(train, folders, monkeypatch):
    kept, real = [], torch.optim.AdamW.step

    def step(opt, *x):
        assert [tuple(p.shape) for g in opt.param_groups for p in g["params"]] == [(4, 32), (32, 4)] * 4
        assert {n for n, p in kept[0].named_parameters() if p.grad is not None} == learn
        return real(opt, *x)
    learn = {f"model.transformer.blocks.{b}.{p}_proj.lora_{x}" for b in range(2) for p in "qv" for x in "AB"}
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    monkeypatch.setattr(tabom, "load", lambda *x: kept.append(models.load(*x)) or kept[0])
    out = train("run", "--max-steps 3")
    base = dict(models.load(folders["llada"]).named_parameters())
    assert {n for n, p in kept[0].named_parameters() if p.requires_grad} == learn
    assert all(torch.equal(p, base[n.replace(".base", "")]) for n, p in kept[0].named_parameters() if n not in learn)
    assert set(adapter_of(out)) == {f"base_model.model.{n}.weight" for n in learn}


@pytest.mark.parametrize("flags", ["--window 4", "--window 0", "--lam 0", "--tail drop", "--rank-context exact",
                                   "--method sft", "--method dinfer", "--method t3d"])
def test_accumulation_and_checkpointing_change_nothing(flags, train):
    """One batch of eight, eight of one, two of four with blocks computed twice: the same to rounding."""
    one = train("one", f"{flags} --max-steps 6 --batch-size 8")
    assert_close_runs(one, train("eight", f"{flags} --max-steps 6 --batch-size 1 --grad-accum 8"))
    assert_close_runs(one, train("two", f"{flags} --max-steps 6 --batch-size 4 --grad-accum 2 --grad-checkpoint"))


def test_bf16_base_trains_an_fp32_adapter(train):
    fine, coarse = train("fine", "--max-steps 2"), train("coarse", "--max-steps 2 --dtype bf16")
    assert all(x.dtype == torch.float32 for x in adapter_of(coarse).values())
    assert log_of(coarse)[1][0]["loss"] == pytest.approx(log_of(fine)[1][0]["loss"], rel=0.05)


def test_seed_decides_and_alone(train):
    a, b, c = train("a", "--max-steps 4"), train("b", "--max-steps 4"), train("c", "--max-steps 4 --seed 4")
    assert_same_run(a, b)
    assert log_of(a)[1][0]["samples"] != log_of(c)[1][0]["samples"]
    assert not torch.equal(*(next(iter(adapter_of(x).values())) for x in (a, c)))


def test_left_out_records_are_counted_and_all_keeps_them(train, folders, tmp_path, capsys, refused):
    rows, i = corpus(folders["llada"], 12), ids_of("llada")
    for r in rows[:3]:
        r["correct"] = False
    rows[3]["response_token_ids"] = [0 if t == i.eos else t for t in rows[3]["response_token_ids"]]     # no EOS
    for field, value in dict(decoding_order=-1, response_token_ids=i.mask, entropy=None, confidence=None).items():
        rows[4][field][0] = value                        # an EOS, but a mask before it
    rows[5]["correct"] = True
    rows[6] |= dict(response="", response_token_ids=[i.eos], decoding_order=[0], entropy=[0.1], confidence=[0.9])
    mixed, few = write_lines(tmp_path / "mixed.jsonl", rows), write_lines(tmp_path / "few.jsonl", rows[:4])
    assert log_of(train("a", "--max-steps 1", mixed))[0]["records"] == 6
    told = f"{mixed}: 6 records, left out 3 judged wrong, 2 unfinished, 1 shorter than 2 tokens\n"
    assert told in capsys.readouterr().out
    assert log_of(train("b", "--max-steps 1 --all", mixed))[0]["records"] == 11
    assert f"{mixed}: 11 records, left out 1 shorter than 2 tokens\n" in capsys.readouterr().out
    with refused(f"{few}: no record to train on", "3 judged wrong, 1 unfinished", "--all"):
        train("c", "", few)
    with refused("no record to train on (1 shorter than 2 tokens)"):
        train("c", "", write_lines(tmp_path / "one.jsonl", rows[6:7]))


def test_trajectories_shorter_than_the_window_are_trained_on_whole(train):
    """The longest has 13 tokens: any larger window is all of each, from the first step on, as with one of 13."""
    assert_same_run(train("a", "--window 13 --max-steps 6"), train("b", "--window 64 --max-steps 6"))
    assert len(log_of(train("c", "--window 64 --epochs 1"))[1]) == 6


def test_model_is_the_one_the_trajectories_name(train, folders, tmp_path, refused, capsys):
    other, rows = str(tmp_path / "other"), corpus(folders["llada"], 3)
    shutil.copytree(folders["llada"], other)
    assert log_of(train("a", "--max-steps 1"))[0]["model"] == folders["llada"]
    assert "decoded by" not in capsys.readouterr().out
    assert log_of(train("b", f"--max-steps 1 --model {other}"))[0]["model"] == other
    assert f"decoded by {folders['llada']}, not by {other}: is it the same model?\n" in capsys.readouterr().out
    with refused(f"{train.data}:1", "mask", "vocabulary", "pass the --model of the trajectories"):
        train("c", f"--model {folders['Dream']}")
    rows[2]["model"] = dict(name="some/one", mask_id=5, vocab_size=9000)
    with refused("two.jsonl:3", "some/one", "mask 5, vocabulary 9000"):
        train("c", "", write_lines(tmp_path / "two.jsonl", rows))
    rows[2]["model"] = rows[1]["model"] | dict(name="some/one")
    with refused("two.jsonl:3", "decoded by some/one", f"before by {folders['llada']}", "split it"):
        train("c", "", write_lines(tmp_path / "two.jsonl", rows))
    assert not (tmp_path / "c").exists()


def test_trajectories_of_another_tokenizer_are_refused(train, folders, tmp_path, refused, capsys):
    """Of the same size, mask and name: only what the tokens say differs."""
    other = Path(shutil.copytree(folders["llada"], tmp_path / "other"))
    t = json.loads((other / "tokenizer.json").read_text())
    vocab = t["model"]["vocab"]
    letters = sorted(w for w in vocab if len(w) == 1)
    t["model"]["vocab"] |= dict(zip(letters, [vocab[w] for w in letters[1:] + letters[:1]], strict=True))
    (other / "tokenizer.json").write_text(json.dumps(t))
    with refused(f"{train.data}:", "its tokens read", "pass the --model of the trajectories"):
        train("run", f"--model {other}")
    assert not (tmp_path / "run").exists()


def test_authors_minimal_record_trains(train, folders, tmp_path, refused):
    keep = ("prompt", "response", "response_token_ids", "decoding_order", "method")
    named = f"--model {folders['llada']}"
    rows = [{k: r[k] for k in keep} for r in corpus(folders["llada"], 8)]
    theirs = write_lines(tmp_path / "theirs.jsonl", rows)
    with refused(f"{theirs}: names no model", "--model"):
        train("a", "", theirs)
    for method in ("tabom", "dinfer", "t3d", "sft"):
        head, log = log_of(train(method, f"--method {method} --max-steps 2 {named}", theirs))
        assert head["records"] == 8 and sorted(s for r in log for s in r["samples"]) == list(range(8))
    other = [{"question": r["prompt"], "output": r["response"], **{k: r[k] for k in keep[2:]}} for r in rows]
    out = train("b", f"--max-steps 2 {named}", write_lines(tmp_path / "renamed.jsonl", other))
    assert_same_run(out, tmp_path / "tabom")
    plain = Path(shutil.copytree(folders["llada"], tmp_path / "plain"))       # a tokenizer without a chat template
    config = json.loads((plain / "tokenizer_config.json").read_text())
    (plain / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    train("d", f"--max-steps 1 --model {plain}", tmp_path / "renamed.jsonl")
    far = [9000] * len(rows[0]["decoding_order"])
    masks = [ids_of("llada").mask] * len(far)
    for change, words in ((dict(response_token_ids=far), "token 9000 for"), (dict(prompt="a" * 600), "512 positions"),
                          (dict(response_token_ids=masks), "holds the mask token")):
        with refused("bad.jsonl:1", words):
            train("c", named, write_lines(tmp_path / "bad.jsonl", [rows[0] | change]))


def test_sft_trains_on_ground_truth(train, folders, tmp_path, capsys, refused, monkeypatch):
    tok, i, seen, real = models.load_tokenizer(folders["llada"]), ids_of("llada"), {}, tabom.view
    rows = [dict(id=n, prompt=f"{n}+1=", response=f"{n + 1}") for n in range(6)]
    gt = write_lines(tmp_path / "gt.jsonl", [*rows, dict(id=6, prompt="say", response="a" * 30)])
    monkeypatch.setattr(tabom, "view", lambda r, *x: seen.update({r.id: r}) or real(r, *x))
    flags = f"--method sft --length 12 --epochs 1 --model {folders['llada']}"
    assert len(log_of(train("a", flags, gt))[1]) == 2 and sorted(seen) == list(range(6))
    assert "6 records, left out 1 longer than --length" in capsys.readouterr().out
    assert seen[3].ids.tolist() == [CHARS.index("4"), i.eot] + [i.eos] * 10  # answer, end of turn, EOS to the canvas
    assert tok.decode(seen[3].prompt.tolist()) == "[user]3+1=[assistant]" and seen[3].rank.tolist() == list(range(12))
    train("b", flags + " --tail drop", gt)
    assert seen[3].rank.tolist() == [0, 1]
    with refused(f"{gt}:1", "no decoding_order", "--method sft"):
        train("c", f"--model {folders['llada']}", gt)
    ours = [{k: v for k, v in r.items() if k != "decoding_order"} for r in corpus(folders["llada"], 8)]
    theirs = [{k: r[k] for k in ("prompt", "response", "response_token_ids")} for r in ours]
    column = [r | dict(model="gpt-9") for r in rows]     # a data set's own column of that name
    for n, some in enumerate((ours, theirs, column)):
        path = write_lines(tmp_path / f"{n}.jsonl", some)
        assert log_of(train(f"d{n}", flags, path))[0]["records"] == len(some)
        with refused(f"{path}:1", "response_token_ids" if some is column else "decoding_order"):
            train("c", f"--model {folders['llada']}", path)


@pytest.mark.parametrize("flags, words", [
    ("--window 1", "--window 1: one token makes no pair"), ("--lam -1", "--lam -1.0: must be at least 0"),
    ("--lam nan", "--lam nan"), ("--gamma -0.1", "--gamma -0.1"), ("--window -1", "--window -1"), ("--lam x", "--lam"),
    ("--rank 0", "--rank 0"), ("--lr inf", "--lr inf"), ("--epochs 0", "--epochs 0"), ("--seed -1", "--seed -1"),
    ("--batch-size 0", "--batch-size 0"), ("--grad-accum 0", "--grad-accum 0"), ("--save-every 0", "--save-every 0"),
    ("--exact-chunk 0", "--exact-chunk 0"), ("--data nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("--model nowhere", "nowhere: no such folder"), ("--targets nope", "--targets nope"),
    ("--out file", "--out file: is a file"), ("--out file/below", "file/below"), ("--timeout 0", "--timeout 0"),
    ("--timeout 1e13", "--timeout 1000"), ("--alpha nan", "--alpha nan"), ("--alpha 0", "--alpha 0"),
    ("--rank 1000000000", "--rank 1000000000"), ("--seed 99999999999999999999", "--seed 99999999999999999999")])
def test_wrong_training_settings_end_with_one_line(flags, words, train, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    if "below" not in flags:                             # the rest is known before any weight is read
        monkeypatch.setattr(tabom, "load", None)
    with refused(words):
        train("run", flags)
    assert not (tmp_path / "run").exists() and (tmp_path / "file").read_text() == "mine"


def test_non_finite_loss_stops_with_step_samples_and_last_good_state(folders, train, tmp_path, refused):
    """One letter has a broken embedding: the one record with it in its prompt is named, at the step that meets it."""
    broken, letter = tmp_path / "broken", CHARS.index("#")
    shutil.copytree(folders["llada"], broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.transformer.wte.weight"][letter] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    rows = [r for r in corpus(str(broken), 60) if letter not in r["prompt_token_ids"] + r["response_token_ids"]][:16]
    lengths = np.array([len(r["prompt_token_ids"]) + len(r["response_token_ids"]) for r in rows])
    third = tabom.epoch_batches(lengths, 4, 3, 0)[2][1]  # the record that the third step has second
    rows[third]["prompt_token_ids"][0] = letter
    point = tmp_path / "run" / "resume-0000002"
    with refused("step 3: the loss", f"samples ['{rows[third]['id']}'];", f"good state: {point};"):
        train("run", "--save-every 1", write_lines(tmp_path / "bad.jsonl", rows))
    assert len(log_of(tmp_path / "run")[1]) == 2
    with refused("step 3: the loss"):                    # and again, from there
        train("run", "--save-every 1 --resume", tmp_path / "bad.jsonl")


@pytest.mark.parametrize("file, content", [
    ("state.json", b""), ("state.json", b"{}"), ("state.json", b"\xff"), ("state.safetensors", b""),
    ("state.safetensors", None)])
def test_a_damaged_resume_point_is_named(file, content, train, refused):
    point, = train("run", "--max-steps 2").glob("resume-*")
    (point / file).unlink()
    if content is not None:
        (point / file).write_bytes(content)
    with refused(f"{point}: is damaged", "delete it to start over"):
        train("run", "--max-steps 2 --resume")


def test_an_adapter_that_is_not_finite_is_not_kept(train, tmp_path, refused, monkeypatch):
    real, steps = torch.optim.AdamW.step, []

    def step(opt):
        real(opt)
        steps.append(opt)
        if len(steps) == 4:
            opt.param_groups[0]["params"][0].data[0] = math.inf
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with refused("step 4: the adapter is not finite any more", "lower --lr"):
        train("run", "--save-every 2")
    assert [p.name for p in (tmp_path / "run").glob("*-[0-9]*")] == ["resume-0000002"]


def test_two_runs_do_not_write_into_one_folder(train, tmp_path, refused):
    out = tmp_path / "run"
    for flags in ("--max-steps 4", "--max-steps 4 --resume"):                # before its first step, too
        out.mkdir(exist_ok=True)
        with open(out / ".lock", "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            with refused(f"--out {out}: another process is training into it"):
                train("run", flags)
        train("run", flags)
    real = tabom.lora.wrap                               # another run begins and ends while we look at the data
    with pytest.MonkeyPatch.context() as m:
        m.setattr(tabom.lora, "wrap", lambda *x: (out / "log.jsonl").write_text('{"settings": {}}\n') and real(*x))
        with refused(f"--out {out}: another process trained into it just now"):
            train("run", "--max-steps 4 --resume")
    (out / "log.jsonl").write_text("mine\n")
    with refused(out / "log.jsonl", "not JSON", "another --out"):
        train("run", "--max-steps 4 --resume")


def test_out_of_another_run_is_refused(train, tmp_path, refused, folders):
    files = lambda: {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    flags, other, less = "--max-steps 4 --save-every 2", tmp_path / "other", tmp_path / "less"
    shutil.copytree(folders["llada"], other)
    weights = load_file(other / "model.safetensors")
    save_file({k: 2 * v for k, v in weights.items()}, other / "model.safetensors", metadata={"format": "pt"})
    less.mkdir()
    fewer = write_lines(less / "corpus.jsonl", corpus(folders["llada"])[:20])
    (tmp_path / "mixed").mkdir()
    mixed = write_lines(tmp_path / "mixed" / "corpus.jsonl", corpus(folders["llada"])[::-1])
    out = train("run", flags)
    before = files()
    with refused(f"--out {out}: holds a run already", "--resume", "another --out"):
        train("run", flags)
    for more, words, source in (
            ("--max-steps 5", "max_steps 4, now it is 5", None), ("--lam 2", "lam 1.0, now it is 2.0", None),
            ("--seed 9", "seed 3, now it is 9", None), ("--batch-size 8", "global_batch 4, now it is 8", None),
            ("--method sft", "method 'tabom', now it is 'sft'", None),
            ("", "data 'corpus.jsonl: 21 records,", fewer), ("", "data 'corpus.jsonl: 21 records,", mixed),
            (f"--model {other}", "model 'crc32 ", None)):
        with refused(f"--out {out}: is of a run with {words}", "another --out"):
            train("run", f"{flags} --resume {more}", source or train.data)
    assert files() == before
    may = "--batch-size 2 --grad-accum 2 --save-every 3 --grad-checkpoint --exact-chunk 2"    # change on the way
    train("run", f"{flags} --resume {may}")
    shutil.rmtree(next(out.glob("resume-*")))            # killed before its first resume point: the log still knows
    with refused("lam 1.0, now it is 2.0"):
        train("run", f"{flags} --resume --lam 2")
    (out / "log.jsonl").unlink()                         # only adapters are left: whose, nobody can tell
    for more in ("", " --resume"):
        with refused(f"--out {out}: holds a run already", "log.jsonl"):
            train("run", flags + more)


# ---------------------------------------------------------------- killed against whole

def forked(job) -> int:
    """job() in a child; its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            job()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(n: int):
    """From now on: SIGKILL just before the n-th change to the disk; a log line is torn in the middle."""
    count = [0]

    def armed(real, is_open=False):
        def call(*args, **kw):
            if not is_open or args[1:2] == ("a",):
                count[0] += 1
                if count[0] == n:
                    if is_open:
                        with real(*args) as f:
                            f.write('{"step": 3, "epoch": 1, "lo')
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kw)
        return call
    for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir"):
        setattr(os, name, armed(getattr(os, name)))
    builtins.open = armed(open, True)


def test_killed_at_any_write_and_resumed_equals_whole(train, tmp_path):
    flags = "--max-steps 3 --batch-size 12 --save-every 1"                   # 2 steps an epoch
    whole, n, code = train("whole", flags), 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        n += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        code = forked(lambda: (die_at(n), train("run", flags)))
        out = train("run", flags + " --resume")
        assert_same_run(out, whole)
        for x in ("epoch-1/adapter_model.safetensors", "resume-0000003/state.safetensors"):
            assert (out / x).read_bytes() == (whole / x).read_bytes()
        assert {p.name for p in out.glob("[!.]*")} == {"epoch-1", "epoch-2", "log.jsonl", "resume-0000003"}
    assert code == 0 and n > 20                          # the last child was not hit: every write has been


def test_killed_at_random_moments_and_resumed_equals_whole(train, tmp_path):
    flags, rng = "--max-steps 100 --save-every 7", random.Random(0)
    whole, log, done = train("whole", flags), tmp_path / "run" / "log.jsonl", 0
    for low, high in ((1, 20), (40, 70)):
        argv = ["--data", train.data, "--out", str(tmp_path / "run"), *QUICK, *flags.split(), *["--resume"][:done]]
        p = subprocess.Popen([sys.executable, str(HERE / "tabom.py"), *argv], env=one_thread(),
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = rng.randint(low, high)
        while p.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > wanted):
            time.sleep(0.002)
        p.send_signal(signal.SIGKILL)
        assert p.wait() == -signal.SIGKILL
        done = log.read_bytes().count(b"\n") - 1
        assert done >= wanted
    assert_same_run(train("run", flags + " --resume"), whole)


def test_ctrl_c_in_training_says_how_to_go_on(train, tmp_path):
    flags, log = "--max-steps 80 --save-every 7", tmp_path / "run" / "log.jsonl"
    argv = ["--data", train.data, "--out", tmp_path / "run", *QUICK, *flags.split()]
    said = ctrl_c([HERE / "tabom.py", *argv], lambda _: log.exists() and log.read_bytes().count(b"\n") > 10)
    assert said == "interrupted; --out keeps the last resume point; run the same command with --resume to go on"
    assert_same_run(train("run", flags + " --resume"), train("whole", flags))


# ---------------------------------------------------------------- one process against several

CRASH = """import os, signal, torch.distributed as dist
real, calls = dist.all_reduce, [0]
def all_reduce(t):
    calls[0] += 1                        # one at the start, three a step: rank 1 dies once, in its eleventh step
    if calls[0] == 33 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(t)
dist.all_reduce = all_reduce
import tabom
tabom.main()
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, folders):
    """fleet(out, torchrun's flags, ours): starts an agent; fleet.one is the run on one process."""
    home = tmp_path_factory.mktemp("fleet")
    rows = write_lines(home / "corpus.jsonl", corpus(folders["llada"]))
    flags = [*QUICK, "--max-steps", "20", "--save-every", "6"]

    def start(out, launcher, more, script=HERE / "tabom.py"):
        argv = [*launcher.split(), str(script), "--data", rows, "--out", str(home / out), *flags, *more.split()]
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *argv], env=one_thread(), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    start.home, start.one = home, home / "one"
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", ["tabom.py", "--data", rows, "--out", str(start.one), *flags, "--batch-size", "8"])
        tabom.main()
    return start


def finish(*agents) -> str:
    shown = [p.communicate(timeout=300)[0] for p in agents]
    assert [p.returncode for p in agents] == [0] * len(agents), shown
    return "".join(shown)


@pytest.mark.parametrize("ranks, flags", [(2, "--batch-size 2 --grad-accum 2"), (4, "--batch-size 2")])
def test_ranks_match_one_process(ranks, flags, fleet):
    finish(fleet(f"ranks{ranks}", f"--standalone --nproc_per_node {ranks}", flags))
    assert_close_runs(fleet.home / f"ranks{ranks}", fleet.one)
    assert log_of(fleet.home / f"ranks{ranks}")[0]["world"] == ranks


def test_two_nodes_match_one_process(fleet):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    node = f"--nnodes 2 --nproc_per_node 1 --rdzv-backend c10d --rdzv-id nodes --rdzv-endpoint 127.0.0.1:{port}"
    finish(*[fleet("nodes", node, "--batch-size 4") for _ in range(2)])
    assert_close_runs(fleet.home / "nodes", fleet.one)
    assert log_of(fleet.home / "nodes")[0]["world"] == 2


def test_torchrun_goes_on_by_itself_when_a_rank_dies(fleet):
    (fleet.home / "crash.py").write_text(CRASH)
    launcher = "--standalone --nproc_per_node 2 --max-restarts 1"
    text = finish(fleet("crash", launcher, "--batch-size 4", fleet.home / "crash.py"))
    assert text.count("LoRA parameters") == 2            # it did start twice
    assert_close_runs(fleet.home / "crash", fleet.one)


def test_a_restart_does_not_go_on_with_somebody_elses_run(fleet):
    """torchrun restarts after every exit code; that must not turn "holds a run already" into consent."""
    shutil.copytree(fleet.one, fleet.home / "old")
    p = fleet("old", "--standalone --nproc_per_node 2 --max-restarts 1", "--batch-size 4")
    shown = p.communicate(timeout=300)[0]
    assert p.returncode == 1 and shown.count("holds a run already") == 2
    same_files(fleet.one, fleet.home / "old")


def test_ranks_that_see_different_things_stop(fleet):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        node = f"--nnodes 2 --nproc_per_node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{s.getsockname()[1]}"
    agents = [fleet("differ", node, f"--batch-size 4 --seed {n}") for n in range(2)]
    shown = [p.communicate(timeout=300)[0] for p in agents]
    assert all(p.returncode for p in agents) and "goes on from nothing with" in shown[0] + shown[1]
    assert [p.name for p in (fleet.home / "differ").iterdir()] == [".lock"]


def test_a_hanging_rank_ends_the_job_with_a_line(fleet):
    (fleet.home / "hang.py").write_text(CRASH.replace("os.kill(os.getpid(), signal.SIGKILL)", "signal.pause()"))
    p = fleet("hang", "--standalone --nproc_per_node 2", "--batch-size 4 --timeout 0.2", fleet.home / "hang.py")
    shown = p.communicate(timeout=120)[0]
    assert p.returncode == 1 and "rank 0, step 11: another rank died, or did not answer for --timeout 0.2" in shown
    assert "goes on" in shown and len(log_of(fleet.home / "hang")[1]) == 10


# ---------------------------------------------------------------- does ranking rank

def sums(rng) -> tuple[str, str]:
    """A language of four digits: each plus one, then their sum, greatest and least; some of it is hard to say."""
    d = rng.integers(0, 10, 4)
    return "".join(map(str, d)), "".join(str((x + 1) % 10) for x in d) + f"={d.sum() % 10}{d.max()}{d.min()}"


def fit_sums(folder: str, length: int, steps: int):
    """Pretrains the tiny model in place, briefly: sure of some tokens, unsure of others."""
    net, i, rng = models.load(folder).requires_grad_(True), ids_of("llada"), np.random.default_rng(0)
    g = torch.Generator().manual_seed(0)
    for name, p in net.named_parameters():
        spread = 1.0 if "wte" in name else 0.08
        p.data = torch.ones(p.shape) if p.ndim == 1 else torch.randn(p.shape, generator=g) * spread
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        texts = [sums(rng) for _ in range(64)]
        x = torch.tensor([[CHARS.index(c) for c in p + r] + [i.eos] * (length - len(r)) for p, r in texts])
        mask = torch.zeros(x.shape, dtype=torch.bool)
        mask[:, 4:] = torch.from_numpy(rng.random((64, length)) < rng.random((64, 1)))
        loss = torch.nn.functional.cross_entropy(net(x.masked_fill(mask, i.mask), None, mask), x[mask])
        opt.zero_grad()
        loss.backward()
        opt.step()
    weights = {k: v.detach() for k, v in net.named_parameters()}
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def shares_in_order(net, raws: list[dict], window: int) -> np.ndarray:
    """For each trajectory, over all its windows: the share of pairs whose earlier token has the lower entropy."""
    shares = []
    for raw in raws:
        order, good, pairs = plain_order(raw), 0, 0
        for cut in range(len(order) - window + 1):
            seen = [j in order[:cut] for j in range(len(raw["decoding_order"]))]
            rows = forward(net, raw, seen, ids_of("llada").mask)
            h = [plain_stats(rows[j], 0)[1] for j in order[cut:cut + window]]
            good += sum(h[r] < h[s] for r in range(window) for s in range(r + 1, window))
            pairs += window * (window - 1) // 2
        shares.append(good / pairs)
    return np.array(shares)


def test_ranking_puts_held_out_pairs_in_order(tmp_path, monkeypatch):
    """decode.py, then tabom.py with and without the ranking term: same base, data, order and windows."""
    def command(module, flags, **paths):
        paths = [x for k, v in paths.items() for x in (f"--{k}", str(v))]
        monkeypatch.setattr(sys, "argv", [module.__name__, *paths, *flags.split()])
        module.main()
    folder, rng, prompts, window, shares = tiny("llada", tmp_path / "base"), np.random.default_rng(1), {}, 4, {}
    fit_sums(folder, 12, 150)
    while len(prompts) < 300:
        prompts.setdefault(sums(rng)[0], len(prompts))
    asked = write_lines(tmp_path / "p.jsonl", [dict(id=n, prompt=p) for p, n in prompts.items()])
    command(decode, "--length 12 --raw-prompt --batch-size 64", model=folder, prompts=asked, out=tmp_path / "t.jsonl")
    rows = sorted(map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines()), key=lambda r: r["id"])
    held = [r for r in rows[200:] if len(plain_order(r)) >= window]
    learnt = write_lines(tmp_path / "learn.jsonl", rows[:200])
    for lam in (1, 0):
        out, net = tmp_path / f"lam{lam}", models.load(folder)
        flags = f"--lam {lam} --window {window} --max-steps 80 --batch-size 16 --lr 1e-2 --warmup 10"
        command(tabom, flags, data=learnt, out=out)
        lora.load(net, adapter_folder(out))
        shares[lam] = shares_in_order(net, held, window)
    gain = shares[1] - shares[0]                         # paired: the same trajectories
    error = gain.std(ddof=1) / math.sqrt(len(gain))
    assert len(held) > 80 and gain.mean() > max(0.03, 6 * error), (shares[1].mean(), shares[0].mean(), error)


def test_training_equals_a_plain_loop(train, folders):
    """One sample at a time, AdamW written out, a window of (seed, epoch, place in the file) each: main's adapter."""
    more = "--epochs 3 --batch-size 12 --clip 0.5 --weight-decay 0.1"                    # 2 steps an epoch, 6 in all
    out, a, net = train("run", more), settings_of(" ".join(QUICK) + " " + more), models.load(folders["llada"])
    a.data, mask_id, params = train.data, ids_of("llada").mask, lora.wrap(net, r=4, alpha=16, seed=3)
    records = tabom.read_data(a, models.read_config(folders["llada"])[0], models.load_tokenizer(folders["llada"]), 0)
    number, windows = {r.id: n for n, r in enumerate(records)}, {}
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in params]
    for t, row in enumerate(log_of(out)[1], 1):
        net.zero_grad()
        for id in row["samples"]:
            n = number[id]
            seen, targets = tabom.view(records[n], "tabom", 4, np.random.default_rng([3, row["epoch"] - 1, n]))
            windows.setdefault(id, []).append(targets.tolist())
            loss = tabom.batch_loss(net, [(records[n], seen, targets)], a, mask_id, "cpu")[0]
            (loss.sum() / len(row["samples"])).backward()
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in params))
        lr = 1e-3 * t / 5 if t <= 5 else 1e-3            # five steps of warm-up, and the first of the cosine
        assert norm > 0.5 and abs(row["gnorm"] - norm) < 1e-3 * norm
        for p, (m, v) in zip(params, moments, strict=True):
            g = p.grad * 0.5 / norm
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            p.data -= lr * 0.1 * p.data
            p.data -= lr * (m / (1 - 0.9 ** t)) / ((v / (1 - 0.999 ** t)).sqrt() + 1e-8)
    got, want = adapter_of(out), lora.state(net)
    assert got.keys() == want.keys() and max((got[k] - want[k]).abs().max() for k in got) < 1e-5
    assert any(w[0] != w[1] for w in windows.values())   # another window each epoch


# ---------------------------------------------------------------- eval.py

def own_records(folder: str, tmp_path: Path, count: int = 5, length: int = 12, **flags) -> list[dict]:
    """Trajectories of a tiny model through the command line; EOS is rare there, so some never end."""
    rows = [dict(id=n, prompt="ab" * n + "c=", answer=n) for n in range(1, count + 1)]
    prompts = write_lines(tmp_path / "p.jsonl", rows)
    extra = [x for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    argv = ["decode.py", "--model", folder, "--prompts", prompts, "--out", str(tmp_path / "t.jsonl"),
            "--length", str(length), *extra]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", argv)
        decode.main()
    return [r for _, r in data.lines(str(tmp_path / "t.jsonl"))]


def plain_entropy(logits: list[float]) -> float:
    top = max(logits)
    z = sum(math.exp(v - top) for v in logits)
    return -sum(math.exp(v - top) / z * (v - top - math.log(z)) for v in logits)


@both
def test_tds_equals_its_definition_in_plain_loops(family, folders, nets, tmp_path):
    records = own_records(folders[family], tmp_path, 4, 10, tokens_per_step=2, schedule="even")
    eos = ids_of(family).eos
    records[0]["response_token_ids"][4] = eos                # an end in the middle: what follows must not count
    ends, c = [eos], nets[family].config
    want: dict = {}
    for r in records:
        ids, order = r["response_token_ids"], r["decoding_order"]
        stop_at = ids.index(eos) if eos in ids else len(ids) - 1
        for step in sorted(set(order) - {-1}):
            seen = [t if 0 <= s < step else c.mask_id for t, s in zip(ids, order, strict=True)]
            with torch.no_grad():
                logits = nets[family](torch.tensor([r["prompt_token_ids"] + seen]))[0, -len(ids):]
            h = [plain_entropy(logits[i].tolist()) for i in range(stop_at + 1) if seen[i] == c.mask_id]
            if len(h) >= 2:
                want.setdefault(step, []).append(sum(x * x for x in h) / len(h) - (sum(h) / len(h)) ** 2)
    got = evaluate.tds(nets[family], records, c, ends, batch_size=3)
    for step, value in enumerate(got):
        assert (value is None) == (step not in want)
        assert value is None or math.isclose(value, np.mean(want[step]), rel_tol=1e-3, abs_tol=1e-5)


def test_order_agreement_counts_pairs(folders, nets, tmp_path):
    own_records(folders["llada"], tmp_path, 3, 8)
    flags = argparse.Namespace(all=True, method="tabom", tail="keep", length=8, limit=0, data=f"{tmp_path}/t.jsonl")
    net, tok = nets["llada"], models.load_tokenizer(folders["llada"])
    records = evaluate.read_data(flags, net.config, tok, 1)
    right = pairs = 0
    for i, r in enumerate(records):
        for w in range(4):
            visible, targets = evaluate.view(r, "tabom", 3, np.random.default_rng([w, i]))
            seen = [int(t) if v else net.config.mask_id for t, v in zip(r.ids, visible, strict=True)]
            with torch.no_grad():
                logits = net(torch.tensor([r.prompt.tolist() + seen]))[0, -len(r.ids):]
            h = [plain_entropy(logits[t].tolist()) for t in targets]
            right += sum(h[a] < h[b] for a in range(len(h)) for b in range(a + 1, len(h)))
            pairs += len(h) * (len(h) - 1) // 2
    assert math.isclose(evaluate.order_agreement(net, records, net.config, 3, batch_size=5), right / pairs)


def test_ce_by_ratio_of_a_uniform_model_is_log_vocabulary(folders, tmp_path):
    own_records(folders["llada"], tmp_path, 3, 8)
    net, tok = models.load(folders["llada"]), models.load_tokenizer(folders["llada"])
    models.part(net, net.family["head"]).weight.data.zero_()
    flags = argparse.Namespace(all=True, method="tabom", tail="keep", length=8, limit=0, data=f"{tmp_path}/t.jsonl")
    got = evaluate.ce_by_ratio(net, evaluate.read_data(flags, net.config, tok, 1), net.config, tok.end_ids, 4)
    assert len(got) == 9 and all(math.isclose(v, math.log(net.config.vocab), rel_tol=1e-5) for v in got.values())


def test_interval_covers_the_share_as_often_as_it_says():
    low, high = evaluate.interval(50, 100)
    assert math.isclose(low, 0.4038, abs_tol=1e-3) and math.isclose(high, 0.5962, abs_tol=1e-3)     # Wilson, by hand
    rng = np.random.default_rng(0)
    covered = [lo <= 0.3 <= hi for lo, hi in (evaluate.interval(k, 200) for k in rng.binomial(200, 0.3, 2000))]
    assert 0.93 < np.mean(covered) < 0.97


def test_eval_command_measures_draws_and_does_not_measure_twice(folders, tmp_path):
    right = [dict(r, correct=True) for r in own_records(folders["llada"], tmp_path, 3, 8)]
    sd = write_lines(tmp_path / "sd.jsonl", right)
    net = models.load(folders["llada"])
    lora.wrap(net)
    lora.save(net, tmp_path / "a" / "epoch-1")
    argv = [sys.executable, "eval.py", "--model", folders["llada"], "--adapter", f"mine={tmp_path / 'a' / 'epoch-1'}",
            "--prompts", str(tmp_path / "p.jsonl"), "--parallel", "1", "2", "--tds", "2", "--order",
            str(tmp_path / "t.jsonl"), "--window", "3", "--ce", sd, sd, "--length", "8", "--pictures", "--keep",
            "--out", str(tmp_path / "res")]
    first = subprocess.run(argv, cwd=HERE, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    got = {n: json.loads((tmp_path / "res" / f"{n}.json").read_text()) for n in ("base", "mine")}
    assert got["base"]["accuracy"] == got["mine"]["accuracy"]                       # an adapter with B = 0 is the base
    assert math.isclose(got["base"]["in_order"], got["mine"]["in_order"])
    assert math.isclose(got["base"]["tds"], got["mine"]["tds"])
    assert {"settings", "commit", "torch", "python", "transformers", "device"} <= set(got["base"])
    for picture in ("tds.png", "ce.png", "map-base.png"):
        assert (tmp_path / "res" / picture).read_bytes()[:4] == b"\x89PNG"
    kept = [data.check_record(place, r) for place, r in data.lines(str(tmp_path / "res" / "base-p-2.jsonl"))]
    assert len(kept) == 3                                                            # records that can be trained on
    before = (tmp_path / "res" / "base.json").stat().st_mtime_ns
    again = subprocess.run(argv, cwd=HERE, capture_output=True, text=True)
    assert again.returncode == 0 and "a step" not in again.stdout
    assert (tmp_path / "res" / "base.json").stat().st_mtime_ns == before
    other = subprocess.run([*argv, "--seed", "5"], cwd=HERE, capture_output=True, text=True)
    assert other.returncode == 2 and len(other.stderr.splitlines()) == 1
    prompts = (tmp_path / "p.jsonl").read_text()
    (tmp_path / "p.jsonl").write_text(prompts.replace("c=", "d="))                   # the same name, other prompts
    other = subprocess.run(argv, cwd=HERE, capture_output=True, text=True)
    assert other.returncode == 2 and "other settings" in other.stderr and len(other.stderr.splitlines()) == 1
    (tmp_path / "p.jsonl").write_text(prompts)
    lora.save(filled(net), tmp_path / "a" / "epoch-1")                               # the same name, another adapter
    other = subprocess.run(argv, cwd=HERE, capture_output=True, text=True)
    assert other.returncode == 2 and "another adapter" in other.stderr and len(other.stderr.splitlines()) == 1


def test_eval_names_adapters_and_refuses_twins(folders, tmp_path, monkeypatch, refused):
    net = models.load(folders["llada"])
    lora.wrap(net)
    for folder in ("a/epoch-1", "lr=1/epoch-1"):
        lora.save(net, tmp_path / folder)
    prompts = write_lines(tmp_path / "p.jsonl", [dict(prompt="ab", answer="1")])
    run = lambda *adapters: (monkeypatch.setattr(sys, "argv", [
        "eval.py", "--model", folders["llada"], "--no-base", "--prompts", prompts, "--length=4", "--tokens-per-step=2",
        "--out", f"{tmp_path}/r", "--adapter", *adapters]), evaluate.main())
    run(f"{tmp_path}/a/epoch-1", f"{tmp_path}/lr=1/epoch-1", f"tabom@3={tmp_path}/lr=1/epoch-1/")
    assert sorted(f.stem for f in (tmp_path / "r").iterdir()) == ["a-epoch-1", "lr=1-epoch-1", "tabom@3"]
    got = json.loads((tmp_path / "r" / "tabom@3.json").read_text())
    assert got["settings"]["length"] == 4 and list(got["accuracy"]) == ["p/2"] and len(got["adapter_sha256"]) == 64
    with refused("a-epoch-1", "NAME=DIR"):
        run(f"{tmp_path}/a/epoch-1", f"{tmp_path}/../{tmp_path.name}/a/epoch-1")


def test_curves_of_a_torn_or_strange_log_end_with_one_line(tmp_path, monkeypatch, refused):
    log = tmp_path / "run" / "log.jsonl"
    log.parent.mkdir()
    rows = [dict(args={})] + [dict(step=i, loss=1.0 / i, ce=1.0, rank=None, in_order=None) for i in (1, 2, 3)]
    write_lines(log, rows)
    argv = ["eval.py", "--curves", str(log), "--out", f"{tmp_path}/pictures"]
    for last, words in (('{"step": 4, "lo', "cut off"), ('{"step": 4}\n', "no line of a training log")):
        (tmp_path / "torn.jsonl").write_text(log.read_text() + last)
        monkeypatch.setattr(sys, "argv", [*argv[:2], f"{tmp_path}/torn.jsonl", *argv[3:]])
        with refused("torn.jsonl:5", words):
            evaluate.main()
    assert not (tmp_path / "pictures").exists()
    monkeypatch.setattr(sys, "argv", argv)
    evaluate.main()
    assert sorted(f.name for f in (tmp_path / "pictures").iterdir()) == ["curve-ce.png", "curve-loss.png"]


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


def test_harness_runs_our_decoder_on_local_tasks(folders, nets, tmp_path):
    """The real lm_eval, offline: stop strings, chat template, an answer begun, base and two adapters in one command,
    two ranks of which one scores, the consent for code."""
    folder = folders["llada"]
    records = own_records(folder, tmp_path, 3, 8)
    text = {r["prompt"]: r["response"] for r in records}
    cut = next(t for t in text.values() if len(t) > 2)[1]                # a character that is there: it must cut
    rows = [dict(question=q, answer=a.split(cut)[0] if a else "") for q, a in text.items()]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    file = write_lines(tasks / "d.jsonl", rows)
    (tasks / "utils.py").write_text("import os\ndef count(doc, results):\n    open(os.environ['COUNT'], 'a')"
                                    ".write('x')\n    return dict(exact_match=1)\n")
    more = {"gsm8k_like": "", "code_like": "unsafe_code: true", "prefix_like": 'gen_prefix: "a"',
            "counted_like": "process_results: !function utils.count"}
    for name, extra in more.items():
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, file=file, until=json.dumps([cut]), more=extra))
    argv = [sys.executable, "eval.py", "--model", folder, "--task-path", str(tasks), "--length=8", "--keep"]
    net = models.load(folder)
    lora.wrap(net)
    lora.save(net, tmp_path / "a" / "epoch-1")
    lora.save(filled(net, scale=3.0), tmp_path / "b" / "epoch-1")
    argv += ["--adapter", f"mine={tmp_path / 'a' / 'epoch-1'}", f"{tmp_path}/b/epoch-1"]
    env = dict(os.environ, HF_DATASETS_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1", COUNT=str(tmp_path / "count"))
    here = dict(cwd=HERE, env=env, capture_output=True, text=True)
    run = subprocess.run([*argv, "--tasks", "gsm8k_like,prefix_like", "--out", str(tmp_path / "r1")], **here)
    assert run.returncode == 0, run.stderr[-2000:]
    result = {n: json.loads((tmp_path / "r1" / f"{n}.json").read_text()) for n in ("base", "mine", "b-epoch-1")}
    kept = {n: [r for _, r in data.lines(f"{tmp_path}/r1/{n}-tasks.jsonl")] for n in result}
    assert kept["base"] == kept["mine"] != kept["b-epoch-1"]             # an adapter with B = 0 is the base
    assert kept["base"][0]["text"] == rows[0]["answer"] and kept["base"][0]["prompt"].endswith("[assistant]")
    got = result["mine"]["tasks"]
    assert got["gsm8k_like"]["exact_match,none"] == 1.0                  # what decode.py wrote, cut at the stop string
    assert result["mine"]["versions"]["gsm8k_like"] == 1 and result["mine"]["n-shot"]["gsm8k_like"] == 0
    assert result["mine"]["adapter"].endswith("a/epoch-1") and {"lm_eval", "transformers"} <= result["mine"].keys()
    argv.insert(4, "--no-base")
    two = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *argv[1:-1],
                          "--tasks", "gsm8k_like,counted_like", "--out", str(tmp_path / "r2")], **here)
    assert two.returncode == 0, two.stderr[:3000]
    assert json.loads((tmp_path / "r2" / "mine.json").read_text())["tasks"]["gsm8k_like"] == got["gsm8k_like"]
    assert (tmp_path / "count").read_text() == "x" * len(rows)           # each answer was scored once, not once a rank
    code = subprocess.run([*argv, "--tasks", "code_like", "--out", str(tmp_path / "r3")], **here)
    assert code.returncode == 2 and "unsafe" in code.stderr.splitlines()[-1]
    assert not (tmp_path / "r3" / "mine.json").exists()
    own = subprocess.run([sys.executable, "eval.py", "lm_eval", "run", "--model", "tabom", "--model_args",
                          f"model={folder},length=8", "--tasks", "gsm8k_like", "--include_path", str(tasks),
                          "--apply_chat_template"], **here)
    assert own.returncode == 0 and "exact_match" in own.stdout, own.stderr[-2000:]


def test_harness_draws_and_settings_are_of_the_question_alone(folders, monkeypatch, refused):
    """The same answer alone or beside other tasks, another one for a repeat; the table's block also with --length."""
    from lm_eval.api.instance import Instance
    ask = lambda task, doc: Instance("generate_until", {}, (f"ab{doc}=", dict(max_gen_toks=6)), 0, (task, doc, 1))
    Harness = evaluate.register()
    assert Harness is evaluate.register()
    lm = Harness(folders["llada"], temperature=1.0, batch_size="auto")
    assert "model" not in vars(lm)                                       # weights come after all that can be wrong
    few = lm.generate_until([ask("mine", 0), ask("mine", 1), ask("mine", 1)])
    many = lm.generate_until([ask("other", 1), ask("mine", 1), ask("other", 0), ask("mine", 1), ask("mine", 0)])
    assert many[4] == few[0] and [many[1], many[3]] == few[1:] and few[1] != few[2]
    used = []
    real = evaluate.make_settings
    monkeypatch.setattr(evaluate, "make_settings", lambda f, *x: used.append((f.length, f.block)) or real(f, *x))
    for task, own, want in (("gsm8k", dict(length=16), (16, 8)), ("mbpp", dict(length=16), (16, 0)),
                            ("gsm8k", dict(length=16, block=4), (16, 4)), ("mine", {}, (6, 0))):
        Harness(folders["llada"], **own).generate_until([ask(task, 0)])
        assert used.pop() == want
    for own, words in (dict(length="long"), "--length"), (dict(lenght=8), "lenght"), (dict(suppress_eos=5), "suppress"):
        with refused(words):
            Harness(folders["llada"], **own)
    with refused("positions"):                                           # told before the weights are read
        Harness(folders["llada"], length=600).generate_until([ask("mine", 0)])


@pytest.mark.parametrize("tasks, words", [
    ("nonesuch", "nonesuch"), ("choice", "multiple_choice"), ("broken", "no_such_package")])
def test_wrong_task_ends_with_one_line_before_weights(tasks, words, folders, tmp_path, monkeypatch, refused):
    import datasets
    import lm_eval.tasks as harness
    datasets.disable_progress_bars()
    index = harness.TaskManager                                          # without its 14,000 own tasks: too slow here
    monkeypatch.setattr(harness, "TaskManager", lambda include_path, include_defaults=False: index(
        include_path=include_path, include_defaults=False))
    monkeypatch.setattr(evaluate, "load", lambda *_: pytest.fail("weights were read"))
    file, until = write_lines(tmp_path / "d.jsonl", [dict(question="a", answer="b")]), '["x"]'
    text = TASK.format(name="choice", file=file, until=until, more="")
    (tmp_path / "c.yaml").write_text(text.replace("generate_until", "multiple_choice").replace(
        "generation_kwargs", 'doc_to_choice: ["a", "b"]\n#').replace("exact_match", "acc"))
    (tmp_path / "b.yaml").write_text(TASK.format(name="broken", file=file, until=until,
                                                 more="process_results: !function u.f"))
    (tmp_path / "u.py").write_text("import no_such_package\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", folders["llada"], "--tasks", tasks, "--task-path",
                                      str(tmp_path), "--out", str(tmp_path / "o")])
    with refused(f"--tasks {tasks}", words):
        evaluate.main()
    assert not (tmp_path / "o").exists()


def test_the_papers_benchmarks_have_their_packages(monkeypatch):
    """The scorers of MATH-500 and IFEval import offline; IFEval's fetches nltk's punkt_tab the first time."""
    import nltk
    monkeypatch.setattr(nltk, "download", lambda *_: None)
    from lm_eval.tasks.ifeval import utils as ifeval
    from lm_eval.tasks.minerva_math import utils as minerva
    assert minerva.is_equiv("\\frac{1}{2}", "0.5") and callable(ifeval.process_results)


@pytest.mark.parametrize("task,family,want", [
    ("gsm8k_cot", "Dream", (256, 0)), ("minerva_math500", "llada", (512, 64)), ("ifeval", "Dream", (512, 0)),
    ("humaneval_instruct", "Dream", (768, 0)), ("mbpp_instruct", "llada", (256, 256)), ("my_own", "llada", None),
    ("gsm8k_cot", "llama-mdm", None)])
def test_benchmarks_decode_as_the_papers_table_says(task, family, want):
    assert evaluate.benchmark_flags(task, family) == want


# ---------------------------------------------------------------- bad input, and what must never happen

ANYTHING = st.recursive(st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | st.text(max_size=5),
                        lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=3), x, max_size=2),
                        max_leaves=6)


def sound(r: dict) -> bool:
    """A second opinion on what a whole record of ours is, field by field."""
    kinds = dict(prompt=str, response=str, method=str, decode=dict, model=dict, response_token_ids=list,
                 decoding_order=list, prompt_token_ids=list, entropy=list, confidence=list)
    if set(data.FIELDS) - set(r) or any(type(r[k]) is not t for k, t in kinds.items()):
        return False
    m, ids, order = r["model"], r["response_token_ids"], r["decoding_order"]
    if type(m.get("name")) is not str or any(type(m.get(k)) is not int for k in ("mask_id", "vocab_size")):
        return False
    token = lambda t: type(t) is int and 0 <= t < m["vocab_size"]                       # noqa: E731
    number = lambda x, high: type(x) in (int, float) and 0 <= x <= high and math.isfinite(x)      # noqa: E731
    return (all(map(token, ids + r["prompt_token_ids"] + [m["mask_id"]])) and r["prompt_token_ids"] and ids
            and all(type(s) is int and -1 <= s < len(ids) for s in order) and max(order) >= 0
            and len(ids) == len(order) == len(r["entropy"]) == len(r["confidence"])
            and all((t == m["mask_id"]) == (s < 0) for t, s in zip(ids, order, strict=True))
            and all(h is None if s < 0 else number(h, 1e300) for h, s in zip(r["entropy"], order, strict=True))
            and all(p is None if s < 0 else number(p, 1.001) for p, s in zip(r["confidence"], order, strict=True))
            and type(r["id"]) in (int, str) and type(r["answer"]) in (str, int, float, type(None))
            and type(r["correct"]) in (bool, type(None)) and isinstance(m.get("end_ids", []), list)
            and all(map(token, m.get("end_ids", []))))


@hypothesis.settings(max_examples=400, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(draw=st.data())
def test_mutated_records_are_refused_with_place_or_sound(draw, tmp_path_factory):
    """Any field gone, replaced, or one entry of it replaced: never a traceback, never a silent pass."""
    r = json.loads(json.dumps(good_record()))
    for _ in range(draw.draw(st.integers(1, 2))):
        field = draw.draw(st.sampled_from([f for f in data.FIELDS if f in r] or ["id"]))
        how = draw.draw(st.sampled_from(["gone", "other", "entry", "longer"]))
        if how == "gone":
            r.pop(field, None)
        elif how == "other" or not isinstance(r.get(field), (list, dict)) or not r[field]:
            r[field] = draw.draw(ANYTHING)
        elif how == "longer" and isinstance(r[field], list):
            r[field] = r[field] + [draw.draw(ANYTHING)]
        else:
            keys = sorted(r[field]) if isinstance(r[field], dict) else range(len(r[field]))
            key = draw.draw(st.sampled_from(keys))
            r[field][key] = draw.draw(ANYTHING)
    path = tmp_path_factory.mktemp("m") / "t.jsonl"
    path.write_text(json.dumps(r) + "\n")
    told: list = []
    with pytest.MonkeyPatch.context() as m:
        m.setattr(data, "stop", lambda text: told.append(text) or (_ for _ in ()).throw(SystemExit(2)))
        try:
            got = list(data.read_records(str(path)))
        except SystemExit as e:
            assert e.code == 2 and len(told) == 1 and "\n" not in told[0] and told[0].startswith(f"{path}:1:"), told
            return
    assert not told and len(got) == 1
    assert sound(r) or not {"model", "decode"} & set(r), f"passed in silence: {r}"     # without both: the authors' form


@pytest.mark.parametrize("command,words", [
    ("decode.py --model {m} --prompts {p} --out {o} --length 10 --block 4", "--length 10 --block 4"),
    ("decode.py --model {m} --prompts {p} --out {o} --length 8 --steps 9", "--steps 9"),
    ("decode.py --model {m} --prompts {p} --out {o} --length 600", "512 positions"),
    ("decode.py --model {m} --prompts {p} --out {d}", "is a folder"),
    ("decode.py --model {d}/nowhere --prompts {p} --out {o}", "nowhere"),
    ("decode.py --model {m} --prompts {p} --out {o} --score foo", "foo"),
    ("tabom.py --data {t} --out {o} --window 1", "--window 1"), ("tabom.py --data {t} --out {o} --lam -1", "--lam -1"),
    ("tabom.py --data {t} --out {o} --rank 0", "--rank 0"), ("tabom.py --data {d}/none.jsonl --out {o}", "none.jsonl"),
    ("tabom.py --data {t} --out {t}", "is a file"), ("tabom.py --data {t} --out {o} --targets nope", "nope"),
    ("eval.py --model {m} --prompts {p} --adapter {d}/none --out {o}", "none"),
    ("eval.py --model {m} --prompts {p} --out {o}", "no answer"),
    ("eval.py --model {m} --prompts {p} {d}/q/p.jsonl --out {o}", "stem"),
    ("eval.py --model {m} --prompts {p} --out {o} --parallel 2 --steps 4", "--parallel [2]"),
    ("eval.py --model {m} --prompts {p} --out {o} --parallel 0", "--parallel [0]"),
    ("eval.py --model {m} --prompts {p} --out {o} --batch-size 0", "--batch-size 0"),
    ("eval.py --model {m} --order {t} --out {o} --window 1", "--window 1"),
    ("eval.py --model {m} --order {t} --out {o} --tds 3", "--tds 3"),
    ("eval.py --model {m} --tasks gsm8k --out {o} --parallel 2", "--tokens-per-step"),
    ("eval.py --model {m} --ce {t} {d}/none.jsonl --out {o}", "none.jsonl"),
    ("eval.py --curves {d}/nowhere/log.jsonl --out {o}", "nowhere"), ("eval.py --tune {d}", "--tune"),
    ("decode.py --model {m} --prompts {p} --out /dev/null", "is no ordinary file"),
    ("decode.py --model {m} --prompts {p} --out {o} --adapter=", "--adapter ''"),
    ("tabom.py --data {t} --out=", "--out ''"), ("eval.py --model {m} --out {o}", "nothing to measure"),
    ("eval.py --model {m} --tasks x --task-path {d}/none --out {o}", "--task-path"),
    ("bench.py --plan dream --json {d}", "is a folder"),
    ("toy.py --out {p}", "p.jsonl: File exists"), ("toy.py --out {o} --batch-size 99999999", "--batch-size 99999999"),
    ("toy.py --out {o} --seed 99999999999999999999", "--seed 99999999999999999999"),
    ("bench.py --plan dream --gpu-tflops nan", "--gpu-tflops nan"), ("bench.py --repeats 0", "--repeats 0"),
    ("toy.py --out {o} --target 7", "--target 7"), ("toy.py --out {o} --seed -1", "--seed -1"),
    ("toy.py --out {o} --test-prompts 20000", "--test-prompts 20000"), ("toy.py --out {o} --lr nan", "--lr nan"),
])
def test_wrong_settings_end_with_one_line_and_write_nothing(command, words, folders, tmp_path, capsys, monkeypatch):
    i = ids_of("llada")
    model = dict(name=folders["llada"], mask_id=i.mask, vocab_size=i.vocab, end_ids=[i.eos])
    trajectories = write_lines(tmp_path / "t.jsonl", [
        good_record() | dict(response_token_ids=[4, 5, i.eos, i.mask], model=model)])
    prompts = write_lines(tmp_path / "p.jsonl", [dict(prompt="abc")])
    names = dict(m=folders["llada"], p=prompts, o=tmp_path / "o", d=tmp_path, t=trajectories)
    before = sorted(str(f) for f in tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", command.format(**names).split())
    with pytest.raises(SystemExit) as e:
        __import__(command.partition(".py")[0]).main()
    lines = capsys.readouterr().err.strip().splitlines()
    assert e.value.code == 2 and len(lines) == 1 and words in lines[0], lines
    left = sorted(str(f) for f in tmp_path.rglob("*") if f.name != "o" or command.startswith("eval"))
    assert left == before


def test_no_source_file_of_ours_reads_pickles_or_runs_text():
    for file in HERE.glob("*.py"):
        source = file.read_text() if file.name != "test_tabom.py" else ""
        for word in ("import pickle", "torch.load(", "torch.save(", "trust_remote_code=True", "exec(", " eval(",
                     "os.system", "shell=True"):
            assert word not in source, f"{file.name} has {word}"


@contextlib.contextmanager
def full_disk(disk: Path, kb: int, limit: int):
    """with full_disk(folder, 64, 64) as run: run(argv) fills a tmpfs of so many KB and gives its last line on stderr;
    then the disk is large. Where none may be mounted: a limit on each file's size, which fails such a write too."""
    disk.mkdir()
    mount = lambda *how: subprocess.run(["mount", *how, "tmpfs", disk], capture_output=True).returncode == 0
    mounted = mount("-t", "tmpfs", "-o", f"size={kb}k")
    limited = [] if mounted else ["bash", "-c", f'ulimit -f {limit}; trap "" XFSZ; exec "$@"', "limited"]

    def run(*argv) -> str:
        out = subprocess.run([*limited, sys.executable, *map(str, argv)], cwd=HERE, env=one_thread(),
                             capture_output=True, text=True)
        assert out.returncode == 2 and "Traceback" not in out.stderr, out.stderr
        assert not mounted or mount("-o", "remount,size=64m")
        return out.stderr.strip().splitlines()[-1]
    try:
        yield run
    finally:
        if mounted:
            subprocess.run(["umount", disk], check=True)


def test_full_disk_keeps_every_finished_record(folders, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [dict(id=n, prompt="abc" * (1 + n % 5)) for n in range(200)])
    argv = ["decode.py", "--model", folders["llada"], "--prompts", prompts, "--length", 16, "--out"]
    with full_disk(tmp_path / "disk", 64, 64) as run:
        said = run(*argv, tmp_path / "disk" / "t.jsonl")
        lines = (tmp_path / "disk" / "t.jsonl").read_bytes()
        assert "keeps every finished record; run the same command again" in said
        assert lines.endswith(b"\n") and all(json.loads(x) for x in lines.splitlines()) and len(lines) > 10000


def test_full_disk_in_training_keeps_the_last_resume_point(train, tmp_path):
    """Room for the log and the resume point of step 4 (200 KB), none for the adapter of the epoch's end, step 6."""
    flags, out = "--rank 32 --targets q_proj k_proj v_proj attn_out --epochs 2 --save-every 4", tmp_path / "disk/run"
    with full_disk(tmp_path / "disk", 240, 48) as run:
        said = run("tabom.py", "--data", train.data, "--out", out, *QUICK, *flags.split())
        assert "device; free some space; --out keeps the last resume point" in said or "File too large" in said
        assert not list(out.glob("epoch-1*"))            # nor rubbish, on a full disk
        assert "File too large" in said or sorted(p.name for p in out.glob("resume-*")) == ["resume-0000004"]
        assert_same_run(train("disk/run", flags + " --resume"), train("whole", flags))


# toy.py with fewer prompts: it takes 15 seconds to draw them all
TOY = """import toy
draw = toy.draw
toy.draw = lambda domain, split, count, *x: draw(domain, split, min(count, 32 if split == "val" else 400), *x)
toy.main()
"""


def same_files(a: Path, b: Path):
    for f in (f for f in a.rglob("*") if f.is_file()):
        assert f.read_bytes() == (b / f.relative_to(a)).read_bytes(), f


def test_toy_that_diverges_stops_and_writes_no_model(tmp_path, monkeypatch, refused):
    import toy
    monkeypatch.setattr(toy, "draw", toy.draw)
    monkeypatch.setattr(sys, "argv", f"toy.py --lr 1e30 --max-steps 9 --batch-size 4 --out {tmp_path}/toy".split())
    with refused(": the loss is nan; lower --lr"):
        exec(TOY, {})
    assert not list(tmp_path.rglob("*.safetensors"))


def test_toy_goes_on_after_a_full_disk_and_ctrl_c(tmp_path, monkeypatch):
    import toy
    argv = ["-c", TOY, "--max-steps", 50, "--batch-size", 4, "--save-every", 20, "--out"]
    out = tmp_path / "disk" / "toy"
    with full_disk(tmp_path / "disk", 3000, 3000) as run:                    # a resume point has 4 MB
        said = "keeps the last resume point; run the same command again to go on"
        assert f"; {out} {said}" in run(*argv, out) and not (out / "resume.safetensors").exists()
        assert ctrl_c([*argv, out], lambda _: (out / "resume.safetensors").exists()) == f"interrupted; {out} {said}"
        monkeypatch.setattr(toy, "draw", toy.draw)       # TOY replaces it
        for folder in (out, tmp_path / "whole"):
            monkeypatch.setattr(sys, "argv", [*map(str, argv[1:]), str(folder)])
            exec(TOY, {})
        same_files(tmp_path / "whole", out)


# ---------------------------------------------------------------- bench.py; no test asserts a time

@pytest.mark.parametrize("name, parameters, adapter, fits", [
    ("dream", "7,615,616,512", "5,046,272", ["no", "yes"]), ("llada", "8,015,581,184", "8,388,608", ["no", "yes"])])
def test_plan_is_of_the_real_models(name, parameters, adapter, fits, monkeypatch, capsys):
    import bench
    monkeypatch.setattr(sys, "argv", f"bench.py --plan {name} --ranks 4".split())
    bench.main()
    shown = capsys.readouterr().out
    assert f"{name}: {parameters} parameters" in shown and f"q and v {adapter}." in shown
    assert re.search(r"fits 24 GB +(\w+) +(\w+)", shown).groups() == tuple(fits)       # only with --grad-checkpoint
    assert "4 GPUs that achieve 400 TFLOP/s" in shown and shown.count("sum, without *") == 2


def test_formulas_of_plan_are_what_small_shapes_measure(monkeypatch, tmp_path):
    import bench
    monkeypatch.setattr(sys, "argv", f"bench.py --only check --quick --json {tmp_path}/b.json".split())
    bench.main()
    report = json.loads((tmp_path / "b.json").read_text())
    rows = next(v for title, v in report.items() if title.startswith("Formulas"))
    assert len(rows) == 8 and all(1 / 1.15 < r["formula/measured"] < 1.15 for r in rows), rows


def test_plain_step_and_plain_decoding_are_ours_done_slowly():
    """What bench.py races against computes the same: losses to 1e-5, tokens to the last."""
    import bench
    shape, work = dict(bench.DREAM, layers=2, vocab=300), dict(bench.WORK, N=24, W=6, prompt=(5, 5))
    model, params, _ = bench.trainer(shape)
    still, batch = torch.optim.SGD(params, lr=0.0), bench.make_batches(shape, work, 1)[0]
    ours = bench.our_step(model, params, still, batch)
    assert abs(ours - bench.plain_step(model, params, still, batch)) < 1e-5 * ours
    prompts = [(i, [i + 2, *range(3, 8 + 3 * i)]) for i in range(4)]
    for s in (bench.settings(16, 2), bench.settings(16, 2, block=8, score="confidence", clean=True)):
        scripted = bench.Scripted(bench.build(shape), [16, 9, 4, 12], 16)
        got = {r.key: r.canvas for r in bench.decode(scripted, prompts, s, 3)}
        plain = bench.plain_decode(scripted, prompts, s)
        for i, end in enumerate([16, 9, 4, 12]):
            assert (got[i][:end + 1] == plain[i][:end + 1]).all()


def test_heavy_packages_come_only_when_needed():
    code = "import sys, tabom, eval, bench; print([m for m in %r if m in sys.modules])" % (
        ["transformers", "datasets", "lm_eval", "peft", "matplotlib", "pandas", "pyarrow", "sympy", "math_verify"],)
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True).stdout == "[]\n"


# ---------------------------------------------------------------- the long trials: ./run.sh soak

soak = pytest.mark.skipif(not os.environ.get("SOAK"), reason="long; ./run.sh soak")
TIMES = int(os.environ.get("SOAK_KILLS", 20))


def killed_often(argv: list[str], whole: Path, out: Path, check):
    """argv --out whole in peace; then argv --out out, killed TIMES times at moments spread over as long as that took.
    A run that ends before its moment is checked, wiped, and begun anew; so is the last one, which nobody kills."""
    rng, kills, ends, clock = random.Random(0), 0, 0, time.time()
    start = lambda to: subprocess.Popen([sys.executable, *map(str, argv), "--out", str(to)], cwd=HERE, env=one_thread(),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    job, longest = start(whole), None
    while True:
        try:
            _, err = job.communicate(timeout=rng.uniform(0.2, longest) if longest and kills < TIMES else None)
            assert job.returncode == 0, err.decode()[-1000:]
            if longest:
                check()
                ends += 1
                if kills == TIMES:
                    break
                shutil.rmtree(out) if out.is_dir() else out.unlink()
            longest = longest or time.time() - clock
        except subprocess.TimeoutExpired:
            job.kill()                                   # torchrun's ranks die with it
            job.communicate()
            kills += 1
        job = start(out)
    print(f"\n{out.parent.name}: killed {kills} times in {time.time() - clock:.0f} s; {ends} ends, each equal to the "
          f"run of {longest:.0f} s in peace")
    assert kills == TIMES


def torchrun(ranks: int, argv: list[str]) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return argv if ranks == 1 else [*launch, *argv]


@soak
def test_soak_toy_killed_20_times_equals_whole(tmp_path):
    """A target below chance: passed at the first look, step 400, so that the search for the first such step is met."""
    argv = ["-c", TOY, "--max-steps", 440, "--batch-size", 8, "--save-every", 20, "--target", 0.02]
    killed_often(argv, tmp_path / "a", tmp_path / "b", lambda: same_files(tmp_path / "a", tmp_path / "b"))
    assert json.loads((tmp_path / "a" / "toy.json").read_text())["steps"] <= 400


@soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_soak_decoding_killed_20_times_equals_whole(ranks, folders, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [dict(id=n, prompt="abcd"[: 1 + n % 4] * 3) for n in range(1000)])
    argv = ["decode.py", "--model", folders["llada"], "--prompts", prompts, "--length", "32"]

    def check():
        a, b = (sorted((tmp_path / f"{x}.jsonl").read_bytes().splitlines(keepends=True)) for x in "ab")
        assert a == b, f"{len(set(a) & set(b))} of {len(a)} lines equal"
    killed_often(torchrun(ranks, argv), tmp_path / "a.jsonl", tmp_path / "b.jsonl", check)


@soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_soak_training_killed_20_times_equals_whole(ranks, folders, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [dict(id=n, prompt="abcd"[: 1 + n % 4] * 3) for n in range(60)])
    subprocess.run([sys.executable, "decode.py", "--model", folders["llada"], "--prompts", prompts, "--length", "16",
                    "--out", str(tmp_path / "t.jsonl")], cwd=HERE, check=True, capture_output=True)
    argv = ["tabom.py", "--data", str(tmp_path / "t.jsonl"), "--all", "--window", "4", "--batch-size", str(8 // ranks),
            "--max-steps", "500", "--lr", "1e-3", "--save-every", "7", "--resume"]

    def check():
        assert_same_run(tmp_path / "a", tmp_path / "b")
        for f in sorted((tmp_path / "a").rglob("adapter_model.safetensors")):
            assert f.read_bytes() == (tmp_path / "b" / f.relative_to(tmp_path / "a")).read_bytes(), f
        assert len(log_of(tmp_path / "b")[1]) == 500
    killed_often(torchrun(ranks, argv), tmp_path / "a", tmp_path / "b", check)


@soak
def test_soak_memory_and_files_stay_flat(tmp_path):
    """toy.py, decode.py and tabom.py whole, in one process, over and over (SOAK_MINUTES, 30): memory within 5 %, open
    files flat, the first tenth of the rounds against the last."""
    code = f"""if 1:
        import contextlib, os, shutil, sys, time
        import numpy as np
        import decode, tabom, toy
        quiet = open(os.devnull, "w")
        def run(main, line):
            sys.argv = line.split()
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                main()
        draw, end, seen = toy.draw, time.time() + 60 * {float(os.environ.get("SOAK_MINUTES", 30))}, []
        toy.draw = lambda domain, split, count, *x: draw(domain, split, min(count, 200), *x)
        while time.time() < end:
            n, out = len(seen), "{tmp_path}/" + str(len(seen))
            run(toy.main, f"toy.py --seed {{n}} --max-steps 60 --batch-size 32 --save-every 20 --out {{out}}")
            run(decode.main, f"decode.py --model {{out}}/model --prompts {{out}}/train.jsonl --length 26 --seed {{n}}"
                             f" --temperature 0.5 --out {{out}}/t.jsonl")
            run(tabom.main, f"tabom.py --data {{out}}/t.jsonl --all --window 4 --batch-size 16 --save-every 10"
                            f" --seed {{n}} --max-steps 40 --out {{out}}/run")
            shutil.rmtree(out)
            seen.append((int(open("/proc/self/statm").read().split()[1]) * 4096, len(os.listdir("/proc/self/fd"))))
        tenth = max(1, len(seen) // 10)
        print(len(seen), *np.mean(seen[:tenth], 0), *np.mean(seen[-tenth:], 0))"""
    run = subprocess.run([sys.executable, "-c", code], cwd=HERE, env=one_thread(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    rounds, memory, files, memory_end, files_end = map(float, run.stdout.split())
    print(f"\n{rounds:.0f} rounds: {memory / 1e6:.0f} -> {memory_end / 1e6:.0f} MB, {files:.0f} -> {files_end:.0f} fds")
    assert abs(memory_end / memory - 1) < 0.05 and files == files_end


# ---------------------------------------------------------------- README.md keeps its word

def test_equation_table_points_at_its_lines():
    rows = re.findall(r"^\|.*\| `(\w+\.py):(\d+)` \| `(.+)` \|$", (HERE / "README.md").read_text(), re.M)
    assert len(rows) >= 10
    for file, line, code in rows:
        there = (HERE / file).read_text().splitlines()[int(line) - 1]
        assert code.replace("\\|", "|") in there, f"README says {file}:{line} is {code}, it is {there.strip()}"


def test_file_list_is_of_the_tree():
    rows = re.findall(r"^\| `([\w.]+)` \| (\d+) \|", (HERE / "README.md").read_text(), re.M)
    assert {f for f, _ in rows} >= {f.name for f in HERE.glob("*.py")} | {"run.sh"}
    for file, count in rows:
        lines = len((HERE / file).read_text().splitlines())
        assert abs(lines - int(count)) <= 0.05 * lines, f"README says {file} has {count} lines, it has {lines}"


def with_diff(number: int, folder: Path) -> Path:
    """A copy of our files with README's diff applied; at most 15 lines of it."""
    diff = re.findall(r"```diff\n(.*?)```", (HERE / "README.md").read_text(), re.S)[number]
    assert len(diff.splitlines()) <= 15
    folder.mkdir()
    for f in HERE.glob("*.py"):
        shutil.copy(f, folder)
    (folder / "fork.diff").write_text(diff)
    env = dict(os.environ, GIT_CEILING_DIRECTORIES=str(folder.parent))
    subprocess.run(["git", "apply", "--unidiff-zero", "fork.diff"], cwd=folder, check=True, env=env)
    return folder


def test_fork_another_ranking_loss(tmp_path):
    code = """if 1:
        import torch, tabom
        torch.manual_seed(0)
        logits, x0 = torch.randn(4, 9), torch.randint(9, (4,))
        slot = torch.tensor([[2, 0, 3, 1]])
        rank = tabom.tabom_loss(*tabom.TokenStats.apply(logits, x0), slot, slot >= 0, 1.0, 0.2)[2].item()
        h = [torch.distributions.Categorical(logits=logits[i]).entropy().item() for i in (2, 0, 3, 1)]
        want = [torch.log1p(torch.tensor(h[r] - h[s] + 0.2).exp()).item() for r in range(4) for s in range(r + 1, 4)]
        assert abs(rank - sum(want) / 6) < 1e-5, (rank, want)"""
    subprocess.run([sys.executable, "-c", code], cwd=with_diff(0, tmp_path / "f"), check=True)


def test_fork_another_score(tmp_path, folders, nets):
    prompts, out = write_lines(tmp_path / "p.jsonl", [dict(prompt="abc")]), tmp_path / "t.jsonl"
    argv = [sys.executable, "decode.py", "--model", folders["llada"], "--prompts", prompts, "--out", out, "--length=8"]
    subprocess.run([*argv, "--score", "second"], cwd=with_diff(1, tmp_path / "f"), check=True, capture_output=True)
    r, c = json.loads(out.read_text()), nets["llada"].config
    with torch.no_grad():
        p = nets["llada"](torch.tensor([r["prompt_token_ids"] + [c.mask_id] * 8]))[0, -8:].softmax(-1)
    assert r["method"] == "second" and r["decoding_order"][int(p.sort(-1).values[:, -2].argmin())] == 0


def test_fork_another_model_family(tmp_path, folders):
    """A Llama-shaped diffusion model: Dream's names without the biases, LLaDA's tokenizer, no shift."""
    folder = tmp_path / "m"
    shutil.copytree(folders["llada"], folder)
    weights = load_file(Path(folders["Dream"]) / "model.safetensors")
    save_file({k: v for k, v in weights.items() if not k.endswith("bias")}, folder / "model.safetensors")
    i = ids_of("Dream")
    config = config_of("Dream") | dict(model_type="llama-mdm", mask_token_id=i.mask, eos_token_id=i.eos)
    (folder / "config.json").write_text(json.dumps(config))
    prompts, out = write_lines(tmp_path / "p.jsonl", [dict(prompt="abc")]), tmp_path / "t.jsonl"
    argv = [sys.executable, "decode.py", "--model", folder, "--prompts", prompts, "--out", out, "--length", "8"]
    subprocess.run(argv, cwd=with_diff(2, tmp_path / "f"), check=True, capture_output=True)
    assert json.loads(out.read_text())["method"] == "confidence"
    again = subprocess.run(argv, cwd=HERE, capture_output=True, text=True)
    assert again.returncode == 2 and "llama-mdm" in again.stderr         # without the diff it is refused by name


def test_verdicts_follow_their_rule(tmp_path, capsys):
    def put(base, label, maths, logic, tds=0.5):
        file = tmp_path / base / "results" / f"{label}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        shares = {"test-math/1": maths, "test-math/2": 10, "test-logic/1": logic}
        file.write_text(json.dumps(dict(device="", torch="", commit="", tds=tds, accuracy={
            k: dict(share=v / 100, n=100) for k, v in shares.items()})))

    for b in range(3):
        base, e = f"base{b}", b / 10
        put(base, "base", 40, 90)
        for seed, noise in (2 * b, 5), (2 * b + 1, -5):                  # seeds differ, their mean over a base does not
            put(base, f"tabom@{seed}", 60 + e + noise, 88.8 + e)         # loses 1.1 points: less than 2 for sure
            put(base, f"sft-sd@{seed}", 50 + noise, 86)                  # loses 4
            put(base, f"sft-gt@{seed}", 60, 90 - 10 * b)
            put(base, f"global@{seed}", 70 + noise, 90)
        for label, maths in (("lam1-gamma0.1", 50), ("lam1-gamma0.3", 50 + e), ("window2", 55), ("window26", 71)):
            put(base, f"{label}@{2 * b}", maths + 5, 90)
    put("base0", "ce-only@0", 40, 90)
    evaluate.report(tmp_path)
    lines = [[x.strip() for x in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    told = {line[0].split(".")[0]: line[1:] for line in lines if re.match(r"\d\w?\. ", line[0])}
    want = {"1": "not run", "2a": "not shown", "2b": "contrary", "2c": "shown", "3a": "shown", "3c": "not run",
            "3d": "shown", "6": "contrary", "6b": "contrary", "7": "shown"}
    assert {k: told[k][0] for k in want} == want
    assert told["2c"][1].startswith("TABOM more by +10.10 ± 0.06 points (3 bases, 6 runs)")  # not 5 points of seeds
    assert ["local window, CE only", "+0.0 (n = 1)", "+0.0 (n = 1)", "+0.0 (n = 1)", "82.50"] in lines
    assert ["26", "+36.0 ± 0.0 (n = 3)", "+0.0 ± 0.0 (n = 3)", "75.36"] in lines            # not the --window 0 runs


def test_report_of_the_committed_study_is_what_its_results_say(tmp_path):
    shutil.copytree(HERE / "study", tmp_path / "study")
    evaluate.report(tmp_path / "study")
    assert (tmp_path / "study" / "report.md").read_text() == (HERE / "study" / "report.md").read_text()
