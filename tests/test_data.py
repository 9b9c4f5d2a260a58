"""Prompts and trajectory records in every form that is read, the refusals that name file and line, and the verifier."""
import json
import math

import numpy as np
import pytest

import d3llm
import data
import tabom
from tests.tiny import HERE, both, good_record, ids_of, read_trajs, run_main, states_row, tokenizer, write_lines

TURNS = [dict(role="system", content="s"), dict(role="user", content="u"), dict(role="assistant", content="a"),
         dict(role="user", content="v")]


@pytest.mark.parametrize("row, want", [
    (dict(prompt="p"), dict(prompt="p", answer=None, response=None, id=0)),
    (dict(question="q", id="a7", answer=12), dict(prompt="q", answer="12", id="a7")),
    (dict(instruction="i", input="x", output="o"), dict(prompt="i\nx", response="o")),
    (dict(prompt="p", gen_text="g", entropy=3, model="m", input=[1]), dict(prompt="p", response="g")),
    (dict(prompt="p", response="r", target=5), dict(response="r")),          # a field we do not need may hold anything
    (dict(question="q", answer="3+4 = 7\n#### 7"), dict(answer="7", response="3+4 = 7\n#### 7")),       # GSM8K
    (dict(question="q", target="so \\boxed{5}"), dict(prompt="q", answer="5", response="so \\boxed{5}")),  # MixChain
    (dict(messages=[dict(role="HUMAN", content="h"), dict(role="ASSISTANT", content="a")]),       # Ling-Coder
     dict(prompt="h", response="a", messages=[dict(role="user", content="h")])),
    (dict(messages=TURNS), dict(prompt="v", response=None, messages=TURNS)),
])
def test_each_prompt_form_is_read_from_jsonl_and_parquet(row, want, tmp_path):
    from pyarrow import Table, parquet
    parquet.write_table(Table.from_pylist([row]), tmp_path / "p.parquet")
    for path, place in ((write_lines(tmp_path / "p.jsonl", [row]), ":1"), (str(tmp_path / "p.parquet"), ": row 1")):
        item, = data.read_prompts(path)
        expected = dict(messages=[dict(role="user", content=item["prompt"])], place=path + place) | want
        assert {k: item[k] for k in expected} == expected


def test_bom_crlf_blank_lines_and_missing_ids_are_no_mistake(tmp_path):
    text = '\ufeff{"prompt": "a"}\r\n\r\n \n{"prompt": "\u00e9\u2028", "id": 7}\r\n{"prompt": "c", "id": null}'
    (tmp_path / "p.jsonl").write_bytes(text.encode())
    items = data.read_prompts(str(tmp_path / "p.jsonl"))
    assert [(item["prompt"], item["id"]) for item in items] == [("a", 0), ("\u00e9\u2028", 7), ("c", 2)]
    assert items[1]["place"] == f"{tmp_path / 'p.jsonl'}:4"


@pytest.mark.parametrize("content, line, words", [
    ('\n', "", "is empty"), ('["a"]', ":1", "not a JSON object"), ('{"promt": "a"}', ":1", "has no prompt"),
    ('{"prompt": 3}', ":1", "prompt is 3"), ('{"prompt": "a", "answer": [1]}', ":1", "answer is [1]"),
    ('{"messages": [{"role": "user"}]}', ":1", "not a role and its content"),
    ('{"prompt": "a", "id": 1}\n\n{"prompt": "b", "id": "1"}', ":3", "id '1' appears twice"),
    ('{"prompt": "a"}\n{"prompt": "b", "id": 0}', ":2", "id '0' appears twice"),
    ('{"messages": 3}', ":1", "has no prompt"),
])
def test_a_prompt_that_cannot_be_read_is_named_with_file_and_line(content, line, words, tmp_path, refused):
    path = tmp_path / "p.jsonl"
    with refused(path, "no such file", "gsm8k"):
        data.read_prompts(str(path))
    path.write_text(content)
    with refused(f"{path}{line}: ", words):
        data.read_prompts(str(path))


