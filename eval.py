"""
Measures a model and any number of LoRA adapters on it.

Accuracy at 1 and 2 tokens per step, TDS, order agreement, cross-entropy against mask ratio:
$ python eval.py --model M --adapter sft=out/sft/last tabom=out/tabom/last --prompts math.jsonl logic.jsonl \\
      --parallel 1 2 --tds 64 --order heldout.jsonl --ce gt.jsonl traj.jsonl --out results

Benchmarks, by lm-evaluation-harness with the paper's decoding table:
$ torchrun --nproc_per_node 8 eval.py --model M --adapter out/tabom/last --tasks gsm8k_cot,minerva_math500

Every number goes to OUT/NAME.json with settings, versions and hardware; what is there is not measured again, unless the
adapter's weights are others now. "base" is the model without an adapter. study/report.py draws what is measured here.
"""
import importlib.util
import json
import os
from argparse import Namespace
from collections import Counter
from math import comb
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lora
from data import View, first_end, load_trajectories, read_prompts
from decode import decode_all, decoding_flags, make_record, make_settings, record_head
from model import entropy, load_model, load_tokenizer, read_config
from tabom import collate, tabom_view
from util import (
    Parser,
    about_run,
    all_ranks_agree,
    count,
    find_change,
    init_process_group,
    naming_lost_ranks,
    read_json,
    setup_device,
    stop,
    write_whole,
)

# How each benchmark is decoded: the paper's table, and IFEval as released. --suppress-eos are the two rules of LLaDA's
# own code, for HumanEval and for MBPP. There are as many steps as tokens; where no block is named there is one
BENCHMARKS = {
    "Dream": {"gsm8k": dict(length=256), "math500": dict(length=512), "mbpp": dict(length=1024),
              "humaneval": dict(length=768), "ifeval": dict(length=512)},
    "llada": {"gsm8k": dict(length=512, block=8), "math500": dict(length=512, block=64),
              "mbpp": dict(length=256, suppress_eos="confidence"),
              "humaneval": dict(length=512, suppress_eos="logits"), "ifeval": dict(length=512, score="entropy")},
}


def flags():
    parser = Parser(__doc__, parents=[decoding_flags()])
    flag = parser.add_argument
    flag("--model", required=True, help="hub name or folder")
    flag("--adapter", nargs="*", default=[], help="adapter folders, DIR or NAME=DIR")
    flag("--no-base", action="store_true", help="do not measure the model without an adapter")
    flag("--out", default="results", help="folder for the results")
    # what to measure
    flag("--prompts", nargs="*", default=[], help="prompts with answers; a file's stem names the domain")
    flag("--limit", type=count, default=0, help="only the first prompts of each file or task")
    flag("--parallel", type=int, nargs="+", default=[], help="accuracy at these numbers of tokens per step")
    flag("--pass-at", type=count, nargs="+", default=[], metavar="K", help="pass@k at each speed, with --temperature; "
         "sample i of a prompt is drawn with --seed plus i, --keep keeps sample 0")
    flag("--tds", type=count, default=0, help="trajectories for TDS, of each file of --prompts or task of --tasks")
    flag("--order", help="held-out trajectories for the share of pairs in order")
    flag("--window", type=count, default=32, help="W of --order")
    flag("--ce", nargs=2, metavar=("GT", "SD"), help="cross-entropy of the base against mask ratio")
    flag("--swap", action="store_true", help="also the adapter's tokens in the base's order, and the reverse")
    flag("--keep", action="store_true", help="keep the decoded records")
    # lm-evaluation-harness
    flag("--tasks", help="harness tasks, separated by commas")
    flag("--task-path", help="folder with harness tasks of your own")
    flag("--num-fewshot", type=int, default=0)
    flag("--confirm-run-unsafe-code", action="store_true", help="code tasks may run what a model wrote")
    # system
    flag("--batch-size", type=int, default=16, help="prompts per forward")
    flag("--dtype", choices=["bf16", "fp32"], help="of the weights (default: bf16 if the GPU has it, else fp32)")
    return parser


