"""
Measures a model and any number of LoRA adapters on it.

Accuracy at 1 and 2 tokens per step, TDS, order agreement, cross-entropy against mask ratio, and pictures of them:
$ python eval.py --model M --adapter sft=out/sft/epoch-5 tabom=out/tabom/epoch-5 --prompts math.jsonl logic.jsonl \\
      --parallel 1 2 --tds 64 --order heldout.jsonl --ce gt.jsonl traj.jsonl --pictures --out results

Benchmarks, by lm-evaluation-harness with the paper's decoding table:
$ torchrun --nproc_per_node 8 eval.py --model M --adapter out/tabom/epoch-5 --tasks gsm8k_cot,minerva_math500

Every number goes to OUT/NAME.json with settings, versions and hardware; what is there is not measured again. "base" is
the model without an adapter.
"""
import importlib.util
import json
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import lora
from data import Trajectory, first_end, load_trajectories, read_lines, read_prompts, read_trajectory
from decode import add_decoding_flags, decode, encode_prompts, entropy, make_record, make_settings, record_head
from model import load_model, load_tokenizer, read_config
from tabom import collate, sample_view
from tabom import parse_args as tabom_args
from util import Bar, about_run, init_process_group, new_parser, read_json, setup_device, stop, write_whole

# the paper's decoding table: response tokens = steps, and LLaDA's block; IFEval is not in it: 512, one block.
# The last entry is --suppress-eos, by which the release decodes code with LLaDA
BENCHMARKS = {
    "Dream": {"gsm8k": (256, 0, None), "math500": (512, 0, None), "mbpp": (1024, 0, None), "humaneval": (768, 0, None),
              "ifeval": (512, 0, None)},
    "llada": {"gsm8k": (512, 8, None), "math500": (512, 64, None), "mbpp": (256, 0, "confidence"),
              "humaneval": (512, 0, "logits"), "ifeval": (512, 0, None)},
}


def parse_args(argv=None):
    parser = new_parser(__doc__)
    parser.add_argument("--model", required=True, help="hub name or folder")
    parser.add_argument("--adapter", nargs="*", default=[], help="adapter folders, DIR or NAME=DIR")
    parser.add_argument("--no-base", action="store_true", help="do not measure the model without an adapter")
    parser.add_argument("--out", default="results", help="folder for JSON and pictures")
    # what to measure
    parser.add_argument("--prompts", nargs="*", default=[],
                        help="prompts with answers; a file's stem names the domain")
    parser.add_argument("--parallel", type=int, nargs="+", default=[],
                        help="accuracy at these numbers of tokens per step")
    parser.add_argument("--tds", type=int, default=0,
                        help="trajectories for TDS, of the first file of --prompts")
    parser.add_argument("--order", help="held-out trajectories for the share of pairs in order")
    parser.add_argument("--window", type=int, default=32, help="W of --order")
    parser.add_argument("--ce", nargs=2, metavar=("GT", "SD"),
                        help="cross-entropy of the base against mask ratio")
    parser.add_argument("--swap", action="store_true",
                        help="also the adapter's tokens in the base's order, and the reverse")
    parser.add_argument("--keep", action="store_true", help="keep the decoded records")
    parser.add_argument("--pictures", action="store_true", help="draw what was measured")
    # lm-evaluation-harness
    parser.add_argument("--tasks", help="harness tasks, separated by commas")
    parser.add_argument("--task-path", help="folder with harness tasks of your own")
    parser.add_argument("--num-fewshot", type=int, default=0)
    parser.add_argument("--confirm-run-unsafe-code", action="store_true",
                        help="code tasks may run what a model wrote")
    add_decoding_flags(parser)
    parser.set_defaults(length=None)                     # not given: the benchmark's own, else 256
    args = parser.parse_args(argv)
    if args.tasks and (args.prompts or args.order or args.ce or args.parallel):
        stop("--tasks: is measured alone; its tokens per step are --tokens-per-step")
    if args.parallel and (args.steps or args.tokens_per_step or args.threshold is not None):
        stop("--parallel: sets the tokens per step; give it without --steps, --tokens-per-step and --threshold")
    if not (args.tasks or args.prompts or args.order or args.ce):
        stop("nothing to measure: give --prompts, --order, --ce or --tasks")
    domains = [Path(path).stem for path in args.prompts]
    if len(set(domains)) < len(domains):
        stop(f"--prompts {' '.join(args.prompts)}: two files have one stem, which names the domain; rename one")
    if args.tds and not args.prompts:
        stop(f"--tds {args.tds}: is measured while prompts are decoded; give --prompts")
    if args.pictures and not importlib.util.find_spec("matplotlib"):
        stop("--pictures: needs a package: pip install matplotlib")
    return args