def test_records_ours_the_authors_and_reference_answers_are_read(folders, tmp_path, capsys, refused):
    folder, eos = folders["llada"], ids_of("llada").eos
    theirs = dict(question="1+2", gen_text="3", response_token_ids=[4, eos], decoding_order=[0, 1], method="entropy")
    a, b = read_trajs(folder, write_lines(tmp_path / "t.jsonl", [good_record(), theirs]))
    assert (a.id, a.prompt.tolist(), a.step.tolist()) == (0, [1, 2], [1, 0, 0, -1])
    assert a.entropy.tolist() == pytest.approx([0.5, 0.2, 0.1, math.nan], nan_ok=True)       # not known is not zero
    assert a.response.tolist() == good_record()["response_token_ids"] and a.order.tolist() == [2, 1, 0]
    assert tokenizer(folder).decode(b.prompt) == "[user]1+2[assistant]"
    assert (b.response.tolist(), b.order.tolist()) == ([4, eos], [0, 1]) and np.isnan(b.entropy).all()
    out = capsys.readouterr().out
    assert "2 records" in out and "was decoded by m" in out                  # a warning: another model is trained
    # sft takes reference answers: the answer, end of turn, EOS up to --length
    truth = write_lines(tmp_path / "gt.jsonl", [dict(prompt="1+2", output="3")])
    traj, = read_trajs(folder, truth, "--method sft --length 5")
    assert tokenizer(folder).decode(traj.response) == "3<|eot_id|>" + 3 * "<|endoftext|>"
    assert traj.step.tolist() == [0] * 5
    # a record without an order: what is still masked was not decoded
    traj, = read_trajs(folder, write_lines(tmp_path / "r.jsonl", [good_record(decoding_order=None)]), "--method sft")
    assert traj.step.tolist() == [0, 0, 0, -1]
    with refused(f"{truth}:1: has no decoding_order", "--method sft"):
        read_trajs(folder, truth)


def test_unfinished_and_wrong_records_are_left_out_unless_all(folders, tmp_path, capsys, refused):
    folder, i = folders["llada"], ids_of("llada")
    left_out = "1 without an end token, 2 judged wrong, 1 with fewer than 2 targets"
    unfinished = good_record(id=1, response_token_ids=[3, i.mask, i.eos, i.mask], decoding_order=[1, -1, 0, -1])
    short = good_record(id=2, response="", response_token_ids=[i.eos], decoding_order=[0], entropy=[0], confidence=[1])
    rows = [unfinished, good_record(correct=False), short, good_record(id=4, answer="7")]        # judged on reading
    path = write_lines(tmp_path / "t.jsonl", rows)
    with refused(path, left_out, "--all"):
        read_trajs(folder, path)
    assert [traj.id for traj in read_trajs(folder, path, "--all")] == [1, 0, 4]
    write_lines(tmp_path / "t.jsonl", [*rows, good_record(id=5, correct=True, answer="7")])      # a verdict stands
    assert [(traj.id, traj.correct) for traj in read_trajs(folder, path)] == [(5, True)]
    assert f"{path}: 1 records, left out: {left_out}\n" in capsys.readouterr().out
    # one prompt under two decoders
    write_lines(tmp_path / "t.jsonl", [good_record(method=method) for method in ("entropy", "default", "credit", None)])
    assert len(read_trajs(folder, path, "--decoded-by entropy default")) == 2
    assert "left out: 2 decoded by another method" in capsys.readouterr().out


def test_records_of_others_are_read_kindly(folders, tmp_path):
    rows = [good_record(), good_record(method="margin"),                     # two decoders answered one prompt
            {k: v for k, v in good_record().items() if k not in ("id", "model", "decode", "entropy", "confidence")},
            good_record(id=2, correct=True, decode=[1], answer={"a": 1}, prompt=7, extra=None),
            good_record(id="x", model="Dream", response=["ab"])]
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(r).encode() for r in rows))
    trajs = read_trajs(folders["llada"], tmp_path / "t.jsonl")
    assert [t.id for t in trajs] == [0, 0, 2, 2, "x"] and all(t.step.tolist() == [1, 0, 0, -1] for t in trajs)


def test_the_order_falls_back_to_positions_where_entropies_are_not_known(folders, tmp_path):
    ids, steps = [4, 5, 6, 7, 8, ids_of("llada").eos], [1, 0, 1, 0, 1, 1]
    record = good_record(response="", response_token_ids=ids, decoding_order=steps, model=None)
    for entropy, want in ((..., [1, 3, 0, 2, 4, 5]), ([None] * 6, [1, 3, 0, 2, 4, 5]),
                          ([0.3, 0.2, 0.1, 0.1, None, 0.0], [3, 1, 5, 2, 0, 4]),
                          ([None, None, 0.1, 0.1, None, 0.0], [3, 1, 5, 2, 0, 4])):      # what is known goes first
        row = {k: v for k, v in (record | dict(entropy=entropy)).items() if v is not ...}
        traj, = read_trajs(folders["llada"], write_lines(tmp_path / "t.jsonl", [row | dict(confidence=None)]))
        assert traj.order.tolist() == want
        assert np.isnan(traj.entropy).sum() == (6 if entropy is ... else entropy.count(None))


