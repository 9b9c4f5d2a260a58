"""
What TABOM is compared with in the paper, on the same loop and LoRA (tabom.py --method sft|dinfer|t3d).

A view draws one moment of a trajectory: what the model sees, and what it is to predict (data.View). sft and dinfer
have no loss of their own: tabom.py sets lam to 0, and tabom_loss is then the cross-entropy.
reorder is a control for the methods that train on trajectories (--order).
"""
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F

import lora
from data import View
from model import log_probs


def sft_view(traj, rng):
    """Eq. 1: mask every token with probability t ~ U(0, 1); at least one target."""
    u = rng.random(len(traj.step))
    t = rng.random()
    masked = u < t
    if not masked[traj.order].any():
        masked[rng.choice(traj.order)] = True
    return View(traj, traj.decoded & ~masked, traj.order[masked[traj.order]])


def dinfer_view(traj, rng):
    """dInfer's compressed transitions: two times i < j; predict what was decoded in between."""
    steps = traj.step[traj.order]                          # ascending
    times = np.append(np.unique(steps), steps[-1] + 1)
    i, j = np.sort(rng.choice(times, 2, replace=False))
    return View(traj, traj.decoded_before(i), traj.order[(steps >= i) & (steps < j)])


def t3d_view(traj, rng):
    """T3D: any step; predict all that is still masked."""
    steps = traj.step[traj.order]
    start = rng.choice(np.unique(steps))
    return View(traj, traj.decoded_before(start), traj.order[steps >= start])


VIEWS = {"sft": sft_view, "dinfer": dinfer_view, "t3d": t3d_view}


def reorder(traj, order):
    """The same tokens as if they had been decoded one per step from left to right, at random, or in reverse."""
    positions = np.flatnonzero(traj.decoded)             # left to right
    if order == "reversed":
        positions = positions[np.lexsort((traj.entropy[positions], traj.step[positions]))][::-1]
    if order == "random":                                  # by the record alone: the same in every epoch, on every rank
        positions = np.random.default_rng(crc32(str(traj.id).encode())).permutation(positions)
    traj.step[positions] = np.arange(len(positions))
    traj.non_ltr = None                                    # the record's own list fits its own order only


def t3d_loss(model, logp, batch, a=0.5, b=0.1, c=0.2):
    """
    T3D, ported to LoRA: prefer the trajectory's tokens to those the frozen base would choose, relative to the base,
    plus a path term in which tokens decoded early weigh more. logp (B, W, V): log-probabilities at the targets.
    a: weight of the base's tokens, b: temperature, c: weight of the path term.
    """
    with torch.no_grad(), lora.disabled(model):                             # the reference is the frozen base
        ref_logp = log_probs(model, batch)
    x0, valid = batch.x0, batch.valid
    n = valid.sum(1)                                                        # (B,)  masked tokens
    x1 = ref_logp.argmax(-1)                                                # (B, W)  the base's own choice
    means = []                                                              # of log p(x) - log p_ref(x), (B,)
    for x in (x0, x1):
        ratio = logp.gather(-1, x[..., None]) - ref_logp.gather(-1, x[..., None])            # (B, W, 1)
        means.append((ratio[..., 0] * valid).sum(1) / n)
    good, bad = means
    # path: the mean cross-entropy of the first s tokens in decoding order, mean over s
    ce = -logp.gather(-1, x0[..., None])[..., 0] * valid                    # (B, W)
    s = torch.arange(1, valid.shape[1] + 1, device=valid.device)            # (W,)
    path = (ce.cumsum(1) / s * valid).sum(1) / n                            # (B,)
    loss = -F.logsigmoid(b * good) - a * F.logsigmoid(-b * bad) + c * path
    return loss, {"ce": ce.sum(1) / n}
