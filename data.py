"""
Trajectories, prompts, records and the verifier. Nothing that a model wrote is ever executed.

A source is a .jsonl or .parquet file, or one of the paper's data sets by name (SOURCES). A prompt becomes
{id, prompt, messages, answer, response, kind}; a record, which decode.py writes, becomes a Trajectory.
"""
import ast
import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import NamedTuple
from zlib import crc32

import numpy as np

from util import stop

# -----------------------------------------------------------------------------
# trajectories

@dataclass
class Trajectory:
    """One response and how it was decoded. decode.py fills it, a record holds it, training and evaluation use it."""
    id: object
    prompt: np.ndarray                                   # (P,) token ids
    response: np.ndarray                                 # (N,) token ids, the mask where undecided
    step: np.ndarray                                     # (N,) when each was decoded, a record's decoding_order: 0
                                                         # first, unlike the paper's t; -1 = undecided
    entropy: np.ndarray                                  # (N,) at that step, temperature 1, in nats; nan = unknown
    confidence: np.ndarray                               # (N,) probability of the token, likewise
    end: int | None = None                               # where its first end token is, if all before is decoded
    text: str = ""                                       # what the response says before it, or all that was decoded
    correct: bool | None = None                          # what the verifier says; None = nothing to judge by
    last: int | None = None                              # no target after this position (--tail drop)
    non_ltr: np.ndarray | None = None                    # what the record itself calls out of order

    @property
    def decoded(self) -> np.ndarray:
        return self.step >= 0

    def decoded_before(self, step: int) -> np.ndarray:
        return self.decoded & (self.step < step)

    @property
    def order(self) -> np.ndarray:
        """Def. 1: the positions that may be targets, by step; ties inside a step by entropy, then by position."""
        order = np.lexsort((self.entropy, self.step))        # stable
        order = order[self.decoded[order]]
        return order if self.last is None else order[order <= self.last]

    @property
    def jumps(self) -> np.ndarray:
        """Positions decoded out of left-to-right order: some position to their left was decoded later, or never."""
        if self.non_ltr is not None:
            return self.non_ltr
        when = np.where(self.decoded, self.step, self.step.max() + 1)
        latest = np.maximum.accumulate(when)
        return np.flatnonzero((when < latest) & self.decoded)


class View(NamedTuple):
    """One training sample: what the model sees of a response, the rest being masked, and what it is to predict."""
    traj: Trajectory
    visible: np.ndarray                                  # (N,) bool, the response tokens that are not masked
    targets: np.ndarray                                  # positions to predict, in decoding order


def first_end(traj: Trajectory, end_ids) -> int | None:
    """The position of the first end token if everything up to it is decoded, else None: the response is unfinished."""
    for i, (token, step) in enumerate(zip(traj.response, traj.step, strict=True)):
        if step < 0:
            return None
        if token in end_ids:
            return i
    return None


def fill_in_text(traj: Trajectory, tok):
    """Where the response ends, and what it says."""
    traj.end = first_end(traj, tok.end_ids)
    shown = traj.response[traj.decoded] if traj.end is None else traj.response[:traj.end]
    traj.text = tok.decode(shown.tolist(), skip_special_tokens=True)

# -----------------------------------------------------------------------------
# reading: every row comes with its place, so that a mistake can be named

SOURCES = {    # name: hub id, configuration, split, kind
    "mixchain-z-prm12k": ("horseee/MixChain-Z-PRM12K", None, "train", "math"),
    "ling-coder-sft": ("inclusionAI/Ling-Coder-SFT", None, "train", "code"),
    "gsm8k": ("openai/gsm8k", "main", "train", "math"),
    "gsm8k-test": ("openai/gsm8k", "main", "test", "math"),
}


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
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError:
                stop(f"{place}: is not text; give a .jsonl or .parquet file, or delete the line")
            if text.strip():
                yield place, parse_line(place, text)


def read_parquet(path: str):
    from pyarrow.parquet import ParquetFile
    for batch in ParquetFile(path).iter_batches(1000):
        yield from batch.to_pylist()


def stream_hub(source: str, hub_id: str, config: str | None, split: str):
    try:
        from datasets import load_dataset
        return load_dataset(hub_id, config, split=split, streaming=True)
    except Exception as e:
        stop(f"{source}: {hub_id} cannot be read ({type(e).__name__}); pip install datasets, check the network, or "
             f"give a .jsonl file")


