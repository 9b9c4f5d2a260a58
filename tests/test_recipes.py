"""The recipes of run.sh: every stage by its own commands, on tiny models and local tasks, and the paper's tables."""
import json
import shlex
import subprocess
import sys
from math import sqrt
from pathlib import Path

import pytest

import d3llm
import decode
import eval as evaluate
import lora
import report
import tabom
from data import prompt_ids, read_item
from tests.tiny import CHILD, HERE, adapted, good_record, read_lines, run_main, states_row, tokenizer, write_lines

RECIPES = ["dream-math", "dream-code", "llada-math", "llada-code"]
WORDS = ["", "parallel", "components", "grid", "windows", "tds", "ce", "best"]
SCRIPTS = {"decode.py": decode, "tabom.py": tabom, "eval.py": evaluate, "study/report.py": report,
           "study/d3llm.py": d3llm}


def start(words: str, **variables):
    """./run.sh WORDS as a process of its own."""
    env = CHILD | {"PYTHON": sys.executable} | variables
    return subprocess.run(["./run.sh", *words.split()], cwd=HERE, env=env, capture_output=True, text=True)


def commands(words: str, **variables) -> list[tuple]:
    """[(script, its flags, the whole line)], as DRY_RUN=1 prints them."""
    done = start(words, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stderr.splitlines():
        parts = shlex.split(line.removeprefix("+ "))
        script = next(part for part in parts if part in SCRIPTS)
        found.append((script, parts[parts.index(script) + 1:], line))
    return found


@pytest.mark.parametrize("words", ["small", "d3llm", "published adapters",
                                   *(f"{recipe} {word}".strip() for recipe in RECIPES for word in WORDS)])
def test_every_recipe_prints_commands_whose_flags_exist(words):
    found = commands(words)
    for script, flags, _ in found:
        if script == "decode.py":
            args = decode.flags().parse_args(flags)
            assert words == "small" or args.whole and args.ties == "position"
        elif script != "study/report.py":
            SCRIPTS[script].parse_args(flags)
    if words not in ("small", "d3llm"):                  # each ends with the tables
        assert found[-1][:2] == ("study/report.py", ["paper", f"out/{words.split()[0]}".replace(
            "out/published", "out/llada-code")])


@pytest.mark.parametrize("gpus, nodes", [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 2)])
def test_every_number_of_gpus_trains_with_the_same_global_batch(gpus, nodes):
    for recipe in ("d3llm", "dream-code", "llada-math"):
        for script, flags, line in commands(recipe, GPUS=str(gpus), NNODES=str(nodes), HEAD="node0"):
            if script == "tabom.py":
                args = tabom.parse_args(flags)
                released = recipe == "dream-code" and args.method == "tabom"
                assert args.batch_size * args.grad_accum * gpus * nodes == (64 if released else 32)
                assert args.batch_size <= 4 and f"--nproc_per_node {gpus} " in line
            if " torch.distributed.run " in line:
                assert ("--nnodes 2 --rdzv_backend c10d --rdzv_endpoint node0:29400" in line) == (nodes == 2)


def test_tabom_has_the_releases_flags_and_the_others_the_papers():
    want = {"dream-math": (1, 0.1, 2e-5, "uniform", ["entropy"]), "dream-code": (2, 0.1, 1e-4, "non-ltr", None),
            "llada-math": (1, 0.2, 2e-5, "uniform", ["entropy", "default", "credit"]),
            "llada-code": (1, 0.3, 2e-5, "uniform", ["default"])}
    plain = tabom.parse_args(["--data", "-"])
    for recipe, values in want.items():
        trained = {}
        for script, flags, _ in commands(recipe) + commands(f"{recipe} components"):
            if script == "tabom.py":
                args = tabom.parse_args(flags)
                trained[Path(args.out).name] = args
        args = trained["tabom"]
        assert (args.lam, args.gamma, args.lr, args.cut, args.decoded_by) == values
        assert (trained["global-ce"].window, trained["global-ce"].lam) == (0, 0)
        assert (trained["global"].window, trained["global"].lam) == (0, args.lam)
        assert (trained["ce"].window, trained["ce"].lam, trained["ce"].lr) == (32, 0, args.lr)
        for name, method in {"sft-gt": "sft", "sft-sd": "sft", "dinfer": "dinfer", "t3d": "t3d"}.items():
            assert (trained[name].method, trained[name].lr, trained[name].epochs) == (method, plain.lr, plain.epochs)
        assert trained["sft-gt"].decoded_by is None and trained["sft-gt"].data != args.data

