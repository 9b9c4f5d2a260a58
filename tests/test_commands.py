
def test_a_mistake_is_one_line_that_names_the_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as e:
        util.stop("t.jsonl:3: wrong")
    assert e.value.code == 2 and capsys.readouterr().err == "[rank 3] t.jsonl:3: wrong\n"


def test_an_empty_list_of_devices_hides_every_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert util.setup_device()[2] == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert util.setup_device()[2] == "mps"


def test_a_file_that_a_kill_cut_at_any_byte_continues_to_the_same_lines(cli, tmp_path):
    write_lines(tmp_path / "prompts.jsonl", [dict(id="u", prompt="1 {\u00e9} 2"), *TASKS])
    flags, path = "--length 12 --temperature 0.7 --batch-size 2", tmp_path / "t.jsonl"
    records = cli("t.jsonl", flags)
    head = {name: records["u"][name] for name in ("model", "decode")}
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for cut in range(len(lines[0]) + 300):               # all of the first line, and into the second
        path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        assert decode.read_done(str(path), head, []) == set(list(records)[:whole])
        assert path.read_bytes() == b"".join(lines[:whole])
    for cut in (50, len(lines[0]), len(content) - 300, len(content) - 1, len(content)):
        path.write_bytes(content[:cut])
        cli("t.jsonl", flags)
        assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.parametrize("flags, words", [
    ("--model {other}", "name"), ("--seed 1", "seed 0, now it is 1"), ("--adapter {other}", "adapter None"),
    ("", "has another prompt")])
def test_a_file_of_another_run_or_of_something_else_is_refused_untouched(flags, words, cli, folders, tmp_path, refused):
    """Another model, other settings, another prompt under the same id; whether or not the last line is whole."""
    cli("t.jsonl", "--length 12 --limit 2")
    path, before = tmp_path / "t.jsonl", (tmp_path / "t.jsonl").read_bytes()
    other = shutil.copytree(folders["llada"], tmp_path / "other")
    write_lines(tmp_path / "prompts.jsonl", [task | dict(prompt="z" * 9) for task in TASKS])
    nothing = "holds no trajectories"
    for content, why in ((before, words), (before[:-40], words), (b"id,prompt\n1,a\n", nothing), (b"hello", nothing)):
        path.write_bytes(content)
        with refused(path, why, "give another --out"):
            cli("t.jsonl", "--length 12 " + flags.format(other=other))
        assert path.read_bytes() == content


