"""
Tables and pictures of what eval.py has measured.

$ python study/report.py demo out/toy                   # the last screen of ./run.sh
$ python study/report.py study                          # study/report.md and the pictures, from study/results
$ python study/report.py paper out/dream-math           # the paper's tables beside ours, and its figures
$ python study/report.py curves RESULTS                 # tds.png and ce.png of a results folder
"""
import contextlib
import json
import sys
from math import sqrt
from pathlib import Path
from statistics import mean, stdev


def accuracy(path: Path, key: str) -> float:
    """Per cent."""
    return 100 * json.loads(path.read_text())["accuracy"][key]["share"]


# -----------------------------------------------------------------------------
# the demonstration

def demo(folder: Path):
    """One base, one training seed, a few hundred prompts: enough to see the effect, too little for a verdict."""
    columns = {"1 per step": ("long", 1), "2": ("long", 2), "4": ("long", 4), "short": ("short", 2),
               "logic": ("logic", 2)}

    def row(name):
        return [accuracy(folder / domain / f"{name}.json", f"test-{domain}/{k}") for domain, k in columns.values()]

    def line(name, cells):
        print(f"{name:32}" + "".join(f"{cell:>12}" for cell in cells))

    def gains(label, name):
        line(label, [f"{after - before:+.1f}" for after, before in zip(row(name), base, strict=True)])

    base = row("base")
    result = json.loads((folder / "long" / "base.json").read_text())["accuracy"]["test-long/1"]
    print(f"\nRight of {result['n']} test prompts: long chains at 1, 2 and 4 tokens per step, short and logic at 2\n")
    line("", columns)
    line("base, per cent", [f"{value:.1f}" for value in base])
    print("points over the base")
    gains("  more pretraining", "control")
    for answers in ("greedy", "sampled"):
        records = [json.loads(text) for text in (folder / f"{answers}.jsonl").read_text().splitlines()]
        right = sum(record["correct"] for record in records)
        print(f"trained on the {right} right ones of its own {len(records)} {answers} answers")
        for method in ("SFT-SD", "CE only", "TABOM"):
            gains(f"  {method}", f"{answers}-{method.lower().replace(' ', '-')}")
    print("""
SFT-SD trains on randomly masked answers, CE only on the states of their decoding, TABOM on these and on its order.
Gain: on sampled answers, CE only and TABOM against SFT-SD and more pretraining.
Protection: on greedy answers, what TABOM keeps and CE only loses, above all at 4 tokens per step.
One base and one training seed: less than 4 points may be chance. The study of four bases: study/report.md""")
    print(f"Picture: {folder}/tds/tds.png")
    print(f"Open {folder}/page.html in a browser: base, CE only and TABOM on new prompts, one cut at a time")

# -----------------------------------------------------------------------------
# the study. Every measured value is a dictionary {base: value}, so that differences are paired; {} was not run

RESULTS = Path("study/results")
FIRST, FIRST_BASES = RESULTS / "first", [1, 2, 3, 4]     # of the first run, see protocol.md
BASES, CHOSEN_ON = [1, 2, 3, 5], [2]
RATES = ["1e-4", "3e-4", "1e-3", "3e-3"]
GRID = {"gt": "SFT, references, rare form", "gt-mix": "SFT, references, usual forms", "control": "more pretraining",
        "sampled-sft": "SFT-SD, sampled", "sampled-dinfer": "dInfer, sampled", "sampled-t3d": "T3D, sampled",
        "sampled-ce": "CE only, sampled", "sampled-tabom": "TABOM, sampled",
        "greedy-sft": "SFT-SD, greedy", "greedy-ce": "CE only, greedy", "greedy-tabom": "TABOM, greedy"}
# column of a table: folder of results, key in the file
SPEEDS = {"long, 1 per step": ("long-1", "test-long/1"), "long, 2": ("long", "test-long/2"),
          "long, 4": ("long", "test-long/4")}
WATCHED = {"short": ("kept", "test-short/2"), "logic": ("kept", "test-logic/2")}
PLACES = SPEEDS | WATCHED
PARALLEL = ["long, 2", "long, 4"]
ERRORS = {3: 4.3, 4: 3.2}                                # by bases: Student's t, a 95 % interval
KS = ["1", "2", "4", "8", "16"]
SWAPS = {"own": "own tokens, own order", "adapter's tokens, base's order": "own tokens, base's order",
         "base's tokens, adapter's order": "base's tokens, own order"}