# -----------------------------------------------------------------------------
# all stages on a tiny model

METRICS = {"gsm8k_cot": "exact_match,flexible-extract", "minerva_math500": "math_verify,none",
           "humaneval_instruct": "pass@1,create_test", "mbpp_instruct": "pass_at_1,extract_code",
           "ifeval": "prompt_level_loose_acc,none"}


@pytest.fixture
def tiny_recipe(harness, tmp_path, monkeypatch):
    """call("dream-math tds"): the commands that run.sh prints, in this process; variables as a user would set them."""
    rows = [dict(id=n, prompt=f"{n}+{n}=", response=f"{2 * n}") for n in range(4)]       # no answer: nothing is wrong
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)        # 1.5 s each: it asks pip and git
    code = ""
    for task, key in METRICS.items():                    # half of the answers are right, whatever they are
        code += f"def {task}(doc, results):\n    return {{'{key.split(',')[0]}': doc['id'] % 2}}\n\n"
    tasks = harness(METRICS, rows, code)
    variables = dict(OUT=str(tmp_path / "out"), PROMPTS=f"{tasks}/d.jsonl", TASKS=tasks, LIMIT="4",
                     DECODE="--length 16 --block 8", MEASURE="--length 8 --block 8",
                     TRAIN="--all --epochs 2 --warmup 1 --lr 1e-2 --lora-r 2")

    def call(words, only="", **more):
        for script, flags, line in commands(words, **variables | more):
            if only in line:
                report.paper(Path(flags[1])) if script == "study/report.py" else run_main(SCRIPTS[script], flags)
    call.variables = variables
    return call


def test_every_stage_runs_by_its_own_commands(tiny_recipe, folders, tmp_path, capsys, monkeypatch):
    """dream-math with every second word but grid: then each cell of the paper's tables has a number of ours."""
    out, model = tmp_path / "out" / "dream-math", folders["Dream"]
    for word in WORDS:
        if word != "grid":
            tiny_recipe(f"dream-math {word}", MODEL=model, EPOCHS="1" if word == "best" else "")
    printed = capsys.readouterr().out
    printed = printed[printed.rindex("Per cent right"):]
    assert "not run" not in printed and "other metric" not in printed and printed.count("  epoch-1, best ") == 5 * 2 + 3
    assert {path.name for path in out.glob("*.png")} == {"tds.png"} and (out / "ce" / "ce.png").exists()
    # half of four answers are right, in every task: 50 % with an error of 25 points
    assert "TABOM             84.31  50.0 -34.3 ±25.0 41.10  50.0  +8.9 ±25.0 62.70  50.0 -12.7 ±17.7" in printed
    assert {r["decode"]["ties"] for r in read_lines(out / "traj.jsonl")} == {"position"}
    for name, task, k in (("results", "gsm8k_cot", 0), ("parallel", "mbpp_instruct", 2), ("tds", "mbpp_instruct", 0)):
        result = json.loads((out / name / task / "tabom.json").read_text())
        settings = result["settings"]
        assert (settings["tokens_per_step"], settings["greedy"], settings["whole"]) == (k, True, name == "tds")
        if name == "tds":
            assert f"{result['tds'][task]['mean']:6.3f} " in printed
    # what is done is not measured again
    with monkeypatch.context() as m:
        m.setattr(evaluate, "load_model", None)
        tiny_recipe("dream-math components", only="eval.py", MODEL=model)
    # an epoch that was not trained; the rest stays
    before = sorted(out.rglob("*"))
    done = start("dream-math", **tiny_recipe.variables, MODEL=model, PYTHON="true", EPOCHS="2 7")
    assert done.returncode == 2 and "sft-gt/epoch-7: holds no adapter; EPOCHS" in done.stderr.splitlines()[-1]
    # code is executed only by consent
    done = start("dream-math", **tiny_recipe.variables, MODEL=model, PYTHON="true")
    assert done.returncode == 0 and "mbpp_instruct: left out, it executes what a model wrote" in done.stderr
    assert "--tasks ifeval" in done.stderr and "--tasks mbpp_instruct" not in done.stderr
    assert sorted(out.rglob("*")) == before


