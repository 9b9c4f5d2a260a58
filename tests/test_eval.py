"""eval.py: what it writes, what it measures again and what it does not, and the real lm-evaluation-harness on tasks."""
import itertools
import json
import os
import subprocess
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

import decode
import eval as evaluate
import lora
import model as models
from tests.tiny import CHILD, HERE, TORCHRUN, adapted, edit_json, load, read_lines, run_main, tokenizer, write_lines


@pytest.fixture
def measure(folders, tmp_path):
    """measure("--parallel 1 2"): eval.py's main in this process on prompts.jsonl; returns {file's stem: result}."""
    def call(flags):
        run_main(evaluate, f"--model {folders['llada']} --prompts {tmp_path}/prompts.jsonl --length 8 --keep "
                          f"--out {tmp_path}/r {flags}")
        return {file.stem: json.loads(file.read_text()) for file in (tmp_path / "r").glob("*.json")}
    return call


def test_an_adapter_that_changes_nothing_measures_as_the_base(cli, measure, folders, tmp_path):
    rows, path = cli("t.jsonl", "--length 8"), tmp_path / "t.jsonl"
    write_lines(path, [row | {"correct": True} for row in rows.values()])
    lora.save(adapted(folders["llada"], scale=0.0), tmp_path / "same")
    results = measure(f"--adapter mine={tmp_path}/same --parallel 1 2 --tds 2 --order {path} --window 3 "
                      f"--ce {path} {path}")
    base, mine = results["base"], results["mine"]
    assert base["accuracy"] == mine["accuracy"] and set(base["accuracy"]) == {"prompts/1", "prompts/2"}
    assert mine["tds"]["prompts"]["curve"] == pytest.approx(base["tds"]["prompts"]["curve"])
    assert mine["in_order"] == pytest.approx(base["in_order"])
    assert len(base["ce"]["ground truth"]) == 9 and base["ce"]["ground truth"] == base["ce"]["self-distilled"]
    assert {"settings", "commit", "torch", "python", "device"} <= base.keys()
    for r in read_lines(tmp_path / "r" / "base-prompts-1.jsonl"):
        assert r["response_token_ids"] == rows[r["id"]]["response_token_ids"]


@pytest.mark.parametrize("flags, label", [("", "1"), ("--tokens-per-step 3", "3"), ("--parallel 2", "2"),
                                          ("--threshold 0.4", "threshold 0.4"), ("--steps 5", "5 steps")])
def test_the_label_says_the_flags_and_tokens_per_forward_what_was_decoded(flags, label, cli, measure, tmp_path,
                                                                          monkeypatch):
    write_lines(tmp_path / "prompts.jsonl", [dict(prompt=f"{n}+1 = ", answer=str(n)) for n in range(9)])
    forwards, real = [], models.Model.forward
    monkeypatch.setattr(models.Model, "forward", lambda *batch: forwards.append(1) or real(*batch))
    (key, found), = measure(f"--batch-size 1 {flags}")["base"]["accuracy"].items()      # one forward is one step
    records = read_lines(tmp_path / "r" / f"base-prompts-{label}.jsonl")
    tokens = sum(step >= 0 for r in records for step in r["decoding_order"])
    right = sum(r["correct"] is True for r in records)
    assert key == f"prompts/{label}" and found == dict(right=right, n=9, share=right / 9,
                                                       tokens_per_forward=pytest.approx(tokens / len(forwards)))


def test_pass_at_k_is_the_share_of_all_groups_of_k_samples_that_hold_a_right_one():
    rng, N = np.random.default_rng(0), 5
    answer = lambda x: SimpleNamespace(correct=bool(x), step=np.arange(3), decoded=np.ones(3, dtype=bool))
    samples = [[answer(x) for x in row] for row in rng.random((N, 7)) < 0.3]
    found = evaluate.pass_at(samples, [1, 2, 3, 5])
    for k, share in found["share"].items():
        hits = [any(samples[i][prompt].correct for i in group)
                for prompt in range(7) for group in itertools.combinations(range(N), int(k))]
        assert share == pytest.approx(np.mean(hits))
    assert found["samples"] == N and 0 < found["share"]["1"] < found["share"]["5"] < 1


def test_pass_at_k_draws_sample_i_with_the_seed_plus_i_in_any_batch(cli, measure, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "judge", lambda text, *more: zlib.crc32(text.encode()) % 2 == 0)
    sampled = "--temperature 1 --score entropy --tokens-per-step 2"
    found = measure(f"{sampled} --seed 3 --pass-at 1 3 --batch-size 2")["base"]
    right = []
    for seed in (3, 4, 5):
        measure(f"{sampled} --seed {seed} --out {tmp_path}/{seed}")
        right.append([r["correct"] for r in read_lines(tmp_path / f"{seed}" / "base-prompts-2.jsonl")])
    assert found["accuracy"]["prompts/2"]["right"] == sum(right[0])
    curve = found["pass_at"]["prompts/2"]
    assert curve["share"] == {"1": pytest.approx(np.mean(right)), "3": pytest.approx(np.max(right, 0).mean())}
    assert curve["samples"] == 3 and curve["share"]["1"] < curve["share"]["3"]
    assert curve["tokens_per_forward"] == pytest.approx(2)


