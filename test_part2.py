"""What tabom.py claims: the losses against plain loops in float64, the state against a replay of the trajectory, gradients
against finite differences, one process against two and four, killed against whole. Made of the pieces of test_tabom.py.
"""
# ruff: noqa: F811   fixtures come by import
import argparse
import builtins
import copy
import json
import math
import os
import random
import shutil
import signal
import socket
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
import tabom
from test_tabom import (  # noqa: F401
    CHARS,
    HERE,
    config_of,
    filled,
    folders,
    ids_of,
    one_thread,
    refused,
    tiny,
    write_lines,
)

# ---------------------------------------------------------------- trajectories to train on

SHAPES = [    # length, tokens a step, first EOS, never decoded, prompt: ragged on purpose
    dict(length=12, k=1, end=11, prompt=6), dict(length=9, k=2, end=5, prompt=3), dict(length=14, k=3, end=9, prompt=8),
    dict(length=3, k=1, end=2, prompt=4), dict(length=10, k=1, end=4, undone=3, prompt=5), dict(length=8, k=8, end=6, prompt=2)]


def trajectory(family: str, id, length: int, k: int = 1, end: int = 0, undone: int = 0, prompt: int = 4, seed: int = 0, **more):
    """A record as decode.py writes it, of random tokens: k of them a step, EOS from `end` on, the last `undone` still masks."""
    i, rng = ids_of(family), np.random.default_rng([seed, *str(id).encode()])
    ids, order = rng.integers(0, len(CHARS), length), np.full(length, -1)
    ids[end:], ids[length - undone:] = i.eos, i.mask
    order[:length - undone] = rng.permutation(length - undone) // k
    H = [None if s < 0 else float(h) for s, h in zip(order, rng.integers(0, 4, length) / 2, strict=True)]     # coarse: ties
    text = "".join(CHARS[t] for t in rng.integers(0, len(CHARS), prompt))
    return dict(id=id, prompt=text, response="".join(CHARS[t] for t in ids[:end]), response_token_ids=ids.tolist(),
                decoding_order=order.tolist(), method="entropy", prompt_token_ids=[CHARS.index(x) for x in text],
                entropy=H, confidence=[None if h is None else 0.5 for h in H], answer=None, correct=None, decode={},
                model=dict(name="", mask_id=i.mask, vocab_size=i.vocab)) | more


def settings_of(flags: str = "", **more) -> argparse.Namespace:
    """tabom.py's own reading of a command line."""
    argv, sys.argv = sys.argv, ["tabom.py", "--data", "-", *flags.split()]
    try:
        return argparse.Namespace(**vars(tabom.flags()) | more)
    finally:
        sys.argv = argv


def read_for(folder: str, a, raws: list[dict], tmp_path) -> list:
    c, _ = models.read_config(folder)
    a.data = write_lines(tmp_path / "t.jsonl", [r | dict(model=r["model"] | dict(name=folder)) for r in raws])
    return tabom.read_data(a, c, models.load_tokenizer(folder), 0)


def plain_order(raw: dict, tail: str, ends) -> list[int]:
    """Positions that may be targets, in the total order."""
    ids, order, last = raw["response_token_ids"], raw["decoding_order"], len(raw["response_token_ids"])
    for j in range(len(ids)):
        if tail == "drop" and ids[j] in ends:
            last = j + 1
            break
    return [j for _, _, j in sorted((order[j], raw["entropy"][j], j) for j in range(last) if order[j] >= 0)]


def plain_cuts(raw: dict, targets: list[int], need: int) -> list[int]:
    """Step boundaries that leave at least `need` targets."""
    steps = [raw["decoding_order"][j] for j in targets]
    return sorted({u for u in steps if sum(s >= u for s in steps) >= need})


def replayed(raw: dict, before: int) -> list[bool]:
    """Unmasks step after step, as decode.py does, and stops just before step `before`."""
    seen = [False] * len(raw["decoding_order"])
    for step in range(before):
        for j, s in enumerate(raw["decoding_order"]):
            if s == step:
                seen[j] = True
    return seen