def test_trajectories_and_adapters_of_the_authors(tiny_recipe, folders, tmp_path, capsys):
    """DATA= trains and measures without decoding; published measures their four adapters beside it."""
    model, d, config = folders["llada"], tmp_path / "out" / "llada-math", evaluate.read_config(folders["llada"])
    rows = []
    for n, method in enumerate(["default", "credit", "margin"]):         # the last is no decoder of the recipe
        ids = [n + 1, n + 2, *[config.eos_id] * 6]
        rows.append(dict(prompt=f"{n}+{n}=", response="ab", response_token_ids=ids, decoding_order=[*range(8)],
                         method=method))
    data = write_lines(tmp_path / "llada_prm12k.jsonl", rows)
    tiny_recipe("llada-math grid", MODEL=model, DATA=data)
    head = read_lines(d / "lam-2-gamma-0.3" / "log.jsonl")[0]["settings"]
    assert (head["records"], head["lam"], head["gamma"], head["data"]) == (2, 2.0, 0.3, data)
    assert not (d / "traj.jsonl").exists()
    printed = capsys.readouterr().out
    assert "lam 2, gamma 0.3  77.48  50.0 -27.5 ±25.0" in printed
    assert "TABOM             78.62          not run" in printed
    # the adapters that they publish
    for name in ("dream_prm12k", "dream_ling_coder", "llada_prm12k", "llada_ling_coder"):
        lora.save(adapted(model), tmp_path / "theirs" / name)
    tiny_recipe(f"published {tmp_path}/theirs", only="llada-math", MODEL=model)
    assert "  their adapter   78.62  50.0 -28.6 ±25.0 36.80" in capsys.readouterr().out
    result = json.loads((d / "results" / "ifeval" / "published.json").read_text())
    assert result["adapter"] == f"{tmp_path}/theirs/llada_prm12k"


@pytest.mark.parametrize("words, variables, want", [
    ("dream-math twice", {}, "./run.sh dream-math twice: unknown; it takes parallel, components"),
    ("dream-maths", {}, "./run.sh dream-maths: unknown; the first lines of run.sh"),
    ("dream-math", {"TASKS": "study"}, "TASKS=study: holds no task; give a folder with one .yaml file for each"),
    ("dream-math", {"TASKS": "nowhere"}, "TASKS=nowhere: holds no task"),
    ("d3llm", {"GPUS": "3"}, "GPUS=3 NNODES=1: 3 GPUs cannot share a batch of 32; give 1, 2, 4, 8 or 16"),
    ("llada-code", {"GPUS": "64"}, "64 GPUs cannot share a batch of 32"),
    ("dream-math", {"NNODES": "2"}, "NNODES=2: give the first node's name, HEAD=NAME"),
    ("published", {}, "./run.sh published DIR: give checkpoints/ of the authors' repository"),
    ("published study", {}, "study/dream_prm12k: holds no adapter; give checkpoints/ of the authors'")])
def test_a_mistake_is_one_line_before_anything_is_run(words, variables, want):
    done = start(words, **variables)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and want in done.stderr


