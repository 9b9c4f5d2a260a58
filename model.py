"""A bidirectional transformer that loads LLaDA and Dream checkpoints, without their remote code.

    model, tok = load("GSAI-ML/LLaDA-8B-Instruct", "cuda", torch.bfloat16), load_tokenizer("GSAI-ML/LLaDA-8B-Instruct")
    logits = model(ids, real, at)          # one row a True of `at`; row i predicts token i, whatever the family

What differs between the families stands in FAMILIES and nowhere else. The modules sit at the hub's own paths, so that a
checkpoint loads and an adapter saves without renaming. Letters: B batch, T length, C width, D head width, V vocabulary.
"""
import argparse
import ctypes
import functools
import json
import os
import signal
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

if Path(getattr(sys.modules["__main__"], "__file__", "/")).resolve().parent == Path(__file__).resolve().parent:
    def interrupted(*_):                # Ctrl-C while torch is imported, which a script does after us; then data.safely
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, b"\ninterrupted before anything was written; run the same command again\n")
        os._exit(130)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupted)
    if "TORCHELASTIC_RESTART_COUNT" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG: a killed torchrun takes its ranks along,
        parent = Path(f"/proc/{os.getppid()}/cmdline")
        if parent.exists() and b"python" not in parent.read_bytes():
            os._exit(1)                 # also if it was gone before that: our parent is no launcher, but init

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

FAMILIES = {
    "llada": dict(
        fields=dict(width="d_model", layers="n_layers", heads="n_heads", kv_heads="n_kv_heads", mlp="mlp_hidden_size",
                    vocab="embedding_size", theta="rope_theta", eps="rms_norm_eps", positions="max_sequence_length",
                    tied="weight_tying", mask_id="mask_token_id", eos_id="eos_token_id", pad_id="pad_token_id"),
        require=dict(block_type="llama", layer_norm_type="rms", include_bias=False, include_qkv_bias=False, alibi=False,
                     rope=True, attention_layer_norm=False, input_emb_norm=False, scale_logits=False),
        embed="model.transformer.wte", blocks="model.transformer.blocks", norm="model.transformer.ln_f",
        head="model.transformer.ff_out",
        block=dict(attn_norm="attn_norm", q="q_proj", k="k_proj", v="v_proj", o="attn_out",
                   mlp_norm="ff_norm", gate="ff_proj", up="up_proj", down="ff_out"),
        shift=False,                    # hidden state i gives the logits of token i
        rope_fp32=True, qkv_bias=False,
        eot="<|eot_id|>", tokenizer="PreTrainedTokenizerFast",
        decode=dict(score="confidence", schedule="even", temperature=0.0, top_p=1.0, clean=True)),
    "Dream": dict(
        fields=dict(width="hidden_size", layers="num_hidden_layers", heads="num_attention_heads",
                    kv_heads="num_key_value_heads", mlp="intermediate_size", vocab="vocab_size", theta="rope_theta",
                    eps="rms_norm_eps", positions="max_position_embeddings", tied="tie_word_embeddings",
                    mask_id="mask_token_id", eos_id="eos_token_id", pad_id="pad_token_id"),
        require=dict(hidden_act="silu", rope_scaling=None, use_sliding_window=False, use_mrope=False),
        embed="model.embed_tokens", blocks="model.layers", norm="model.norm", head="lm_head",
        block=dict(attn_norm="input_layernorm", q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj",
                   o="self_attn.o_proj", mlp_norm="post_attention_layernorm", gate="mlp.gate_proj", up="mlp.up_proj",
                   down="mlp.down_proj"),
        shift=True,                     # hidden state i - 1 gives the logits of token i
        rope_fp32=False, qkv_bias=True,
        eot="<|im_end|>", tokenizer="Qwen2Tokenizer",
        decode=dict(score="entropy", schedule="dream", temperature=0.1, top_p=0.9, clean=False)),
}


def stop(message: str, everywhere: bool = False):
    """A user's mistake: one line, exit code 2, no traceback. Every local rank makes the same one and the first tells;
    everywhere: what a rank may meet alone, each tells its own."""
    if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        who = f"rank {os.environ['RANK']}: " if everywhere and "RANK" in os.environ else ""
        print(who + message, file=sys.stderr, flush=True)
    raise SystemExit(2)


