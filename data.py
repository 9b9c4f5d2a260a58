"""Prompts and trajectory records: read in one streaming pass, checked, verified.
Nothing a model wrote is ever executed.

    python data.py FILE_OR_NAME        # reads it all, says what is in it, or the first mistake with file and line

A source is a JSONL or parquet file, or a data set of the paper by name (SOURCES). A prompt is an item
{id, prompt, messages, answer, response, kind}; a trajectory record is what decode.py writes (README "Record format").
"""
import ast
import contextlib
import errno
import importlib.util
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

from model import stop

# isort: split
import numpy as np

SOURCES = {    # name: hub id, configuration, split, kind
    "mixchain-z-prm12k": ("horseee/MixChain-Z-PRM12K", None, "train", "math"),
    "ling-coder-sft": ("inclusionAI/Ling-Coder-SFT", None, "train", "code"),
    "gsm8k": ("openai/gsm8k", "main", "train", "math"),
}
LINE_LIMIT = 16 << 20                   # bytes; a longer line is a broken file, not a record
FIELDS = ("prompt", "response", "response_token_ids", "decoding_order", "method", "prompt_token_ids", "entropy",
          "confidence", "id", "answer", "correct", "model", "decode")


# ---------------------------------------------------------------- reading

def lines(path: str, size: float = math.inf):
    """(place, object) for each line of a JSONL file, of its first `size` bytes."""
    if not os.path.isfile(path):
        stop(f"{path}: no such file; give a .jsonl or .parquet file, or one of {', '.join(SOURCES)}")
    n = 0
    with open(path, "rb") as f:
        while f.tell() < size and (raw := f.readline(LINE_LIMIT + 1)):
            n += 1
            place = f"{path}:{n}"
            if len(raw) > LINE_LIMIT:
                stop(f"{place}: the line is longer than {LINE_LIMIT >> 20} MB; one JSON object a line, please")
            if n == 1 and raw.startswith(b"\xef\xbb\xbf"):
                stop(f"{place}: starts with a byte-order mark (EF BB BF); save the file as UTF-8 without BOM")
            if raw.endswith(b"\r\n"):
                stop(f"{place}: the line ends in CR LF; convert the file with: sed -i 's/\\r$//' {path}")
            try:
                row = json.loads(raw.decode(), parse_constant=lambda c: stop(f"{place}: {c} is not JSON; write null"))
            except UnicodeDecodeError as e:
                stop(f"{place}: byte {raw[e.start]:#04x} at {e.start} is not UTF-8; save the file as UTF-8")
            except (ValueError, RecursionError) as e:
                cut = "is cut off" if not raw.endswith(b"\n") else f"is not JSON ({e})"
                stop(f"{place}: the line {cut}: {raw[:40]!r}; delete it, or write the file again")
            if b"\\ud" in raw.lower():                   # half of a surrogate pair is JSON, and no text
                half = re.search(r"[\ud800-\udfff]", json.dumps(row, ensure_ascii=False))
                if half:
                    stop(f"{place}: \\u{ord(half[0]):x} stands alone, which is no character; mend or delete the line")
            if not isinstance(row, dict):
                stop(f"{place}: holds {json.dumps(row)[:40]}, not a JSON object; one object a line, please")
            yield place, row
    if not n and size:
        stop(f"{path}: is empty; it needs one JSON object a line")


