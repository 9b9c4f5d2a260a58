"""
forks/: each diff applies to the core, its command of forks/README.md runs, and it does what it says.

A check runs in a child process whose modules are those of a fork, a copy of the core with the diff applied. Its first
argument t is tests/tiny.py, imported again there: t.tabom, t.decode and so on are the fork's.
"""
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.tiny
from tests.tiny import (
    CHILD,
    HERE,
    TASKS,
    Fork,
    assert_close_runs,
    config_of,
    corpus,
    forget,
    log_of,
    read_lines,
    run_ranks,
    same_run,
    write_lines,
)

DIFFS = sorted((HERE / "forks").glob("*.diff"))
NAMES = [diff.stem for diff in DIFFS]
README = (HERE / "forks" / "README.md").read_text()


def copy_core(folder: Path, *names) -> Path:
    """Our files with these diffs applied, by the real git apply."""
    folder.mkdir(parents=True)
    for file in HERE.glob("*.py"):
        if not file.name.startswith("test_"):
            shutil.copy(file, folder)
    # the copy is no repository, and must not be taken for a part of one
    env = CHILD | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for name in names:
        command = ["git", "apply", str(HERE / "forks" / f"{name}.diff")]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"forks/{name}.diff: {done.stderr}forks/README.md says how to renew it"
    return folder


QUICK = "--window 4 --lora-r 4 --lr 1e-3 --warmup 2 --batch-size 4 --max-steps 5"
MORE = {"on-policy": "--all --decode-flags=--length=8"}                     # answers of a random model, short


def make_toy(folder, work: Path) -> Path:
    """The files that the commands of forks/README.md name."""
    toy = work / "out" / "toy"
    toy.mkdir(parents=True)
    rows = corpus(folder, 13)
    for n, row in enumerate(rows):
        row["correct"] = n % 3 > 0
    write_lines(toy / "greedy.jsonl", rows)
    write_lines(toy / "sampled.jsonl", corpus(folder, 5))
    write_lines(toy / "train.jsonl", [dict(id=row["id"], prompt=row["prompt"], answer="x") for row in rows])
    return work


def run_script(t, folder, work, script, flags):
    """A script's main among the toy's files."""
    os.chdir(work)
    common = {"tabom": f"--data out/toy/greedy.jsonl {QUICK}",
              "decode": f"--model {folder} --prompts out/toy/train.jsonl --length 8"}
    t.run_main(getattr(t, script), f"{common[script]} {flags}")


@pytest.fixture(scope="session")
def core_run(folders, tmp_path_factory) -> Path:
    """The toy's files, and what the core makes of them. In this process: its children need not import anything then."""
    work = make_toy(folders["llada"], tmp_path_factory.mktemp("core"))
    before = os.getcwd()
    run_script(tests.tiny, folders["llada"], work, "tabom", "--out out/tabom")
    run_script(tests.tiny, folders["llada"], work, "decode", "--out out/decode.jsonl")
    os.chdir(before)
    return work / "out"


@pytest.fixture(scope="session")
def forked(core_run, tmp_path_factory):
    """forked("kl"): the folder of that fork."""
    made = {}

    def get(*names):
        if names not in made:
            made[names] = copy_core(tmp_path_factory.mktemp("-".join(names) or "core") / "fork", *names)
        return made[names]
    return get


def enter(folder: Path):
    """From now on this process has the fork's modules, and the tests' tools use them."""
    for name in [file.stem for file in folder.glob("*.py")] + ["tests.tiny"]:
        sys.modules.pop(name, None)
    sys.path.insert(0, str(folder))
    return importlib.import_module("tests.tiny")


def inside(folder: Path, check, *args):
    """check(t, *args) in a child process that has entered the fork."""
    child = Fork(target=lambda: check(enter(folder), *args))
    child.start()
    child.join()
    assert child.exitcode == 0, "the traceback is in the captured stderr"


def fork(*names):
    """The test below runs inside this fork."""
    def wrap(check):
        def test(forked, folders, tmp_path):
            inside(forked(*names), check, folders["llada"], tmp_path)
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test
    return wrap