# -----------------------------------------------------------------------------
# decoding, shared by the ranks

def decode_items(model, tok, config, items, s, args, label, token_model=None):
    """The records of all items, in their order. Each rank decodes its share and reads the others' from files."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    head = record_head(args, config, s, tok, next(model.parameters()).dtype)
    prompts = sorted(encode_prompts(items, tok, config, s, args.raw_prompt), key=lambda prompt: len(prompt[1]))
    mine = prompts[rank::world_size]
    by_id = {str(item["id"]): item for item in items}
    records, bar = {}, Bar(len(mine), label)
    for row in decode(model, mine, s, args.batch_size, token_model):
        records[row.id] = make_record(row, by_id[row.id], tok, s, head)
        bar(len(records))
    if world_size > 1:
        out = Path(args.out)
        write_whole(out / f"rank-{rank}.json", json.dumps(records).encode())
        dist.barrier()
        for other in range(world_size):
            records |= read_json(out / f"rank-{other}.json")
        dist.barrier()                                   # all have read before anybody writes again
        (out / f"rank-{rank}.json").unlink()
    return [records[str(item["id"])] for item in items]

# -----------------------------------------------------------------------------
# measures

def accuracy(records) -> dict:
    right = sum(record["correct"] is True for record in records)
    return {"right": right, "n": len(records), "share": right / len(records)}


class WithoutAdapter(torch.nn.Module):
    """The frozen base inside a model that has an adapter."""
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *batch):
        with lora.disabled(self.model):
            return self.model(*batch)


def swap(model, tok, config, items, s, args, label) -> dict:
    """
    Order or knowledge? One of base and adapter chooses the positions, the other their tokens. If an adapter's tokens
    are as good as the base's in the base's order, and not in its own, training has spoiled the order and nothing else.
    """
    base = WithoutAdapter(model)
    return {
        "adapter's tokens, base's order": accuracy(decode_items(base, tok, config, items, s, args, label, model)),
        "base's tokens, adapter's order": accuracy(decode_items(model, tok, config, items, s, args, label, base)),
    }


@torch.no_grad()
def token_stats(model, views, mask_id, batch_size):
    """views: list of (traj, visible, targets). Yields cross-entropy and entropy of each view's targets, two arrays."""
    device = next(model.parameters()).device
    for i in range(0, len(views), batch_size):
        chunk = views[i:i + batch_size]
        ids, attend, pos, x0, _ = collate(chunk, mask_id, device)
        logits = model(ids, attend, pos)                                         # (B, W, V)
        for b, (_, _, targets) in enumerate(chunk):                              # row by row: (W, V) in fp32 is large
            z = logits[b, :len(targets)].float()
            ce = torch.nn.functional.cross_entropy(z, x0[b, :len(targets)], reduction="none")
            yield ce.cpu().numpy(), entropy(z).cpu().numpy()


def states(traj, end_ids):
    """
    (step, visible, masked) for each step of a decoding: what the decoder saw. masked: the positions still masked, left
    of the leftmost end token that was decoded by then (before there is one: all).
    """
    N = len(traj.step)
    is_end = np.isin(traj.response, end_ids)
    for step in np.unique(traj.step[traj.step >= 0]):
        visible = (traj.step >= 0) & (traj.step < step)
        ends = np.flatnonzero(visible & is_end)
        limit = ends[0] if len(ends) else N
        yield int(step), visible, np.flatnonzero(~visible & (np.arange(N) < limit))


