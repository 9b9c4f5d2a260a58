"""
Tables and pictures of what eval.py has measured.

$ python study/report.py demo out/toy                   # the last screen of ./run.sh
$ python study/report.py study                          # study/report.md and the pictures, from study/results
$ python study/report.py paper out/dream-math           # the paper's tables beside ours, and its figures
$ python study/report.py curves RESULTS                 # tds.png and ce.png of a results folder
$ python study/report.py map traj.jsonl map.png         # the first decoding of a file, position x step
"""
import json
import sys
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

RESULTS = Path("study/results")
BASES = [1, 2, 3, 4]
RATES = ["1e-4", "3e-4", "1e-3", "3e-3"]
METHODS = {"sft-gt": "SFT-GT", "sft-sd": "SFT-SD", "dinfer": "dInfer", "t3d": "T3D",
           "ce-only": "CE only", "tabom": "TABOM", "pretrain": "more pretraining"}
OWN_ANSWERS = ["sft-sd", "dinfer", "t3d", "ce-only"]     # the other methods that train on the base's own answers
COLUMNS = {"math, 1 per step": ("math", 1), "math, 2": ("math", 2), "math, 4": ("math", 4), "logic": ("logic", 1)}
COLOURS = {"base": "grey", "sft-gt": "tab:brown", "sft-sd": "tab:orange", "dinfer": "tab:green", "t3d": "tab:cyan",
           "ce-only": "tab:blue", "tabom": "crimson", "pretrain": "black"}
SPEEDS = list(COLUMNS)[:3]
ERRORS = 3.2                                             # Student's t with 3 degrees of freedom: a 95 % interval
SWAPS = {"own": "own tokens, own order", "adapter's tokens, base's order": "own tokens, base's order",
         "base's tokens, adapter's order": "base's tokens, own order"}


def accuracy(path: Path, key: str) -> float:
    """Per cent."""
    return 100 * json.loads(path.read_text())["accuracy"][key]["share"]


def swapped(path: Path, part: str, k: int) -> float:
    """Per cent at k tokens per step; part is a key of SWAPS."""
    result, key = json.loads(path.read_text()), f"test-math/{k}"
    found = result["accuracy"][key] if part == "own" else result["swap"][key][part]
    return 100 * found["share"]

# -----------------------------------------------------------------------------
# the demonstration

def demo(folder: Path):
    """One base, one training seed, a few hundred prompts: enough to see the effect, too little for a verdict."""
    columns = {"1 per step": ("long", 1), "2": ("long", 2), "4": ("long", 4), "short": ("short", 1),
               "logic": ("logic", 1)}

    def row(name):
        return [accuracy(folder / domain / f"{name}.json", f"test-{domain}/{k}") for domain, k in columns.values()]

    def line(name, cells):
        print(f"{name:32}" + "".join(f"{cell:>12}" for cell in cells))

    def gains(name, label):
        line(name, [f"{after - before:+.1f}" for after, before in zip(row(label), base, strict=True)])

    base = row("base")
    result = json.loads((folder / "long" / "base.json").read_text())["accuracy"]["test-long/1"]
    print(f"\nRight of {result['n']} test prompts: long chains at 1, 2 and 4 tokens per step, short chains, logic\n")
    line("", columns)
    line("base, per cent", [f"{value:.1f}" for value in base])
    print("trained, points over the base")
    gains("  more pretraining", "control")
    for answers in ("greedy", "sampled"):
        records = [json.loads(text) for text in (folder / f"{answers}.jsonl").read_text().splitlines()]
        right = sum(record["correct"] for record in records)
        print(f"on {right} right ones of its own {len(records)} {answers} answers")
        for method in ("SFT-SD", "CE only", "TABOM"):
            gains(f"  {method}", f"{answers}-{method.lower().replace(' ', '-')}")
    print("""
SFT-SD trains on randomly masked answers, CE only on the states of their decoding, TABOM on these and on its order.
Gain: on sampled answers, CE only and TABOM against SFT-SD and more pretraining.
Protection: on greedy answers, what TABOM keeps and CE only loses, above all at 4 tokens per step.
One base and one training seed: less than 4 points may be chance. The study of four bases: study/report.md""")
    pictures = [folder / name for name in ("page.html", "map.png", "tds/tds.png")]
    print("Look at:", *[path for path in pictures if path.exists()])

# -----------------------------------------------------------------------------
# the study: every value is a list over bases, so that differences are paired