class Flags(argparse.ArgumentParser):
    """argparse whose complaints are one line too."""
    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        stop(f"{message}; {self.prog} --help lists the flags")

    def parse_args(self, *own):
        a = super().parse_args(*own)
        for k, v in vars(a).items():                    # an unset shell variable, most likely
            if v == "" or (isinstance(v, list) and "" in v):
                stop(f"--{k.replace('_', '-')} '': is empty; give a value, or leave the flag out")
        return a


def put(root: nn.Module, path: str, child: nn.Module):
    """Hangs child at a dotted path below root, making what lies between."""
    *parents, name = path.split(".")
    for p in parents:
        if not hasattr(root, p):
            root.add_module(p, nn.Module())
        root = getattr(root, p)
    root.add_module(name, child)


def part(root: nn.Module, path: str) -> nn.Module:
    return functools.reduce(getattr, path.split("."), root)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotate(x, cos, sin):
    """Half-rotation RoPE: x (B, H, T, D), cos and sin (B, 1, T, D)."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Block(nn.Module):
    def __init__(self, c, family: dict):
        super().__init__()
        self.heads, self.kv_heads = c.heads, c.kv_heads
        self.rope_fp32, self.names = family["rope_fp32"], family["block"]
        D, bias = c.width // c.heads, family["qkv_bias"]
        for name, make in dict(
            attn_norm=RMSNorm(c.width, c.eps), mlp_norm=RMSNorm(c.width, c.eps),
            q=nn.Linear(c.width, c.width, bias), k=nn.Linear(c.width, c.kv_heads * D, bias),
            v=nn.Linear(c.width, c.kv_heads * D, bias), o=nn.Linear(c.width, c.width, False),
            gate=nn.Linear(c.width, c.mlp, False), up=nn.Linear(c.width, c.mlp, False),
            down=nn.Linear(c.mlp, c.width, False),
        ).items():
            put(self, self.names[name], make)

    def do(self, name: str, x):
        return part(self, self.names[name])(x)          # looked up each time: LoRA may have replaced it

    def forward(self, x, cos, sin, mask, pick=None):
        B, T, C = x.shape
        h = self.do("attn_norm", x)                                                       # (B, T, C)
        q = self.do("q", h).view(B, T, self.heads, -1).transpose(1, 2)                    # (B, H, T, D)
        k = self.do("k", h).view(B, T, self.kv_heads, -1).transpose(1, 2)
        v = self.do("v", h).view(B, T, self.kv_heads, -1).transpose(1, 2)
        if self.rope_fp32:
            q, k = rotate(q.float(), cos, sin).to(v.dtype), rotate(k.float(), cos, sin).to(v.dtype)
        else:
            q, k = rotate(q, cos.to(v.dtype), sin.to(v.dtype)), rotate(k, cos.to(v.dtype), sin.to(v.dtype))
        if self.kv_heads != self.heads:                  # grouped queries: each k, v head serves several q heads
            k, v = (z.repeat_interleave(self.heads // self.kv_heads, 1) for z in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(B, T, C)
        x = x + self.do("o", a)
        if pick is not None:                             # last layer: nobody reads the other positions any more
            x = x[pick]                                                                   # (n, C)
        h = self.do("mlp_norm", x)
        return x + self.do("down", F.silu(self.do("gate", h)) * self.do("up", h))


class Model(nn.Module):
    def __init__(self, c, family: dict):
        super().__init__()
        self.config, self.family, self.grad_checkpoint = c, family, False
        # given its _weight: its own init is slow on meta
        put(self, family["embed"], nn.Embedding(c.vocab, c.width, _weight=torch.empty(c.vocab, c.width)))
        put(self, family["blocks"], nn.ModuleList(Block(c, family) for _ in range(c.layers)))
        put(self, family["norm"], RMSNorm(c.width, c.eps))
        put(self, family["head"], nn.Linear(c.width, c.vocab, False))
        if c.tied:
            part(self, family["head"]).weight = part(self, family["embed"]).weight

    def forward(self, ids, real=None, at=None):
        """ids (B, T); real (B, T) False on left padding; at (B, T) True where logits are wanted.
        Returns (n, V), one row a True of `at` in reading order, or (B, T, V) without `at`."""
        (B, T), c = ids.shape, self.config
        start = None if real is None else (~real).sum(1)                                 # (B,)  first real position
        pos = torch.arange(T, device=ids.device)[None]                                   # (1, T)
        pos = pos if real is None else (pos - start[:, None]).clamp(min=0)               # counts real tokens only
        D = c.width // c.heads
        freq = 1.0 / c.theta ** (torch.arange(0, D, 2, device=ids.device).float() / D)   # (D/2,)
        angle = pos[:, None, :, None].float() * freq.repeat(2)                           # (B, 1, T, D)
        cos, sin = angle.cos(), angle.sin()
        mask = None if real is None or bool(real.all()) else real[:, None, None, :]      # on keys: queries stay finite
        rows, cols = (torch.ones_like(ids, dtype=torch.bool) if at is None else at).nonzero(as_tuple=True)
        if self.family["shift"]:                         # token i is read off state i - 1, the first one off its own
            cols = (cols - 1).clamp(min=0) if start is None else torch.maximum(cols - 1, start[rows])
        x = part(self, self.family["embed"])(ids)                                        # (B, T, C)
        blocks = part(self, self.family["blocks"])
        for n, block in enumerate(blocks):
            pick = (rows, cols) if n == len(blocks) - 1 else None
            if self.grad_checkpoint and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, cos, sin, mask, pick, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask, pick)
        logits = part(self, self.family["head"])(part(self, self.family["norm"])(x))     # (n, V)
        return logits.view(B, T, -1) if at is None else logits


def find(name: str, *more: str) -> Path:
    """The local folder of a model: as it stands, or downloaded from the hub: its settings, and `more` files."""
    if os.path.isdir(name):
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        stop(f"{name}: no such folder; give a model folder or a hub name such as GSAI-ML/LLaDA-8B-Instruct")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.jinja", *more]))
    except Exception as e:
        stop(f"{name}: neither a folder here nor to be had from the hub ({type(e).__name__}); check the name and the "
             f"network, or download it elsewhere and pass its folder", everywhere=True)


def read_json(path: Path, first_line: bool = False, remedy: str = "download it again") -> dict:
    try:
        text = path.read_text("utf-8")
        value = json.loads(text.partition("\n")[0] if first_line else text)
    except OSError:
        stop(f"{path}: not there, or not to be read; a model or adapter folder needs its config")
    except (ValueError, RecursionError) as e:
        stop(f"{path}: not JSON ({e}); {remedy}")
    return value if isinstance(value, dict) else stop(f"{path}: holds no JSON object; {remedy}")


def read_config(name: str):
    """config.json as (c, family): c has width, layers, heads, ... under our names, c.folder and c.name."""
    folder = find(name)
    path, raw = folder / "config.json", read_json(folder / "config.json")
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        why = " and asks to run code of its own (auto_map), which is never done" if "auto_map" in raw else ""
        stop(f"{path}: model_type {raw.get('model_type')!r} is none of {', '.join(FAMILIES)}{why}; "
             f"a new family is one entry of FAMILIES in model.py")
    for key, value in family["require"].items():
        if raw.get(key, value) != value:
            stop(f"{path}: {key} is {raw[key]!r}, only {value!r} is built; use a checkpoint of that kind")
    missing = [f for f in family["fields"].values() if f not in raw]
    if missing:
        stop(f"{path}: field {missing[0]} is missing; take config.json from the model's hub page")
    c = SimpleNamespace(**{ours: raw[theirs] for ours, theirs in family["fields"].items()},
                        name=str(name), folder=folder, model_type=raw["model_type"])
    sizes = {k: v for k, v in vars(c).items() if k not in ("name", "folder", "tied", "model_type", "eps", "theta")}
    wrong = [k for k, v in sizes.items() if type(v) is not int or not (0 if "_id" in k else 1) <= v < 1 << 31]
    wrong += [k for k in ("eps", "theta") if type(getattr(c, k)) not in (int, float) or not 0 < getattr(c, k) < 1e30]
    wrong += [k for k in ("mask_id", "eos_id") if not wrong and not (getattr(c, k) < c.vocab and c.mask_id != c.eos_id)]
    if wrong or c.heads < 1 or c.width % c.heads or c.kv_heads < 1 or c.heads % c.kv_heads:
        key = family["fields"][wrong[0] if wrong else "heads"]
        stop(f"{path}: {key} is {raw[key]!r}, which cannot be; take config.json from the model's hub page")
    return c, family


def shards(folder: Path) -> dict[str, Path]:
    """{tensor name: the safetensors file it is in}."""
    index, single, where = folder / "model.safetensors.index.json", folder / "model.safetensors", {}
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        weight_map = weight_map if isinstance(weight_map, dict) else {}
        where = {key: folder / Path(str(file)).name for key, file in weight_map.items()}
        lost = [p for p in where.values() if not p.exists()]
        if lost or not where:
            stop(f"{lost[0]}: a shard named in {index.name} is missing; download the model again" if lost else
                 f"{index}: has no weight_map from tensors to files; download the model again")
    elif single.exists():
        try:
            with safe_open(single, "pt") as f:
                where = dict.fromkeys(f.keys(), single)
        except (SafetensorError, OSError) as e:
            stop(f"{single}: not a whole safetensors file ({e}); download it again")
    else:
        stop(f"{folder}: no model.safetensors and no index; "
             f"only safetensors are read, never .bin: convert or download it")
    return where


def tensors(where: dict[str, Path], device="cpu"):
    """(name, tensor), one at a time. A file is opened anew for each: a long-lived map would count as resident twice."""
    for key, path in sorted(where.items(), key=lambda kv: str(kv[1])):
        try:
            with safe_open(path, "pt", device=str(device)) as f:
                yield key, f.get_tensor(key)
        except (SafetensorError, OSError) as e:
            stop(f"{path}: cannot read {key} ({e}); download it again")


def fingerprint(folder) -> str:
    """Tells weights, or adapters, under one name apart: a hub snapshot by its commit, a folder by a checksum, of large
    files 64 KB of every 8 MB."""
    folder, crc = Path(folder).absolute(), 0
    if folder.parent.name == "snapshots":
        return folder.name[:8]
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            for start in range(0, size, 8 << 20):
                f.seek(start)
                crc = zlib.crc32(f.read(8 << 20 if size < 256 << 20 else 64 << 10), crc)
    return f"{crc:08x}"


def skeleton(name: str) -> Model:
    """The model without its weights: names and shapes, to find mistakes before gigabytes are read."""
    with torch.device("meta"):
        return Model(*read_config(name))


def fitting_shards(model: Model, folder: Path) -> dict[str, Path]:
    """shards, of just the tensors the model has."""
    where, want = shards(folder), dict(model.named_parameters())     # a tied head is one parameter and appears once
    where.pop(model.family["head"] + ".weight" if model.config.tied else "", None)
    odd = [k for k in want if k not in where] or [k for k in where if k not in want]
    if odd:
        what = "lacks" if odd[0] in want else "has the unknown"
        stop(f"{folder}: the checkpoint {what} tensor {odd[0]} ({len(odd)} in all); "
             f"it is not the model its config.json describes")
    return where


def load(name: str, device="cpu", dtype=torch.float32) -> Model:
    """The model with its weights, frozen, in eval mode. Needs their memory once: made on meta, then assigned."""
    model = skeleton(name)
    c, family, want = model.config, model.family, dict(model.named_parameters())
    where = fitting_shards(model, find(name, "*.safetensors"))
    for key, value in tensors(where, device):
        if value.shape != want[key].shape:
            stop(f"{where[key]}: {key} has shape {tuple(value.shape)}, config.json says {tuple(want[key].shape)}")
        holder, leaf = key.rsplit(".", 1)
        setattr(part(model, holder), leaf, nn.Parameter(value.to(dtype), requires_grad=False))
    if c.tied:
        part(model, family["head"]).weight = part(model, family["embed"]).weight
    return model.eval()


def load_tokenizer(name: str):
    """The tokenizer by the class in FAMILIES, never what the folder asks for; tok.end_ids are EOS and end of turn."""
    c, family = read_config(name)
    import transformers
    try:
        kind = getattr(transformers, family["tokenizer"])
        tok = kind.from_pretrained(c.folder, trust_remote_code=False, local_files_only=True)
    except Exception as e:
        stop(f"{c.folder}: its tokenizer does not load ({type(e).__name__}: {' '.join(str(e).split())[:200]}); "
             f"download it again")
    eot = tok.get_vocab().get(family["eot"])
    tok.end_ids = [c.eos_id] + ([eot] if eot is not None and eot != c.eos_id else [])
    return tok
