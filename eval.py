"""Measures a model and any number of adapters: accuracy, TDS, order agreement, CE, benchmarks, pictures, the report.

    python eval.py --model M --adapter sft=out/sft/epoch-5 tabom=out/tabom/epoch-5 --prompts test-math.jsonl \\
                   --parallel 1 2 --tds 64 --order heldout.jsonl --ce gt.jsonl traj.jsonl --pictures --out results
    torchrun --nproc_per_node 8 eval.py --model M --adapter out/tabom/epoch-5 --tasks gsm8k_cot,minerva_math500
    python eval.py lm_eval run --model tabom --model_args model=M,adapter=DIR --tasks gsm8k_cot --apply_chat_template
    python eval.py --curves out/*/log.jsonl --out results

Every number goes to results/NAME.json with settings, versions, commit, hardware and the adapter's hash; a NAME that is
there is not measured again. "base" is the model without adapter. Letters: N canvas, V vocabulary, n scored positions.
"""
import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib.util
import io
import json
import math
import platform
import sys
import zlib
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import lora
from data import Bar, first_end, lines, read_prompts, read_records, safely, write_whole
from decode import add_flags, decode, encode_prompts, make_record, make_settings, place_of_work
from model import Flags, fingerprint, load, load_tokenizer, read_config, read_json, skeleton, stop
from tabom import TokenStats, collate, commit, read_data, view

# isort: split
import numpy as np
import torch

BENCHMARKS = {   # the paper's decoding table: tokens = steps, LLaDA's block; IFEval is not in it: both models' own 512
    "Dream": dict(gsm8k=(256, 0), math500=(512, 0), mbpp=(1024, 0), humaneval=(768, 0), ifeval=(512, 0)),
    "llada": dict(gsm8k=(512, 8), math500=(512, 64), mbpp=(256, 256), humaneval=(512, 512), ifeval=(512, 512)),
}


# ---------------------------------------------------------------- measures

def interval(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    p, d = right / n, 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / d
    return (p + z * z / (2 * n)) / d - half, (p + z * z / (2 * n)) / d + half


def run(model, tok, c, items: list, s, logged: dict, a, what: str, rank=0, world=1) -> list[dict]:
    """Decodes the prompts (this rank's share of them) and returns all records, in the items' order."""
    head = dict(model=dict(name=c.name, mask_id=c.mask_id, vocab_size=c.vocab, end_ids=s.end_ids),
                decode=dict(logged, raw_prompt=a.raw_prompt))
    pairs = sorted(encode_prompts(items, tok, c, s, a.raw_prompt), key=lambda kp: (-len(kp[1]), kp[0]))[rank::world]
    bar, records, right = Bar(len(pairs), what), {}, 0
    names = {str(items[n]["id"]): n for n, _ in pairs}
    for row in decode(model, [(str(items[n]["id"]), ids) for n, ids in pairs], s, a.batch_size):
        n = names[row.key]
        records[n] = make_record(row, items[n], tok, s, head)
        right += records[n]["correct"] is True
        bar(len(records), f"{100 * right / len(records):.1f} % right" if items[n]["answer"] is not None else "")
    if world > 1:
        if not torch.distributed.is_initialized():               # a day: ranks wait while rank 0 scores what they wrote
            torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(days=1))
        records = {int(n): r for part in gathered(json.dumps(records).encode(), world)
                   for n, r in json.loads(part).items()}
    return [records[n] for n in sorted(records)]


def gathered(mine: bytes, world: int) -> list[bytes]:
    """What every rank has; torch's own all_gather_object would pickle it."""
    sizes = [torch.zeros((), dtype=torch.int64) for _ in range(world)]
    torch.distributed.all_gather(sizes, torch.tensor(len(mine)))
    parts = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in range(world)]
    torch.distributed.all_gather(parts, torch.from_numpy(np.frombuffer(mine.ljust(len(parts[0])), np.uint8).copy()))
    return [p[:n].numpy().tobytes() for p, n in zip(parts, sizes, strict=True)]


def states(r: dict, end_ids):
    """(step, visible (N,), masked positions up to the first end) for each step of a record: what the decoder saw."""
    order, end = np.array(r["decoding_order"]), first_end(r["response_token_ids"], r["decoding_order"], end_ids)
    body = np.arange(len(order)) <= (len(order) if end is None else end)
    for u in np.unique(order[order >= 0]):
        visible = (order >= 0) & (order < u)
        yield int(u), visible, np.flatnonzero(~visible & body)