def test_results_are_found_again_unless_settings_or_weights_are_others(cli, measure, folders, tmp_path, capsys,
                                                                       monkeypatch, refused):
    lora.save(adapted(folders["llada"], scale=0.0), tmp_path / "a")
    flags, files = f"--adapter mine={tmp_path}/a", {name: tmp_path / "r" / f"{name}.json" for name in ("base", "mine")}
    first = measure(flags)
    said = [line for line in capsys.readouterr().out.splitlines() if " prompts/1: " in line]
    # the same again: it says what it found and where, without loading a model
    with monkeypatch.context() as m:
        m.setattr(evaluate, "load_model", None)
        assert measure(flags) == first
        out = capsys.readouterr().out.splitlines()
        assert out == [f"{files['base']}: measured before", said[0], f"{files['mine']}: measured before", said[1]]
        # a result of before a flag existed
        before = files["base"].read_bytes()
        settings = first["base"]["settings"]
        edit_json(files["base"], settings={name: value for name, value in settings.items() if name != "window"})
        measure(flags)
        with refused(f"{files['base']}: was measured with window 32, now it is 4", "another --out"):
            measure(f"{flags} --window 4")
        files["base"].write_bytes(before)
        for more, words in (("--seed 5", "base.json: was measured with seed 0, now it is 5"),
                            (f"--no-base --adapter mine={tmp_path}/b", f"was measured of {tmp_path}/a, now")):
            lora.save(adapted(folders["llada"]), tmp_path / "b")
            with refused(words, "another --out"):
                measure(f"{flags} {more}")
    # other weights in the same folder: only they are measured
    lora.save(adapted(folders["llada"], scale=2.0), tmp_path / "a")
    capsys.readouterr()
    again = measure(flags)
    assert f"{files['mine']}: {tmp_path}/a has other weights now; measured anew" in capsys.readouterr().out
    assert again["base"] == first["base"] and again["mine"]["checksum"] != first["mine"]["checksum"]
    assert files["base"].read_bytes() == before
    old, new = first["mine"]["accuracy"], again["mine"]["accuracy"]
    assert old == first["base"]["accuracy"] and new.keys() == old.keys()
    # other prompts or answers in the same file
    write_lines(tmp_path / "prompts.jsonl", read_lines(tmp_path / "prompts.jsonl")[1:])
    with refused(f"{files['base']}: was measured with data_checksum", "another --out"):
        measure(flags)


def test_harness_runs_our_decoder_on_local_tasks(cli, harness, folders, tmp_path):
    """The real lm_eval, offline, on two ranks: stop strings, chat template, base and adapter, one score per answer."""
    folder = folders["llada"]
    text = {r["prompt"]: r["response"] for r in cli("t.jsonl", "--length 8").values()}
    cut = next(t for t in text.values() if len(t) > 2)[1]                # a character that occurs: it must cut there
    rows = [{"prompt": prompt, "response": answer.partition(cut)[0]} for prompt, answer in text.items()]
    code = f"def counted(doc, results):\n    open('{tmp_path}/count', 'a').write('x')\n    return dict(exact_match=1)\n"
    tasks = harness(dict.fromkeys(["gsm8k_like", "counted"], "exact_match,none"), rows, code, [cut])
    lora.save(adapted(folder, scale=2.0), tmp_path / "a" / "epoch-1")
    argv = (f"eval.py --model {folder} --adapter {tmp_path}/a/epoch-1 --tasks gsm8k_like,counted --task-path {tasks} "
            f"--length 8 --keep --out {tmp_path}/r")
    done = subprocess.run([*TORCHRUN, *argv.split()], cwd=HERE, env=CHILD | os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "r" / "base.json").read_text())
    assert result["tasks"]["gsm8k_like"]["exact_match,none"] == 1.0              # what decode.py wrote, cut
    assert (tmp_path / "r" / "base-tasks.jsonl").read_text() != (tmp_path / "r" / "a-epoch-1-tasks.jsonl").read_text()
    assert (tmp_path / "count").read_text() == "x" * 2 * len(rows)               # scored once, not once per rank


def test_harness_answers_depend_on_the_question_alone(folders):
    """The same answer alone or beside other tasks, another one for a repeat."""
    from lm_eval.api.instance import Instance
    ask = lambda task, doc: Instance("generate_until", {}, (f"ab{doc}=", {"max_gen_toks": 6}), 0, (task, doc, 1))
    args = evaluate.parse_args(["--model", folders["llada"], "--tasks=mine", "--temperature=1"])
    lm = evaluate.Harness(load(folders["llada"]), args, tokenizer(folders["llada"]))
    few = lm.generate_until([ask("mine", 0), ask("mine", 1), ask("mine", 1)])
    many = lm.generate_until([ask("other", 1), ask("mine", 1), ask("other", 0), ask("mine", 1), ask("mine", 0)])
    assert many[4] == few[0] and [many[1], many[3]] == few[1:] and few[1] != few[2]


@pytest.mark.parametrize("task, family, flags, want", [
    ("gsm8k_cot", "Dream", "", (256, 0, None)), ("humaneval_instruct", "Dream", "", (768, 0, None)),
    ("minerva_math500", "llada", "", (512, 64, None)), ("mbpp_instruct", "llada", "", (256, 0, "confidence")),
    ("humaneval_instruct", "llada", "", (512, 0, "logits")), ("gsm8k", "llada", "--length 16", (16, 8, None)),
    ("gsm8k", "llada", "--length 16 --block 4 --suppress-eos logits", (16, 4, "logits")),
    ("ifeval", "llada", "", (512, 0, None)), ("mine", "llada", "", (6, 0, None))])
def test_benchmarks_decode_as_the_papers_table_or_flags_say(task, family, flags, want):
    args = evaluate.parse_args(["--model", "m", "--tasks", task, *flags.split()])
    args = evaluate.task_args(args, task, family, own_length=6)
    assert (args.length, args.block, args.suppress_eos) == want
    assert args.score == ("entropy" if (task, family) == ("ifeval", "llada") else None)