DRAWN = {"greedy": "nothing (greedy)", "fixed-forms": "digits (fixed forms)", "fixed-digits": "words (fixed digits)",
         "warm": "all, temperature 0.5", "sampled": "all, temperature 1 (sampled)"}
ORDERS = {"": "own", "-ltr": "left to right", "-random": "random", "-reversed": "reversed"}


def results(seed: int) -> dict:
    """{folder: {name: what was measured}} of one base."""
    path = RESULTS / f"base{seed}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@contextlib.contextmanager
def first_run():
    """Inside, results are those of the first run."""
    global RESULTS, BASES
    second, (RESULTS, BASES) = (RESULTS, BASES), (FIRST, FIRST_BASES)
    try:
        yield
    finally:
        RESULTS, BASES = second


def look_up(folder: str, name: str, *keys, scale=1.0) -> dict:
    """One measured value of every base that has it."""
    found = {}
    for seed in BASES:
        value = results(seed).get(folder, {}).get(name)
        for key in keys:
            value = value and value.get(key)
        if value is not None:
            found[seed] = scale * value
    return found


def values(name: str, column: str) -> dict:
    """Per cent right."""
    folder, key = PLACES[column]
    return look_up(folder, name, "accuracy", key, "share", scale=100)


def swapped(name: str, part: str, k: int) -> dict:
    """Per cent right; part is a key of SWAPS."""
    keys = ("accuracy", f"test-long/{k}") if part == "own" else ("swap", f"test-long/{k}", part)
    return look_up("swap", name, *keys, "share", scale=100)


def minus(a: dict, b: dict) -> dict:
    return {seed: a[seed] - b[seed] for seed in a if seed in b}


def average(columns: list) -> dict:
    """Mean over columns, of the bases that have all of them."""
    seeds = [seed for seed in columns[0] if all(seed in column for column in columns)]
    return {seed: mean(column[seed] for column in columns) for seed in seeds}


def gain(name: str, *columns) -> dict:
    """Points over the base; several columns are averaged."""
    return average([minus(values(name, column), values("base", column)) for column in columns])


def error(xs: dict) -> float:
    return stdev(xs.values()) / sqrt(len(xs))


def show(xs: dict, digits=1) -> str:
    """Mean and standard error over bases."""
    if len(xs) < 2:
        return "not run"
    some = "" if len(xs) == len(BASES) else f" ({len(xs)} bases)"
    return f"{mean(xs.values()):+.{digits}f} ± {error(xs):.{digits}f}{some}"


def level(xs: dict) -> str:
    return f"{mean(xs.values()):.1f}" if xs else "not run"


def verdict(xs: dict, above=0.0) -> str:
    if len(xs) not in ERRORS:
        return "not run" if len(xs) < 2 else "too few bases"
    distance = mean(xs.values()) - above
    if abs(distance) <= ERRORS[len(xs)] * error(xs):
        return "not shown"
    return "shown" if distance > 0 else "contrary"


def validation(name: str) -> dict:
    found = look_up("val", name, "accuracy", "val-long/2", "share", scale=100)
    return {seed: share for seed, share in found.items() if seed in CHOSEN_ON}


def select() -> dict:
    """{label: rate} by the protocol's rule: the best mean on validation prompts, the lower rate of equals."""
    selected = {}
    for label in GRID:
        score = {}
        for rate in RATES:
            found = validation(f"{label}@{rate}")
            if len(found) == len(CHOSEN_ON):
                score[rate] = mean(found.values())
        if score:
            selected[label] = max(score, key=score.get)
    return selected


