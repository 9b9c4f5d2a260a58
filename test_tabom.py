"""
TABOM, proved twice: every number that the method rests on is computed a second time, by something that shares no code
with it: plain loops, the native decoders written out, the real transformers, the real peft.

$ OMP_NUM_THREADS=1 python -m pytest -q test_tabom.py

Files, flags and commands are tested in tests/; tests/tiny.py makes the checkpoints and has the plain arithmetic.

B: batch, T: tokens, N: response, W: window, V: vocabulary
"""
import dataclasses
import math
import runpy
import shutil
import signal
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import decode
import eval as evaluate
import lora
import model as models
import swap
import tabom
import toy

from tests.tiny import (  # isort: skip
    HERE, LAYERS, METHODS, QUICK, QV, SMALL, TASKS, Fork, adapted, assert_close_runs, both, corpus, die_at, every, full,
    good_record, ids_of, load, log_of, losses, peft_adapter, plain_entropy, plain_logits, plain_stats, prompts_of,
    ragged, read_lines, read_shapes, read_trajs, reference, reference_logits, replayed, run, run_main, run_ranks,
    same_run, settings, state_logits, tiny, tokenizer, training_args, trajectory, view_of, views_of, write_lines,
)

# -----------------------------------------------------------------------------
# the objective, as its equations are printed: one sample, one token, one pair at a time

def plain_tabom(net, traj, visible, targets, args) -> dict[str, float]:
    x, W = traj.response.tolist(), len(targets)
    at_cut = state_logits(net, traj, visible)                                # (N, V)
    ce = sum(plain_stats(at_cut[j], x[j])[0] for j in targets) / W
    if args.lam == 0:
        return dict(loss=ce, ce=ce)
    h = []
    for j in targets:
        z = at_cut
        if args.rank_context == "exact":                 # each token in the state just before its own step
            z = state_logits(net, traj, replayed(traj, traj.step[j]))
        h.append(plain_stats(z[j], x[j])[1])
    rank_loss = in_order = pairs = 0
    for r in range(W):
        for s in range(r + 1, W):
            rank_loss += max(0, h[r] - h[s] + args.gamma)
            in_order += h[r] < h[s]
            pairs += 1
    rank_loss /= pairs
    return dict(loss=ce + args.lam * rank_loss, ce=ce, rank_loss=rank_loss, in_order=in_order / pairs)


def plain_t3d(net, base, traj, visible, targets) -> dict[str, float]:
    x, W = traj.response.tolist(), len(targets)
    now, ref = state_logits(net, traj, visible), state_logits(base, traj, visible)
    ce = [plain_stats(now[j], x[j])[0] for j in targets]
    good = bad = path = 0
    for s, j in enumerate(targets, 1):
        choice = ref[j].index(max(ref[j]))               # what the base would say
        good += (plain_stats(ref[j], x[j])[0] - ce[s - 1]) / W
        bad += (plain_stats(ref[j], choice)[0] - plain_stats(now[j], choice)[0]) / W
        path += sum(ce[:s]) / s / W
    log_sigmoid = lambda v: -math.log(1 + math.exp(-v))
    return dict(loss=-log_sigmoid(0.1 * good) - 0.5 * log_sigmoid(-0.1 * bad) + 0.2 * path, ce=sum(ce) / W)


