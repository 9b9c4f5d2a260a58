import json, re, shutil, subprocess, sys  # noqa
from pathlib import Path  # noqa
import numpy as np, pytest, torch  # noqa
from safetensors.torch import load_file, save_file  # noqa
from test_tabom import *  # noqa
from test_tabom import HERE, folders, nets, refused, tiny, write_lines, ids_of, config_of  # noqa
# ---- CUT HERE: everything above is for running this part alone


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


def forked(number: int, folder: Path) -> Path:
    """A copy of our files with README's diff applied; at most 15 lines of it."""
    diff = re.findall(r"```diff\n(.*?)```", (HERE / "README.md").read_text(), re.S)[number]
    assert len(diff.splitlines()) <= 15
    folder.mkdir()
    for f in HERE.glob("*.py"):
        shutil.copy(f, folder)
    (folder / "fork.diff").write_text(diff)
    subprocess.run(["git", "apply", "--unidiff-zero", "fork.diff"], cwd=folder, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)})
    return folder


def test_fork_another_ranking_loss(tmp_path):
    code = """if 1:
        import torch, tabom
        torch.manual_seed(0)
        logits, x0 = torch.randn(4, 9), torch.randint(9, (4,))
        slot = torch.tensor([[2, 0, 3, 1]])
        rank = tabom.tabom_loss(logits, x0, slot, slot >= 0, 1.0, 0.2)[2].item()
        h = [torch.distributions.Categorical(logits=logits[i]).entropy().item() for i in (2, 0, 3, 1)]
        want = [torch.log1p(torch.tensor(h[r] - h[s] + 0.2).exp()).item() for r in range(4) for s in range(r + 1, 4)]
        assert abs(rank - sum(want) / 6) < 1e-5, (rank, want)"""
    subprocess.run([sys.executable, "-c", code], cwd=forked(0, tmp_path / "f"), check=True)


def test_fork_another_score(tmp_path, folders, nets):
    prompts, out = write_lines(tmp_path / "p.jsonl", [dict(prompt="abc")]), tmp_path / "t.jsonl"
    subprocess.run([sys.executable, "decode.py", "--model", folders["llada"], "--prompts", prompts, "--out", str(out), "--length", "8", "--score",
                    "second"], cwd=forked(1, tmp_path / "f"), check=True, capture_output=True)
    r, c = json.loads(out.read_text()), nets["llada"].config
    with torch.no_grad():
        p = nets["llada"](torch.tensor([r["prompt_token_ids"] + [c.mask_id] * 8]))[0, -8:].softmax(-1)
    assert r["method"] == "second" and r["decoding_order"][int(p.sort(-1).values[:, -2].argmin())] == 0


def test_fork_another_model_family(tmp_path, folders):
    """A Llama-shaped diffusion model: Dream's names without the biases, LLaDA's tokenizer, no shift."""
    folder = tmp_path / "m"
    shutil.copytree(folders["llada"], folder)
    weights = {k: v for k, v in load_file(Path(folders["Dream"]) / "model.safetensors").items() if not k.endswith("bias")}
    save_file(weights, folder / "model.safetensors")
    i = ids_of("Dream")
    (folder / "config.json").write_text(json.dumps(config_of("Dream") | dict(model_type="llama-mdm", mask_token_id=i.mask, eos_token_id=i.eos)))
    prompts, out = write_lines(tmp_path / "p.jsonl", [dict(prompt="abc")]), tmp_path / "t.jsonl"
    where = forked(2, tmp_path / "f")
    subprocess.run([sys.executable, "decode.py", "--model", str(folder), "--prompts", prompts, "--out", str(out), "--length", "8"], cwd=where,
                   check=True, capture_output=True)
    assert json.loads(out.read_text())["method"] == "confidence"
    again = subprocess.run([sys.executable, "decode.py", "--model", str(folder), "--prompts", prompts, "--show"], cwd=HERE, capture_output=True, text=True)
    assert again.returncode == 2 and "llama-mdm" in again.stderr          # without the diff it is refused by name