def claims(best: dict) -> list:
    """Rows (claim, what is compared, differences, threshold), as the protocol lists them."""
    name = {label: f"{label}@{best.get(label, '1e-3')}" for label in GRID}
    rows = []

    def claim(text, compared, differences, above=0.0, digits=1):
        rows.append((text, compared, differences, above, digits))

    def mean_gain(label):
        return gain(name[label], *SPEEDS)

    def lost(gained):
        return {seed: -points for seed, points in gained.items()}

    def ranking(source, *columns, order=""):             # at 1e-3, at which every order was run
        return minus(gain(f"{source}-tabom{order}@1e-3", *columns), gain(f"{source}-ce{order}@1e-3", *columns))

    both = {"CE only": "sampled-ce", "TABOM": "sampled-tabom"}
    for title, label in both.items():
        for column in SPEEDS:
            claim(f"{title} gains (sampled)", f"{column}: over the base", gain(name[label], column))
            claim(f"{title} gains (sampled)", f"{column}: over more pretraining",
                  minus(gain(name[label], column), gain(name["control"], column)))
    for title, label in both.items():
        claim("it is the trajectory, not the answers", f"sampled: {title} - SFT-SD",
              minus(mean_gain(label), mean_gain("sampled-sft")))
    others = [label for label in ("sampled-sft", "sampled-dinfer", "sampled-t3d", "sampled-ce") if mean_gain(label)]
    if others:
        other = max(others, key=lambda label: mean(mean_gain(label).values()))
        claim("TABOM gains most", f"TABOM - {GRID[other]}", minus(mean_gain("sampled-tabom"), mean_gain(other)))
    for title, label in both.items():
        for column in WATCHED:
            claim("nothing is forgotten (sampled)", f"{column}, {title}: over the base, above -2",
                  gain(name[label], column), -2)
    claim("references in the usual forms gain as much", "SFT on them - CE only, sampled",
          minus(mean_gain("gt-mix"), mean_gain("sampled-ce")))
    claim("the rare form ruins", "lost by SFT on references of the rare form", lost(mean_gain("gt")))
    for column in SPEEDS:
        claim("greedy answers cost parallel decoding", f"{column}: lost by CE only, selected rate",
              lost(gain(name["greedy-ce"], column)))
    for column in PARALLEL:
        claim("greedy answers cost parallel decoding", f"{column}: lost by CE only, 1e-3",
              lost(gain("greedy-ce@1e-3", column)))
    for source, title in {"greedy": "ranking protects (greedy)", "sampled": "ranking costs nothing (sampled)"}.items():
        for column in [*SPEEDS, "short"]:
            claim(title, f"{column}: TABOM - CE only, selected rates",
                  minus(gain(name[f"{source}-tabom"], column), gain(name[f"{source}-ce"], column)))
        for column in PARALLEL:
            claim(title, f"{column}: TABOM - CE only, 1e-3", ranking(source, column))
    for method, title in {"ce": "CE only", "tabom": "TABOM"}.items():
        claim("sampling is what gains", f"{title}: sampled - greedy",
              minus(mean_gain(f"sampled-{method}"), mean_gain(f"greedy-{method}")))

    for order in list(ORDERS)[1:]:
        claim("ranking needs the own order", f"greedy, TABOM - CE only: own - {ORDERS[order]}",
              minus(ranking("greedy", *PARALLEL), ranking("greedy", *PARALLEL, order=order)))
    for source in ("greedy", "sampled"):
        for order in list(ORDERS)[1:]:
            claim("the order matters to CE only", f"{source}: own - {ORDERS[order]}",
                  minus(gain(f"{source}-ce@1e-3", *PARALLEL), gain(f"{source}-ce{order}@1e-3", *PARALLEL)))
    claim("less ranking is better (sampled)", "lambda 0.25 - 1",
          minus(gain("sampled-lam-0.25@1e-3", *PARALLEL), gain("sampled-tabom@1e-3", *PARALLEL)))
    for source in ("greedy", "sampled"):
        claim("the paper's own entropies rank as well", f"{source}, TABOM: exact - one forward",
              minus(gain(f"{source}-exact@1e-3", *PARALLEL), gain(f"{source}-tabom@1e-3", *PARALLEL)))
    for half in ("fixed-forms", "fixed-digits"):
        for other in ("greedy", "sampled"):
            claim("drawing digits gains; drawing words gains", f"CE only: {DRAWN[half]} - {DRAWN[other]}",
                  minus(gain(f"{half}-ce@1e-3", *PARALLEL), gain(f"{other}-ce@1e-3", *PARALLEL)))
    for k in (2, 4):
        orders = [swapped("greedy-ce@1e-3", part, k) for part in ("adapter's tokens, base's order", "own")]
        claim("greedy answers spoil the order", f"CE only's tokens at {k}: base's order - own order", minus(*orders))
    for method, title in {"ce": "CE only", "tabom": "TABOM"}.items():
        once = gain(f"sampled-{method}@1e-3", *PARALLEL)
        claim("a second round gains", f"{title}: second - first", minus(gain(f"again-{method}@1e-3", *PARALLEL), once))
        claim("longer training gains", f"{title}: 600 - 200 steps",
              minus(gain(f"sampled-{method}-600@1e-3", *PARALLEL), once))
    claim("a second round gains", "in it: TABOM - CE only",
          minus(gain("again-tabom@1e-3", *PARALLEL), gain("again-ce@1e-3", *PARALLEL)))

    for label in ("sampled-sft", "sampled-ce", "sampled-tabom"):
        widest, first = pass_gain(name[label], "16"), pass_gain(name[label], "1")
        claim("pass@1 rises", f"{GRID[label]}: over the base", first)
        claim("pass@16 does not fall", f"{GRID[label]}: over the base, above -2", widest, -2)
        claim("pass@16 rises", f"{GRID[label]}: over the base", widest)
    for ratio in ("0.2", "0.5", "0.8"):
        compared = f"CE of references - own answers, mask ratio {ratio}"
        claim("own answers are easier", compared, ce_gap(ratio), digits=3)
    for other, title in {"base": "base", name["sampled-sft"]: "SFT-SD"}.items():
        claim("largest TDS", f"sampled: TABOM - {title}", minus(tds(name["sampled-tabom"]), tds(other)), digits=3)
    own = gain("greedy-tabom@1e-3", *PARALLEL)
    for window, title in {"0": "all", "2": "2", "8": "8"}.items():
        other = gain(f"greedy-window-{window}@1e-3", *PARALLEL)
        claim("local beats global", f"greedy: W 4 - {title}", minus(own, other))
    for gamma in ("0.1", "0.3"):
        other = gain(f"greedy-gamma-{gamma}@1e-3", *PARALLEL)
        claim("moderate gamma", f"greedy: gamma 0.2 - {gamma}", minus(own, other))
    return rows


