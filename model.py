"""
A bidirectional transformer for masked diffusion language models. Reads the hub's checkpoints without their remote code.

    config = read_config("Dream-org/Dream-v0-Instruct-7B")
    model  = load_model(config, "cuda", torch.bfloat16)
    logits = model(ids, attend, pos)       # (B, W, V): logits[b, w] predict the token at position pos[b, w]

B: batch, T: tokens, C: width, H: heads, D: width of a head, V: vocabulary, W: positions asked for
"""
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from util import read_json, stop

# -----------------------------------------------------------------------------
# the transformer

@dataclass
class Config:
    family: dict                       # an entry of FAMILIES, below: what differs between the families
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    theta: float
    eps: float
    tied: bool                         # the head's weight is the embedding's
    positions: int                     # the longest sequence the model was made for
    mask_id: int
    eos_id: int
    head_dim: int = 0                  # 0: width / heads, see below
    length: int = 256                  # response tokens, unless --length says otherwise
    model_type: str = ""               # its key in FAMILIES
    name: str = ""                     # hub name or folder, as the user gave it
    folder: Path | None = None         # where the files are

    def __post_init__(self):
        self.head_dim = self.head_dim or self.width // self.heads


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        # the weight is applied outside, as in the models' own code: inside, bf16 rounds differently
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps)