@pytest.mark.parametrize("fields, value, remedy", [
    (dict(decoding_order=[1, 0, 0]), "has 3 entries, the response 4 tokens", "decode.py"),
    (dict(decoding_order=[1, 0, 0, -2]), "holds -2", "decode.py"),
    (dict(decoding_order=[1, 0, 4, -1]), "holds 4", "decode.py"),
    (dict(decoding_order=None), "has no decoding_order", "decode.py"),
    (dict(decoding_order=[1, 0, 0, 1]), "decoded at step 1", "--model"),     # a mask where the order says decoded
    (dict(response_token_ids=[4, 5, 9, 3]), "position 3 holds token 3", "--model"),
    (dict(response_token_ids=[4, 5, 99, 3]), "holds 99", "--model"),
    (dict(prompt_token_ids=[1, "2"]), 'holds "2"', "decode.py"),
    (dict(prompt_token_ids=[1] * 509), "509 + 4 tokens", "delete the line"),
    (dict(entropy=[0.5, 0.2, 0.1]), "entropy has 3 entries, the response 4 tokens", "decode.py"),
    (dict(entropy=[0.5, 0.2, math.nan, None]), "entropy holds NaN", "decode.py"),
    (dict(model=dict(name="other", mask_id=7, vocab_size=10)), "decoded by other (mask 7, vocabulary 10)", "--model"),
    (dict(correct="false"), 'correct is "false"', "true, false or null"),
    (dict(correct=0), "correct is 0", "true, false or null"),
    (dict(response="ba"), "its tokens read 'ab'", "--model"),                # another tokenizer
])
def test_an_unsound_record_is_one_line_with_value_and_remedy(fields, value, remedy, folders, tmp_path, refused):
    path = write_lines(tmp_path / "t.jsonl", [good_record(), good_record(id=1) | fields])
    with refused(f"{path}:2: ", value, remedy):
        read_trajs(folders["llada"], path, "--length 4")


def convert(folder, source, out, flags="") -> str:
    """study/d3llm.py; returns the file that it wrote."""
    run_main(d3llm, f"--model {folder} --data {source} --out {out} {flags}")
    return str(out)


@both
def test_d3llm_states_become_orders_and_answers_are_judged_anew(family, folders, tmp_path, capsys, monkeypatch,
                                                               refused):
    from pyarrow import Table, parquet
    folder = folders[family]
    empty = states_row(folder)
    empty["trajectory"].insert(0, empty["prompt_ids"] + [ids_of(family).mask] * 4)       # some begin with the canvas
    rows = [states_row(folder), states_row(folder, "a=8", idx=6), empty]                 # the second one is wrong
    parquet.write_table(Table.from_pylist(rows), tmp_path / "t.parquet")
    for path in (write_lines(tmp_path / "t.jsonl", rows), str(tmp_path / "t.parquet")):
        out = convert(folder, path, tmp_path / "new" / f"{path[-3:]}.jsonl")
        for traj in read_trajs(folder, out):
            assert (traj.id, traj.step.tolist(), traj.order.tolist()) == (5, [3, 2, 1, 0], [3, 2, 1, 0])
            assert traj.prompt.tolist() == rows[0]["prompt_ids"]
            assert [*traj.prompt, *traj.response] == rows[0]["final_output"]
        assert "2 records, left out: 1 judged wrong" in capsys.readouterr().out
    # by its name it streams, and --limit ends the stream
    import datasets
    read, name, out = [], "d3LLM/trajectory_data_dream_32", tmp_path / "named.jsonl"

    def stream(hub_id, config, split, streaming):
        assert (hub_id, streaming) == (name, True)
        for row in rows:
            read.append(row["idx"])
            yield row
    monkeypatch.setattr(datasets, "load_dataset", stream)
    assert len(read_trajs(folder, convert(folder, name, out, "--limit 1"))) == 1 and len(read) == 1
    # without a network: what is finished stays, and is not taken for something else
    def offline(*_, **__):
        raise ConnectionError
    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert len(read_trajs(folder, convert(folder, name, out, "--limit 1"))) == 1
    with refused(f"{out}:1: was written with limit 1, now it is 2", "give another --out"):
        convert(folder, name, out, "--limit 2")
    with refused(name, "ConnectionError", "check the network"):
        convert(folder, name, tmp_path / "other.jsonl")
    assert not (tmp_path / "other.jsonl").exists()


