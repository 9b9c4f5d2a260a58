"""
The method as a page to look at: one HTML file, without server or network, in which a slider cuts a decoding.

$ python study/page.py --model M --adapter "CE only=out/ce-only/last" TABOM=out/tabom/last --data heldout.jsonl

For every cut it shows what the model sees, the targets, their entropies in decoding order, the pairs that are out of
order, and the loss, of the base and of each adapter. Each adapter also decodes the prompts itself, in its own order.
--data comes from decode.py; give prompts that no adapter was trained on.

A first look at any trajectories, without the weights (with --model M the tokens are words instead of numbers):
$ python study/page.py --no-model --data traj.jsonl

S: states of a decoding, one before each step; N: response, W: window, V: vocabulary
"""
import base64
import hashlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import lora  # noqa: E402
from data import load_trajectories, model_info, model_of, read_answer, read_rows  # noqa: E402
from decode import decode, decoding_flags, judge_answer, make_settings  # noqa: E402
from eval import name_adapters  # noqa: E402
from model import entropy, load_model, load_tokenizer, read_config  # noqa: E402
from tabom import collate, tabom_loss, tabom_view  # noqa: E402
from util import Bar, Parser, count, setup_device, stop, write_whole  # noqa: E402

TEMPLATE = Path(__file__).with_name("page_template.html")


def parse_args(argv=None):
    parser = Parser(__doc__)
    flag = parser.add_argument
    flag("--model", help="hub name or folder (default: the model that the trajectories name)")
    flag("--adapter", nargs="*", default=[], help="adapter folders, DIR or NAME=DIR")
    flag("--no-model", action="store_true", help="show what the records hold, and nothing else")
    flag("--data", required=True, help="trajectories from decode.py")
    flag("--limit", type=count, default=6, help="only the first records of --data; 0 = all")
    flag("--all", action="store_true", help="show unfinished and wrong responses too")
    flag("--window", type=count, default=32, help="W")
    flag("--lam", type=float, default=1.0, help="weight of the ranking loss")
    flag("--gamma", type=float, default=0.2, help="margin of the hinge, in nats")
    flag("--batch-size", type=int, default=16, help="states per forward")
    flag("--dtype", choices=["bf16", "fp32"], help="of the weights (default: bf16 if the GPU has it, else fp32)")
    flag("--out", default="page.html")
    parser.set_defaults(no_base=False)                     # for name_adapters: the base is always shown
    args = parser.parse_args(argv)
    if args.window < 2:
        stop(f"--window {args.window}: one token makes no pair to rank; use --window 2 or more")
    if args.lam == 0:
        stop("--lam 0: the page shows the ranking, of adapters trained without it too; leave the flag out")
    if args.no_model and args.adapter:
        stop("--no-model, --adapter: an adapter shows nothing without its model; give one of them")
    return args

# -----------------------------------------------------------------------------
# without a model

class NumbersForWords:
    """In place of a tokenizer, when there is only the file: a token is shown as its number."""
    end_ids = all_special_ids = ()                         # not known, so no record counts as unfinished

    def decode(self, ids, **_):
        return "".join(f" {token}" for token in ids)


def config_from(source: str):
    """What the first record says about its model: enough to check the other records by."""
    name = model_of(source)                                # stops if it names none
    _, row = next(read_rows(source))
    info = model_info(row)
    return Namespace(name=name, mask_id=info["mask_id"], vocab=info["vocab_size"], positions=sys.maxsize)

# -----------------------------------------------------------------------------
# with a model

class CutAt:
    """In place of tabom_view's random numbers: the cut is before the step that we name."""
    def __init__(self, step):
        self.step = step

    def choice(self, cuts):
        self.in_training = bool(self.step in cuts)         # False: too near the end for a whole window
        return self.step


def states(traj) -> np.ndarray:
    """The steps of a decoding that decoded something, ascending. Cut k is before the k-th of them."""
    return np.unique(traj.step[traj.order])


