"""
Tables and pictures of what was measured on the toy.

$ python study/report.py demo out/toy           # the last screen of ./run.sh
$ python study/report.py study                  # study/report.md and the pictures, from study/results
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
COLUMNS = {"math at 1 per step": ("math", 1), "at 2": ("math", 2), "at 4": ("math", 4), "logic": ("logic", 1)}
SPEEDS = list(COLUMNS)[:3]


def accuracy(path: Path, key: str) -> float:
    """Per cent."""
    return 100 * json.loads(path.read_text())["accuracy"][key]["share"]

# -----------------------------------------------------------------------------
# the demonstration

def demo(folder: Path):
    """One base, one training seed, a few hundred prompts: enough to see the mechanism, too little for a verdict."""
    columns = [(domain, f"test-{domain}/{k}") for domain, k in COLUMNS.values()]
    base = [accuracy(folder / domain / "base.json", key) for domain, key in columns]
    print("\nPoints over the base, which answers " + ", ".join(f"{x:.1f}" for x in base) + " % (the same columns)\n")
    print(f"{'rate':6} {'method':8} {'math 1 per step':>16} {'2 per step':>11} {'4 per step':>11} {'logic':>7}")
    for rate in ("3e-4", "1e-3"):
        for label, name in METHODS.items():
            if label == "pretrain":                      # the study's control
                continue
            row = [accuracy(folder / domain / f"{label}@{rate}.json", key) for domain, key in columns]
            gains = [f"{x - y:+.1f}" for x, y in zip(row, base, strict=True)]
            print(f"{rate:6} {name:8} {gains[0]:>16} {gains[1]:>11} {gains[2]:>11} {gains[3]:>7}")

    print("\nWhose order, whose tokens? Accuracy at 2 / 4 tokens per step, rate 1e-3")
    print(f"{'':8} {'own tokens, own order':>22} {'own tokens, base order':>23} {'base tokens, own order':>23}")
    print(f"{'base':8} {base[1]:>15.1f} / {base[2]:.1f}")
    for label in ("ce-only", "tabom"):
        result = json.loads((folder / "swap" / f"{label}@1e-3.json").read_text())
        cells = []
        for part in ("own", "adapter's tokens, base's order", "base's tokens, adapter's order"):
            found = []
            for k in (2, 4):
                key = f"test-math/{k}"
                source = result["accuracy"][key] if part == "own" else result["swap"][key][part]
                found.append(f"{100 * source['share']:.1f}")
            cells.append(" / ".join(found))
        print(f"{METHODS[label]:8} {cells[0]:>22} {cells[1]:>23} {cells[2]:>23}")
    print("""
Look at how 2 and 4 tokens per step, and logic, change from the rate 3e-4 to 1e-3: who keeps what the base could do?
The last column of the swap is about order alone: the base's own tokens, in the order that training left.""")
    print(f"\nPictures: {folder}/pictures/map-base.png (one decoding) and tds.png; trajectories: {folder}/traj.jsonl")

# -----------------------------------------------------------------------------
# the study: every value is a list over bases, so that differences are paired

def values(name: str, column: str, split="test") -> list:
    domain, k = COLUMNS[column]
    folder = f"{split}-{domain}"
    return [accuracy(RESULTS / f"base{seed}" / folder / f"{name}.json", f"{folder}/{k}") for seed in BASES]


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


def show(xs: list) -> str:
    return f"{mean(xs):+.1f} ± {error(xs):.1f}"


def select() -> dict:
    """{method: rate} by the protocol's rule, from validation prompts alone."""
    selected = {}
    for label in METHODS:
        def score(rate):
            return mean(speeds(f"{label}@{rate}", split="val"))

        def forgotten(rate):
            return -mean(gain(f"{label}@{rate}", "logic", "val"))

        keep = [rate for rate in RATES if forgotten(rate) <= 2]
        selected[label] = max(keep, key=score) if keep else min(RATES, key=forgotten)
    return selected


