"""LoRA by hand, in peft's file format, under the hub's module names.

    python lora.py --model M --adapter DIR --out MERGED        # a merged checkpoint in the model's own hub layout

Adapter weights are fp32, whatever the base's type; products run in the activations' type, as autocast would.
"""
import contextlib
import json
import os
import shutil
from pathlib import Path

from data import safely, write_whole
from model import Flags, find, fitting_shards, put, read_json, skeleton, stop, tensors

# isort: split
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

PREFIX = "base_model.model."            # what peft puts before the hub's module path


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int, alpha: float, generator=None):
        super().__init__()
        self.base, self.scale, self.on, self.merged = base, alpha / r, True, False
        A = torch.empty(r, base.in_features)                                     # on CPU: the same start on any device
        nn.init.kaiming_uniform_(A, a=5 ** 0.5, generator=generator)
        self.lora_A = nn.Parameter(A.to(base.weight.device))                     # (r, in)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r, device=base.weight.device))   # (out, r)

    def delta(self):
        return self.scale * self.lora_B @ self.lora_A                            # (out, in)

    def forward(self, x):
        if not self.on:
            return self.base(x)
        # y = W x + b + (alpha / r) B A x
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))


def layers(model: nn.Module) -> dict[str, LoRALinear]:
    """{hub path: LoRALinear}, in the model's order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def wrap(model: nn.Module, targets=("q_proj", "v_proj"), r: int = 16, alpha: float = 16, seed: int = 0):
    """Replaces every linear whose last name is in targets; freezes all the rest. Returns the adapter's parameters."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    there = sorted({name.rsplit(".", 1)[-1] for name in linears})
    for t in targets:
        if t not in there:
            stop(f"--targets {t}: no linear layer has that name; there are {', '.join(there)}")
    wide = max(m.in_features for name, m in linears.items() if name.rsplit(".", 1)[-1] in targets)
    if not 1 <= r <= wide:
        stop(f"--rank {r}: a LoRA rank is at least 1, and at most the layers' {wide} inputs")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, m in linears.items():
        if name.rsplit(".", 1)[-1] in targets:
            put(model, name, LoRALinear(m, r, alpha, generator))
    return [p for m in layers(model).values() for p in (m.lora_A, m.lora_B)]


@contextlib.contextmanager
def off(model: nn.Module):
    """with off(model): the frozen base speaks."""
    was = {m: m.on for m in layers(model).values()}      # a merged adapter is off already, and must stay so
    for m in was:
        m.on = False
    try:
        yield
    finally:
        for m, on in was.items():
            m.on = on


@torch.no_grad()
def merge(model: nn.Module, sign: int = 1):
    """W += (alpha / r) B A, and the adapter off; sign -1 takes it out again (exact to rounding); twice is once."""
    for m in layers(model).values():
        if m.merged != (sign > 0):
            m.base.weight += sign * m.delta().to(m.base.weight.dtype)
            m.merged, m.on = sign > 0, sign < 0


def unmerge(model: nn.Module):
    merge(model, -1)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{PREFIX}{name}.lora_{ab}.weight": getattr(m, f"lora_{ab}").detach().cpu().contiguous()
            for name, m in layers(model).items() for ab in "AB"}


def save(model: nn.Module, folder, base_name: str = ""):
    """adapter_model.safetensors + adapter_config.json: what peft.PeftModel.from_pretrained reads."""
    folder, found = Path(folder), layers(model)
    folder.mkdir(parents=True, exist_ok=True)
    first = next(iter(found.values()))
    r = first.lora_A.shape[0]
    (folder / "adapter_model.safetensors").write_bytes(to_bytes(state(model), metadata={"format": "pt"}))
    (folder / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", task_type=None, base_model_name_or_path=base_name, r=r, lora_alpha=first.scale * r,
        lora_dropout=0.0, bias="none", target_modules=sorted({n.rsplit(".", 1)[-1] for n in found}),
        inference_mode=True, fan_in_fan_out=False, init_lora_weights=True), indent=2))