@pytest.fixture
def wide(monkeypatch, folders):
    """wide(family): a net with an adapter, and its base alone, wholly in float64, norms and RoPE too."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    def make(family="llada", r=4):
        base, net = (models.load(folders[family], dtype=torch.float64) for _ in range(2))
        lora.wrap(net, r=r)
        return filled(net).double().train(), base
    return make


# ---------------------------------------------------------------- the losses against plain loops

def plain_stats(z: list[float], x: int) -> tuple[float, float]:
    """Cross-entropy of x and the entropy, of one row of logits."""
    top = max(z)
    total = sum(math.exp(v - top) for v in z)
    p = [math.exp(v - top) / total for v in z]
    return -(z[x] - top - math.log(total)), -sum(q * math.log(q) for q in p if q > 0)


def forward(net, raw: dict, seen, mask_id: int) -> list[list[float]]:
    """(N, V) logits of one unpadded state, through the other path of the model: no `at`, no `real`."""
    ids = raw["prompt_token_ids"] + [t if s else mask_id for t, s in zip(raw["response_token_ids"], seen, strict=True)]
    with torch.no_grad():
        return net(torch.tensor([ids]))[0, len(raw["prompt_token_ids"]):].tolist()


def plain_loss(net, base, raw: dict, seen, targets, a, mask_id: int) -> float:
    x, rows = raw["response_token_ids"], forward(net, raw, seen, mask_id)
    ce = [plain_stats(rows[j], x[j])[0] for j in targets]
    if a.method in ("sft", "dinfer"):
        return sum(ce) / len(ce)
    if a.method == "t3d":
        ref, sides = forward(base, raw, seen, mask_id), []
        for say in (lambda j: x[j], lambda j: max(range(len(ref[j])), key=lambda v: ref[j][v])):
            sides.append(sum(plain_stats(ref[j], say(j))[0] - plain_stats(rows[j], say(j))[0] for j in targets) / len(targets))
        path = 0
        for s in range(1, len(ce) + 1):
            path += sum(ce[:s]) / s / len(ce)
        sigmoid = lambda v: 1 / (1 + math.exp(-v))
        return -math.log(sigmoid(0.1 * sides[0])) - 0.5 * math.log(1 - sigmoid(0.1 * sides[1])) + 0.2 * path
    h = []
    for j in targets:                                    # exact: a forward of its own for each token of the window
        state = replayed(raw, raw["decoding_order"][j]) if a.rank_context == "exact" else seen
        h.append(plain_stats(forward(net, raw, state, mask_id)[j], x[j])[1])
    W, hinge = len(h), 0
    for r in range(W):
        for s in range(r + 1, W):
            hinge += max(0, h[r] - h[s] + a.gamma)
    return sum(ce) / W + (a.lam * 2 / (W * (W - 1)) * hinge if W > 1 else 0)


@pytest.mark.parametrize("flags", [
    "--window 4", "--window 2 --lam 2 --gamma 0.7 --tail drop", "--window 0", "--window 0 --tail drop", "--lam 0 --window 5", "--window 32",
    "--method sft", "--method sft --tail drop", "--method dinfer", "--method dinfer --tail drop", "--method t3d", "--method t3d --tail drop",
    "--window 4 --rank-context exact", "--window 5 --rank-context exact --exact-chunk 2 --tail drop", "--window 0 --rank-context exact"])
@pytest.mark.parametrize("family", ["llada", "Dream"])
def test_loss_equals_plain_loops(family, flags, wide, folders, tmp_path):
    a, i = settings_of(flags + " --all"), ids_of(family)
    raws = [trajectory(family, n, **shape) for n, shape in enumerate(SHAPES)]
    records = read_for(folders[family], a, raws, tmp_path)
    net, base = wide(family)
    assert len(records) == len(raws)
    ends = set()
    for seed in range(3):
        views = [(r, *tabom.view(r, a.method, a.window, np.random.default_rng([seed, n]))) for n, r in enumerate(records)]
        batches = [[v] for v in views] if a.rank_context == "exact" else [views]
        got = torch.cat([tabom.batch_loss(net, b, a, i.mask, "cpu")[0] for b in batches]).tolist()
        for raw, (r, seen, targets), loss in zip(raws, views, got, strict=True):
            assert loss == pytest.approx(plain_loss(net, base, raw, seen, targets, a, i.mask), rel=1e-9)
            ends |= {"start"} if not seen.any() else set()
            ends |= {"end"} if targets[-1] == r.rank[-1] else set()
    assert ends == {"start", "end"}                      # windows at both ends of a trajectory


def test_logged_parts_equal_plain_counts(wide, folders, tmp_path):
    """ce, rank, pairs in order, pairs and tokens fed, as batch_loss hands them to the log."""
    a, i = settings_of("--window 4 --gamma 0.3 --lam 2 --all"), ids_of("llada")
    raws = [trajectory("llada", n, **shape) for n, shape in enumerate(SHAPES)]
    records, (net, _) = read_for(folders["llada"], a, raws, tmp_path), wide()
    views = [(r, *tabom.view(r, "tabom", 4, np.random.default_rng(n))) for n, r in enumerate(records)]
    loss, ce, rank, right, pairs, tokens = tabom.batch_loss(net, views, a, i.mask, "cpu")
    assert tokens == sum(len(r["prompt"]) + len(r["response_token_ids"]) for r in raws)
    assert torch.allclose(loss, ce + 2 * rank)
    for n, (raw, (_, seen, targets)) in enumerate(zip(raws, views, strict=True)):
        stats = [plain_stats(forward(net, raw, seen, i.mask)[j], raw["response_token_ids"][j]) for j in targets]
        assert ce[n].item() == pytest.approx(sum(s[0] for s in stats) / len(stats))
        inside = [(r, s) for r in range(len(stats)) for s in range(r + 1, len(stats))]
        assert pairs[n] == len(inside) and right[n] == sum(stats[r][1] < stats[s][1] for r, s in inside)


def test_head_is_fed_the_window_alone(folders, tmp_path):
    a, i = settings_of("--window 4 --all"), ids_of("llada")
    records = read_for(folders["llada"], a, [trajectory("llada", n, **shape) for n, shape in enumerate(SHAPES)], tmp_path)
    net, fed = models.load(folders["llada"]), []
    models.part(net, net.family["head"]).register_forward_hook(lambda _m, x, _y: fed.append(x[0].shape[0]))
    views = [(r, *tabom.view(r, "tabom", 4, np.random.default_rng(n))) for n, r in enumerate(records)]
    tabom.batch_loss(net, views, a, i.mask, "cpu")
    assert fed == [sum(min(4, len(r.rank)) for r in records)]


# ---------------------------------------------------------------- gradients against finite differences, extremes

def slots(rng, sizes):
    """Random slot (B, W) and valid (B, W) for windows of these sizes."""
    slot, valid, n = torch.zeros(len(sizes), max(sizes), dtype=torch.long), torch.zeros(len(sizes), max(sizes), dtype=torch.bool), 0
    for b, size in enumerate(sizes):
        slot[b, :size], valid[b, :size] = n + torch.from_numpy(rng.permutation(size)), True
        n += size
    return slot, valid


def test_gradients_of_the_losses_equal_finite_differences():
    rng = np.random.default_rng(0)
    z, ref = (torch.from_numpy(rng.normal(size=(8, 7)) * 2).requires_grad_() for _ in range(2))
    x0, (slot, valid) = torch.from_numpy(rng.integers(0, 7, 8)), slots(rng, [4, 1, 3])
    assert torch.autograd.gradcheck(lambda z: tabom.TokenStats.apply(z, x0), z)
    for lam, gamma in ((1.0, 0.2), (0.0, 0.2), (2.0, 5.0)):                  # 5: every pair is inside the margin
        assert torch.autograd.gradcheck(lambda z: tabom.tabom_loss(z, x0, slot, valid, lam, gamma)[0], z)
    other = torch.from_numpy(rng.integers(0, 8, tuple(slot.shape)))
    assert torch.autograd.gradcheck(lambda z: tabom.tabom_loss(z, x0, slot, valid, 1.0, 0.3, other)[0], z)
    assert torch.autograd.gradcheck(lambda z: tabom.t3d_loss(z, ref.detach(), x0, slot, valid)[0], z)


def test_token_stats_equal_torch_in_every_type():
    """fp32 inside, whatever comes in: against torch's own cross-entropy and Categorical, in float64 from the same numbers."""
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        z, x0 = (torch.randn(20, 50, generator=g) * 4).to(dtype).requires_grad_(), torch.randint(0, 50, (20,), generator=g)
        ce, h = tabom.TokenStats.apply(z, x0)
        assert ce.dtype == h.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        y = z.detach().double().requires_grad_()
        want = torch.nn.functional.cross_entropy(y, x0, reduction="none"), torch.distributions.Categorical(logits=y).entropy()
        assert torch.allclose(ce.double(), want[0], atol=1e-5) and torch.allclose(h.double(), want[1], atol=1e-5)
        (2 * ce.sum() - 3 * h.sum()).backward()
        (2 * want[0].sum() - 3 * want[1].sum()).backward()
        assert torch.allclose(z.grad.double(), y.grad, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("flags", ["--window 4", "--window 4 --lam 0", "--window 0 --gamma 0.5", "--window 4 --rank-context exact",
                                   "--window 6 --rank-context exact --exact-chunk 2", "--method sft", "--method dinfer", "--method t3d"])
def test_gradient_through_the_model_equals_a_finite_difference(flags, wide, folders, tmp_path):
    a, i, g = settings_of(flags + " --all"), ids_of("llada"), torch.Generator().manual_seed(0)
    records, (net, _) = read_for(folders["llada"], a, [trajectory("llada", n, **s) for n, s in enumerate(SHAPES)], tmp_path), wide()
    views = [(r, *tabom.view(r, a.method, a.window, np.random.default_rng(n))) for n, r in enumerate(records)]
    batches = [[v] for v in views] if a.rank_context == "exact" else [views]
    params = [p for p in net.parameters() if p.requires_grad]
    way = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in params]

    def loss(eps):
        with torch.no_grad():
            for p, at, d in zip(params, here, way, strict=True):
                p.copy_(at + eps * d)
        return sum(tabom.batch_loss(net, b, a, i.mask, "cpu")[0].sum() for b in batches)
    here = [p.detach().clone() for p in params]
    loss(0).backward()
    slope = sum((p.grad * d).sum().item() for p, d in zip(params, way, strict=True))
    assert slope == pytest.approx((loss(1e-6).item() - loss(-1e-6).item()) / 2e-6, rel=1e-5)


