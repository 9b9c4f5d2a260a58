"""
Prompts, trajectory records and the verifier. Nothing that a model wrote is ever executed.

A source is a .jsonl or .parquet file, or one of the paper's data sets by name (SOURCES). A prompt becomes
{id, prompt, messages, answer, response, kind}; a trajectory record is what decode.py writes (README "Record format").
"""
import ast
import importlib.util
import json
import math
import os
import re
from dataclasses import dataclass

import numpy as np

from util import stop

SOURCES = {    # name: hub id, configuration, split, kind
    "mixchain-z-prm12k": ("horseee/MixChain-Z-PRM12K", None, "train", "math"),
    "ling-coder-sft": ("inclusionAI/Ling-Coder-SFT", None, "train", "code"),
    "gsm8k": ("openai/gsm8k", "main", "train", "math"),
    "gsm8k-test": ("openai/gsm8k", "main", "test", "math"),
    # trajectories that others have decoded
    "trajectory_data_dream_32": ("d3LLM/trajectory_data_dream_32", None, "train", "math"),
    "trajectory_data_llada_32": ("d3LLM/trajectory_data_llada_32", None, "train", "math"),
}

# -----------------------------------------------------------------------------
# reading: every row comes with its place, so that a mistake can be named

def parse_line(place: str, line: str) -> dict:
    try:
        row = json.loads(line)
    except ValueError as e:
        stop(f"{place}: is not JSON ({e}): {line[:40]!r}; delete the line, or write the file again")
    if not isinstance(row, dict):
        stop(f"{place}: holds {line[:40]!r}, not a JSON object; write one object per line")
    return row


def read_lines(path: str):
    """(place, object) for each line of a JSONL file; blank lines, a byte-order mark and CR LF are accepted."""
    if not os.path.isfile(path):
        stop(f"{path}: no such file; give a .jsonl or .parquet file, or one of {', '.join(SOURCES)}")
    with open(path, encoding="utf-8-sig") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                place = f"{path}:{number}"
                yield place, parse_line(place, line)


def read_rows(source: str):
    """(place, row) of a JSONL file, a parquet file or a named data set; large ones stream."""
    name = source.lower().rpartition("/")[2]
    if source.endswith(".parquet") and os.path.isfile(source):
        from pyarrow.parquet import ParquetFile
        kind = None
        batches = ParquetFile(source).iter_batches(1000)
        rows = (row for batch in batches for row in batch.to_pylist())
    elif name in SOURCES and not os.path.exists(source):
        hub_id, config, split, kind = SOURCES[name]
        if not importlib.util.find_spec("datasets"):
            stop(f"{source}: needs a package: pip install datasets; or give a .jsonl file")
        from datasets import load_dataset
        try:
            rows = load_dataset(hub_id, config, split=split, streaming=True)
        except Exception as e:
            stop(f"{source}: {hub_id} cannot be read ({type(e).__name__}); check the network, or give a .jsonl file")
    else:
        yield from read_lines(source)
        return
    for number, row in enumerate(rows, 1):
        yield f"{source}: row {number}", {"kind": kind, **row}

# -----------------------------------------------------------------------------
# prompts

def shorten(value) -> str:
    return json.dumps(value, default=str)[:40]


def text_of(place: str, row: dict, *names) -> str | None:
    """The first of these fields that the row has, which must hold text."""
    for name in names:
        if row.get(name) is not None:
            if not isinstance(row[name], str):
                stop(f"{place}: {name} is {shorten(row[name])}, not text; correct or delete the line")
            return row[name]
    return None


def read_messages(place: str, turns) -> list[dict]:
    """A conversation as the chat template wants it."""
    roles = {"human": "user", "gpt": "assistant"}
    messages = []
    for turn in turns if isinstance(turns, list) else []:
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            stop(f"{place}: messages holds {shorten(turn)}, not a role and its content; correct or delete the line")
        messages.append({"role": roles.get(role.lower(), role.lower()), "content": content})
    return messages


