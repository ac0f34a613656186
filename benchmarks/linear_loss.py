"""Seconds and peak memory of a distillation loss, from hidden states to gradients, beside peers.

    python -m benchmarks.linear_loss

All get the same hidden states and output weights of a student and a teacher and return the loss and
the gradients of the student's. Times are medians over rounds in which all take turns, each in a
process of its own that lives through the run; memory is the growth of the peak resident set over
the first step of such a process, gradients included. Ratios are to ours in the same round: their
median, and the middle half of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.step_cost import peak_mib, versions
from benchmarks.turns import header, middle_half, row
from ssl_kd.losses import LinearTeacher, linear_distillation

CHUNK_OF_LIGER = 128  # tokens; its own 1,024 needs several times the memory
Heads = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden and weight of the student, of the teacher


def ours(heads: Heads, temperature: float, beta: float) -> Tensor:
    hidden, weight, teacher_hidden, teacher_weight = heads
    divergence = {0.0: "forward_kl", 0.5: "js", 1.0: "reverse_kl"}[beta]
    terms = linear_distillation(
        hidden,
        weight,
        None,
        None,
        [LinearTeacher(teacher_hidden, teacher_weight)],
        temperature=temperature,
        divergence=divergence,
        weights=(0.0, 1.0),
    )
    return terms[1] / temperature**2 / len(hidden)


def trl_logits(heads: Heads, temperature: float, beta: float) -> Tensor:
    from trl.experimental.gkd import GKDTrainer  # pyright: ignore[reportMissingImports]

    student, teacher = _logits(heads)
    labels = torch.zeros(student.shape[:-1], dtype=torch.long)
    return GKDTrainer.generalized_jsd_loss(
        student, teacher, labels=labels, beta=beta, temperature=temperature
    )


def trl_chunked(heads: Heads, temperature: float, beta: float) -> Tensor:
    from trl.trainer.distillation_trainer import _chunked_divergence_loss  # pyright: ignore[reportMissingImports]

    hidden, weight, teacher_hidden, teacher_weight = heads
    mask = torch.ones(1, len(hidden))
    return _chunked_divergence_loss(
        hidden[None],
        teacher_hidden[None],
        weight,
        teacher_weight,
        mask,
        beta,
        temperature=temperature,
    )[0]


def liger(heads: Heads, temperature: float, beta: float, compiled: bool = True) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # pyright: ignore[reportMissingImports]

    loss = LigerFusedLinearJSDLoss(
        0.0, 1.0, beta=beta, temperature=temperature, compiled=compiled, chunk_size=CHUNK_OF_LIGER
    )
    return loss(*heads, torch.zeros(len(heads[0]), dtype=torch.long))


def plain(heads: Heads, temperature: float, beta: float) -> Tensor:
    student, teacher = _logits(heads)
    log_q = F.log_softmax(student[0] / temperature, -1)
    log_p = F.log_softmax(teacher[0] / temperature, -1)
    if beta == 0:
        return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    if beta == 1:
        return (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
    halves = [F.kl_div(log_m, x, reduction="batchmean", log_target=True) for x in (log_p, log_q)]
    return (halves[0] + halves[1]) / 2


def _logits(heads: Heads) -> tuple[Tensor, Tensor]:
    hidden, weight, teacher_hidden, teacher_weight = heads
    with torch.no_grad():
        teacher = F.linear(teacher_hidden, teacher_weight)
    return F.linear(hidden, weight)[None], teacher[None]


METHODS: dict[str, Callable[[Heads, float, float], Tensor]] = {
    "ours": ours,
    "TRL, generalized_jsd_loss": trl_logits,
    "TRL, DistillationTrainer's": trl_chunked,
    "Liger, chunked JSD": liger,
    "Liger, not compiled": partial(liger, compiled=False),
    "plain PyTorch": plain,
}


def _serve(pipe, method: str, tokens: int, args: argparse.Namespace) -> None:
    """In a process of its own: one step for each word that comes in."""
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, args.dim), (args.vocab, args.dim)] * 2
    heads: list[Tensor] = [torch.randn(shape, generator=generator) for shape in shapes]
    for tensor in heads[1::2]:
        tensor.mul_(3 / args.dim**0.5)
    heads = [tensor.to(getattr(torch, args.dtype)) for tensor in heads]
    step, inputs = METHODS[method], (*heads,)
    # One small call first: imports and the libraries' own buffers are not the loss's memory.
    small = tuple(x[:64].detach().clone().requires_grad_(i < 2) for i, x in enumerate(heads))
    step(small, args.temperature, args.beta).backward()  # type: ignore[arg-type]
    for tensor in heads[:2]:
        tensor.requires_grad_()
    while pipe.recv():
        for tensor in heads:
            tensor.grad = None
        before, began = peak_mib(), time.perf_counter()
        loss = step(inputs, args.temperature, args.beta)  # type: ignore[arg-type]
        forward = time.perf_counter() - began
        loss.backward()
        whole = time.perf_counter() - began
        peak = peak_mib() - before
        norm = sum(x.grad.norm().item() for x in heads[:2])  # type: ignore[union-attr]
        pipe.send((forward, whole - forward, peak, loss.item(), norm))


def main() -> None:
    parser = argparse.ArgumentParser(description="Distillation from hidden states, beside peers.")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 2_048], help="batch x length"
    )
    parser.add_argument("--dim", type=int, default=512, help="hidden size, of both models")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--beta", type=float, default=0.0, choices=[0.0, 0.5, 1.0])
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=7, help="timed rounds, after one to warm up")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()

    print(
        f"{args.vocab:,} entries, {args.dim} wide, {args.dtype}, beta {args.beta:g}, "
        f"T {args.temperature:g}; {args.threads} threads, {args.runs} rounds; "
        + versions("trl", "liger-kernel")
    )
    columns = ["tokens", "loss", "forward s", "backward s", "both s", "time relative to ours"]
    columns += ["extra peak MiB", "relative to ours", "value", "gradient norm"]
    header(*columns)
    for tokens in args.tokens:
        _compare(tokens, args)


def _compare(tokens: int, args: argparse.Namespace) -> None:
    """The table's rows of one size."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for method in args.methods:
        pipes[method], theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, method, tokens, args), daemon=True).start()
        theirs.close()
    rounds = {method: [] for method in args.methods}
    for _ in range(args.runs + 1):
        for method, pipe in pipes.items():
            pipe.send(True)
            rounds[method].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(False)
    first = rounds[args.methods[0]]
    for method, each in rounds.items():
        seconds = [statistics.median(x[i] for x in each[1:]) for i in (0, 1)]
        memory, value, norm = each[0][2:]
        pairs = zip(each[1:], first[1:], strict=True)
        cells = [f"{tokens:,}", method, *(f"{s:.2f}" for s in (*seconds, sum(seconds)))]
        cells += [middle_half((x[0] + x[1]) / (y[0] + y[1]) for x, y in pairs), f"{memory:.0f}"]
        cells += [f"{memory / first[0][2]:.2f}", f"{value:.6f}", f"{norm:.6f}"]
        row(*cells)


if __name__ == "__main__":
    main()
