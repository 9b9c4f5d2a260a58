"""
LoRA by hand, in peft's file format and under the hub's module names.

    params = lora.add(model, ["q_proj", "v_proj"], r=16, alpha=16)     # {peft's name: trainable tensor}
    with lora.disabled(model): ...                                     # the frozen base
    lora.save(model, "out/adapter"); lora.load(model, "out/adapter")   # peft reads and writes the same files

    python lora.py --model M --adapter DIR --out MERGED                # a merged checkpoint in the model's own layout
"""
import contextlib
import json
import shutil
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from model import hub_name, read_config, weight_files
from util import Parser, read_json, stop, write_whole


class LoRALinear(nn.Module):
    """y = W x + b + (alpha / r) B A x. W and b are the base's, frozen; A and B are kept in fp32, whatever W's dtype."""
    def __init__(self, base: nn.Linear, r: int, alpha: float, generator=None):
        super().__init__()
        self.base, self.r, self.alpha, self.enabled = base, r, alpha, True
        # drawn on the CPU: the same start on any device. B = 0: at first the model is the base
        A = nn.init.kaiming_uniform_(torch.empty(r, base.in_features), a=5 ** 0.5, generator=generator)
        self.lora_A = nn.Parameter(A.to(base.weight.device))                                           # (r, in)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r, device=base.weight.device))       # (out, r)

    def forward(self, x):
        y = self.base(x)
        if not self.enabled:
            return y
        low = F.linear(x, self.lora_A.to(x.dtype))
        return y + self.alpha / self.r * F.linear(low, self.lora_B.to(x.dtype))


def find(model, kind) -> dict[str, str]:
    """{the hub's module path: our module name} of all modules of a kind."""
    return {hub_name(name, model.config.family): name for name, m in model.named_modules() if isinstance(m, kind)}


def layers(model) -> dict[str, LoRALinear]:
    """{the hub's module path: layer} of the adapter. Without one nothing would happen, and nobody would notice."""
    found = {path: model.get_submodule(name) for path, name in find(model, LoRALinear).items()}
    if not found:
        raise ValueError("the model has no adapter; lora.add or lora.load puts one on it")
    return found


def add(model, targets, r: int, alpha: float, seed: int = 0) -> dict[str, nn.Parameter]:
    """Puts an adapter on every linear layer whose last name is in targets; the rest is frozen. Returns parameters()."""
    paths = find(model, nn.Linear)
    known = {path.rpartition(".")[2] for path in paths}
    for target in targets:
        if target not in known:
            stop(f"--lora-targets {target}: no linear layer has that name; there are {', '.join(sorted(known))}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for path, name in paths.items():
        if path.rpartition(".")[2] in targets:
            model.set_submodule(name, LoRALinear(model.get_submodule(name), r, alpha, generator))
    return parameters(model)


def parameters(model) -> dict[str, nn.Parameter]:
    """{peft's name: tensor} of the adapter."""
    named = {}
    for path, layer in layers(model).items():
        named[f"base_model.model.{path}.lora_A.weight"] = layer.lora_A
        named[f"base_model.model.{path}.lora_B.weight"] = layer.lora_B
    return named


@contextlib.contextmanager
def disabled(model):
    """Inside, the model is the frozen base."""
    adapter = layers(model).values()
    for layer in adapter:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in adapter:
            layer.enabled = True


def save(model, folder, base_name: str = ""):
    """adapter_model.safetensors and adapter_config.json: what peft.PeftModel.from_pretrained reads."""
    found = layers(model)
    any_layer = next(iter(found.values()))
    config = dict(peft_type="LORA", task_type=None, base_model_name_or_path=base_name, r=any_layer.r,
                  lora_alpha=any_layer.alpha, lora_dropout=0.0, bias="none", inference_mode=True, fan_in_fan_out=False,
                  init_lora_weights=True, target_modules=sorted({path.rpartition(".")[2] for path in found}))
    tensors = {name: p.detach().cpu().contiguous() for name, p in parameters(model).items()}
    write_whole(Path(folder) / "adapter_model.safetensors", to_bytes(tensors, metadata={"format": "pt"}))
    write_whole(Path(folder) / "adapter_config.json", json.dumps(config, indent=2).encode())


def read(folder):
    """({module path: {"A": (r, in), "B": (out, r)}}, r, alpha) of an adapter folder, ours or peft's."""
    config_path = Path(folder) / "adapter_config.json"
    config = read_json(config_path)
    if config.get("peft_type") != "LORA":
        stop(f"{config_path}: peft_type is {config.get('peft_type')!r}; only LORA adapters are read")
    # each of these changes the formula above, or W: loading the matrices alone would be silently wrong
    unset = [None, False, [], {}]
    allowed = {"bias": ["none"], "init_lora_weights": [True, "gaussian", "orthogonal"]}
    for key in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
                "lora_bias", "alora_invocation_tokens", "bias", "init_lora_weights"):
        if config.get(key) not in unset + allowed.get(key, []):
            stop(f"{config_path}: {key} is {config[key]!r}, which is not supported; train a LoRA without it")
    weights_path = Path(folder) / "adapter_model.safetensors"
    try:
        tensors = load_file(weights_path)
    except (OSError, SafetensorError) as e:
        stop(f"{weights_path}: cannot be read ({e}); download it again: git without git-lfs leaves a few lines of text")
    matrices = {}
    for key, value in tensors.items():
        path, _, kind = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        if kind not in ("A", "B"):
            stop(f"{folder}: holds {key}, which is not supported; train the adapter with lora_A and lora_B only")
        matrices.setdefault(path, {})[kind] = value.float()
    return matrices, config["r"], config["lora_alpha"]