def read_item(place: str, row: dict) -> dict:
    """A row in any of the usual forms as {id, prompt, messages, answer, response, kind}."""
    prompt = text_of(place, row, "prompt", "question", "instruction")
    response = text_of(place, row, "response", "output", "gen_text", "target")
    if prompt is not None and "instruction" in row and row.get("input"):
        prompt += "\n" + text_of(place, row, "input")
    messages = [{"role": "user", "content": prompt}]
    if prompt is None:
        messages = read_messages(place, row.get("messages"))
        if messages and messages[-1]["role"] == "assistant":
            response = response or messages[-1]["content"]
            messages = messages[:-1]
        for message in messages:
            if message["role"] == "user":
                prompt = message["content"]
    if not prompt or not prompt.strip():
        stop(f"{place}: has no prompt; name it prompt, question, instruction or messages")

    answer = row.get("answer")
    if isinstance(answer, (dict, list)):
        stop(f"{place}: answer is {shorten(answer)}, not text or a number; correct or delete the line")
    if isinstance(answer, str) and "####" in answer:     # GSM8K: the worked solution, then #### and the number
        response = response or answer
        answer = answer.rpartition("####")[2].strip()
    if answer is None and isinstance(row.get("target"), str) and row.get("kind") != "code":
        answer = final_answer(row["target"])
    return {"id": row.get("id"), "prompt": prompt, "messages": messages, "response": response,
            "answer": None if answer is None else str(answer), "kind": row.get("kind"), "place": place}


def read_prompts(source: str, limit: int = 0) -> list[dict]:
    """All prompts of a source, or the first `limit`. Their ids differ: decode.py skips what is done by id."""
    items, given = [], set()
    for number, (place, row) in enumerate(read_rows(source)):
        if limit and number >= limit:
            break
        item = read_item(place, row)
        if item["id"] is not None:
            if str(item["id"]) in given:
                stop(f"{place}: id {item['id']!r} appears twice; every prompt needs an id of its own")
            given.add(str(item["id"]))
        latex = item["kind"] != "code" and re.search(r"[\\^]", item["answer"] or "")
        if latex and not importlib.util.find_spec("math_verify"):
            stop(f"{place}: the answer {item['answer'][:40]!r} is LaTeX and needs a package: pip install math-verify")
        items.append(item)
    # a row without an id is known by its number, unless another row has that as its id
    for number, item in enumerate(items):
        if item["id"] is None:
            item["id"] = f"row-{number}" if str(number) in given else number
    if not items:
        stop(f"{source}: is empty; it needs one prompt per line")
    return items


def prompt_ids(tok, item: dict, raw: bool = False) -> list[int]:
    """Token ids as the model wants them: through its chat template, or the bare text."""
    text = item["prompt"]
    if tok.chat_template and not raw:
        # Qwen3 would think aloud first; other templates do not know the word
        text = tok.apply_chat_template(item["messages"], tokenize=False, add_generation_prompt=True,
                                       enable_thinking=False)
    return tok(text, add_special_tokens=False)["input_ids"]

# -----------------------------------------------------------------------------
# trajectory records

@dataclass
class Trajectory:
    """One response and how it was decoded. N: response tokens."""
    id: object
    prompt: np.ndarray                                   # (P,) token ids
    response: np.ndarray                                 # (N,) token ids
    step: np.ndarray                                     # (N,) the step that decoded each position, -1 = never
    entropy: np.ndarray                                  # (N,) at its own step; 0 where the record does not say
    order: np.ndarray                                    # positions that may be targets, by (step, entropy, position)
    jumps: np.ndarray                                    # positions decoded before one to their left (--cut non-ltr)


def first_end(ids, step, end_ids) -> int | None:
    """The position of the first end token if everything up to it is decoded, else None: the response is unfinished."""
    for i, (token, decoded_at) in enumerate(zip(ids, step, strict=True)):
        if decoded_at < 0:
            return None
        if token in end_ids:
            return i
    return None