def parse_args(argv=None):
    args = flags().parse_args(argv)
    if args.tasks and (args.prompts or args.order or args.ce or args.parallel or args.pass_at):
        stop("--tasks: is measured alone; its tokens per step are --tokens-per-step")
    if args.pass_at and (args.greedy or not args.temperature or not args.prompts):
        stop("--pass-at: draws several answers to each of --prompts, which are all alike without a temperature; give "
             "--prompts and --temperature 1, and no --greedy")
    if args.parallel and (args.steps or args.tokens_per_step or args.threshold is not None):
        stop("--parallel: sets the tokens per step; give it without --steps, --tokens-per-step and --threshold")
    if not (args.tasks or args.prompts or args.order or args.ce):
        stop("nothing to measure: give --prompts, --order, --ce or --tasks")
    if args.window == 1:
        stop("--window 1: one token makes no pair; use --window 2 or more")
    domains = [Path(path).stem for path in args.prompts]
    if len(set(domains)) < len(domains):
        stop(f"--prompts {' '.join(args.prompts)}: two files have one stem, which names the domain; rename one")
    if args.tds and not args.prompts and not args.tasks:
        stop(f"--tds {args.tds}: is measured while prompts are decoded; give --prompts or --tasks")
    return args

# -----------------------------------------------------------------------------
# measures of decoding

def accuracy(trajs) -> dict:
    """The share that is right, and how many tokens a forward has really decoded."""
    right = sum(traj.correct is True for traj in trajs)
    tokens = sum(traj.decoded.sum() for traj in trajs)
    forwards = sum(len(np.unique(traj.step[traj.decoded])) for traj in trajs)
    return {"right": right, "n": len(trajs), "share": right / len(trajs),
            "tokens_per_forward": float(tokens / forwards)}


def pass_at(samples, ks) -> dict:
    """
    The chance that at least one of k answers is right, mean over prompts: 1 - C(n - c, k) / C(n, k), where c of a
    prompt's n answers are right, which is unbiased. samples: n lists of trajectories, all of the same prompts.
    """
    n, all_trajs = len(samples), sum(samples, [])
    right = [sum(traj.correct is True for traj in answers) for answers in zip(*samples, strict=True)]
    curve = {str(k): float(np.mean([1 - comb(n - c, k) / comb(n, k) for c in right])) for k in ks}
    return {"samples": n, "tokens_per_forward": accuracy(all_trajs)["tokens_per_forward"], "share": curve}


class WithoutAdapter(torch.nn.Module):
    """The frozen base inside a model that has an adapter."""
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *batch):
        with lora.disabled(self.model):
            return self.model(*batch)


class Swapped(torch.nn.Module):
    """
    One network chooses the positions, another names their tokens: the logits of the first, in which its most probable
    token and the other's have changed places. No score can tell, and greedy decoding takes the other's token.
    """
    def __init__(self, positions, tokens, mask_id):
        super().__init__()
        self.positions, self.tokens, self.mask_id = positions, tokens, mask_id

    def forward(self, *batch):
        logits, others = self.positions(*batch).float(), self.tokens(*batch)                 # (B, n, V)
        never = torch.tensor([self.mask_id], device=logits.device)
        top, own = logits.index_fill(-1, never, -torch.inf).max(-1, keepdim=True)            # (B, n, 1)
        other = others.index_fill(-1, never, -torch.inf).argmax(-1, keepdim=True)
        logits.scatter_(-1, own, logits.gather(-1, other))
        # a bit more, because the largest logits are often equal in bf16; too little to matter for a score
        return logits.scatter_(-1, other, top + 1e-5)


def swap(model, tok, config, items, s, batch_size) -> dict:
    """
    Order or knowledge? One of base and adapter chooses the positions, the other their tokens. If an adapter's tokens
    are as good as the base's in the base's order, and not in its own, training has spoiled the order and nothing else.
    """
    base = WithoutAdapter(model)
    ours = decode_all(Swapped(base, model, s.mask_id), tok, config, items, s, batch_size, "swap")
    theirs = decode_all(Swapped(model, base, s.mask_id), tok, config, items, s, batch_size, "swap")
    return {"adapter's tokens, base's order": accuracy(ours), "base's tokens, adapter's order": accuracy(theirs)}