def test_extreme_logits_give_finite_losses_and_gradients():
    V, inf = 40, math.inf
    rows = torch.zeros(6, V)
    rows[1, 3], rows[2], rows[3, 5], rows[4, 7:] = 1e4, torch.linspace(-1e4, 1e4, V), -inf, -inf
    rows[5, 2] = 80.0
    x0 = torch.tensor([0, 3, V - 1, 0, 6, 2])
    z = rows.clone().requires_grad_()
    ce, h = tabom.TokenStats.apply(z, x0)
    assert h.tolist() == pytest.approx([math.log(V), 0, 0, math.log(V - 1), math.log(7), 0], abs=1e-5)       # uniform, one-hot, cut
    assert ce.tolist() == pytest.approx([math.log(V), 0, 0, math.log(V - 1), math.log(7), 0], abs=1e-5)
    slot, valid = torch.tensor([[1, 0, 2], [5, 4, 3]]), torch.ones(2, 3, dtype=torch.bool)
    loss = tabom.tabom_loss(z, x0, slot, valid, 1.0, 0.2)[0]
    loss.sum().backward()
    assert loss.isfinite().all() and z.grad.isfinite().all() and z.grad[3, 5] == 0 and (z.grad[4, 7:] == 0).all()
    x0[2], z.grad = 0, None                              # a target 2e4 nats away: a large loss, not an infinite one
    loss = tabom.tabom_loss(z, x0, slot, valid, 1.0, 0.2)[0]
    t3d = tabom.t3d_loss(z, rows.roll(1, 0), x0, slot[:1], valid[:1])[0]     # no -inf in these rows of the base
    (loss.sum() + t3d.sum()).backward()
    assert loss[0].item() == pytest.approx((2e4 + math.log(V)) / 3 + (0.2 + 0.2 + math.log(V)) / 3, rel=1e-6)
    assert loss.isfinite().all() and t3d.isfinite().all() and z.grad.isfinite().all()


def test_a_broken_sample_does_not_touch_its_neighbours():
    """Samples of other sizes share the batch's arrays: the non-finite one must be the only non-finite loss."""
    rng, V = np.random.default_rng(0), 9
    z, x0 = torch.from_numpy(rng.normal(size=(7, V))), torch.from_numpy(rng.integers(0, V, 7))
    slot, valid = slots(rng, [4, 1, 2])
    alone = tabom.tabom_loss(z, x0, slot, valid, 1.0, 0.2)[0], tabom.t3d_loss(z, z + 1, x0, slot, valid)[0]
    for value in (math.nan, -math.inf):
        y = z.clone()
        y[0, x0[0]] = value
        for got, want in zip((tabom.tabom_loss(y, x0, slot, valid, 1.0, 0.2)[0], tabom.t3d_loss(y, z + 1, x0, slot, valid)[0]), alone, strict=True):
            assert not got[0].isfinite() and torch.equal(got[1:], want[1:])


# ---------------------------------------------------------------- what the model sees

@pytest.mark.parametrize("tail", ["keep", "drop"])
def test_view_is_a_state_of_the_replay_and_the_next_tokens_in_order(tail, folders, tmp_path):
    a, i = settings_of(f"--all --tail {tail}"), ids_of("llada")
    raws = [trajectory("llada", n, **s) for n, s in enumerate(SHAPES)]
    for raw, r in zip(raws, read_for(folders["llada"], a, raws, tmp_path), strict=True):
        order = plain_order(raw, tail, (i.eos, i.eot))
        steps = [raw["decoding_order"][j] for j in order]
        last = steps[-1]
        for window in (1, 2, 4, 5, 32, 0):
            cuts = plain_cuts(raw, order, min(window or 2, len(order)))
            for seed in range(20):
                seen, targets = tabom.view(r, "tabom", window, np.random.default_rng(seed))
                left = [j for j in order if not seen[j]]
                assert targets.tolist() == (left[:window] if window else left)
                cut = raw["decoding_order"][targets[0]]
                assert cut in cuts and seen.tolist() == replayed(raw, cut)
        for seed in range(40):
            seen, targets = tabom.view(r, "t3d", 4, np.random.default_rng(seed))
            assert seen.tolist() == replayed(raw, raw["decoding_order"][targets[0]])
            assert targets.tolist() == [j for j in order if not seen[j]]
            seen, targets = tabom.view(r, "dinfer", 4, np.random.default_rng(seed))
            i_, j_ = raw["decoding_order"][targets[0]], next((s for s in steps if s > raw["decoding_order"][targets[-1]]), last + 1)
            assert seen.tolist() == replayed(raw, i_)
            assert targets.tolist() == [j for j, s in zip(order, steps, strict=True) if i_ <= s < j_]
            seen, targets = tabom.view(r, "sft", 4, np.random.default_rng(seed))
            assert targets.tolist() == [j for j in order if not seen[j]] and len(targets)
            assert not any(seen[j] for j in range(len(seen)) if raw["decoding_order"][j] < 0)