def look_up_pass(name: str, k: str) -> dict:
    return look_up("pass", name, "pass_at", "test-long/2", "share", k, scale=100)


def pass_gain(name: str, k: str) -> dict:
    """Points over the base."""
    return minus(look_up_pass(name, k), look_up_pass("base", k))


def tds(name: str) -> dict:
    return look_up("long-1", name, "tds", "test-long")


def ce_gap(ratio: str) -> dict:
    """Cross-entropy of reference answers minus that of own answers, at one mask ratio."""
    return minus(*[look_up("ce", "base", "ce", which, ratio) for which in ("ground truth", "self-distilled")])


def pyplot():
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def draw_gains(path: Path):
    """The study's main result: points over the base by tokens per step, with one standard error."""
    lines = {"tabom": ("TABOM", "crimson"), "ce": ("CE only", "tab:blue"), "sft": ("SFT-SD", "tab:orange")}
    best = select()
    panels = {"sampled answers, selected rates": ("sampled", best), "greedy answers, selected rates": ("greedy", best),
              "greedy answers, rate 1e-3": ("greedy", {})}
    figure, axes = pyplot().subplots(1, 3, figsize=(11, 3.6), dpi=100, layout="constrained", sharey=True)
    for panel, (title, (source, rates)) in zip(axes, panels.items(), strict=True):
        runs = {f"{source}-{method}": style for method, style in lines.items()}
        runs["control"] = GRID["control"], "grey"
        for n, (label, (name, colour)) in enumerate(runs.items()):
            gains = [gain(f"{label}@{rates.get(label, '1e-3')}", column) for column in SPEEDS]
            run = [i for i in range(3) if len(gains[i]) > 1]
            panel.errorbar([i + 0.06 * (n - 1.5) for i in run], [mean(gains[i].values()) for i in run],
                           [error(gains[i]) for i in run], label=name if run else None, color=colour, marker="o",
                           markersize=4, capsize=2, linewidth=1.5)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(title=title, xlabel="tokens per step", xlim=(-0.3, 2.3))
        panel.set_xticks(range(3), ["1", "2", "4"])
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8, loc="lower left")
    axes[0].set_ylabel("long chains, points over the base")
    figure.savefig(path)


