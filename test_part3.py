import numpy as np, pytest, torch, json, math, sys, subprocess  # noqa
from pathlib import Path
import eval as evaluate  # noqa
import data, decode, lora, model as models  # noqa
from test_tabom import *  # noqa
from test_tabom import HERE, folders, nets, refused, tiny, write_lines, ids_of  # noqa
# ---- CUT HERE: everything above is for running this part alone


# ---------------------------------------------------------------- eval.py

def own_records(folder: str, tmp_path: Path, count: int = 5, length: int = 12, **flags) -> list[dict]:
    """Trajectories of a tiny model through the command line; EOS is rare there, so some never end."""
    prompts = write_lines(tmp_path / "p.jsonl", [dict(id=n, prompt="ab" * n + "c=") for n in range(1, count + 1)])
    extra = [x for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    argv = ["decode.py", "--model", folder, "--prompts", prompts, "--out", str(tmp_path / "t.jsonl"), "--length", str(length), *extra]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", argv)
        decode.main()
    return [r for _, r in data.lines(str(tmp_path / "t.jsonl"))]


def plain_entropy(logits: list[float]) -> float:
    top = max(logits)
    z = sum(math.exp(v - top) for v in logits)
    return -sum(math.exp(v - top) / z * (v - top - math.log(z)) for v in logits)


@both
def test_tds_equals_its_definition_in_plain_loops(family, folders, nets, tmp_path):
    records = own_records(folders[family], tmp_path, 4, 10, tokens_per_step=2, schedule="even")
    eos = ids_of(family).eos
    records[0]["response_token_ids"][4] = eos                # an end in the middle: what follows must not count
    ends, c = [eos], nets[family].config
    want: dict = {}
    for r in records:
        ids, order = r["response_token_ids"], r["decoding_order"]
        stop_at = ids.index(eos) if eos in ids else len(ids) - 1
        for step in sorted(set(order) - {-1}):
            seen = [t if 0 <= s < step else c.mask_id for t, s in zip(ids, order, strict=True)]
            with torch.no_grad():
                logits = nets[family](torch.tensor([r["prompt_token_ids"] + seen]))[0, -len(ids):]
            h = [plain_entropy(logits[i].tolist()) for i in range(stop_at + 1) if seen[i] == c.mask_id]
            if len(h) >= 2:
                want.setdefault(step, []).append(sum(x * x for x in h) / len(h) - (sum(h) / len(h)) ** 2)
    got = evaluate.tds(nets[family], records, c, ends, batch_size=3)
    for step, value in enumerate(got):
        assert (value is None) == (step not in want)
        assert value is None or math.isclose(value, sum(want[step]) / len(want[step]), rel_tol=1e-3, abs_tol=1e-5)


def test_order_agreement_counts_pairs(folders, nets, tmp_path):
    own_records(folders["llada"], tmp_path, 3, 8)
    flags = argparse.Namespace(all=True, method="tabom", tail="keep", length=8, limit=0, data=str(tmp_path / "t.jsonl"))
    net, tok = nets["llada"], models.load_tokenizer(folders["llada"])
    records = evaluate.read_data(flags, net.config, tok, 1)
    right = pairs = 0
    for i, r in enumerate(records):
        for w in range(4):
            visible, targets = evaluate.view(r, "tabom", 3, np.random.default_rng([w, i]))
            seen = [int(t) if v else net.config.mask_id for t, v in zip(r.ids, visible, strict=True)]
            with torch.no_grad():
                logits = net(torch.tensor([r.prompt.tolist() + seen]))[0, -len(r.ids):]
            h = [plain_entropy(logits[t].tolist()) for t in targets]
            right += sum(h[a] < h[b] for a in range(len(h)) for b in range(a + 1, len(h)))
            pairs += len(h) * (len(h) - 1) // 2
    assert math.isclose(evaluate.order_agreement(net, records, net.config, 3, batch_size=5), right / pairs, abs_tol=1e-9)


def test_ce_by_ratio_of_a_uniform_model_is_log_vocabulary(folders, tmp_path):
    own_records(folders["llada"], tmp_path, 3, 8)
    net, tok = models.load(folders["llada"]), models.load_tokenizer(folders["llada"])
    models.part(net, net.family["head"]).weight.data.zero_()
    flags = argparse.Namespace(all=True, method="tabom", tail="keep", length=8, limit=0, data=str(tmp_path / "t.jsonl"))
    got = evaluate.ce_by_ratio(net, evaluate.read_data(flags, net.config, tok, 1), net.config, tok.end_ids, 4)
    assert len(got) == 9 and all(math.isclose(v, math.log(net.config.vocab), rel_tol=1e-5) for v in got.values())


def test_interval_covers_the_share_as_often_as_it_says():
    low, high = evaluate.interval(50, 100)
    assert math.isclose(low, 0.4038, abs_tol=1e-3) and math.isclose(high, 0.5962, abs_tol=1e-3)      # Wilson's, from tables
    rng = np.random.default_rng(0)
    covered = [lo <= 0.3 <= hi for lo, hi in (evaluate.interval(k, 200) for k in rng.binomial(200, 0.3, 2000))]
    assert 0.93 < np.mean(covered) < 0.97


def test_eval_command_measures_draws_and_does_not_measure_twice(folders, tmp_path):
    right = [dict(r, correct=True) for r in own_records(folders["llada"], tmp_path, 3, 8)]
    sd = write_lines(tmp_path / "sd.jsonl", right)
    net = models.load(folders["llada"])
    lora.wrap(net)
    lora.save(net, tmp_path / "a" / "epoch-1")
    argv = [sys.executable, "eval.py", "--model", folders["llada"], "--adapter", f"mine={tmp_path / 'a' / 'epoch-1'}", "--prompts",
            str(tmp_path / "p.jsonl"), "--parallel", "1", "2", "--tds", "2", "--order", str(tmp_path / "t.jsonl"), "--window", "3",
            "--ce", sd, sd, "--length", "8", "--pictures", "--keep", "--out", str(tmp_path / "res")]
    first = subprocess.run(argv, cwd=HERE, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    got = {n: json.loads((tmp_path / "res" / f"{n}.json").read_text()) for n in ("base", "mine")}
    assert got["base"]["accuracy"] == got["mine"]["accuracy"]                       # an adapter with B = 0 is the base
    assert math.isclose(got["base"]["in_order"], got["mine"]["in_order"]) and math.isclose(got["base"]["tds"], got["mine"]["tds"])
    assert {"settings", "commit", "torch", "python", "device"} <= set(got["base"])
    for picture in ("tds.png", "ce.png", "map-base.png"):
        assert (tmp_path / "res" / picture).read_bytes()[:4] == b"\x89PNG"
    kept = [data.check_record(place, r) for place, r in data.lines(str(tmp_path / "res" / "base-p-2.jsonl"))]
    assert len(kept) == 3                                                            # records that can be trained on
    before = (tmp_path / "res" / "base.json").stat().st_mtime_ns
    again = subprocess.run(argv, cwd=HERE, capture_output=True, text=True)
    assert again.returncode == 0 and "a step" not in again.stdout and (tmp_path / "res" / "base.json").stat().st_mtime_ns == before
    other = subprocess.run([*argv, "--seed", "5"], cwd=HERE, capture_output=True, text=True)
    assert other.returncode == 2 and len(other.stderr.splitlines()) == 1


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


def test_harness_runs_our_decoder_on_local_tasks(folders, nets, tmp_path):
    """The real lm_eval, offline: answers, stop strings, chat template, an answer's given beginning, the consent for code."""
    folder = folders["llada"]
    records = own_records(folder, tmp_path, 3, 8)
    text = {r["prompt"]: r["response"] for r in records}
    cut = next(t for t in text.values() if len(t) > 2)[1]                            # a character that is there: it must cut
    rows = [dict(question=q, answer=a.split(cut)[0] if a else "") for q, a in text.items()]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    file = write_lines(tasks / "d.jsonl", rows)
    more = {"gsm8k_like": "", "code_like": "unsafe_code: true", "prefix_like": 'gen_prefix: "a"'}
    for name, extra in more.items():
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, file=file, until=json.dumps([cut]), more=extra))
    argv = [sys.executable, "eval.py", "--model", folder, "--no-base", "--task-path", str(tasks), "--length", "8"]
    net = models.load(folder)
    lora.wrap(net)
    lora.save(net, tmp_path / "a" / "epoch-1")
    argv += ["--adapter", f"mine={tmp_path / 'a' / 'epoch-1'}"]
    env = dict(os.environ, HF_DATASETS_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    run = subprocess.run([*argv, "--tasks", "gsm8k_like,prefix_like", "--out", str(tmp_path / "r1")], cwd=HERE, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    got = json.loads((tmp_path / "r1" / "mine.json").read_text())["tasks"]
    assert got["gsm8k_like"]["exact_match,none"] == 1.0                              # what decode.py wrote, cut at the stop string
    two = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *argv[1:], "--tasks", "gsm8k_like", "--out",
                          str(tmp_path / "r2")], cwd=HERE, env=env, capture_output=True, text=True)
    assert two.returncode == 0, two.stderr[:3000]
    assert json.loads((tmp_path / "r2" / "mine.json").read_text())["tasks"]["gsm8k_like"] == got["gsm8k_like"]
    code = subprocess.run([*argv, "--tasks", "code_like", "--out", str(tmp_path / "r3")], cwd=HERE, env=env, capture_output=True, text=True)
    assert code.returncode == 2 and "unsafe" in code.stderr.splitlines()[-1] and not (tmp_path / "r3" / "mine.json").exists()
    own = subprocess.run([sys.executable, "eval.py", "lm_eval", "run", "--model", "tabom", "--model_args", f"model={folder},length=8", "--tasks",
                          "gsm8k_like", "--include_path", str(tasks), "--apply_chat_template"], cwd=HERE, env=env, capture_output=True, text=True)
    assert own.returncode == 0 and "exact_match" in own.stdout, own.stderr[-2000:]


@pytest.mark.parametrize("task,family,want", [("gsm8k_cot", "Dream", (256, 0)), ("minerva_math500", "llada", (512, 64)),
                                              ("humaneval_instruct", "Dream", (768, 0)), ("mbpp_instruct", "llada", (256, 256)),
                                              ("ifeval", "llada", (512, 512)), ("my_own", "llada", None)])
def test_benchmarks_decode_as_the_papers_table_says(task, family, want):
    assert evaluate.benchmark_flags(task, family) == want