def rotate(x, cos, sin):
    """RoPE on x (B, H, T, D); the two halves of D are the pairs."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        D = c.head_dim
        bias, qk_norm = c.family["qkv_bias"], c.family["qk_norm"]
        self.heads, self.kv_heads = c.heads, c.kv_heads
        # attention; Qwen3-like families normalise q and k per head
        self.attn_norm = RMSNorm(c.width, c.eps)
        self.q = nn.Linear(c.width, c.heads * D, bias=bias)
        self.k = nn.Linear(c.width, c.kv_heads * D, bias=bias)
        self.v = nn.Linear(c.width, c.kv_heads * D, bias=bias)
        self.o = nn.Linear(c.heads * D, c.width, bias=False)
        self.q_norm = RMSNorm(D, c.eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, c.eps) if qk_norm else nn.Identity()
        # gated MLP
        self.mlp_norm = RMSNorm(c.width, c.eps)
        self.gate = nn.Linear(c.width, c.mlp, bias=False)
        self.up = nn.Linear(c.width, c.mlp, bias=False)
        self.down = nn.Linear(c.mlp, c.width, bias=False)

    def forward(self, x, cos, sin, attend):
        B, T, C = x.shape
        # attention without a causal mask: every token sees every other, left and right
        h = self.attn_norm(x)
        q = self.q_norm(self.q(h).view(B, T, self.heads, -1)).transpose(1, 2)                # (B, H, T, D)
        k = self.k_norm(self.k(h).view(B, T, self.kv_heads, -1)).transpose(1, 2)
        v = self.v(h).view(B, T, self.kv_heads, -1).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.kv_heads < self.heads:
            # grouped queries, by copies: the fused kernels do not take a mask together with enable_gqa
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attend)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, -1))
        # MLP
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.config = c
        self.grad_checkpoint = False
        self.embed = nn.Embedding(c.vocab, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width, c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, attend, pos):
        """
        ids (B, T); attend (B, T), False on left padding; pos (B, W), which of the T tokens to predict. Returns
        (B, W, V).
        """
        c = self.config
        T = ids.shape[1]
        # RoPE's positions begin with 0 at the first real token
        first = (~attend).sum(1, keepdim=True)                                               # (B, 1)  first real token
        index = (torch.arange(T, device=ids.device) - first).clamp(min=0)                    # (B, T)
        D = c.head_dim
        freq = 1.0 / c.theta ** (torch.arange(0, D, 2, device=ids.device).float() / D)       # (D / 2,)
        angle = (index[:, None, :, None] * freq).repeat(1, 1, 1, 2)                          # (B, 1, T, D)
        x = self.embed(ids)                                                                  # (B, T, C)
        dtype = torch.float32 if c.family["rope_fp32"] else x.dtype
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        # padding is masked as keys only, so that padded queries stay finite
        attend = attend[:, None, None, :]                                                    # (B, 1, 1, T)
        for block in self.blocks:
            if self.grad_checkpoint and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, attend, use_reentrant=False)
            else:
                x = block(x, cos, sin, attend)
        # the head is the largest matrix: it sees only the positions asked for
        if c.family["shift"]:
            pos = torch.maximum(pos - 1, first)                                              # no token before the first
        x = x.gather(1, pos[..., None].expand(-1, -1, x.shape[-1]))                          # (B, W, C)
        return self.head(self.norm(x))

    def compile_blocks(self, backend="inductor"):
        """Block by block: all blocks share one graph, and any length uses it (dynamic)."""
        # training, decoding and a disabled adapter each need a graph of their own
        torch._dynamo.config.recompile_limit = 64
        for block in self.blocks:
            block.compile(dynamic=True, backend=backend)


def log_probs(model, batch):
    """(B, W, V) in fp32, at the targets of a batch of tabom.collate."""
    return F.log_softmax(model(batch.ids, batch.attend, batch.pos).float(), dim=-1)


def entropy(logp):
    """Eq. 10, (..., V) -> (...), in nats: how uncertain the model is. What is ranked, logged and scored."""
    return -(logp.exp() * logp).sum(-1)


def pad(rows, fill=0, side="right"):
    """Arrays of different lengths as one tensor (B, the longest)."""
    return pad_sequence([torch.from_numpy(row) for row in rows], True, fill, side)


def pack(views, mask_id, device):
    """
    Views (data.View) as the model takes them: ids and attend (B, T), padded on the left, so that all responses end at
    T; pos (B, W), the targets in T.
    """
    rows = []
    for view in views:
        response = np.where(view.visible, view.traj.response, mask_id)
        rows.append(np.concatenate([view.traj.prompt, response]))
    ids = pad(rows, -1, "left")                                                              # (B, T)  -1: padding
    # a multiple of 8: crashes of fused attention were reported for masks of other lengths
    ids = F.pad(ids, (-ids.shape[1] % 8, 0), value=-1)
    T = ids.shape[1]
    # a row with fewer targets than others is filled up with the last position, whose prediction nobody reads
    pos = pad([T - len(view.visible) + view.targets for view in views], T - 1)               # (B, W)
    return [x.to(device) for x in (ids.clamp(min=0), ids >= 0, pos)]

# -----------------------------------------------------------------------------
# All that differs between the families, by the model_type in config.json.
# config:     our name -> the key in config.json
# require:    what else config.json must say, because nothing else is implemented
# names:      our module -> the hub's, so that checkpoints load, and adapters save, under the names all tools know
# shift:      hidden state i - 1 predicts token i
# rope_fp32:  rotate in fp32 instead of the type of the activations
# ends:       tokens that end a response; the first one also fills the rest of the canvas
# mask_token: where config.json has no mask_id, the tokenizer knows it by this name

# Dream and the small models are derived from Qwen
QWEN = dict(
    shift=False, qkv_bias=True, qk_norm=False, rope_fp32=False,
    config=dict(width="hidden_size", layers="num_hidden_layers", heads="num_attention_heads",
                kv_heads="num_key_value_heads", mlp="intermediate_size", vocab="vocab_size", theta="rope_theta",
                eps="rms_norm_eps", tied="tie_word_embeddings", positions="max_position_embeddings",
                eos_id="eos_token_id"),
    require=dict(hidden_act="silu", rope_scaling=None, rope_type="default", use_sliding_window=False, use_mrope=False),
    names=dict(embed="model.embed_tokens", blocks="model.layers", norm="model.norm", head="lm_head",
               attn_norm="input_layernorm", q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj",
               o="self_attn.o_proj", mlp_norm="post_attention_layernorm", gate="mlp.gate_proj", up="mlp.up_proj",
               down="mlp.down_proj", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    tokenizer="Qwen2Tokenizer", ends=["<|endoftext|>", "<|im_end|>"], mask_token="<|mask|>")

FAMILIES = {
    "llada": dict(
        shift=False, qkv_bias=False, qk_norm=False, rope_fp32=True,
        config=dict(width="d_model", layers="n_layers", heads="n_heads", kv_heads="n_kv_heads", mlp="mlp_hidden_size",
                    vocab="embedding_size", theta="rope_theta", eps="rms_norm_eps", tied="weight_tying",
                    positions="max_sequence_length", mask_id="mask_token_id", eos_id="eos_token_id"),
        require=dict(block_type="llama", layer_norm_type="rms", include_bias=False, include_qkv_bias=False, alibi=False,
                     rope=True, attention_layer_norm=False, input_emb_norm=False, scale_logits=False),
        names=dict(embed="model.transformer.wte", blocks="model.transformer.blocks", norm="model.transformer.ln_f",
                   head="model.transformer.ff_out", attn_norm="attn_norm", q="q_proj", k="k_proj", v="v_proj",
                   o="attn_out", mlp_norm="ff_norm", gate="ff_proj", up="up_proj", down="ff_out"),
        tokenizer="PreTrainedTokenizerFast", ends=["<|endoftext|>", "<|eot_id|>"]),
    "Dream": QWEN | dict(shift=True, config=QWEN["config"] | dict(mask_id="mask_token_id")),
    # small models: Qwen2.5-Coder-0.5B and Qwen3-0.6B, adapted to masked diffusion; Qwen3's heads have their own width
    "a2d-qwen2": QWEN,
    "a2d-qwen3": QWEN | dict(qkv_bias=False, qk_norm=True, config=QWEN["config"] | dict(head_dim="head_dim")),
}

# -----------------------------------------------------------------------------
# checkpoints and tokenizers

def find_folder(name: str, patterns: list[str]) -> Path:
    """A folder as it is, or the files of a hub model, downloaded into the hub's cache."""
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as e:
        reason = str(e).partition("\n")[0]
        stop(f"{name}: neither a folder nor a hub model that can be downloaded ({type(e).__name__}: {reason}); check "
             f"the name and the network")