# -----------------------------------------------------------------------------
# measures of certainty

@torch.no_grad()
def token_stats(model, views, mask_id, batch_size):
    """Yields cross-entropy and entropy of each view's targets, two arrays."""
    device = next(model.parameters()).device
    for i in range(0, len(views), batch_size):
        chunk = views[i:i + batch_size]
        batch = collate(chunk, mask_id, device)
        logits = model(batch.ids, batch.attend, batch.pos)                       # (B, W, V)
        for b, view in enumerate(chunk):                                         # row by row: (W, V) in fp32 is large
            W = len(view.targets)
            logp = F.log_softmax(logits[b, :W].float(), dim=-1)
            ce = -logp.gather(-1, batch.x0[b, :W, None])[:, 0]
            yield ce.cpu().numpy(), entropy(logp).cpu().numpy()


def states(traj, eos_id):
    """
    (step, View) for each step of a decoding: what the decoder saw. The targets are the positions still masked, left of
    the leftmost EOS that was decoded by then (before there is one: all). An end of turn is no EOS here, as released.
    """
    N = len(traj.step)
    is_end = traj.response == eos_id
    for step in np.unique(traj.step[traj.decoded]):
        visible = traj.decoded_before(step)
        ends = np.flatnonzero(visible & is_end)
        limit = ends[0] if len(ends) else N
        yield int(step), View(traj, visible, np.flatnonzero(~visible & (np.arange(N) < limit)))


def tds(model, trajs, config, eos_id, batch_size) -> dict:
    """
    TDS(t), Eq. 11: the variance of the entropies of masked positions at step t, mean over trajectories. The paper does
    not say how this curve becomes the one number of its table; ours is the mean over steps. Every rank comes here, with
    all trajectories, and does its share.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    views, steps = [], []
    for traj in trajs:
        for step, view in states(traj, eos_id):
            if len(view.targets) >= 2:
                views.append(view)
                steps.append(step)
    variance = torch.zeros(len(views))
    mine = list(range(rank, len(views), world_size))
    stats = token_stats(model, [views[n] for n in mine], config.mask_id, batch_size)
    for n, (_, h) in zip(mine, stats, strict=True):
        variance[n] = float(h.var())
    if world_size > 1:
        dist.all_reduce(variance)                        # a sum: the others have added zeros
    by_step = {}
    for step, value in zip(steps, variance.tolist(), strict=True):
        by_step.setdefault(step, []).append(value)
    curve = [float(np.mean(by_step[step])) if step in by_step else None for step in range(max(by_step) + 1)]
    return {"mean": float(np.mean([value for value in curve if value is not None])), "curve": curve}


def order_agreement(model, trajs, config, window, batch_size, cuts=4) -> float:
    """The share of pairs in held-out windows whose earlier-decoded token has the lower entropy (Eq. 7)."""
    views = []
    for n, traj in enumerate(trajs):
        for cut in range(cuts):
            views.append(tabom_view(traj, np.random.default_rng([cut, n]), window))
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
            end = first_end(traj, end_ids)
            body = np.arange(len(traj.response) if end is None else end + 1)
            rng = np.random.default_rng([int(100 * ratio), n])
            masked = rng.permutation(body)[:max(1, round(ratio * len(body)))]
            visible = np.zeros(len(traj.step), dtype=bool)       # what follows the end is masked, in both files
            visible[np.setdiff1d(body, masked)] = True
            views.append(View(traj, visible, masked))
        ces = [ce for ce, _ in token_stats(model, views, config.mask_id, batch_size)]
        curve[f"{ratio:.1f}"] = float(np.concatenate(ces).mean())
    return curve


def read_pair(paths, config, tok, length, limit) -> dict:
    """
    The two files of --ce, reduced to the prompts that both hold and whose own answer was not judged wrong. Prompts are
    compared, not ids: others number their records as they like. The limit is one of prompts, that is, of GT alone: own
    answers are in the order in which they were finished.
    """
    gt = load_trajectories(paths[0], config, tok, everything=True, limit=limit, length=length, ordered=False)
    sd = load_trajectories(paths[1], config, tok, everything=True, length=length, ordered=False)
    common = {tuple(traj.prompt) for traj in sd if traj.correct is not False} & {tuple(traj.prompt) for traj in gt}
    if not common:
        stop(f"--ce {paths[0]} {paths[1]}: share no prompt whose own answer is not wrong; give two files of the same "
             f"prompts, or a larger --limit")
    return {"ground truth": [traj for traj in gt if tuple(traj.prompt) in common],
            "self-distilled": [traj for traj in sd if tuple(traj.prompt) in common]}

# -----------------------------------------------------------------------------
# lm-evaluation-harness

class ShareDecoded(Exception):
    """Raised on ranks other than 0 after decoding: only rank 0 scores, because scoring may run generated code."""


def benchmark_settings(task: str, model_type: str) -> dict:
    """Its entry in the table above, or {}."""
    for name, setting in BENCHMARKS.get(model_type, {}).items():
        if name in task.replace("-", ""):
            return setting
    return {}


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
        self.args, self.adapter, self.texts, self.tds, self.net = args, None, [], {}, None
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
        """The benchmark's own decoding, unless flags say otherwise; the harness applies the chat template."""
        own = {"length": own_length} | benchmark_settings(task, self.config.model_type)
        given = {name: getattr(self.args, name) or value for name, value in own.items()}
        return Namespace(**vars(self.args) | given | {"raw_prompt": True})

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
            trajs = decode_all(self.net, self.tok, self.config, items, s, args.batch_size, task)
            if args.tds:
                self.tds[task] = tds(self.net, trajs[:args.tds], self.config, self.tok.end_ids[0], args.batch_size)
            for item, traj in zip(items, trajs, strict=True):
                request = requests[item["number"]]
                text = cut_at(traj.text, request.args[1].get("until"))
                texts[item["number"]] = text
                self.texts.append({"task": task, "doc_id": request.doc_id, "text": text})
        if dist.is_initialized() and dist.get_rank() > 0:
            raise ShareDecoded
        return [texts[n] for n in range(len(requests))]


