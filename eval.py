"""Measures a model and any number of adapters:
accuracy, TDS, order agreement, CE against mask ratio, benchmarks, pictures.

    python eval.py --model M --adapter sft=out/sft/epoch-5 tabom=out/tabom/epoch-5 --prompts test-math.jsonl \\
                   --parallel 1 2 --tds 64 --order heldout.jsonl --ce gt.jsonl traj.jsonl --pictures --out results
    torchrun --nproc_per_node 8 eval.py --model M --adapter out/tabom/epoch-5 --tasks gsm8k_cot,minerva_math500 \\
                   --out results
    python eval.py lm_eval run --model tabom --model_args model=M,adapter=DIR --tasks gsm8k_cot --apply_chat_template
    python eval.py --curves out/*/log.jsonl --out results

Every number goes to results/NAME.json with settings, versions, commit and hardware; a NAME that is there is not
measured again. "base" is the model without adapter. Letters: N canvas, V vocabulary, n scored positions.
"""
import argparse
import json
import math
import platform
import sys
from pathlib import Path

import numpy as np
import torch

import lora
from data import Bar, first_end, read_prompts, read_records, safely, write_whole
from decode import add_flags, decode, encode_prompts, entropy, make_record, make_settings, place_of_work
from model import Flags, load, load_tokenizer, read_config, stop
from tabom import collate, commit, read_data, tabom_loss, view

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
    """Decodes the prompts (this rank's share of them) and returns records, in the items' order."""
    head = dict(model=dict(name=c.name, mask_id=c.mask_id, vocab_size=c.vocab, end_ids=s.end_ids),
                decode=dict(logged, raw_prompt=a.raw_prompt))
    pairs = sorted(encode_prompts(items, tok, c, s, a.raw_prompt), key=lambda kp: (-len(kp[1]), kp[0]))[rank::world]
    bar, records, right = Bar(len(pairs), what), {}, 0
    names = {str(items[n]["id"]): n for n, _ in pairs}
    for row in decode(model, [(str(items[n]["id"]), ids) for n, ids in pairs], s, a.batch_size):
        n = names[row.key]
        records[n] = make_record(row, items[n], tok, s, head)
        right += records[n]["correct"] is True
        bar(len(records), f"{100 * right / len(records):.1f} % right")
    if world > 1:
        parts: list = [None] * world
        torch.distributed.all_gather_object(parts, records)
        records = {n: r for part in parts for n, r in part.items()}
    return [records[n] for n in sorted(records)]


def states(r: dict, end_ids):
    """(step, visible (N,), masked positions up to the first end) for each step of a record: what the decoder saw."""
    order, end = np.array(r["decoding_order"]), first_end(r["response_token_ids"], r["decoding_order"], end_ids)
    body = np.arange(len(order)) <= (len(order) if end is None else end)
    for u in np.unique(order[order >= 0]):
        visible = (order >= 0) & (order < u)
        yield int(u), visible, np.flatnonzero(~visible & body)


@torch.no_grad()
def entropies(model, jobs: list[tuple], mask_id: int, batch_size: int):
    """jobs: (prompt, ids, visible, positions) -> one array of entropies a job."""
    device = next(model.parameters()).device
    for i in range(0, len(jobs), batch_size):
        ids, real, at, _, slot, valid = collate(jobs[i:i + batch_size], mask_id, device)
        h = entropy(model(ids, real, at).float())                                        # (n,)
        yield from (h[sl[v]].cpu().numpy() for sl, v in zip(slot, valid, strict=True))


def tds(model, records: list[dict], c, end_ids, batch_size: int) -> list[float]:
    """TDS(t), Eq. 11: mean over trajectories of the population variance of H over the body's masks at step t."""
    jobs, at_step = [], []
    for r in records:
        for u, visible, left in states(r, end_ids):
            if len(left) >= 2:
                jobs.append((np.array(r["prompt_token_ids"]), np.array(r["response_token_ids"]), visible, left))
                at_step.append(u)
    var = np.array([h.var() for h in entropies(model, jobs, c.mask_id, batch_size)])
    return [float(var[np.array(at_step) == u].mean()) if u in at_step else None
            for u in range(max(at_step, default=-1) + 1)]


