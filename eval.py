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
from itertools import groupby
from math import comb
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lora
from data import View, load_trajectories, read_prompts
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
    rank_and_world_size,
    read_json,
    setup_device,
    stop,
    sum_over_ranks,
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
    flag("--parallel", type=count, nargs="+", default=[], help="accuracy at these numbers of tokens per step")
    flag("--pass-at", type=count, nargs="+", default=[], metavar="K", help="pass@k at each speed, with --temperature; "
         "sample i of a prompt is drawn with --seed plus i, --keep keeps sample 0")
    flag("--tds", type=count, default=0, help="trajectories for TDS, of each file of --prompts or task of --tasks")
    flag("--order", help="held-out trajectories for the share of pairs in order")
    flag("--window", type=count, default=32, help="W of --order")
    flag("--ce", nargs=2, default=[], metavar=("GT", "SD"), help="cross-entropy of the base against mask ratio")
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
    if not (args.tasks or args.prompts or args.order or args.ce):
        stop("nothing to measure: give --prompts, --order, --ce or --tasks")
    if args.window == 1:
        stop("--window 1: one token makes no pair; use --window 2 or more")
    if args.tds and not args.prompts and not args.tasks:
        stop(f"--tds {args.tds}: is measured while prompts are decoded; give --prompts or --tasks")
    return args


def read_domains(args) -> dict:
    """{domain: prompts} of --prompts, each with something to judge its answer by."""
    domains = {}
    for path in args.prompts:
        domain = Path(path).stem
        if domain in domains:
            stop(f"--prompts {path}: another file has this stem, which names the domain; rename one")
        domains[domain] = read_prompts(path, args.limit)
        for item in domains[domain]:
            if item["answer"] is None and item["kind"] != "code":
                stop(f"{item['place']}: the prompt has no answer to judge by; add one, or delete the line")
    return domains


def read_speeds(args, config, end_ids) -> dict:
    """{label: decoding settings}: the label says what the flags say; what was really decoded is measured."""
    if args.parallel and (args.steps or args.tokens_per_step or args.threshold is not None):
        stop("--parallel: sets the tokens per step; give it without --steps, --tokens-per-step and --threshold")
    speeds = {}
    for k in args.parallel or [args.tokens_per_step]:
        label = str(k or 1)
        if args.threshold is not None:
            label = f"threshold {args.threshold}"
        elif args.steps:
            label = f"{args.steps} steps"
        # one token per step is left to the model's own schedule
        s = Namespace(**vars(args) | {"tokens_per_step": k if k > 1 else 0})
        speeds[label] = make_settings(s, config, end_ids)
    return speeds

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
    n = len(samples)
    right = [sum(traj.correct is True for traj in answers) for answers in zip(*samples, strict=True)]
    curve = {str(k): float(np.mean([1 - comb(n - c, k) / comb(n, k) for c in right])) for k in ks}
    return {"samples": n, "tokens_per_forward": accuracy(sum(samples, []))["tokens_per_forward"], "share": curve}

# -----------------------------------------------------------------------------
# measures of certainty

@torch.no_grad()
def token_stats(model, views, batch_size):
    """Yields cross-entropy and entropy of each view's targets, two arrays."""
    device = next(model.parameters()).device
    for i in range(0, len(views), batch_size):
        chunk = views[i:i + batch_size]
        batch = collate(chunk, model.config.mask_id, device)
        logits = model(batch.ids, batch.attend, batch.pos)                       # (B, W, V)
        for b, view in enumerate(chunk):                                         # row by row: (W, V) in fp32 is large
            W = len(view.targets)
            logp = F.log_softmax(logits[b, :W].float(), dim=-1)
            ce = -logp.gather(-1, batch.x0[b, :W, None])[:, 0]
            yield ce.cpu().numpy(), entropy(logp).cpu().numpy()


