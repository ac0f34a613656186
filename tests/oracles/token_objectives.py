"""Extend `plain`, the published reference, by the answers of caches and by a step of training."""

import copy

import torch

from ssl_kd.language.losses.plain import divergence_of, token_kd

__all__ = ["JS", "divergence_of", "sampled", "step", "token_kd", "top_k"]

JS = ("js:0.1", "js:0.9")
"""Generalized Jensen-Shannon divergences to test."""


def top_k(z, indices, log_probs, log_tail, *, temperature, name):
    """Return T^2 D over k outcomes and the tail, for the logits `[vocab]` of one token."""
    log_q = torch.log_softmax(z / temperature, -1)
    rest = [v for v in range(len(z)) if v not in indices.tolist()]
    coarse = torch.cat([log_q[indices], log_q[rest].logsumexp(0, keepdim=True)])
    return temperature**2 * divergence_of(name, torch.cat([log_probs, log_tail.reshape(1)]), coarse)


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
            kd = kd + t**2 * divergence_of(name, log_p, log_q)
            n += 1
    ((settings.alpha_ce * ce + settings.alpha_kd * kd) / n).backward()
    return student, ce.item() / n, kd.item() / n, n