def tds_curve(model, trajs, config, end_ids, batch_size) -> list:
    """TDS(t), Eq. 11: the variance of the entropies of masked positions at step t, mean over trajectories."""
    views, steps = [], []
    for traj in trajs:
        for step, visible, masked in states(traj, end_ids):
            if len(masked) >= 2:
                views.append((traj, visible, masked))
                steps.append(step)
    by_step = {}
    for step, (_, h) in zip(steps, token_stats(model, views, config.mask_id, batch_size), strict=True):
        by_step.setdefault(step, []).append(h.var())
    last = max(by_step, default=-1)
    return [float(np.mean(by_step[step])) if step in by_step else None for step in range(last + 1)]


def order_agreement(model, trajs, config, window, batch_size, cuts=4) -> float:
    """The share of pairs in held-out windows whose earlier-decoded token has the lower entropy (Eq. 7)."""
    args = tabom_args(["--data", "-", "--window", str(window)])
    views = []
    for n, traj in enumerate(trajs):
        for cut in range(cuts):
            views.append((traj, *sample_view(traj, args, np.random.default_rng([cut, n]))))
    in_order = []
    for _, h in token_stats(model, views, config.mask_id, batch_size):
        r, s = np.triu_indices(len(h), 1)
        in_order.append(h[r] < h[s])
    return float(np.concatenate(in_order).mean())


def ce_by_ratio(model, trajs, config, end_ids, batch_size) -> dict:
    """{mask ratio: cross-entropy of the masked tokens up to the first end}: the paper's loss_comparison figure."""
    curve = {}
    for ratio in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        views = []
        for n, traj in enumerate(trajs):
            end = first_end(traj.response, traj.step, end_ids)
            body = np.arange(len(traj.response) if end is None else end + 1)
            rng = np.random.default_rng([int(100 * ratio), n])
            masked = rng.permutation(body)[:max(1, round(ratio * len(body)))]
            visible = np.zeros(len(traj.step), dtype=bool)       # what follows the end is masked, in both files
            visible[np.setdiff1d(body, masked)] = True
            views.append((traj, visible, masked))
        ces = [ce for ce, _ in token_stats(model, views, config.mask_id, batch_size)]
        curve[f"{ratio:.1f}"] = float(np.concatenate(ces).mean())
    return curve


def to_trajectories(records, config, tok):
    flags = tabom_args(["--data", "-", "--all"])
    trajs = [read_trajectory(f"record {n}", record, n, flags, config, tok) for n, record in enumerate(records)]
    return [traj for traj in trajs if isinstance(traj, Trajectory)]


def read_all(path, config, tok, length, method="tabom"):
    """Every record of a file, finished or not, as Trajectories."""
    flags = ["--data", str(path), "--all", "--method", method, "--length", str(length)]
    return load_trajectories(tabom_args(flags), config, tok)


def read_pair(args, config, tok):
    """The two files of --ce, reduced to the prompts that both hold and whose own answer was not judged wrong."""
    right = {str(row["id"]) for _, row in read_lines(args.ce[1]) if row.get("correct") is not False}
    pair = [read_all(path, config, tok, args.length, "sft") for path in args.ce]
    common = right & {str(traj.id) for traj in pair[0]} & {str(traj.id) for traj in pair[1]}
    if not common:
        stop(f"--ce {args.ce[0]} {args.ce[1]}: have no id in common; give two files of the same prompts")
    kept = [[traj for traj in trajs if str(traj.id) in common] for trajs in pair]
    return dict(zip(("ground truth", "self-distilled"), kept, strict=True))

# -----------------------------------------------------------------------------
# lm-evaluation-harness

class ShareDecoded(Exception):
    """Raised on ranks other than 0 after decoding: only rank 0 scores, because scoring may run generated code."""