@pytest.fixture
def float64(monkeypatch):
    """Where the core asks for float32 it gets float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@both
@pytest.mark.parametrize("tail", ["keep", "drop"])
@pytest.mark.parametrize("flags", METHODS)
def test_loss_and_its_logged_parts_equal_plain_loops(family, flags, tail, float64, folders, tmp_path):
    args, folder = training_args(flags), folders[family]
    net, base = adapted(folder).double(), load(folder).double()
    views = views_of(read_shapes(folder, tmp_path, f"--tail {tail}") * 3, args)
    loss, parts = losses(net, views, args)
    for n, view in enumerate(views):
        want = plain_t3d(net, base, *view) if args.method == "t3d" else plain_tabom(net, *view, args)
        got = {name: value[n].item() for name, value in {"loss": loss, **parts}.items()}
        assert got.pop("in_order", 0) == pytest.approx(want.pop("in_order", 0), rel=1e-6)        # counts, in fp32
        assert got == pytest.approx(want, rel=1e-9)
    starts = [not view.visible.any() for view in views]
    assert any(starts) and not all(starts)               # windows at the start of a trajectory, and later ones


@pytest.mark.parametrize("flags", METHODS)
def test_gradient_through_the_model_equals_a_finite_difference(flags, float64, folders, tmp_path):
    args, net, g = training_args(flags), adapted(folders["llada"]).double(), torch.Generator().manual_seed(0)
    views = views_of(read_shapes(folders["llada"], tmp_path, ""), args)
    params = lora.parameters(net).values()
    params = [(p, p.detach().clone(), torch.randn(p.shape, generator=g).double()) for p in params]

    def loss_at(eps):
        for p, start, direction in params:
            p.data = start + eps * direction
        return losses(net, views, args)[0].sum()
    loss_at(0).backward()
    slope = sum((p.grad * direction).sum().item() for p, _, direction in params)
    assert slope == pytest.approx((loss_at(1e-6).item() - loss_at(-1e-6).item()) / 2e-6, rel=1e-5)

# -----------------------------------------------------------------------------
# views: what the model sees of a trajectory, and what it is asked for

def plain_cuts(traj, need) -> list[int]:
    """The steps that leave at least `need` targets."""
    steps = [int(traj.step[j]) for j in traj.order]
    return sorted({u for u in steps if sum(s >= u for s in steps) >= min(need, len(steps))})


@pytest.mark.parametrize("tail", ["keep", "drop"])
@pytest.mark.parametrize("method, window, need", [
    ("tabom", 4, 4), ("tabom", 32, 32), ("tabom", 0, 2), ("t3d", 4, 1), ("dinfer", 4, 1), ("sft", 4, 1)])
def test_view_is_a_state_of_the_replay_and_the_next_tokens_in_order(method, window, need, tail, folders, tmp_path):
    args, eos = training_args(f"--method {method} --window {window}"), ids_of("llada").eos
    for traj in read_shapes(folders["llada"], tmp_path, f"--tail {tail}"):
        last = traj.response.tolist().index(eos) if tail == "drop" else len(traj.step)
        decoded = [j for j in range(len(traj.step)) if traj.step[j] >= 0]
        order = [j for _, _, j in sorted((traj.step[j], traj.entropy[j], j) for j in decoded if j <= last)]
        assert traj.order.tolist() == order
        for seed in range(20):
            _, visible, targets = view_of(traj, args, np.random.default_rng(seed))
            left, first = [j for j in order if not visible[j]], traj.step[targets[0]]
            if method == "sft":                          # any of the decoded tokens
                assert set(np.flatnonzero(visible)) <= set(decoded)
            else:
                assert first in plain_cuts(traj, need) and visible.tolist() == replayed(traj, first)
            if method == "dinfer":                       # whole steps
                left = [j for j in left if traj.step[j] <= traj.step[targets[-1]]]
            assert targets.tolist() == (left[:window] if method == "tabom" and window else left)


def test_cuts_are_uniform_over_the_boundaries(folders, tmp_path):
    draws, args, rng = 1500, training_args(), np.random.default_rng(0)
    for traj in read_shapes(folders["llada"], tmp_path, "")[:3]:
        for args.method, args.window, need in (("tabom", 4, 4), ("tabom", 0, 2), ("t3d", 4, 1), ("dinfer", 4, 0)):
            counts = dict.fromkeys(plain_cuts(traj, need), 0)
            if args.method == "dinfer":                  # any two times
                counts = {(i, j): 0 for j in range(max(traj.step) + 2) for i in range(j)}
            for _ in range(draws):
                steps = traj.step[view_of(traj, args, rng).targets]
                counts[(steps[0], steps[-1] + 1) if args.method == "dinfer" else steps[0]] += 1
            k = len(counts)                              # chi-square: mean k - 1, deviation sqrt(2 (k - 1))
            chi = sum((n - draws / k) ** 2 / (draws / k) for n in counts.values())
            assert chi < k - 1 + 5 * math.sqrt(2 * (k - 1)) + 1e-9, (args.method, counts)


def test_non_ltr_cuts_start_at_tokens_decoded_out_of_order(folders, tmp_path):
    def plain_jumps(step):
        late = [math.inf if s < 0 else s for s in step]
        return [p for p in range(len(step)) if step[p] >= 0 and any(late[q] > late[p] for q in range(p))]

    rng, W = np.random.default_rng(0), 4
    trajs = read_shapes(folders["llada"], tmp_path, "")
    for traj in trajs:
        hole = dataclasses.replace(traj, step=np.where(np.arange(len(traj.step)) == 1, -1, traj.step))
        assert hole.jumps.tolist() == plain_jumps(hole.step.tolist())        # a position that was never decoded
        jumps = plain_jumps(traj.step.tolist())
        assert traj.jumps.tolist() == jumps
        boundaries = set(plain_cuts(traj, W))
        want = {traj.step[p] for p in jumps} & boundaries or boundaries
        views = [tabom.tabom_view(traj, rng, W, "non-ltr") for _ in range(400)]
        assert {traj.step[view.targets[0]] for view in views} == want
    assert any(len(traj.jumps) for traj in trajs)
    # a record may say itself which positions these are
    given = [good_record(non_ltr_positions=[1]), good_record(id=1, non_ltr_positions=[])]
    a, b = read_trajs(folders["llada"], write_lines(tmp_path / "n.jsonl", given))
    assert a.jumps.tolist() == [1] and b.jumps.tolist() == []


@pytest.mark.parametrize("flags", METHODS)
def test_batch_is_the_views_side_by_side_and_a_column_is_a_target(flags, folders, tmp_path):
    trajs, mask_id = read_shapes(folders["llada"], tmp_path, ""), ids_of("llada").mask
    trajs[1].entropy[:] = math.nan                       # a record without entropies
    views = views_of(trajs, training_args(flags))
    batch = tabom.collate(views, mask_id, "cpu")
    T = batch.ids.shape[1]
    assert T % 8 == 0 and T - 8 < max(len(traj.prompt) + len(traj.response) for traj in trajs) <= T
    for b, (traj, visible, targets) in enumerate(views):
        P, N, W = len(traj.prompt), len(traj.response), len(targets)
        state = [*traj.prompt, *(traj.response[j] if visible[j] else mask_id for j in range(N))]
        assert batch.ids[b].tolist()[-P - N:] == state
        assert batch.attend[b].tolist() == [False] * (T - P - N) + [True] * (P + N)      # padding is not attended
        assert batch.valid[b].tolist() == [True] * W + [False] * (batch.valid.shape[1] - W)
        for w, j in enumerate(targets):
            assert batch.pos[b, w] == T - N + j
            assert batch.x0[b, w] == traj.response[j] and batch.step[b, w] == traj.step[j]
            np.testing.assert_equal(batch.entropy[b, w].item(), traj.entropy[j].item())  # nan is nan

# -----------------------------------------------------------------------------
# training: one process, many, and one that dies

@pytest.mark.parametrize("flags", METHODS)
def test_training_equals_a_plain_loop(flags, train, folders):
    """One sample at a time, AdamW written out, a window per (seed, epoch, place in the file): the adapter of main."""
    flags = f"{QUICK} --epochs 3 --batch-size 12 --clip 0.5 --weight-decay 0.1 {flags}"  # 2 steps per epoch, 6 in all
    out, args, net = train("run", flags), training_args(flags), load(folders["llada"])
    params = lora.add(net, QV, 4, 16, seed=3)
    moments = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in params.values()]
    trajs = read_trajs(folders["llada"], train.data)
    for t, row in enumerate(log_of(out)[1], 1):
        net.zero_grad()
        for n in [int(id[1:]) for id in row["samples"]]:
            view = view_of(trajs[n], args, np.random.default_rng([3, row["epoch"] - 1, n]))
            (losses(net, [view], args)[0].sum() / len(row["samples"])).backward()
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in params.values()))
        assert row["gnorm"] == pytest.approx(norm, rel=1e-3)
        lr = 1e-3 * t / 5 if t <= 5 else 1e-3            # five steps of warm-up, and the first of the cosine
        for p, m, v in moments:
            g = p.grad * min(1, 0.5 / norm)
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            p.data -= lr * 0.1 * p.data
            p.data -= lr * (m / (1 - 0.9 ** t)) / ((v / (1 - 0.999 ** t)).sqrt() + 1e-8)
    assert t == 6
    for folder in ("epoch-3", "last"):
        got = load_file(out / folder / "adapter_model.safetensors")
        assert got.keys() == params.keys() and max((got[k] - params[k]).abs().max() for k in got) < 1e-5


@pytest.mark.parametrize("order, flags", [
    ("ltr", "--cut non-ltr"), ("random", "--method dinfer"), ("reversed", "--method t3d")])
def test_training_in_another_order_equals_training_on_records_that_have_it(order, flags, train, folders, tmp_path):
    """One token per step; a hole stays one, and the record's own list of jumps, of its own order, is forgotten."""
    rows = [*corpus(folders["llada"]), trajectory("hole", folders["llada"], 10, 1, 4, 5, undone=3)]
    source = write_lines(tmp_path / "own.jsonl", [row | dict(non_ltr_positions=[3]) for row in rows])
    for row in rows:
        steps, h = row["decoding_order"], row["entropy"]
        decoded = [j for j in range(len(steps)) if steps[j] >= 0]
        if order == "ltr":
            wanted = decoded
        elif order == "reversed":
            wanted = sorted(decoded, key=lambda j: (steps[j], h[j], j))[::-1]
        else:                                            # by the record alone
            wanted = np.random.default_rng(zlib.crc32(row["id"].encode())).permutation(decoded).tolist()
        row["decoding_order"] = [wanted.index(j) if j in decoded else -1 for j in range(len(steps))]
    other = write_lines(tmp_path / "other.jsonl", rows)
    flags = f"{flags} --epochs 1"
    assert same_run(train("a", f"{flags} --order {order}", source), train("b", flags, other))