def test_cuts_are_uniform_over_the_boundaries(folders, tmp_path):
    a, draws = settings_of("--all"), 4000
    raws = [trajectory("llada", n, **s) for n, s in enumerate(SHAPES[:3])]

    def flat(counts, k):                                 # chi-square, k outcomes: mean k - 1, deviation sqrt(2 (k - 1))
        assert len(counts) == k
        return k == 1 or sum((n - draws / k) ** 2 / (draws / k) for n in counts.values()) < k - 1 + 5 * math.sqrt(2 * (k - 1))

    for raw, r in zip(raws, read_for(folders["llada"], a, raws, tmp_path), strict=True):
        rng, steps = np.random.default_rng(0), raw["decoding_order"]
        for method, window in (("tabom", 4), ("tabom", 0), ("t3d", 4)):
            cuts = plain_cuts(raw, r.rank.tolist(), 1 if method == "t3d" else window or 2)
            counts = dict.fromkeys(cuts, 0)
            for _ in range(draws):
                counts[steps[tabom.view(r, method, window, rng)[1][0]]] += 1
            assert flat(counts, len(cuts)), (method, window, counts)
        S = max(steps) + 1                               # dinfer: every pair of the S + 1 times alike
        counts = {(x, y): 0 for y in range(S + 1) for x in range(y)}
        for _ in range(draws):
            targets = tabom.view(r, "dinfer", 4, rng)[1]
            counts[steps[targets[0]], steps[targets[-1]] + 1] += 1
        assert flat(counts, S * (S + 1) // 2), counts
        t = [1 - tabom.view(r, "sft", 4, rng)[0].mean() for _ in range(draws)]    # sft: mask ratio uniform, all counts of masks alike
        N = len(steps)
        masks, counts = [round(x * N) for x in t], {}
        for m in masks:
            counts[max(m, 1)] = counts.get(max(m, 1), 0) + 1
        one = counts.pop(1)                              # none masked becomes one masked
        assert abs(one - 2 * draws / (N + 1)) < 5 * math.sqrt(2 * draws / (N + 1))
        assert all(abs(n - draws / (N + 1)) < 5 * math.sqrt(draws / (N + 1)) for n in counts.values())


def test_no_token_of_the_future_reaches_the_model(folders, tmp_path):
    """Another token anywhere outside U_t leaves the ids that the model is fed as they were; one inside U_t does not."""
    a, i = settings_of("--all"), ids_of("llada")
    for r in read_for(folders["llada"], a, [trajectory("llada", n, **s) for n, s in enumerate(SHAPES)], tmp_path):
        for method in ("tabom", "sft", "dinfer", "t3d"):
            for seed in range(4):
                seen, targets = tabom.view(r, method, 4, np.random.default_rng(seed))
                rows = tabom.exact_rows(r, seen, targets)[0] if method == "tabom" else [(r.prompt, r.ids, seen, targets)]
                for prompt, x, visible, wanted in rows:
                    ids, _, at = tabom.collate([(prompt, x, visible, wanted)], i.mask, "cpu")[:3]
                    assert not (set(wanted) & set(np.flatnonzero(visible)))          # what is asked for is never shown
                    assert at[0, len(prompt):].nonzero()[:, 0].tolist() == sorted(wanted.tolist())
                    for j in range(len(x)):
                        y = x.copy()
                        y[j] = (y[j] + 1) % len(CHARS)
                        moved = tabom.collate([(prompt, y, visible, wanted)], i.mask, "cpu")[0]
                        assert torch.equal(moved, ids) == (not visible[j])
                if method == "tabom":                    # exact: row k is the replay just before its step
                    assert [v.tolist() for _, _, v, _ in rows] == [replayed(
                        dict(decoding_order=r.order.tolist()), s) for s in sorted(set(r.order[targets].tolist()))]


def test_collate_slots_equal_a_plain_loop():
    rng, mask_id = np.random.default_rng(0), 99
    rows = []
    for P, N, W in ((3, 7, 4), (6, 5, 1), (1, 9, 9), (4, 2, 2)):
        rows.append((rng.integers(0, 50, P), rng.integers(0, 50, N), rng.random(N) < 0.5, rng.permutation(N)[:W]))
    ids, real, at, x0, slot, valid = tabom.collate(rows, mask_id, "cpu")
    T, n = max(len(p) + len(x) for p, x, _, _ in rows), 0
    flat = []                                            # (row, column) of each logit, in reading order
    for b in range(len(rows)):
        for t in range(T):
            if at[b, t]:
                flat.append((b, t))
    for b, (prompt, x, visible, targets) in enumerate(rows):
        pad = T - len(prompt) - len(x)
        assert real[b].tolist() == [t >= pad for t in range(T)]
        assert ids[b, pad:].tolist() == [*prompt, *(t if v else mask_id for t, v in zip(x, visible, strict=True))]
        assert valid[b].sum() == len(targets) and valid[b, :len(targets)].all()
        for w, target in enumerate(targets):
            assert flat[slot[b, w]] == (b, pad + len(prompt) + target) and x0[slot[b, w]] == x[target]
        n += len(targets)
    assert len(flat) == len(x0) == n and at.sum() == n


# ---------------------------------------------------------------- exact and t3d

class Placed(torch.nn.Module):
    """A model that ignores its context, but not the position: logits off a table."""
    def __init__(self, length: int, vocab: int):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(length, vocab, generator=torch.Generator().manual_seed(0)))

    def forward(self, ids, real, at):
        start = (~real).sum(1)
        rows, cols = at.nonzero(as_tuple=True)
        return self.table[cols - start[rows]]


def test_exact_equals_start_where_it_must(folders, tmp_path):
    """With one token there is no pair; without context every state is the same state."""
    i, raws = ids_of("llada"), [trajectory("llada", n, **s) for n, s in enumerate(SHAPES)]
    start, exact = settings_of("--all"), settings_of("--all --rank-context exact")
    records, net = read_for(folders["llada"], start, raws, tmp_path), models.load(folders["llada"])
    deaf = models.load(folders["llada"])
    for block in models.part(deaf, deaf.family["blocks"]):
        models.part(block, deaf.family["block"]["o"]).weight.data.zero_()
    for module, window in ((net, 1), (deaf, 6), (deaf, 0), (Placed(40, i.vocab), 6)):
        for n, r in enumerate(records):
            batch = [(r, *tabom.view(r, "tabom", window, np.random.default_rng(n)))]
            (x, *one), (y, *two) = (tabom.batch_loss(module, batch, a, i.mask, "cpu") for a in (start, exact))
            assert torch.allclose(x, y, atol=1e-5) and torch.allclose(one[1], two[1], atol=1e-5)
            if isinstance(module, Placed):
                assert torch.equal(one[2], two[2]) and torch.equal(one[3], two[3])
    r = records[0]                                       # and with context it is another number
    batch = [(r, *tabom.view(r, "tabom", 6, np.random.default_rng(0)))]
    assert abs(tabom.batch_loss(net, batch, start, i.mask, "cpu")[0] - tabom.batch_loss(net, batch, exact, i.mask, "cpu")[0]) > 1e-3


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_exact_in_chunks_equals_exact_whole(chunk, folders, tmp_path):
    whole, parts = settings_of("--all --rank-context exact"), settings_of(f"--all --rank-context exact --exact-chunk {chunk}")
    records = read_for(folders["llada"], whole, [trajectory("llada", n, **s) for n, s in enumerate(SHAPES)], tmp_path)
    net, fed = models.load(folders["llada"]), []
    params = lora.wrap(net, r=4)
    filled(net).train()
    net.register_forward_pre_hook(lambda _m, x: fed.append(len(x[0])))
    for n, r in enumerate(records):
        batch, got = [(r, *tabom.view(r, "tabom", 6, np.random.default_rng(n)))], []
        for a in (whole, parts):
            fed.clear()
            loss, *rest = tabom.batch_loss(net, batch, a, ids_of("llada").mask, "cpu")
            assert max(fed) <= a.exact_chunk
            loss.sum().backward()
            got.append([loss, *rest, *(p.grad.clone() for p in params)])
            net.zero_grad()
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(*got, strict=True))


