
def test_eval_measures_draws_and_does_not_measure_twice(cli, command, folders, tmp_path, capsys, refused):
    rows, path, out = cli("t.jsonl", "--length 8"), tmp_path / "t.jsonl", tmp_path / "r"
    write_lines(path, [row | {"correct": True} for row in rows.values()])
    lora.save(adapted(folders["llada"], scale=0.0), tmp_path / "same")       # the identity
    flags = (f"--model {folders['llada']} --adapter mine={tmp_path}/same --prompts {tmp_path}/prompts.jsonl --length 8 "
             f"--parallel 1 2 --tds 2 --order {path} --window 3 --ce {path} {path} --swap --pictures --keep "
             f"--out {out}")
    command(evaluate, flags)
    base, mine = (json.loads((out / f"{name}.json").read_text()) for name in ("base", "mine"))
    assert base["accuracy"] == mine["accuracy"] and set(base["accuracy"]) == {"prompts/1", "prompts/2"}
    assert [mine["tds"], mine["in_order"]] == pytest.approx([base["tds"], base["in_order"]])
    for swapped in mine["swap"]["prompts/2"].values():   # the adapter is the identity, so every swap is the base
        assert swapped == base["accuracy"]["prompts/2"]
    assert {"settings", "commit", "torch", "python", "device"} <= base.keys()
    for picture in ("tds", "ce", "map-base"):
        assert (out / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"
    for r in read_lines(out / "base-prompts-1.jsonl"):
        assert r["response_token_ids"] == rows[r["id"]]["response_token_ids"]
    capsys.readouterr()
    command(evaluate, flags)
    assert "per step" not in capsys.readouterr().out
    with refused("base.json", "other settings"):
        command(evaluate, flags + " --seed 5")


@pytest.mark.parametrize("module, flags, words", [
    (tabom, "--data t.jsonl --window -3", "--window -3: must not be negative"),
    (tabom, "--data t.jsonl --lam nan", "--lam nan"),
    (tabom, "--data t.jsonl --window 1", "--window 1"),
    (decode, "--model m --prompts p --tokens-per-step -2", "--tokens-per-step -2"),
    (evaluate, "--model m", "nothing to measure"),
    (evaluate, "--model m --prompts a/test.jsonl b/test.jsonl", "b/test.jsonl: two files have one stem"),
])
def test_flags_that_would_be_silently_wrong_are_refused(module, flags, words, refused):
    with refused(words):
        module.parse_args(flags.split())


TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
generation_kwargs: {{until: {until}, max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
num_fewshot: 0
metadata: {{version: 1}}
"""


def test_harness_runs_our_decoder_on_local_tasks(cli, folders, tmp_path):
    """The real lm_eval, offline, on two ranks: stop strings, chat template, base and adapter, one score per answer."""
    folder, tasks = folders["llada"], tmp_path / "tasks"
    text = {r["prompt"]: r["response"] for r in cli("t.jsonl", "--length 8").values()}
    cut = next(t for t in text.values() if len(t) > 2)[1]                # a character that occurs: it must cut there
    tasks.mkdir()
    rows = [{"question": prompt, "answer": answer.partition(cut)[0]} for prompt, answer in text.items()]
    file = write_lines(tasks / "d.jsonl", rows)
    (tasks / "utils.py").write_text("import os\ndef count(doc, results):\n    open(os.environ['COUNT'], 'a')"
                                    ".write('x')\n    return dict(exact_match=1)\n")
    for name, more in {"gsm8k_like": "", "counted": "process_results: !function utils.count"}.items():
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, file=file, until=json.dumps([cut]), more=more))
    lora.save(adapted(folder, scale=2.0), tmp_path / "a" / "epoch-1")
    env = CHILD | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "COUNT": f"{tmp_path}/count"}
    argv = (f"eval.py --model {folder} --adapter {tmp_path}/a/epoch-1 --tasks gsm8k_like,counted --task-path {tasks} "
            f"--length 8 --keep --out {tmp_path}/r")
    done = subprocess.run([*TORCHRUN, *argv.split()], cwd=HERE, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "r" / "base.json").read_text())
    assert result["tasks"]["gsm8k_like"]["exact_match,none"] == 1.0              # what decode.py wrote, cut
    assert (tmp_path / "r" / "base-tasks.jsonl").read_text() != (tmp_path / "r" / "a-epoch-1-tasks.jsonl").read_text()
    assert (tmp_path / "count").read_text() == "x" * 2 * len(rows)               # scored once, not once per rank


def test_harness_answers_depend_on_the_question_alone(folders):
    """The same answer alone or beside other tasks, another one for a repeat."""
    from lm_eval.api.instance import Instance
    ask = lambda task, doc: Instance("generate_until", {}, (f"ab{doc}=", {"max_gen_toks": 6}), 0, (task, doc, 1))
    lm = evaluate.new_harness(evaluate.parse_args(["--model", folders["llada"], "--tasks=mine", "--temperature=1"]))
    few = lm.generate_until([ask("mine", 0), ask("mine", 1), ask("mine", 1)])
    many = lm.generate_until([ask("other", 1), ask("mine", 1), ask("other", 0), ask("mine", 1), ask("mine", 0)])
    assert many[4] == few[0] and [many[1], many[3]] == few[1:] and few[1] != few[2]


@pytest.mark.parametrize("task, family, flags, want", [
    ("gsm8k_cot", "Dream", "", (256, 0, None)), ("humaneval_instruct", "Dream", "", (768, 0, None)),
    ("minerva_math500", "llada", "", (512, 64, None)), ("mbpp_instruct", "llada", "", (256, 0, "confidence")),
    ("humaneval_instruct", "llada", "", (512, 0, "logits")), ("gsm8k", "llada", "--length 16", (16, 8, None)),
    ("gsm8k", "llada", "--length 16 --block 4 --suppress-eos logits", (16, 4, "logits")),
    ("mine", "llada", "", (6, 0, None))])
def test_benchmarks_decode_as_the_papers_table_or_flags_say(task, family, flags, want, folders):
    lm = evaluate.new_harness(evaluate.parse_args(["--model", folders[family], "--tasks", task, *flags.split()]))
    args = lm.task_args(task, own_length=6)
    assert (args.length, args.block, args.suppress_eos) == want