def read(folder) -> tuple[dict, float, int]:
    """({module path: {"A": ..., "B": ...}}, scale, r) of an adapter folder, ours or peft's."""
    folder = Path(folder)
    if not folder.is_dir():
        stop(f"{folder}: no such folder; --adapter takes one with adapter_config.json and adapter_model.safetensors")
    config = read_json(folder / "adapter_config.json")
    for key in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out"):
        if config.get(key):
            stop(f"{folder}/adapter_config.json: {key} is {config[key]!r}, which is not built; train without it")
    r, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA" or type(r) is not int or r < 1 or type(alpha) not in (int, float) \
            or not abs(alpha) < 1e9:
        stop(f"{folder}/adapter_config.json: not a LoRA adapter (peft_type {config.get('peft_type')!r}, r {r!r}, "
             f"lora_alpha {alpha!r}); save the adapter again")
    try:
        flat = load_file(folder / "adapter_model.safetensors")
    except Exception as e:
        stop(f"{folder}/adapter_model.safetensors: cannot be read ({' '.join(str(e).split())[:200]}); save the adapter "
             f"again")
    found: dict = {}
    for key, value in flat.items():
        value = value.float()
        path, _, kind = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        if kind not in ("A", "B") or value.ndim != 2 or value.shape[0 if kind == "A" else 1] != r:
            stop(f"{folder}/adapter_model.safetensors: {key} {tuple(value.shape)} is no LoRA matrix of rank {r}; "
                 f"save the adapter again")
        if not bool(value.isfinite().all()):
            stop(f"{folder}/adapter_model.safetensors: {key} has entries that are no numbers; train the adapter again")
        found.setdefault(path, {})[kind] = value
    odd = [p for p, ab in found.items() if len(ab) != 2]
    if odd or not found:
        stop(f"{folder}/adapter_model.safetensors: {odd[0] if odd else 'it'} lacks a matrix; save the adapter again")
    return found, alpha / r, r


def check_fit(folder, path: str, ab: dict, shape):
    """shape: that of the model's weight at path, None if it has none."""
    want = (ab["B"].shape[0], ab["A"].shape[1])
    if shape is None or tuple(shape) != want:
        has = "has no such layer" if shape is None else f"has {' x '.join(map(str, shape))} there"
        stop(f"{folder}: {path} ({want[0]} x {want[1]}) does not fit: the model {has}; "
             f"use the model the adapter was trained on")


def load(model: nn.Module, folder):
    """Wraps the model's layers that the adapter names and fills them in; an adapter that was there goes."""
    found, scale, r = read(folder)
    for name, m in layers(model).items():
        put(model, name, m.base)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for path, ab in found.items():
        m = linears.get(path)
        check_fit(folder, path, ab, None if m is None else m.weight.shape)
        new = LoRALinear(m, r, scale * r)
        for kind in "AB":
            getattr(new, f"lora_{kind}").data.copy_(ab[kind])
        put(model, path, new)


def merge_checkpoint(name: str, adapter: str, out: str):
    """Shard by shard, in the original's file names and types; everything else in its folder is copied unread."""
    found, scale, _ = read(adapter)
    out = os.path.normpath(out)
    if os.path.exists(out) or not os.path.isdir(os.path.dirname(out) or "."):
        fault = "is there already" if os.path.exists(out) else "its folder is not there"
        stop(f"--out {out}: {fault}; give a new folder in an existing one")
    model, source = skeleton(name), find(name, "*.safetensors", "*.py")
    where, tmp = fitting_shards(model, source), Path(f"{out}.part")
    for path, ab in found.items():                       # all of it before the first byte is written
        key = f"{path}.weight"
        check_fit(adapter, path, ab, next(tensors({key: where[key]}))[1].shape if key in where else None)
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        for file in sorted(set(where.values())):
            merged = {}
            for key, w in tensors({k: p for k, p in where.items() if p == file}):
                ab = found.get(key.removesuffix(".weight"))
                merged[key] = w if ab is None else (w.float() + scale * ab["B"] @ ab["A"]).to(w.dtype)
            write_whole(tmp / file.name, to_bytes(merged, metadata={"format": "pt"}))
            print(f"{file.name}: {len(merged)} tensors", flush=True)
        for file in source.iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
                shutil.copyfile(file, tmp / file.name)
        os.rename(tmp, out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)           # of a full disk, too; renamed, it is not there any more
    print(f"{out}: {name} with {adapter} merged into {len(found)} layers")


if __name__ == "__main__":
    p = Flags(__doc__)
    p.add_argument("--model", required=True, help="model folder or hub name")
    p.add_argument("--adapter", required=True, help="adapter folder in peft's format")
    p.add_argument("--out", required=True, help="new folder for the merged checkpoint")
    a = p.parse_args()
    with safely(f"{a.out} was not written; run the same command again"):
        merge_checkpoint(a.model, a.adapter, a.out)