# -----------------------------------------------------------------------------
# every fork

def row_of(name: str) -> list[str]:
    """Its row in forks/README.md."""
    row, = re.findall(rf"^\| {name} \|.*", README, re.M)
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_readme_lists_every_fork():
    assert sorted(re.findall(r"^\| ([a-z-]+) \| ", README, re.M)) == sorted([*NAMES, "fork"])


@pytest.mark.parametrize("name", NAMES)
def test_diff_is_short_says_what_it_is_and_changes_the_core_only(name, forked):
    lines = (HERE / "forks" / f"{name}.diff").read_text().splitlines()
    assert len(lines) <= 60 and row_of(name)[3] == str(len(lines))
    assert [line.split(":")[0] for line in lines[:3]] == ["# Idea", "# Source", "# Warning"]
    for line in lines:
        if line.startswith("+++ b/"):
            assert (HERE / line[6:]).exists() and "/" not in line[6:] and "test" not in line
    ruff = [sys.executable, "-m", "ruff", "check", "-q", "--config", str(HERE / "ruff.toml"), str(forked(name))]
    assert not subprocess.run(ruff, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", NAMES)
def test_command_of_the_readme_runs_and_without_flags_a_fork_is_the_core(name, forked, folders, tmp_path, core_run):
    shutil.copytree(core_run / "toy", tmp_path / "out" / "toy")
    launcher, script, flags = re.fullmatch(r"`(.*?)(\w+)\.py(.*)`", row_of(name)[4]).groups()
    out = tmp_path / "out" / ("plain" if script == "tabom" else "plain.jsonl")
    new = str(out).replace("plain", "new")

    def both(t):
        run_script(t, folders["llada"], tmp_path, script, f"--out {out}")
        start = lambda: run_script(t, folders["llada"], tmp_path, script, f"--out {new} {flags} {MORE.get(name, '')}")
        if launcher:
            run_ranks(2, start)
        else:
            start()
    inside(forked(name), both)
    if script == "tabom":
        assert len(log_of(Path(new))[1]) == 5
        assert same_run(core_run / "tabom", out) or name == "listwise"
    else:
        assert len(read_lines(new)) == 13
        for row, want in zip(read_lines(out), read_lines(core_run / "decode.jsonl"), strict=True):
            assert row | {"decode": want["decode"]} == want                  # the settings have the fork's flag


def test_forks_apply_together(tmp_path):
    """Every pair but this."""
    apart = {("fsdp", "full")}
    env = CHILD | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    for a in NAMES:
        folder = copy_core(tmp_path / a, a)
        for b in NAMES:
            if a < b:
                done = []
                for command in (["git", "apply"], ["git", "apply", "-R"]):
                    command.append(str(HERE / "forks" / f"{b}.diff"))
                    done.append(subprocess.run(command, cwd=folder, env=env, capture_output=True).returncode)
                assert (done == [0, 0]) == ((a, b) not in apart), (a, b)


LOSSES = {"kl": 0.1, "focal": 1, "papl": 1, "cap": 0.1, "rank-block": 8}


@fork("listwise", "kl", "negatives", "focal", "block-ranking", "papl", "cap")
def test_all_losses_together_train(t, folder, tmp_path):
    make_toy(folder, tmp_path)
    flags = " ".join(f"--{name} {weight}" for name, weight in LOSSES.items())
    run_script(t, folder, tmp_path, "tabom", f"--out out/all --negatives {flags}")
    _, rows = log_of(tmp_path / "out" / "all")
    for row in rows:
        assert row["loss"] == pytest.approx(row["ce"] + row["rank_loss"] + 0.1 * row["kl"] + 0.1 * row["cap"], rel=1e-4)


def test_readme_shows_a_fork_as_it_is():
    """But for its line numbers."""
    without_numbers = lambda text: re.sub(r"^@@ .*? @@", "@@", text, flags=re.M)
    for shown in re.findall(r"```diff\n(--- a/.*?)```", (HERE / "README.md").read_text(), re.S):
        assert any(without_numbers(shown) in without_numbers(diff.read_text()) for diff in DIFFS)

# -----------------------------------------------------------------------------
# losses, against plain loops over one state at a time

def numbers(t, net, view):
    """By hand, at each target: log-probabilities (W, V), cross-entropy and entropy."""
    z = torch.tensor(t.state_logits(net, view.traj, view.visible)).log_softmax(-1)
    logp = z[view.targets].tolist()
    ce = [-row[token] for row, token in zip(logp, view.traj.response[view.targets], strict=True)]
    return logp, ce, [-sum(math.exp(x) * x for x in row) for row in logp]


def scene(t, folder, tmp_path):
    """A model with an adapter, and trajectories."""
    return t.adapted(folder), t.read_shapes(folder, tmp_path, "")


def results(t, net, trajs, flags):
    """(view, its loss, the loss's parts, the numbers by hand) of each trajectory, with the fork's flags."""
    args = t.training_args(f"--window 5 {flags}")
    views = t.views_of(trajs, args)
    loss, parts = t.losses(net, views, args)
    for b, view in enumerate(views):
        yield view, loss[b].item(), {name: x[b].item() for name, x in parts.items()}, numbers(t, net, view)


def hinge(h, gamma=0.2, pairs=None) -> float:
    """Mean over the pairs: r before s should have the lower entropy, by gamma."""
    pairs = [(r, s) for s in range(len(h)) for r in range(s)] if pairs is None else pairs
    return sum(max(0.0, h[r] - h[s] + gamma) for r, s in pairs) / max(1, len(pairs))


close = lambda want: pytest.approx(want, rel=1e-3, abs=1e-4)


@fork("listwise")
def test_listwise_is_the_likelihood_of_drawing_the_order_one_by_one(t, folder, tmp_path):
    for _, loss, parts, (_, ce, h) in results(t, *scene(t, folder, tmp_path), "--lam 2"):
        # the next position is drawn among those that are left, with weights exp(-h)
        chances = [math.exp(-h[r]) / sum(math.exp(-x) for x in h[r:]) for r in range(len(h))]
        rank_loss = -sum(math.log(chance) for chance in chances) / len(h)
        assert parts["rank_loss"] == close(rank_loss)
        assert loss == close(sum(ce) / len(ce) + 2 * rank_loss)


@fork("kl")
def test_kl_is_0_at_the_start_and_then_that_of_the_two_distributions(t, folder, tmp_path):
    net, trajs = scene(t, folder, tmp_path)
    base = t.load(folder)
    for view, loss, parts, (logp, _, _) in results(t, net, trajs, "--lam 0 --kl 3"):
        kl = 0
        for p_row, q_row in zip(logp, numbers(t, base, view)[0], strict=True):
            kl += sum(math.exp(x) * (x - y) for x, y in zip(p_row, q_row, strict=True)) / len(logp)
        assert parts["kl"] == close(kl) and kl > 0.01
        assert loss == close(parts["ce"] + 3 * kl)
    new = t.load(folder)
    t.lora.add(new, ["q_proj", "v_proj"], 4, 4)
    for _, loss, parts, _ in results(t, new, trajs, "--kl 3"):
        assert abs(parts["kl"]) < 1e-6 and loss == pytest.approx(parts["ce"] + parts["rank_loss"], abs=1e-5)


@fork("negatives")
def test_negatives_give_no_cross_entropy_and_raise_the_violation_of_their_order(t, folder, tmp_path):
    net, trajs = scene(t, folder, tmp_path)
    for n, traj in enumerate(trajs):
        traj.correct = [True, False, None][n % 3]
    for view, _, parts, (_, ce, h) in results(t, net, trajs, "--negatives --gamma 0.3"):
        wrong = view.traj.correct is False
        assert parts["ce"] == (0 if wrong else close(sum(ce) / len(ce)))
        assert parts["rank_loss"] == close(hinge([-x for x in h] if wrong else h, 0.3))
    # a step on wrong records only
    args = t.training_args("--window 5 --negatives --gamma 0.3")
    wrong = t.views_of([traj for traj in trajs if traj.correct is False], args)
    plain = lambda: t.losses(net, wrong, t.training_args("--window 5 --gamma 0.3"))[1]["rank_loss"].sum().item()
    before, params = plain(), list(t.lora.parameters(net).values())
    grads = torch.autograd.grad(t.losses(net, wrong, args)[0].sum(), params)
    for p, g in zip(params, grads, strict=True):
        p.data -= 1e-3 * g
    assert plain() > before


@fork("focal")
def test_focal_weighs_by_the_logged_entropy_and_equal_entropies_change_nothing(t, folder, tmp_path):
    net, trajs = scene(t, folder, tmp_path)
    for view, loss, _, (_, ce, _) in results(t, net, trajs, "--lam 0 --focal 2"):
        weight = [(view.traj.entropy[position] + 1e-3) ** 2 for position in view.targets]
        assert loss == close(sum(w * x for w, x in zip(weight, ce, strict=True)) / sum(weight))
    for traj in trajs:
        traj.entropy[:] = 0.7
    for _, loss, _, (_, ce, _) in results(t, net, trajs, "--lam 0 --focal 2"):
        assert loss == close(sum(ce) / len(ce))


@fork("block-ranking")
def test_block_ranking_has_no_pair_across_blocks(t, folder, tmp_path):
    some = 0
    for view, _, parts, (_, _, h) in results(t, *scene(t, folder, tmp_path), "--rank-block 4"):
        pairs = [(r, s) for s in range(len(h)) for r in range(s) if view.targets[r] // 4 == view.targets[s] // 4]
        assert parts["rank_loss"] == close(hinge(h, pairs=pairs))
        some += 0 < len(pairs) < len(h) * (len(h) - 1) // 2
    assert some >= 3


@fork("papl")
def test_papl_weighs_by_the_planners_chance_of_a_position(t, folder, tmp_path):
    for _, loss, _, (_, ce, _) in results(t, *scene(t, folder, tmp_path), "--method sft --papl 1.5"):
        chance = [math.exp(-x) / sum(math.exp(-y) for y in ce) for x in ce]
        assert loss == close(sum((1 + 1.5 * w) * x for w, x in zip(chance, ce, strict=True)) / len(ce))


@fork("cap")
def test_cap_is_the_entropy_where_the_most_probable_token_is_right(t, folder, tmp_path):
    net, trajs = scene(t, folder, tmp_path)
    for view in t.views_of(trajs, t.training_args("--window 5"))[1:]:        # none is right in the first
        view.traj.response[view.targets[::2]] = np.argmax(numbers(t, net, view)[0], -1)[::2]
    counts = []
    for view, loss, parts, (logp, _, h) in results(t, net, trajs, "--lam 0 --cap 0.5"):
        right = [h[w] for w, token in enumerate(view.traj.response[view.targets]) if np.argmax(logp[w]) == token]
        counts.append(len(right))
        assert parts["cap"] == close(sum(right) / max(1, len(right)))
        assert loss == close(parts["ce"] + 0.5 * parts["cap"])
    assert counts[0] == 0 and all(counts[1:])

# -----------------------------------------------------------------------------
# data, model and loop

@fork("mix")
def test_mix_gives_each_file_its_share_and_repeats_nothing_in_an_epoch(t, folder, tmp_path):
    write_lines(tmp_path / "a.jsonl", [row | {"id": f"a{n}"} for n, row in enumerate(corpus(folder, 21))])
    write_lines(tmp_path / "b.jsonl", [row | {"id": f"b{n}"} for n, row in enumerate(corpus(folder, 12))])
    for share, a, b in ((0.25, 21, 7), (0.6, 8, 12)):
        out = tmp_path / str(share)
        t.run_main(t.tabom, f"--data {tmp_path}/a.jsonl --mix {tmp_path}/b.jsonl --share {share} --out {out} "
                            f"--epochs 2 --window 4 --lora-r 4")
        epochs = {1: [], 2: []}
        for row in log_of(out)[1]:
            epochs[row["epoch"]] += row["samples"]
        for samples in epochs.values():
            assert len(set(samples)) == len(samples)
            assert [sum(id[0] == name for id in samples) for name in "ab"] == [a, b]
        assert set(epochs[1]) != set(epochs[2])


@fork("full")
def test_full_saves_a_checkpoint_that_differs_in_the_trained_layers_only(t, folder, tmp_path):
    source = write_lines(tmp_path / "t.jsonl", corpus(folder, 6))
    t.run_main(t.tabom, f"--data {source} --out {tmp_path}/run --full-layers 1 --epochs 2 --window 4 --lr 1e-2")
    old = load_file(Path(folder) / "model.safetensors")
    new = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert old.keys() == new.keys()
    for name, x in old.items():
        assert torch.equal(x, new[name]) == (".blocks.1." not in name), name
    # it loads, and computes what the trained model did; the tokenizer is there
    net = t.load(tmp_path / "run" / "last")
    assert net.config.vocab == t.load(folder).config.vocab
    t.tokenizer(str(tmp_path / "run" / "last"))


def test_fsdp_on_two_ranks_equals_one_process(forked, folders, tmp_path):
    """Uneven: 21 records in batches of 8, so the last has 3 and 2, and then micro-batches of 2."""
    source = write_lines(tmp_path / "t.jsonl", corpus(folders["llada"], 21))
    flags = f"--data {source} --window 4 --lora-r 4 --lr 1e-3 --warmup 2 --epochs 2 --batch-size 2"
    inside(forked(), lambda t: t.run_main(t.tabom, f"{flags} --out {tmp_path}/one --grad-accum 4"))

    def two(t):
        sharded = []
        real = t.tabom.shard
        t.tabom.shard = lambda model, *rest: sharded.append(model) or real(model, *rest)
        t.run_main(t.tabom, f"{flags} --out {tmp_path}/two --grad-accum 2 --fsdp")
        # a rank keeps half of the base, and the whole adapter
        mine = sum(p.to_local().numel() for p in sharded[0].parameters() if hasattr(p, "to_local"))
        assert mine < 0.51 * sum(p.numel() for p in t.load(folders["llada"]).parameters())
    inside(forked("fsdp"), lambda t: run_ranks(2, lambda: two(t)))
    assert_close_runs(tmp_path / "one", tmp_path / "two")


@fork("on-policy")
def test_on_policy_trains_its_second_epoch_on_what_the_adapter_decoded(t, folder, tmp_path):
    """By hand: train an epoch, decode with its adapter, put these records into the file, and resume."""
    prompts, source = write_lines(tmp_path / "p.jsonl", TASKS), tmp_path / "t.jsonl"
    how = f"--model {folder} --prompts {prompts} --length 8 --tokens-per-step 2"
    t.run_main(t.decode, f"{how} --out {source}")
    flags = f"--data {source} --all --window 4 --lora-r 4 --lr 0.02 --warmup 0 --epochs 2 --batch-size 2"
    fork_flags = f"{flags} --on-policy {prompts} --decode-flags=--length=8"
    t.run_main(t.tabom, f"{fork_flags} --out {tmp_path}/new")
    run_ranks(2, lambda: t.run_main(t.tabom, f"{fork_flags} --out {tmp_path}/two --batch-size 1"))
    assert_close_runs(tmp_path / "new", tmp_path / "two")
    first = source.read_text()
    # the same without the flag, stopped after the first epoch
    real = t.tabom.get_lr
    t.tabom.get_lr = lambda step, *a: real(step, *a) if step < 3 else sys.exit(0)
    with pytest.raises(SystemExit):
        t.run_main(t.tabom, f"{flags} --out {tmp_path}/hand")
    t.tabom.get_lr = real
    t.run_main(t.decode, f"--model {folder} --prompts {prompts} --length 8 --adapter {tmp_path}/hand/epoch-1 --out "
                         f"{tmp_path}/second.jsonl")
    second = {row["id"]: row for row in read_lines(tmp_path / "second.jsonl")}
    records = {row["id"]: row for row in read_lines(tmp_path / "new" / "decoded-1.jsonl")}
    assert all(records[id]["response_token_ids"] == row["response_token_ids"] for id, row in second.items())
    write_lines(source, [second[row["id"]] for row in read_lines(source)])
    assert source.read_text() != first
    forget(tmp_path / "hand" / "resume.safetensors", "data_checksum")        # other data, on purpose
    t.run_main(t.tabom, f"{flags} --out {tmp_path}/hand --resume")
    assert_close_runs(tmp_path / "new", tmp_path / "hand")


@fork("family")
def test_family_loads_a_llama_shaped_model(t, folder, tmp_path):
    """Dream's names without the biases, LLaDA's tokenizer, no shift; equal to transformers' Llama, not causal."""
    from transformers import LlamaConfig, LlamaForCausalLM
    llama = shutil.copytree(folder, tmp_path / "llama")
    names = {name: shape for name, shape in t.hub_shapes("Dream").items() if not name.endswith("bias")}
    g = torch.Generator().manual_seed(0)
    weights = {name: 0.5 * torch.randn(shape, generator=g) for name, shape in names.items()}
    save_file(weights, llama / "model.safetensors")
    config = config_of("Dream") | {"model_type": "llama-mdm"}
    (llama / "config.json").write_text(json.dumps(config))
    theirs = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k not in ("model_type", "auto_map")},
                                          attn_implementation="eager"))
    theirs.load_state_dict(load_file(llama / "model.safetensors"))
    row = [3, 1, 4, 1, 5, 9, 2]
    want = theirs(torch.tensor([row]), attention_mask=torch.zeros(1, 1, 7, 7)).logits[0]
    torch.testing.assert_close(t.full(t.load(llama), [row])[0], want.detach(), atol=1e-4, rtol=1e-4)
    # and it decodes
    prompts = write_lines(tmp_path / "p.jsonl", TASKS)
    t.run_main(t.decode, f"--model {llama} --prompts {prompts} --length 8 --out {tmp_path}/t.jsonl")
    assert {row["decode"]["schedule"] for row in read_lines(tmp_path / "t.jsonl")} == {"even"}