@pytest.mark.parametrize("flags", ["", "--rank-context exact", "--method t3d"])
def test_accumulation_and_checkpointing_change_nothing(flags, train, monkeypatch):
    calls, checkpoint = [], models.checkpoint
    monkeypatch.setattr(models, "checkpoint", lambda *x, **more: calls.append(x) or checkpoint(*x, **more))
    one = train("one", f"{flags} --max-steps 4 --batch-size 8")
    assert not calls
    assert_close_runs(one, train("many", f"{flags} --max-steps 4 --batch-size 2 --grad-accum 4 --grad-checkpoint"))
    assert calls


@pytest.mark.parametrize("ranks, flags", [(2, "--batch-size 2 --grad-accum 2"), (4, "--batch-size 2")])
def test_ranks_match_one_process(ranks, flags, train, folders, tmp_path):
    """17 records: the last batch of an epoch has one sample, on rank 0; the others idle."""
    source = write_lines(tmp_path / "corpus17.jsonl", corpus(folders["llada"], 17))
    run_ranks(ranks, lambda: train("many", f"--max-steps 12 {flags}", source))
    assert_close_runs(tmp_path / "many", train("one", "--max-steps 12 --batch-size 8", source))


@pytest.mark.parametrize("flags, folders_left", [("--epochs 2", {"epoch-1", "epoch-2", "last"}),
                                                 ("--max-steps 3", {"last"})])
def test_killed_at_any_write_and_resumed_equals_whole(flags, folders_left, train, tmp_path):
    flags += " --batch-size 12 --save-every 1"           # 2 steps per epoch
    whole, n, killed = train("whole", flags), 0, True
    while killed:
        n += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        child = Fork(target=lambda: (die_at(n), train("run", flags)))
        child.start()
        child.join()
        killed = child.exitcode == -signal.SIGKILL
        out = train("run", flags + " --resume")
        assert same_run(out, whole)
        assert {p.name for p in out.iterdir()} == folders_left | {"log.jsonl", "resume.safetensors"}
    assert child.exitcode == 0 and n > 20                # the last child was not hit: every write has been