def values(name: str, column: str, split="test", bases=BASES) -> list:
    domain, k = COLUMNS[column]
    folder = f"{split}-{domain}"
    return [accuracy(RESULTS / f"base{seed}" / folder / f"{name}.json", f"{folder}/{k}") for seed in bases]


def rates_of(label: str, split="test") -> list:
    """The rates at which a method was measured on every base; one that diverged is left out."""
    files = f"{split}-math/{label}@{{}}.json"
    return [rate for rate in RATES if all((RESULTS / f"base{seed}" / files.format(rate)).exists() for seed in BASES)]


def tds(name: str, field="tds") -> list:
    return [json.loads((RESULTS / f"base{seed}" / "test-math" / f"{name}.json").read_text())[field] for seed in BASES]


def ce_gap(ratio: str) -> list:
    """Cross-entropy of reference answers minus that of own answers, at one mask ratio."""
    curves = [json.loads((RESULTS / f"base{seed}/ce/base.json").read_text())["ce"] for seed in BASES]
    return [curve["ground truth"][ratio] - curve["self-distilled"][ratio] for curve in curves]


def minus(a: list, b: list) -> list:
    return [x - y for x, y in zip(a, b, strict=True)]


def average(lists: list) -> list:
    return [mean(column) for column in zip(*lists, strict=True)]


def gain(name: str, column: str, split="test") -> list:
    return minus(values(name, column, split), values("base", column, split))


def speeds(name: str, columns=SPEEDS, split="test") -> list:
    """Mean gain over several numbers of tokens per step."""
    return average([gain(name, column, split) for column in columns])


def error(xs: list) -> float:
    return stdev(xs) / sqrt(len(xs))


def show(xs: list, digits=1) -> str:
    return f"{mean(xs):+.{digits}f} ± {error(xs):.{digits}f}"


def select() -> dict:
    """{method: rate} by the protocol's rule, from validation prompts alone."""
    selected = {}
    for label in METHODS:
        rates = rates_of(label, "val")
        score = {rate: mean(speeds(f"{label}@{rate}", split="val")) for rate in rates}
        lost = {rate: -mean(gain(f"{label}@{rate}", "logic", "val")) for rate in rates}
        keep = [rate for rate in rates if lost[rate] <= 2 + 1e-9]
        selected[label] = max(keep, key=score.get) if keep else min(rates, key=lost.get)
    return selected


def verdict(xs: list, above=0.0) -> str:
    distance = mean(xs) - above
    if abs(distance) <= ERRORS * error(xs):
        return "not shown"
    return "shown" if distance > 0 else "contrary"


def verdicts(best: dict) -> list:
    """Rows of the table of claims. A claim is that the mean of some differences is above a threshold."""
    rows = []

    def claim(name, compared, differences, above=0.0, digits=1):
        rows.append([name, compared, show(differences, digits), verdict(differences, above)])

    selected = {label: f"{label}@{rate}" for label, rate in best.items()}
    tabom, one, fast = selected["tabom"], SPEEDS[0], SPEEDS[1:]

    for ratio in ("0.2", "0.5", "0.8"):
        claim("own answers are easier to fit", f"CE of references - own answers, mask ratio {ratio}", ce_gap(ratio),
              digits=3)

    # who forgets, who gains
    for rate in dict.fromkeys([best["sft-gt"], "1e-3"]):
        claim("SFT-GT forgets", f"logic lost, rate {rate}", [-x for x in gain(f"sft-gt@{rate}", "logic")])
    claim("SFT-SD keeps", "logic over the base, above -2", gain(selected["sft-sd"], "logic"), -2)
    claim("SFT-SD gains little", "math at 1, TABOM - SFT-SD", minus(gain(tabom, one), gain(selected["sft-sd"], one)))
    claim("TABOM gains", "math at 1 over the base", gain(tabom, one))
    claim("TABOM does not forget", "logic over the base, above -2", gain(tabom, "logic"), -2)
    other = max(OWN_ANSWERS, key=lambda label: mean(speeds(selected[label])))
    claim("TABOM gains more than others", f"math, mean of speeds, TABOM - {METHODS[other]}",
          minus(speeds(tabom), speeds(selected[other])))

    for column in SPEEDS:
        pairs = {"selected rates": (tabom, selected["ce-only"]), "rate 1e-3": ("tabom@1e-3", "ce-only@1e-3")}
        for rates, (a, b) in pairs.items():
            claim("ranking helps", f"{column}: TABOM - CE only, {rates}", minus(gain(a, column), gain(b, column)))

    trained = {label: tds(selected[label]) for label in ["sft-gt", *OWN_ANSWERS]}
    other = max(trained, key=lambda label: mean(trained[label]))
    claim("largest TDS", "TABOM - base", minus(tds(tabom), tds("base")), digits=3)
    claim("largest TDS", f"TABOM - {METHODS[other]}", minus(tds(tabom), trained[other]), digits=3)

    # 2 and 4 tokens per step
    other = max(OWN_ANSWERS, key=lambda label: mean(speeds(selected[label], fast)))
    claim("robust at 2 and 4 per step", f"TABOM - {METHODS[other]}, selected rates",
          minus(speeds(tabom, fast), speeds(selected[other], fast)))
    everywhere = {}
    for label in ["tabom", *OWN_ANSWERS]:
        everywhere[label] = average([speeds(f"{label}@{rate}", fast) for rate in rates_of(label)])
    other = max(OWN_ANSWERS, key=lambda label: mean(everywhere[label]))
    claim("robust at 2 and 4 per step", f"TABOM - {METHODS[other]}, mean over all rates",
          minus(everywhere["tabom"], everywhere[other]))

    # window and margin
    for rate in dict.fromkeys([best["tabom"], "1e-3"]):
        if rate not in rates_of("gamma-0.3"):
            rows.append(["window and gamma", f"rate {rate}", "not run", ""])
            continue
        own, wide = speeds(f"tabom@{rate}"), speeds(f"window-8@{rate}")
        claim("local beats global", f"W 4 - all, rate {rate}", minus(own, speeds(f"global@{rate}")))
        inner = max([own, wide], key=mean)
        claim("a sweet spot of W", f"best of W 4, 8 - W 2, rate {rate}", minus(inner, speeds(f"window-2@{rate}")))
        for gamma in ("0.1", "0.3"):
            claim("moderate gamma", f"gamma 0.2 - {gamma}, rate {rate}", minus(own, speeds(f"gamma-{gamma}@{rate}")))
    return rows


