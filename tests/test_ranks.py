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
import tabom
import util
from tests.tiny import (
    Fork,
    adapted,
    assert_close_runs,
    corpus,
    read_lines,
    run_ranks,
    same_run,
    write_lines,
)


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

def test_a_mistake_of_all_ranks_is_printed_once_and_ends_torchruns_report(nodes):
    (shown,), ok = nodes(lambda node: util.stop("t.jsonl:3: wrong"), 1, 3)
    assert ok == [False] and lines_of(shown) == ["[rank 0] t.jsonl:3: wrong"]
    *_, last, border = shown.splitlines()
    assert set(border) == {"="} and last.endswith(": [rank 0] t.jsonl:3: wrong")


def test_a_mistake_of_one_rank_is_printed_and_ends_the_others(nodes):
    def job(node):
        if os.environ["RANK"] == "2":
            util.stop("t.jsonl:3: wrong")
        time.sleep(100)
    (shown,), ok = nodes(job, 1, 3)
    assert ok == [False] and lines_of(shown) == ["[rank 2] t.jsonl:3: wrong"]

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
    killed, other = sorted(shown, key=lambda text: "[rank 0]" in text)
    assert re.search(r"rank +: 1 .*\n.*SIGKILL", killed)                     # torchrun's report
    assert [line.partition(":")[0] for line in lines_of(other)] == ["[rank 0] lost rank 1"]
    _, ok = nodes(lambda node: train("two", f"{flags} --batch-size 2 --resume"))
    assert ok == [True, True] and same_run(tmp_path / "two", tmp_path / "whole")
    assert_close_runs(tmp_path / "two", train("one", flags))


def test_training_with_an_out_that_nodes_do_not_share_is_not_resumed(train, nodes, tmp_path):
    resume = train("node0", "--max-steps 4") / "resume.safetensors"
    before = resume.read_bytes()
    shown, ok = nodes(lambda node: train(f"node{node}", "--max-steps 4 --batch-size 2 --resume"))
    assert ok == [False, False]
    found = sorted(line for text in shown for line in lines_of(text))
    words = "start step 0 on one rank, 4 on another: all need the same flags and files"
    assert found == [f"[rank 0] {words}", f"[rank 1] {words}"]
    assert resume.read_bytes() == before and not (tmp_path / "node1").exists()


def test_decoding_and_measuring_on_two_nodes_equals_one_process(cli, command, nodes, folders, tmp_path):
    """decode.py may write one file per node, for disks that know no locks; eval.py has one folder."""
    flags = "--length 8 --temperature 0.7 --batch-size 1"
    lora.save(adapted(folders["llada"]), tmp_path / "a")
    measure = (f"--model {folders['llada']} --prompts {tmp_path}/prompts.jsonl --adapter mine={tmp_path}/a {flags} "
               f"--swap --tds 2 --keep --out {tmp_path}/")
    whole = cli("one.jsonl", flags)
    command(evaluate, measure + "one")

    def job(node):
        cli(f"node{node}.jsonl", flags)
        command(evaluate, measure + "two")
    _, ok = nodes(job)
    assert ok == [True, True]
    parts = [read_lines(tmp_path / f"node{node}.jsonl") for node in range(2)]
    assert all(parts) and {row["id"]: row for part in parts for row in part} == whole
    for name in ("base", "mine"):
        one, two = [json.loads((tmp_path / out / f"{name}.json").read_text()) for out in ("one", "two")]
        assert one == two
        records = [read_lines(tmp_path / out / f"{name}-prompts-1.jsonl") for out in ("one", "two")]
        assert records[0] == records[1]


def test_a_rank_that_dies_while_others_measure_is_named(cli, command, nodes, folders, tmp_path):
    cli("t.jsonl", "--length 8 --limit 1")
    measure = f"--model {folders['llada']} --prompts {tmp_path}/prompts.jsonl --length 8 --out {tmp_path}/r"

    def job(node):
        if os.environ["RANK"] == "0":
            evaluate.decode_all = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        command(evaluate, measure)
    shown, ok = nodes(job)
    assert ok == [False, False] and not list((tmp_path / "r").iterdir())
    named = [line.partition(":")[0] for text in shown for line in lines_of(text)]
    # none where torchrun notices first that the other node is gone, and ends rank 1 before it could say so
    assert named in (["[rank 1] lost rank 0"], [])

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
    """The same step and settings, other weights: two nodes that trained alone."""
    for out in ("disk0", "disk1"):
        train(out, "--max-steps 2 --lam 0.5")
    resume = tmp_path / "disk1" / "resume.safetensors"
    content = bytearray(resume.read_bytes())
    content[-1] ^= 1                                     # one bit of one number
    resume.write_bytes(content)
    flags = "--max-steps 2 --lam 0.5 --batch-size 2 --resume"
    refused_by_all(lambda rank: train(f"disk{rank}", flags), "checksum of resume file")


def test_ranks_that_would_measure_different_things_measure_nothing(cli, command, folders, tmp_path, refused_by_all):
    cli("t.jsonl", "--length 8 --limit 1")
    for disk in range(2):
        lora.save(adapted(folders["llada"], seed=disk), tmp_path / f"disk{disk}" / "a")
        shutil.copy(tmp_path / "prompts.jsonl", tmp_path / f"disk{disk}")
    (tmp_path / "disk1" / "prompts.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    measure = f"--model {folders['llada']} --prompts prompts.jsonl --length 8"

    def job(rank, flags):
        os.chdir(tmp_path / f"disk{rank}")
        command(evaluate, f"{measure} {flags}")
    refused_by_all(lambda rank: job(rank, "--out r --adapter a"), "checksum of adapters")
    refused_by_all(lambda rank: job(rank, "--out r"), "checksum of prompts")
    refused_by_all(lambda rank: job(rank, f"--out r --window {2 + int(rank)}"), "checksum of flags")
    os.chdir(tmp_path / "disk0")
    command(evaluate, f"{measure} --out r")              # only this node has measured before
    refused_by_all(lambda rank: job(rank, "--out r"), "results in out 0 on one rank, 1 on another")