def test_ranking_puts_held_out_pairs_in_order(train, tmp_path):
    """The committed toy through decode.py, then tabom.py with and without the ranking term: same data and windows."""
    folder, args, shares = str(HERE / "study" / "base"), training_args("--window 4"), {}
    tasks = toy.draw("short", "train", 210, seed=0)
    source = write_lines(tmp_path / "prompts.jsonl", [dict(prompt=toy.write(task[0])) for task in tasks])
    run_main(decode, f"--model {folder} --prompts {source} --out {tmp_path}/all --batch-size 64")
    rows = sorted(read_lines(tmp_path / "all"), key=lambda row: row["id"])
    learn, held_out = write_lines(tmp_path / "learn", rows[:140]), write_lines(tmp_path / "held_out", rows[140:])
    for lam, out in ((1, tmp_path / "with"), (0, tmp_path / "without")):
        train(out, f"--lam {lam} --max-steps 80 --batch-size 16 --lr 1e-2 --lora-r 16", learn)
        net = load(folder)
        lora.load(net, out / "last")
        trajs = read_trajs(folder, held_out, "--all")
        shares[lam] = np.mean([losses(net, views_of(trajs, args, seed), args)[1]["in_order"] for seed in range(20)], 0)
    gain = shares[1] - shares[0]                         # paired: the same trajectories and windows
    error = gain.std(ddof=1) / math.sqrt(len(gain))
    assert gain.mean() > max(0.03, 6 * error), (shares[1].mean(), shares[0].mean(), error)

# -----------------------------------------------------------------------------
# decoding: the native decoders, written out

def native_llada(net, prompt, mask_id, length, steps, block):
    """LLaDA's published loop at temperature 0, one prompt. The mask token is never a candidate."""
    canvas, order, step = [mask_id] * length, [-1] * length, 0
    per_block = steps // (length // block)
    for start in range(0, length, block):
        for i in range(per_block):
            logits = plain_logits(net, prompt, canvas)                       # (N, V)
            p = logits.softmax(-1)
            logits[:, mask_id] = -math.inf
            token = logits.argmax(-1).tolist()
            left = [j for j in range(start, start + block) if order[j] < 0]
            left.sort(key=lambda j: -float(p[j, token[j]]))
            for j in left[:block // per_block + (i < block % per_block)]:
                canvas[j], order[j] = token[j], step
            step += 1
    return canvas, order


def native_dream(net, prompt, mask_id, length, steps, top_p):
    """Dream's published loop at temperature 0, by entropy, one prompt. Ties: raw entropy, then position."""
    canvas, order = [mask_id] * length, [-1] * length
    t = torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        logits = plain_logits(net, prompt, canvas)
        left, score = [j for j in range(length) if order[j] < 0], {}
        for j in left:
            p = logits[j].softmax(-1).sort(descending=True).values
            kept = p[p.cumsum(0) - p <= top_p]           # the nucleus, with the token that crosses top_p
            score[j] = (plain_entropy((kept / kept.sum()).tolist()), plain_entropy(p.tolist()), j)
        count = int(len(left) * (1 - t[i + 1] / t[i])) if i < steps - 1 else len(left)
        logits[:, mask_id] = -math.inf
        for j in sorted(left, key=score.get)[:count]:
            canvas[j], order[j] = int(logits[j].argmax()), i
    return canvas, order


NATIVE = {"llada": native_llada, "Dream": native_dream}


def greedy(**flags) -> str:
    return "--temperature 0 " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())


@pytest.mark.parametrize("family, flags", [
    ("llada", dict(length=24, steps=24, block=24)), ("llada", dict(length=24, steps=10, block=12)),
    ("llada", dict(length=20, steps=20, block=4)), ("Dream", dict(length=20, steps=20, top_p=1.0)),
    ("Dream", dict(length=24, steps=10, top_p=1.0)), ("Dream", dict(length=20, steps=20, top_p=0.5))])
def test_tokens_and_steps_equal_the_native_decoders(family, flags, folders, nets):
    s = settings(folders[family], greedy(**flags), end_ids=[])
    want = [NATIVE[family](nets[family], prompt, s.mask_id, **flags) for prompt in prompts_of(family)]
    for batch_size in (1, 3):                            # alone; in ragged batches that later prompts join
        trajs = run(nets[family], prompts_of(family), s, batch_size)
        assert [(traj.response.tolist(), traj.step.tolist()) for traj in trajs] == want


@both
def test_stopping_at_eos_keeps_the_native_text_and_whole_decodes_what_follows(family, folders, nets):
    flags = dict(length=24, steps=24) | (dict(block=8) if family == "llada" else dict(top_p=1.0))
    net, prompts, mask, stopped = nets[family], prompts_of(family), ids_of(family).mask, 0
    for prompt in prompts:
        tokens, order = NATIVE[family](net, prompt, mask, **flags)
        end = tokens.index(tokens[9])                    # what the native decoder says in mid-answer becomes the EOS
        s = settings(folders[family], greedy(**flags), end_ids=[tokens[9]])
        traj = run(net, [prompt, *prompts], s)[0]
        decoded = traj.step >= 0
        assert decoded[:end + 1].all() and traj.response.tolist() == np.where(decoded, tokens, mask).tolist()
        assert traj.step.tolist() == np.where(decoded, order, -1).tolist()
        stopped += not decoded.all()
        whole, = run(net, [prompt], settings(folders[family], f"{greedy(**flags)} --whole", end_ids=[tokens[9]]))
        assert (whole.response.tolist(), whole.step.tolist()) == (tokens, order)
        forwards = []                                    # not one more than the text needs
        with net.register_forward_hook(lambda *_: forwards.append(1)):
            run(net, [prompt], s)
        assert len(forwards) == len({step for step in order if step <= max(order[:end + 1])})
    assert stopped

# -----------------------------------------------------------------------------
# decoding: scores and draws

class Table(torch.nn.Module):
    """A model whose logits depend on the response position alone: every order can be worked out by hand."""
    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table.float(), requires_grad=False)

    def forward(self, ids, attend, pos):
        return self.table[pos - (ids.shape[1] - len(self.table))]