def rows(source: str):
    """(place, row) of a JSONL file, a parquet file or a named data set."""
    name, parquet, n = source.lower().rsplit("/", 1)[-1], source.endswith(".parquet") and os.path.isfile(source), 0
    if not parquet and (os.path.exists(source) or name not in SOURCES):
        yield from lines(source)
        return
    hub, config, split, kind = (source, None, None, None) if parquet else SOURCES[name]
    try:
        if parquet:
            from pyarrow.parquet import ParquetFile
            stream = (row for batch in ParquetFile(source).iter_batches(1000) for row in batch.to_pylist())
        else:
            from datasets import load_dataset
            from huggingface_hub.utils import logging
            logging.set_verbosity_error()                # its retries without a network are a dozen lines
            stream = load_dataset(hub, config, split=split, streaming=True)
        for n, row in enumerate(stream, 1):
            yield f"{hub}: row {n}", {"kind": kind, **row}
    except ImportError:
        stop(f"{source}: needs the package datasets: pip install -r requirements-dev.txt, or give a .jsonl file")
    except Exception as e:                               # of the stream: what a reader raises does not come in here
        why, at = (str(e).splitlines() or [""])[0], f"after row {n}" if n else "at its start"
        stop(f"{source}: not a parquet file, or a broken one {at} ({why}); write it again" if parquet else
             f"{source}: {hub} broke off {at} ({type(e).__name__}); check the network, or give a local .jsonl / "
             f".parquet", everywhere=True)
    if not n:
        stop(f"{source}: is empty; it needs one prompt or trajectory a row")


def item(place: str, row: dict, number: int) -> dict:
    """One row of any of the shapes above as {id, prompt, messages, answer, response, kind}."""
    shown = lambda x: json.dumps(x, default=str)[:40]

    def text(*names, blank=False):
        name = next((n for n in names if n in row), None)
        if name is not None and not (isinstance(row[name], str) and (blank or row[name].strip())):
            stop(f"{place}: {name} is {shown(row[name])}, not a text; mend or delete the line")
        return row[name] if name is not None else None

    id = row.get("id", number)
    if type(id) not in (int, str):
        stop(f"{place}: id is {shown(id)}, neither number nor text; mend or delete the line")
    prompt, messages = text("prompt", "question", "instruction"), None
    response = text("response", "output", "gen_text", "target", blank=True)  # a trajectory may start with EOS
    if prompt and row.get("input") and "instruction" in row:
        prompt += "\n" + text("input")
    if prompt is None and "messages" in row:
        roles, turns = {"human": "user", "gpt": "assistant"}, row["messages"]
        if not (isinstance(turns, list) and turns and all(
                isinstance(t, dict) and all(isinstance(t.get(k), str) for k in ("role", "content")) for t in turns)):
            stop(f"{place}: messages is {shown(turns)}, not a list of role and content; mend or delete the line")
        messages = [{"role": roles.get(t["role"].lower(), t["role"].lower()), "content": t["content"]} for t in turns]
        if messages[-1]["role"] == "assistant":
            response = response or messages[-1]["content"]
            messages = messages[:-1]
        prompt = next((t["content"] for t in reversed(messages) if t["role"] == "user"), None)
    if prompt is None:
        stop(f"{place}: has no prompt; name it prompt, question, instruction or messages")
    answer, kind = row.get("answer"), text("kind") if row.get("kind") is not None else None
    if not (answer is None or type(answer) in (str, int, float)):
        stop(f"{place}: answer is {shown(answer)}, not a text or number; mend or delete the line")
    if isinstance(answer, str) and "####" in answer:     # GSM8K: the worked solution, then #### and the number
        response, answer = response or answer, answer.rsplit("####", 1)[1].strip()
    if answer is None and "target" in row and kind != "code":
        answer = final_answer(response)
    return dict(id=id, prompt=prompt, messages=messages or [{"role": "user", "content": prompt}],
                answer=None if answer is None else str(answer), response=response, kind=kind)


def read_prompts(source: str, limit: int = 0) -> list[dict]:
    """All prompts of a source, the first `limit` of them if given; ids are unique."""
    seen, items = set(), []
    for number, (place, row) in enumerate(rows(source)):
        if limit and number >= limit:
            break
        it = item(place, row, number)
        if str(it["id"]) in seen:
            stop(f"{place}: id {it['id']!r} stands twice; ids must differ")
        latex = it["kind"] != "code" and re.search(r"[\\^]", str(it["answer"]))
        if latex and not importlib.util.find_spec("math_verify"):
            stop(f"{place}: answer {it['answer'][:40]!r}: LaTeX is judged by math-verify: pip install math-verify")
        seen.add(str(it["id"]))
        items.append(it | dict(place=place))
    return items