def pyplot():
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def draw_rates(path: Path):
    """The study's result: points over the base against the learning rate, a line per method, a band of one error."""
    figure, panels = pyplot().subplots(1, 4, figsize=(13, 3.8), dpi=130, layout="constrained", sharex=True)
    for panel, column in zip(panels, COLUMNS, strict=True):
        for label, name in METHODS.items():
            rates = rates_of(label)
            x = [RATES.index(rate) for rate in rates]
            gains = [gain(f"{label}@{rate}", column) for rate in rates]
            width = 2.4 if label == "tabom" else 1.2
            panel.plot(x, [mean(xs) for xs in gains], "o-", markersize=3, label=name, color=COLOURS[label],
                       linewidth=width)
            low, high = [mean(xs) - error(xs) for xs in gains], [mean(xs) + error(xs) for xs in gains]
            panel.fill_between(x, low, high, color=COLOURS[label], alpha=0.12, linewidth=0)
        panel.axhline(0, color="grey", linewidth=0.8)
        panel.set(title=column, xlabel="learning rate", ylim=(-19, 4))       # SFT-GT falls out of the frame
        panel.set_xticks(range(len(RATES)), RATES)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("points over the base")
    panels[3].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path)


def draw_tds(path: Path):
    """TDS along the decoding at 1e-3, mean over bases."""
    figure, axes = pyplot().subplots(figsize=(6, 3.8), dpi=130, layout="constrained")
    for label, name in {"base": "base", **METHODS}.items():
        curves = tds("base" if label == "base" else f"{label}@1e-3", "tds_curve")
        steps = [step for step, column in enumerate(zip(*curves, strict=False)) if None not in column]
        width = 2.4 if label == "tabom" else 1.2
        axes.plot(steps, [mean(curve[step] for curve in curves) for step in steps], label=name, color=COLOURS[label],
                  linewidth=width)
    axes.set(title="Trajectory discrimination score, rate 1e-3", xlabel="decoding step", ylabel="variance (nats²)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
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


def draw_map(source: str, path: str):
    """One decoding, position x step: colour is the entropy of what is still masked, a dot where a token was decoded."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import numpy as np

    from data import load_trajectories, model_of
    from eval import states, token_stats
    from model import load_model, load_tokenizer, read_config
    config = read_config(model_of(source))
    tok = load_tokenizer(config)
    traj = load_trajectories(source, config, tok, limit=1, everything=True)[0]
    steps, views = zip(*states(traj, tok.end_ids[0]), strict=True)
    grid = np.full((steps[-1] + 1, len(traj.step)), np.nan)
    stats = token_stats(load_model(config), views, config.mask_id, 16)
    for step, view, (_, h) in zip(steps, views, stats, strict=True):
        grid[step, view.targets] = h
    decoded = np.flatnonzero(traj.step >= 0)
    width = int(decoded.max()) + 1
    figure, axes = pyplot().subplots(figsize=(7, 4.5), dpi=160, layout="constrained")
    image = axes.imshow(grid[:, :width], aspect="auto", cmap="viridis", interpolation="nearest")
    axes.plot(decoded, traj.step[decoded], "o", color="crimson", markersize=3)
    axes.set(title="Entropy of masked positions while decoding", xlabel="position", ylabel="decoding step")
    if width <= 64:
        axes.set_xticks(range(width), [tok.decode([token]) for token in traj.response[:width].tolist()], fontsize=6,
                        rotation=90)
    figure.colorbar(image, label="entropy (nats)")
    figure.savefig(path)
    print(f"picture: {path}")


def table(head: list, rows: list) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def study() -> str:
    """The text of report.md."""
    best = select()
    n = json.loads((RESULTS / "base1/test-math/base.json").read_text())["accuracy"]["test-math/1"]["n"]
    text = ["# The toy study: what was found\n",
            f"Made by `python study/report.py study` from study/results; protocol.md says how. {len(BASES)} bases, {n} "
            "test prompts per base and domain. ± is the standard error over bases, of paired differences.\n"]

    rows = [[str(seed), *(f"{values('base', column)[i]:.1f}" for column in COLUMNS)] for i, seed in enumerate(BASES)]
    text += ["**The bases**, per cent right\n", table(["seed", *COLUMNS], rows)]

    head = ["method", "rate", *COLUMNS, "TDS over the base"]
    rows = []
    for label, rate in best.items():
        name = f"{label}@{rate}"
        rows.append([METHODS[label], rate, *(show(gain(name, column)) for column in COLUMNS),
                     show(minus(tds(name), tds("base")), 3)])
    text += ["**Each method at its selected rate**, points over the base\n", table(head, rows)]

    rows = []
    for rate in RATES:
        for label in METHODS:
            cells = ["diverged"] * len(COLUMNS)
            if rate in rates_of(label):
                cells = [show(gain(f"{label}@{rate}", column)) for column in COLUMNS]
            rows.append([METHODS[label], rate, *cells])
    text += ["**All rates**, points over the base; the same as study/rates.png\n", table(head[:-1], rows)]

    ratios = [f"0.{i}" for i in range(1, 10)]
    text += ["**Own answers**: CE of reference answers minus CE of own answers under the base, by mask ratio\n",
             table(ratios, [[show(ce_gap(ratio), 3) for ratio in ratios]])]

    text += ["**Claims**\n", table(["claim", "difference", "mean ± error", "verdict"], verdicts(best))]

    rows = []
    for rate in dict.fromkeys(["1e-3", best["tabom"]]):
        names = [path.stem for path in sorted(RESULTS.glob(f"base1/test-math/*@{rate}.json"))]
        for name in names:
            label = name.split("@")[0]
            if label not in METHODS or label in ("ce-only", "tabom"):
                rows.append([label, rate, *(show(gain(name, column)) for column in COLUMNS)])
    text += ["**Parts of the method**, points over the base\n", table(["run", "rate", *COLUMNS], rows)]

    rows = []
    for label in METHODS:
        cells = []
        for part in SWAPS:
            for k in (2, 4):
                folders = [RESULTS / f"base{seed}/swap" for seed in BASES]
                found = [swapped(folder / f"{label}@1e-3.json", part, k) for folder in folders]
                cells.append(show(minus(found, [swapped(folder / "base.json", "own", k) for folder in folders])))
        rows.append([METHODS[label], *cells])
    head = ["rate 1e-3", *(f"{title}, at {k}" for title in SWAPS.values() for k in (2, 4))]
    text += ["**The swap**, points over the base; \"own\" is the adapter's\n", table(head, rows)]
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
    elif sys.argv[1:2] == ["map"] and len(sys.argv) == 4:
        draw_map(*sys.argv[2:])
    elif sys.argv[1:] == ["study"]:
        try:
            Path("study/report.md").write_text(study())
            draw_rates(Path("study/rates.png"))
            draw_tds(Path("study/tds.png"))
            print("study/report.md, study/rates.png, study/tds.png")
        except FileNotFoundError as e:
            print(f"{e.filename}: is missing, the study is not finished; ./run.sh study continues it", file=sys.stderr)
            raise SystemExit(2) from None
    else:
        print(__doc__)
        raise SystemExit(2)
