"""
The method in one picture, drawn from a real decoding: decode, cut, learn.

$ python study/schematic.py --model study/base --data out/toy/heldout.jsonl

It takes the first cut whose window has all three kinds of pairs (out of order, in order by less than gamma, in order by
more), and few enough that cost something to list them.

W: window
"""
import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from data import load_trajectories  # noqa: E402
from model import load_model, load_tokenizer, read_config  # noqa: E402
from page import cut_everywhere, measure, split_text, states  # noqa: E402
from util import Parser, stop, write_whole  # noqa: E402

W, LAM, GAMMA = 4, 1.0, 0.2
WIDTH, HEIGHT = 880, 452
# the picture brings its own background, so that it is readable on any page
STYLE = """
svg { --card: #fff; --ink: #1b2530; --soft: #56626e; --line: #d3d9de; --known: #f0f2f4; --masked: #bad3e7;
  --good: #6f9dc8; --bad: #b63d00; --near: #8a6300 }
@media (prefers-color-scheme: dark) { svg { --card: #161b22; --ink: #e5ebf0; --soft: #a3b0bc; --line: #39444f;
  --known: #232b34; --masked: #28577b; --good: #4a82b3; --bad: #ff9257; --near: #e3b653 } }
text { font: 13px Helvetica, Arial, "DejaVu Sans", sans-serif; fill: var(--ink) }
.mid { text-anchor: middle }  .end { text-anchor: end }  .soft { fill: var(--soft) }  .bold { font-weight: 700 }
.head { font-size: 15.5px }  .word { font: 13px Menlo, Consolas, "DejaVu Sans Mono", monospace; text-anchor: middle }
.disc { fill: var(--ink) }  .number { fill: var(--card); font-weight: 700; text-anchor: middle }
.card { fill: var(--card); stroke: var(--line) }  .known { fill: var(--known) }
.masked, .target { fill: var(--masked) }  .target { stroke: var(--ink); stroke-width: 2 }
.line { stroke: var(--line); fill: none }  .good { fill: var(--good) }
.bad { fill: var(--bad) }  .none { fill: var(--soft) }
.near { fill: none; stroke: var(--near); stroke-width: 2.5 }
rect.bad { fill: url(#hatch); stroke: var(--bad); stroke-width: 1.5 }
#hatch path { stroke: var(--bad); stroke-width: 3 }
"""


class Picture:
    def __init__(self):
        self.parts = []

    def text(self, x, y, words, kind=""):
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(words)}</text>')

    def box(self, x, y, width, height, kind, radius=4):
        self.parts.append(f'<rect x="{x:.0f}" y="{y:.1f}" width="{width:.0f}" height="{height:.1f}" rx="{radius}" '
                          f'class="{kind}"/>')

    def disc(self, x, y, radius, kind):
        self.parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{radius:.1f}" class="{kind}"/>')

    def line(self, path):
        self.parts.append(f'<path d="{path}" class="line"/>')

    def heading(self, y, number, name, sentence):
        self.disc(33, y - 5, 11, "disc")
        self.text(33, y, str(number), "number")
        self.parts.append(f'<text x="54" y="{y}" class="head"><tspan class="bold">{name}</tspan> {sentence}</text>')

    def save(self, path):
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
                f'height="{HEIGHT}" role="img" aria-labelledby="t"><title id="t">TABOM in three steps: decode and log '
                f'the steps, cut, learn the next tokens and their order</title><style>{STYLE}</style><defs><pattern '
                f'id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path '
                f'd="M2 0V7"/></pattern></defs>')
        self.box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "card", radius=10)
        self.parts.insert(0, self.parts.pop())
        write_whole(path, "\n".join([head, *self.parts, "</svg>\n"]).encode())


def hinges(h) -> dict:
    """{(r, s): what the pair costs}"""
    return {(r, s): max(0.0, h[r] - h[s] + GAMMA) for s in range(W) for r in range(s)}


def shows_all(h) -> bool:
    """Whether a window has all three kinds of pairs, at most three that cost something, and bars that differ."""
    cost = hinges(h)
    if min(abs(h[r] - h[s]) for r, s in cost) < 0.03:
        return False
    wrong = sum(h[r] >= h[s] for r, s in cost)
    paid = sum(value > 0 for value in cost.values())
    return 0 < wrong < paid <= 3


def place_words(words) -> list[tuple]:
    """(x, width) of each token's box, in one line."""
    places, x = [], 22.0
    for word in words:
        width = max(20, 7.9 * len(word) + 8)
        places.append((x, width))
        x += width + (10 if word == ";" else 4)
    return places


def find_moment(model, trajs, tok, args):
    """The first decoding that fits into one line, and the first of its cuts that shows all kinds of pairs."""
    for traj in trajs:
        words = [word.strip() for word in split_text(traj.response.tolist(), tok)]
        ends = [i for i, token in enumerate(traj.response) if token in tok.end_ids]
        words = words[:ends[0]]
        x, width = place_words(words)[-1]
        if x + width > WIDTH - 80:
            continue
        losses, h, ce, _ = measure(model, traj, args)
        views, in_training = cut_everywhere(traj, W)
        for k, step in enumerate(states(traj)):
            targets = views[k].targets.tolist()
            if in_training[k] and max(targets) < len(words) and shows_all(h[k]):
                return traj, words, step, targets, losses[k], h[k], ce[k]
    stop(f"{args.data}: no decoding of one line has a cut with all kinds of pairs; decode more prompts")