def draw_curves(folder: Path):
    """tds.png and ce.png of a results folder."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    curves = {}
    for name, result in results.items():
        for domain, value in result.get("tds", {}).items():
            steps = [step for step, x in enumerate(value["curve"]) if x is not None]
            curves[f"{name}, {domain}"] = steps, [value["curve"][step] for step in steps]
    pictures = {"tds": (curves, "Trajectory discrimination score", "decoding step", "entropy variance (nats²)")}
    ce = results.get("base", {}).get("ce", {})
    curves = {label: ([float(ratio) for ratio in curve], list(curve.values())) for label, curve in ce.items()}
    pictures["ce"] = curves, "Cross-entropy under the base model", "mask ratio", "cross-entropy (nats)"
    for stem, (curves, title, x, y) in pictures.items():
        if not curves:
            continue
        figure, axes = pyplot().subplots(figsize=(5.5, 3.6), dpi=160, layout="constrained")
        for label, (xs, ys) in curves.items():
            axes.plot(xs, ys, label=label, linewidth=1.6)
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.legend(frameon=False)
        figure.savefig(folder / f"{stem}.png")
        print(f"picture: {folder}/{stem}.png")


def table(head: list, rows: list) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def not_run(best: dict) -> str:
    """What the protocol has and the results have not."""
    from study import parts
    lines = []
    for part, steps in sorted(parts(best).items()):
        missing = []
        for _, names, measures in steps:
            for name in names or ["base"]:
                missing += [name for measure in measures if any(name not in results(seed).get(measure, {})
                                                                for seed in BASES)]
        if missing:
            lines.append(f"- Part {part}: " + ", ".join(f"`{name}`" for name in dict.fromkeys(missing)))
    return "\n".join(lines or ["Nothing."]) + "\n"


def findings() -> list:
    """Sentences written after the results; their figures and verdicts come from the results."""
    best = select()
    mean_gain = {label: gain(f"{label}@{rate}", *SPEEDS) for label, rate in best.items()}

    def figure(a, b=None):
        xs = minus(a, b) if b else a
        certain = {"shown": "beyond chance", "contrary": "beyond chance", "not shown": "not beyond chance"}
        return f"{show(xs)} ({certain.get(verdict(xs), verdict(xs))})"

    def over(a, b):
        return figure(mean_gain[a], mean_gain[b])

    def run(label):                                      # at the rate of all parts but the first
        return gain(f"{label}@1e-3", *PARALLEL)

    def ranking(source, order=""):
        return minus(run(f"{source}-tabom{order}"), run(f"{source}-ce{order}"))

    kept = [show(gain(f"sampled-ce@{best['sampled-ce']}", column)) for column in WATCHED]
    four = [gain(f"{label}@{best[label]}", "long, 4") for label in ("sampled-tabom", "sampled-ce")]
    swap = [swapped("greedy-ce@1e-3", part, 4) for part in ("adapter's tokens, base's order", "own")]
    return [
        "Own sampled answers are worth more at the states of their decoding than under random masks: CE only minus "
        f"SFT-SD on the same answers is {over('sampled-ce', 'sampled-sft')}, mean over 1, 2 and 4 tokens per step.",
        f"A part of the gain is more pretraining: CE only is {figure(mean_gain['sampled-ce'])} over the base, "
        f"{over('sampled-ce', 'control')} over the control; short chains {kept[0]}, logic {kept[1]}. A second round "
        f"adds {figure(run('again-ce'), run('sampled-ce'))} at 2 and 4 tokens per step.",
        "Unlike in the paper, TABOM does not gain most: T3D, which predicts all that is still masked, does, and TABOM "
        f"minus T3D is {over('sampled-tabom', 'sampled-t3d')}.",
        "Unlike in the paper, ranking costs a little where answers are sampled: TABOM minus CE only is "
        f"{figure(*four)} at 4 tokens per step.",
        "Sampling helps by its words, not by its digits: CE only on answers with drawn words and most probable digits, "
        f"minus the same on sampled ones, is {figure(run('fixed-digits-ce'), run('sampled-ce'))}; with drawn digits "
        f"and most probable words {figure(run('fixed-forms-ce'), run('sampled-ce'))}.",
        "Ranking protects greedy answers, but only against a high rate: at 1e-3 TABOM minus CE only is "
        f"{figure(ranking('greedy'))} at 2 and 4 tokens per step, with the paper's own entropies (`exact`) "
        f"{figure(run('greedy-exact'), run('greedy-ce'))}; each at its selected rate "
        f"{over('greedy-tabom', 'greedy-ce')}.",
        "What greedy answers spoil at 1e-3 is the order: CE only's tokens are better by "
        f"{figure(*swap)} in the base's order at 4 tokens per step.",
        "The decoder's own order matters: in it, CE only on sampled answers is better than in a random one by "
        f"{figure(run('sampled-ce'), run('sampled-ce-random'))}, and ranking on greedy answers is worth more by "
        f"{figure(ranking('greedy'), ranking('greedy', '-random'))}.",
    ]


def row(title, run, columns) -> list:
    """One run in a table: points over the base."""
    return [title, *(show(gain(run, column)) for column in columns)]


def pair_of_methods(names: dict, columns) -> list:
    """CE only, TABOM, and what ranking does; names: {"ce": run, "tabom": run}."""
    ce, tabom = [[gain(names[method], column) for column in columns] for method in ("ce", "tabom")]
    ranking = [minus(a, b) for a, b in zip(tabom, ce, strict=True)]
    return [show(xs) for xs in [*ce, *tabom, *ranking]]


PAIRS = [f"{what}, {k}" for what in ("CE only", "TABOM", "TABOM - CE only") for k in (2, 4)]
RATE = "rate 1e-3, points over the base"


def table_bases():
    rows = []
    for seed in BASES:
        found = [values("base", column).get(seed) for column in PLACES]
        rows.append([str(seed), *("not run" if x is None else f"{x:.1f}" for x in found)])
    return "The bases, per cent right", ["seed", *PLACES], rows


def table_gains():
    rows = []
    for label, rate in select().items():
        name = f"{label}@{rate}"
        title, *cells = row(GRID[label], name, PLACES)
        rows.append([title, rate, *cells, show(minus(tds(name), tds("base")), 3)])
    title = "Who gains, who forgets: each method at its selected rate, points over the base"
    return title, ["method", "rate", *PLACES, "TDS over the base"], rows


def table_rates():
    rows = []
    for label, title in GRID.items():
        scores = [validation(f"{label}@{rate}") for rate in RATES]
        rows.append([title, *(level(found) for found in scores)])
    return "How the rates were selected: per cent right of validation prompts, base 2", ["method", *RATES], rows


def table_orders():
    rows = []
    for source in ("greedy", "sampled"):
        for order, title in ORDERS.items():
            names = {method: f"{source}-{method}{order}@1e-3" for method in ("ce", "tabom")}
            rows.append([source, title, *pair_of_methods(names, PARALLEL)])
    return f"Which order: the same answers in another order, {RATE}", ["answers", "order", *PAIRS], rows


def table_lambdas():
    runs = {"0 (CE only)": "ce", "0.25": "lam-0.25", "1": "tabom", "2": "lam-2", "1, `exact`": "exact"}
    rows = []
    for source in ("greedy", "sampled"):
        rows += [[source, *row(title, f"{source}-{run}@1e-3", PARALLEL)] for title, run in runs.items()]
    return f"How much ranking, and by which entropies: lambda, {RATE}", ["answers", "lambda", *PARALLEL], rows


def table_swap():
    rows = []
    for label in ("greedy-ce", "greedy-tabom"):
        cells = [minus(swapped(f"{label}@1e-3", part, k), swapped("base", "own", k)) for part in SWAPS for k in (2, 4)]
        rows.append([GRID[label], *(show(xs) for xs in cells)])
    head = ["method", *(f"{title}, {k}" for title in SWAPS.values() for k in (2, 4))]
    return f"The swap: whose tokens in whose order, {RATE}; own is the adapter's", head, rows


def table_drawn():
    rows = []
    for source, title in DRAWN.items():
        names = {method: f"{source}-{method}@1e-3" for method in ("ce", "tabom")}
        rows.append([title, *pair_of_methods(names, PARALLEL)])
    return f"What was drawn in the own answers, the rest being the most probable: {RATE}", ["drawn", *PAIRS], rows


def table_rounds():
    runs = {"CE only": "sampled-ce", "CE only, second round": "again-ce", "CE only, 600 steps": "sampled-ce-600",
            "TABOM": "sampled-tabom", "TABOM, second round": "again-tabom", "TABOM, 600 steps": "sampled-tabom-600"}
    rows = [row(title, f"{run}@1e-3", PARALLEL) for title, run in runs.items()]
    return f"A second round, and longer training: sampled answers, {RATE}", ["run", *PARALLEL], rows


def table_pass():
    best = select()
    rows = [["base, per cent", *(level(look_up_pass("base", k)) for k in KS)]]
    for label in ("sampled-sft", "sampled-ce", "sampled-tabom"):
        rows.append([GRID[label], *(show(pass_gain(f"{label}@{best.get(label)}", k)) for k in KS)])
    title = "The knowledge boundary: pass@k at temperature 1 and 2 tokens per step, points over the base"
    return title, ["k", *KS], rows


def table_windows():
    runs = {"W 4, gamma 0.2": "greedy-tabom", "W 2": "greedy-window-2", "W 8": "greedy-window-8",
            "W all": "greedy-window-0", "gamma 0.1": "greedy-gamma-0.1", "gamma 0.3": "greedy-gamma-0.3"}
    rows = [row(title, f"{run}@1e-3", PARALLEL) for title, run in runs.items()]
    return f"Window and gamma: TABOM on greedy answers, {RATE}", ["run", *PARALLEL], rows


def table_others():
    runs = {"SFT-SD, temperature 0.5": "warm-sft", "dInfer, greedy": "greedy-dinfer", "T3D, greedy": "greedy-t3d"}
    return f"Also, {RATE}", ["run", *PARALLEL], [row(title, f"{run}@1e-3", PARALLEL) for title, run in runs.items()]


def table_ce():
    ratios = [f"0.{i}" for i in range(1, 10)]
    title = "Own answers: cross-entropy of references (usual forms) minus own greedy answers, by mask ratio"
    return title, ratios, [[show(ce_gap(ratio), 3) for ratio in ratios]]


TABLES = [table_bases, table_gains, table_rates, table_orders, table_lambdas, table_swap, table_drawn, table_rounds,
          table_pass, table_windows, table_others, table_ce]


def rows_of_claims() -> list:
    """Every claim with its difference in both runs; the second run's verdict, or else the first's."""
    second = claims(select())
    with first_run():
        first = {(claimed, compared): xs for claimed, compared, xs, _, _ in claims(select())}
    rows = []
    for claimed, compared, xs, above, digits in second:
        before = first.get((claimed, compared), {})
        judged = verdict(xs, above)
        if len(xs) < 2 and len(before) >= 2:
            judged = f"{verdict(before, above)} (first run)"
        rows.append([claimed, compared, show(xs, digits), judged, show(before, digits)])
    return rows


def study() -> str:
    """The text of report.md."""
    text = ["""# The toy study: what was found

