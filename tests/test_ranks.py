"""Several ranks on one node and on two: mistakes, a rank that dies, nodes that see different files."""
import json
import os
import re
import shutil
import signal
import socket
import sys
import time

import pytest

import eval as evaluate
import lora
import swap
import tabom
import util
from tests.tiny import Fork, adapted, assert_close_runs, corpus, read_lines, run_main, run_ranks, same_run, write_lines


def agent(count, ranks, port, job, node, log):
    """What torchrun does on one node, but that its ranks are forked: so they have all imports already."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    sys.stdout = sys.stderr = open(log, "a", buffering=1)                    # a line at a time
    config = LaunchConfig(min_nodes=count, max_nodes=count, nproc_per_node=ranks, run_id=str(port), max_restarts=0,
                          rdzv_backend="c10d", rdzv_endpoint=f"localhost:{port}", start_method="fork")
    elastic_launch(config, job)(node)


@pytest.fixture
def nodes(tmp_path):
    """nodes(job): job(0) and job(1) on two nodes, one rank each; what they printed and whether they ended well."""
    def call(job, count=2, ranks=1):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        logs = [tmp_path / f"{port}-{node}.log" for node in range(count)]
        agents = [Fork(target=agent, args=(count, ranks, port, job, node, log)) for node, log in enumerate(logs)]
        for a in agents:
            a.start()
        for a in agents:
            a.join(120)
            a.kill()                                     # nothing happens if it has ended
        return [log.read_text() for log in logs], [a.exitcode == 0 for a in agents]
    return call


def lines_of(shown: str) -> list[str]:
    """Our own lines begin with the rank."""
    return [line for line in shown.splitlines() if line.startswith("[rank ")]


def killed_ranks(shown: str) -> list[str]:
    """What torchrun's report says was killed."""
    return re.findall(r"rank +: (\d+) \(local_rank: 0\)\n +exitcode +: -9 .*SIGKILL", shown)


def assert_named(shown: list[str], lost: str, other: str):
    """
    torchrun on the lost rank's node names it. If that node held torchrun's store, then either the other rank finds out
    too, or its torchrun does, and ends it without a line of its own.
    """
    killed, rest = sorted(shown, key=lambda text: not killed_ranks(text))
    assert killed_ranks(killed) == [lost] and not lines_of(killed) and not killed_ranks(rest)
    if "RendezvousConnectionError" not in rest:
        assert [line.partition(":")[0] for line in lines_of(rest)] == [f"[rank {other}] lost rank {lost}"]


@pytest.fixture
def refused_by_all(capfd):
    """refused_by_all(job, words): on two ranks each ends with exit code 2 and one line that has the words."""
    def check(job, words):
        def ends():
            try:
                job(os.environ["RANK"])
            except SystemExit as e:
                os._exit(0 if e.code == 2 else 1)
            os._exit(1)
        capfd.readouterr()
        run_ranks(2, ends)
        lines = sorted(lines_of(capfd.readouterr().err))
        assert len(lines) == 2, lines
        for rank, line in enumerate(lines):
            assert line.startswith(f"[rank {rank}] ") and words in line and "all need the same flags and files" in line
    return check

# -----------------------------------------------------------------------------
# a mistake

@pytest.mark.parametrize("mistaken, named", [("012", "[rank 0]"), ("2", "[rank 2]")])
def test_a_mistake_is_printed_once_ends_all_ranks_and_torchruns_report(mistaken, named, nodes):
    def job(node):
        if os.environ["RANK"] in mistaken:
            util.stop("t.jsonl:3: wrong")
        time.sleep(100)
    (shown,), ok = nodes(job, 1, 3)
    assert ok == [False] and lines_of(shown) == [f"{named} t.jsonl:3: wrong"]
    *_, last, border = shown.splitlines()
    assert set(border) == {"="} and last.endswith(f": {named} t.jsonl:3: wrong")

# -----------------------------------------------------------------------------
# two nodes

def test_training_on_two_nodes_survives_a_killed_rank_which_is_named(train, nodes, tmp_path):
    """The other rank ends too; the same command with --resume ends as if nothing had happened, and as one process."""
    flags = "--max-steps 12 --save-every 5"
    run_ranks(2, lambda: train("whole", f"{flags} --batch-size 2"))

    def job(node):
        real = tabom.get_lr

        def get_lr(step, *args):
            if step == 7 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            return real(step, *args)
        tabom.get_lr = get_lr
        train("two", f"{flags} --batch-size 2")
    shown, ok = nodes(job)
    assert ok == [False, False]
    assert_named(shown, "1", "0")
    _, ok = nodes(lambda node: train("two", f"{flags} --batch-size 2 --resume"))
    assert ok == [True, True] and same_run(tmp_path / "two", tmp_path / "whole")
    assert_close_runs(tmp_path / "two", train("one", flags))


