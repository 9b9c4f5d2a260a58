"""Every claim of this project that a CPU can check. Each test is named for its claim and compares with something that
shares no code with it: plain loops, hand-written native decoders, the real transformers, the real peft.

    OMP_NUM_THREADS=1 python -m pytest -q test_tabom.py

Checkpoints are tiny, random and made on the fly (`tiny`). Letters: B rows, T length, N canvas, V vocabulary.
"""
import argparse
import contextlib
import json
import math
import os
import pickle
import re
import runpy
import shutil
import signal
import string
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import data
import decode
import lora
import model as models

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
                                    break_family, break_remote, break_kind, break_config, break_bin])
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
    assert asked == ["org/name", "*.json", "*.safetensors", "*.txt", "*.jinja"]           # neither code nor pickles


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
    assert data.read_prompts(str(tmp_path / "p.parquet")) == data.read_prompts(write_lines(tmp_path / "p.jsonl", rows))
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


@both
def test_prompts_go_through_the_chat_template_or_raw(family, folders):
    tok, it = models.load_tokenizer(folders[family]), data.item("here", dict(prompt="1+2"), 0)
    assert tok.decode(data.prompt_ids(tok, it)) == "[user]1+2[assistant]"
    assert tok.decode(data.prompt_ids(tok, it, raw=True)) == "1+2"


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
    ("correct", "yes", "correct"), ("method", 3, "method"),
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
        assert r["model"] == dict(name=folders[family], mask_id=i.mask, vocab_size=i.vocab, end_ids=[i.eos, i.eot])
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
                    *cli.argv("two.jsonl", "--length 12 --temperature 0.7 --batch-size 2")],
                   env=one_thread(), check=True, capture_output=True, timeout=120)
    same(read(tmp_path / "two.jsonl"), whole)


def test_ctrl_c_keeps_what_is_finished_and_the_run_goes_on(cli, tmp_path):
    flags, path = "--length 96 --batch-size 1", tmp_path / "t.jsonl"
    p = subprocess.Popen([sys.executable, *cli.argv("t.jsonl", flags)], env=one_thread(),
                         stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    end = time.time() + 60
    while time.time() < end and p.poll() is None and not (path.exists() and path.stat().st_size):
        time.sleep(0.01)
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=60)
    assert p.returncode == 130 and "Traceback" not in err
    assert "interrupted" in err and "run the same command again" in err
    assert 1 <= len(read(path)) < len(TASKS)
    same(cli("t.jsonl", flags), cli("whole.jsonl", flags))


@pytest.mark.parametrize("moment", ["read_prompts", "load"])
def test_ctrl_c_before_the_first_step_is_no_traceback_either(moment, cli, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(decode, moment, interrupted)
    monkeypatch.setattr(os, "_exit", sys.exit)           # the real one would end the tests as well
    with pytest.raises(SystemExit) as e:
        cli("t.jsonl")
    assert e.value.code == 130 and "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("flags, words", [
    ("--length 10 --block 3", "multiple of the block"), ("--length 0", "--length 0"),
    ("--length 8 --steps 9", "--steps 9"), ("--length 8 --block 2 --steps 3", "--steps 3"),
    ("--length 8 --steps 4 --tokens-per-step 2", "one follows from the other"),
    ("--length 8 --tokens-per-step 9", "--tokens-per-step 9"),
    ("--length 8 --tokens-per-step -1", "--tokens-per-step -1"),
    ("--schedule dream --block 8", "--schedule dream"), ("--schedule dream --threshold 0.5", "--schedule dream"),
    ("--threshold 1.5", "--threshold 1.5"), ("--temperature -1", "--temperature -1"),
    ("--temperature nan", "--temperature nan"), ("--top-p 0", "--top-p 0"), ("--top-k -1", "--top-k -1"),
    ("--batch-size 0", "--batch-size 0"), ("--limit -1", "--limit -1"),
    ("--length 500", "do not fit the model's 512 positions"), ("--prompts nowhere.jsonl", "nowhere.jsonl"),
    ("--model nowhere", "nowhere"), ("--out no/such/t.jsonl", "its folder is not there"), ("--out .", "is a folder"),
    ("--adapter nowhere", "nowhere"),
])
def test_wrong_settings_end_with_one_line_before_anything_is_written(flags, words, cli, tmp_path, monkeypatch, refused):
    if "--adapter" not in flags:                         # the rest is known before any weight is read
        monkeypatch.setattr(decode, "load", None)
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