A small model that answers about half of the long tasks is post-trained on its own decoding trajectories, and on what
they are compared with. This is what it gained and forgot, over four base models from different seeds, by the rules of
[protocol.md](protocol.md).
"""]
    text += [f"{number}. {sentence}" for number, sentence in enumerate(findings(), 1)]
    text += ["""
![Points over the base by data and method](gains.png)

Figures are points of accuracy on test prompts: the mean over bases of paired differences ± its standard error over
bases, with one training seed per base. Beyond chance is beyond 3.2 errors (4.3 where three bases were run). "2" and
"4" are tokens per step; at the end of a response fewer may be left. There were two runs (see the protocol): figures are
of the second, with 500 test prompts, unless "first run" is said, which had 300.
Made by `python study/report.py study` from study/results.
"""]
    for make in TABLES:
        title, head, rows = make()
        if "±" not in str(rows) and make not in (table_bases, table_rates):
            with first_run():
                title, head, rows = make()
            title += " (first run)"
        text += [f"## {title}\n", table(head, rows)]
    head = ["claim", "difference", "mean ± error", "verdict", "first run"]
    text += ["## The claims of the protocol\n", table(head, rows_of_claims())]
    text += ["## Not in the second run, or not on all four bases\n", not_run(select())]
    return "\n".join(text)

# -----------------------------------------------------------------------------
# the paper's tables, as its four recipes (./run.sh dream-math ...) measure them again

PAPER = json.loads((Path(__file__).parent / "paper.json").read_text())


def find_score(folder: Path, task: str, name: str):
    """
    (our value, its standard error) of one adapter on one benchmark, None where it was not run, or what is wrong.
    Per cent with the binomial error; TDS has no error.
    """
    path = folder / task / f"{name}.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    if folder.name == "tds":
        return result["tds"][task]["mean"], None
    scores, metric = result["tasks"][task], PAPER["benchmarks"][task]["metric"]
    for key, share in scores.items():
        if key == metric or key.startswith(f"{metric},"):            # the harness adds the filter's name
            return 100 * share, 100 * sqrt(share * (1 - share) / scores["sample_len"])
    return "other metric"


def average_score(scores: list):
    """The mean of several scores, and its error; None unless all were run."""
    if not all(isinstance(score, tuple) for score in scores):
        return None
    return mean(value for value, _ in scores), sqrt(sum(error ** 2 for _, error in scores)) / len(scores)


def paper_cell(printed: float, ours, digits: int) -> str:
    """Paper, ours, difference with our error; digits: of the paper's numbers."""
    cell = f"{printed:5.{digits}f} "
    if not isinstance(ours, tuple):
        return cell + f"{ours or 'not run':>16}"
    value, error = ours
    if error is None:
        return cell + f"{value:5.{digits}f} {value - printed:+10.{digits}f}"
    return cell + f"{value:5.1f} {value - printed:+5.1f} ±{error:3.1f}"