@pytest.mark.parametrize("place, token, words", [((3, 4), 3, "position 1 holds"), ((3, 6), None, "position 3 holds"),
                                                 ((1, 0), 9, "state 1 is not the prompt")])
def test_inconsistent_states_are_refused_with_their_row(place, token, words, folders, tmp_path, refused):
    """A token that changes, a mask that comes back, another prompt."""
    bad = states_row(folders["llada"])
    bad["trajectory"].append(bad["trajectory"][-1].copy())
    n, i = place
    bad["trajectory"][n + 1 if n == 3 else n][i] = ids_of("llada").mask if token is None else token
    path = write_lines(tmp_path / "t.jsonl", [states_row(folders["llada"]), bad])
    with refused(f"{path}:2: ", words, "leave the row out"):
        convert(folders["llada"], path, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("content, words", [
    (json.dumps(good_record()).encode() + b'\n{"id": 3, "prompt_tok\n', [":2: is not JSON", "delete the line"]),
    (b"\x1f\x8b\x08\x00\xff\xfe{", [":1: is not text", ".jsonl or .parquet"]),
    (None, [": no such file", "gsm8k"])], ids=["torn", "binary", "missing"])
def test_data_that_cannot_be_read_is_one_line(content, words, folders, tmp_path, refused):
    path = tmp_path / "t.jsonl"
    if content:
        path.write_bytes(content)
    with refused(f"{path}{words[0]}", *words[1:]):
        run_main(tabom, f"--data {path} --model {folders['llada']} --out {tmp_path / 'run'}")


@pytest.mark.parametrize("text, answer, verdict", [
    ("first \\boxed{3}, no: \\boxed{4}", "4", True), ("\\boxed{3} as above #### 4", "3", True),    # the box comes first
    ("\\boxed{\\dfrac{3}{6}}", "\\frac12", True), ("\\boxed{\\frac12}", "\\frac{1}{3}", False),
    ("\\boxed{x^2+1}", "1+x^2", True), ("\\boxed{7", "7", True),     # never closed: the last number counts
    ("3 + 4 = 7\n#### 7", "7", True), ("#### 1,234", "1234", True), ("#### $18.00", "18", True),
    ("The answer is 3.5.", "3.5", True), ("The answer is 12.", "13", False), ("#### 1001", "1000", False),
    ("so we have 3 and then 42", "42", True), ("it costs -7 in the end", "-7", True), ("no number", "7", False),
    ("def f(x):\n    return x", None, True), ("```python\nx = 1\n```", None, True), ("def f(:", None, False),
    ("Sure:\n```python\ndef f(:\n```", None, False), ("", None, False),
    ("```javascript\nlet x\n```", None, None),           # nothing that we can parse
])
def test_verifier_finds_the_final_answer_and_parses_code(text, answer, verdict):
    kind = "code" if answer is None else "math"
    assert data.judge(text, True, answer, kind) is verdict
    assert data.judge(text, False, answer, kind) is False                    # unfinished is wrong whatever it says
    assert data.judge(text, True, None, None) is None                        # nothing to judge by


def test_what_a_model_wrote_is_never_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = "__import__('os').system('touch x')"
    for text in (evil, f"\\boxed{{{evil}}}", f"#### {evil}", f"the answer is {evil}", f"```python\n{evil}\n```"):
        for answer, kind in (("1", None), (evil, None), ("x^2", None), (None, "code")):
            data.judge(text, True, answer, kind)
    assert not list(tmp_path.iterdir())


def test_no_source_file_of_ours_reads_pickles_or_runs_text():
    for file in {*HERE.glob("*.py"), *HERE.glob("study/*.py")} - set(HERE.glob("test_*.py")):
        for word in ("import pickle", "torch.load(", "torch.save(", "trust_remote_code=True", "exec(", " eval(",
                     "os.system", "shell=True"):
            assert word not in file.read_text(), f"{file.name} has {word}"
