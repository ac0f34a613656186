"""Compute token-level distillation in float64, one token at a time, with autograd gradients."""

import copy

import torch

HUGE = 65504.0
JS = ("js:0.1", "js:0.9")
"""Generalized Jensen-Shannon divergences to test."""


def _kl(log_a, log_b):
    return (log_a.exp() * (log_a - log_b)).sum()


def _mix(share, log_a, log_b):
    """Return `log(share * a + (1 - share) * b)`."""
    first, second = torch.tensor([share, 1 - share], dtype=torch.float64).log()
    return torch.logaddexp(log_a + first, log_b + second)


def divergence(name, log_p, log_q):
    """Return a divergence of the log-probabilities `[outcome]` of teacher p and student q."""
    if name.startswith("reverse_kl:"):
        own = log_q.topk(int(name[11:])).indices
        rest = log_q.new_ones(len(log_q)).index_fill(0, own, 0).nonzero().flatten()
        tails = [x[rest].logsumexp(0, keepdim=True)[: len(rest)] for x in (log_p, log_q)]
        log_p, log_q = torch.cat([log_p[own], tails[0]]), torch.cat([log_q[own], tails[1]])
        name = "reverse_kl"
    if name.startswith("js:"):
        beta = float(name[3:])
        mixture = _mix(beta, log_p, log_q)
        return beta * _kl(log_p, mixture) + (1 - beta) * _kl(log_q, mixture)
    return {
        "forward_kl": lambda: _kl(log_p, log_q),
        "reverse_kl": lambda: _kl(log_q, log_p),
        "js": lambda: (
            _kl(log_p, _mix(0.5, log_p, log_q)) / 2 + _kl(log_q, _mix(0.5, log_p, log_q)) / 2
        ),
        "skew_kl": lambda: _kl(log_p, _mix(0.1, log_p, log_q)),
        "skew_reverse_kl": lambda: _kl(log_q, _mix(0.9, log_p, log_q)),
        "tvd": lambda: (log_p.exp() - log_q.exp()).abs().sum() / 2,
    }[name]()


def _saturated(logits):
    return torch.where(logits.isinf(), logits.sign() * HUGE, logits)


def token_kd(student, teacher, *, mask=None, temperature=2.0, name="forward_kl"):
    """Return the mean of T^2 D over real tokens and its gradient by the student, both float64."""
    common = min(student.shape[-1], teacher.shape[-1])
    z = student.detach().double()
    gradient = torch.zeros_like(z)
    real = [(b, t) for b in range(z.shape[0]) for t in range(z.shape[1])]
    if mask is not None:
        real = [(b, t) for b, t in real if mask[b, t]]
    whole = [v for v in range(common) if not all(z[b, t, v] == -torch.inf for b, t in real)]
    in_teacher = [v for v in whole if not all(teacher[b, t, v] == -torch.inf for b, t in real)]
    total = torch.zeros((), dtype=torch.float64)
    for b, t in real:
        absent = int((teacher[b, t, :common] == -torch.inf).sum())
        # A filtered teacher is compared over the whole vocabulary; padding is cut.
        kept = whole if common / 2 < absent < common else in_teacher
        row = _saturated(z[b, t, kept]).requires_grad_()
        log_q = torch.log_softmax(row / temperature, -1)
        log_p = torch.log_softmax(_saturated(teacher[b, t, kept].double()) / temperature, -1)
        loss = temperature**2 * divergence(name, log_p, log_q) / len(real)
        (gradient[b, t, kept],) = torch.autograd.grad(loss, row)
        total += loss.detach()
    return total, gradient


def top_k(z, indices, log_probs, log_tail, *, temperature, name):
    """Return T^2 D over k outcomes and the tail, for the logits `[vocab]` of one token."""
    log_q = torch.log_softmax(z / temperature, -1)
    rest = [v for v in range(len(z)) if v not in indices.tolist()]
    coarse = torch.cat([log_q[indices], log_q[rest].logsumexp(0, keepdim=True)])
    return temperature**2 * divergence(name, torch.cat([log_probs, log_tail.reshape(1)]), coarse)


def sampled(z, indices, weights, entropy, *, temperature):
    """Return T^2 times the sampled estimate of KL(p, q), for the logits `[vocab]` of one token."""
    q = torch.softmax(z / temperature, -1)
    terms = [-w * q[i].log() for i, w in zip(indices.tolist(), weights, strict=True)]
    return temperature**2 * (sum(terms) - entropy)


def step(student, teacher, batch, settings, text=None):
    """Run the backward pass of a step; `text` rows come first, and continuations follow.

    Returns:
        The student in float64 with its gradients, the means of ce and kd, and the token count.
    """
    student, teacher = copy.deepcopy(student).double(), copy.deepcopy(teacher).double()
    own, theirs = (m(**batch.model_inputs(), use_cache=False).logits for m in (student, teacher))
    ce, kd, n = torch.zeros(()).double(), torch.zeros(()).double(), 0
    for row in range(len(batch.input_ids)):
        of_text = text is None or row < text
        name = settings.kind_of_divergence if of_text else settings.kind_on_policy
        for place in range(1, batch.input_ids.shape[1]):
            if not batch.counts[row, place]:
                continue
            z, t = own[row, place - 1], settings.temperature
            if of_text:
                ce = ce - z.log_softmax(-1)[batch.input_ids[row, place]]
            log_p, log_q = (x.log_softmax(-1) for x in (theirs[row, place - 1].detach() / t, z / t))
            kd = kd + t**2 * divergence(name, log_p, log_q)
            n += 1
    ((settings.alpha_ce * ce + settings.alpha_kd * kd) / n).backward()
    return student, ce.item() / n, kd.item() / n, n