def cut_everywhere(traj, window: int):
    """The view at every cut, and whether training may draw that cut."""
    cuts = [CutAt(step) for step in states(traj)]
    views = [tabom_view(traj, cut, window) for cut in cuts]
    return views, [cut.in_training for cut in cuts]


@torch.no_grad()
def measure(model, traj, args):
    """
    One model in every state of a decoding. Returns as tabom_loss gives them loss, ce, rank_loss and in_order, (S, 4);
    entropy and -log p of the targets, (S, W) each; and the entropy of all masked positions, (S, N), nan where known.
    """
    mask_id, device = model.config.mask_id, next(model.parameters()).device
    views, _ = cut_everywhere(traj, args.window)
    losses = np.zeros((len(views), 4))
    h, ce = np.zeros((2, len(views), args.window))
    grid = np.full((len(views), len(traj.step)), np.nan)
    for start in range(0, len(views), args.batch_size):
        # one forward for a state: its targets first, then whatever else is masked
        chunk = views[start:start + args.batch_size]
        masked = []
        for view in chunk:
            others = np.setdiff1d(np.flatnonzero(~view.visible), view.targets)
            masked.append(view._replace(targets=np.append(view.targets, others)))
        batch = collate(masked, mask_id, device)
        logits = model(batch.ids, batch.attend, batch.pos)
        for b, view in enumerate(chunk):
            k, n, positions = start + b, len(view.targets), masked[b].targets
            logp = F.log_softmax(logits[b, :len(positions)].float(), dim=-1)
            grid[k, positions] = entropy(logp).cpu()
            window = collate([view], mask_id, device)
            loss, parts = tabom_loss(logp[None, :n], window, args)
            losses[k] = [value.item() for value in (loss, parts["ce"], parts["rank_loss"], parts["in_order"])]
            h[k, :n] = grid[k, view.targets]
            ce[k, :n] = -logp[:n].gather(-1, window.x0[0, :, None])[:, 0].cpu()
    return losses, h, ce, grid


def decode_again(model, traj, place, row, config, tok):
    """The same prompt, decoded by the model as it is now, with the settings that the record names."""
    flags = vars(decoding_flags().parse_args([]))
    logged = row["decode"] if isinstance(row.get("decode"), dict) else {}
    flags |= {name: value for name, value in logged.items() if name in flags}
    flags["length"] = len(traj.response)
    if flags["tokens_per_step"] or flags["threshold"] is not None:
        flags["steps"] = 0                                 # records name both; a command may give one
    s = make_settings(Namespace(**flags), config, tok.end_ids)
    again = next(decode(model, [(str(traj.id), traj.prompt)], s))
    judge_answer(again, {"answer": read_answer(place, row), "kind": row.get("kind")}, tok)
    return again

# -----------------------------------------------------------------------------
# the page

def split_text(ids, tok) -> list[str]:
    """The text that each token adds. A character of several tokens comes with the last of them."""
    words, before = [], ""
    for i in range(len(ids)):
        text = tok.decode(ids[:i + 1]).rstrip("\ufffd")
        words.append(text[len(before):])
        before = text
    return words


def pack(array, kind: str) -> str:
    """Numbers as base64: no digit is lost, and it is shorter than JSON."""
    return base64.b64encode(array.astype(kind).tobytes()).decode()


def describe(by: str, traj, tok, window: int) -> dict:
    """A decoding as the page reads it. row: the state in which a token was decoded, -1 = never."""
    words = split_text(traj.response.tolist(), tok)
    for i, token in enumerate(traj.response):
        if traj.step[i] < 0 or token in tok.end_ids:
            words[i] = "∎" if traj.step[i] >= 0 else ""
    _, in_training = cut_everywhere(traj, window)
    return {"by": by, "correct": traj.correct, "words": words, "order": traj.order.tolist(),
            "row": np.where(traj.step < 0, -1, np.searchsorted(states(traj), traj.step)).tolist(),
            "inTraining": in_training, "models": []}