def total_order(step, entropy) -> np.ndarray:
    """Def. 1: decoded positions sorted by step; ties inside a step by entropy, then by position."""
    order = np.lexsort((np.arange(len(step)), entropy, step))
    return order[step[order] >= 0]


def find_jumps(step) -> np.ndarray:
    """Positions decoded out of left-to-right order: some position to their left was decoded later, or never."""
    when = np.where(step < 0, step.max() + 1, step)
    latest = np.maximum.accumulate(when)
    return np.flatnonzero((when < latest) & (step >= 0))


def int_list(place: str, record: dict, field: str, low: int, high: int) -> np.ndarray:
    """A field that holds whole numbers in low .. high - 1."""
    values = record.get(field)
    if not isinstance(values, list) or not values:
        stop(f"{place}: {field} is {shorten(values)}, not a list of numbers; write the record again with decode.py")
    for value in values:
        if type(value) is not int or not low <= value < high:
            stop(f"{place}: {field} holds {value!r}, which is not in {low}..{high - 1}; pass the --model of the "
                 f"trajectories, or write the record again with decode.py")
    return np.array(values)


def read_steps(place: str, record: dict, ids: np.ndarray, mask_id: int):
    """(step, entropy) of a record, checked to fit its tokens. A record without an order is decoded all at once."""
    N = len(ids)
    step = np.where(ids == mask_id, -1, 0)
    if "decoding_order" in record:
        step = int_list(place, record, "decoding_order", -1, N)
    if len(step) != N:
        stop(f"{place}: decoding_order has {len(step)} entries, the response {N} tokens; re-run decode.py")
    wrong = np.flatnonzero((ids == mask_id) != (step < 0))
    if "decoding_order" in record and len(wrong):
        i = wrong[0]
        stop(f"{place}: position {i} holds token {ids[i]}, decoded at step {step[i]}; the mask token {mask_id} belongs "
             f"exactly where the step is -1: pass the --model of the trajectories, or re-run decode.py")
    entropy = record.get("entropy", [None] * N)
    if not isinstance(entropy, list) or len(entropy) != N:
        stop(f"{place}: entropy is {shorten(entropy)}, not one number for each of the {N} tokens; re-run decode.py")
    for h in entropy:
        if h is not None and (type(h) not in (int, float) or not math.isfinite(h)):
            stop(f"{place}: entropy holds {shorten(h)}, not a number; re-run decode.py")
    return step, np.array([h or 0.0 for h in entropy])


def from_states(place: str, row: dict, mask_id: int) -> dict:
    """
    A row of d3LLM's data sets as a record of ours. Its trajectory is a list of states, the whole sequence after each
    step; a position was decoded at the first state in which it is not masked.
    """
    prompt, states = row.get("prompt_ids"), row["trajectory"]
    if not isinstance(prompt, list) or not isinstance(states, list) or not states or not isinstance(states[0], list):
        stop(f"{place}: prompt_ids is no list, or trajectory no list of states; leave the row out")
    for n, state in enumerate(states):
        if not isinstance(state, list) or len(state) != len(states[0]) or state[:len(prompt)] != prompt:
            stop(f"{place}: state {n} is not the prompt and {len(states[0]) - len(prompt)} tokens; leave the row out")
    tokens = np.array(states)[:, len(prompt):]                                  # (states, N)
    # what is decoded stays
    changed = (tokens[:-1] != mask_id) & (tokens[1:] != tokens[:-1])
    if changed.any():
        n, i = np.argwhere(changed)[0]
        stop(f"{place}: position {i} holds {tokens[n, i]} in state {n} and {tokens[n + 1, i]} in the next; a decoded "
             f"token must stay: leave the row out")
    decoded = tokens[-1] != mask_id
    first = (tokens != mask_id).argmax(0)                                       # (N,)
    # the list may begin with an empty canvas: count the steps that decoded something
    step = np.where(decoded, np.searchsorted(np.unique(first[decoded]), first), -1)
    record = {"id": row.get("idx"), "prompt": row.get("question"), "prompt_token_ids": prompt,
              "response_token_ids": tokens[-1].tolist(), "decoding_order": step.tolist()}
    if "gt_answer" in row:
        record["gt_answer"] = row["gt_answer"]
    return record


