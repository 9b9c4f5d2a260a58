"""
Published trajectories of d3LLM (github.com/hao-ai-lab/d3LLM) as records that tabom.py reads.

$ python study/d3llm.py --model Dream-org/Dream-v0-Instruct-7B --data d3LLM/trajectory_data_dream_32 --out traj.jsonl

A row of theirs holds every state of a decoding: the whole sequence, prompt included, after each step. A record of ours
holds the step that decoded each position. Only config.json of the model is needed, for the id of its mask. --data may
also be a .jsonl or .parquet file of such rows.
"""
import json
import os
import socket
import sys
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from data import read_rows  # noqa: E402
from model import read_config  # noqa: E402
from util import Parser, count, find_change, stop  # noqa: E402

DATA_SETS = {    # name: hub id, configuration, split, kind
    "trajectory_data_dream_32": ("d3LLM/trajectory_data_dream_32", None, "train", "math"),
    "trajectory_data_llada_32": ("d3LLM/trajectory_data_llada_32", None, "train", "math"),
}


def flags():
    parser = Parser(__doc__)
    flag = parser.add_argument
    flag("--model", required=True, help="hub name or folder of the model that decoded them")
    flag("--data", required=True, help="a data set of d3LLM by name, or a file with such rows")
    flag("--limit", type=count, default=0, help="only the first rows of --data; 0 = all")
    flag("--out", required=True, help="a .jsonl file")
    return parser


def parse_args(argv=None):
    return flags().parse_args(argv)


def record_from_states(place: str, row: dict, mask_id: int) -> dict:
    """A position was decoded at the first state in which it is not masked."""
    prompt, states = row.get("prompt_ids"), row.get("trajectory")
    if not isinstance(prompt, list) or not isinstance(states, list) or not states:
        stop(f"{place}: prompt_ids or trajectory is no list; leave the row out")
    for n, state in enumerate(states):
        if not isinstance(state, list) or len(state) != len(states[0]) or state[:len(prompt)] != prompt:
            stop(f"{place}: state {n} is not the prompt and as many tokens as in state 0; leave the row out")
    tokens = np.array(states)[:, len(prompt):]                                  # (states, N)
    changed = (tokens[:-1] != mask_id) & (tokens[1:] != tokens[:-1])
    for n, i in np.argwhere(changed):
        stop(f"{place}: position {i} holds {tokens[n, i]} in state {n} and {tokens[n + 1, i]} in the next; a decoded "
             f"token must stay: pass the --model that decoded it, or leave the row out")
    decoded = tokens[-1] != mask_id
    first = (tokens != mask_id).argmax(0)                                       # (N,)
    # the list may begin with an empty canvas: count the steps that decoded something
    step = np.where(decoded, np.searchsorted(np.unique(first[decoded]), first), -1)
    # without their is_correct, which is true for all: tabom.py judges the answer
    return {"id": row.get("idx"), "prompt": row.get("question"), "response_token_ids": tokens[-1].tolist(),
            "decoding_order": step.tolist(), "prompt_token_ids": prompt, "answer": row.get("gt_answer"),
            "kind": "math"}


def check_same_data(path: str, source: dict):
    """What is there was made of the same data, or another command's file would be trained on."""
    for place, record in islice(read_rows(path), 1):
        changed = find_change(record.get("source") or {}, source, flags())
        if changed:
            stop(f"{place}: was written with {changed}; give another --out")


def main():
    args = parse_args()
    source = {"data": args.data, "model": args.model, "limit": args.limit}
    if os.path.exists(args.out):
        check_same_data(args.out, source)
        print(f"{args.out}: was there before")
        return

    mask_id = read_config(args.model).mask_id
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    # several nodes may run this with one --out: each writes a file of its own, and the last to finish replaces it
    part = f"{args.out}.{socket.gethostname()}.part"
    written = 0
    with open(part, "w") as f:
        for place, row in islice(read_rows(args.data, DATA_SETS), args.limit or None):
            record = record_from_states(place, row, mask_id)
            f.write(json.dumps(record | {"source": source}) + "\n")
            written += 1
    if not written:
        stop(f"{args.data}: is empty; it needs one row per line")
    os.replace(part, args.out)
    print(f"{args.out}: {written} records")


if __name__ == "__main__":
    main()