def tds(model, trajs, eos_id, batch_size) -> dict:
    """
    TDS(t), Eq. 11: the variance of the entropies of masked positions at step t, mean over trajectories. The paper does
    not say how this curve becomes the one number of its table; ours is the mean over steps. Every rank comes here, with
    all trajectories, and does its share.
    """
    views, steps = [], []
    for traj in trajs:
        for step in np.unique(traj.step[traj.decoded]):
            # what the decoder saw; masks count left of the leftmost EOS in it. An end of turn is none, as released
            visible = traj.decoded_before(step)
            masked = np.flatnonzero(~visible)
            ends = np.flatnonzero(visible & (traj.response == eos_id))
            if len(ends):
                masked = masked[masked < ends[0]]
            if len(masked) >= 2:
                views.append(View(traj, visible, masked))
                steps.append(step)
    rank, world_size = rank_and_world_size()
    variance = np.zeros(len(views))
    variance[rank::world_size] = [h.var() for _, h in token_stats(model, views[rank::world_size], batch_size)]
    if world_size > 1:
        sum_over_ranks([torch.from_numpy(variance)])     # in place; the others have zeros there
    totals, counts = np.bincount(steps, variance), np.bincount(steps)
    curve = [total / n if n else None for total, n in zip(totals, counts, strict=True)]
    return {"mean": float(np.mean([value for value in curve if value is not None])), "curve": curve}


def order_agreement(model, trajs, window, batch_size) -> float:
    """The share of pairs whose earlier-decoded token has the lower entropy (Eq. 7), four windows per trajectory."""
    views = []
    for n, traj in enumerate(trajs):
        for cut in range(4):
            views.append(tabom_view(traj, np.random.default_rng([cut, n]), window))
    in_order = []
    for _, h in token_stats(model, views, batch_size):
        r, s = np.triu_indices(len(h), 1)
        in_order.append(h[r] < h[s])
    return float(np.concatenate(in_order).mean())


def ce_by_ratio(model, trajs, batch_size) -> dict:
    """{mask ratio: cross-entropy of the masked tokens up to the first end}: the paper's loss_comparison figure."""
    curve = {}
    for ratio in np.arange(1, 10) / 10:
        views = []
        for n, traj in enumerate(trajs):
            length = len(traj.response) if traj.end is None else traj.end + 1
            rng = np.random.default_rng([int(100 * ratio), n])
            masked = rng.permutation(length)[:max(1, round(ratio * length))]
            visible = np.arange(len(traj.response)) < length     # what follows the end is masked, in both files
            visible[masked] = False
            views.append(View(traj, visible, masked))
        ces = [ce for ce, _ in token_stats(model, views, batch_size)]
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
# everything that was asked for, of one model

def measure(model, about, args, tok, prompts, speeds, held_out, pair) -> dict:
    """What a measure adds to the result is saved and printed. Every rank comes here: decode_all needs them all."""
    rank, _ = rank_and_world_size()
    result = {"accuracy": {}, "pass_at": {}, "tds": {}}
    for domain, items in prompts.items():
        for label, s in speeds.items():
            key = f"{domain}/{label}"
            samples = []
            for i in range(max([1, *args.pass_at])):
                seeded = Namespace(**vars(s) | {"seed": s.seed + i})
                title = f"{about['name']} {key}"
                samples.append(decode_all(model, tok, model.config, items, seeded, args.batch_size, title))
            trajs = samples[0]
            result["accuracy"][key] = accuracy(trajs)
            if args.pass_at:
                result["pass_at"][key] = pass_at(samples, args.pass_at)
            if args.tds and domain not in result["tds"]:                                 # at the first speed
                result["tds"][domain] = tds(model, trajs[:args.tds], tok.end_ids[0], args.batch_size)
            if args.keep and rank == 0:
                head = record_head(model.config, s, tok, next(model.parameters()).dtype, about["adapter"])
                records = [make_record(traj, item, head) for traj, item in zip(trajs, items, strict=True)]
                write_lines(Path(args.out) / f"{about['name']}-{domain}-{label}.jsonl", records)
    if held_out:
        result["in_order"] = order_agreement(model, held_out, args.window, args.batch_size)
    if pair and not about["adapter"]:
        result["ce"] = {}
        for label, trajs in pair.items():
            result["ce"][label] = ce_by_ratio(model, trajs, args.batch_size)
    return result

# -----------------------------------------------------------------------------
# lm-evaluation-harness

class ShareDecoded(Exception):
    """Raised on ranks other than 0 after decoding: only rank 0 scores, because scoring may run generated code."""


