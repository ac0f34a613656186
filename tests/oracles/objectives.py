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


def sinkhorn(scores, epsilon=0.05, iterations=3):
    """Compute SwAV's assignments `[batch, cluster]` as its official code states them."""
    q = torch.exp(scores / epsilon).t()
    batch, clusters = q.shape[1], q.shape[0]
    q = q / q.sum()
    for _ in range(iterations):
        q = q / q.sum(dim=1, keepdim=True) / clusters
        q = q / q.sum(dim=0, keepdim=True) / batch
    return (q * batch).t()


def swav(student, teacher, *, ts=0.1, tt=0.05):
    """Compute the swapped prediction of two views, head by head."""
    losses = []
    for h in range(len(student)):
        total = 0.0
        for v, w in ((0, 1), (1, 0)):
            q = sinkhorn(teacher[h, w].detach(), tt)
            total = total - (q * torch.log(torch.softmax(student[h, v] / ts, dim=-1))).sum(-1)
        losses.append((total / 2).mean())
    return torch.stack(losses)


def scan(student, *, ts=0.1, entropy_weight=5.0):
    """Compute SCAN's loss with each view as the anchor once, head by head."""
    losses = []
    for p in torch.softmax(student / ts, dim=-1):
        total = 0.0
        for anchors, positives in ((p[0], p[1]), (p[1], p[0])):
            similarity = (anchors * positives).sum(-1)
            consistency = -torch.log(similarity).mean()
            mean = anchors.mean(0)
            total = total + consistency + entropy_weight * (mean * torch.log(mean)).sum()
        losses.append(total / 2)
    return torch.stack(losses)


def iic(student, *, ts=0.1):
    """Compute IIC's loss of two views as its official code states it, head by head."""
    losses = []
    for p in torch.softmax(student / ts, dim=-1):
        joint = (p[0].unsqueeze(2) * p[1].unsqueeze(1)).sum(dim=0)
        joint = (joint + joint.t()) / 2.0
        joint = joint / joint.sum()
        rows, columns = joint.sum(1, keepdim=True), joint.sum(0, keepdim=True)
        loss = -joint * (torch.log(joint) - torch.log(columns) - torch.log(rows))
        losses.append(loss.sum())
    return torch.stack(losses)
