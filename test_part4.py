import argparse, json, math, os, random, shutil, signal, subprocess, sys, time  # noqa
from pathlib import Path  # noqa
import numpy as np, pytest, torch  # noqa
import data, decode, lora, tabom, model as models  # noqa
from test_tabom import *  # noqa
from test_tabom import HERE, folders, good_record, ids_of, refused, tiny, write_lines  # noqa
from hypothesis import HealthCheck, given, settings, strategies as st  # noqa
# ---- CUT HERE: everything above is for running this part alone


# ---------------------------------------------------------------- bad input, and what must never happen

ANYTHING = st.recursive(st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | st.text(max_size=5),
                        lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=3), x, max_size=2), max_leaves=6)


def sound(r: dict) -> bool:
    """A second opinion on what a whole record of ours is, field by field."""
    kinds = dict(prompt=str, response=str, method=str, decode=dict, model=dict, response_token_ids=list, decoding_order=list,
                 prompt_token_ids=list, entropy=list, confidence=list)
    if set(data.FIELDS) - set(r) or any(type(r[k]) is not t for k, t in kinds.items()):
        return False
    m, ids, order = r["model"], r["response_token_ids"], r["decoding_order"]
    if type(m.get("name")) is not str or any(type(m.get(k)) is not int for k in ("mask_id", "vocab_size")):
        return False
    token = lambda t: type(t) is int and 0 <= t < m["vocab_size"]                       # noqa: E731
    number = lambda x, high: type(x) in (int, float) and 0 <= x <= high and math.isfinite(x)   # noqa: E731
    return (all(map(token, ids + r["prompt_token_ids"] + [m["mask_id"]])) and r["prompt_token_ids"] and ids
            and all(type(s) is int and -1 <= s < len(ids) for s in order) and max(order) >= 0
            and len(ids) == len(order) == len(r["entropy"]) == len(r["confidence"])
            and all((t == m["mask_id"]) == (s < 0) for t, s in zip(ids, order, strict=True))
            and all(h is None if s < 0 else number(h, 1e300) for h, s in zip(r["entropy"], order, strict=True))
            and all(p is None if s < 0 else number(p, 1.001) for p, s in zip(r["confidence"], order, strict=True))
            and type(r["id"]) in (int, str) and type(r["answer"]) in (str, int, float, type(None))
            and type(r["correct"]) in (bool, type(None)) and isinstance(m.get("end_ids", []), list)
            and all(map(token, m.get("end_ids", []))))


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.data())
def test_mutated_records_are_refused_with_place_or_sound(draw, tmp_path_factory):
    """Any field gone, replaced, or one entry of it replaced: never a traceback, never a silent pass."""
    r = json.loads(json.dumps(good_record()))
    for _ in range(draw.draw(st.integers(1, 2))):
        field = draw.draw(st.sampled_from([f for f in data.FIELDS if f in r] or ["id"]))
        how = draw.draw(st.sampled_from(["gone", "other", "entry", "longer"]))
        if how == "gone":
            r.pop(field, None)
        elif how == "other" or not isinstance(r.get(field), (list, dict)) or not r[field]:
            r[field] = draw.draw(ANYTHING)
        elif how == "longer" and isinstance(r[field], list):
            r[field] = r[field] + [draw.draw(ANYTHING)]
        else:
            key = draw.draw(st.sampled_from(sorted(r[field]) if isinstance(r[field], dict) else range(len(r[field]))))
            r[field][key] = draw.draw(ANYTHING)
    path = tmp_path_factory.mktemp("m") / "t.jsonl"
    path.write_text(json.dumps(r) + "\n")
    told: list = []
    with pytest.MonkeyPatch.context() as m:
        m.setattr(data, "stop", lambda text: told.append(text) or (_ for _ in ()).throw(SystemExit(2)))
        try:
            got = list(data.read_records(str(path)))
        except SystemExit as e:
            assert e.code == 2 and len(told) == 1 and "\n" not in told[0] and told[0].startswith(f"{path}:1:"), told
            return
    assert not told and len(got) == 1
    assert sound(r) or not {"model", "decode"} & set(r), f"passed in silence: {r}"      # without both it is the authors' form


