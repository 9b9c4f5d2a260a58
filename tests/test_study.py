"""The toy, its base model, the swap and the benchmark."""
import json
import shutil
import sys

import numpy as np
import pytest

import bench
import decode
import eval as evaluate
import lora
import model as models
import report
import study
import swap
import toy
from data import fill_in_text
from tests.tiny import HERE, adapted, load, read_lines, run_main


def test_toy_answers_are_right_and_splits_are_disjoint(tmp_path, monkeypatch):
    """The answers by a second interpreter of the prompts' text; every file of one split, no prompt in two."""
    monkeypatch.setattr(sys, "argv", ["toy.py", "--out", str(tmp_path), "--train", "60", "--test", "40"])
    toy.main()
    files = {path.stem: read_lines(path) for path in tmp_path.iterdir()}
    prompts = {name: {row["prompt"] for row in rows} for name, rows in files.items()}
    same = prompts.pop("gt"), prompts.pop("gt-mix")
    assert same == (prompts["train"], prompts["train"]) and len(prompts["train"]) == 60
    assert sum(len(split) for split in prompts.values()) == len(set().union(*prompts.values()))
    for row in sum(files.values(), []):
        *words, last = row["prompt"].replace(" .", "").split()
        digits = [int(word) for word in [*words, last] if word.isdigit()]
        if len(digits) == 4:                             # logic: the moves come first
            for word in words[:-3]:
                digits = {"reverse": digits[::-1], "sort": sorted(digits), "turn": [*digits[1:], digits[0]],
                          "next": [1 if x == 9 else x + 1 for x in digits]}[word]
        else:
            Ann, Bob = digits
            for word in [*words[2:], last]:
                if word == "swap":
                    Ann, Bob = Bob, Ann
                elif word == "9-Ann" or word.startswith("Ann"):
                    Ann = eval(word, {"Ann": Ann, "Bob": Bob}) % 10
                else:
                    Bob = eval(word, {"Ann": Ann, "Bob": Bob}) % 10
            digits = [Ann, Bob]
        answer = " ".join(str(x) for x in digits)
        assert row["answer"] == answer and row.get("response", answer).endswith(answer)
    for row in files["gt"]:
        assert row["response"].count("comes from") == 6 and " gives " not in row["response"]      # one form only
    assert {len(row["prompt"].split()) for row in files["test-long"]} == {toy.PROMPT}             # six maps, no dots


def test_committed_base_is_able_and_its_tokenizer_fits(tmp_path, refused):
    """Far above chance (1 %) at one and at four tokens per step, on prompts that it was not trained on."""
    config = models.read_config(str(HERE / "study" / "base"))
    tok = models.load_tokenizer(config)
    for domain in ("long", "short", "logic"):
        tasks = toy.draw(domain, "val", 24, seed=5)
        text = toy.write(tasks[0][0]) + " " + toy.write(tasks[0][1])
        ids = tok(text)["input_ids"]
        assert ids == toy.encode(tasks)[0, :len(ids)].tolist() and tok.decode(ids) == " " + text
        assert config.vocab == len(tok) == len(toy.VOCAB)
    net = load(HERE / "study" / "base")
    tasks = toy.draw("short", "val", 24, seed=5)
    for k in (1, 4):
        args = decode.flags().parse_args(["--model", "-", "--prompts", "-", "--tokens-per-step", str(k)])
        s = decode.make_settings(args, config, tok.end_ids)
        prompts = [(str(n), tok(toy.write(task[0]))["input_ids"]) for n, task in enumerate(tasks)]
        right = []
        for traj in decode.decode(net, prompts, s, 24):
            fill_in_text(traj, tok)
            right.append(traj.text.endswith("#### " + toy.write(tasks[int(traj.id)][2])))
        assert s.length == toy.LENGTH and np.mean(right) > 0.4
    # the same sizes with other words, as an older toy.py had
    other = shutil.copytree(HERE / "study" / "base", tmp_path / "older")
    words = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(words.replace(" Ann", "a"))
    with refused("older: its words are not those of this toy.py"):
        toy.check_base(other)