def new_harness(args):
    if not importlib.util.find_spec("lm_eval"):
        stop("--tasks: needs a package: pip install -r requirements-dev.txt")
    from lm_eval.api.model import LM
    return type("TabomLM", (Harness, LM), {})(args)


def run_benchmarks(lm, args, name, adapter) -> dict | None:
    """The harness's results for the base or one adapter; None on the ranks that do not score."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    # the harness's own tasks are many and slow to index
    manager = TaskManager(include_path=args.task_path, include_defaults=not args.task_path)
    for task in args.tasks.split(","):
        if task not in manager.all_tasks:
            known = "lm-eval ls tasks lists all"
            if args.task_path:
                known = f"{args.task_path} holds {', '.join(manager.all_tasks[:20]) or 'none'}"
            stop(f"--tasks {task}: is no task of the harness; {known}")
    lm.adapter, lm.texts, lm.tds = adapter, [], {}
    try:
        found = simple_evaluate(lm, tasks=args.tasks.split(","), num_fewshot=args.num_fewshot, limit=args.limit or None,
                                log_samples=False, bootstrap_iters=0, task_manager=manager,
                                apply_chat_template=bool(lm.tok.chat_template and not args.raw_prompt),
                                confirm_run_unsafe_code=args.confirm_run_unsafe_code)
    except ShareDecoded:
        return None
    if args.keep:
        write_lines(Path(args.out) / f"{name}-tasks.jsonl", lm.texts)
    scores = {}
    for task, values in found["results"].items():
        scores[task] = {metric: value for metric, value in values.items() if isinstance(value, (int, float))}
    return {"tasks": scores, "tds": lm.tds}

# -----------------------------------------------------------------------------
# results

def write_lines(path, rows):
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def checksum(folder) -> str | None:
    """Tells one adapter's weights from another's; None for the base."""
    return f"{crc32((Path(folder) / 'adapter_model.safetensors').read_bytes()):08x}" if folder else None


def data_checksum(args) -> int:
    """Of the files to measure by; data sets that are named are not read."""
    value = 0
    for path in [*args.prompts, args.order, *(args.ce or [])]:
        if path and Path(path).is_file():
            value = crc32(Path(path).read_bytes(), value)
    return value


def name_adapters(args) -> dict:
    """{name: folder}; the base is None and comes first."""
    adapters = {} if args.no_base else {"base": None}
    for text in args.adapter:
        name, equals, folder = text.partition("=")
        if not equals:
            name, folder = "-".join(Path(text).resolve().parts[-2:]), text           # out/tabom/last: tabom-last
        if name in adapters:
            stop(f"--adapter {text}: the name {name} is taken; give each adapter its own, NAME=DIR")
        if not (Path(folder) / "adapter_config.json").is_file():
            stop(f"--adapter {text}: holds no adapter_config.json; give a folder that tabom.py or peft has written")
        lora.read(folder)                                # a wrong folder is noticed before hours of measuring
        adapters[name] = folder
    return adapters


def find_result(path: Path, settings: dict, folder) -> dict | None:
    """What an earlier command measured in the same way, of the same weights."""
    if not path.exists():
        return None
    found = read_json(path)
    found["settings"].setdefault("data_checksum", settings["data_checksum"])              # older results do not tell
    changed = find_change(found["settings"], settings, flags())
    if changed:
        stop(f"{path}: was measured with {changed}; give another --out")
    if found["adapter"] != folder:
        stop(f"{path}: was measured of {found['adapter']}, now it is {folder}; give another --out or NAME=DIR")
    if found.get("checksum") != checksum(folder):
        print(f"{path}: {folder} has other weights now; measured anew", flush=True)
        return None
    return found


def show(name, result: dict):
    for key, value in result.get("accuracy", {}).items():
        print(f"{name} {key}: {100 * value['share']:.1f} % of {value['n']}, {value['tokens_per_forward']:.2f} tokens "
              f"per forward", flush=True)
    for key, value in result.get("pass_at", {}).items():
        curve = ", ".join(f"pass@{k} {100 * share:.1f} %" for k, share in value["share"].items())
        print(f"{name} {key}: {curve}, {value['tokens_per_forward']:.2f} tokens per forward", flush=True)
    for key, swapped in result.get("swap", {}).items():
        for whose, value in swapped.items():
            print(f"{name} {key}, {whose}: {100 * value['share']:.1f} % of {value['n']}", flush=True)
    for key, value in result.get("tds", {}).items():
        print(f"{name} {key}: TDS {value['mean']:.3f}, mean over steps", flush=True)
    for task, scores in result.get("tasks", {}).items():
        print(f"{name} {task}: {json.dumps(scores)}", flush=True)
    for label, curve in result.get("ce", {}).items():
        print(f"{name} {label}: cross-entropy by mask ratio {json.dumps(curve)}", flush=True)
    if "in_order" in result:
        print(f"{name}: {result['in_order']:.3f} of the pairs in order", flush=True)


def speeds(args) -> dict:
    """{label: tokens per step}: the label says what the flags say; what was really decoded is measured."""
    if args.parallel:
        return {str(k): k for k in args.parallel}
    if args.threshold is not None:
        return {f"threshold {args.threshold}": 0}
    if args.steps:
        return {f"{args.steps} steps": 0}
    return {str(args.tokens_per_step or 1): args.tokens_per_step}


def measure(model, name, args, config, tok, prompts, held_out, pair) -> dict:
    """All that was asked for, of one adapter or the base. Every rank comes here: decode_all needs them all."""
    result = {"accuracy": {}, "pass_at": {}, "swap": {}, "tds": {}}
    dtype = next(model.parameters()).dtype
    for domain, items in prompts.items():
        for label, k in speeds(args).items():
            own = Namespace(**vars(args) | {"tokens_per_step": k if k > 1 else 0})
            s = make_settings(own, config, tok.end_ids)
            key = f"{domain}/{label}"
            trajs = decode_all(model, tok, config, items, s, args.batch_size, f"{name} {key}")
            result["accuracy"][key] = accuracy(trajs)
            if args.pass_at:
                samples = [trajs]
                for i in range(1, max(args.pass_at)):
                    again = Namespace(**vars(s) | {"seed": s.seed + i})
                    samples.append(decode_all(model, tok, config, items, again, args.batch_size, f"{name} {key} {i}"))
                result["pass_at"][key] = pass_at(samples, args.pass_at)
            if args.swap and name != "base":
                result["swap"][key] = swap(model, tok, config, items, s, args.batch_size)
            if args.keep and os.environ.get("RANK", "0") == "0":
                head = record_head(config, s, tok, dtype, args.adapter)
                records = [make_record(traj, item, head) for traj, item in zip(trajs, items, strict=True)]
                write_lines(Path(args.out) / f"{name}-{domain}-{label}.jsonl", records)
            if args.tds and domain not in result["tds"]:                                 # at the first speed
                result["tds"][domain] = tds(model, trajs[:args.tds], config, tok.end_ids[0], args.batch_size)
    if held_out:
        result["in_order"] = order_agreement(model, held_out, config, args.window, args.batch_size)
    if pair and name == "base":
        result["ce"] = {}
        for label, trajs in pair.items():
            result["ce"][label] = ce_by_ratio(model, trajs, config, tok.end_ids, args.batch_size)
    return result

# -----------------------------------------------------------------------------

def main():
    args = parse_args()
    out = Path(args.out)
    rank, world_size, device, dtype = setup_device(args.dtype)
    if world_size > 1:
        init_process_group("cpu", minutes=24 * 60)       # ranks wait while rank 0 scores
    out.mkdir(parents=True, exist_ok=True)

    # what was measured before stays, if it was measured in the same way
    not_settings = ("adapter", "out", "keep", "no_base")
    settings = {key: value for key, value in vars(args).items() if key not in not_settings}
    settings["data_checksum"] = data_checksum(args)
    adapters, results = name_adapters(args), {}
    for name, folder in adapters.items():
        results[name] = find_result(out / f"{name}.json", settings, folder)
        if results[name] and rank == 0:
            print(f"{out}/{name}.json: measured before", flush=True)
            show(name, results[name])
    if world_size > 1:                                   # all have looked before rank 0 writes
        weights = {name: checksum(folder) for name, folder in adapters.items()}
        found = [name for name, result in results.items() if result]
        all_ranks_agree("cpu", data_checksum=settings["data_checksum"],
                        checksum_of_flags=crc32(repr(settings).encode()), results_in_out=len(found),
                        checksum_of_adapters=crc32(repr((weights, found)).encode()))
    if all(results.values()):
        return

    # the model, and what to measure by
    if args.tasks:
        lm = new_harness(args)
    else:
        config = read_config(args.model)
        tok = load_tokenizer(config)
        prompts = {Path(path).stem: read_prompts(path, args.limit) for path in args.prompts}
        for items in prompts.values():
            for item in items:
                if item["answer"] is None and item["kind"] != "code":
                    stop(f"{item['place']}: the prompt has no answer to judge by; add one, or delete the line")
        length = args.length or config.length
        held_out = load_trajectories(args.order, config, tok, everything=True) if args.order else None
        pair = read_pair(args.ce, config, tok, length, args.limit) if args.ce else None
        model = load_model(config, device, dtype)

    # one adapter after the other
    for name, folder in adapters.items():
        if results[name]:
            continue
        if args.tasks:
            measured = run_benchmarks(lm, args, name, folder)
        else:
            args.adapter = folder                        # what the records say
            if folder:
                lora.load(model, folder)
            measured = measure(model, name, args, config, tok, prompts, held_out, pair)
        if rank == 0:
            about = {"name": name, "adapter": folder, "checksum": checksum(folder), "settings": settings, **about_run()}
            write_whole(out / f"{name}.json", json.dumps(about | measured, indent=1).encode())
            show(name, measured)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        with naming_lost_ranks():
            dist.barrier()
        dist.destroy_process_group()                     # its threads may abort an interpreter that just ends