def encode_ground_truth(record: dict, tok, length: int) -> list[int]:
    """A reference answer as the canvas would look: the answer, end of turn, EOS up to the length."""
    ids = tok(record["response"], add_special_tokens=False)["input_ids"] + tok.end_ids[1:] + tok.end_ids[:1]
    return ids + tok.end_ids[:1] * (length - len(ids))


def decoder_of(row: dict) -> dict:
    """What decode.py wrote about the model; {} for records that decode.py did not write."""
    model = row.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        if type(model.get("mask_id")) is int and type(model.get("vocab_size")) is int:
            return model
    return {}


def read_trajectory(place: str, row: dict, number: int, args, config, tok):
    """A row as a Trajectory, or the reason why it is left out."""
    row = {key: value for key, value in row.items() if value is not None}        # parquet fills up with nulls
    if "trajectory" in row:                              # another format is another function like this one
        row = from_states(place, row, config.mask_id)
    if args.decoder and row.get("method") not in args.decoder:
        return "of another --decoder"
    model = decoder_of(row)
    if model and (model["mask_id"], model["vocab_size"]) != (config.mask_id, config.vocab):
        stop(f"{place}: decoded by {model['name']} (mask {model['mask_id']}, vocabulary {model['vocab_size']}), but "
             f"{config.name} has mask {config.mask_id}, vocabulary {config.vocab}; pass the --model that decoded it")
    if "decoding_order" not in row and args.method != "sft":
        stop(f"{place}: has no decoding_order, the step that decoded each position; write trajectories with decode.py, "
             f"or use --method sft")
    if "response_token_ids" in row or "decoding_order" in row:
        ids = int_list(place, row, "response_token_ids", 0, config.vocab)
    else:
        item = read_item(place, row)
        if not item["response"]:
            stop(f"{place}: has no response; correct or delete the line")
        ids = np.array(encode_ground_truth(item, tok, args.length))
        if len(ids) > args.length and not args.all:
            return "longer than --length"
    if "prompt_token_ids" in row:
        prompt = int_list(place, row, "prompt_token_ids", 0, config.vocab)
    else:
        prompt = np.array(prompt_ids(tok, read_item(place, row)))
    if len(prompt) + len(ids) > config.positions:
        stop(f"{place}: {len(prompt)} + {len(ids)} tokens, the model has {config.positions} positions; delete the line")
    step, entropy = read_steps(place, row, ids, config.mask_id)

    # with another tokenizer the same ids are other words
    end = first_end(ids, step, tok.end_ids)
    text = "" if end is None else tok.decode(ids[:end].tolist(), skip_special_tokens=True)
    if model and end is not None and isinstance(row.get("response"), str):
        if text != row["response"]:
            stop(f"{place}: its tokens read {text[:40]!r} with the tokenizer of {config.name}, its response is "
                 f"{row['response'][:40]!r}; pass the --model of the trajectories")
    order = total_order(step, entropy)
    if args.tail == "drop" and end is not None:
        order = order[order <= end]                      # paper silent on the tail; README "Departures"
    if not args.all and end is None:
        return "without an end token"
    correct = row.get("correct")
    if "gt_answer" in row:                               # d3LLM calls all of its answers right
        correct = judge(text, end is not None, row["gt_answer"], "math")
    if not args.all and correct is False:
        return "judged wrong"
    if len(order) < 2:
        return "shorter than 2 tokens"
    jumps = find_jumps(step)
    if row.get("non_ltr_positions") == []:               # the authors' files bring their own; the list may be empty
        jumps = np.arange(0)
    elif "non_ltr_positions" in row:
        jumps = int_list(place, row, "non_ltr_positions", 0, len(ids))
    return Trajectory(row.get("id", number), prompt, ids, step, entropy, order, jumps)