def test_t3d_reference_is_the_base(folders, tmp_path, monkeypatch):
    a, i, seen = settings_of("--method t3d --all"), ids_of("llada"), {}
    records = read_for(folders["llada"], a, [trajectory("llada", n, **s) for n, s in enumerate(SHAPES)], tmp_path)
    net, base = models.load(folders["llada"]), models.load(folders["llada"])
    lora.wrap(net, r=4)
    filled(net).train()
    views = [(r, *tabom.view(r, "t3d", 4, np.random.default_rng(n))) for n, r in enumerate(records)]
    real = tabom.t3d_loss
    monkeypatch.setattr(tabom, "t3d_loss", lambda z, ref, *x: seen.update(z=z, ref=ref) or real(z, ref, *x))
    tabom.batch_loss(net, views, a, i.mask, "cpu")
    ids, real_, at = tabom.collate([(r.prompt, r.ids, v, t) for r, v, t in views], i.mask, "cpu")[:3]
    assert torch.equal(seen["ref"], base(ids, real_, at)) and not seen["ref"].requires_grad
    assert seen["z"].requires_grad and (seen["z"] - seen["ref"]).abs().max() > 0.1
    assert torch.equal(net(ids, real_, at), seen["z"])   # and the adapter is on again


# ---------------------------------------------------------------- schedule and data order

def test_learning_rate_warms_up_and_follows_the_cosine():
    total, peak, warmup = 200, 2e-5, 50
    curve = [tabom.learning_rate(s, total, peak, warmup) for s in range(total)]
    assert curve[0] == peak / 50 and curve[24] == pytest.approx(peak / 2) and curve[49] == curve[50] == peak
    assert curve[125] == pytest.approx(peak / 2) and tabom.learning_rate(total, total, peak, warmup) == pytest.approx(0)
    assert all(x < y for x, y in zip(curve[:49], curve[1:50], strict=True)) and all(x > y for x, y in zip(curve[50:-1], curve[51:], strict=True))
    assert curve[100] == pytest.approx(peak * math.cos(math.pi / 6) ** 2)    # (1 + cos 2x) / 2 = cos^2 x
    assert tabom.learning_rate(0, 10, 1.0, 0) == 1.0 and tabom.learning_rate(9, 10, 1.0, 50) == 0.2
    assert tabom.learning_rate(50, 50, 1.0, 50) == 1.0


def test_epoch_has_every_sample_once_and_is_of_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(10, 400, 1003)
    for size in (1, 8, 32):
        batches = tabom.epoch_batches(lengths, size, 7, 3)
        assert sorted(np.concatenate(batches)) == list(range(1003)) and len(batches) == -(-1003 // size)
        assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1)
        np.random.seed(1)                                # noqa: NPY002   no generator but its own is read
        random.seed(1)
        torch.manual_seed(1)
        again = tabom.epoch_batches(lengths, size, 7, 3)
        assert all((x == y).all() for x, y in zip(batches, again, strict=True))
        for seed, epoch in ((7, 4), (8, 3)):
            assert np.concatenate(tabom.epoch_batches(lengths, size, seed, epoch)).tolist() != np.concatenate(batches).tolist()
    batches = tabom.epoch_batches(lengths, 8, 7, 3)      # like lengths go together, yet long and short batches are mixed
    padding = sum(len(b) * lengths[b].max() - lengths[b].sum() for b in batches) / lengths.sum()
    shuffled = np.random.default_rng(0).permutation(1003)
    naive = sum(len(b) * lengths[b].max() - lengths[b].sum() for b in np.array_split(shuffled, len(batches))) / lengths.sum()
    means = [lengths[b].mean() for b in batches]
    assert padding < naive / 10 and abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3


# ---------------------------------------------------------------- the command

def corpus(folder: str, count: int = 21, family: str = "llada", **more) -> list[dict]:
    """Finished trajectories of many lengths, naming the model they come from."""
    rng = np.random.default_rng(count)
    rows = []
    for n in range(count):
        N = int(rng.integers(6, 14))
        r = trajectory(family, f"r{n}", N, k=1 + n % 3, end=int(rng.integers(2, N)), prompt=int(rng.integers(2, 9)), **more)
        rows.append(r | dict(model=r["model"] | dict(name=folder)))
    return rows


QUICK = "--window 4 --rank 4 --lr 1e-3 --warmup 5 --seed 3 --log-every 1000"


@pytest.fixture
def train(monkeypatch, folders, tmp_path):
    """train("run", "--lam 0"): tabom.py's main in this process on a small corpus; gives the --out folder."""
    rows = write_lines(tmp_path / "corpus.jsonl", corpus(folders["llada"]))

    def call(out="run", flags="", data=rows):
        monkeypatch.setattr(sys, "argv", ["tabom.py", "--data", str(data), "--out", str(tmp_path / out), *QUICK.split(), *flags.split()])
        with data_safely():
            tabom.main()
        return tmp_path / out
    data_safely = lambda: data.safely("kept")
    call.data = rows
    return call


def log_of(out) -> tuple[dict, list[dict]]:
    """log.jsonl as (first line, one row a step); every step is there once."""
    head, *rows = map(json.loads, (Path(out) / "log.jsonl").read_text().splitlines())
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1))
    return head, rows


def adapter_of(out) -> dict[str, torch.Tensor]:
    """The last epoch's."""
    return load_file(max(Path(out).glob("epoch-*"), key=lambda p: int(p.name[6:])) / "adapter_model.safetensors")