@torch.no_grad()
def stats(model, jobs: list[tuple], mask_id: int, batch_size: int):
    """jobs: (prompt, ids, visible, positions) -> CE and entropy of each job's positions, two arrays in their order."""
    for i in range(0, len(jobs), batch_size):
        *seen, x0, slot, valid = collate(jobs[i:i + batch_size], mask_id, next(model.parameters()).device)
        logits = model(*seen)                                                            # (n, V)
        size = max(1, (1 << 26) // logits.shape[-1])             # in slices: the fp32 temporaries stay small
        parts = [TokenStats.apply(*part) for part in zip(logits.split(size), x0.split(size), strict=True)]
        ce, h = (torch.cat(x) for x in zip(*parts, strict=True))                         # (n,)
        yield from ((ce[sl[v]].cpu().numpy(), h[sl[v]].cpu().numpy()) for sl, v in zip(slot, valid, strict=True))


def tds(model, records: list[dict], c, end_ids, batch_size: int) -> list[float]:
    """TDS(t), Eq. 11: mean over trajectories of the population variance of H over the body's masks at step t."""
    jobs, at_step = [], []
    for r in records:
        for u, visible, left in states(r, end_ids):
            if len(left) >= 2:
                jobs.append((np.array(r["prompt_token_ids"]), np.array(r["response_token_ids"]), visible, left))
                at_step.append(u)
    var = np.array([h.var() for _, h in stats(model, jobs, c.mask_id, batch_size)])
    return [float(var[np.array(at_step) == u].mean()) if u in at_step else None
            for u in range(max(at_step, default=-1) + 1)]


def order_agreement(model, records: list, c, window: int, batch_size: int, windows: int = 4) -> float:
    """Share of held-out window pairs whose earlier-decoded token is the surer one, at the window's start."""
    views = [(r.prompt, r.ids, *view(r, "tabom", window, np.random.default_rng([w, i])))
             for i, r in enumerate(records) for w in range(windows)]
    hs = [h for _, h in stats(model, views, c.mask_id, batch_size)]
    return float(np.concatenate([(h[:, None] < h)[np.triu_indices(len(h), 1)] for h in hs]).mean())


def ce_by_ratio(model, records: list, c, end_ids, batch_size: int) -> dict:
    """{mask ratio: mean CE of the masked tokens, up to the first end}: the paper's loss_comparison figure."""
    out = {}
    for ratio in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        jobs = []
        for i, r in enumerate(records):
            end = first_end(r.ids, r.order, end_ids)
            body = np.arange(len(r.ids) if end is None else end + 1)
            hide = np.random.default_rng([int(100 * ratio), i]).permutation(body)[:max(1, round(ratio * len(body)))]
            jobs.append((r.prompt, r.ids, ~np.isin(np.arange(len(r.ids)), hide) & (r.order >= 0), hide))
        out[f"{ratio:.1f}"] = float(np.concatenate([ce for ce, _ in stats(model, jobs, c.mask_id, batch_size)]).mean())
    return out


# ---------------------------------------------------------------- lm-evaluation-harness

def benchmark_flags(task: str, model_type: str) -> tuple[int, int] | None:
    name = task.replace("-", "").replace("minerva_math500", "math500")
    return next((v for k, v in BENCHMARKS.get(model_type, {}).items() if k in name), None)


class Helped(Exception):
    """A rank other than 0 has decoded its share: scoring, and running what a model wrote, is done once, on rank 0."""


@functools.cache
def register():
    """Our decoder as an lm_eval model named "tabom": LM(model=..., adapter=..., length=..., ...)."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError:
        stop("--tasks: needs lm_eval: pip install -r requirements-dev.txt")

    @register_model("tabom")
    class Harness(LM):
        def __init__(self, model, adapter=None, batch_size=None, device=None, max_batch_size=None, flags=None, **own):
            super().__init__()
            own |= {"batch_size": batch_size} if str(batch_size).strip("0").isdigit() else {}    # "auto": our default
            p = Flags("")
            add_flags(p)
            p.set_defaults(length=None)
            argv = [f"--{k.replace('_', '-')}" + f"={v}" * (v is not True) for k, v in own.items() if v is not False]
            self.flags = flags or p.parse_args(argv)             # types and names are checked as on our command line
            (self.c, self.family), self.tok, self.adapter = read_config(model), load_tokenizer(model), adapter

        @functools.cached_property
        def model(self):                                         # the weights, once, after all that can be wrong
            return load(self.c.name, *place_of_work()[2:])

        tokenizer_name = property(lambda self: self.c.name.replace("/", "__"))
        chat_template = lambda self, name=False: self.tok.chat_template or ""
        loglikelihood = loglikelihood_rolling = lambda self, requests: stop(
            "--tasks: a masked diffusion model decodes; tasks by log-likelihood are left out (README)")

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            return self.tok.apply_chat_template(chat_history, tokenize=False, continue_final_message=not
                                                add_generation_prompt, add_generation_prompt=add_generation_prompt)

        def generate_until(self, requests):
            (rank, world, *_), jobs, ways, seen, texts, self.kept = place_of_work(), {}, {}, Counter(), {}, []
            for n, r in enumerate(requests):                     # an id, and so a draw, whatever else is asked for
                what = f"{r.task_name}/{r.doc_id}"
                item = dict(id=f"{what}/{seen[what]}", place=what, prompt=r.args[0], answer=None, kind=None)
                jobs.setdefault(r.task_name or "", []).append((n, r, item))
                seen[what] += 1
            for task, these in jobs.items():
                f = argparse.Namespace(**dict(vars(self.flags), raw_prompt=True))    # the harness applied the template
                own = int(these[0][1].args[1].get("max_gen_toks", 256)), 0
                length, block = benchmark_flags(task, self.c.model_type) or own
                f.length = length if f.length is None else f.length
                f.block = f.block or block % length              # a block of the table's whole length: one block
                ways[task] = *make_settings(f, self.c, self.family, self.tok.end_ids), f
                encode_prompts([it for *_, it in these], self.tok, self.c, ways[task][0], True)     # do they fit?
            if self.adapter:                                     # the base comes first, so none is ever taken off
                lora.load(self.model, self.adapter)
            for task, these in jobs.items():
                records = run(self.model, self.tok, self.c, [it for *_, it in these], *ways[task], task, rank, world)
                for (n, r, _), record in zip(these, records, strict=True):
                    until = r.args[1].get("until") or []
                    cuts = [record["response"].find(u) for u in ([until] if isinstance(until, str) else until) if u]
                    texts[n] = record["response"][:min([x for x in cuts if x >= 0], default=None)]
                    self.kept.append(dict(task=task, doc_id=r.doc_id, prompt=r.args[0], text=texts[n]))
                    self.cache_hook.add_partial("generate_until", r.args, texts[n])
            if rank:
                raise Helped
            return [texts[n] for n in range(len(requests))]

    return Harness


def benchmarks(a, todo: dict[str, dict], out: Path):
    """The harness's results for each of {name: what is known of the run}; the weights are loaded once."""
    if a.task_path and not Path(a.task_path).is_dir():
        stop(f"--task-path {a.task_path}: no such folder; give one with the tasks' .yaml files")
    from huggingface_hub.utils import logging
    logging.set_verbosity_error()                                # its retries without a network are a dozen lines
    lm, names = register()(a.model, flags=a), a.tasks.split(",")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    manager = TaskManager(include_path=a.task_path, include_defaults=False)
    if not set(names) <= set(manager.all_subtasks):              # the harness's own 14,000 take a while to index
        manager = TaskManager(include_path=a.task_path)
    for name, r in todo.items():
        lm.adapter, lm.kept = r["adapter"], []
        try:
            for task in manager.load(names)["tasks"].values():
                if task.OUTPUT_TYPE != "generate_until":
                    raise ValueError(f"{task.task_name} wants {task.OUTPUT_TYPE}, and our models decode (README)")
            out.mkdir(parents=True, exist_ok=True)
            found = simple_evaluate(lm, tasks=names, num_fewshot=a.num_fewshot, limit=a.limit or None,
                                    log_samples=False, bootstrap_iters=0, task_manager=manager,
                                    apply_chat_template=bool(lm.tok.chat_template and not a.raw_prompt),
                                    confirm_run_unsafe_code=a.confirm_run_unsafe_code)
        except Helped:
            continue
        except Exception as e:                                   # a task may import and download anything
            if lm.kept:                                          # it has decoded: no mistake of the user's
                raise
            stop(f"--tasks {a.tasks}: {type(e).__name__}: {' '.join(str(e).split())[:200]}; `lm_eval ls tasks` has the "
                 f"names, requirements-dev.txt the packages, data come over the network", everywhere=True)
        r |= {k: found[k] for k in ("versions", "n-shot", "n-samples")} | dict(lm_eval=version("lm_eval"), tasks={
            k: {m: v for m, v in x.items() if isinstance(v, (int, float))} for k, x in found["results"].items()})
        if a.keep:
            write_whole(out / f"{name}-tasks.jsonl", "".join(json.dumps(x) + "\n" for x in lm.kept).encode())
        write_whole(out / f"{name}.json", json.dumps(r, indent=1).encode())
        print(name, json.dumps(r["tasks"], indent=1))


# ---------------------------------------------------------------- pictures

def axes(title: str, x: str, y: str, size=(5.5, 3.6)):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=size, dpi=160, layout="constrained")
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    return fig, ax