def verdict(xs: list, above=0.0) -> str:
    distance = mean(xs) - above
    if abs(distance) <= 2 * error(xs):
        return "not shown"
    return "shown" if distance > 0 else "contrary"


def verdicts(best: dict) -> list:
    """(claim, what is compared, differences, threshold): the claim is that their mean is above the threshold."""
    rows = []

    def claim(name, compared, differences, above=0.0):
        rows.append((name, compared, differences, above))

    selected = {label: f"{label}@{rate}" for label, rate in best.items()}
    tabom, one, fast = selected["tabom"], SPEEDS[0], SPEEDS[1:]

    for ratio in ("0.2", "0.5", "0.8"):
        curves = [json.loads((RESULTS / f"base{seed}/ce/base.json").read_text())["ce"] for seed in BASES]
        harder = [curve["ground truth"][ratio] - curve["self-distilled"][ratio] for curve in curves]
        claim("own answers are easier to fit", f"CE of references - own answers, mask ratio {ratio}", harder)

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
            claim("ranking helps", f"{column}, TABOM - CE only, {rates}", minus(gain(a, column), gain(b, column)))

    trained = {label: tds(selected[label]) for label in ["sft-gt", *OWN_ANSWERS]}
    other = max(trained, key=lambda label: mean(trained[label]))
    claim("largest TDS", "TABOM - base", minus(tds(tabom), tds("base")))
    claim("largest TDS", f"TABOM - {METHODS[other]}", minus(tds(tabom), trained[other]))

    # 2 and 4 tokens per step
    other = max(OWN_ANSWERS, key=lambda label: mean(speeds(selected[label], fast)))
    claim("robust at 2 and 4 per step", f"TABOM - {METHODS[other]}, selected rates",
          minus(speeds(tabom, fast), speeds(selected[other], fast)))
    everywhere = {}
    for label in ["tabom", *OWN_ANSWERS]:
        everywhere[label] = average([speeds(f"{label}@{rate}", fast) for rate in RATES])
    other = max(OWN_ANSWERS, key=lambda label: mean(everywhere[label]))
    claim("robust at 2 and 4 per step", f"TABOM - {METHODS[other]}, mean over all rates",
          minus(everywhere["tabom"], everywhere[other]))

    # window and margin
    for rate in dict.fromkeys([best["tabom"], "1e-3"]):
        own, wide = speeds(f"tabom@{rate}"), speeds(f"window-8@{rate}")
        claim("local beats global", f"W 4 - all, rate {rate}", minus(own, speeds(f"global@{rate}")))
        inner = max([own, wide], key=mean)
        claim("a sweet spot of W", f"best of W 4, 8 - W 2, rate {rate}", minus(inner, speeds(f"window-2@{rate}")))
        for gamma in ("0.1", "0.3"):
            claim("moderate gamma", f"gamma 0.2 - {gamma}, rate {rate}", minus(own, speeds(f"gamma-{gamma}@{rate}")))
    return rows


def tds(name: str) -> list:
    return [json.loads((RESULTS / f"base{seed}" / "test-math" / f"{name}.json").read_text())["tds"] for seed in BASES]


def swap_rows() -> list:
    rows = []
    for label in METHODS:
        cells = []
        for part in ("own", "adapter's tokens, base's order", "base's tokens, adapter's order"):
            for k in (2, 4):
                key, found = f"test-math/{k}", []
                for seed in BASES:
                    result = json.loads((RESULTS / f"base{seed}" / "swap" / f"{label}@1e-3.json").read_text())
                    source = result["accuracy"][key] if part == "own" else result["swap"][key][part]
                    found.append(100 * source["share"])
                cells.append(found)
        rows.append((METHODS[label], cells))
    return rows