def random_table(family="llada", n: int = 12):
    scale = torch.linspace(1, 5, n)[torch.randperm(n, generator=torch.Generator().manual_seed(1))]
    z = torch.randn(n, ids_of(family).vocab, generator=torch.Generator().manual_seed(5)) * scale[:, None]
    z[:, ids_of(family).mask] = -9.0
    return z


def by_hand(table, score: str) -> list[float]:
    """One value per position; the lowest goes first."""
    values = []
    for p in table.double().softmax(-1):
        first, second = p.topk(2).values.tolist()
        values.append(dict(entropy=plain_entropy(p.tolist()), confidence=-first, margin=second - first)[score])
    return values


@both
@pytest.mark.parametrize("score", ["entropy", "confidence", "margin"])
def test_each_score_orders_as_by_hand(family, score, folders):
    table, want = random_table(family), [0] * 12
    value = by_hand(table, score)
    for block, k in ((12, 1), (12, 5), (4, 1), (6, 4)):
        top_p = 0.5 if family == "llada" else 1          # LLaDA scores the clean distribution, whatever it draws from
        flags = greedy(length=12, schedule="even", top_p=top_p, score=score, block=block, tokens_per_step=k)
        traj = run(Table(table), [[1, 2, 3]], settings(folders[family], flags, end_ids=[]))[0]
        for start in range(0, 12, block):
            for n, j in enumerate(sorted(range(start, start + block), key=value.__getitem__)):
                want[j] = start // block * math.ceil(block / k) + n // k
        assert traj.step.tolist() == want and traj.response.tolist() == table.argmax(-1).tolist()


@pytest.mark.parametrize("score", ["confidence", "entropy", "margin"])
def test_threshold_unmasks_all_that_are_sure_and_else_the_best_one(score, folders):
    table = random_table()
    p, value = table.softmax(-1).amax(-1).tolist(), by_hand(table, score)
    threshold = sorted(p)[8] - 1e-4                      # four of twelve are above it
    rest = sorted((j for j in range(12) if p[j] <= threshold), key=value.__getitem__)
    s = settings(folders["llada"], f"--length 12 --score {score} --threshold {threshold}", end_ids=[])
    want = [0 if p[j] > threshold else 1 + rest.index(j) for j in range(12)]
    assert run(Table(table), [[1, 2]], s)[0].step.tolist() == want and len(rest) == 8


@pytest.mark.parametrize("mode, which", [("logits", 0), ("logits", 1), ("confidence", 0), ("confidence", 1)])
def test_suppressed_eos_is_never_chosen_or_comes_last(mode, which, folders):
    """LLaDA's two rules. The last position ends the text, by EOS or end of turn, and is the most certain of all."""
    ends, z, flags = [ids_of("llada").eos, ids_of("llada").eot], random_table(), greedy(length=12, score="confidence")
    z[11, ends[which]] = 40.0
    assert run(Table(z), [[1]], settings(folders["llada"], flags))[0].step[11] == 0
    traj = run(Table(z), [[1]], settings(folders["llada"], f"{flags} --suppress-eos {mode}"))[0]
    rest = z.clone()
    rest[:, ends[:1] if mode == "logits" else ends] = -math.inf
    assert traj.response.tolist() == (rest if mode == "logits" else z).argmax(-1).tolist()
    value = by_hand(rest, "confidence")
    if mode == "confidence":
        value[11] = 0.0                                  # what is chosen there has no share left
    assert np.argsort(traj.step).tolist() == np.argsort(value).tolist()


@both
@pytest.mark.parametrize("flags", ["--temperature 0", "--temperature 1 --top-p 0.5", "--temperature 1 --top-k 1"])
def test_mask_token_is_never_chosen(family, flags, folders):
    """Not even where it is the whole nucleus: the next best token is chosen, not whatever has index 0."""
    z = torch.full((6, ids_of(family).vocab), -30.0)
    z[:, ids_of(family).mask], z[:, 7] = 20.0, 10.0
    assert (run(Table(z), [[1]], settings(folders[family], "--length 6 " + flags))[0].response == 7).all()


def test_nucleus_of_a_large_vocabulary_equals_sorting_it_all(folders):
    s, rng = settings(folders["llada"], "--temperature 0.5 --top-p 0.9"), np.random.default_rng(0)
    for scale in (20, 5, 0.1):                           # all, some and none of the nuclei are in the first 64 tokens
        z = torch.from_numpy(scale * rng.normal(size=(5, 300)))
        def filtered(z):
            values, index = decode.filter_logits(z, s)
            return torch.full_like(z, decode.NEVER).scatter(-1, index, values)
        assert torch.equal(filtered(z[:3]), filtered(z)[:3])                     # few positions are sorted whole
        for row, got in zip(z / 0.5, filtered(z), strict=True):
            p, index = row.softmax(0).sort(descending=True)
            want = torch.full_like(row, decode.NEVER)
            kept = index[p.cumsum(0) - p <= 0.9]
            want[kept] = row[kept]
            assert torch.equal(got, want)


@pytest.mark.parametrize("flags, kept", [
    ("--score entropy --tokens-per-step 2", 6), ("--score margin --tokens-per-step 2 --top-p 0.8", 3),
    ("--score random --tokens-per-step 2 --top-p 0.8 --top-k 2", 2), ("--score confidence --steps 1 --top-k 4", 4)])
def test_every_step_draws_anew_by_temperature_then_top_p_then_top_k(flags, kept, folders):
    """1200 positions with the same logits: the tokens' shares against the distribution worked out by hand."""
    N, logits = 1200, [2.0, 1.5, 1.0, 0.5, 0.0, -3.0]
    z = torch.full((N, ids_of("llada").vocab), -1e4)
    z[:, :6] = torch.tensor(logits)
    traj = run(Table(z), [[1]], settings(folders["llada"], f"--length {N} --temperature 0.7 {flags}", end_ids=[]))[0]
    weight = [math.exp(x / 0.7) for x in logits[:kept]] + [0.0] * (6 - kept)         # the third token crosses 0.8
    early, late = np.split(np.argsort(traj.step, kind="stable"), 2)
    for half in (early, late):
        for v in range(6):
            p = weight[v] / sum(weight)
            assert abs((traj.response[half] == v).mean() - p) <= 4.5 * math.sqrt(p * (1 - p) / (N / 2))