def test_two_ranks_write_the_records_of_one(cli, tmp_path):
    flags = "--length 12 --temperature 0.7"
    whole = cli("one.jsonl", flags)
    lines = (tmp_path / "one.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "two.jsonl").write_text(lines[2] + lines[4][:30])            # they continue a file that was cut
    run_ranks(2, lambda: cli("two.jsonl", flags + " --batch-size 1"))
    for r in read_lines(tmp_path / "two.jsonl"):
        want = whole.pop(r["id"])
        for name in ("entropy", "confidence"):           # a batch of another shape rounds differently
            assert r.pop(name) == pytest.approx(want.pop(name), abs=1e-4)
        assert r == want
    assert not whole


@pytest.mark.parametrize("flags, words", [
    ("--length 10 --block 3", "--length 10, --block 3"), ("--length 8 --steps 9", "--steps 9"),
    ("--length 8 --steps 4 --tokens-per-step 2", "give one"), ("--schedule dream --block 8", "--schedule dream"),
    ("--length 600", "positions"), ("--adapter nowhere", "nowhere/adapter_config.json")])
def test_wrong_settings_end_with_one_line(flags, words, cli, tmp_path, refused):
    with refused(words):
        cli("t.jsonl", flags)
    assert not (tmp_path / "t.jsonl").exists()


def same_run(a, b) -> bool:
    """To the last bit."""
    x, y = tensors_of(a), tensors_of(b)
    without_time = lambda row: {k: v for k, v in row.items() if k not in ("ms", "tokens_per_s", "memory_gb")}
    logs = [[without_time(row) for row in log_of(out)[1]] for out in (a, b)]
    return logs[0] == logs[1] and x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def assert_close_runs(a, b):
    """The same samples and windows; all else may differ by the order of additions."""
    x, y = tensors_of(a), tensors_of(b)
    assert x.keys() == y.keys() and max((x[k] - y[k]).abs().max() for k in x) < 1e-5
    for r, s in zip(log_of(a)[1], log_of(b)[1], strict=True):
        assert all(r[k] == s[k] for k in ("step", "epoch", "lr", "samples"))
        assert r.keys() == s.keys()
        for key in s.keys() & {"loss", "ce", "rank", "in_order", "gnorm"}:
            assert r[key] == pytest.approx(s[key], rel=2e-4, abs=1e-5), key


def test_run_leaves_adapters_log_and_resume_file(train, folders, capsys):
    out = train("run", "--epochs 2 --log-every 3")       # 21 records, 4 per step: 6 steps per epoch
    shown, (head, rows) = capsys.readouterr().out, log_of(out)
    assert sorted(p.name for p in out.iterdir()) == ["epoch-1", "epoch-2", "log.jsonl", "resume.safetensors"]
    assert head["settings"]["model"] == folders["llada"] and head["settings"]["records"] == 21 and head["steps"] == 12
    assert head["args"]["gamma"] == 0.2 and {"commit", "torch", "python", "device"} <= head.keys()
    assert "1,024 trainable parameters, 12 steps of 4 samples" in shown and f"{out}/epoch-2" in shown
    assert [x.split()[1] for x in shown.splitlines() if x.startswith("step ")] == ["3/12", "6/12", "9/12", "12/12"]
    for epoch in (1, 2):
        seen = [sample for row in rows if row["epoch"] == epoch for sample in row["samples"]]
        assert sorted(seen) == sorted(f"r{n}" for n in range(21))
    for n, row in enumerate(rows):
        assert row["loss"] == pytest.approx(row["ce"] + row["rank"], rel=1e-5) and row["tokens_per_s"] > 0
        assert row["lr"] == pytest.approx(1e-3 * (n + 1) / 5 if n < 5 else 5e-4 * (1 + math.cos(math.pi * (n - 5) / 7)))


def test_wandb_gets_what_the_log_gets_and_is_asked_for_in_one_line(train, monkeypatch, refused, tmp_path):
    with refused("--wandb p", "pip install wandb"):
        training_args("--wandb p")
    fake = "got = []\ninit = lambda **k: got.append(k)\nlog = lambda row, step: got.append(row)"
    (tmp_path / "wandb.py").write_text(fake)
    monkeypatch.syspath_prepend(tmp_path)
    out = train("run", "--wandb p --max-steps 3")
    got = sys.modules.pop("wandb").got
    assert got[0]["project"] == "p" and got[1:] == log_of(out)[1]


def test_bf16_base_trains_an_fp32_adapter(train):
    fine, coarse = train("fine", "--max-steps 2"), train("coarse", "--max-steps 2 --dtype bf16")
    assert all(x.dtype == torch.float32 for x in tensors_of(coarse).values())
    assert log_of(coarse)[1][0]["loss"] == pytest.approx(log_of(fine)[1][0]["loss"], rel=0.05)


def test_the_model_is_the_one_the_trajectories_name_unless_given(train, folders, tmp_path, refused):
    other = shutil.copytree(folders["llada"], tmp_path / "other")
    assert log_of(train("a", "--max-steps 1"))[0]["settings"]["model"] == folders["llada"]
    assert log_of(train("b", f"--max-steps 1 --model {other}"))[0]["settings"]["model"] == str(other)
    nameless = write_lines(tmp_path / "nameless.jsonl", [row | dict(model=None) for row in corpus(folders["llada"])])
    with refused(f"{nameless}: names no model", "--model"):
        train("c", "", nameless)


def test_non_finite_gradient_stops_with_step_and_samples_and_keeps_the_last_good_state(train, tmp_path, refused):
    with refused("step 2: the gradient is not finite", "samples ['r"):       # the first step makes the weights huge
        train("run", "--lr 1e30 --warmup 0 --save-every 1")
    assert len(log_of(tmp_path / "run")[1]) == 1
    assert all(x.isfinite().all() for x in load_file(tmp_path / "run" / "resume.safetensors").values())


def test_out_of_memory_ends_with_the_flags_that_help(train, monkeypatch, tmp_path):
    def too_much(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(models.Model, "forward", too_much)
    monkeypatch.setattr(sys, "argv", f"tabom.py --data {train.data} --out {tmp_path / 'run'}".split())
    with pytest.raises(torch.OutOfMemoryError) as e:
        runpy.run_path(str(HERE / "tabom.py"), run_name="__main__")
    assert "--batch-size" in e.value.__notes__[0] and "--grad-checkpoint" in e.value.__notes__[0]


@pytest.fixture
def pretended_gpu(monkeypatch):
    """
    Tensors say that they are on a GPU and hold no data; torch raises where they meet one of the CPU. What a script
    reads back is made up, and must have been moved to the CPU.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    def load_model(config, device, dtype):
        torch.set_default_dtype(dtype)
        with torch.device(device):
            net = models.Model(config)
        torch.set_default_dtype(torch.float32)
        return net

    def read(x):
        assert x.device.type == "cpu"
        return np.zeros(x.shape)

    class Generator:                                     # a GPU's cannot be made without one
        def __init__(self, device="cpu"):
            pass

        def manual_seed(self, seed):
            return None

    def to_bytes(tensors, metadata):
        assert {x.device.type for x in tensors.values()} == {"cpu"}
        return b""

    for module in (tabom, decode):
        monkeypatch.setattr(module, "setup_device", lambda dtype: (0, 1, "meta", torch.bfloat16))
        monkeypatch.setattr(module, "load_model", load_model)
    for module in (tabom, lora):
        monkeypatch.setattr(module, "to_bytes", to_bytes)
    monkeypatch.setattr(tabom, "peak_memory", lambda device: 0.0)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.Tensor, "numpy", read)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: np.zeros(x.shape).tolist())
    monkeypatch.setattr(torch.Tensor, "item", lambda x: 1.0)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@pytest.mark.parametrize("flags", ["", "--grad-accum 2", "--method sft", "--method dinfer", "--method t3d",
                                   "--rank-context exact --grad-checkpoint"])
def test_training_leaves_no_tensor_on_the_cpu(flags, train, pretended_gpu):
    assert len(log_of(train("run", f"--max-steps 2 {flags}"))[1]) == 2


@pytest.mark.parametrize("family, flags", [
    ("llada", "--score confidence --suppress-eos confidence"),
    ("Dream", "--score entropy --temperature 1 --top-p 0.9 --top-k 5 --suppress-eos logits"),
    ("a2d-qwen2", "--score random"),
    ("a2d-qwen3", "--score margin"),
])
def test_decoding_leaves_no_tensor_on_the_cpu(family, flags, cli, pretended_gpu):
    assert len(cli("t.jsonl", f"--length 6 --block 6 --schedule even {flags}", family)) == 5


def test_out_of_another_run_is_refused(train, folders, refused):
    out, flags = train("run", "--max-steps 4"), "--max-steps 4 --resume"
    files = lambda: {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    before = files()
    with refused(f"--out {out}: holds a run already", "--resume", "another --out"):
        train("run", "--max-steps 4")
    for more, words in (("--lam 2", "lam 1.0, now it is 2.0"), ("--batch-size 8", "global_batch 4, now it is 8")):
        with refused(f"{out / 'resume.safetensors'}: the run there has {words}", "another --out"):
            train("run", f"{flags} {more}")
    write_lines(Path(train.data), corpus(folders["llada"])[:20])
    with refused("records 21, now it is 20"):
        train("run", flags)
    assert files() == before