def load(model, folder):
    """Puts a saved adapter on the model, replacing one that is already there."""
    matrices, r, alpha = read(folder)
    for name in find(model, LoRALinear).values():
        model.set_submodule(name, model.get_submodule(name).base)
    paths = find(model, nn.Linear)
    for path, matrix in matrices.items():
        if path not in paths:
            stop(f"{folder}: holds {path}, which {model.config.name} does not have; use the adapter's own base model")
        layer = LoRALinear(model.get_submodule(paths[path]), r, alpha)
        layer.load_state_dict({"lora_A": matrix["A"], "lora_B": matrix["B"]}, strict=False)      # shapes are checked
        model.set_submodule(paths[path], layer.requires_grad_(False))


def merge_checkpoint(name: str, adapter: str, out: str):
    """W + (alpha / r) B A, file by file, under the original's file names and in its types; other files are copied."""
    config = read_config(name)
    matrices, r, alpha = read(adapter)
    out = Path(out)
    if out.exists():
        stop(f"--out {out}: exists already; give a new folder")
    if config.tied and config.family["names"]["head"] in matrices:
        stop(f"{adapter}: is on the head, whose weight is the embedding's here: merging would change both")

    # write to OUT.part, rename when complete
    part = Path(f"{out}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in weight_files(config):
        tensors = load_file(file)
        for key, weight in tensors.items():
            matrix = matrices.pop(key.removesuffix(".weight"), None)
            if matrix:
                delta = alpha / r * matrix["B"] @ matrix["A"]
                tensors[key] = (weight.float() + delta).to(weight.dtype)
        (part / file.name).write_bytes(to_bytes(tensors, metadata={"format": "pt"}))
        print(f"{file.name}: {len(tensors)} tensors", flush=True)
    if matrices:
        shutil.rmtree(part)
        stop(f"{adapter}: holds {next(iter(matrices))}, which {name} does not have; use the adapter's own base model")
    # config, tokenizer and the rest, but no weights in other formats: they are not merged
    for file in config.folder.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth"):
            shutil.copyfile(file, part / file.name)
    part.rename(out)
    print(f"{out}: {name} with {adapter} merged into it")


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--model", required=True, help="hub name or folder")
    parser.add_argument("--adapter", required=True, help="adapter folder in peft's format")
    parser.add_argument("--out", required=True, help="new folder for the merged checkpoint")
    args = parser.parse_args()
    merge_checkpoint(args.model, args.adapter, args.out)