@both
@pytest.mark.parametrize("flags", [
    "--score confidence --temperature 0.8 --top-p 0.9 --top-k 20", "--score random --temperature 1",
    "--score entropy --temperature 0.5 --tokens-per-step 3", "--score margin --temperature 1 --threshold 0.5"])
def test_draws_depend_on_the_seed_and_not_on_the_batch(family, flags, folders, nets):
    flags, prompts = "--length 16 " + flags, prompts_of(family)
    s = settings(folders[family], flags)
    alone = [next(decode.decode(nets[family], [(n, prompt)], s, 4)) for n, prompt in enumerate(prompts)]
    for traj, want in zip(run(nets[family], prompts, s, 2), alone, strict=True):
        assert (traj.response == want.response).all() and (traj.step == want.step).all()
        assert np.isnan(traj.entropy).tolist() == (traj.step < 0).tolist()       # not decoded: nothing is known
        np.testing.assert_allclose(traj.entropy, want.entropy, rtol=0, atol=1e-4)
    other = run(nets[family], prompts, settings(folders[family], flags + " --seed 1"), 2)
    assert any((traj.response != want.response).any() for traj, want in zip(other, alone, strict=True))

# -----------------------------------------------------------------------------
# decoding: records

class Moody(Table):
    """Logits of the position and of how many masks are left, the same to the last bit in any batch and dtype."""
    def forward(self, ids, attend, pos):
        left = (ids == self.mask_id).sum(1)[:, None]                         # (B, 1)
        place = pos - (ids.shape[1] - len(self.table))
        return self.table[place] + self.table[(place + left) % len(self.table)].flip(-1) / 4


def native_with_ties(family, net, prompt, mask_id, N, T=0.1, top_p=0.9):
    """The published code of one step, op by op in the type of the logits, one token per step, ties to the leftmost."""
    canvas, order = [mask_id] * N, [-1] * N
    for step in range(N):
        ids = torch.tensor([prompt + canvas])
        masked = [j for j in range(N) if order[j] < 0]
        logits = net(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([masked]) + len(prompt))[0]   # (n, V)
        token = logits.index_fill(-1, torch.tensor([mask_id]), -torch.inf).argmax(-1).tolist()
        if family == "llada":
            score = logits.softmax(-1)[range(len(masked)), token]
        else:
            z, index = (logits / T).sort(descending=True, stable=True)
            removed = z.softmax(-1).cumsum(-1) > top_p
            removed[:, 1:] = removed[:, :-1].clone()
            removed[:, 0] = False
            p = torch.zeros_like(z).scatter(-1, index, z.masked_fill(removed, -torch.inf)).softmax(-1)
            score = (p * torch.log(p + 1e-10)).sum(-1)
        best = score.tolist().index(max(score.tolist()))             # of equal ones the leftmost
        canvas[masked[best]], order[masked[best]] = token[best], step
    return canvas, order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both
def test_ties_by_position_are_those_of_the_native_code(family, dtype, folders):
    """Dream at T 0.1 / top-p 0.9, whose entropies are mostly exactly 0, and LLaDA, whose probabilities bf16 rounds."""
    N, mask_id = 20, ids_of(family).mask
    net = Moody(3 * random_table(family, N)).to(dtype)
    net.mask_id = mask_id
    flags = f"--length {N} --schedule even --greedy --whole --ties position"
    s = settings(folders[family], flags)
    differ = 0
    for prompt in prompts_of(family):
        want = native_with_ties(family, net, prompt, mask_id, N)
        traj, = run(net, [prompt], s)
        assert (traj.response.tolist(), traj.step.tolist()) == want
        by_entropy, = run(net, [prompt], settings(folders[family], flags, ties="entropy"))
        differ += traj.step.tolist() != by_entropy.step.tolist()
    assert differ or (family, dtype) == ("llada", torch.float32)             # ties decide; LLaDA has none in fp32


def test_greedy_takes_the_most_probable_token_whatever_the_temperature(folders):
    table = random_table("Dream")
    s = settings(folders["Dream"], "--length 12 --temperature 3 --top-p 1 --greedy", end_ids=[])
    assert run(Table(table), [[1]], s)[0].response.tolist() == table.argmax(-1).tolist()