def task_args(args, task, model_type, own_length):
    """The benchmark's own decoding, unless flags say otherwise; the harness applies the chat template."""
    own = {"length": own_length}
    for benchmark, settings in BENCHMARKS.get(model_type, {}).items():
        if benchmark in task.replace("-", ""):
            own |= settings
    given = {name: getattr(args, name) or value for name, value in own.items()}
    return Namespace(**vars(args) | given | {"raw_prompt": True})


class Harness:
    """Our decoder as a model of the harness. run_benchmarks makes it an LM of lm_eval, which is an optional package."""
    tokenizer_name = ""                                  # of a cache that is not used

    def __init__(self, model, args, tok):
        super().__init__()
        self.model, self.args, self.tok = model, args, tok

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.tok.apply_chat_template(chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                                            continue_final_message=not add_generation_prompt, enable_thinking=False)

    def loglikelihood(self, requests):
        stop("--tasks: these models decode; tasks that need log-likelihoods are not built (README)")

    loglikelihood_rolling = loglikelihood

    def generate_until(self, requests):
        from lm_eval.models.utils import postprocess_generated_text
        config, batch_size = self.model.config, self.args.batch_size
        self.rows, self.tds, asked = [], {}, Counter()
        for task, group in groupby(requests, key=lambda request: request.task_name):
            # the id of a question, and so its random numbers, do not depend on what else is asked
            questions, items = list(group), []
            for request in questions:
                place = f"{task}/{request.doc_id}"
                items.append({"id": f"{place}/{asked[place]}", "place": place, "prompt": request.args[0],
                              "answer": None, "kind": None})
                asked[place] += 1
            own_length = questions[0].args[1].get("max_gen_toks", 256)
            s = make_settings(task_args(self.args, task, config.model_type, own_length), config, self.tok.end_ids)
            trajs = decode_all(self.model, self.tok, config, items, s, batch_size, task)
            if self.args.tds:
                self.tds[task] = tds(self.model, trajs[:self.args.tds], self.tok.end_ids[0], batch_size)
            for request, traj in zip(questions, trajs, strict=True):
                text = postprocess_generated_text(traj.text, stop=request.args[1].get("until"), think_end_token=None)
                self.rows.append({"task": task, "doc_id": request.doc_id, "text": text})
        rank, _ = rank_and_world_size()
        if rank > 0:
            raise ShareDecoded
        return [row["text"] for row in self.rows]


def find_tasks(args):
    """The harness's index of tasks, which holds all of --tasks."""
    if not importlib.util.find_spec("lm_eval"):
        stop("--tasks: needs a package: pip install -r requirements-dev.txt")
    from lm_eval.tasks import TaskManager
    # the harness's own tasks are many and slow to index
    manager = TaskManager(include_path=args.task_path, include_defaults=not args.task_path)
    for task in args.tasks.split(","):
        if task not in manager.all_tasks:
            known = "lm-eval ls tasks lists all"
            if args.task_path:
                known = f"{args.task_path} holds {', '.join(manager.all_tasks[:20]) or 'none'}"
            stop(f"--tasks {task}: is no task of the harness; {known}")
    return manager