def assert_same_bits(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_run_leaves_adapters_log_and_resume_point(train, folders, tmp_path, capsys):
    out = train("run", "--epochs 2 --batch-size 4 --log-every 3 --save-every 5")
    shown, (head, rows) = capsys.readouterr(), log_of(out)
    assert sorted(p.name for p in out.iterdir()) == ["epoch-1", "epoch-2", "log.jsonl", "resume-0000012"]        # 21 records: 6 steps an epoch
    assert head["model"] == folders["llada"] and head["records"] == 21 and head["steps"] == 12 and head["world"] == 1
    assert head["args"]["lam"] == 1 and head["args"]["gamma"] == 0.2 and {"commit", "torch", "python", "device"} <= head.keys()
    assert f"{folders['llada']}:" in shown.out and "21 records\n" in shown.out and f"adapter in {out}/epoch-2" in shown.out
    for epoch in (1, 2):                                 # every record once an epoch
        assert sorted(s for r in rows if r["epoch"] == epoch for s in r["samples"]) == sorted(f"r{n}" for n in range(21))
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
    theirs, ours = PeftModel.from_pretrained(models.load(folders["llada"]), out / "epoch-1"), models.load(folders["llada"])
    base = ours(ids)
    lora.load(ours, out / "epoch-1")
    torch.testing.assert_close(theirs.base_model.model(ids), ours(ids), atol=1e-5, rtol=1e-5)
    assert (ours(ids) - base).abs().max() > 0.1


def test_only_the_adapters_of_q_and_v_learn(train, folders, monkeypatch):
    seen = {}
    real = torch.optim.AdamW.step

    def step(opt, *x):
        seen["shapes"] = [tuple(p.shape) for g in opt.param_groups for p in g["params"]]
        return real(opt, *x)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    kept = []
    monkeypatch.setattr(tabom, "load", lambda *x: kept.append(models.load(*x)) or kept[0])
    out = train("run", "--max-steps 3")
    net, base = kept[0], dict(models.load(folders["llada"]).named_parameters())
    learns = {n for n, p in net.named_parameters() if p.requires_grad}
    assert learns == {f"model.transformer.blocks.{b}.{p}_proj.lora_{x}" for b in range(2) for p in "qv" for x in "AB"}
    assert seen["shapes"] == [(4, 32), (32, 4)] * 4
    assert all(torch.equal(p, base[n.replace(".base", "")]) for n, p in net.named_parameters() if n not in learns)
    assert set(adapter_of(out)) == {f"base_model.model.model.transformer.blocks.{b}.{p}_proj.lora_{x}.weight"
                                    for b in range(2) for p in "qv" for x in "AB"}


@pytest.mark.parametrize("flags", ["--window 4", "--window 0", "--lam 0", "--tail drop", "--rank-context exact", "--method sft", "--method dinfer",
                                   "--method t3d"])
def test_accumulation_and_checkpointing_change_nothing(flags, train):
    """One batch of 8, eight of one: the same views, logs and adapter to rounding; recomputing blocks: the same again."""
    outs = [train(f"run{n}", f"{flags} --max-steps 6 {more}") for n, more in enumerate(
        ["--batch-size 8", "--batch-size 1 --grad-accum 8", "--batch-size 3 --grad-accum 3 --max-steps 1 --grad-checkpoint"])]
    assert_close_runs(*outs[:2])
    again = log_of(train("run3", f"{flags} --max-steps 1 --batch-size 9"))[1], log_of(outs[2])[1]
    assert [r["loss"] for r in again[0]] == pytest.approx([r["loss"] for r in again[1]], rel=1e-5)
    assert [r["gnorm"] for r in again[0]] == pytest.approx([r["gnorm"] for r in again[1]], rel=1e-4)


def assert_close_runs(a, b):
    x, y = adapter_of(a), adapter_of(b)
    assert x.keys() == y.keys() and max((x[k] - y[k]).abs().max() for k in x) < 1e-5
    for r, s in zip(log_of(a)[1], log_of(b)[1], strict=True):
        assert r["samples"] == s["samples"] and r["epoch"] == s["epoch"] and r["lr"] == s["lr"]
        assert (r["in_order"] is None) == (s["in_order"] is None)
        for key in (k for k in ("loss", "ce", "rank", "in_order", "gnorm") if r[k] is not None):
            assert r[key] == pytest.approx(s[key], rel=2e-4, abs=1e-5), key


def test_seed_decides_and_alone(train):
    a, b, c = train("a", "--max-steps 4"), train("b", "--max-steps 4"), train("c", "--max-steps 4 --seed 4")
    assert_same_bits(adapter_of(a), adapter_of(b))
    assert log_of(a)[1][0]["samples"] != log_of(c)[1][0]["samples"]
    assert not torch.equal(*(next(iter(adapter_of(x).values())) for x in (a, c)))


def test_left_out_records_are_counted_and_all_keeps_them(train, folders, tmp_path, capsys, refused):
    rows = corpus(folders["llada"], 12)
    for r in rows[:3]:                                   # no EOS, an EOS behind a mask, judged wrong, too short
        r["correct"] = False
    i = ids_of("llada")
    rows[3]["response_token_ids"] = [t if t not in (i.eos, i.eot) else 0 for t in rows[3]["response_token_ids"]]
    rows[4]["decoding_order"][0], rows[4]["response_token_ids"][0], rows[4]["entropy"][0], rows[4]["confidence"][0] = -1, i.mask, None, None
    rows[5] |= dict(correct=True)
    rows[6] |= dict(response_token_ids=[i.eos], decoding_order=[0], entropy=[0.1], confidence=[0.9])
    mixed = write_lines(tmp_path / "mixed.jsonl", rows)
    assert log_of(train("a", "--max-steps 1", mixed))[0]["records"] == 6
    assert f"{mixed}: 6 records, left out 3 judged wrong, 2 unfinished, 1 shorter than 2 tokens\n" in capsys.readouterr().out
    assert log_of(train("b", "--max-steps 1 --all", mixed))[0]["records"] == 11
    assert f"{mixed}: 11 records, left out 1 shorter than 2 tokens\n" in capsys.readouterr().out
    none = write_lines(tmp_path / "none.jsonl", rows[:4])
    with refused(f"{none}: no record to train on", "3 judged wrong, 1 unfinished", "--all"):
        train("c", "", none)


def test_model_is_the_one_the_trajectories_name(train, folders, tmp_path, refused):
    other = str(tmp_path / "other")
    shutil.copytree(folders["llada"], other)
    assert log_of(train("a", "--max-steps 1"))[0]["model"] == folders["llada"]
    assert log_of(train("b", f"--max-steps 1 --model {other}"))[0]["model"] == other
    with refused(f"{train.data}:1", "mask", "vocabulary", "pass the --model of the trajectories"):
        train("c", f"--model {folders['Dream']}")
    rows = corpus(folders["llada"], 3)
    rows[2]["model"] = dict(name="some/one", mask_id=5, vocab_size=9000)
    with refused(":3", "some/one", "mask 5, vocabulary 9000"):
        train("c", "", write_lines(tmp_path / "two.jsonl", rows))
    assert not (tmp_path / "c").exists()


def test_authors_minimal_record_trains(train, folders, tmp_path, refused):
    keep = ("prompt", "response", "response_token_ids", "decoding_order", "method")
    rows = [{k: r[k] for k in keep} for r in corpus(folders["llada"], 8)]
    theirs = write_lines(tmp_path / "theirs.jsonl", rows)
    with refused(f"{theirs}: names no model", "--model"):
        train("a", "", theirs)
    for method in ("tabom", "dinfer", "t3d", "sft"):
        head, log = log_of(train(method, f"--method {method} --max-steps 2 --model {folders['llada']}", theirs))
        assert head["records"] == 8 and [s for r in log for s in r["samples"]] and all(math.isfinite(r["loss"]) for r in log)
    renamed = [{"question": r["prompt"], "output": r["response"], **{k: r[k] for k in keep[2:]}} for r in rows]
    out = train("b", f"--max-steps 2 --model {folders['llada']}", write_lines(tmp_path / "renamed.jsonl", renamed))
    assert_same_bits(adapter_of(out), adapter_of(tmp_path / "tabom"))
    bad = write_lines(tmp_path / "bad.jsonl", [rows[0] | dict(response_token_ids=[9000] * len(rows[0]["decoding_order"]))])
    with refused(f"{bad}:1", "beyond the vocabulary"):
        train("c", f"--model {folders['llada']}", bad)
    long = write_lines(tmp_path / "long.jsonl", [rows[0] | dict(prompt="a" * 600)])
    with refused(f"{long}:1", "512 positions"):
        train("c", f"--model {folders['llada']}", long)


def test_sft_trains_on_ground_truth(train, folders, tmp_path, capsys, refused, monkeypatch):
    tok, i = models.load_tokenizer(folders["llada"]), ids_of("llada")
    rows = [dict(id=n, prompt=f"{n}+1=", response=f"{n + 1}") for n in range(6)] + [dict(id=6, prompt="say", response="a" * 30)]
    gt = write_lines(tmp_path / "gt.jsonl", rows)
    seen = []
    real = tabom.view
    monkeypatch.setattr(tabom, "view", lambda r, *x: seen.append(r) or real(r, *x))
    flags = f"--method sft --length 12 --epochs 1 --model {folders['llada']}"
    log = log_of(train("a", flags, gt))[1]
    assert "6 records, left out 1 longer than --length" in capsys.readouterr().out and len(log) == 2
    r = next(r for r in seen if r.id == 3)               # answer, end of turn, EOS to the end of the canvas
    assert r.ids.tolist() == tok("4", add_special_tokens=False)["input_ids"] + [i.eot] + [i.eos] * 10
    assert tok.decode(r.prompt.tolist()) == "[user]3+1=[assistant]" and r.rank.tolist() == list(range(12))
    seen.clear()
    train("b", flags + " --tail drop", gt)
    assert next(r for r in seen if r.id == 3).rank.tolist() == [0, 1]
    with refused(f"{gt}:1", "no decoding_order", "--method sft"):
        train("c", f"--model {folders['llada']}", gt)


@pytest.mark.parametrize("flags, words", [
    ("--window 1", "--window 1: one token makes no pair"), ("--lam -1", "--lam -1.0: must be at least 0"), ("--rank 0", "--rank 0"), ("--lam nan", "--lam nan"),
    ("--gamma -0.1", "--gamma -0.1"), ("--window -1", "--window -1"), ("--lr inf", "--lr inf"), ("--epochs 0", "--epochs 0"), ("--seed -1", "--seed -1"),
    ("--batch-size 0", "--batch-size 0"), ("--grad-accum 0", "--grad-accum 0"), ("--save-every 0", "--save-every 0"), ("--exact-chunk 0", "--exact-chunk 0"),
    ("--data nowhere.jsonl", "nowhere.jsonl: no such file"), ("--model nowhere", "nowhere: no such folder"), ("--targets nope", "--targets nope"),
    ("--out file", "--out file: is a file")])
def test_wrong_training_settings_end_with_one_line(flags, words, train, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    with refused(words):
        train("run", flags)
    assert not (tmp_path / "run").exists() and (tmp_path / "file").read_text() == "mine"


def test_non_finite_loss_stops_with_step_samples_and_last_good_state(folders, train, tmp_path, refused):
    """One letter has a broken embedding: the one record with it in its prompt is named, at the step that meets it."""
    i, broken = ids_of("llada"), tmp_path / "broken"
    shutil.copytree(folders["llada"], broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.transformer.wte.weight"][CHARS.index("#")] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    rows = [r for r in corpus(str(broken), 40) if CHARS.index("#") not in r["prompt_token_ids"] + r["response_token_ids"]][:16]
    rows[7]["prompt_token_ids"][0] = CHARS.index("#")
    bad = write_lines(tmp_path / "bad.jsonl", rows)
    order = tabom.epoch_batches(np.array([len(r["prompt_token_ids"]) + len(r["response_token_ids"]) for r in rows]), 4, 3, 0)
    step = next(n for n, b in enumerate(order) if 7 in b) + 1
    with refused(f"step {step}: the loss", f"samples ['{rows[7]['id']}']", "last good state:",
                 tmp_path / "run" / f"resume-{step - 1:07d}" if step > 1 else "none"):
        train("run", "--save-every 1", bad)
    assert len(log_of(tmp_path / "run")[1]) == step - 1 and i.mask == rows[0]["model"]["mask_id"]


def test_out_of_another_run_is_refused(train, tmp_path, refused, folders):
    out = train("run", "--max-steps 4 --save-every 2")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with refused(f"--out {out}: holds a run already", "--resume", "another --out"):
        train("run", "--max-steps 4")
    shutil.copytree(folders["llada"], tmp_path / "other")
    fewer = write_lines(tmp_path / "less" / "corpus.jsonl" if (tmp_path / "less").mkdir() else tmp_path / "less" / "corpus.jsonl",
                        corpus(folders["llada"])[:20])
    for flags, words, file in (("--max-steps 5", "max_steps 4, now it is 5", None), ("--max-steps 4 --lam 2", "lam 1.0, now it is 2.0", None),
                               ("--max-steps 4 --batch-size 8", "global_batch 4, now it is 8", None), ("--max-steps 4 --seed 9", "seed 3, now", None),
                               (f"--max-steps 4 --model {tmp_path / 'other'}", "model 'llada', now it is 'other'", None),
                               ("--max-steps 4", "records 21, now it is 20", fewer)):
        with refused(f"--out {out}: is of a run with {words}", "another --out"):
            train("run", flags + " --resume", **(dict(data=file) if file else {}))
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    shutil.rmtree(next(out.glob("resume-*")))            # killed before its first resume point: the log still knows
    with refused("lam 1.0, now it is 2.0"):
        train("run", "--max-steps 4 --lam 2 --resume")
    shutil.copytree(out, tmp_path / "half")
    (tmp_path / "half" / "log.jsonl").unlink()
    train("half", "--max-steps 4 --save-every 2 --batch-size 2 --grad-accum 2")     # an empty shell of folders is no run


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


def test_killed_at_any_write_and_resumed_equals_whole(train, tmp_path):
    """A child dies by SIGKILL just before its n-th change to the disk, for every n; a log line is torn in the middle."""
    flags = "--max-steps 3 --batch-size 12 --save-every 1"                   # 2 steps an epoch
    whole = train("whole", flags)

    def dies(n):
        count = [0]

        def armed(real, log=None):
            def call(*args, **kw):
                if log and (len(args) < 2 or args[1] != "a"):
                    return real(*args, **kw)
                count[0] += 1
                if count[0] == n:
                    if log:
                        with real(*args) as f:
                            f.write('{"step": 3, "epoch": 1, "lo')
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kw)
            return call
        for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir"):
            setattr(os, name, armed(getattr(os, name)))
        builtins.open = armed(open, True)
        train("run", flags)

    n, code = 0, -9
    while code == -9:
        n += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        code = forked(lambda: dies(n))
        out = train("run", flags + " --resume")
        assert_same_bits(adapter_of(out), adapter_of(whole))
        assert [r["loss"] for r in log_of(out)[1]] == [r["loss"] for r in log_of(whole)[1]]
        for x in ("epoch-1/adapter_model.safetensors", "resume-0000003/state.safetensors"):
            assert (out / x).read_bytes() == (whole / x).read_bytes()
        there = {p.name for p in out.iterdir()} - {"resume-0000002"}         # killed before it went: the next point takes it away
        assert there == {"epoch-1", "epoch-2", "log.jsonl", "resume-0000003"}
    assert code == 0 and n > 20                          # the last child was not hit: every write has been


def test_killed_at_random_moments_and_resumed_equals_whole(train, tmp_path):
    flags, rng, done = "--max-steps 200 --save-every 7", random.Random(0), 0
    whole, log = train("whole", flags), tmp_path / "run" / "log.jsonl"
    for low, high in ((1, 30), (60, 120)):
        more = ["--resume"] if done else []
        p = subprocess.Popen([sys.executable, str(HERE / "tabom.py"), "--data", train.data, "--out", str(tmp_path / "run"), *QUICK.split(),
                              *flags.split(), *more], env=one_thread(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = rng.randint(low, high)
        while p.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > wanted):
            time.sleep(0.002)
        p.send_signal(signal.SIGKILL)
        assert p.wait() == -signal.SIGKILL
        done = log.read_bytes().count(b"\n") - 1
        assert wanted <= done < 200
    out = train("run", flags + " --resume")
    assert_same_bits(adapter_of(out), adapter_of(whole))
    assert [r["loss"] for r in log_of(out)[1]] == [r["loss"] for r in log_of(whole)[1]]


# ---------------------------------------------------------------- one process against several

SAME = "--max-steps 20 --save-every 6"
CRASH = """import os, signal, torch.distributed as dist
real, calls = dist.all_reduce, [0]
def all_reduce(t):
    calls[0] += 1                        # three a step: rank 1 dies once, in its eleventh step
    if calls[0] == 32 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(t)
dist.all_reduce = all_reduce
import tabom
tabom.main()
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, folders):
    """fleet(out, torchrun's flags, ours): starts an agent; and the folder of the run on one process."""
    home = tmp_path_factory.mktemp("fleet")
    rows = write_lines(home / "corpus.jsonl", corpus(folders["llada"]))
    (home / "crash.py").write_text(CRASH)

    def start(out, launcher, flags, script=HERE / "tabom.py"):
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *launcher.split(), str(script), "--data", rows, "--out", str(home / out),
                                 *QUICK.split(), *SAME.split(), *flags.split()], env=one_thread(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    start.home = home
    argv, sys.argv = sys.argv, ["tabom.py", "--data", rows, "--out", str(home / "one"), *QUICK.split(), *SAME.split(), "--batch-size", "8"]
    try:
        tabom.main()
    finally:
        sys.argv = argv
    return start


def finish(*agents) -> str:
    text = ""
    for p in agents:
        out, _ = p.communicate(timeout=120)
        assert p.returncode == 0, out
        text += out
    return text


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("ranks, flags", [(2, "--batch-size 2 --grad-accum 2"), (4, "--batch-size 2")])
def test_ranks_match_one_process(ranks, flags, fleet):
    finish(fleet(f"ranks{ranks}", f"--standalone --nproc_per_node {ranks}", flags))
    assert_close_runs(fleet.home / f"ranks{ranks}", fleet.home / "one")
    assert log_of(fleet.home / f"ranks{ranks}")[0]["world"] == ranks


def test_two_nodes_match_one_process(fleet):
    nodes = f"--nnodes 2 --nproc_per_node 1 --rdzv-backend c10d --rdzv-id t --rdzv-endpoint 127.0.0.1:{free_port()}"
    finish(*[fleet("nodes", nodes, "--batch-size 4") for _ in range(2)])
    assert_close_runs(fleet.home / "nodes", fleet.home / "one")
    assert log_of(fleet.home / "nodes")[0]["world"] == 2


def test_torchrun_goes_on_by_itself_when_a_rank_dies(fleet):
    text = finish(fleet("crash", "--standalone --nproc_per_node 2 --max-restarts 1", "--batch-size 4", fleet.home / "crash.py"))
    assert text.count("LoRA parameters") == 2            # it did start twice
    assert_close_runs(fleet.home / "crash", fleet.home / "one")


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
        p.data = torch.ones(p.shape) if p.ndim == 1 else torch.randn(p.shape, generator=g) * (1.0 if "wte" in name else 0.08)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        texts = [sums(rng) for _ in range(64)]
        x = torch.tensor([[CHARS.index(c) for c in p + r] + [i.eos] * (length - len(r)) for p, r in texts])
        mask = torch.zeros(x.shape, dtype=torch.bool)
        mask[:, 4:] = torch.from_numpy(rng.random((64, length)) < rng.random((64, 1)))
        logits = net(x.masked_fill(mask, i.mask), None, mask)
        opt.zero_grad()
        torch.nn.functional.cross_entropy(logits, x[mask]).backward()
        opt.step()
    save_file({k: v.detach() for k, v in net.named_parameters()}, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def shares_in_order(net, raws: list[dict], window: int) -> np.ndarray:
    """For each trajectory, over all its windows: the share of pairs whose earlier token has the lower entropy."""
    shares = []
    for raw in raws:
        order, good, pairs = plain_order(raw, "keep", ()), 0, 0
        for cut in range(len(order) - window + 1):
            rows = forward(net, raw, [j in order[:cut] for j in range(len(raw["decoding_order"]))], ids_of("llada").mask)
            h = [plain_stats(rows[j], 0)[1] for j in order[cut:cut + window]]
            good += sum(h[r] < h[s] for r in range(window) for s in range(r + 1, window))
            pairs += window * (window - 1) // 2
        shares.append(good / pairs)
    return np.array(shares)


def test_ranking_puts_held_out_pairs_in_order(tmp_path, monkeypatch):
    """decode.py, then tabom.py with and without the ranking term: same base, data, order and windows."""
    def command(module, *argv):
        monkeypatch.setattr(sys, "argv", ["x", *map(str, argv)])
        module.main()
    folder, length, window, rng, prompts = tiny("llada", tmp_path / "base"), 12, 4, np.random.default_rng(1), set()
    fit_sums(folder, length, 150)
    while len(prompts) < 300:
        prompts.add(sums(rng)[0])
    asked = write_lines(tmp_path / "p.jsonl", [dict(id=p, prompt=p) for p in sorted(prompts)])
    command(decode, "--model", folder, "--prompts", asked, "--out", tmp_path / "t.jsonl", "--length", length, "--raw-prompt", "--batch-size", 64)
    rows = [json.loads(x) for x in (tmp_path / "t.jsonl").read_text().splitlines()]
    rows.sort(key=lambda r: r["id"][::-1])               # held out: the last in an order that has nothing to do with training
    rows = [r for r in rows if sum(s >= 0 for s in r["decoding_order"]) >= window]
    learnt, held = write_lines(tmp_path / "learn.jsonl", rows[:200]), rows[200:]
    shares = {}
    for lam in (1, 0):
        command(tabom, "--data", learnt, "--out", tmp_path / f"lam{lam}", "--lam", lam, "--window", window, "--max-steps", 80, "--batch-size", 16,
                "--lr", 1e-2, "--warmup", 10, "--log-every", 1000)
        net = models.load(folder)
        lora.load(net, max((tmp_path / f"lam{lam}").glob("epoch-*"), key=lambda p: int(p.name[6:])))
        shares[lam] = shares_in_order(net, held, window)
    gain = shares[1] - shares[0]                         # paired: the same trajectories
    error = gain.std(ddof=1) / math.sqrt(len(gain))
    assert len(held) > 80 and gain.mean() > 0.03 and gain.mean() > 6 * error, (shares[1].mean(), shares[0].mean(), error)