@both
@pytest.mark.parametrize("flags", ["--temperature 0", "--tokens-per-step 3", "--temperature 1 --score random"])
def test_records_replay(family, flags, cli, folders, nets):
    """From all masks, the record's steps lead to its tokens, and the model at each state gives what was logged."""
    tok, i = tokenizer(folders[family]), ids_of(family)
    records = cli("t.jsonl", "--length 16 " + flags, family)
    for task in TASKS:
        r = records.pop(task["id"])
        assert r["prompt"] == task["prompt"] and r["answer"] == str(task["answer"])
        own = {"llada": "default", "Dream": "entropy"}[family]               # as the authors' loader knows LLaDA's own
        assert r["method"] == ("random" if "random" in flags else own)
        assert tok.decode(r["prompt_token_ids"]) == f"[user]{task['prompt']}[assistant]"
        assert r["model"] == dict(name=folders[family], mask_id=i.mask, vocab_size=i.vocab, end_ids=[i.eos, i.eot])
        step, final, canvas = np.array(r["decoding_order"]), r["response_token_ids"], [i.mask] * 16
        for now in range(step.max() + 1):
            logits = plain_logits(nets[family], r["prompt_token_ids"], canvas)
            p = logits.softmax(-1)
            logits[:, i.mask] = -math.inf
            for j in np.flatnonzero(step == now):
                assert abs(r["entropy"][j] - plain_entropy(p[j].tolist())) < 1e-4
                assert abs(r["confidence"][j] - float(p[j, final[j]])) < 1e-4
                assert r["decode"]["temperature"] > 0 or final[j] == logits[j].argmax()
                canvas[j] = final[j]
        assert canvas == final and [h is None for h in r["entropy"]] == (step < 0).tolist()
        end = next((j for j in range(16) if final[j] in (i.eos, i.eot) and (step[:j + 1] >= 0).all()), 16)
        assert r["response"] == tok.decode([t for t in final[:end] if t != i.mask], skip_special_tokens=True)
    assert not records

# -----------------------------------------------------------------------------
# the model: the families' own code

@every
def test_logits_equal_the_models_own_bidirectional_code_alone_and_left_padded(family, folders, nets):
    theirs, (ids, attend, alone) = reference(family, folders[family]), ragged(family)
    close = dict(atol=1e-4, rtol=1e-4) if family == "llada" else dict(atol=1e-5, rtol=1e-5)      # transformers': fp32
    theirs = theirs.double() if family == "llada" else theirs
    pos = torch.tensor([[11, 5, 7, 5], [9, 11, 10, 10], [0, 11, 1, 6]])      # any order, also twice
    padded, some = full(nets[family], ids, attend), nets[family](ids, attend, pos)
    for b, row in enumerate(alone):
        want = reference_logits(theirs, row).float()
        torch.testing.assert_close(full(nets[family], [row])[0], want, **close)
        torch.testing.assert_close(padded[b, -len(row):], want, **close)
        torch.testing.assert_close(some[b], padded[b, pos[b]], atol=1e-5, rtol=1e-5)