def test_decoding_and_measuring_on_two_nodes_equals_one_process(cli, nodes, folders, tmp_path):
    """decode.py may write one file per node, for disks that know no locks; eval.py has one folder."""
    flags = "--length 8 --temperature 0.7 --batch-size 1"
    lora.save(adapted(folders["llada"]), tmp_path / "a")
    measure = (f"--model {folders['llada']} --prompts {tmp_path}/prompts.jsonl --adapter mine={tmp_path}/a {flags} "
               f"--tds 2 --keep --out {tmp_path}/")
    whole = cli("one.jsonl", flags)
    run_main(evaluate, measure + "one")

    def job(node):
        cli(f"node{node}.jsonl", flags)
        run_main(evaluate, measure + "two")
    _, ok = nodes(job)
    assert ok == [True, True]
    parts = [read_lines(tmp_path / f"node{node}.jsonl") for node in range(2)]
    assert all(parts) and {row["id"]: row for part in parts for row in part} == whole
    exchange = measure.replace("--tds 2 --keep", "--greedy")
    run_main(swap, exchange + "one-swap")
    _, ok = nodes(lambda node: run_main(swap, exchange + "two-swap"))
    assert ok == [True, True]
    for name in ("base", "mine"):
        swaps = [json.loads((tmp_path / folder / f"{name}.json").read_text()) for folder in ("one-swap", "two-swap")]
        assert swaps[0] == swaps[1]
        folders = tmp_path / "one", tmp_path / "two"
        results = [json.loads((folder / f"{name}.json").read_text()) for folder in folders]
        assert results[0] == results[1]
        records = [read_lines(folder / f"{name}-prompts-1.jsonl") for folder in folders]
        assert records[0] == records[1]


def test_a_rank_that_dies_while_others_measure_is_named(cli, nodes, folders, tmp_path):
    cli("t.jsonl", "--length 8 --limit 1")
    measure = f"--model {folders['llada']} --prompts {tmp_path}/prompts.jsonl --length 8 --out {tmp_path}/r"

    def job(node):
        if os.environ["RANK"] == "0":
            evaluate.decode_all = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        run_main(evaluate, measure)
    shown, ok = nodes(job)
    assert ok == [False, False] and not list((tmp_path / "r").iterdir())
    assert_named(shown, "0", "1")

# -----------------------------------------------------------------------------
# ranks that see different files, or were started with different flags

def test_ranks_that_would_train_different_things_train_nothing(train, folders, tmp_path, monkeypatch, refused_by_all):
    """Each rank stands in its own folder, as on a node of its own."""
    rows = corpus(folders["llada"])
    fewer, other = rows[:20], [row | dict(decoding_order=row["decoding_order"][::-1]) for row in rows]
    for words, second in (("records 20 on one rank, 21 on another", fewer), ("data checksum", other)):
        for rank, content in ((0, rows), (1, second)):
            (tmp_path / f"disk{rank}").mkdir(exist_ok=True)
            write_lines(tmp_path / f"disk{rank}" / "corpus.jsonl", content)

        def job(rank):
            os.chdir(tmp_path / f"disk{rank}")
            train("run", "--all", "corpus.jsonl")
        refused_by_all(job, words)
    refused_by_all(lambda rank: train("run", f"--lr 1e-{4 + int(rank)}"), "checksum of flags")
    assert not (tmp_path / "run").exists()


def test_ranks_do_not_resume_different_runs(train, tmp_path, refused_by_all):
    """An --out that nodes do not share; then the same step and settings, but other weights: both trained alone."""
    content = bytearray((train("disk0", "--max-steps 2 --lam 0.5") / "resume.safetensors").read_bytes())
    job = lambda rank: train(f"disk{rank}", "--max-steps 2 --lam 0.5 --batch-size 2 --resume")
    refused_by_all(job, "start step 0 on one rank, 2 on another")
    assert (tmp_path / "disk0" / "resume.safetensors").read_bytes() == content and not (tmp_path / "disk1").exists()
    shutil.copytree(tmp_path / "disk0", tmp_path / "disk1")
    content[-1] ^= 1                                     # one bit of one number
    (tmp_path / "disk1" / "resume.safetensors").write_bytes(content)
    refused_by_all(job, "checksum of resume file")


def test_ranks_that_would_measure_different_things_measure_nothing(cli, folders, tmp_path, refused_by_all, monkeypatch):
    cli("t.jsonl", "--length 8 --limit 1")
    for disk in range(2):
        lora.save(adapted(folders["llada"], seed=disk), tmp_path / f"disk{disk}" / "a")
        shutil.copy(tmp_path / "prompts.jsonl", tmp_path / f"disk{disk}")
    measure = f"--model {folders['llada']} --prompts prompts.jsonl --length 8"

    def job(rank, flags):
        os.chdir(tmp_path / f"disk{rank}")
        run_main(evaluate, f"{measure} {flags}")
    refused_by_all(lambda rank: job(rank, "--out r --adapter a"), "checksum of adapters")
    refused_by_all(lambda rank: job(rank, f"--out r --window {2 + int(rank)}"), "checksum of flags")
    (tmp_path / "disk1" / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    refused_by_all(lambda rank: job(rank, "--out r"), "data checksum")
    monkeypatch.setattr(evaluate, "files_checksum", lambda args: 0)           # prompts that are no files
    refused_by_all(lambda rank: job(rank, "--out r"), "checksum of prompts")
    os.chdir(tmp_path / "disk0")
    run_main(evaluate, f"{measure} --out r")             # only this node has measured before
    refused_by_all(lambda rank: job(rank, "--out r"), "results in out 0 on one rank, 1 on another")