def read_config(name: str) -> Config:
    folder = find_folder(name, ["*.json", "*.txt", "*.jinja"])
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type") not in FAMILIES:
        stop(f"{path}: model_type {raw.get('model_type')!r} is not one of {', '.join(FAMILIES)}; a new family is one "
             f"entry of FAMILIES in model.py")
    family = FAMILIES[raw["model_type"]]
    # another architecture might load and be silently wrong; of bd3lm only the name tells
    if "bd3lm" in f"{name} {raw.get('_name_or_path')}".lower():
        stop(f"{name}: bd3lm models attend causally between blocks, which is not implemented; use an mdlm checkpoint")
    raw |= raw.get("rope_parameters") or {}                # transformers 5 keeps RoPE's settings in there
    for key, value in family["require"].items():
        if raw.get(key, value) != value:
            stop(f"{path}: {key} is {raw[key]!r}, only {value!r} is implemented; use a checkpoint of that kind")
    # the rest under our names
    fields = {}
    for ours, theirs in family["config"].items():
        if theirs not in raw:
            stop(f"{path}: {theirs} is missing; take config.json from the model's hub page")
        fields[ours] = raw[theirs]
    if "mask_id" not in fields:
        fields["mask_id"] = find_mask(folder / "tokenizer.json", family["mask_token"])
    if (folder / "generation_config.json").exists():
        fields["length"] = read_json(folder / "generation_config.json").get("max_new_tokens") or Config.length
    return Config(family, **fields, model_type=raw["model_type"], name=name, folder=folder)


def find_mask(path: Path, mask_token: str) -> int:
    for token in read_json(path).get("added_tokens", []):
        if token["content"] == mask_token:
            return token["id"]
    stop(f"{path}: has no token {mask_token}; take it from a masked diffusion model's hub page")


def hub_name(name: str, family: dict) -> str:
    """blocks.3.q.weight -> model.layers.3.self_attn.q_proj.weight"""
    return ".".join(family["names"].get(part, part) for part in name.split("."))


def weight_files(config: Config) -> list[Path]:
    folder = find_folder(config.name, ["*.safetensors"])
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        stop(f"{folder}: no model*.safetensors; other formats, such as .bin, are never read: convert or download it")
    return files


def load_model(config: Config, device="cpu", dtype=torch.float32) -> Model:
    """The model with its weights, frozen. Made on the meta device, so that no second copy of them is ever needed."""
    with torch.device("meta"):
        model = Model(config)
    our_name = {hub_name(name, config.family): name for name in model.state_dict()}
    state = {}
    for file in weight_files(config):
        # read, not mapped: mapping is slow on network disks, and slower with one process per GPU
        with safe_open(file, "pt", device=str(device), backend="pread") as f:
            for key in f.keys():
                state[our_name.get(key, key)] = f.get_tensor(key).to(dtype)
    if config.tied:
        state["head.weight"] = state["embed.weight"]       # the file may hold a copy, or none
    # strict: a tensor that is missing, unknown or of another shape is an error, never a random weight
    model.load_state_dict(state, strict=True, assign=True)
    if config.tied:
        model.head.weight = model.embed.weight             # assigning has made two parameters of one tensor
    return model.eval().requires_grad_(False)


def load_tokenizer(config: Config):
    """By the class in FAMILIES, never the code that a folder asks to run. tok.end_ids: the family's ends, above."""
    import transformers
    tokenizer_class = getattr(transformers, config.family["tokenizer"])
    tok = tokenizer_class.from_pretrained(config.folder, trust_remote_code=False, local_files_only=True)
    vocab = tok.get_vocab()
    tok.end_ids = [vocab[token] for token in config.family["ends"] if token in vocab]
    if config.eos_id not in tok.end_ids:
        tok.end_ids.insert(0, config.eos_id)
    return tok