def test_tasks_that_a_folder_lacks_and_adapters_that_are_none_are_refused(tiny_recipe, folders, tmp_path,
                                                                         refused):
    flags = f"--model {folders['llada']} --out {tmp_path}/r"
    with refused("--tasks gsm8k: is no task of the harness", f"{tmp_path}/tasks holds", "ifeval"):
        run_main(evaluate, f"{flags} --tasks gsm8k --task-path {tmp_path}/tasks")
    with refused(f"{tmp_path}/adapter_config.json: cannot be read; give the folder of a model or an adapter"):
        run_main(evaluate, f"{flags} --tasks ifeval --adapter x={tmp_path}")
    # a clone without git-lfs
    lora.save(adapted(folders["llada"]), tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with refused(f"{tmp_path}/a/adapter_model.safetensors: cannot be read", "git-lfs"):
        run_main(evaluate, f"{flags} --tasks ifeval --adapter {tmp_path}/a")
    with refused("is no recipe's folder; give OUT/NAME, NAME one of dream-code, dream-math"):
        report.paper(tmp_path)


def test_the_papers_numbers_are_whole_and_ours_have_their_binomial_error(tmp_path):
    for table in report.PAPER["tables"]:
        columns = [task for tasks in table["groups"].values() for task in tasks]
        assert set(columns) <= report.PAPER["benchmarks"].keys() and set(table["recipes"]) <= set(RECIPES)
        for title, _, *numbers in table["rows"]:
            assert len(numbers) == len(columns) and len(title) < 18, title
    folder = tmp_path / "llada-code" / "results" / "mbpp_instruct"
    folder.mkdir(parents=True)
    scores = {"pass_at_1,none": 0.396, "sample_len": 500}                # the release's task names another filter
    (folder / "dinfer.json").write_text(json.dumps({"tasks": {"mbpp_instruct": scores}}))
    value, error = report.find_score(folder.parent, "mbpp_instruct", "dinfer")
    assert (value, error) == pytest.approx((39.6, 100 * sqrt(0.396 * 0.604 / 500)))
    assert report.paper_cell(38.60, (value, error), 2) == "38.60  39.6  +1.0 ±2.2"
    assert report.find_score(folder.parent, "mbpp_instruct", "tabom") is None


def test_ce_compares_the_first_prompts_with_their_own_answers_in_any_order(folders, tmp_path):
    folder = folders["llada"]
    gt = write_lines(tmp_path / "gt.jsonl", [dict(prompt=f"{n}+1", response="b") for n in range(5)])
    tok = tokenizer(folder)
    own = []
    for n in (4, 2, 0, 3):                               # others number their records as they like, or not at all
        prompt = prompt_ids(tok, read_item("", dict(prompt=f"{n}+1")))
        own.append(good_record(id=None, prompt_token_ids=prompt, correct=n != 2))
    sd = write_lines(tmp_path / "sd.jsonl", own)
    for limit, count in ((0, 3), (3, 1)):                # 0, 3, 4; of the first three prompts only 0
        pair = evaluate.read_pair((gt, sd), evaluate.read_config(folder), tok, 8, limit)
        prompts = [sorted(tuple(traj.prompt) for traj in trajs) for trajs in pair.values()]
        assert prompts[0] == prompts[1] and len(prompts[0]) == count


def test_small_recipe_decodes_trains_measures_and_its_adapter_merges(folders, tmp_path):
    """Every stage of ./run.sh small by its own commands, on a random model."""
    family, rows = "a2d-qwen3", [dict(id=n, prompt=f"{n}+1", answer=str(n + 1)) for n in range(6)]
    prompts, d = write_lines(tmp_path / "p.jsonl", rows), tmp_path / "out" / "small"
    for script, flags, _ in commands("small", OUT=str(tmp_path / "out"), MODEL=folders[family], PROMPTS=prompts,
                                     TEST_PROMPTS=prompts, LIMIT="6", TEST_LIMIT="3", DECODE="--length 16 --block 8",
                                     TRAIN="--all --epochs 3 --window 4 --lr 0.01"):
        run_main(SCRIPTS[script], flags)
    assert {r["decode"]["block"] for r in read_lines(d / "traj.jsonl")} == {8}
    for name in ("base", "sft", "tabom"):
        result = json.loads((d / "results" / f"{name}.json").read_text())
        assert result["accuracy"]["p/1"]["n"] == 3 and result["tds"]["p"]["mean"] > 0
    # the merged checkpoint decodes as the adapter does
    adapter, merged = d / "tabom" / "last", tmp_path / "merged"
    lora.merge_checkpoint(folders[family], str(adapter), str(merged))
    decode_flags = f"--prompts {prompts} --length 16 --block 8"
    run_main(decode, f"--model {folders[family]} --adapter {adapter} {decode_flags} --out {tmp_path}/a.jsonl")
    run_main(decode, f"--model {merged} {decode_flags} --out {tmp_path}/m.jsonl")
    a, m, base = (sorted((r["id"], r["response_token_ids"]) for r in read_lines(file))
                  for file in (tmp_path / "a.jsonl", tmp_path / "m.jsonl", d / "traj.jsonl"))
    assert a == m != base


def test_d3llm_recipe_trains_on_the_records_that_it_writes_and_on_nothing_else(folders, tmp_path, refused):
    folder, out = folders["Dream"], tmp_path / "out" / "d3llm"
    rows = write_lines(tmp_path / "rows.jsonl", [states_row(folder, idx=n) for n in range(3)])

    def run_again(**variables):
        for script, flags, _ in commands("d3llm", OUT=str(tmp_path / "out"), MODEL=folder, DATA=rows, GPUS="1",
                                         TRAIN="--max-steps 2 --lora-r 2", **variables):
            run_main(SCRIPTS[script], flags)
            yield script
    assert list(run_again(LIMIT="2")) == ["study/d3llm.py", "tabom.py"]
    head = read_lines(out / "tabom" / "log.jsonl")[0]["settings"]
    assert (head["records"], head["data"]) == (2, f"{out}/traj.jsonl") and (out / "tabom" / "last").exists()
    written = (out / "traj.jsonl").stat().st_mtime_ns
    assert len(list(run_again(LIMIT="2"))) == 2 and (out / "traj.jsonl").stat().st_mtime_ns == written
    with refused("was written with limit 2, now it is 3", "give another --out"):
        list(run_again(LIMIT="3"))
