"""Checkpoints, tokenizers and adapters: what loads, what is refused, and that nothing in a folder is ever run."""
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import data
import lora
import model as models
from tests.tiny import (
    HERE,
    QV,
    SMALL,
    SPECIALS,
    adapted,
    both,
    config_of,
    edit_json,
    full,
    ids_of,
    load,
    ragged,
    settings,
    tiny,
    tokenizer,
)


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
    ("a2d-qwen3", dict(folder="a2d-bd3lm"), ["causally between blocks", "mdlm"]),
    ("a2d-qwen2", dict(added_tokens=[]), ["no token <|mask|>", "hub page"]),
])
def test_a_model_that_is_not_built_is_refused_in_one_line(family, fields, words, tmp_path, refused):
    folder = Path(tiny(family, tmp_path / fields.get("folder", "m")))
    edit_json(folder / ("tokenizer.json" if "added_tokens" in fields else "config.json"), **fields)
    with refused(folder, *words):
        models.read_config(str(folder))


@pytest.mark.parametrize("family", SMALL)
def test_small_models_know_their_mask_both_ends_a_block_of_32_and_do_not_think_aloud(family, folders):
    config, tok, i = models.read_config(folders[family]), tokenizer(folders[family]), ids_of(family)
    assert config.mask_id == i.mask and config.eos_id == i.eot and tok.end_ids == [i.eos, i.eot]
    item = dict(prompt="3+4", messages=[dict(role="user", content="3+4")])
    assert tok.decode(data.prompt_ids(tok, item)) == "[user]3+4[assistant]"
    for flags, block in (("--length 64", 32), ("--length 16", 16), ("--length 64 --block 64", 64)):
        assert settings(folders[family], flags).block == block


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


def test_a_tied_head_is_the_embedding_although_the_file_holds_another(tmp_path):
    """Files without one: the small models' in test_tabom.py."""
    folder = Path(tiny("Dream", tmp_path / "m"))
    edit_json(folder / "config.json", tie_word_embeddings=True)
    net = load(folder)
    assert net.head.weight is net.embed.weight
    assert torch.equal(net.embed.weight, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.parametrize("option", [dict(use_dora=True), dict(use_rslora=True), dict(rank_pattern={"q_proj": 2}),
                                    dict(modules_to_save=["lm_head"])], ids=lambda option: next(iter(option)))
def test_an_adapter_of_another_formula_is_refused(option, folders, tmp_path, refused):
    from peft import LoraConfig
    lora.save(adapted(folders["llada"]), tmp_path / "a")
    LoraConfig(r=4, lora_alpha=6, target_modules=QV, **option).save_pretrained(tmp_path / "a")
    with refused(tmp_path / "a" / "adapter_config.json", *option):
        lora.load(load(folders["llada"]), tmp_path / "a")
    for kind in (None, "IA3"):
        edit_json(tmp_path / "a" / "adapter_config.json", peft_type=kind)
        with refused("peft_type", "only LORA adapters are read"):
            lora.load(load(folders["llada"]), tmp_path / "a")


@both
def test_a_second_adapter_replaces_the_first(family, folders, tmp_path, refused):
    nets = {"a": adapted(folders[family], [*QV, "up_proj"]), "b": adapted(folders[family], ["k_proj"], 2, 3.0, seed=1)}
    net, (ids, attend, _) = load(folders[family]), ragged(family)
    for name in ("a", "b", "a"):
        lora.save(nets[name], tmp_path / name)
        lora.load(net, tmp_path / name)
        assert lora.layers(net).keys() == lora.layers(nets[name]).keys()
        assert torch.equal(full(net, ids, attend), full(nets[name], ids, attend))
    with refused(tmp_path / "a", ".0.", "own base model"):
        lora.load(load(folders["Dream" if family == "llada" else "llada"]), tmp_path / "a")