def prompt_ids(place: str, tok, it: dict, raw: bool = False) -> list[int]:
    """Token ids as the model wants them: through the chat template, or the bare text."""
    try:
        text = it["prompt"] if raw or not tok.chat_template else tok.apply_chat_template(
            it["messages"], tokenize=False, add_generation_prompt=True)
    except Exception as e:                               # a template may refuse roles, or be broken in any way
        stop(f"{place}: the model's chat template does not take it ({type(e).__name__}: {' '.join(str(e).split())[:80]}"
             f"); mend or delete the line, or decode with --raw-prompt")
    ids = tok(text, add_special_tokens=False)["input_ids"]
    return ids or stop(f"{place}: the prompt {it['prompt'][:40]!r} has no tokens; mend or delete the line")


# ---------------------------------------------------------------- trajectory records

def first_end(ids, order, end_ids) -> int | None:
    """Position of the first end token if everything up to it is decoded, else None: the response is not finished."""
    for i, (t, step) in enumerate(zip(ids, order, strict=True)):
        if step < 0:
            return None
        if t in end_ids:
            return i
    return None


def total_order(order, entropy=None) -> np.ndarray:
    """Decoded positions sorted by (step, entropy at that step, position): no sort's whim in it."""
    order = np.asarray(order)
    e = np.zeros(len(order)) if entropy is None else np.array([0.0 if x is None else x for x in entropy])
    rank = np.lexsort((np.arange(len(order)), e, order))
    return rank[order[rank] >= 0]


def check_record(place: str, r: dict, need_order: bool = True) -> dict:
    """Stops with place, value and remedy unless r is a sound trajectory record, ours or the authors'."""
    def no(field, why):
        value = json.dumps(r.get(field), default=str)
        stop(f"{place}: {field} {why}: {value[:40]}{'...' if len(value) > 40 else ''}; "
             f"write the record again with decode.py")

    def of(field, kinds, ok=lambda x: True):             # every entry of a list of one of the kinds, and ok
        v = r[field]
        if not isinstance(v, list) or not v or not set(map(type, v)) <= kinds or not all(map(ok, v)):
            no(field, "is not a list of sound values")
        return v

    if "model" in r or "decode" in r:                    # ours: nothing may be missing
        missing = [f for f in FIELDS if f not in r and (need_order or f != "decoding_order")]
        if missing:
            no(missing[0], "is missing")
    model, vocab = r.get("model", {}), 1 << 31
    if "model" in r:
        if not (isinstance(model, dict) and isinstance(model.get("name"), str) and type(model.get("mask_id")) is int
                and type(model.get("vocab_size")) is int and 0 <= model["mask_id"] < model["vocab_size"]):
            no("model", "does not hold name, mask_id and vocab_size")
        vocab = model["vocab_size"]
        ends = model.get("end_ids", [])
        if not (isinstance(ends, list) and all(type(e) is int and 0 <= e < vocab for e in ends)):
            no("model", "has end_ids that are no token ids")
    for field, kinds in dict(prompt=(str,), response=(str,), method=(str,), decode=(dict,), id=(str, int),
                             answer=(str, int, float, type(None)), correct=(bool, type(None))).items():
        if field in r and type(r[field]) not in kinds:
            no(field, "is of the wrong type")
    for field in ("response_token_ids", *["decoding_order"][:need_order]):
        if field not in r:
            no(field, "is missing")
    ids = of("response_token_ids", {int}, lambda t: 0 <= t < vocab)
    order = [-(t == model.get("mask_id")) for t in ids]  # sft needs no order: as if all were decoded at once
    order = of("decoding_order", {int}, lambda s: s >= -1) if "decoding_order" in r else order
    N = len(ids)
    if len(order) != N:
        stop(f"{place}: decoding_order has {len(order)} entries, the response {N} tokens; re-run decode.py")
    if max(order) >= N or max(order) < 0:
        no("decoding_order", f"has its last step at {max(order)}, of {N} tokens at most {N} steps")
    if "prompt_token_ids" in r:
        of("prompt_token_ids", {int}, lambda t: 0 <= t < vocab)
    for field, high in (("entropy", math.inf), ("confidence", 1.0001)):
        if field in r:
            v = of(field, {int, float, type(None)}, lambda x: x is None or (0 <= x <= high and x < math.inf))
            if len(v) != N:
                stop(f"{place}: {field} has {len(v)} entries, the response {N} tokens; re-run decode.py")
            if any((x is None) != (s < 0) for x, s in zip(v, order, strict=True)):
                no(field, "is not null exactly where decoding_order is -1")
    if model and any((t == model["mask_id"]) != (s < 0) for t, s in zip(ids, order, strict=True)):
        no("response_token_ids", f"holds the mask token {model['mask_id']} elsewhere than where decoding_order is -1")
    return r