def benchmark_settings(task: str, model_type: str):
    """(length, block, suppress_eos) of the table above, or None."""
    for name, setting in BENCHMARKS.get(model_type, {}).items():
        if name in task.replace("-", ""):
            return setting
    return None


def cut_at(text: str, stops) -> str:
    """The text up to the first of the harness's stop strings."""
    if isinstance(stops, str):
        stops = [stops]
    for stop_text in stops or []:
        if stop_text:
            text = text.partition(stop_text)[0]
    return text


class Harness:
    """Our decoder as a model of the harness. new_harness makes it a subclass of lm_eval's LM, an optional package."""
    def __init__(self, args):
        super().__init__()
        self.args, self.adapter, self.texts, self.net = args, None, [], None
        self.config = read_config(args.model)
        self.tok = load_tokenizer(self.config)

    @property
    def tokenizer_name(self):
        return self.config.name.replace("/", "__")

    def chat_template(self, chat_template=False):
        return self.tok.chat_template or ""

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.tok.apply_chat_template(chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                                            continue_final_message=not add_generation_prompt, enable_thinking=False)

    def loglikelihood(self, requests):
        stop("--tasks: these models decode; tasks that need log-likelihoods are not built (README)")

    loglikelihood_rolling = loglikelihood

    def load(self):
        if self.net is None:
            _, _, device, dtype = setup_device(self.args.dtype)
            self.net = load_model(self.config, device, dtype)
        if self.adapter:
            lora.load(self.net, self.adapter)

    def task_args(self, task, own_length):
        """The benchmark's own length and block, unless flags say otherwise; the harness applies the chat template."""
        own = benchmark_settings(task, self.config.model_type) or (own_length, 0, None)
        length, block, suppress_eos = own
        changed = {"raw_prompt": True, "length": self.args.length or length, "block": self.args.block or block,
                   "suppress_eos": self.args.suppress_eos or suppress_eos}
        return Namespace(**vars(self.args) | changed)

    def generate_until(self, requests):
        # one item per question; its id, and so its random numbers, do not depend on what else is asked
        tasks, asked = {}, Counter()
        for n, request in enumerate(requests):
            place = f"{request.task_name}/{request.doc_id}"
            item = {"id": f"{place}/{asked[place]}", "place": place, "prompt": request.args[0], "answer": None,
                    "kind": None, "number": n}
            asked[place] += 1
            tasks.setdefault(request.task_name, []).append(item)
        self.load()
        texts = {}
        for task, items in tasks.items():
            args = self.task_args(task, requests[items[0]["number"]].args[1].get("max_gen_toks", 256))
            s = make_settings(args, self.config, self.tok.end_ids)
            records = decode_items(self.net, self.tok, self.config, items, s, args, task)
            for item, record in zip(items, records, strict=True):
                request = requests[item["number"]]
                texts[item["number"]] = cut_at(record["response"], request.args[1].get("until"))
                self.texts.append({"task": task, "doc_id": request.doc_id, "text": texts[item["number"]]})
        if dist.is_initialized() and dist.get_rank() > 0:
            raise ShareDecoded
        return [texts[n] for n in range(len(requests))]


def new_harness(args):
    if not importlib.util.find_spec("lm_eval"):
        stop("--tasks: needs a package: pip install -r requirements-dev.txt")
    from lm_eval.api.model import LM
    return type("TabomLM", (Harness, LM), {})(args)