@torch.no_grad()
def order_agreement(model, records: list, c, window: int, batch_size: int, windows: int = 4) -> float:
    """Share of held-out window pairs whose earlier-decoded token is the surer one, at the window's start."""
    device, right, pairs = next(model.parameters()).device, 0.0, 0.0
    views = [(r.prompt, r.ids, *view(r, "tabom", window, np.random.default_rng([w, i])))
             for i, r in enumerate(records) for w in range(windows)]
    for i in range(0, len(views), batch_size):
        ids, real, at, x0, slot, valid = collate(views[i:i + batch_size], c.mask_id, device)
        *_, ok, all_ = tabom_loss(model(ids, real, at), x0, slot, valid, 1.0, 0.0)
        right, pairs = right + ok.sum().item(), pairs + all_.sum().item()
    return right / pairs


@torch.no_grad()
def ce_by_ratio(model, records: list, c, end_ids, batch_size: int,
                ratios=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)) -> dict:
    """{mask ratio: mean CE of the masked tokens, up to the first end}: the paper's loss_comparison figure."""
    device, out = next(model.parameters()).device, {}
    for ratio in ratios:
        jobs = []
        for i, r in enumerate(records):
            end = first_end(r.ids, r.order, end_ids)
            body = np.arange(len(r.ids) if end is None else end + 1)
            hide = np.random.default_rng([int(100 * ratio), i]).permutation(body)[:max(1, round(ratio * len(body)))]
            jobs.append((r.prompt, r.ids, ~np.isin(np.arange(len(r.ids)), hide) & (r.order >= 0), hide))
        total = n = 0
        for i in range(0, len(jobs), batch_size):
            ids, real, at, x0, _, _ = collate(jobs[i:i + batch_size], c.mask_id, device)
            total += torch.nn.functional.cross_entropy(model(ids, real, at).float(), x0, reduction="sum").item()
            n += len(x0)
        out[f"{ratio:.1f}"] = total / n
    return out


# ---------------------------------------------------------------- lm-evaluation-harness

def benchmark_flags(task: str, model_type: str) -> tuple[int, int] | None:
    name = task.replace("-", "").replace("minerva_math500", "math500")
    return next((v for k, v in BENCHMARKS[model_type].items() if k in name), None)