def best_epoch(folder: Path, tasks: list, name: str):
    """The epoch with the best mean over these benchmarks, of those that ./run.sh ... best has measured; or None."""
    found = {}
    for path in folder.glob(f"{tasks[0]}/{name}-epoch-*.json"):
        score = average_score([find_score(folder, task, path.stem) for task in tasks])
        if score:
            found[path.stem] = score[0]
    return max(found, key=found.get, default=None)


def paper_table(table: dict, out: Path) -> str:
    """One table of the paper, a block of lines for each of its groups of columns."""
    folder, digits = out / table["folder"], 3 if table["folder"] == "tds" else 2
    tasks = [task for group in table["groups"].values() for task in group]
    # (title, name of the result, {benchmark: the paper's number}); what is measured besides follows its row
    rows = []
    for title, name, *printed in table["rows"]:
        printed = dict(zip(tasks, printed, strict=True))
        rows.append((title, name, printed))
        best = best_epoch(folder, next(iter(table["groups"].values())), name)
        if best:
            rows.append((f"  {best.removeprefix(name + '-')}, best", best, printed))
        if name == "tabom" and len(table["groups"]) > 1 and (folder / tasks[0] / "published.json").exists():
            rows.append(("  their adapter", "published", printed))
    lines = [f"{table['label']}: {table['title']}"]
    for group, columns in table["groups"].items():
        heads = [PAPER["benchmarks"][task]["name"] for task in columns]
        if group:
            heads.append("average")
        lines.append(f"{group:18}" + "".join(f"{head:24}" for head in heads).rstrip())
        lines.append(" " * 18 + " ".join(["paper  ours  difference"] * len(heads)))
        for title, name, printed in rows:
            scores = [find_score(folder, task, name) for task in columns]
            cells = [paper_cell(printed[task], score, digits) for task, score in zip(columns, scores, strict=True)]
            if group:
                cells.append(paper_cell(mean(printed[task] for task in columns), average_score(scores), digits))
            lines.append(f"{title:18}" + "".join(f"{cell:24}" for cell in cells).rstrip())
    return "\n".join(lines) + "\n"


