"""
Tables and pictures of what was measured on the toy.

$ python study/report.py demo out/toy           # the last screen of ./run.sh
"""
import json
import sys
from pathlib import Path

METHODS = {"sft-gt": "SFT-GT", "sft-sd": "SFT-SD", "dinfer": "dInfer", "t3d": "T3D",
           "ce-only": "CE only", "tabom": "TABOM"}


def accuracy(path: Path, key: str) -> float:
    """Per cent."""
    return 100 * json.loads(path.read_text())["accuracy"][key]["share"]


def demo(folder: Path):
    """One base, one training seed, a few hundred prompts: enough to see the mechanism, too little for a verdict."""
    columns = [("math", f"test-math/{k}") for k in (1, 2, 4)] + [("logic", "test-logic/1")]
    base = [accuracy(folder / domain / "base.json", key) for domain, key in columns]
    print("\nPoints over the base, which answers " + ", ".join(f"{x:.1f}" for x in base) + " % (the same columns)\n")
    print(f"{'rate':6} {'method':8} {'math 1 per step':>16} {'2 per step':>11} {'4 per step':>11} {'logic':>7}")
    for rate in ("3e-4", "1e-3"):
        for label, name in METHODS.items():
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


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "demo":
        print(__doc__)
        raise SystemExit(2)
    demo(Path(sys.argv[2]))