def run_benchmarks(args, adapters: dict, out: Path, about: dict):
    """The harness's results for the base and each adapter; the weights are loaded once."""
    lm = new_harness(args)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    names = args.tasks.split(",")
    # the harness's own tasks are many and slow to index
    manager = TaskManager(include_path=args.task_path, include_defaults=not args.task_path)
    for name, folder in adapters.items():
        lm.adapter, lm.texts = folder, []
        try:
            found = simple_evaluate(lm, tasks=names, num_fewshot=args.num_fewshot, limit=args.limit or None,
                                    log_samples=False, bootstrap_iters=0, task_manager=manager,
                                    apply_chat_template=bool(lm.tok.chat_template and not args.raw_prompt),
                                    confirm_run_unsafe_code=args.confirm_run_unsafe_code)
        except ShareDecoded:
            continue
        scores = {}
        for task, values in found["results"].items():
            scores[task] = {metric: value for metric, value in values.items() if isinstance(value, (int, float))}
        result = {**about, "name": name, "adapter": folder, "tasks": scores}
        if args.keep:
            lines = [json.dumps(text) + "\n" for text in lm.texts]
            write_whole(out / f"{name}-tasks.jsonl", "".join(lines).encode())
        write_whole(out / f"{name}.json", json.dumps(result, indent=1).encode())
        print(name, json.dumps(scores, indent=1))

# -----------------------------------------------------------------------------
# pictures

def new_axes(title, x, y, size=(5.5, 3.6)):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=size, dpi=160, layout="constrained")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_lines(path, curves: dict, title, x, y):
    """curves: {label: (x values, y values)}"""
    if not curves:
        return
    figure, axes = new_axes(title, x, y)
    for label, (xs, ys) in curves.items():
        axes.plot(xs, ys, label=label, linewidth=1.6)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"picture: {path}")


def draw_measures(out: Path, results: dict):
    """tds.png and ce.png of {name: result}."""
    curves = {}
    for name, result in results.items():
        curve = result.get("tds_curve") or []
        steps = [step for step, value in enumerate(curve) if value is not None]
        if steps:
            curves[name] = steps, [curve[step] for step in steps]
    draw_lines(out / "tds.png", curves, "Trajectory discrimination score", "decoding step", "entropy variance (nats²)")
    ce = results.get("base", {}).get("ce", {})
    curves = {label: ([float(ratio) for ratio in curve], list(curve.values())) for label, curve in ce.items()}
    draw_lines(out / "ce.png", curves, "Cross-entropy under the base model", "mask ratio", "cross-entropy (nats)")


def draw_map(path, model, traj, tok, config, batch_size):
    """One decoding, position x step: colour is the entropy of what is still masked, a dot where a token was decoded."""
    seen = list(states(traj, tok.end_ids))
    views = [(traj, visible, masked) for _, visible, masked in seen]
    grid = np.full((seen[-1][0] + 1, len(traj.step)), np.nan)
    for (step, _, masked), (_, h) in zip(seen, token_stats(model, views, config.mask_id, batch_size), strict=True):
        grid[step, masked] = h
    width = int(np.flatnonzero(traj.step >= 0).max()) + 1
    figure, axes = new_axes("Entropy of masked positions while decoding", "position", "decoding step", (7, 4.5))
    image = axes.imshow(grid[:, :width], aspect="auto", cmap="viridis", interpolation="nearest")
    decoded = np.flatnonzero(traj.step >= 0)
    axes.plot(decoded, traj.step[decoded], "o", color="crimson", markersize=3)
    if width <= 64:
        words = [tok.decode([token]) for token in traj.response[:width].tolist()]
        axes.set_xticks(range(width), words, fontsize=6, rotation=90)
    figure.colorbar(image, label="entropy (nats)")
    figure.savefig(path)
    print(f"picture: {path}")

# -----------------------------------------------------------------------------

def name_adapters(args) -> dict:
    """{name: folder}; the base is None and comes first."""
    adapters = {} if args.no_base else {"base": None}
    for text in args.adapter:
        name, equals, folder = text.partition("=")
        if not equals:
            name, folder = "-".join(Path(text).resolve().parts[-2:]), text           # out/tabom/epoch-5: tabom-epoch-5
        if name in adapters:
            stop(f"--adapter {text}: the name {name} is taken; give each adapter its own, NAME=DIR")
        lora.read(folder)                                # a wrong folder is noticed before hours of measuring
        adapters[name] = folder
    return adapters