def draw(prompt, traj, words, step, targets, losses, h, ce) -> Picture:
    _, mean_ce, rank_loss, _ = losses
    picture, places = Picture(), place_words(words)

    picture.heading(34, 1, "Decode.", "The model answers, and the step of each token is logged.")
    picture.text(858, 34, f"prompt: {prompt}", "soft end")
    for (x, width), word, at in zip(places, words, traj.step, strict=False):
        picture.box(x, 50, width, 26, "known")
        picture.text(x + width / 2, 68, word, "word")
        picture.text(x + width / 2, 93, str(at + 1), "soft mid")
    x = sum(places[-1]) + 10
    picture.text(x, 93, "← step", "soft")

    picture.heading(132, 2, "Cut.", f"Before a random step, here {step + 1}. What came earlier is visible. The next "
                                    f"W = {W} tokens are the targets.")
    for i, ((x, width), word) in enumerate(zip(places, words, strict=True)):
        visible = traj.step[i] < step
        picture.box(x, 164, width, 26, "target" if i in targets else "known" if visible else "masked")
        if visible:
            picture.text(x + width / 2, 182, word, "word")
        if i in targets:
            picture.text(x + width / 2, 182, "?", "word")
            picture.text(x + width / 2, 157, str(targets.index(i) + 1), "bold mid")

    picture.heading(228, 3, "Learn", "the targets, and their order, from one forward at the cut.")
    picture.text(54, 256, "ce", "bold")
    picture.text(76, 256, "predict the targets", "soft")
    for n, i in enumerate(targets):
        y = 286 + 26 * n
        width = max(20, 7.9 * len(words[i]) + 8)
        picture.text(60, y, str(n + 1), "bold mid")
        picture.box(74, y - 16, width, 22, "target")
        picture.text(74 + width / 2, y, words[i], "word")
        picture.text(146, y, f"−log p = {ce[n]:.2f}", "soft")
    picture.text(54, 398, f"mean over {W} targets: {mean_ce:.2f}", "bold")
    picture.line("M262 246V402")

    # entropies as bars, one scale for all
    left, floor, gap = 292, 372, 54
    scale = 72 / max(h)
    picture.text(left, 256, "rank_loss", "bold")
    picture.text(left + 66, 256, "the entropy h should rise in decoding order", "soft")
    for n in range(W):
        wrong = any(h[r] >= h[n] for r in range(n))
        x = left + n * gap
        picture.box(x, floor - h[n] * scale, 38, h[n] * scale, "bad" if wrong else "good", radius=1)
        picture.text(x + 19, floor - h[n] * scale - 6, f"{h[n]:.2f}", "soft mid")
        picture.text(x + 19, floor + 18, str(n + 1), "bold mid")
    picture.line(f"M{left - 6} {floor + .5}H{left + W * gap - 8}")

    # what the pairs cost; the area of a disc is the hinge
    cost = hinges(h)
    y, free = 290, 0
    for (r, s), value in sorted(cost.items(), key=lambda item: -item[1]):
        if value == 0:
            free += 1
            continue
        wrong = h[r] >= h[s]
        picture.disc(556, y - 5, max(3.5, 15 * value ** 0.5), "bad" if wrong else "near")
        picture.text(580, y, f"{r + 1} before {s + 1}:")
        picture.text(652, y, f"{h[r]:.2f} − {h[s]:.2f} + γ = {value:.2f}", "soft")
        picture.text(858, y, "out of order" if wrong else "within γ", "soft end")
        y += 27
    picture.disc(556, y - 5, 2, "none")
    picture.text(580, y, f"{free} others:")
    picture.text(652, y, "0", "soft")
    picture.text(858, y, "in order", "soft end")
    picture.text(580, 398, f"mean over {len(cost)} pairs: {rank_loss:.2f}", "bold")

    picture.text(22, 434, "loss = ce + λ · mean over pairs, r before s, of max(0, h(r) − h(s) + γ)", "bold")
    picture.text(858, 434, f"= {mean_ce:.2f} + λ · {rank_loss:.2f}, γ = {GAMMA}", "soft end")
    return picture


def main():
    parser = Parser(__doc__)
    parser.add_argument("--model", default="study/base", help="hub name or folder")
    parser.add_argument("--data", required=True, help="trajectories of the model, from decode.py")
    parser.add_argument("--out", default="study/schematic.svg")
    parser.set_defaults(window=W, lam=LAM, gamma=GAMMA, batch_size=16)
    args = parser.parse_args()
    config = read_config(args.model)
    tok = load_tokenizer(config)
    trajs = load_trajectories(args.data, config, tok)
    traj, words, step, *numbers = find_moment(load_model(config), trajs, tok, args)
    draw(tok.decode(traj.prompt.tolist()), traj, words, step, *numbers).save(args.out)
    print(f"{args.out}: record {traj.id}, cut before step {step + 1}")


if __name__ == "__main__":
    main()
