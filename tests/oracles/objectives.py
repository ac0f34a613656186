"""Compute the losses of the heads in float64 as the papers state them, without log space."""

import torch


def beta_mi(student, teacher, marginal, *, beta=0.6, ts=0.1, tt=0.1):
    """Compute equation 7 of TEMI as printed, on healthy float64 values only."""
    p = torch.softmax(student / ts, dim=-1)
    q = torch.softmax(teacher / tt, dim=-1).detach()
    return -torch.log((((p * q) ** beta) / marginal[:, None]).sum(-1))


def temi(student, teacher, marginal, how, *, beta=0.6, ts=0.1, tt=0.1):
    """Compute TEMI's objective of two views `[head, 2, batch, cluster]`, head by head."""
    q = torch.softmax(teacher / tt, dim=-1).detach()
    agreement = (q[:, 0] * q[:, 1]).sum(-1)
    losses = []
    for h in range(len(student)):
        first = beta_mi(
            student[h : h + 1, 0],
            teacher[h : h + 1, 1],
            marginal[h : h + 1],
            beta=beta,
            ts=ts,
            tt=tt,
        )[0]
        second = beta_mi(
            student[h : h + 1, 1],
            teacher[h : h + 1, 0],
            marginal[h : h + 1],
            beta=beta,
            ts=ts,
            tt=tt,
        )[0]
        weight = {
            "none": torch.ones_like(agreement[h]),
            "own": agreement[h],
            "mean": agreement.mean(0),
        }[how]
        losses.append((weight / weight.sum() * (first + second) / 2).sum())
    return torch.stack(losses)


def sharpened(student, teacher, center, *, ts=0.1, tt=0.04):
    """Compute equation 3 of DINO with centering, for two views, head by head."""
    losses = []
    for h in range(len(student)):
        total = 0.0
        for v, w in ((0, 1), (1, 0)):
            target = torch.softmax((teacher[h, w] - center[h]) / tt, dim=-1).detach()
            total = total - (target * torch.log(torch.softmax(student[h, v] / ts, dim=-1))).sum(-1)
        losses.append((total / 2).mean())
    return torch.stack(losses)