def read_rows(source: str, named: dict = SOURCES):
    """(place, row) of a JSONL file, a parquet file or a named data set; large ones stream."""
    name = source.lower().rpartition("/")[2]
    kind = None
    if os.path.isfile(source) and not source.endswith(".parquet"):
        yield from read_lines(source)
        return
    if os.path.isfile(source):
        rows = read_parquet(source)
    elif name in named and not os.path.exists(source):
        *where, kind = named[name]
        rows = stream_hub(source, *where)
    else:
        stop(f"{source}: no such file; give a .jsonl or .parquet file, or one of {', '.join(named)}")
    for number, row in enumerate(rows, 1):
        yield f"{source}: row {number}", {"kind": kind, **row}

# -----------------------------------------------------------------------------
# prompts

def shorten(value) -> str:
    return json.dumps(value, default=str)[:40]


def read_text(place: str, row: dict, *names) -> str | None:
    """The first of these fields that the row has, which must hold text."""
    for name in names:
        text = row.get(name)
        if isinstance(text, str):
            return text
        if text is not None:
            stop(f"{place}: {name} is {shorten(text)}, not text; correct or delete the line")
    return None


def read_messages(place: str, turns) -> list[dict]:
    """A conversation as the chat template wants it."""
    messages = []
    for turn in turns if isinstance(turns, list) else []:
        match turn:
            case {"role": str(role), "content": str(content)}:                   # Ling-Coder-SFT has HUMAN, ASSISTANT
                messages.append({"role": role.lower().replace("human", "user"), "content": content})
            case _:
                stop(f"{place}: messages holds {shorten(turn)}, not a role and its content; correct or delete the line")
    return messages


def read_item(place: str, row: dict) -> dict:
    """A row in any of the usual forms as {id, prompt, messages, answer, response, kind}."""
    prompt = read_text(place, row, "prompt", "question", "instruction")
    response = read_text(place, row, "response", "output", "gen_text", "target")
    if row.get("instruction") is not None and row.get("input"):
        prompt += "\n" + read_text(place, row, "input")
    if prompt is not None:
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = read_messages(place, row.get("messages"))
        if messages and messages[-1]["role"] == "assistant":
            last = messages.pop()
            response = response or last["content"]
        if messages:
            prompt = messages[-1]["content"]
    if not prompt or not prompt.strip():
        stop(f"{place}: has no prompt; name it prompt, question, instruction or messages")
    if not response and "####" in str(row.get("answer")):    # GSM8K's answers are whole solutions
        response = row["answer"]
    return {"id": row.get("id"), "prompt": prompt, "messages": messages, "response": response,
            "answer": read_answer(place, row), "kind": row.get("kind"), "place": place}


def read_answer(place: str, row: dict) -> str | None:
    """The gold answer, if the row has one."""
    answer = row.get("answer")
    if answer is None and isinstance(row.get("target"), str) and row.get("kind") != "code":
        answer = final_answer(row["target"])
    if answer is None:
        return None
    if isinstance(answer, (dict, list)):
        stop(f"{place}: answer is {shorten(answer)}, not text or a number; correct or delete the line")
    return str(answer).rpartition("####")[2].strip()     # GSM8K: the worked solution, then #### and the number


def check_verifier(place: str, answer: str | None, kind: str | None):
    """Without math-verify every answer in LaTeX would be judged wrong."""
    if answer and kind != "code" and re.search(r"[\\^]", answer) and not find_spec("math_verify"):
        stop(f"{place}: the answer {answer[:40]!r} is LaTeX and needs a package: pip install math-verify")


def read_prompts(source: str, limit: int = 0) -> list[dict]:
    """All prompts of a source, or the first `limit`. Their ids differ: decode.py skips what is done by id."""
    items = {}
    for number, (place, row) in enumerate(islice(read_rows(source), limit or None)):
        item = read_item(place, row)
        if item["id"] is None:
            item["id"] = number
        id = str(item["id"])
        if id in items:
            stop(f"{place}: id {id!r} appears twice; every prompt needs an id of its own, or none has one")
        check_verifier(place, item["answer"], item["kind"])
        items[id] = item
    if not items:
        stop(f"{source}: is empty; it needs one prompt per line")
    return list(items.values())


def prompt_ids(tok, item: dict, raw: bool = False) -> list[int]:
    """Token ids as the model wants them: through its chat template, or the bare text."""
    text = item["prompt"]
    if tok.chat_template and not raw:
        # Qwen3 would think aloud first; other templates ignore this argument
        text = tok.apply_chat_template(item["messages"], tokenize=False, add_generation_prompt=True,
                                       enable_thinking=False)
    try:
        return tok(text, add_special_tokens=False)["input_ids"]
    except Exception as e:                               # the toy's tokenizer has no token for unknown words
        stop(f"{item['place']}: {text[:40]!r} has a word that the tokenizer does not know ({e}); correct the prompt")