@every
def test_rope_in_bf16_rounds_as_the_families_own_code(family, folders, monkeypatch):
    """LLaDA rotates in fp32 and rounds once; transformers rounds the cosines and sines too."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb
    calls, rotate, row = [], models.rotate, ragged(family)[2][2]

    def recorded(x, cos, sin):
        calls.append((x, rotate(x, cos, sin)))
        return calls[-1][1]
    monkeypatch.setattr(models, "rotate", recorded)
    full(load(folders[family], torch.bfloat16), [row])
    q, got = calls[0]                                    # (1, H, T, D)
    if family == "llada":
        D = q.shape[-1]
        angle = torch.outer(torch.arange(len(row)), 500000.0 ** (-torch.arange(0, D, 2).double() / D))
        y = torch.complex(*q.double().chunk(2, -1)) * torch.complex(angle.cos(), angle.sin())
        want = torch.cat([y.real, y.imag], -1).bfloat16()
    else:
        cos, sin = reference(family, folders[family]).model.rotary_emb(q, torch.arange(len(row))[None])
        want, _ = apply_rotary_pos_emb(q, q, cos, sin)
    assert got.dtype == want.dtype and (got != want).float().mean() < 0.01       # a tie may round the other way


def test_rms_norm_is_the_written_out_norm_bit_for_bit():
    """In fp32 and bf16: normalise in fp32, round, then multiply by the weight."""
    norm = models.RMSNorm(48, 1e-6)
    norm.weight.data = torch.randn(48, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 7, 48, generator=torch.Generator().manual_seed(1)) * 3
    for dtype in (torch.float32, torch.bfloat16):
        y = x.to(dtype).float()
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
        assert torch.equal(norm.to(dtype)(x.to(dtype)), norm.weight * y)

# -----------------------------------------------------------------------------
# LoRA: peft's formula, files and names

TARGETS = {"llada": [*QV, "attn_out"], **dict.fromkeys(["Dream", *SMALL], [*QV, "down_proj"])}


@both
def test_lora_is_on_the_named_layers_only_the_identity_at_first_and_disabled_the_base(family, folders, nets, refused):
    net, base = load(folders[family]), full(nets[family], [[1, 2, 3]])
    with refused("--lora-targets q_porj", "k_proj, ", "q_proj, up_proj, v_proj"):        # lists what there is
        lora.add(net, ["v_proj", "q_porj"], 4, 8)
    params = lora.add(net, QV, 4, 8)
    path = {"llada": "model.transformer.blocks.{}.{}_proj", "Dream": "model.layers.{}.self_attn.{}_proj"}[family]
    paths = [path.format(n, p) for n in range(LAYERS) for p in "qv"]
    assert sorted(params) == sorted(f"base_model.model.{p}.lora_{m}.weight" for p in paths for m in "AB")
    assert {id(p) for p in net.parameters() if p.requires_grad} == {id(p) for p in params.values()}
    assert torch.equal(full(net, [[1, 2, 3]]), base)
    net = adapted(folders[family])
    with pytest.raises(KeyError), lora.disabled(net):
        assert torch.equal(full(net, [[1, 2, 3]]), base)
        raise KeyError
    assert (full(net, [[1, 2, 3]]) - base).abs().max() > 0.1                 # enabled again, also after an error


@every
def test_real_peft_loads_ours_and_we_load_real_pefts(family, folders, nets, tmp_path):
    from peft import PeftModel
    row, net = ragged(family)[2][2], load(folders[family])
    theirs = peft_adapter(reference(family, folders[family]), tmp_path / "theirs", target_modules=TARGETS[family])
    lora.load(net, tmp_path / "theirs")
    torch.testing.assert_close(full(net, [row])[0], reference_logits(theirs, row), atol=1e-4, rtol=1e-4)
    assert (full(net, [row]) - full(nets[family], [row])).abs().max() > 0.1
    ours = adapted(folders[family], TARGETS[family], 3, 7.5, seed=1)
    lora.save(ours, tmp_path / "ours", folders[family])
    theirs = PeftModel.from_pretrained(reference(family, folders[family]), tmp_path / "ours").base_model.model
    torch.testing.assert_close(full(ours, [row])[0], reference_logits(theirs, row), atol=1e-4, rtol=1e-4)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_checkpoint_is_the_adapter_in_the_hubs_layout(family, dtype, tmp_path, monkeypatch, refused):
    base, merged = Path(tiny(family, tmp_path / "base", files=2, dtype=dtype)), tmp_path / "merged"
    (base / "pytorch_model.bin").write_bytes(b"x")
    lora.save(adapted(base, alpha=16.0, dtype=dtype), tmp_path / "a", str(base))
    adapter = load_file(tmp_path / "a" / "adapter_model.safetensors")
    monkeypatch.setattr(sys, "argv", f"lora.py --model {base} --adapter {tmp_path / 'a'} --out {merged}/".split())
    runpy.run_path(str(HERE / "lora.py"), run_name="__main__")
    assert {f.name for f in merged.iterdir()} == {f.name for f in base.iterdir()} - {"pytorch_model.bin"}
    for file in base.glob("*.safetensors"):              # same tensors, shards and types; W + 16/4 B A where adapted
        old, new = load_file(file), load_file(merged / file.name)
        assert old.keys() == new.keys()
        for key, want in old.items():
            A, B = (adapter.get("base_model.model." + key.replace("weight", f"lora_{m}.weight")) for m in "AB")
            want = want if A is None else (want.float() + 4.0 * B @ A).to(dtype)
            torch.testing.assert_close(new[key], want, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    with refused(merged, "exists already"):
        runpy.run_path(str(HERE / "lora.py"), run_name="__main__")

# -----------------------------------------------------------------------------
# measures: TDS, order agreement, swap

@both
def test_tds_equals_its_definition_in_plain_loops(family, cli, folders, nets, tmp_path):
    net, (eos, eot), want = nets[family], tokenizer(folders[family]).end_ids, {}
    cli("t.jsonl", "--length 10 --tokens-per-step 2", family)
    trajs = read_trajs(folders[family], tmp_path / "t.jsonl", "--all")
    trajs[0].response[4], trajs[1].response[4] = eos, eot                    # an end of turn is no EOS
    for traj in trajs:
        for step in sorted(set(traj.step.tolist()) - {-1}):
            seen = [0 <= s < step for s in traj.step]
            z, h = state_logits(net, traj, seen), []
            for i, token in enumerate(traj.response):
                if not seen[i]:
                    h.append(plain_stats(z[i], 0)[1])
                elif token == eos:                       # decoded by now: nothing to the right of it counts
                    break
            if len(h) >= 2:
                mean = sum(h) / len(h)
                want.setdefault(step, []).append(sum((x - mean) ** 2 for x in h) / len(h))
    found = evaluate.tds(net, trajs, eos, batch_size=3)
    got = found["curve"]
    assert found["mean"] == pytest.approx(np.mean([value for value in got if value is not None]))
    assert [step for step, value in enumerate(got) if value is not None] == sorted(want)
    for step, values in want.items():
        assert got[step] == pytest.approx(np.mean(values), rel=1e-3, abs=1e-5)


def test_order_agreement_counts_pairs(nets, folders, tmp_path):
    net, trajs = nets["llada"], read_shapes(folders["llada"], tmp_path, "")
    right = pairs = 0
    for n, traj in enumerate(trajs):
        for cut in range(4):
            view = tabom.tabom_view(traj, np.random.default_rng([cut, n]), window=3)
            z = state_logits(net, traj, view.visible)
            h = [plain_stats(z[j], 0)[1] for j in view.targets]
            right += sum(h[r] < h[s] for r in range(len(h)) for s in range(r + 1, len(h)))
            pairs += len(h) * (len(h) - 1) // 2
    assert evaluate.order_agreement(net, trajs, 3, batch_size=5) == pytest.approx(right / pairs)


@pytest.mark.parametrize("k", [1, 3])
def test_swap_equals_a_plain_loop_with_two_models(k, folders):
    """Positions by one network's confidence, tokens by the other's argmax; two separate models, one row, no batch."""
    base, tuned = load(folders["llada"]), adapted(folders["llada"], scale=1.0)
    s = settings(folders["llada"], f"--length 9 --tokens-per-step {k}", end_ids=[-1])
    prompts = [("0", [3, 1, 4]), ("1", [1, 5, 9, 2, 6])]
    for order_by, tokens_by in ((base, tuned), (tuned, base)):
        swapped = swap.Swapped(tuned, base_chooses=order_by is base)
        got = {traj.id: traj for traj in decode.decode(swapped, prompts, s, 2)}
        for id, prompt in prompts:
            canvas, step = [s.mask_id] * 9, [-1] * 9
            for now in range(-(-9 // k)):
                p = plain_logits(order_by, prompt, canvas).softmax(-1)
                z = plain_logits(tokens_by, prompt, canvas)
                p[:, s.mask_id], z[:, s.mask_id] = -1, -torch.inf
                left = sorted((j for j in range(9) if step[j] < 0), key=lambda j: -p[j].max().item())
                for j in left[:k]:
                    canvas[j], step[j] = int(z[j].argmax()), now
            assert got[id].step.tolist() == step and got[id].response.tolist() == canvas