def register():
    """Our decoder as an lm_eval model named "tabom": LM(model=..., adapter=..., length=..., ...)."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError:
        stop("--tasks: needs lm_eval: pip install -r requirements-dev.txt")

    @register_model("tabom")
    class Harness(LM):
        def __init__(self, model: str, adapter: str | None = None,
                     batch_size=None, device=None, max_batch_size=None, **own):
            super().__init__()
            p = argparse.ArgumentParser()
            add_flags(p)
            self.flags = p.parse_args([])
            unknown = set(own) - set(vars(self.flags))
            if unknown:
                stop(f"--model_args {sorted(unknown)[0]}: unknown; "
                     f"there are model, adapter, {', '.join(vars(self.flags))}")
            vars(self.flags).update(own)
            self.flags.batch_size = int(batch_size or 16) if str(batch_size or 16).isdigit() else 16
            self.own, (self.c, self.family), self.tok = own, read_config(model), load_tokenizer(model)
            self.place, self.world, where, dtype = place_of_work()
            if self.world > 1 and not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo")     # texts: all ranks get all requests, decode a share
            self.model = load(model, where, dtype)
            if adapter:
                lora.load(self.model, adapter)

        tokenizer_name = property(lambda self: self.c.name.replace("/", "__"))

        def chat_template(self, chat_template=False):
            return self.tok.chat_template or ""

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            return self.tok.apply_chat_template(chat_history, tokenize=False,
                                                add_generation_prompt=add_generation_prompt,
                                                continue_final_message=not add_generation_prompt)

        def generate_until(self, requests):
            texts: dict = {}
            for task in sorted({r.task_name or "" for r in requests}):
                these = [(n, r) for n, r in enumerate(requests) if (r.task_name or "") == task]
                f = argparse.Namespace(**vars(self.flags))
                table = benchmark_flags(task, self.c.model_type)
                if "length" not in self.own:
                    f.length, block = table or (int(these[0][1].args[1].get("max_gen_toks", 256)), 0)
                    f.block = f.block or block
                f.raw_prompt = True                              # the harness has applied the template
                s, logged = make_settings(f, self.c, self.family, self.tok.end_ids)
                items = [dict(id=f"{task}-{n}", prompt=r.args[0], messages=None, answer=None, kind=None)
                         for n, r in these]
                records = run(self.model, self.tok, self.c, items, s, logged, f, task, self.place, self.world)
                for (n, r), record in zip(these, records, strict=True):
                    until = r.args[1].get("until") or []
                    cuts = [record["response"].find(u) for u in ([until] if isinstance(until, str) else until) if u]
                    texts[n] = record["response"][:min([x for x in cuts if x >= 0], default=None)]
                    self.cache_hook.add_partial("generate_until", r.args, texts[n])
            return [texts[n] for n in range(len(requests))]

        def loglikelihood(self, requests):
            raise ValueError("a masked diffusion model decodes; tasks by log-likelihood are left out (README)")

        loglikelihood_rolling = loglikelihood

    return Harness


def benchmarks(a, name: str, adapter: str | None) -> dict:
    """The harness's results for one adapter; task folders of one's own by --task-path."""
    own = {k: vars(a)[k] for k in ("score", "schedule", "temperature", "top_p", "threshold") if vars(a)[k] is not None}
    own |= {k: vars(a)[k] for k in ("steps", "block", "tokens_per_step", "top_k", "suppress_eos") if vars(a)[k]}
    own |= {"length": a.length} if "--length" in sys.argv else {}
    lm = register()(a.model, adapter, a.batch_size, seed=a.seed, **own)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    try:
        found = simple_evaluate(lm, tasks=a.tasks.split(","), num_fewshot=a.num_fewshot, limit=a.limit or None,
                                log_samples=False, bootstrap_iters=0, apply_chat_template=not a.raw_prompt,
                                confirm_run_unsafe_code=a.confirm_run_unsafe_code,
                                task_manager=TaskManager(include_path=a.task_path, include_defaults=not a.task_path))
    except ValueError as e:                                      # unknown task, or code without consent
        stop(f"--tasks {a.tasks}: {str(e).splitlines()[0]}")
    every = found["results"].items() if found else ()            # the harness answers rank 0 only
    return {k: {m: v for m, v in r.items() if isinstance(v, (int, float))} for k, r in every}


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


def draw_lines(path, curves: dict[str, tuple], title: str, x: str, y: str):
    """curves: {name: (x values, y values)} as one labelled picture."""
    fig, ax = axes(title, x, y)
    for name, (xs, ys) in curves.items():
        ax.plot(xs, ys, label=name, linewidth=1.6)
    if len(curves) > 1:
        ax.legend(frameon=False)
    fig.savefig(path)


def draw_map(path, model, r: dict, tok, c, batch_size: int):
    """One decoding as a position x step map: colour = entropy of what is still masked; a dot = decoded at that step."""
    jobs = [(u, (np.array(r["prompt_token_ids"]), np.array(r["response_token_ids"]), v, p))
            for u, v, p in states(r, tok.end_ids) if len(p)]
    grid = np.full((max(u for u, _ in jobs) + 1, max(p.max() for _, (*_, p) in jobs) + 1), np.nan)
    for (u, (*_, p)), h in zip(jobs, entropies(model, [j for _, j in jobs], c.mask_id, batch_size), strict=True):
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
    fig.savefig(path)


def draw_curves(paths: list[str], out: Path):
    """Training curves off log.jsonl files: loss, CE, rank and the share of pairs in order, one line a run."""
    for key in ("loss", "ce", "rank", "in_order"):
        curves = {}
        for path in paths:
            rows = [json.loads(x) for x in Path(path).read_text().splitlines()[1:]]
            ys = np.array([np.nan if r[key] is None else r[key] for r in rows])
            if len(ys) and not np.isnan(ys).all():
                k = max(1, len(ys) // 50)                        # running mean: windows are random, steps are noisy
                steps = [r["step"] for r in rows[k - 1:]]
                curves[Path(path).parent.name] = steps, np.convolve(ys, np.ones(k) / k, "valid")
        draw_lines(out / f"curve-{key}.png", curves, f"Training: {key}", "step", key)


# ---------------------------------------------------------------- the study's report

METHODS = {   # label: name, the paper's gain over No-SFT (Dream, math): in-domain, out-of-domain, GSM8K at 2 a step
    "sft-gt": ("SFT-GT", -1.85, -3.22, -2.04), "sft-sd": ("SFT-SD", 0.27, 1.77, 0.54),
    "dinfer": ("dInfer", 1.36, 1.17, 3.26), "t3d": ("T3D", 0.81, 1.47, 2.35), "tabom": ("TABOM", 2.10, 2.24, 3.42)}
COMPONENTS = {"sft-sd": ("SFT-SD", 81.95), "global-ce": ("global window, CE only", 82.18),
              "global": ("global window, CE + ranking", 83.10), "ce-only": ("local window, CE only", 82.50),
              "tabom": ("local window, CE + ranking (TABOM)", 84.31)}
MARGINS = {"lam1-gamma0.1": 77.94, "tabom": 78.62, "lam1-gamma0.3": 78.09,
           "lam2-gamma0.1": 77.18, "lam2-gamma0.2": 78.62, "lam2-gamma0.3": 77.48}
WINDOWS = {"window2": (2, 83.78), "tabom": (4, 84.08), "window6": (6, 83.95), "window8": (8, 82.79),
           "global": (26, 75.36)}


def spread(values) -> str:
    v = [x for x in values if x is not None]
    return f"{np.mean(v):+.1f} ± {np.std(v, ddof=1) if len(v) > 1 else 0:.1f}" if v else "not run"


def report(study: Path):
    """study/base*/results/LABEL@SEED.json -> study/report.md, gains.png: the paper's tables beside ours, verdicts."""
    runs: dict = {}                                              # {label: {(base, seed): result}}
    for f in sorted(study.glob("base*/results/*.json")):
        label, _, seed = f.stem.partition("@")
        runs.setdefault(label, {})[f.parts[-3], seed] = json.loads(f.read_text())
    bases = {b: r for (b, _), r in runs.pop("base", {}).items()}
    if not bases:
        stop(f"{study}: no base*/results/base.json; run ./run.sh paper-toy first")

    def acc(r, key):
        return 100 * r["accuracy"][key]["share"] if key in r.get("accuracy", {}) else None

    def gains(label, key):                                       # {run: points over its own base}
        get = (lambda r: r.get(key)) if key in ("tds", "in_order") else (lambda r: acc(r, key))
        return {k: get(r) - get(bases[k[0]]) for k, r in runs.get(label, {}).items() if get(r) is not None}

    def row(name, label, columns, *more):                        # a line of a table: gains, then what is given
        return f"| {name} | {' | '.join([*(spread(gains(label, k).values()) for k in columns), *more])} |"

    def head(title, columns):
        return ["", f"## {title}", "", columns, "|" + "---|" * (columns.count("|") - 1)]

    def against(one, two, key):                                  # paired over base and seed: mean, standard error, n
        a, b = gains(one, key), gains(two, key) if two else {}
        d = [a[k] - (b[k] if two else 0) for k in a if not two or k in b]
        return (np.mean(d), np.std(d, ddof=1) / math.sqrt(len(d)), len(d)) if len(d) > 1 else (0.0, math.inf, len(d))

    def verdict(d):
        if d[2] < 2:
            return "not run"                                     # one run has no spread
        return "shown" if d[0] > 2 * d[1] else "contrary" if d[0] < -2 * d[1] else "not shown"

    def told(d, unit="points"):
        return f"{d[0]:+.2f} ± {d[1]:.2f} {unit} (mean ± standard error, {d[2]} runs)" if d[2] > 1 else f"{d[2]} run"

    one = next(iter(bases.values()))
    first = next(iter(runs.get("tabom", {}).values()), one)
    n = one["accuracy"]["test-math/1"]["n"]
    text = [f"# TABOM on the toy: {len(bases)} bases, {len(runs.get('tabom', {}))} training runs a method, "
            f"{n} test prompts a domain", "",
            f"Machine: {first['device']}; torch {first['torch']}; commit {first['commit']}. "
            f"Cells are points over the run's own base, mean ± standard deviation over runs; "
            f"paper columns are its Dream-7B or LLaDA-8B figures, for the direction only."]
    text += head("Bases", "| base | math, 1 a step | math, 2 | logic, 1 | logic, 2 | TDS | pairs in order |")
    keys = ("test-math/1", "test-math/2", "test-logic/1", "test-logic/2")
    text += [f"| {b} | " + " | ".join(f"{acc(r, k):.1f}" if acc(r, k) is not None else "not run" for k in keys) +
             f" | {r.get('tds', 0):.3f} | {100 * r.get('in_order', 0):.1f} % |" for b, r in bases.items()]
    text += head("Main and parallel tables", "| method | math, 1 a step | logic, 1 | math, 2 a step | logic, 2 | TDS | "
                 "pairs in order | paper: in-domain | OOD | GSM8K, 2 a step |")
    for label, (name, *paper) in METHODS.items():
        extra = [spread(v * by for v in gains(label, key).values()) for key, by in (("tds", 1000), ("in_order", 100))]
        text.append(row(name, label, (keys[0], keys[2], keys[1], keys[3]), f"{extra[0]} e-3", extra[1],
                        *(f"{x:+.2f}" for x in paper)))
    text += head("Components (paper: GSM8K of Dream)", "| | math, 1 a step | math, 2 | logic, 1 | paper |")
    text += [row(name, k, keys[:3], f"{p:.2f}") for k, (name, p) in COMPONENTS.items()]
    text += head("lambda and gamma (paper: GSM8K of LLaDA)", "| | math, 1 a step | math, 2 | paper |")
    text += [row("lam1-gamma0.2 (TABOM)" if k == "tabom" else k, k, keys[:2], f"{p:.2f}") for k, p in MARGINS.items()]
    text += head("Window (paper: GSM8K of Dream at W 16, 32, 48, 64, 256 of 256; ours of 26)",
                 "| W | math, 1 a step | math, 2 | paper |")
    text += [row(w, k, keys[:2], f"{p:.2f}") for k, (w, p) in WINDOWS.items()]
    text += head("Decisions the paper leaves open", "| | math, 1 a step | math, 2 | logic, 1 |")
    text += [row(name, k, keys[:3]) for k, name in (("tabom", "entropies at the window's start, tail kept"),
                                                    ("exact", "--rank-context exact"), ("drop", "--tail drop"))]

    worst = min((truth - r["ce"]["self-distilled"][k] for r in bases.values() if "ce" in r
                 for k, truth in r["ce"]["ground truth"].items()), default=None)
    gt, sd, tb2 = (against(k, None, keys[2]) for k in ("sft-gt", "sft-sd", "tabom"))
    tb = against("tabom", None, keys[0])
    rivals = [k for k in METHODS if k not in ("tabom", "sft-gt") and gains(k, keys[0])]
    best = {key: max(rivals, key=lambda k: against(k, None, key)[0], default="sft-sd") for key in (*keys[:2], "tds")}
    moderate = {k: against(k, None, keys[0])[0] for k in MARGINS if gains(k, keys[0])}
    text += ["", "## Verdicts", "", "A difference is shown or contrary when it is more than two standard errors from "
             "0, paired over base and training seed.", "", "| claim | verdict | evidence |", "|---|---|---|"]
    plain = lambda claim, d, unit="points": (claim, verdict(d), told(d, unit))
    rows = [
        ("1. own answers are easier to fit than ground truth at every mask ratio",
         "not run" if worst is None else "shown" if worst > 0 else "not shown",
         "" if worst is None else f"smallest gap over bases and ratios {worst:+.3f} nats"),
        ("2a. SFT-GT forgets (logic)", verdict((-gt[0], *gt[1:])), told(gt)),
        ("2b. SFT-SD does not forget", "not shown" if verdict(sd) == "contrary" else "shown", told(sd)),
        ("2c. SFT-SD gains little in-domain", "", told(against("sft-sd", None, keys[0]))),
        plain("3a. TABOM gains in-domain", tb),
        plain(f"3b. more than the best of the other self-distilled methods ({best[keys[0]]})",
              against("tabom", best[keys[0]], keys[0])),
        plain("3c. ranking helps over CE alone", against("tabom", "ce-only", keys[0])),
        ("3d. TABOM does not forget", "not shown" if verdict(tb2) == "contrary" else "shown", told(tb2)),
        plain(f"4. TABOM has the largest TDS (next: {best['tds']})", against("tabom", best["tds"], "tds"), "nats²"),
        plain(f"5. TABOM holds up at 2 tokens a step (against {best[keys[1]]})",
              against("tabom", best[keys[1]], keys[1])),
        plain("5b. ranking helps over CE alone at 2 tokens a step", against("tabom", "ce-only", keys[1])),
        plain("6. a local window beats the global one", against("tabom", "global", keys[0])),
        ("7. moderate gamma (0.2) is best",
         "not run" if len(moderate) < len(MARGINS) else
         "shown" if max(moderate, key=moderate.get) in ("tabom", "lam2-gamma0.2") else "not shown",
         ", ".join(f"{'lam1-gamma0.2' if k == 'tabom' else k} {v:+.1f}" for k, v in moderate.items()))]
    text += [f"| {c} | {v} | {e} |" for c, v, e in rows]
    (study / "report.md").write_text("\n".join(text) + "\n")
    def mean_curve(results):                                     # over runs, step by step
        rows = [[np.nan if v is None else v for v in r["tds_curve"]] for r in results if r.get("tds_curve")]
        n = min(map(len, rows), default=0)
        return range(n), np.nanmean([row[:n] for row in rows], 0) if rows else []

    curves = {"base": mean_curve(bases.values())}
    curves |= {name: mean_curve(runs[k].values()) for k, (name, *_) in METHODS.items() if k in runs}
    draw_lines(study / "tds.png", curves, "Trajectory discrimination score", "decoding step",
               "variance of entropy (nats²)")
    known = [r["ce"] for r in bases.values() if "ce" in r]
    if known:
        lines = {k: ([float(x) for x in known[0][k]], np.mean([list(r[k].values()) for r in known], 0))
                 for k in known[0]}
        draw_lines(study / "ce.png", lines, "Cross-entropy under the base model", "mask ratio", "CE (nats)")
    fig, ax = axes("Gain over the base (toy), mean and standard deviation over runs", "", "points", (7, 3.6))
    for j, name in enumerate(("math, 1 token a step", "math, 2 tokens a step", "logic (not trained on)")):   # as keys
        for i, label in enumerate([*METHODS, "ce-only"]):
            v = list(gains(label, keys[j]).values())
            if v:
                ax.bar(i + (j - 1) * 0.26, np.mean(v), 0.24, yerr=np.std(v, ddof=1) if len(v) > 1 else 0,
                       color=f"C{j}", capsize=2, label=name if i == 0 else None)
    ax.set_xticks(range(len(METHODS) + 1), [m[0] for m in METHODS.values()] + ["TABOM, CE only"])
    ax.axhline(0, color="black", linewidth=0.8)
    ax.legend(frameon=False)
    fig.savefig(study / "gains.png")
    print("\n".join(text))