def load_trajectories(args, config, tok) -> list[Trajectory]:
    """All records of --data that are finished and not judged wrong (or --all of them), checked against the model."""
    trajs, left_out, names = [], {}, set()
    for number, (place, row) in enumerate(read_rows(args.data)):
        if args.limit and number >= args.limit:
            break
        traj = read_trajectory(place, row, number, args, config, tok)
        if isinstance(traj, str):
            left_out[traj] = left_out.get(traj, 0) + 1
        else:
            trajs.append(traj)
        if decoder_of(row):
            names.add(decoder_of(row)["name"])
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    if not trajs:
        stop(f"{args.data}: no record to train on ({reasons or 'it is empty'}); decode more prompts, or use --all "
             f"to keep unfinished and wrong ones")
    if os.environ.get("RANK", "0") == "0":
        print(f"{args.data}: {len(trajs)} records" + (f", left out: {reasons}" if reasons else ""), flush=True)
        for other in sorted(names - {config.name}):
            print(f"warning: {args.data} was decoded by {other}, but {config.name} is trained", flush=True)
    return trajs


def model_of(source: str) -> str:
    """The model that the first record of a trajectory file names."""
    for _, row in read_rows(source):
        if decoder_of(row):
            return decoder_of(row)["name"]
        break
    stop(f"{source}: names no model; pass --model")

# -----------------------------------------------------------------------------
# the verifier

NUMBER = r"(?<!\d)-?\d[\d,]*(?:\.\d+)?"


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, braces inside included."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + 6, len(text)):
        if text[i] == "{":
            depth += 1
        if text[i] == "}":
            depth -= 1
        if depth == 0:
            return text[start + 7:i].strip()
    return None


def final_answer(text: str) -> str | None:
    """\\boxed{x}, else what follows ####, else "the answer is", else the last number."""
    if boxed(text) is not None:
        return boxed(text)
    for pattern in (r"####\s*([^\n#]+)", r"(?i)answer\s+is:?\s*([^\n]+?)(?:\.(?!\d)|\n|$)", NUMBER):
        found = re.findall(pattern, text)
        if found:
            return found[-1].strip()
    return None


def to_number(text: str) -> float | None:
    text = re.sub(r"[\s$%,]|\\[$%!,]", "", text).rstrip(".")
    fraction = re.fullmatch(r"(-?\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", text)
    try:
        if fraction:
            return float(fraction[1]) / float(fraction[2])
        return float(text)
    except (ValueError, ZeroDivisionError):
        return None


def same_answer(got: str, gold: str) -> bool:
    if got.strip() == gold.strip():
        return True
    x, y = to_number(got), to_number(gold)
    if x is None and y is not None and "\\" not in got:  # "18 dollars", "**5** because": its first number
        found = re.findall(NUMBER, got)
        x = to_number(found[0]) if found else None
    if x is not None and y is not None:
        return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)
    # LaTeX, with math-verify's LaTeX grammar only: its other one evaluates text
    try:
        from math_verify import LatexExtractionConfig, parse, verify
        parsed = [parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()]) for text in (gold, got)]
        return bool(parsed[0] and parsed[1] and verify(*parsed))
    except Exception:                                    # what a parser cannot take is a wrong answer
        return False


def code_parses(text: str) -> bool | None:
    """Whether the Python in ``` fences, or the whole text, parses; None if the only fences are of other languages."""
    fences = re.findall(r"```(\w*)[^\n]*\n(.*?)(?:```|\Z)", text, re.S)
    python = [code for language, code in fences if language.lower() in ("", "python", "py", "python3")]
    if fences and not python:
        return None
    try:
        for code in python or [text]:
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(text.strip())


def judge(text: str, finished: bool, answer: str | None, kind: str | None) -> bool | None:
    """True, False, or None where there is nothing to judge by."""
    if not finished:
        return False
    if answer is not None:
        got = final_answer(text)
        return got is not None and same_answer(got, str(answer))
    if kind == "code":
        return code_parses(text)
    return None