# -----------------------------------------------------------------------------
# decoding, against plain loops

def decode_by_hand(t, net, prompt, N, choose):
    """
    One row alone, greedily. choose: the log-probabilities of what is still masked, {position: list}, to the positions
    that are unmasked now. Gives the tokens and the steps.
    """
    mask_id, step = net.config.mask_id, 0
    canvas, steps = [mask_id] * N, [-1] * N
    while mask_id in canvas:
        logp = t.plain_logits(net, prompt, canvas).log_softmax(-1)
        for j in choose({j: logp[j].tolist() for j in range(N) if canvas[j] == mask_id}):
            logp[j, mask_id] = -math.inf
            canvas[j], steps[j] = int(logp[j].argmax()), step
        step += 1
    return canvas, steps


def settings(t, folder, flags):
    """Decoding settings without an end, so that the whole canvas is decoded."""
    return t.settings(folder, flags, end_ids=[-1])


@fork("score")
def test_score_orders_by_the_runner_up(t, folder, tmp_path):
    net, s = t.load(folder), settings(t, folder, "--length 12 --score second")
    best = lambda logp: [min(logp, key=lambda j: sorted(logp[j])[-2])]
    for prompt in t.prompts_of("llada"):
        traj, = t.run(net, [prompt], s)
        assert (traj.response.tolist(), traj.step.tolist()) == decode_by_hand(t, net, prompt, 12, best)


