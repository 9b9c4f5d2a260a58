
@every
def test_logits_equal_the_models_own_bidirectional_code_alone_and_left_padded(family, folders, nets):
    theirs, (ids, attend, alone) = reference(family, folders[family]).double(), ragged(family)
    pos = torch.tensor([[11, 5, 7, 5], [9, 11, 10, 10], [0, 11, 1, 6]])      # any order, also twice
    padded, some = full(nets[family], ids, attend), nets[family](ids, attend, pos)
    for b, row in enumerate(alone):
        want = reference_logits(theirs, row).float()
        torch.testing.assert_close(full(nets[family], [row])[0], want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(padded[b, -len(row):], want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(some[b], padded[b, pos[b]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["Dream", *SMALL])
def test_logits_equal_transformers_in_fp32(family, folders, nets):
    theirs = reference(family, folders[family])          # the same precision on both sides: closer than above
    for row in ragged(family)[2]:
        torch.testing.assert_close(full(nets[family], [row])[0], reference_logits(theirs, row), atol=1e-5, rtol=1e-5)


def test_rms_norm_is_the_written_out_norm_bit_for_bit():
    """In fp32 and bf16: normalise in fp32, round, then multiply by the weight."""
    norm = models.RMSNorm(48, 1e-6)
    norm.weight.data = torch.randn(48, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 7, 48, generator=torch.Generator().manual_seed(1)) * 3
    for dtype in (torch.float32, torch.bfloat16):
        y = x.to(dtype).float()
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
        assert torch.equal(norm.to(dtype)(x.to(dtype)), norm.weight * y)


TARGETS = {"llada": [*QV, "attn_out"], **dict.fromkeys(["Dream", *SMALL], [*QV, "down_proj"])}


@both
def test_lora_is_on_the_named_layers_only_the_identity_at_first_and_disabled_the_base(family, folders, nets, refused):
    net, base = load(folders[family]), full(nets[family], [[1, 2, 3]])
    with refused("--lora-targets q_porj", "k_proj, ", "q_proj, up_proj, v_proj"):        # lists what there is
        lora.add(net, ["v_proj", "q_porj"], 4, 8)
    params = lora.add(net, QV, 4, 8)
    path = {"llada": "model.transformer.blocks.{}.{}_proj", "Dream": "model.layers.{}.self_attn.{}_proj"}[family]
    paths = [path.format(n, p) for n in range(LAYERS) for p in "qv"]
    assert sorted(params) == sorted(f"base_model.model.{p}.lora_{m}.weight" for p in paths for m in "AB")
    assert {id(p) for p in net.parameters() if p.requires_grad} == {id(p) for p in params.values()}
    assert torch.equal(full(net, [[1, 2, 3]]), base)
    net = adapted(folders[family])
    with pytest.raises(KeyError), lora.disabled(net):
        assert torch.equal(full(net, [[1, 2, 3]]), base)
        raise KeyError
    assert (full(net, [[1, 2, 3]]) - base).abs().max() > 0.1                 # enabled again, also after an error


def peft_adapter(net, folder, **options):
    """An adapter that the real peft put on a reference model and saved; gives the model."""
    from peft import LoraConfig, get_peft_model
    theirs, g = get_peft_model(net, LoraConfig(r=4, lora_alpha=6, **options)), torch.Generator().manual_seed(0)
    for name, p in theirs.named_parameters():
        if "lora_B" in name:
            p.data.copy_(torch.randn(p.shape, generator=g) * 0.3)
    theirs.create_or_update_model_card = lambda _: None  # a README for the hub, made from a transformers config
    theirs.save_pretrained(folder)
    return theirs.base_model.model.requires_grad_(False)


@every
def test_real_peft_loads_ours_and_we_load_real_pefts(family, folders, nets, tmp_path):
    from peft import PeftModel
    row, net = ragged(family)[2][2], load(folders[family])
    theirs = peft_adapter(reference(family, folders[family]), tmp_path / "theirs", target_modules=TARGETS[family])
    lora.load(net, tmp_path / "theirs")
    torch.testing.assert_close(full(net, [row])[0], reference_logits(theirs, row), atol=1e-4, rtol=1e-4)
    assert (full(net, [row]) - full(nets[family], [row])).abs().max() > 0.1
    ours = adapted(folders[family], TARGETS[family], 3, 7.5, seed=1)
    lora.save(ours, tmp_path / "ours", folders[family])
    theirs = PeftModel.from_pretrained(reference(family, folders[family]), tmp_path / "ours").base_model.model
    torch.testing.assert_close(full(ours, [row])[0], reference_logits(theirs, row), atol=1e-4, rtol=1e-4)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_checkpoint_is_the_adapter_in_the_hubs_layout(family, dtype, tmp_path, monkeypatch, refused):
    base, merged = Path(tiny(family, tmp_path / "base", files=2, dtype=dtype)), tmp_path / "merged"
    (base / "pytorch_model.bin").write_bytes(b"x")
    lora.save(adapted(base, alpha=16.0, dtype=dtype), tmp_path / "a", str(base))
    adapter = load_file(tmp_path / "a" / "adapter_model.safetensors")
    monkeypatch.setattr(sys, "argv", f"lora.py --model {base} --adapter {tmp_path / 'a'} --out {merged}/".split())
    runpy.run_path(str(HERE / "lora.py"), run_name="__main__")
    assert {f.name for f in merged.iterdir()} == {f.name for f in base.iterdir()} - {"pytorch_model.bin"}
    for file in base.glob("*.safetensors"):              # same tensors, shards and types; W + 16/4 B A where adapted
        old, new = load_file(file), load_file(merged / file.name)
        assert old.keys() == new.keys()
        for key, want in old.items():
            A, B = (adapter.get("base_model.model." + key.replace("weight", f"lora_{m}.weight")) for m in "AB")
            want = want if A is None else (want.float() + 4.0 * B @ A).to(dtype)
            torch.testing.assert_close(new[key], want, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    with refused(merged, "exists already"):
        runpy.run_path(str(HERE / "lora.py"), run_name="__main__")


def native_llada(net, prompt, mask_id, length, steps, block):
    """LLaDA's published loop at temperature 0, one prompt. The mask token is never a candidate."""
    canvas, order, step = [mask_id] * length, [-1] * length, 0
    per_block = steps // (length // block)
    for start in range(0, length, block):
        for i in range(per_block):
            logits = plain_logits(net, prompt, canvas)                       # (N, V)
            p = logits.softmax(-1)
            logits[:, mask_id] = -math.inf
            token = logits.argmax(-1).tolist()
            left = [j for j in range(start, start + block) if order[j] < 0]
            left.sort(key=lambda j: -float(p[j, token[j]]))
            for j in left[:block // per_block + (i < block % per_block)]:
                canvas[j], order[j] = token[j], step
            step += 1
    return canvas, order


def native_dream(net, prompt, mask_id, length, steps, top_p):
    """Dream's published loop at temperature 0, by entropy, one prompt. Ties: raw entropy, then position."""
    canvas, order = [mask_id] * length, [-1] * length
    t = torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        logits = plain_logits(net, prompt, canvas)
        left, score = [j for j in range(length) if order[j] < 0], {}
        for j in left:
            p = logits[j].softmax(-1).sort(descending=True).values
            kept = p[p.cumsum(0) - p <= top_p]           # the nucleus, with the token that crosses top_p
            score[j] = (plain_entropy((kept / kept.sum()).tolist()), plain_entropy(p.tolist()), j)
        count = int(len(left) * (1 - t[i + 1] / t[i])) if i < steps - 1 else len(left)
        logits[:, mask_id] = -math.inf
        for j in sorted(left, key=score.get)[:count]:
            canvas[j], order[j] = int(logits[j].argmax()), i
    return canvas, order


NATIVE = {"llada": native_llada, "Dream": native_dream}


def greedy(**flags) -> str:
    return "--temperature 0 " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())


@pytest.mark.parametrize("family, flags", [
    ("llada", dict(length=24, steps=24, block=24)), ("llada", dict(length=24, steps=10, block=12)),
    ("llada", dict(length=20, steps=20, block=4)), ("Dream", dict(length=20, steps=20, top_p=1.0)),
    ("Dream", dict(length=24, steps=10, top_p=1.0)), ("Dream", dict(length=20, steps=20, top_p=0.5))])
def test_tokens_and_steps_equal_the_native_decoders(family, flags, folders, nets):
    s = settings(folders[family], greedy(**flags), end_ids=[])
    want = [NATIVE[family](nets[family], prompt, s.mask_id, **flags) for prompt in prompts_of(family)]
    for batch_size in (1, 3):                            # alone; in ragged batches that later prompts join
        rows = run(nets[family], prompts_of(family), s, batch_size)
        assert [(row.canvas.tolist(), row.step.tolist()) for row in rows] == want


@both
def test_stopping_at_eos_keeps_the_native_text(family, folders, nets):
    flags = dict(length=24, steps=24) | (dict(block=8) if family == "llada" else dict(top_p=1.0))
    prompts, mask, stopped = prompts_of(family), ids_of(family).mask, 0
    for prompt in prompts:
        tokens, order = NATIVE[family](nets[family], prompt, mask, **flags)
        end = tokens.index(tokens[9])                    # what the native decoder says in mid-answer becomes the EOS
        s = settings(folders[family], greedy(**flags), end_ids=[tokens[9]])
        row = run(nets[family], [prompt, *prompts], s)[0]
        decoded = row.step >= 0
        assert decoded[:end + 1].all() and row.canvas.tolist() == np.where(decoded, tokens, mask).tolist()
        assert row.step.tolist() == np.where(decoded, order, -1).tolist()
        assert row.steps_done == max(order[:end + 1]) + 1        # not one forward more than the text needs
        stopped += not decoded.all()
    assert stopped


class Table(torch.nn.Module):
    """A model whose logits depend on the response position alone: every order can be worked out by hand."""
    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table.float(), requires_grad=False)

    def forward(self, ids, attend, pos):
        return self.table[pos - (ids.shape[1] - len(self.table))]


def random_table(family="llada", n: int = 12):
    scale = torch.linspace(1, 5, n)[torch.randperm(n, generator=torch.Generator().manual_seed(1))]
    z = torch.randn(n, ids_of(family).vocab, generator=torch.Generator().manual_seed(5)) * scale[:, None]
    z[:, ids_of(family).mask] = -9.0
    return z


def by_hand(table, score: str) -> list[float]:
    """One value per position; the lowest goes first."""
    values = []
    for p in table.double().softmax(-1):
        first, second = p.topk(2).values.tolist()
        values.append(dict(entropy=plain_entropy(p.tolist()), confidence=-first, margin=second - first)[score])
    return values


@both
@pytest.mark.parametrize("score", ["entropy", "confidence", "margin"])
def test_each_score_orders_as_by_hand(family, score, folders):
    table, want = random_table(family), [0] * 12
    value = by_hand(table, score)
    for block, k in ((12, 1), (12, 5), (4, 1), (6, 4)):
        top_p = 0.5 if family == "llada" else 1          # LLaDA scores the clean distribution, whatever it draws from
        flags = greedy(length=12, schedule="even", top_p=top_p, score=score, block=block, tokens_per_step=k)
        row = run(Table(table), [[1, 2, 3]], settings(folders[family], flags, end_ids=[]))[0]
        for start in range(0, 12, block):
            for n, j in enumerate(sorted(range(start, start + block), key=value.__getitem__)):
                want[j] = start // block * math.ceil(block / k) + n // k
        assert row.step.tolist() == want and row.canvas.tolist() == table.argmax(-1).tolist()


@pytest.mark.parametrize("score", ["confidence", "entropy", "margin"])
def test_threshold_unmasks_all_that_are_sure_and_else_the_best_one(score, folders):
    table = random_table()
    p, value = table.softmax(-1).amax(-1).tolist(), by_hand(table, score)
    threshold = sorted(p)[8] - 1e-4                      # four of twelve are above it
    rest = sorted((j for j in range(12) if p[j] <= threshold), key=value.__getitem__)
    s = settings(folders["llada"], f"--length 12 --score {score} --threshold {threshold}", end_ids=[])
    want = [0 if p[j] > threshold else 1 + rest.index(j) for j in range(12)]
    assert run(Table(table), [[1, 2]], s)[0].step.tolist() == want and len(rest) == 8


@pytest.mark.parametrize("mode, which", [("logits", 0), ("confidence", 0), ("confidence", 1)])
def test_suppressed_eos_is_never_chosen_or_comes_last(mode, which, folders):
    """LLaDA's two rules. The last position ends the text, by EOS or end of turn, and is the most certain of all."""
    ends, z, flags = [ids_of("llada").eos, ids_of("llada").eot], random_table(), greedy(length=12, score="confidence")
    z[11, ends[which]] = 40.0
    assert run(Table(z), [[1]], settings(folders["llada"], flags))[0].step[11] == 0
    row = run(Table(z), [[1]], settings(folders["llada"], f"{flags} --suppress-eos {mode}"))[0]
    rest = z.clone()
    rest[:, ends[:1] if mode == "logits" else ends] = -math.inf
    assert row.canvas.tolist() == (rest if mode == "logits" else z).argmax(-1).tolist()
    value = by_hand(rest, "confidence")
    if mode == "confidence":
        value[11] = 0.0                                  # what is chosen there has no share left
    assert np.argsort(row.step).tolist() == np.argsort(value).tolist()


@both
@pytest.mark.parametrize("flags", ["--temperature 0", "--temperature 1 --top-p 0.5", "--temperature 1 --top-k 1"])
def test_mask_token_is_never_chosen(family, flags, folders):
    """Not even where it is the whole nucleus: the next best token is chosen, not whatever has index 0."""
    z = torch.full((6, ids_of(family).vocab), -30.0)
    z[:, ids_of(family).mask], z[:, 7] = 20.0, 10.0
    assert (run(Table(z), [[1]], settings(folders[family], "--length 6 " + flags))[0].canvas == 7).all()


def test_nucleus_of_a_large_vocabulary_equals_sorting_it_all(folders):
    s, rng = settings(folders["llada"], "--temperature 0.5 --top-p 0.9"), np.random.default_rng(0)
    for scale in (20, 5, 0.1):                           # all, some and none of the nuclei are in the first 64 tokens
        z = torch.from_numpy(scale * rng.normal(size=(5, 300)))
        for row, got in zip(z / 0.5, decode.filter_logits(z, s), strict=True):
            p, index = row.softmax(0).sort(descending=True)
            want = torch.full_like(row, -math.inf)
            kept = index[p.cumsum(0) - p <= 0.9]
            want[kept] = row[kept]
            assert torch.equal(got, want)


@pytest.mark.parametrize("flags, kept", [
    ("--score entropy --tokens-per-step 2", 6), ("--score margin --tokens-per-step 2 --top-p 0.8", 3),
    ("--score random --tokens-per-step 2 --top-p 0.8 --top-k 2", 2), ("--score confidence --steps 1 --top-k 4", 4)])
def test_every_step_draws_anew_by_temperature_then_top_p_then_top_k(flags, kept, folders):
    """1200 positions with the same logits: the tokens' shares against the distribution worked out by hand."""
    N, logits = 1200, [2.0, 1.5, 1.0, 0.5, 0.0, -3.0]
    z = torch.full((N, ids_of("llada").vocab), -math.inf)
    z[:, :6] = torch.tensor(logits)
    row = run(Table(z), [[1]], settings(folders["llada"], f"--length {N} --temperature 0.7 {flags}", end_ids=[]))[0]
    weight = [math.exp(x / 0.7) for x in logits[:kept]] + [0.0] * (6 - kept)         # the third token crosses 0.8
    early, late = np.split(np.argsort(row.step, kind="stable"), 2)
    for half in (early, late):
        for v in range(6):
            p = weight[v] / sum(weight)
            assert abs((row.canvas[half] == v).mean() - p) <= 4.5 * math.sqrt(p * (1 - p) / (N / 2))


@both
@pytest.mark.parametrize("flags", [
    "--score confidence --temperature 0.8 --top-p 0.9 --top-k 20", "--score random --temperature 1",
    "--score entropy --temperature 0.5 --tokens-per-step 3", "--score margin --temperature 1 --threshold 0.5"])
def test_draws_depend_on_the_seed_and_not_on_the_batch(family, flags, folders, nets):
    s, prompts = settings(folders[family], "--length 16 " + flags), prompts_of(family)
    alone = [next(decode.decode(nets[family], [(n, prompt)], s, 4)) for n, prompt in enumerate(prompts)]
    for row, want in zip(run(nets[family], prompts, s, 2), alone, strict=True):
        assert (row.canvas == want.canvas).all() and (row.step == want.step).all()
        assert np.abs(row.entropy - want.entropy).max() < 1e-4
    other = run(nets[family], prompts, dataclasses.replace(s, seed=1), 2)
    assert any((row.canvas != want.canvas).any() for row, want in zip(other, alone, strict=True))


@both
@pytest.mark.parametrize("flags", ["--temperature 0", "--tokens-per-step 3", "--temperature 1 --score random"])
def test_records_replay(family, flags, cli, folders, nets):
    """From all masks, the record's steps lead to its tokens, and the model at each state gives what was logged."""
    tok, i = tokenizer(folders[family]), ids_of(family)
    records = cli("t.jsonl", "--length 16 " + flags, family)
    for task in TASKS:
        r = records.pop(task["id"])
        assert r["prompt"] == task["prompt"] and r["answer"] == str(task["answer"])
        own = {"llada": "default", "Dream": "entropy"}[family]               # as the authors' loader knows LLaDA's own
        assert r["method"] == ("random" if "random" in flags else own)
        assert tok.decode(r["prompt_token_ids"]) == f"[user]{task['prompt']}[assistant]"
        assert r["model"] == dict(name=folders[family], mask_id=i.mask, vocab_size=i.vocab, end_ids=[i.eos, i.eot])
        step, final, canvas = np.array(r["decoding_order"]), r["response_token_ids"], [i.mask] * 16
        for now in range(step.max() + 1):
            logits = plain_logits(nets[family], r["prompt_token_ids"], canvas)
            p = logits.softmax(-1)
            logits[:, i.mask] = -math.inf
            for j in np.flatnonzero(step == now):
                assert abs(r["entropy"][j] - plain_entropy(p[j].tolist())) < 1e-4
                assert abs(r["confidence"][j] - float(p[j, final[j]])) < 1e-4
                assert r["decode"]["temperature"] > 0 or final[j] == logits[j].argmax()
                canvas[j] = final[j]
        assert canvas == final and [h is None for h in r["entropy"]] == (step < 0).tolist()
        end = next((j for j in range(16) if final[j] in (i.eos, i.eot) and (step[:j + 1] >= 0).all()), 16)
        assert r["response"] == tok.decode([t for t in final[:end] if t != i.mask], skip_special_tokens=True)
    assert not records


@pytest.fixture
def float64(monkeypatch):
    """Where the product code asks for float32 it gets float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def plain_parts(net, base, traj, seen, targets, args) -> dict[str, float]:
    """The losses as their equations are printed: one sample, one token, one pair at a time."""
    x, rows, W = traj.response.tolist(), state_logits(net, traj, seen), len(targets)
    each = [plain_stats(rows[j], x[j])[0] for j in targets]
    ce = sum(each) / W
    if args.method == "t3d":
        ref, good, bad, path = state_logits(base, traj, seen), 0.0, 0.0, 0.0
        for s, j in enumerate(targets, 1):
            choice = max(range(len(ref[j])), key=lambda v: ref[j][v])
            good += (plain_stats(ref[j], x[j])[0] - each[s - 1]) / W
            bad += (plain_stats(ref[j], choice)[0] - plain_stats(rows[j], choice)[0]) / W
            path += sum(each[:s]) / s / W
        log_sigmoid = lambda v: -math.log(1 + math.exp(-v))
        return dict(loss=-log_sigmoid(0.1 * good) - 0.5 * log_sigmoid(-0.1 * bad) + 0.2 * path, ce=ce)
    if args.method != "tabom" or args.lam == 0:
        return dict(loss=ce, ce=ce)
    h = []
    for j in targets:                                    # exact: each token in the state just before its own step
        own = rows if args.rank_context == "start" else state_logits(net, traj, replayed(traj, traj.step[j]))
        h.append(plain_stats(own[j], x[j])[1])
    pairs = [(h[r], h[s]) for r in range(W) for s in range(r + 1, W)]
    rank = sum(max(0, early - late + args.gamma) for early, late in pairs) / len(pairs)
    return dict(loss=ce + args.lam * rank, ce=ce, rank=rank, in_order=sum(a < b for a, b in pairs) / len(pairs))


@both
@pytest.mark.parametrize("tail", ["keep", "drop"])
@pytest.mark.parametrize("flags", METHODS)
def test_loss_and_its_logged_parts_equal_plain_loops(family, flags, tail, float64, folders, tmp_path):
    args, folder, first = training_args(flags), folders[family], 0
    net, base = adapted(folder).double(), load(folder).double()
    views = views_of(read_shapes(folder, tmp_path, f"--tail {tail}") * 3, args)
    loss, parts = losses(net, views, args)
    for n, view in enumerate(views):
        want = plain_parts(net, base, *view, args)
        got = {name: value[n].item() for name, value in {"loss": loss, **parts}.items()}
        assert got.pop("in_order", 0) == pytest.approx(want.pop("in_order", 0), rel=1e-6)        # counts, in fp32
        assert got == pytest.approx(want, rel=1e-9)
        first += not view[1].any()
    assert 0 < first < len(views)                        # windows at the start of a trajectory, and later ones


@pytest.mark.parametrize("flags", METHODS)
def test_gradient_through_the_model_equals_a_finite_difference(flags, float64, folders, tmp_path):
    args, net, g = training_args(flags), adapted(folders["llada"]).double(), torch.Generator().manual_seed(0)
    views = views_of(read_shapes(folders["llada"], tmp_path, ""), args)
    params = lora.parameters(net).values()
    params = [(p, p.detach().clone(), torch.randn(p.shape, generator=g).double()) for p in params]

    def loss_at(eps):
        for p, start, direction in params:
            p.data = start + eps * direction
        return losses(net, views, args)[0].sum()
    loss_at(0).backward()
    slope = sum((p.grad * direction).sum().item() for p, _, direction in params)
    assert slope == pytest.approx((loss_at(1e-6).item() - loss_at(-1e-6).item()) / 2e-6, rel=1e-5)


def plain_cuts(traj, need) -> list[int]:
    """The steps that leave at least `need` targets."""
    steps = [int(traj.step[j]) for j in traj.order]
    return sorted({u for u in steps if sum(s >= u for s in steps) >= min(need, len(steps))})


@pytest.mark.parametrize("tail", ["keep", "drop"])
@pytest.mark.parametrize("method, window, need", [
    ("tabom", 4, 4), ("tabom", 32, 32), ("tabom", 0, 2), ("t3d", 4, 1), ("dinfer", 4, 1), ("sft", 4, 1)])
def test_view_is_a_state_of_the_replay_and_the_next_tokens_in_order(method, window, need, tail, folders, tmp_path):
    args, eos = training_args(f"--method {method} --window {window}"), ids_of("llada").eos
    for traj in read_shapes(folders["llada"], tmp_path, f"--tail {tail}"):
        last = traj.response.tolist().index(eos) if tail == "drop" else len(traj.step)
        decoded = [j for j in range(len(traj.step)) if traj.step[j] >= 0]
        order = sorted((traj.step[j], traj.entropy[j], j) for j in decoded if j <= last)
        for seed in range(20):
            seen, targets = tabom.sample_view(traj, args, np.random.default_rng(seed))
            left, first = [j for _, _, j in order if not seen[j]], traj.step[targets[0]]
            if method == "sft":                          # any of the decoded tokens
                assert set(np.flatnonzero(seen)) <= set(decoded)
            else:
                assert first in plain_cuts(traj, need) and seen.tolist() == replayed(traj, first)
            if method == "dinfer":                       # whole steps
                left = [j for j in left if traj.step[j] <= traj.step[targets[-1]]]
            assert targets.tolist() == (left[:window] if method == "tabom" and window else left)


def test_cuts_are_uniform_over_the_boundaries(folders, tmp_path):
    draws, args, rng = 1500, training_args(), np.random.default_rng(0)
    for traj in read_shapes(folders["llada"], tmp_path, "")[:3]:
        for args.method, args.window, need in (("tabom", 4, 4), ("tabom", 0, 2), ("t3d", 4, 1), ("dinfer", 4, 0)):
            counts = dict.fromkeys(plain_cuts(traj, need), 0)
            if args.method == "dinfer":                  # any two times
                counts = {(i, j): 0 for j in range(max(traj.step) + 2) for i in range(j)}
            for _ in range(draws):
                steps = traj.step[tabom.sample_view(traj, args, rng)[1]]
                counts[(steps[0], steps[-1] + 1) if args.method == "dinfer" else steps[0]] += 1
            k = len(counts)                              # chi-square: mean k - 1, deviation sqrt(2 (k - 1))
            chi = sum((n - draws / k) ** 2 / (draws / k) for n in counts.values())
            assert chi < k - 1 + 5 * math.sqrt(2 * (k - 1)) + 1e-9, (args.method, counts)


def test_non_ltr_cuts_start_at_tokens_decoded_out_of_order(folders, tmp_path):
    def plain_jumps(step):
        late = [math.inf if s < 0 else s for s in step]
        return [p for p in range(len(step)) if step[p] >= 0 and any(late[q] > late[p] for q in range(p))]

    args, rng, W = training_args("--cut non-ltr --window 4"), np.random.default_rng(0), 4
    trajs = read_shapes(folders["llada"], tmp_path, "")
    for traj in trajs:
        jumps = plain_jumps(traj.step.tolist())
        assert traj.jumps.tolist() == jumps
        boundaries = set(plain_cuts(traj, W))
        want = {traj.step[p] for p in jumps} & boundaries or boundaries
        assert {traj.step[tabom.sample_view(traj, args, rng)[1][0]] for _ in range(400)} == want
    assert any(len(traj.jumps) for traj in trajs)
    # a record may say itself which positions these are
    given = [good_record(non_ltr_positions=[1]), good_record(id=1, non_ltr_positions=[])]
    a, b = read_trajs(folders["llada"], write_lines(tmp_path / "n.jsonl", given))
    assert a.jumps.tolist() == [1] and b.jumps.tolist() == []


@pytest.mark.parametrize("flags", METHODS)
def test_no_token_of_the_future_reaches_the_model(flags, folders, tmp_path):
    """Another token where the view is masked leaves all that the model is fed as it was; targets are masked."""
    args, mask_id, net, fed = training_args(flags), ids_of("llada").mask, load(folders["llada"]), []
    net.register_forward_pre_hook(lambda _, inputs: fed.append(inputs))
    for traj, seen, targets in views_of(read_shapes(folders["llada"], tmp_path, ""), args):
        def states(response):
            traj.response = response
            fed.clear()
            losses(net, [(traj, seen, targets)], args)
            assert all((ids.gather(1, pos) == mask_id).all() for ids, _, pos in fed)
            return [ids[0].tolist() for ids, _, _ in fed]
        N, x = len(traj.response), traj.response
        now = states(x)
        shown = [[t != mask_id for t in state[-N:]] for state in now]
        assert shown[0] == seen.tolist()
        if args.rank_context == "exact":                 # then one state per step of the window
            assert shown[1:] == [replayed(traj, s) for s in sorted(set(traj.step[targets]))]
        for j in range(N):
            other = np.where(np.arange(N) == j, (x + 1) % len(CHARS), x)
            assert (states(other) != now) == any(state[j] for state in shown)


@pytest.mark.parametrize("flags", METHODS)
def test_training_equals_a_plain_loop(flags, train, folders):
    """One sample at a time, AdamW written out, a window per (seed, epoch, place in the file): the adapter of main."""
    flags = f"{QUICK} --epochs 3 --batch-size 12 --clip 0.5 --weight-decay 0.1 {flags}"  # 2 steps per epoch, 6 in all
    out, args, net = train("run", flags), training_args(flags), load(folders["llada"])
    params = lora.add(net, QV, 4, 16, seed=3)
    moments = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in params.values()]
    trajs = read_trajs(folders["llada"], train.data)
    for t, row in enumerate(log_of(out)[1], 1):
        net.zero_grad()
        for n in [int(id[1:]) for id in row["samples"]]:
            view = tabom.sample_view(trajs[n], args, np.random.default_rng([3, row["epoch"] - 1, n]))
            (losses(net, [(trajs[n], *view)], args)[0].sum() / len(row["samples"])).backward()
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in params.values()))
        assert row["gnorm"] == pytest.approx(norm, rel=1e-3)
        lr = 1e-3 * t / 5 if t <= 5 else 1e-3            # five steps of warm-up, and the first of the cosine
        for p, m, v in moments:
            g = p.grad * min(1, 0.5 / norm)
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            p.data -= lr * 0.1 * p.data
            p.data -= lr * (m / (1 - 0.9 ** t)) / ((v / (1 - 0.999 ** t)).sqrt() + 1e-8)
    got = load_file(out / "epoch-3" / "adapter_model.safetensors")
    assert got.keys() == params.keys() and max((got[k] - params[k]).abs().max() for k in got) < 1e-5


@pytest.mark.parametrize("flags", ["", "--rank-context exact", "--method t3d"])
def test_accumulation_and_checkpointing_change_nothing(flags, train, monkeypatch):
    calls, checkpoint = [], models.checkpoint
    monkeypatch.setattr(models, "checkpoint", lambda *x, **more: calls.append(x) or checkpoint(*x, **more))
    one = train("one", f"{flags} --max-steps 4 --batch-size 8")
    assert not calls
    assert_close_runs(one, train("many", f"{flags} --max-steps 4 --batch-size 2 --grad-accum 4 --grad-checkpoint"))
    assert calls


def die_at(n):
    """From now on: SIGKILL at the n-th change to the disk; what is being written then is cut in the middle."""
    count = [0]

    def hook(event, args):
        writes = event == "open" and isinstance(args[0], (str, Path)) and (args[1] or "r")[0] in "aw"
        if writes or event in ("os.rename", "os.mkdir"):
            count[0] += 1
            if count[0] == n:
                if writes:
                    os.write(os.open(args[0], os.O_WRONLY | os.O_APPEND | os.O_CREAT), b'{"step": 3, "epoch": 1, "lo')
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)


def test_killed_at_any_write_and_resumed_equals_whole(train, tmp_path):
    flags = "--max-steps 3 --batch-size 12 --save-every 1"                   # 2 steps per epoch
    whole, n, killed = train("whole", flags), 0, True
    while killed:
        n += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        child = Fork(target=lambda: (die_at(n), train("run", flags)))
        child.start()
        child.join()
        killed = child.exitcode == -signal.SIGKILL
        out = train("run", flags + " --resume")
        assert same_run(out, whole)
        assert {p.name for p in out.iterdir()} == {"epoch-1", "epoch-2", "log.jsonl", "resume.safetensors"}
    assert child.exitcode == 0 and n > 20                          # the last child was not hit: every write has been


@pytest.mark.parametrize("ranks, flags", [(2, "--batch-size 2 --grad-accum 2"), (4, "--batch-size 2")])
def test_ranks_match_one_process(ranks, flags, train, folders, tmp_path):
    """17 records: the last batch of an epoch has one sample, on rank 0."""
    source = write_lines(tmp_path / "corpus17.jsonl", corpus(folders["llada"], 17))
    run_ranks(ranks, lambda: train("many", f"--max-steps 12 {flags}", source))
    assert_close_runs(tmp_path / "many", train("one", "--max-steps 12 --batch-size 8", source))


def test_ranking_puts_held_out_pairs_in_order(command, train, tmp_path):
    """The committed toy through decode.py, then tabom.py with and without the ranking term: same data and windows."""
    folder, args, shares = str(HERE / "study" / "base"), training_args("--window 4"), {}
    tasks = toy.draw("math", "train", 210, seed=0)
    source = write_lines(tmp_path / "prompts.jsonl", [dict(prompt="".join(task[0])) for task in tasks])
    command(decode, f"--model {folder} --prompts {source} --out {tmp_path}/all --length 34 --batch-size 64")
    rows = sorted(read_lines(tmp_path / "all"), key=lambda row: row["id"])
    learn, held_out = write_lines(tmp_path / "learn", rows[:140]), write_lines(tmp_path / "held_out", rows[140:])
    for lam, out in ((1, tmp_path / "with"), (0, tmp_path / "without")):
        train(out, f"--lam {lam} --max-steps 80 --batch-size 16 --lr 1e-2 --lora-r 16", learn)
        net = load(folder)
        lora.load(net, out / "epoch-9")
        trajs = read_trajs(folder, held_out, "--all")
        shares[lam] = np.mean([losses(net, views_of(trajs, args, seed), args)[1]["in_order"] for seed in range(20)], 0)
    gain = shares[1] - shares[0]                         # paired: the same trajectories and windows
    error = gain.std(ddof=1) / math.sqrt(len(gain))
    assert gain.mean() > max(0.03, 6 * error), (shares[1].mean(), shares[0].mean(), error)


@both
def test_tds_equals_its_definition_in_plain_loops(family, cli, folders, nets, tmp_path):
    net, end_ids, want = nets[family], tokenizer(folders[family]).end_ids, {}
    cli("t.jsonl", "--length 10 --tokens-per-step 2", family)
    trajs = read_trajs(folders[family], tmp_path / "t.jsonl", "--all")
    trajs[0].response[4] = net.config.eos_id
    for traj in trajs:
        for step in sorted(set(traj.step.tolist()) - {-1}):
            seen = [0 <= s < step for s in traj.step]
            z, h = state_logits(net, traj, seen), []
            for i, token in enumerate(traj.response):
                if not seen[i]:
                    h.append(plain_stats(z[i], 0)[1])
                elif token in end_ids:                   # decoded by now: nothing to the right of it counts
                    break
            if len(h) >= 2:
                mean = sum(h) / len(h)
                want.setdefault(step, []).append(sum((x - mean) ** 2 for x in h) / len(h))
    got = evaluate.tds_curve(net, trajs, net.config, end_ids, batch_size=3)
    assert [step for step, value in enumerate(got) if value is not None] == sorted(want)
    for step, values in want.items():
        assert got[step] == pytest.approx(np.mean(values), rel=1e-3, abs=1e-5)


def test_order_agreement_counts_pairs(nets, folders, tmp_path):
    net, trajs = nets["llada"], read_shapes(folders["llada"], tmp_path, "")
    args, right, pairs = training_args("--window 3"), 0, 0
    for n, traj in enumerate(trajs):
        for cut in range(4):
            visible, targets = tabom.sample_view(traj, args, np.random.default_rng([cut, n]))
            z = state_logits(net, traj, visible)
            h = [plain_stats(z[j], 0)[1] for j in targets]
            right += sum(h[r] < h[s] for r in range(len(h)) for s in range(r + 1, len(h)))
            pairs += len(h) * (len(h) - 1) // 2
    assert evaluate.order_agreement(net, trajs, net.config, 3, batch_size=5) == pytest.approx(right / pairs)


@pytest.mark.parametrize("k", [1, 3])
def test_swap_equals_a_plain_loop_with_two_models(k, folders):
    """Positions by one network's confidence, tokens by the other's argmax; two separate models, one row, no batch."""
    base, tuned = load(folders["llada"]), adapted(folders["llada"], scale=1.0)
    s = settings(folders["llada"], f"--length 9 --tokens-per-step {k}", end_ids=[-1])
    prompts = [("0", [3, 1, 4]), ("1", [1, 5, 9, 2, 6])]
    inside = evaluate.WithoutAdapter(tuned)
    for order_by, tokens_by, pair in ((base, tuned, (inside, tuned)), (tuned, base, (tuned, inside))):
        got = {row.id: row for row in decode.decode(pair[0], prompts, s, 2, token_model=pair[1])}
        for id, prompt in prompts:
            canvas, step = [s.mask_id] * 9, [-1] * 9
            for now in range(-(-9 // k)):
                p = plain_logits(order_by, prompt, canvas).softmax(-1)
                z = plain_logits(tokens_by, prompt, canvas)
                p[:, s.mask_id], z[:, s.mask_id] = -1, -torch.inf
                left = sorted((j for j in range(9) if step[j] < 0), key=lambda j: -p[j].max().item())
                for j in left[:k]:
                    canvas[j], step[j] = int(z[j].argmax()), now
            assert got[id].step.tolist() == step and got[id].canvas.tolist() == canvas