def draw_paper_tds(folder: Path, path: Path):
    """The paper's figure of TDS along the decoding, a panel for each benchmark that was measured."""
    tasks = [task for task in PAPER["benchmarks"] if (folder / task).is_dir()]
    titles = {"base": "Base", "sft-sd": "SFT-SD", "tabom": "TABOM"}
    figure, panels = pyplot().subplots(1, len(tasks), figsize=(4 * len(tasks), 3.4), dpi=130, layout="constrained",
                                       squeeze=False)
    for panel, task in zip(panels[0], tasks, strict=True):
        for file in sorted((folder / task).glob("*.json")):
            curve = json.loads(file.read_text())["tds"][task]["curve"]
            panel.plot([x if x is not None else float("nan") for x in curve], linewidth=1.4,
                       label=titles.get(file.stem, file.stem))
        panel.set(title=PAPER["benchmarks"][task]["name"], xlabel="decoding step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("TDS (nats²)")
    panels[0][-1].legend(frameon=False)
    figure.savefig(path)
    print(f"picture: {path}")


def paper(out: Path):
    """Every table and figure of the paper that the recipe of this folder makes."""
    tables = [table for table in PAPER["tables"] if out.name in table["recipes"]]
    if not tables:
        known = sorted({recipe for table in PAPER["tables"] for recipe in table["recipes"]})
        print(f"{out}: is no recipe's folder; give OUT/NAME, NAME one of {', '.join(known)}", file=sys.stderr)
        raise SystemExit(2)
    print("Per cent right, ours with its binomial error; TDS in nats². The paper prints the best of several epochs.\n"
          "Ours is the last one, and the best one too where `./run.sh RECIPE best` has measured them.\n")
    for table in tables:
        print(paper_table(table, out))
    print("Tasks and metrics of lm-evaluation-harness:")
    for task, benchmark in PAPER["benchmarks"].items():
        print(f"  {benchmark['name']:10} {task}, {benchmark['metric']}")
    if (out / "tds").is_dir():
        draw_paper_tds(out / "tds", out / "tds.png")
    if (out / "ce").is_dir():
        draw_curves(out / "ce")


if __name__ == "__main__":
    if sys.argv[1:2] == ["demo"] and len(sys.argv) == 3:
        demo(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["paper"] and len(sys.argv) == 3:
        paper(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["curves"] and len(sys.argv) == 3:
        draw_curves(Path(sys.argv[2]))
    elif sys.argv[1:] == ["study"]:
        Path("study/report.md").write_text(study())
        draw_gains(Path("study/gains.png"))
        print("study/report.md, study/gains.png")
    else:
        print(__doc__)
        raise SystemExit(2)