def save(fig, path):
    picture = io.BytesIO()
    fig.savefig(picture, format="png")
    write_whole(path, picture.getvalue())


def draw_lines(path, curves: dict[str, tuple], title: str, x: str, y: str):
    """curves: {name: (x values, y values)} as one labelled picture; none without any."""
    if not curves:
        return
    fig, ax = axes(title, x, y)
    for name, (xs, ys) in curves.items():
        ax.plot(xs, ys, label=name, linewidth=1.6)
    if len(curves) > 1:
        ax.legend(frameon=False)
    save(fig, path)


def draw_measures(out: Path, named: dict[str, list[dict]]):
    """tds.png and ce.png off {name: its results}, the mean where there are several."""
    curves = {}
    for name, results in named.items():
        steps = list(zip(*(r["tds_curve"] for r in results if r.get("tds_curve")), strict=False))   # to the shortest
        if steps:
            curves[name] = range(len(steps)), [np.mean([v for v in s if v is not None] or [np.nan]) for s in steps]
    draw_lines(out / "tds.png", curves, "Trajectory discrimination score", "decoding step",
               "variance of entropy (nats²)")
    ce = [r["ce"] for r in named.get("base", ()) if "ce" in r]
    draw_lines(out / "ce.png", {k: ([float(x) for x in ce[0][k]], np.mean([list(r[k].values()) for r in ce], 0))
                                for k in (ce[0] if ce else ())},
               "Cross-entropy under the base model", "mask ratio", "CE (nats)")