@fork("entropy-bound")
def test_entropy_bound_is_never_exceeded_but_for_the_first_token(t, folder, tmp_path):
    net = t.load(folder)
    counts = set()
    for bound in (0, 1.5, 4, 1000):
        def choose(logp, bound=bound):
            h = {j: -sum(math.exp(x) * x for x in row) for j, row in logp.items()}
            taken = []
            for j in sorted(h, key=h.get):
                if sum(h[i] for i in taken) > bound:     # the sum of all but the largest, which is j's
                    break
                taken.append(j)
            counts.add(len(taken))
            return taken
        s = settings(t, folder, f"--length 12 --score entropy --entropy-bound {bound}")
        for prompt in t.prompts_of("llada"):
            traj, = t.run(net, [prompt], s)
            assert (traj.response.tolist(), traj.step.tolist()) == decode_by_hand(t, net, prompt, 12, choose)
    assert {1, 2, 3, 12} <= counts


def check_cache(t, family, folder):
    prompts, flags = t.prompts_of(family), "--length 12 --block 4 --temperature 0"
    sizes = []
    real = t.models.Block.forward
    t.models.Block.forward = lambda self, x, *a: (sizes.append(x.shape[1]), real(self, x, *a))[1]
    for layers in (2, 1):
        net = t.load(folder)
        net.blocks, net.config.layers = net.blocks[:layers], layers
        plain = t.run(net, prompts, settings(t, folder, flags))
        # one layer: outside the block nothing changes, so that any K is exact
        for k in (1, 3, 100):
            sizes.clear()
            cached, alone = (t.run(net, prompts, settings(t, folder, f"{flags} --cache {k}"), size) for size in (3, 1))
            same = [[np.array_equal(getattr(x, name), getattr(y, name)) for name in ("response", "step")]
                    for x, y in zip(cached, plain, strict=True)]
            assert np.all(same) == (k == 1 or layers == 1)
            assert all(np.array_equal(x.response, y.response) for x, y in zip(cached, alone, strict=True))
            if k == 100:                                 # at the end only blocks, and the token before with a shift
                assert sizes[-3 * layers:] == 3 * layers * [4 + net.config.family["shift"]]