@pytest.mark.parametrize("argv,words", [
    (["decode.py", "--model", "{m}", "--prompts", "{p}", "--out", "{o}", "--length", "10", "--block", "4"], ["--length 10", "--block 4"]),
    (["decode.py", "--model", "{m}", "--prompts", "{p}", "--out", "{o}", "--length", "8", "--steps", "9"], ["--steps 9"]),
    (["decode.py", "--model", "{m}", "--prompts", "{p}", "--out", "{o}", "--length", "600"], ["512 positions"]),
    (["decode.py", "--model", "{m}", "--prompts", "{p}", "--out", "{d}"], ["is a folder"]),
    (["decode.py", "--model", "{d}/nowhere", "--prompts", "{p}", "--out", "{o}"], ["nowhere"]),
    (["decode.py", "--model", "{m}", "--prompts", "{p}", "--out", "{o}", "--score", "foo"], ["foo"]),
    (["tabom.py", "--data", "{t}", "--out", "{o}", "--window", "1"], ["--window 1"]),
    (["tabom.py", "--data", "{t}", "--out", "{o}", "--lam", "-1"], ["--lam -1"]),
    (["tabom.py", "--data", "{t}", "--out", "{o}", "--rank", "0"], ["--rank 0"]),
    (["tabom.py", "--data", "{d}/none.jsonl", "--out", "{o}"], ["none.jsonl"]),
    (["tabom.py", "--data", "{t}", "--out", "{t}"], ["is a file"]),
    (["tabom.py", "--data", "{t}", "--out", "{o}", "--targets", "nope"], ["nope", "q_proj"]),
    (["eval.py", "--model", "{m}", "--prompts", "{p}", "--adapter", "{d}/none", "--out", "{o}"], ["none"]),
    (["toy.py", "--out", "{o}", "--target", "7"], ["--target 7"]),
], ids=lambda x: " ".join(x[-2:]) if isinstance(x, list) else None)
def test_wrong_settings_end_with_one_line_and_write_nothing(argv, words, folders, tmp_path, capsys, monkeypatch):
    i = ids_of("llada")
    trajectories = write_lines(tmp_path / "t.jsonl", [good_record() | dict(
        response_token_ids=[4, 5, i.eos, i.mask], model=dict(name=folders["llada"], mask_id=i.mask, vocab_size=i.vocab, end_ids=[i.eos]))])
    names = dict(m=folders["llada"], p=write_lines(tmp_path / "p.jsonl", [dict(prompt="abc")]), o=str(tmp_path / "o"), d=str(tmp_path), t=trajectories)
    before = sorted(str(f) for f in tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", [a.format(**names) for a in argv])
    monkeypatch.syspath_prepend(str(HERE))
    with pytest.raises(SystemExit) as e:
        __import__(argv[0][:-3]).main()
    lines = capsys.readouterr().err.strip().splitlines()
    assert e.value.code == 2 and len(lines) == 1 and all(w in lines[0] for w in words), lines
    left = sorted(str(f) for f in tmp_path.rglob("*") if f.name != "o")
    assert left == before


def test_no_source_file_of_ours_reads_pickles_or_runs_text():
    for file in ("model", "lora", "data", "decode", "tabom", "toy", "eval", "bench"):
        source = (HERE / f"{file}.py").read_text()
        for word in ("import pickle", "torch.load(", "torch.save(", "trust_remote_code=True", "exec(", " eval(", "os.system", "shell=True"):
            assert word not in source, f"{file}.py has {word}"


def test_full_disk_ends_with_one_line_and_keeps_the_last_good_state(folders, tmp_path):
    """A tmpfs of 64 KB where the machine lets us mount one; otherwise a file size limit, which fails the same write."""
    prompts = write_lines(tmp_path / "p.jsonl", [dict(id=n, prompt="abc" * (1 + n % 5)) for n in range(200)])
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode == 0
    limit = [] if mounted else ["bash", "-c", 'ulimit -f 64; trap "" XFSZ; exec "$@"', "limited"]
    try:
        out = subprocess.run([*limit, sys.executable, "decode.py", "--model", folders["llada"], "--prompts", prompts, "--out", str(disk / "t.jsonl"),
                              "--length", "16"], cwd=HERE, capture_output=True, text=True)
        lines = (disk / "t.jsonl").read_bytes()
        assert out.returncode == 2 and "Traceback" not in out.stderr and "keeps every finished record" in out.stderr.strip().splitlines()[-1]
        assert lines.endswith(b"\n") and all(json.loads(x) for x in lines.splitlines()) and len(lines) > 10000
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


# ---------------------------------------------------------------- the long trials: ./run.sh soak

soak = pytest.mark.skipif(not os.environ.get("SOAK"), reason="long; ./run.sh soak")
TIMES = int(os.environ.get("SOAK_KILLS", 20))


def killed_often(argv: list[str], again: list[str], rng, longest: float, check=None) -> int:
    """Starts argv, kills the whole process group at a random moment, goes on with `again`, TIMES times; then lets it end."""
    kills = 0
    for n in range(200):
        job = subprocess.Popen([sys.executable, *(argv if n == 0 else again)], cwd=HERE, start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _, err = job.communicate(timeout=rng.uniform(0.2, longest) if kills < TIMES else None)
            assert job.returncode == 0, err.decode()[-1000:]
            return kills
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
            kills += 1
    raise AssertionError("never ended")


def torchrun(ranks: int, argv: list[str]) -> list[str]:
    return argv if ranks == 1 else ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master-port", "0", *argv]


@soak
def test_soak_toy_killed_20_times_equals_whole(tmp_path):
    argv = ["toy.py", "--max-steps", "60", "--save-every", "20", "--test-prompts", "50", "--out"]
    subprocess.run([sys.executable, *argv, str(tmp_path / "a")], cwd=HERE, check=True, capture_output=True)
    kills = killed_often([*argv, str(tmp_path / "b")], [*argv, str(tmp_path / "b")], random.Random(0), 40)
    print(f"\ntoy: killed {kills} times")
    for f in sorted((tmp_path / "a").rglob("*")):
        if f.is_file():
            assert f.read_bytes() == (tmp_path / "b" / f.relative_to(tmp_path / "a")).read_bytes(), f


@soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_soak_decoding_killed_20_times_equals_whole(ranks, folders, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [dict(id=n, prompt="abcd"[: 1 + n % 4] * 3) for n in range(600)])
    argv = ["decode.py", "--model", folders["llada"], "--prompts", prompts, "--length", "32", "--out"]
    subprocess.run([sys.executable, *argv, str(tmp_path / "a.jsonl")], cwd=HERE, check=True, capture_output=True)
    kills = killed_often(torchrun(ranks, [*argv, str(tmp_path / "b.jsonl")]), torchrun(ranks, [*argv, str(tmp_path / "b.jsonl")]), random.Random(1), 12)
    a, b = ({r["id"]: r for _, r in data.lines(str(tmp_path / f"{x}.jsonl"))} for x in "ab")
    same = sum(a[i] == b[i] for i in a)
    print(f"\ndecoding, {ranks} ranks: killed {kills} times, {same} of {len(a)} lines equal to the last digit")
    assert a.keys() == b.keys() and sum(1 for _ in open(tmp_path / "b.jsonl")) == len(b)
    for i in a:                                              # floats may differ in their last digits with the batch's make-up
        assert {k: v for k, v in a[i].items() if k not in ("entropy", "confidence")} == {
            k: v for k, v in b[i].items() if k not in ("entropy", "confidence")}
        assert np.allclose(*[np.array(x[i]["entropy"], float) for x in (a, b)], atol=1e-4, equal_nan=True)


@soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_soak_training_killed_20_times_equals_whole(ranks, folders, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [dict(id=n, prompt="abcd"[: 1 + n % 4] * 3) for n in range(60)])
    subprocess.run([sys.executable, "decode.py", "--model", folders["llada"], "--prompts", prompts, "--length", "16", "--out",
                    str(tmp_path / "t.jsonl")], cwd=HERE, check=True, capture_output=True)
    argv = ["tabom.py", "--data", str(tmp_path / "t.jsonl"), "--all", "--window", "4", "--batch-size", str(8 // ranks), "--max-steps", "300",
            "--lr", "1e-3", "--save-every", "7"]
    subprocess.run([sys.executable, *torchrun(ranks, [*argv, "--out", str(tmp_path / "a")])], cwd=HERE, check=True, capture_output=True)
    b = [*argv, "--out", str(tmp_path / "b"), "--resume"]
    kills = killed_often(torchrun(ranks, b), torchrun(ranks, b), random.Random(2), 14)
    print(f"\ntraining, {ranks} ranks: killed {kills} times")
    for f in sorted((tmp_path / "a").rglob("adapter_model.safetensors")):
        assert f.read_bytes() == (tmp_path / "b" / f.relative_to(tmp_path / "a")).read_bytes(), f
    steps = [json.loads(x)["step"] for x in (tmp_path / "b" / "log.jsonl").read_text().splitlines()[1:]]
    assert steps == list(range(1, 301))


@soak
def test_soak_memory_and_files_stay_flat(folders, tmp_path):
    """Decoding and training in a loop (SOAK_MINUTES, 30): resident memory within 5 % and open files flat, first tenth against last."""
    code = f"""
import os, sys, time, argparse, numpy as np, torch
sys.path.insert(0, {str(HERE)!r})
import decode, lora, model, tabom
torch.set_num_threads(1)
m, tok = model.load({folders['llada']!r}), model.load_tokenizer({folders['llada']!r})
p = argparse.ArgumentParser(); decode.add_flags(p)
s, logged = decode.make_settings(p.parse_args(["--length", "32"]), *model.read_config({folders['llada']!r}), tok.end_ids)
params = lora.wrap(m); opt = torch.optim.AdamW(params, 1e-3)
a = argparse.Namespace(method="tabom", window=8, lam=1.0, gamma=0.2, rank_context="start")
end, seen, n = time.time() + 60 * {float(os.environ.get('SOAK_MINUTES', 30))}, [], 0
while time.time() < end:
    rng = np.random.default_rng(n); n += 1
    rows = list(decode.decode(m, [(str(i), rng.integers(2, 30, rng.integers(3, 40)).tolist()) for i in range(16)], s, 8))
    batch = []
    for r in rows:
        from types import SimpleNamespace as S
        x = S(prompt=np.array(r.ids), ids=r.canvas, order=r.order, rank=tabom.total_order(r.order, r.entropy))
        batch.append((x, *tabom.view(x, "tabom", 8, rng)))
    tabom.batch_loss(m, batch, a, s.mask_id, "cpu")[0].mean().backward(); opt.step(); opt.zero_grad()
    seen.append((int(open("/proc/self/statm").read().split()[1]) * 4096, len(os.listdir("/proc/self/fd"))))
tenth = max(1, len(seen) // 10)
first, last = (np.mean(part, 0) for part in (seen[:tenth], seen[-tenth:]))
print(n, *first, *last)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rounds, memory, files, memory_end, files_end = map(float, out)
    print(f"\n{rounds:.0f} rounds: {memory / 1e6:.0f} -> {memory_end / 1e6:.0f} MB, {files:.0f} -> {files_end:.0f} files")
    assert abs(memory_end / memory - 1) < 0.05 and files == files_end