def draw_rates(path: Path):
    """The study's result: points over the base against the learning rate, a line per method, a band of one error."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, panels = plt.subplots(1, 4, figsize=(13, 3.6), dpi=130, layout="constrained", sharex=True)
    for panel, column in zip(panels, COLUMNS, strict=True):
        for label, name in METHODS.items():
            gains = [gain(f"{label}@{rate}", column) for rate in RATES]
            middle = [mean(xs) for xs in gains]
            style = dict(color="crimson", linewidth=2.4) if label == "tabom" else dict(linewidth=1.2)
            line, = panel.plot(range(len(RATES)), middle, marker="o", markersize=3, label=name, **style)
            low = [m - error(xs) for m, xs in zip(middle, gains, strict=True)]
            high = [m + error(xs) for m, xs in zip(middle, gains, strict=True)]
            panel.fill_between(range(len(RATES)), low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        panel.axhline(0, color="grey", linewidth=0.8)
        panel.set(title=column, xlabel="learning rate")
        panel.set_xticks(range(len(RATES)), RATES)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("points over the base")
    panels[0].legend(frameon=False, fontsize=7)
    figure.savefig(path)


def table(head: list, rows: list) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def study():
    best = select()
    n = json.loads((RESULTS / "base1/test-math/base.json").read_text())["accuracy"]["test-math/1"]["n"]
    text = ["# The toy study: what was found\n",
            f"By `python study/report.py study` from study/results; protocol.md says how. {len(BASES)} bases, "
            f"{n} test prompts per base and domain; ± is the standard error over bases, of paired differences.\n"]

    rows = [[f"{seed}", *(f"{values('base', column)[i]:.1f}" for column in COLUMNS)] for i, seed in enumerate(BASES)]
    text += ["**The bases**, per cent right\n", table(["seed", *COLUMNS], rows)]

    rows = [[METHODS[label], rate, *(show(gain(f"{label}@{rate}", column)) for column in COLUMNS),
             show_small(tds(f"{label}@{rate}"))] for label, rate in best.items()]
    rows.append(["base", "", *[""] * len(COLUMNS), show_small(tds("base"))])
    text += ["**Each method at its selected rate**, points over the base\n",
             table(["method", "rate", *COLUMNS, "TDS"], rows)]

    rows = [[METHODS[label], rate, *(show(gain(f"{label}@{rate}", column)) for column in COLUMNS)]
            for rate in RATES for label in METHODS]
    text += ["**All rates** (study/rates.png)\n", table(["method", "rate", *COLUMNS], rows)]

    rows = []
    for claim, compared, xs, above in verdicts(best):
        shown = show(xs) if abs(mean(xs)) >= 0.5 else f"{mean(xs):+.3f} ± {error(xs):.3f}"
        rows.append([claim, compared, shown, verdict(xs, above)])
    text += ["**Claims**\n", table(["claim", "difference", "mean ± error", "verdict"], rows)]

    rows = []
    for rate in dict.fromkeys(["1e-3", best["tabom"]]):
        names = sorted({path.stem for path in RESULTS.glob(f"base1/test-math/*@{rate}.json")})
        for name in names:
            label = name.split("@")[0]
            if label not in METHODS or label in ("ce-only", "tabom"):
                rows.append([label, rate, *(show(gain(name, column)) for column in COLUMNS)])
    text += ["**Parts of the method**, points over the base\n", table(["run", "rate", *COLUMNS], rows)]

    head = ["rate 1e-3, per cent right", "own, at 2", "at 4", "own tokens in the base's order, at 2", "at 4",
            "base's tokens in its order, at 2", "at 4"]
    rows = [[name, *(f"{mean(cell):.1f} ± {error(cell):.1f}" for cell in cells)] for name, cells in swap_rows()]
    text += ["**The swap**\n", table(head, rows)]
    Path("study/report.md").write_text("\n".join(text))
    draw_rates(Path("study/rates.png"))
    print("study/report.md, study/rates.png")


def show_small(xs: list) -> str:
    return f"{mean(xs):.3f} ± {error(xs):.3f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["demo"] and len(sys.argv) == 3:
        demo(Path(sys.argv[2]))
    elif sys.argv[1:] == ["study"]:
        study()
    else:
        print(__doc__)
        raise SystemExit(2)