@pytest.mark.parametrize("family", ["llada", "Dream"])
def test_kv_cache_of_1_is_exact_and_a_longer_one_in_a_model_of_one_layer(family, forked, folders):
    inside(forked("kv-cache"), check_cache, family, folders[family])

# -----------------------------------------------------------------------------
# flags

@pytest.mark.parametrize("name, flags, words", [
    ("negatives", "tabom --negatives --lam 0", "--negatives: reverses"),
    ("negatives", "tabom --negatives --all", "--negatives: reverses"),
    ("full", "tabom --full-layers 1 --method t3d", "--full-layers 1"),
    ("mix", "tabom --mix b --share 1.5", "--share 1.5"),
    ("fsdp", "tabom --fsdp", "--fsdp: start it with torchrun"),
    ("on-policy", "tabom --on-policy nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("on-policy", "tabom --on-policy {source} --decode-flags=--steps=999", "--steps 999"),
    ("focal", "tabom --focal 1 --data {bare}", "has no entropies"),
    ("entropy-bound", "decode --entropy-bound 1 --steps 8", "--entropy-bound: says how many"),
    ("entropy-bound", "decode --entropy-bound 1 --schedule dream", "--entropy-bound: says how many"),
    ("entropy-bound", "eval --entropy-bound 1 --parallel 2", "--parallel: sets"),
])
def test_wrong_flags_of_a_fork_end_with_one_line(name, flags, words, forked, folders, tmp_path, refused):
    rows = corpus(folders["llada"], 3)
    source = write_lines(tmp_path / "t.jsonl", rows)
    bare = write_lines(tmp_path / "bare.jsonl", [{k: v for k, v in row.items() if k != "entropy"} for row in rows])
    model = f"--model {folders['llada']} --prompts {source}"
    common = {"tabom": f"--data {source} --out {tmp_path}/o", "decode": f"{model} --out {tmp_path}/o.jsonl",
              "eval": f"{model} --out {tmp_path}/r"}

    def check(t):
        script, own = flags.format(source=source, bare=bare).split(" ", 1)
        with refused(words):
            t.run_main(importlib.import_module(script), f"{common[script]} {own}")
    inside(forked(name), check)