def add_model(decoding: dict, measured, top: float):
    """The map needs colours only: 255 shades from 0 to the highest entropy, and 255 where a token is known."""
    losses, h, ce, grid = measured
    shade = np.nan_to_num(grid / top * 254, nan=255).round()
    mean = losses[decoding["inTraining"]].mean(0).tolist()
    decoding["models"].append({"losses": pack(losses, "<f4"), "h": pack(h, "<f4"), "ce": pack(ce, "<f4"),
                               "map": pack(shade, "u1"), "mean": mean})


def fill_template(data: dict) -> str:
    """The page. Only its own script may run: the policy in its head names the script's checksum."""
    page = TEMPLATE.read_text("utf-8")
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # text could leave its <script> only by a "<"; json.dumps escapes all that is not ASCII
    return page.replace("{{CHECKSUM}}", checksum).replace("{{DATA}}", json.dumps(data).replace("<", "\\u003c"))


def rows_by_id(source: str) -> dict:
    """{id of the trajectory: (place, row)}; what a Trajectory leaves out is read from the row."""
    rows = {}
    for number, (place, row) in enumerate(read_rows(source)):
        id = row.get("id")
        if id is None:
            id = number
        if str(id) in rows:
            stop(f"{place}: id {id!r} appears twice; every record needs an id of its own")
        rows[str(id)] = place, row
    return rows


def main():
    args = parse_args()

    # trajectories, and the rows that they were read from
    if args.no_model and not args.model:
        config, tok = config_from(args.data), NumbersForWords()
        args.all = True
    else:
        config = read_config(args.model or model_of(args.data))
        tok = load_tokenizer(config)
    adapters = {} if args.no_model else name_adapters(args)
    trajs = load_trajectories(args.data, config, tok, everything=args.all, limit=args.limit)
    rows = rows_by_id(args.data)

    # a record is a prompt and its decodings: what --data holds first, each adapter's own behind it
    records = []
    for traj in trajs:
        _, row = rows[str(traj.id)]
        if isinstance(tok, NumbersForWords):
            traj.correct = row.get("correct")              # nothing here could judge it
        logged = row["decode"] if isinstance(row.get("decode"), dict) else {}
        first = describe(logged.get("adapter") or "base", traj, tok, args.window)
        if args.no_model:
            for name in ("entropy", "confidence"):
                first[name] = [None if np.isnan(x) else float(x) for x in getattr(traj, name)]
        prompt = row.get("prompt")
        if not isinstance(prompt, str):
            prompt = tok.decode([token for token in traj.prompt.tolist() if token not in tok.all_special_ids])
        records.append({"prompt": prompt, "response": row.get("response"), "decodings": [first]})

    # one model, one adapter after the other
    measured = []                                          # (decoding, what measure returned)
    if adapters:
        _, _, device, dtype = setup_device(args.dtype)
        model, bar = load_model(config, device, dtype), Bar(len(adapters) * len(trajs), "decodings")
        for number, (name, folder) in enumerate(adapters.items()):
            if folder:
                lora.load(model, folder)
            for n, (traj, record) in enumerate(zip(trajs, records, strict=True), 1):
                measured.append((record["decodings"][0], measure(model, traj, args)))
                if folder:
                    again = decode_again(model, traj, *rows[str(traj.id)], config, tok)
                    record["decodings"].append(describe(name, again, tok, args.window))
                    measured.append((record["decodings"][-1], measure(model, again, args)))
                bar(number * len(trajs) + n)
    found = [grid for _, (_, _, _, grid) in measured] or [traj.entropy for traj in trajs]
    top = max(float(np.nanmax(h, initial=1e-9)) for h in found)
    for decoding, found in measured:
        add_model(decoding, found, top)

    data = {"names": list(adapters), "window": args.window, "lam": args.lam, "gamma": args.gamma, "top": top,
            "numbers": isinstance(tok, NumbersForWords), "model": config.name, "source": args.data, "records": records}
    page = fill_template(data)
    write_whole(args.out, page.encode())
    print(f"{args.out}: {len(records)} records, {len(adapters)} models, {len(page) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