def draw_map(path, model, r: dict, tok, c, batch_size: int):
    """One decoding as a position x step map: colour = entropy of what is still masked; a dot = decoded at that step."""
    jobs = [(u, (np.array(r["prompt_token_ids"]), np.array(r["response_token_ids"]), v, p))
            for u, v, p in states(r, tok.end_ids) if len(p)]
    grid = np.full((max(u for u, _ in jobs) + 1, max(p.max() for _, (*_, p) in jobs) + 1), np.nan)
    for (u, (*_, p)), (_, h) in zip(jobs, stats(model, [j for _, j in jobs], c.mask_id, batch_size), strict=True):
        grid[u, p] = h
    fig, ax = axes("Entropy of masked positions while decoding", "response position", "decoding step", (7, 4.5))
    ax.grid(False)
    image = ax.imshow(grid, aspect="auto", cmap="viridis", interpolation="nearest")
    width = grid.shape[1]
    for i, u in enumerate(r["decoding_order"][:width]):
        if u >= 0:
            ax.plot(i, u, "o", color="crimson", markersize=3)
    if width <= 64:
        ax.set_xticks(range(width), [tok.decode([t]) for t in r["response_token_ids"][:width]], fontsize=6)
    fig.colorbar(image, label="entropy (nats)")
    save(fig, path)