# -----------------------------------------------------------------------------
# records: a field is checked where something would be silently wrong without

def read_numbers(place: str, row: dict, field: str, allowed: range | None = None, length: int | None = None):
    """A field with a list of whole numbers, of which a range is allowed; without one, of finite numbers and nulls."""
    values = row.get(field)
    if not isinstance(values, list) or not values:
        stop(f"{place}: {field} is {shorten(values)}, not a list of numbers; write the record again with decode.py")
    if length and len(values) != length:
        stop(f"{place}: {field} has {len(values)} entries, the response {length} tokens; re-run decode.py")
    for value in values:
        if allowed:
            valid = type(value) is int and value in allowed
        else:
            valid = value is None or (type(value) in (int, float) and math.isfinite(value))
        if not valid:
            stop(f"{place}: {field} holds {shorten(value)}, it takes {allowed or 'finite numbers'}; pass the --model "
                 f"of the trajectories, or write the record again with decode.py")
    return np.array(values, int if allowed else np.float32)      # null becomes nan


def model_info(row: dict) -> dict:
    """What decode.py wrote about the model; {} for records that decode.py did not write."""
    match row.get("model"):
        case {"name": str(), "mask_id": int(), "vocab_size": int()} as model:
            return model
    return {}


def encode_reference(place: str, row: dict, tok, length: int) -> np.ndarray:
    """A reference answer as the canvas would look: the answer, end of turn, EOS up to the length, and cut there."""
    response = read_item(place, row)["response"]
    if not response:
        stop(f"{place}: has no response; correct or delete the line")
    ids = tok(response, add_special_tokens=False)["input_ids"]
    return np.array(ids + tok.end_ids[1:] + tok.end_ids[:1] * length)[:length]


def read_trajectory(place: str, row: dict, config, tok, length: int) -> Trajectory:
    """A record of ours or of the authors', or a prompt with a reference answer (sft)."""
    info = model_info(row)
    if info and (info["mask_id"], info["vocab_size"]) != (config.mask_id, config.vocab):
        stop(f"{place}: decoded by {info['name']} (mask {info['mask_id']}, vocabulary {info['vocab_size']}), but "
             f"{config.name} has others; pass the --model that decoded it")

    # tokens
    if "response_token_ids" in row or "decoding_order" in row:
        response = read_numbers(place, row, "response_token_ids", range(config.vocab))
    else:
        response = encode_reference(place, row, tok, length)
    if "prompt_token_ids" in row:
        prompt = read_numbers(place, row, "prompt_token_ids", range(config.vocab))
    else:
        prompt = np.array(prompt_ids(tok, read_item(place, row)))
    N = len(response)
    if len(prompt) + N > config.positions:
        stop(f"{place}: {len(prompt)} + {N} tokens, the model has {config.positions} positions; delete the line")

    # how they were decoded; a record without an order counts as decoded all at once
    if "decoding_order" in row:
        step = read_numbers(place, row, "decoding_order", range(-1, N), N)
    else:
        step = np.where(response == config.mask_id, -1, 0)
    wrong = np.flatnonzero((response == config.mask_id) != (step < 0))
    if len(wrong):
        i = wrong[0]
        stop(f"{place}: position {i} holds token {response[i]}, decoded at step {step[i]}; the mask token "
             f"{config.mask_id} belongs exactly where the step is -1: pass the --model of the trajectories, or re-run "
             f"decode.py")
    row = {"entropy": [None] * N, "confidence": [None] * N} | row        # not known is not zero
    traj = Trajectory(row["id"], prompt, response, step, read_numbers(place, row, "entropy", length=N),
                      read_numbers(place, row, "confidence", length=N))
    if row.get("non_ltr_positions") == []:
        traj.non_ltr = np.arange(0)
    elif "non_ltr_positions" in row:                     # the authors' files
        traj.non_ltr = read_numbers(place, row, "non_ltr_positions", range(N))

    # what they say: with another tokenizer the same ids are other words
    fill_in_text(traj, tok)
    finished = traj.end is not None
    if info and finished and row.get("response", traj.text) != traj.text:
        stop(f"{place}: its tokens read {traj.text[:40]!r} with the tokenizer of {config.name}, its response is "
             f"{shorten(row['response'])}; pass the --model of the trajectories")

    # and whether it is right; a record with an answer and no verdict is judged here
    if "correct" in row:
        traj.correct = row["correct"]
        if not isinstance(traj.correct, bool):
            stop(f"{place}: correct is {shorten(traj.correct)}, not true, false or null; correct the line")
    elif "decoding_order" in row:
        answer = read_answer(place, row)
        check_verifier(place, answer, row.get("kind"))
        traj.correct = judge(traj.text, finished, answer, row.get("kind"))
    return traj