def run_benchmarks(model, name, args, tok, manager) -> dict | None:
    """The harness's results for the base or one adapter; None on the ranks that do not score."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    lm = type("TabomLM", (Harness, LM), {})(model, args, tok)
    try:
        found = simple_evaluate(lm, tasks=args.tasks.split(","), num_fewshot=args.num_fewshot, limit=args.limit or None,
                                log_samples=False, bootstrap_iters=0, task_manager=manager,
                                apply_chat_template=bool(tok.chat_template and not args.raw_prompt),
                                confirm_run_unsafe_code=args.confirm_run_unsafe_code)
    except ShareDecoded:
        return None
    if args.keep:
        write_lines(Path(args.out) / f"{name}-tasks.jsonl", lm.rows)
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


def files_checksum(files) -> int:
    """Of the files to measure by; data sets that are named are not read."""
    return crc32(b"".join(Path(file).read_bytes() for file in files if file and os.path.isfile(file)))


def name_adapters(args) -> dict:
    """{name: folder}; the base is None and comes first."""
    adapters = {} if args.no_base else {"base": None}
    for text in args.adapter:
        name, equals, folder = text.partition("=")
        if not equals:
            name, folder = "-".join(Path(text).resolve().parts[-2:]), text           # out/tabom/last: tabom-last
        if name in adapters:
            stop(f"--adapter {text}: the name {name} is taken; give each adapter its own, NAME=DIR")
        lora.read(folder)                                # a wrong folder is noticed before hours of measuring
        adapters[name] = folder
    return adapters


def find_result(path: Path, about: dict) -> dict | None:
    """What an earlier command measured in the same way, of the same weights."""
    if not path.exists():
        return None
    found, folder = read_json(path), about["adapter"]
    changed = find_change(found["settings"], about["settings"], flags())
    if changed:
        stop(f"{path}: was measured with {changed}; give another --out")
    if found["adapter"] != folder:
        stop(f"{path}: was measured of {found['adapter']}, now it is {folder}; give another --out or NAME=DIR")
    if found["checksum"] != about["checksum"]:
        print(f"{path}: {folder} has other weights now; measured anew", flush=True)
        return None
    return {key: value for key, value in found.items() if key not in about}


def find_todo(args, files) -> dict:
    """
    {name: what its result says of where it comes from}, of all that is left to measure. What --out holds already is
    shown, if it was measured in the same way; otherwise the command is refused.
    """
    rank, world_size = rank_and_world_size()
    not_settings = ("adapter", "out", "keep", "no_base")
    settings = {key: value for key, value in vars(args).items() if key not in not_settings}
    settings["data_checksum"] = files_checksum(files)
    adapters, run, todo = name_adapters(args), about_run(), {}
    for name, folder in adapters.items():
        about = {"name": name, "adapter": folder, "checksum": checksum(folder), "settings": settings, **run}
        path = Path(args.out) / f"{name}.json"
        found = find_result(path, about)
        if found is None:
            todo[name] = about
        elif rank == 0:
            print(f"{path}: measured before", flush=True)
            show(name, found)
    if world_size > 1:                                   # all have looked before rank 0 writes
        weights = {name: about["checksum"] for name, about in todo.items()}
        all_ranks_agree("cpu", data_checksum=settings["data_checksum"],
                        checksum_of_flags=crc32(repr(settings).encode()), results_in_out=len(adapters) - len(todo),
                        checksum_of_adapters=crc32(repr(weights).encode()))
    return todo


def save_result(args, about: dict, measured: dict):
    write_whole(Path(args.out) / f"{about['name']}.json", json.dumps(about | measured, indent=1).encode())
    show(about["name"], measured)


def show(label: str, found):
    """A line for each accuracy, and one for each other number; report.py draws the curves over steps."""
    if isinstance(found, dict) and "right" in found:
        print(f"{label}: {100 * found['share']:.1f} % of {found['n']}, {found['tokens_per_forward']:.2f} tokens per "
              f"forward", flush=True)
    elif isinstance(found, dict):
        for key, value in found.items():
            show(label if key == "accuracy" else f"{label} {key}", value)
    elif isinstance(found, (int, float)):
        print(f"{label}: {found:.4g}", flush=True)

# -----------------------------------------------------------------------------

def main():
    args = parse_args()
    rank, world_size, device, dtype = setup_device(args.dtype)
    if world_size > 1:
        init_process_group("cpu", minutes=24 * 60)       # ranks wait while rank 0 scores
    todo = find_todo(args, [*args.prompts, args.order, *args.ce])
    if not todo:
        return

    # what to measure by: what is wrong with it is noticed here, before hours of measuring
    config = read_config(args.model)
    tok = load_tokenizer(config)
    if args.tasks:
        tasks = find_tasks(args)
    else:
        speeds = read_speeds(args, config, tok.end_ids) if args.prompts else {}
        prompts = read_domains(args)
        held_out = load_trajectories(args.order, config, tok, everything=True) if args.order else None
        pair = read_pair(args.ce, config, tok, args.length or config.length, args.limit) if args.ce else None

    # one adapter after the other
    Path(args.out).mkdir(parents=True, exist_ok=True)    # fails now, not after hours
    model = load_model(config, device, dtype)
    for name, about in todo.items():
        if about["adapter"]:
            lora.load(model, about["adapter"])
        if args.tasks:
            measured = run_benchmarks(model, name, args, tok, tasks)
        else:
            measured = measure(model, about, args, tok, prompts, speeds, held_out, pair)
        if rank == 0:
            save_result(args, about, measured)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        with naming_lost_ranks():
            dist.barrier()
        dist.destroy_process_group()                     # its threads may abort an interpreter that just ends