def draw_curves(paths: list[str], out: Path):
    """Training curves off log.jsonl files: loss, CE, rank and the share of pairs in order, one line a run."""
    keys, logs = ("loss", "ce", "rank", "in_order"), {}
    for path in paths:
        _, *logs[path] = lines(path)                             # the first line holds the arguments
        for place, r in logs[path]:
            if not {"step", *keys} <= r.keys():
                stop(f"{place}: is no line of a training log; give the log.jsonl files that tabom.py wrote")
    out.mkdir(parents=True, exist_ok=True)
    for key in keys:
        curves = {}
        for path, rows in logs.items():
            ys = np.array([np.nan if r[key] is None else r[key] for _, r in rows])
            if len(ys) and not np.isnan(ys).all():
                k = max(1, len(ys) // 50)                        # running mean: windows are random, steps are noisy
                steps = [r["step"] for _, r in rows[k - 1:]]
                curves[Path(path).parent.name] = steps, np.convolve(ys, np.ones(k) / k, "valid")
        draw_lines(out / f"curve-{key}.png", curves, f"Training: {key}", "step", key)
        print(f"{out}/curve-{key}.png: {len(curves)} runs" if curves else f"{key}: no step has it, so no curve")


# ---------------------------------------------------------------- the study's report

METHODS = {   # label: name, the paper's gain over No-SFT (Dream, math): in-domain, out-of-domain, GSM8K at 2 a step
    "sft-gt": ("SFT-GT", -1.85, -3.22, -2.04), "sft-sd": ("SFT-SD", 0.27, 1.77, 0.54),
    "dinfer": ("dInfer", 1.36, 1.17, 3.26), "t3d": ("T3D", 0.81, 1.47, 2.35), "tabom": ("TABOM", 2.10, 2.24, 3.42)}
COMPONENTS = {"sft-sd": ("SFT-SD", 81.95), "global-ce": ("global window, CE only", 82.18),
              "global": ("global window, CE + ranking", 83.10), "ce-only": ("local window, CE only", 82.50),
              "tabom": ("local window, CE + ranking (TABOM)", 84.31)}
MARGINS = {"lam1-gamma0.1": ("lam1-gamma0.1", 77.94), "tabom": ("lam1-gamma0.2 (TABOM)", 78.62),
           "lam1-gamma0.3": ("lam1-gamma0.3", 78.09), "lam2-gamma0.1": ("lam2-gamma0.1", 77.18),
           "lam2-gamma0.2": ("lam2-gamma0.2", 78.62), "lam2-gamma0.3": ("lam2-gamma0.3", 77.48)}
WINDOWS = {"window2": (2, 83.78), "tabom": (4, 84.08), "window6": (6, 83.95), "window8": (8, 82.79),
           "window26": (26, 75.36)}
OPEN = {"tabom": ("entropies at the window's start, tail kept",), "exact": ("--rank-context exact",),
        "drop": ("--tail drop",)}
TOLERANCE = 2.0    # points: a model that loses surely less than this does not forget


def report(study: Path):
    """study/base*/results/LABEL@SEED.json -> study/report.md, gains.png: the paper's tables beside ours, verdicts."""
    runs: dict = {}                                              # {label: {(base, seed): result}}
    for f in sorted(study.glob("base*/results/*.json")):
        label, _, seed = f.stem.partition("@")
        runs.setdefault(label, {})[f.parts[-3], seed] = read_json(f)
    bases = {b: r for (b, _), r in runs.pop("base", {}).items() if "test-math/1" in r.get("accuracy", {})}
    if not bases:
        stop(f"{study}: no base*/results/base.json; run ./run.sh paper-toy first")
    full = len(runs.get("tabom", {}))                            # runs of a method; a cell with fewer says so

    def value(r, key):                                           # percent; TDS in nats²; None: not measured
        share = r.get(key, r.get("accuracy", {}).get(key, {}).get("share"))
        return share if share is None or key == "tds" else 100 * share

    def gains(label, key):                                       # {run: its value over its own base's}
        pairs = {k: (value(r, key), value(bases.get(k[0], {}), key)) for k, r in runs.get(label, {}).items()}
        return {k: x - y for k, (x, y) in pairs.items() if x is not None and y is not None}

    def cell(label, key):
        v = [x * (1000 if key == "tds" else 1) for x in gains(label, key).values()]
        spread = f" ± {np.std(v, ddof=1):.1f}" if len(v) > 1 else ""             # one run has none
        few = f" (n = {len(v)})" if len(v) != full else ""
        return f"{np.mean(v):+.1f}{spread}{' e-3' * (key == 'tds')}{few}" if v else "not run"

    bar = lambda *cells: f"| {' | '.join(map(str, cells))} |"
    row = lambda name, label, columns, *more: bar(name, *(cell(label, k) for k in columns), *more)
    head = lambda title, columns: ["", f"## {title}", "", columns, "|" + "---|" * (columns.count("|") - 1)]

    def against(one, two, key):                                  # paired over base and seed: mean, its error, over what
        a, b = gains(one, key), gains(two, key) if two else {}
        d = {k: a[k] - b.get(k, 0) for k in a if not two or k in b}
        each = [np.mean([d[k] for k in d if k[0] == base]) for base in bases if any(k[0] == base for k in d)]
        units, what = (each, f"{len(each)} bases, ") if len(each) > 2 else (list(d.values()), "")
        se = np.std(units, ddof=1) / math.sqrt(len(units)) if len(d) > 1 else math.inf
        return np.mean(units or [0]), se, f"{what}{len(d)} runs" if len(d) > 1 else ""

    def verdict(*all_):                                          # of one difference, or of several that must all show
        if not all(what for *_, what in all_):
            return "not run"                                     # fewer than two runs have no spread
        return ("shown" if all(d > 2 * se for d, se, _ in all_) else
                "contrary" if any(d < -2 * se for d, se, _ in all_) else "not shown")

    told = lambda d, unit="points": f"{d[0]:+.2f} ± {d[1]:.2f} {unit} ({d[2]})" if d[2] else "fewer than 2 runs"
    plain = lambda claim, *all_, unit="points": (claim, verdict(*all_), "; ".join(told(d, unit) for d in all_))
    keeps = lambda claim, d: (claim, "shown" if d[2] and d[0] - 2 * d[1] > -TOLERANCE else verdict(d), told(d))
    one = next(iter([*runs.get("tabom", {}).values(), *bases.values()]))
    text = [f"# TABOM on the toy: {len(bases)} bases, {full} training runs a method, "
            f"{one['accuracy']['test-math/1']['n']} test prompts a domain", "",
            f"Machine: {one['device']}; torch {one['torch']}; commit {one['commit']}. "
            f"Cells are points over the run's own base, mean ± standard deviation over runs (n where not all); "
            f"paper columns are its Dream-7B or LLaDA-8B figures, for the direction only."]
    text += head("Bases", "| base | math, 1 a step | math, 2 | logic, 1 | logic, 2 | TDS | pairs in order, % |")
    keys = ("test-math/1", "test-math/2", "test-logic/1", "test-logic/2", "tds", "in_order")
    shown = lambda r, k: "not run" if value(r, k) is None else f"{value(r, k):.{3 if k == 'tds' else 1}f}"
    text += [bar(b, *(shown(r, k) for k in keys)) for b, r in bases.items()]
    text += head("Main and parallel tables", "| method | math, 1 a step | logic, 1 | math, 2 a step | logic, 2 | TDS | "
                 "pairs in order | paper: in-domain | OOD | GSM8K, 2 a step |")
    text += [row(name, label, [keys[i] for i in (0, 2, 1, 3, 4, 5)], *(f"{x:+.2f}" for x in paper))
             for label, (name, *paper) in METHODS.items()]
    for title, table, n in (
            ("Components (paper: GSM8K of Dream)", COMPONENTS, 3),
            ("lambda and gamma (paper: GSM8K of LLaDA)", MARGINS, 2),
            ("Window (paper: GSM8K of Dream at W 16, 32, 48, 64, 256 of 256; ours of 26)", WINDOWS, 2),
            ("Decisions the paper leaves open", OPEN, 3)):
        columns = ["W" * (table is WINDOWS), *["math, 1 a step", "math, 2", "logic, 1"][:n], "paper"]
        text += head(title, bar(*(columns[:-1] if table is OPEN else columns)))
        text += [row(name, k, keys[:n], *(f"{p:.2f}" for p in paper)) for k, (name, *paper) in table.items()]

    math1, math2, logic = keys[:3]
    gaps = [truth - r["ce"]["self-distilled"][k] for r in bases.values() if "ce" in r
            for k, truth in r["ce"]["ground truth"].items()] if sum("ce" in r for r in bases.values()) > 1 else []
    mean = lambda k, key: np.mean(list(gains(k, key).values()) or [-math.inf])
    best = {key: max((k for k in METHODS if k not in ("tabom", "sft-gt")), key=lambda k: mean(k, key))
            for key in (math1, math2)}
    best["tds"] = max((k for k in METHODS if k != "tabom"), key=lambda k: mean(k, "tds"))
    small, *inner, large = sorted(WINDOWS, key=WINDOWS.get)
    inner = max(inner, key=lambda k: mean(k, math1))
    gt, sd, more = against("sft-gt", None, logic), against("sft-sd", None, math1), against("tabom", "sft-sd", math1)
    rows = [
        ("1. own answers are easier to fit than ground truth at every mask ratio",
         "not run" if not gaps else "shown" if min(gaps) > 0 else "contrary" if max(gaps) < 0 else "not shown",
         f"smallest gap over bases and ratios {min(gaps):+.3f} nats" if gaps else "fewer than 2 bases"),
        ("2a. SFT-GT forgets (logic)", verdict((-gt[0], *gt[1:])), told(gt)),
        keeps("2b. SFT-SD does not forget", against("sft-sd", None, logic)),
        ("2c. SFT-SD gains little in-domain", verdict(more), f"TABOM more by {told(more)}; SFT-SD itself {told(sd)}"),
        plain("3a. TABOM gains in-domain", against("tabom", None, math1)),
        plain(f"3b. more than the best other self-distilled one ({best[math1]})", against("tabom", best[math1], math1)),
        plain("3c. ranking helps over CE alone", against("tabom", "ce-only", math1)),
        keeps("3d. TABOM does not forget", against("tabom", None, logic)),
        plain(f"4. TABOM has the largest TDS (than {best['tds']}, than the base)", against("tabom", best["tds"], "tds"),
              against("tabom", None, "tds"), unit="nats²"),
        plain(f"5. TABOM holds up at 2 tokens a step (against {best[math2]})", against("tabom", best[math2], math2)),
        plain("5b. ranking helps over CE alone at 2 tokens a step", against("tabom", "ce-only", math2)),
        plain("6. a local window beats the global one", against("tabom", "global", math1)),
        plain(f"6b. sweet spot: an inner W ({WINDOWS[inner][0]}) beats the smallest and the largest",
              *(against(inner, k, math1) for k in (small, large))),
        plain("7. moderate gamma (0.2) beats 0.1 and 0.3, lambda 1",
              *(against("tabom", f"lam1-gamma{g}", math1) for g in (0.1, 0.3)))]
    text += ["", "## Verdicts", "", "A difference is shown or contrary when it is more than two standard errors from "
             "0, paired over base and training seed; of two, both must show. The error is over bases, each the mean of "
             "its seeds, where there are 3 bases, else over runs. \"Does not forget\" is shown when the mean less two "
             f"errors is above -{TOLERANCE:g} points. Fewer than 2 runs give no verdict.", "",
             "| claim | verdict | evidence (mean ± standard error) |", "|---|---|---|"]
    text += [bar(*x) for x in rows]
    (study / "report.md").write_text("\n".join(text) + "\n")
    draw_measures(study, {"base": bases.values()} | {m[0]: runs[k].values() for k, m in METHODS.items() if k in runs})
    fig, ax = axes("Gain over the base (toy), mean and standard deviation over runs", "", "points", (7, 3.6))
    for j, name in enumerate(("math, 1 token a step", "math, 2 tokens a step", "logic (not trained on)")):   # as keys
        v = [list(gains(label, keys[j]).values()) or [0.0] for label in (*METHODS, "ce-only")]
        ax.bar(np.arange(len(v)) + (j - 1) * 0.26, [np.mean(x) for x in v], 0.24, capsize=2, label=name,
               yerr=[np.std(x, ddof=1) if len(x) > 1 else 0 for x in v])
    ax.set_xticks(range(len(METHODS) + 1), [m[0] for m in METHODS.values()] + ["TABOM, CE only"])
    ax.axhline(0, color="black", linewidth=0.8)
    ax.legend(frameon=False)
    save(fig, study / "gains.png")
    print("\n".join(text))


def best_of(folder: Path) -> str:
    """Of results METHOD_LR@SEED.json, "METHOD LR" lines with the best accuracy, mean over bases and tokens a step."""
    found: dict = {}
    for f in folder.glob("*/tune/*_*@*.json"):
        method, lr = f.stem.partition("@")[0].split("_")
        found.setdefault(method, {}).setdefault(lr, []).extend(x["share"] for x in read_json(f)["accuracy"].values())
    if not found:
        stop(f"--tune {folder}: no */tune/METHOD_LR@SEED.json there")
    return "\n".join(f"{m} {max(v, key=lambda lr: np.mean(v[lr]))}" for m, v in sorted(found.items()))


# ---------------------------------------------------------------- the command

def main():
    p = Flags(__doc__)
    p.add_argument("--model", help="model folder or hub name")
    p.add_argument("--adapter", nargs="*", default=[], help="adapter folders, NAME=DIR or DIR")
    p.add_argument("--no-base", action="store_true", help="do not measure the model without adapter")
    p.add_argument("--prompts", nargs="*", default=[], help="prompt files for accuracy; a file's stem names the domain")
    p.add_argument("--parallel", type=int, nargs="+", help="tokens per step to measure accuracy at (default 1)")
    p.add_argument("--tds", type=int, default=0, help="trajectories for TDS, off the first prompts file")
    p.add_argument("--order", help="held-out trajectories for order agreement")
    p.add_argument("--window", type=int, default=32, help="W of order agreement; 0 = all still masked")
    p.add_argument("--ce", nargs=2, metavar=("GT", "SD"), help="two files for CE against mask ratio, base only")
    p.add_argument("--keep", action="store_true", help="keep the decoded records (trajectories); of --tasks the texts")
    p.add_argument("--pictures", action="store_true", help="draw what was measured")
    p.add_argument("--curves", nargs="+", help="draw training curves off these log.jsonl files")
    p.add_argument("--report", help="write report.md and gains.png of a study folder")
    p.add_argument("--tune", help="print each method's best learning rate in a study folder, on validation prompts")
    p.add_argument("--tasks", help="lm-evaluation-harness tasks, comma-separated")
    p.add_argument("--task-path", help="folder with harness tasks of your own")
    p.add_argument("--num-fewshot", type=int, default=0)
    p.add_argument("--confirm-run-unsafe-code", action="store_true", help="code tasks may run what the model wrote")
    p.add_argument("--out", default="results", help="folder for JSON and pictures")
    add_flags(p)
    usual = p.get_default("length")
    p.set_defaults(length=None)                                  # not given: a benchmark's own, else the usual one
    a = p.parse_args()
    if a.tune or a.report:
        try:
            return print(best_of(Path(a.tune))) if a.tune else report(Path(a.report))
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            stop(f"{a.tune or a.report}: a result there is not whole ({type(e).__name__}: {e}); measure it again")
    out = Path(a.out)
    if out.exists() and not out.is_dir():
        stop(f"--out {out}: is a file; give a folder")
    if (a.curves or a.pictures) and not importlib.util.find_spec("matplotlib"):
        stop("--curves, --pictures: need matplotlib: pip install -r requirements-dev.txt")
    if a.curves:
        draw_curves(a.curves, out)
    if not a.model:
        return None if a.curves else stop("--model: which one? Give a folder or a hub name, or --curves")
    stems = [Path(f).stem for f in a.prompts]
    for wrong, why in (
            (a.batch_size < 1 or min(a.limit, a.tds, a.num_fewshot, a.window) < 0 or a.window == 1,
             f"--batch-size {a.batch_size} --limit {a.limit} --tds {a.tds} --num-fewshot {a.num_fewshot} --window "
             f"{a.window}: the batch is at least 1, the window 2 or 0 for all, the others are not negative"),
            (not (a.prompts or a.order or a.ce or a.tasks or a.curves),
             "nothing to measure: give --prompts, --order, --ce or --tasks"),
            (a.tds and not a.prompts, f"--tds {a.tds}: is measured on decoded prompts; give --prompts"),
            (a.tasks and (a.prompts or a.order or a.ce or a.parallel), f"--tasks {a.tasks}: goes without --prompts, "
             "--order, --ce and --parallel; its tokens per step are --tokens-per-step"),
            (a.parallel and (min(a.parallel) < 1 or a.steps or a.tokens_per_step or a.threshold is not None),
             f"--parallel {a.parallel}: tokens per step, at least 1; without --steps, --tokens-per-step, --threshold"),
            (len(set(stems)) < len(stems), f"--prompts {' '.join(a.prompts)}: two have the same stem; rename one")):
        if wrong:
            stop(why)
    adapters = {} if a.no_base else {"base": dict(adapter=None, adapter_sha256=None)}
    for x in a.adapter:
        name, named, folder = x.partition("=")
        if not named or "/" in name:
            name, folder = "-".join(Path(x).resolve().parts[-2:]), x                     # tabom-epoch-5
        if name == "base" or name in adapters:
            stop(f"--adapter {x}: {name} is there already; give each a name of its own: NAME=DIR")
        lora.load(skeleton(a.model), folder)                     # a wrong one is told before anything is measured
        files = [(Path(folder) / f"adapter_{f}").read_bytes() for f in ("config.json", "model.safetensors")]
        adapters[name] = dict(adapter=folder, adapter_sha256=hashlib.sha256(b"".join(files)).hexdigest())
    rank, world, device, dtype = place_of_work()
    if not a.tasks:
        a.length = usual if a.length is None else a.length
        a.parallel = a.parallel or [f"steps{a.steps}" if a.steps else a.tokens_per_step or 1 if a.threshold is None
                                    else f"threshold{a.threshold:g}"]
    settings = {k: v for k, v in vars(a).items() if k not in ("adapter", "out", "pictures", "curves")}
    files = [f for f in (*a.prompts, a.order, *(a.ce or [])) if f and Path(f).is_file()]
    settings["crc32"] = {f: f"{zlib.crc32(Path(f).read_bytes()):08x}" for f in files}    # they change under their names
    settings["crc32"][a.model] = fingerprint(read_config(a.model)[0].folder)
    about = dict(settings=settings, commit=commit(), torch=torch.__version__, python=platform.python_version(),
                 transformers=version("transformers"),
                 device=torch.cuda.get_device_name() if "cuda" in device
                 else f"CPU {platform.machine()}, {torch.get_num_threads()} threads")
    results = {n: read_json(out / f"{n}.json", remedy="delete it") for n in adapters if (out / f"{n}.json").exists()}
    for n, r in results.items():
        if r.get("settings") != settings or r.get("adapter_sha256") != adapters[n]["adapter_sha256"]:
            what = "other settings" if r.get("settings") != settings else f"another adapter, {r.get('adapter')}"
            stop(f"{out}/{n}.json: was measured with {what}; give another --out or name, or delete it")
        if rank == 0:
            print(f"{n}: was measured before, {out}/{n}.json")
    todo = {n: dict(about, name=n, **adapters[n]) for n in adapters if n not in results}
    if a.tasks:
        return benchmarks(a, todo, out)

    c, family = read_config(a.model)
    tok = load_tokenizer(a.model)
    prompts, ways = {Path(f).stem: read_prompts(f, a.limit) for f in a.prompts}, {}
    for k in a.parallel:
        own = dict(tokens_per_step=k) if isinstance(k, int) and k > 1 else {}
        ways[k] = make_settings(argparse.Namespace(**(vars(a) | own)), c, family, tok.end_ids)
    for items in prompts.values():
        odd = next((it["place"] for it in items if it["answer"] is None and it["kind"] != "code"), None)
        if odd is not None:
            stop(f"{odd}: the prompt has no answer to judge by; add its answer, or drop it")
        encode_prompts(items, tok, c, ways[a.parallel[0]][0], a.raw_prompt)
    read = lambda f, method: read_data(argparse.Namespace(
        all=True, method=method, tail="keep", length=a.length, limit=0, data=f), c, tok, 1)
    held, pair = read(a.order, "tabom") if a.order else None, {}
    if a.ce and "base" in todo:
        gt, sd = ([x for _, x in read_records(f, need_order=False)] for f in a.ce)
        common = {str(x["id"]) for x in gt} & {str(x["id"]) for x in sd if x.get("correct") is not False}
        if not common:
            stop(f"--ce {a.ce[0]} {a.ce[1]}: share no id whose own answer is not judged wrong; "
                 f"give two files of the same prompts")
        pair = {label: [x for x in read(f, "sft") if str(x.id) in common]
                for label, f in zip(("ground truth", "self-distilled"), a.ce, strict=True)}
    out.mkdir(parents=True, exist_ok=True)
    model = load(a.model, device, dtype) if todo else None
    for name, r in todo.items():
        if r["adapter"]:
            lora.load(model, r["adapter"])
        r["accuracy"] = {}
        for domain, items in prompts.items():
            for k, (s, logged) in ways.items():
                records = run(model, tok, c, items, s, logged, a, f"{name} {domain} k={k}", rank, world)
                n, right = len(records), sum(x["correct"] is True for x in records)
                r["accuracy"][f"{domain}/{k}"] = dict(right=right, n=n, share=right / n, interval=interval(right, n))
                if rank == 0:
                    print(f"{name:>16} {domain} {k}{' a step' * isinstance(k, int)}: {100 * right / n:.1f} % of {n}",
                          flush=True)
                if a.keep and rank == 0:
                    text = "".join(json.dumps(x) + "\n" for x in records)
                    write_whole(out / f"{name}-{domain}-{k}.jsonl", text.encode())
                if a.tds and domain == next(iter(prompts)) and k == a.parallel[0]:
                    r["tds_curve"] = tds(model, records[:a.tds], c, tok.end_ids, a.batch_size)
                    known = [v for v in r["tds_curve"] if v is not None]
                    r["tds"] = float(np.mean(known)) if known else None
                    if a.pictures and rank == 0:
                        draw_map(out / f"map-{name}.png", model, records[0], tok, c, a.batch_size)
        if held:
            r["in_order"] = order_agreement(model, held, c, a.window, a.batch_size)
        if name == "base" and pair:
            r["ce"] = {k: ce_by_ratio(model, v, c, tok.end_ids, a.batch_size) for k, v in pair.items()}
        if rank == 0:
            write_whole(out / f"{name}.json", json.dumps(r, indent=1).encode())
        results[name] = r
    if a.pictures and rank == 0:
        draw_measures(out, {n: [r] for n, r in results.items()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["lm_eval"]:                             # the harness's own command line, with our model in it
        sys.argv.pop(1)
        with safely("what the harness wrote stays; run the same command again"), contextlib.suppress(Helped):
            register()
            from lm_eval.__main__ import cli_evaluate
            cli_evaluate()
    else:
        with safely("results that are whole stay in --out; run the same command again to go on"):
            main()
    if torch.distributed.is_initialized():                       # its threads abort an interpreter that just ends
        torch.distributed.destroy_process_group()