def read_records(source: str, need_order: bool = True):
    """(place, record) of each trajectory; without need_order also ground truth: a prompt with its response as text."""
    seen: set = set()
    for number, (place, row) in enumerate(rows(source)):
        if {"decoding_order", "response_token_ids", *(("model", "decode") if need_order else ())} & row.keys():
            record = check_record(place, row, need_order)
            if "prompt_token_ids" not in record:
                it = item(place, row, number)
                record |= dict(prompt=it["prompt"], messages=it["messages"])
        else:
            record = item(place, row, number)
            if need_order:
                stop(f"{place}: has no decoding_order; decode trajectories with decode.py, or train with --method sft")
            if not record["response"]:
                stop(f"{place}: has no response; mend or delete the line")
        record.setdefault("id", number)
        if str(record["id"]) in seen:
            stop(f"{place}: id {record['id']!r} stands twice; ids must differ")
        seen.add(str(record["id"]))
        yield place, record


# ---------------------------------------------------------------- the verifier

NUMBER = r"(?<!\d)-?\d[\d,]*(?:\.\d+)?"

def final_answer(text: str) -> str | None:
    """The last of: \\boxed{...}, #### x, "answer is x"; else the last number."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth, i = 1, start + 7
        while i < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            i += 1
        if not depth:
            return text[start + 7:i - 1].strip()
    found = re.findall(r"####\s*([^\n#]+)", text) \
        or re.findall(r"answer\s+is:?\s*([^\n]+?)(?:\.(?!\d)|\n|$)", text, re.I) or re.findall(NUMBER, text)
    return found[-1].strip() if found else None


def number(text: str) -> float | None:
    t = re.sub(r"[\s$%,]|\\[$%!,]", "", text).rstrip(".")
    fraction = re.fullmatch(r"(-?\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", t)
    try:
        return float(fraction[1]) / float(fraction[2]) if fraction else float(t)
    except (ValueError, ZeroDivisionError):
        return None


def same_answer(a: str, b: str) -> bool:
    if a.strip() == b.strip():
        return True
    x, y = number(a), number(b)
    if x is None and y is not None and "\\" not in a:     # "18 dollars", "**5** because": its first number
        x = next((number(m) for m in re.findall(NUMBER, a)), None)
    if x is not None and y is not None:
        return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)
    try:                                                 # LaTeX; its LaTeX grammar only: the other one evaluates text
        from math_verify import LatexExtractionConfig, parse, verify
        gold, got = (parse(f"\\boxed{{{s}}}", [LatexExtractionConfig()]) for s in (b, a))
        return bool(gold and got and verify(gold, got))
    except Exception:                                    # a parser's accident on model text is a wrong answer, no more
        return False


def parses(text: str) -> bool | None:
    """Python in ``` fences (or the whole text) parses; None if the only fences are of other languages."""
    blocks = re.findall(r"```(\w*)[^\n]*\n(.*?)(?:```|\Z)", text, re.S)
    python = [code for lang, code in blocks if lang.lower() in ("", "python", "py", "python3")]
    if blocks and not python:
        return None
    try:
        for code in python or [text]:
            ast.parse(code)
        return bool(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def judge(text: str, finished: bool, answer: str | None, kind: str | None) -> bool | None:
    """true / false / null (nothing to judge by) for a decoded response."""
    if not finished:
        return False
    if answer is not None:
        got = final_answer(text)
        return got is not None and same_answer(got, str(answer))
    return parses(text) if kind == "code" else None


# ---------------------------------------------------------------- shown while it runs, kept when it breaks

class Bar:
    """A bar on a terminal, a plain line every `every` seconds elsewhere; quiet on ranks other than 0."""
    def __init__(self, total: int, what: str, done: int = 0, every: float = 10.0):
        self.total, self.what, self.first, self.every = max(total, 1), what, done, every
        self.start = self.last = time.time()
        self.tty, self.show = sys.stderr.isatty(), os.environ.get("RANK", "0") == "0"

    def __call__(self, done: int, note: str = ""):
        now = time.time()
        if not self.show or (done < self.total and now - self.last < (0.2 if self.tty else self.every)):
            return
        self.last = now
        left = (now - self.start) / max(done - self.first, 1) * (self.total - done)
        filled = 24 * done // self.total
        head = f"\r\033[K{self.what} {'#' * filled}{'.' * (24 - filled)}" if self.tty else self.what
        end = ("\n" if done >= self.total else "") if self.tty else "\n"
        print(f"{head} {done}/{self.total} | {note} | {int(left) // 60}m{int(left) % 60:02d}s left",
              end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def safely(kept: str):
    """Ctrl-C and a full disk end with one line that says what is kept and how to go on; never a traceback."""
    def interrupted(*_):
        with contextlib.suppress(OSError):               # whoever read our lines may be gone already
            if os.environ.get("LOCAL_RANK", "0") == "0":
                os.write(2, f"\ninterrupted; {kept}\n".encode())
        os._exit(130)                                    # not sys.exit: other threads and ranks must not hold it up

    was = signal.getsignal(signal.SIGINT)                # model.py had its own while torch came
    if was is not signal.SIG_IGN:                        # no KeyboardInterrupt: a library may swallow one
        signal.signal(signal.SIGINT, interrupted)
    try:
        yield
        sys.stdout.flush()
    except (KeyboardInterrupt, BrokenPipeError):         # of `... | head`, too
        interrupted()
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        if not e.filename and not full:
            raise                                        # of no file: a network's, or a mistake of ours
        remedy = f"free some space; {kept}" if full else "give a path that is there and may be written"
        stop(f"{e.filename or 'disk'}: {e.strerror}; {remedy}", everywhere=True)
    finally:
        signal.signal(signal.SIGINT, was or signal.default_int_handler)


def write_whole(path, content: bytes):
    """The file is there whole or not at all, also after a power cut."""
    tmp = Path(f"{path}.part")
    try:
        with open(tmp, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            tmp.unlink()                                 # of a full disk it would be the last straw
        raise OSError(e.errno, e.strerror, str(path)) from None


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) == 2 else 2)
    source = sys.argv[1]
    with safely("nothing was to be kept"):
        first = next(rows(source))[1]
        decoded = {"decoding_order", "response_token_ids"} & first.keys()
        records = read_records(source, need_order="decoding_order" in first)
        found = [r for _, r in records] if decoded else read_prompts(source)
        print(f"{source}: {len(found)} items, {sum('decoding_order' in r for r in found)} of them trajectories, "
              f"{sum(r.get('answer') is not None for r in found)} with a gold answer, "
              f"{sum(r.get('correct') is True for r in found)} judged right, "
              f"{sum(r.get('correct') is False for r in found)} wrong")