def load_trajectories(source: str, config, tok, everything=False, decoded_by=None, limit=0, length=256, tail="keep",
                      ordered=True) -> list[Trajectory]:
    """
    The records of a source that are finished and not judged wrong, or everything. decoded_by: only these methods;
    length: of reference answers; tail "drop": no targets after the first end; ordered: each must know its order.
    """
    trajs, left_out, names = [], Counter(), set()
    for number, (place, row) in enumerate(islice(read_rows(source), limit or None)):
        if decoded_by and row.get("method") not in decoded_by:
            left_out["decoded by another method"] += 1
            continue
        # parquet fills up with nulls: what is null is not there
        row = {"id": number} | {key: value for key, value in row.items() if value is not None}
        if ordered and "decoding_order" not in row:
            stop(f"{place}: has no decoding_order, the step that decoded each position; write trajectories with "
                 f"decode.py, or use --method sft")
        traj = read_trajectory(place, row, config, tok, length)
        if tail == "drop":                               # paper silent on the tail; study/departures.md
            traj.last = traj.end
        # the paper trains on finished and right answers; reference answers, which have no ids, may be cut at --length
        must_be_valid = not everything and "response_token_ids" in row
        if must_be_valid and traj.end is None:
            left_out["without an end token"] += 1
        elif must_be_valid and traj.correct is False:
            left_out["judged wrong"] += 1
        elif len(traj.order) < 2:
            left_out["with fewer than 2 targets"] += 1
        else:
            trajs.append(traj)
            names.add(model_info(row).get("name", config.name))
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    if not trajs:
        stop(f"{source}: no record to train on ({reasons or 'it is empty'}); decode more prompts, or use --all "
             f"to keep unfinished and wrong ones")
    if os.environ.get("RANK", "0") == "0":
        print(f"{source}: {len(trajs)} records, left out: {reasons or 'none'}", flush=True)
        for other in sorted(names - {config.name}):
            print(f"warning: {source} was decoded by {other}, but {config.name} is trained", flush=True)
    return trajs


def data_checksum(trajs) -> int:
    """Of prompts, responses and their order."""
    value = 0
    for traj in trajs:
        for array in (traj.prompt, traj.response, traj.step, traj.order):
            value = crc32(array.tobytes(), value)
    return value


def model_of(source: str) -> str:
    """The model that the first record of a trajectory file names."""
    _, row = next(read_rows(source), (source, {}))
    if not model_info(row):
        stop(f"{source}: names no model; pass --model")
    return model_info(row)["name"]

# -----------------------------------------------------------------------------
# the verifier

NUMBER = r"(?<!\d)-?\d[\d,]*(?:\.\d+)?"


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, braces inside included."""
    _, found, rest = text.rpartition("\\boxed{")
    if not found:
        return None
    for i, character in enumerate(rest):
        if character == "}" and rest[:i].count("{") == rest[:i].count("}"):
            return rest[:i].strip()
    return None


def final_answer(text: str) -> str | None:
    """\\boxed{x}, else what follows ####, else "the answer is", else the last number."""
    answer = boxed(text)
    if answer is not None:
        return answer
    for pattern in (r"####\s*([^\n#]+)", r"(?i)answer\s+is:?\s*([^\n]+?)(?:\.(?!\d)|\n|$)", NUMBER):
        found = re.findall(pattern, text)
        if found:
            return found[-1].strip()
    return None


def to_number(text: str) -> float | None:
    text = re.sub(r"[\s$%,]|\\[$%!,]", "", text).rstrip(".")
    above, slash, below = text.partition("/")
    try:
        return float(above) / float(below) if slash else float(text)
    except (ValueError, ZeroDivisionError):
        return None


def same_answer(got: str, gold: str) -> bool:
    if got.strip() == gold.strip():
        return True
    x, y = to_number(got), to_number(gold)
    number = re.search(NUMBER, got)
    if x is None and y is not None and number and "\\" not in got:
        x = to_number(number[0])                         # "18 dollars", "**5** because": its first number
    if x is not None and y is not None:
        return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)
    # LaTeX, with math-verify's LaTeX grammar only: its other one evaluates text
    try:
        from math_verify import LatexExtractionConfig, parse, verify
        x, y = [parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()]) for text in (got, gold)]
        return verify(y, x)
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
    if answer is None:
        return code_parses(text) if kind == "code" else None
    got = final_answer(text)
    return got is not None and same_answer(got, answer)