def test_pretraining_writes_a_model_that_loads(tmp_path, monkeypatch, refused):
    small = [dict(phase, steps=1, pool=20) for phase in toy.PHASES]
    monkeypatch.setattr(toy, "PHASES", small)
    real = toy.draw
    monkeypatch.setattr(toy, "draw", lambda domain, split, count, *a, **k: real(domain, split, min(count, 30), *a, **k))
    monkeypatch.setattr(sys, "argv", ["toy.py", "--pretrain", "--out", str(tmp_path / "m")])
    toy.main()
    assert load(tmp_path / "m").config.vocab == len(toy.VOCAB)
    with refused("holds a model already"):
        toy.main()


def test_swap_of_an_adapter_that_changes_nothing_is_the_base_and_is_found_again(cli, folders, tmp_path, monkeypatch,
                                                                                refused):
    lora.save(adapted(folders["llada"], scale=0.0), tmp_path / "same")
    flags = (f"--model {folders['llada']} --prompts {tmp_path}/prompts.jsonl --length 8 --parallel 1 2 "
             f"--adapter mine={tmp_path}/same --out {tmp_path}")
    run_main(evaluate, f"{flags}/eval")
    run_main(swap, f"{flags}/swap")
    evaluated = json.loads((tmp_path / "eval" / "mine.json").read_text())
    base, mine = (json.loads((tmp_path / "swap" / f"{name}.json").read_text()) for name in ("base", "mine"))
    assert base["accuracy"] == mine["accuracy"] == evaluated["accuracy"] and base["swap"] == {}
    for key, own in mine["accuracy"].items():
        assert mine["swap"][key] == {part: own for part in report.SWAPS if part != "own"}
    assert study.shorten(mine).keys() == {"accuracy", "swap"}
    monkeypatch.setattr(swap, "load_model", None)
    run_main(swap, f"{flags}/swap")
    with refused("was measured with seed 0, now it is 5", "another --out"):
        run_main(swap, f"{flags}/swap --seed 5")


def test_swap_is_for_greedy_answers_also_where_a_family_samples_by_itself(cli, folders, tmp_path, monkeypatch, refused):
    monkeypatch.setattr(swap, "load_model", None)        # it is refused before that
    with refused("the temperature is 0.1", "add --greedy"):
        run_main(swap, f"--model {folders['Dream']} --prompts {tmp_path}/prompts.jsonl --out {tmp_path}/r")


def test_what_bench_compares_with_computes_the_same():
    """The release's training step and the published decoding loop, written out in bench.py, on a tiny model."""
    shape = dict(bench.MODELS["dream"], width=32, layers=1, heads=4, kv_heads=1, mlp=48, vocab=1200)
    model = bench.make_model(shape)
    views = bench.make_views(1200)
    ours = bench.train_step(model, views)
    assert ours.item() == pytest.approx(bench.release_step(model, views).item(), rel=1e-4)
    assert ours.item() == pytest.approx(bench.release_step_eager(model, views).item(), rel=1e-4)
    bench.script_answers(model, 16)
    s = bench.make_settings(model.config, "--length 16 --tokens-per-step 2 --score entropy --temperature 0 --top-p 1")
    prompts = [(row, [end, *range(5, 9 + 3 * row)]) for row, end in enumerate((16, 9, 4, 12))]
    plain = bench.plain_decode(model, prompts, s, 4)
    for size in (1, 3):
        assert np.array_equal(bench.our_decode(model, prompts, s, size), plain)


def test_plan_prices_every_stage(monkeypatch, capsys):
    monkeypatch.setitem(bench.MODELS["small"], "layers", 2)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--plan", "small"])
    bench.main()
    printed = capsys.readouterr().out
    for gpu in bench.GPUS:
        assert f"small on 1 x {gpu}" in printed
    for stage in ("decode the prompts", "train tabom", "train t3d --grad-checkpoint"):
        assert printed.count(stage) >= 3