def measure(model, name, args, config, tok, prompts, held_out, pair, rank) -> dict:
    """All that was asked for, of one adapter or the base."""
    result = {"accuracy": {}, "swap": {}}
    out = Path(args.out)
    for domain, items in prompts.items():
        for k in args.parallel or [args.tokens_per_step or 1]:
            own = Namespace(**vars(args) | {"tokens_per_step": k if k > 1 else 0})
            s = make_settings(own, config, tok.end_ids)
            key = f"{domain}/{k}"
            records = decode_items(model, tok, config, items, s, args, f"{name} {key}")
            result["accuracy"][key] = accuracy(records)
            if args.swap and name != "base":
                result["swap"][key] = swap(model, tok, config, items, s, args, f"{name} {key} swap")
            if rank > 0:
                continue
            share = result["accuracy"][key]["share"]
            print(f"{name} {key} per step: {100 * share:.1f} % of {len(records)}", flush=True)
            if args.keep:
                lines = [json.dumps(record) + "\n" for record in records]
                write_whole(out / f"{name}-{domain}-{k}.jsonl", "".join(lines).encode())
            # TDS and the map are of the first file, decoded at the first speed
            if args.tds and len(result["accuracy"]) == 1:
                trajs = to_trajectories(records[:args.tds], config, tok)
                result["tds_curve"] = tds_curve(model, trajs, config, tok.end_ids, args.batch_size)
                result["tds"] = float(np.mean([value for value in result["tds_curve"] if value is not None]))
                if args.pictures:
                    draw_map(out / f"map-{name}.png", model, trajs[0], tok, config, args.batch_size)
    if held_out:
        result["in_order"] = order_agreement(model, held_out, config, args.window, args.batch_size)
    if pair and name == "base":
        result["ce"] = {}
        for label, trajs in pair.items():
            result["ce"][label] = ce_by_ratio(model, trajs, config, tok.end_ids, args.batch_size)
    return result


def main():
    args = parse_args()
    out = Path(args.out)
    rank, world_size, device, dtype = setup_device(args.dtype)
    if world_size > 1:
        init_process_group("gloo", minutes=24 * 60)      # ranks wait while rank 0 scores
    out.mkdir(parents=True, exist_ok=True)

    # what was measured before stays, if it was measured in the same way
    if not args.tasks:
        args.length = args.length or 256
    not_settings = ("adapter", "out", "pictures", "keep", "no_base")
    settings = {key: value for key, value in vars(args).items() if key not in not_settings}
    about = {"settings": settings, **about_run()}
    adapters, results = name_adapters(args), {}
    for name, folder in list(adapters.items()):
        path = out / f"{name}.json"
        if path.exists():
            results[name] = read_json(path)
            if results[name]["settings"] != settings or results[name]["adapter"] != folder:
                stop(f"{path}: was measured with other settings or of another adapter; give another --out or name")
            del adapters[name]
    if args.tasks:
        return run_benchmarks(args, adapters, out, about)

    # prompts and trajectories
    config = read_config(args.model)
    tok = load_tokenizer(config)
    prompts = {Path(path).stem: read_prompts(path, args.limit) for path in args.prompts}
    for items in prompts.values():
        for item in items:
            if item["answer"] is None and item["kind"] != "code":
                stop(f"{item['place']}: the prompt has no answer to judge by; add one, or delete the line")
    held_out = read_all(args.order, config, tok, args.length) if args.order else None
    pair = read_pair(args, config, tok) if args.ce else None

    # one model, one adapter after the other
    model = load_model(config, device, dtype)
    for name, folder in adapters.items():
        args.adapter = folder                            # what the records say
        if folder:
            lora.load(model, folder)
        measured = measure(model, name, args, config, tok, prompts, held_out, pair, rank)
        results[name] = {**about, "name": name, "adapter": folder, **measured}
        if rank == 0:
            write_whole(out / f"{name}.json", json.dumps(results[name], indent=1).encode())
    if args.pictures and rank == 0:
        draw_measures(out, results)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()                     # its threads may abort an interpreter that just ends
