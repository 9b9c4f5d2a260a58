"""One more claim of tabom.py, to be merged into test_tabom.py: clipping, learning rate, AdamW, windows of each epoch."""
# ruff: noqa: F811                      fixtures come by import
import math

import numpy as np
import torch

import lora
import model as models
import tabom
from test_tabom import QUICK, adapter_of, folders, ids_of, log_of, settings_of, train  # noqa: F401


def test_training_equals_a_plain_loop(train, folders):
    """One sample at a time, AdamW written out, a window of (seed, epoch, place in the file) each: main's adapter."""
    more = "--epochs 3 --batch-size 12 --clip 0.5 --weight-decay 0.1"                    # 2 steps an epoch, 6 in all
    out, a, net = train("run", more), settings_of(" ".join(QUICK) + " " + more), models.load(folders["llada"])
    a.data, mask_id, params = train.data, ids_of("llada").mask, lora.wrap(net, r=4, alpha=16, seed=3)
    records = tabom.read_data(a, models.read_config(folders["llada"])[0], models.load_tokenizer(folders["llada"]), 0)
    number, windows = {r.id: n for n, r in enumerate(records)}, {}
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in params]
    for t, row in enumerate(log_of(out)[1], 1):
        net.zero_grad()
        for id in row["samples"]:
            n = number[id]
            seen, targets = tabom.view(records[n], "tabom", 4, np.random.default_rng([3, row["epoch"] - 1, n]))
            windows.setdefault(id, []).append(targets.tolist())
            loss = tabom.batch_loss(net, [(records[n], seen, targets)], a, mask_id, "cpu")[0]
            (loss.sum() / len(row["samples"])).backward()
        norm = math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in params))
        lr = 1e-3 * t / 5 if t <= 5 else 1e-3            # five steps of warm-up, and the first of the cosine
        assert norm > 0.5 and abs(row["gnorm"] - norm) < 1e-3 * norm
        for p, (m, v) in zip(params, moments, strict=True):
            g = p.grad * 0.5 / norm
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            p.data -= lr * 0.1 * p.data
            p.data -= lr * (m / (1 - 0.9 ** t)) / ((v / (1 - 0.999 ** t)).sqrt() + 1e-8)
    got, want = adapter_of(out), lora.state(net)
    assert got.keys() == want.keys() and max((got[k] - want[k]).abs().max() for k in got) < 1e-5
    assert any(w[0] != w[1] for w in windows.values())   # another window each epoch