def best_of(folder: Path) -> str:
    """Of results METHOD_LR@SEED.json, "METHOD LR" lines with the best accuracy, mean over bases and tokens a step."""
    found: dict = {}
    for f in folder.glob("*/tune/*_*@*.json"):
        method, lr = f.stem.partition("@")[0].split("_")
        found.setdefault(method, {}).setdefault(lr, []).extend(
            x["share"] for x in json.loads(f.read_text())["accuracy"].values())
    return "\n".join(f"{m} {max(v, key=lambda lr: np.mean(v[lr]))}" for m, v in sorted(found.items()))


# ---------------------------------------------------------------- the command

def main():
    p = Flags(__doc__)
    p.add_argument("--model", help="model folder or hub name")
    p.add_argument("--adapter", nargs="*", default=[], help="adapter folders, NAME=DIR or DIR")
    p.add_argument("--no-base", action="store_true", help="do not measure the model without adapter")
    p.add_argument("--prompts", nargs="*", default=[], help="prompt files for accuracy; a file's stem names the domain")
    p.add_argument("--parallel", type=int, nargs="+", default=[1], help="tokens per step to measure accuracy at")
    p.add_argument("--tds", type=int, default=0, help="trajectories for TDS, off the first prompts file")
    p.add_argument("--order", help="held-out trajectories for order agreement")
    p.add_argument("--window", type=int, default=32, help="W of order agreement")
    p.add_argument("--ce", nargs=2, metavar=("GT", "SD"), help="two files for CE against mask ratio, base only")
    p.add_argument("--keep", action="store_true",
                   help="keep the decoded records beside the results (they are trajectories)")
    p.add_argument("--pictures", action="store_true", help="draw what was measured")
    p.add_argument("--curves", nargs="+", help="draw training curves off these log.jsonl files")
    p.add_argument("--report", help="write report.md and gains.png of a study folder")
    p.add_argument("--tune",
                   help="print the best learning rate of each method in a study folder, by validation accuracy")
    p.add_argument("--tasks", help="lm-evaluation-harness tasks, comma-separated")
    p.add_argument("--task-path", help="folder with harness tasks of your own")
    p.add_argument("--num-fewshot", type=int, default=0)
    p.add_argument("--confirm-run-unsafe-code", action="store_true",
                   help="the harness may run model-written code (code tasks)")
    p.add_argument("--out", default="results", help="folder for JSON and pictures")
    add_flags(p)
    a = p.parse_args()
    if a.tune or a.report:
        return print(best_of(Path(a.tune))) if a.tune else report(Path(a.report))
    out = Path(a.out)
    if out.exists() and not out.is_dir():
        stop(f"--out {out}: is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    if a.curves:
        draw_curves(a.curves, out)
    if not a.model:
        return None if a.curves else stop("--model: which one? Give a folder or a hub name, or --curves")
    adapters = {} if a.no_base else {"base": None}
    for x in a.adapter:
        name, _, folder = x.rpartition("=")
        adapters[name or Path(folder).parent.name] = folder
        lora.read(folder)                                        # a wrong one is told before anything is measured
    rank, world, device, dtype = place_of_work()
    settings = {k: v for k, v in vars(a).items() if k not in ("adapter", "out", "pictures", "curves")}
    about = dict(settings=settings, commit=commit(), torch=torch.__version__, python=platform.python_version(),
                 device=torch.cuda.get_device_name() if "cuda" in device
                 else f"CPU {platform.machine()}, {torch.get_num_threads()} threads")
    results = {n: json.loads((out / f"{n}.json").read_text()) for n in adapters if (out / f"{n}.json").exists()}
    odd = [n for n, r in results.items() if r["settings"] != settings]
    if odd:
        stop(f"{out}/{odd[0]}.json: was measured with other settings; give another --out, or delete it")
    if a.tasks:
        for name in adapters:
            if name not in results:
                results[name] = dict(about, name=name, tasks=benchmarks(a, name, adapters[name]))
                if rank == 0:
                    write_whole(out / f"{name}.json", json.dumps(results[name], indent=1).encode())
                    print(name, json.dumps(results[name]["tasks"], indent=1))
        return None

    c, family = read_config(a.model)
    tok = load_tokenizer(a.model)
    prompts = {Path(f).stem: read_prompts(f, a.limit) for f in a.prompts}
    plain = argparse.Namespace(all=True, method="tabom", tail="keep", length=a.length, limit=0)
    ways = {}
    for k in a.parallel:
        b = argparse.Namespace(**vars(a))
        if k > 1:
            b.tokens_per_step, b.steps = k, 0
        ways[k] = make_settings(b, c, family, tok.end_ids)
    held = read_data(argparse.Namespace(**vars(plain), data=a.order), c, tok, 1) if a.order else None
    if world > 1:
        torch.distributed.init_process_group("gloo")             # each rank decodes its share and gets all the records
    model = load(a.model, device, dtype)
    for name, folder in adapters.items():
        if name in results:
            continue
        lora.load(model, folder) if folder else None
        r = dict(about, name=name, adapter=folder, accuracy={})
        for domain, items in prompts.items():
            for k, (s, logged) in ways.items():
                records = run(model, tok, c, items, s, logged, a, f"{name} {domain} k={k}", rank, world)
                n, right = len(records), sum(x["correct"] is True for x in records)
                r["accuracy"][f"{domain}/{k}"] = dict(right=right, n=n, share=right / n, interval=interval(right, n))
                if rank == 0:
                    print(f"{name:>16} {domain} {k} a step: {100 * right / n:.1f} % of {n}", flush=True)
                if a.keep and rank == 0:
                    write_whole(out / f"{name}-{domain}-{k}.jsonl",
                                "".join(json.dumps(x) + "\n" for x in records).encode())
                if a.tds and domain == next(iter(prompts)) and k == a.parallel[0]:
                    r["tds_curve"] = tds(model, records[:a.tds], c, tok.end_ids, a.batch_size)
                    known = [v for v in r["tds_curve"] if v is not None]
                    r["tds"] = float(np.mean(known)) if known else None
                    if a.pictures and rank == 0:
                        draw_map(out / f"map-{name}.png", model, records[0], tok, c, a.batch_size)
        if held:
            r["in_order"] = order_agreement(model, held, c, a.window, a.batch_size)
        if a.ce and name == "base":
            two = [[x for _, x in read_records(f, need_order=False)] for f in a.ce]
            common = {str(x["id"]) for x in two[0]} & {str(x["id"]) for x in two[1] if x.get("correct") is not False}
            if not common:
                stop(f"--ce {a.ce[0]} {a.ce[1]}: share no id whose own answer is not judged wrong; "
                     f"give two files of the same prompts")
            sft = argparse.Namespace(**dict(vars(plain), method="sft"))
            r["ce"] = {}
            for label, f in zip(("ground truth", "self-distilled"), a.ce, strict=True):
                got = [x for x in read_data(argparse.Namespace(**vars(sft), data=f), c, tok, 1) if str(x.id) in common]
                r["ce"][label] = ce_by_ratio(model, got, c, tok.end_ids, a.batch_size)
        if rank == 0:
            write_whole(out / f"{name}.json", json.dumps(r, indent=1).encode())
        results[name] = r
    if a.pictures and rank == 0:
        curves = {n: (range(len(r["tds_curve"])), [np.nan if v is None else v for v in r["tds_curve"]])
                  for n, r in results.items() if r.get("tds_curve")}
        if curves:
            draw_lines(out / "tds.png", curves, "Trajectory discrimination score", "decoding step",
                       "variance of entropy (nats²)")
        if ce := results.get("base", {}).get("ce"):
            draw_lines(out / "ce.png", {k: ([float(x) for x in v], list(v.values())) for k, v in ce.items()},
                       "Cross-entropy under the base model", "mask ratio", "CE (nats)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["lm_eval"]:                             # the harness's own command line, with our model in it
        sys.argv.pop(1)
        register()
        from lm_eval.__main__ import cli_evaluate
        cli_evaluate()
    else:
        with safely("results that are whole stay in --out; run the same command again to go on"):
            main()
