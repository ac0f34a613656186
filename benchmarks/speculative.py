"""Measure a student as the draft of its teacher in speculative decoding: acceptance and speed-up.

    python -m benchmarks.speculative --student_model runs/latest/student --teacher_model TEACHER \
        --data_path texts.jsonl

The student drafts some tokens, the teacher verifies them in one forward pass, keeps those up to the
first that it rejects, and writes one more itself. The text is the teacher's, to its distribution
(sampled) or to the token (greedy); only the time changes. `expected` is the mean of
`sum_x min(p, q)` over text that the teacher sampled; `sampled` and `greedy` are transformers'
assisted generation, each prompt timed beside the teacher alone in the same process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.distillation import add_settings
from ssl_kd.datasets.blocks import Blocks
from ssl_kd.evaluate.generation import end_tokens, how_to_write, sample_tokens
from ssl_kd.evaluate.language import judge_tokens
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import precision_of
from ssl_kd.language.teacher import load_teacher
from ssl_kd.language.texts import texts_of
from ssl_kd.seeds import seed_of, seeded
from ssl_kd.teachers.causal import evaluating, llm_module, quiet
from ssl_kd.teachers.frozen import FrozenTeacher

PROMPT_TOKENS = 16


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Tokens that one verification is expected to yield, the teacher's own included.

    `(1 - a^(g + 1)) / (1 - a)` for acceptance a, taken as independent of the place, and g drafted.

    Args:
        acceptance: from 0 to 1.
        drafted: tokens before each verification, at least 1.

    References:
        Leviathan et al., Fast inference from transformers via speculative decoding, ICML 2023,
        equation 1.

    Example:
        >>> expected_tokens(0.5, 2)
        1.75
    """
    return sum(acceptance**i for i in range(drafted + 1))


def own_text(
    teacher: FrozenTeacher,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 8,
    seed: int = 0,
) -> Blocks:
    """What a teacher itself writes after each prompt, sampled at temperature 1.

    On these tokens the mean of `sum_x min(p, q)` is the acceptance of a draft, see `token_values`.

    Args:
        teacher: writes.
        tokenizer: its own.
        prompts: in tokens, none of them empty.
        max_new_tokens: of each text, at most.
        batch_size: texts at once.
        seed: of the draws.

    Returns:
        A row for each; what it wrote counts, and the prompts do not.
    """
    rows: list[tuple[list[int], list[int]]] = []
    gpus = [teacher.device] if teacher.device.type == "cuda" else []
    for start in range(0, len(prompts), batch_size):
        some = prompts[start : start + batch_size]
        with teacher.on_device(), seeded(seed_of(seed, start), gpus):
            new = sample_tokens(teacher.model, tokenizer, some, max_new_tokens)
        rows += zip(some, new, strict=True)
    width = max(len(prompt) + len(new) for prompt, new in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    counts = torch.zeros(len(rows), width, dtype=torch.bool)
    documents = torch.zeros(len(rows), width, dtype=torch.int32)
    for i, (prompt, new) in enumerate(rows):
        ids[i, : len(prompt) + len(new)] = torch.tensor(prompt + new)
        counts[i, len(prompt) : len(prompt) + len(new)] = True
        documents[i, : len(prompt) + len(new)] = 1
    characters = [len(tokenizer.decode(new, skip_special_tokens=True)) for _, new in rows]
    return Blocks(ids, counts, documents, torch.tensor(characters), (), digest="")


@dataclass(frozen=True)
class Drafted:
    """What drafting came to, measured.

    Attributes:
        verifications: forward passes of the teacher in which it judged drafted tokens, or wrote.
        tokens: written in them.
        judged: drafted tokens that the teacher came to judge: up to the first that it rejected.
        accepted: of those, how many it kept.
        speedup: time without the student / time with it, a prompt each.
        cost: the student's time for a token / the teacher's, a prompt each.
        same: of how many prompts the text was the same with the student as without; None where it
            is sampled.
    """

    verifications: int
    tokens: int
    judged: int
    accepted: int
    speedup: tuple[float, ...]
    cost: tuple[float, ...]
    same: int | None

    def facts(self, drafted: int) -> dict[str, Any]:
        """The measures as plain numbers: medians over prompts, with the middle half of them.

        Args:
            drafted: tokens before each verification, for what was to be expected.
        """
        rate = self.accepted / self.judged if self.judged else None
        cost = median(self.cost)
        fair = None if rate is None else expected_tokens(rate, drafted) / (drafted * cost + 1)
        several = self.speedup if len(self.speedup) > 1 else self.speedup * 2
        low, _, high = quantiles(several, n=4, method="inclusive")
        return {
            "acceptance": rate,
            "accepted_per_verification": self.accepted / self.verifications,
            "tokens_per_verification": self.tokens / self.verifications,
            "speedup": median(self.speedup),
            "speedup_middle_half": [low, high],
            "cost": cost,
            # Theorem 3.8; the loop's own time, which is not in it, is the rest.
            "speedup_by_theory": fair,
            "prompts": len(self.speedup),
            "same_text": self.same,
        }


def draft(
    teacher: FrozenTeacher,
    student: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    drafted: int = 5,
    sample: bool = False,
    seed: int = 0,
) -> Drafted:
    """Let the teacher write with the student's drafts, by transformers' assisted generation.

    After each prompt the teacher writes alone and with drafts, and the student alone, one after the
    other in this process, in an order that alternates; the first prompt is written once more
    before, to warm up.

    Args:
        teacher: writes.
        student: a causal language model of transformers of the teacher's tokenizer, on its device.
        tokenizer: the teacher's.
        prompts: in tokens, at least one, none of them empty.
        max_new_tokens: of each text, at most.
        drafted: tokens before each verification.
        sample: at temperature 1, from the teacher's whole distribution; else greedily.
        seed: of the draws.

    Raises:
        ValueError: transformers has no assisted generation for these models; it says why.
    """
    ends = end_tokens(teacher.model, tokenizer)
    how = how_to_write(ends, max_new_tokens, sample=sample)
    gpus = [teacher.device] if teacher.device.type == "cuda" else []

    def write(
        model: Any, ids: list[int], number: int, rounds: _Rounds | None = None
    ) -> tuple[list[int], float]:
        x = torch.tensor([ids], device=teacher.device)
        by = {} if rounds is None else {"assistant_model": student, "streamer": rounds}
        with (
            seeded(seed_of(seed, number), gpus),
            rounds.watching(model) if rounds else nullcontext(),
        ):
            start = perf_counter()
            out = model.generate(x, attention_mask=torch.ones_like(x), **how, **by)
            new = out[0, len(ids) :].tolist()  # waits for the device
            return new, perf_counter() - start

    found: list[dict[str, tuple[list[int], float]]] = []
    every = [_Rounds(len(ids)) for ids in (prompts[0], *prompts)]
    with (
        quiet(llm_module("transformers")),  # of how it calls itself
        teacher.on_device(),
        evaluating(teacher.model),
        evaluating(student),
        _drafting(student, drafted),
    ):
        for number, (ids, rounds) in enumerate(zip((prompts[0], *prompts), every, strict=True)):
            ways = {
                "alone": partial(write, teacher.model, ids, number),
                "drafted": partial(write, teacher.model, ids, number, rounds),
                "student": partial(write, student, ids, number),
            }
            order = list(ways) if number % 2 else list(reversed(ways))
            found.append({name: ways[name]() for name in order})
    counts = [rounds.counted(ends) for rounds in every[1:]]
    return Drafted(
        *map(sum, zip(*counts, strict=True)),
        speedup=tuple(_per_token(f["alone"]) / _per_token(f["drafted"]) for f in found[1:]),
        cost=tuple(_per_token(f["student"]) / _per_token(f["alone"]) for f in found[1:]),
        same=None if sample else sum(f["alone"][0] == f["drafted"][0] for f in found[1:]),
    )


def _per_token(written: tuple[list[int], float]) -> float:
    return written[1] / len(written[0])


class _Rounds:
    """What each verification of one text was given and yielded: a streamer, and a hook.

    Args:
        prompt: its length.
    """

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._seen: list[int] = []  # tokens that the teacher's forward passes got
        self._put: list[list[int]] = []

    def put(self, tokens: Tensor) -> None:
        """Take what transformers streams: the prompt, then what each verification yields."""
        self._put.append(tokens.flatten().tolist())

    def end(self) -> None:
        """Nothing follows."""

    @contextmanager
    def watching(self, teacher: Any) -> Iterator[None]:
        """Count the tokens of its forward passes."""

        def note(_: Any, arguments: Any, named: dict[str, Any]) -> None:
            self._seen.append(named["input_ids"].shape[1])

        hook = teacher.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def counted(self, ends: Sequence[int]) -> tuple[int, int, int, int]:
        """Verifications, tokens written, drafted ones that were judged, and those accepted."""
        yielded, before = self._put[1:], [self._prompt, *(1 for _ in self._seen[1:])]
        judged = accepted = 0
        for new, seen, known in zip(yielded, self._seen, before, strict=True):
            # At an end of the text it is not said whether its last token was a draft.
            if new[-1] not in ends:
                judged += min(len(new), seen - known)
                accepted += len(new) - 1
        return len(yielded), sum(map(len, yielded)), judged, accepted


@contextmanager
def _drafting(student: Any, drafted: int) -> Iterator[None]:
    """So many drafted tokens before each verification, however sure the student is of them."""
    config = student.generation_config
    wanted = {
        "num_assistant_tokens": drafted,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    own = {name: getattr(config, name) for name in wanted}
    try:
        config.update(**wanted)
        yield
    finally:
        config.update(**own)


def main() -> None:
    """Measure, and print one line per way of drafting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--drafted", type=int, default=5, help="tokens before each verification")
    names = ("student_model", "teacher_model", "data_path", "max_new_tokens", "device", "seed")
    add_settings(parser, *names)
    options = vars(parser.parse_args())
    n_prompts, drafted = options.pop("prompts"), options.pop("drafted")
    settings = LanguageSettings(**options)
    precision = precision_of(settings)
    teacher, student = (
        load_teacher(settings, name, precision)
        for name in (settings.teacher_model, settings.student_model)
    )
    tokenizer = teacher.tokenizer
    _, texts = texts_of(settings)
    prompts = [
        tokenizer(text).input_ids[:PROMPT_TOKENS]
        for example in texts.examples[:n_prompts]
        if (text := example.text or example.prompt)
    ]
    frozen, draft_model = (
        FrozenTeacher(lm.model, device=precision.device, dtype=precision.teacher)
        for lm in (teacher, student)
    )
    length = settings.max_new_tokens
    rows = own_text(frozen, tokenizer, prompts, max_new_tokens=length, seed=settings.seed)
    acceptance = judge_tokens(draft_model.model, rows, teacher=frozen).acceptance
    if acceptance is not None:
        print(f"expected: acceptance {acceptance:.3f}, ", end="")
        print(f"{expected_tokens(acceptance, drafted):.2f} tokens a verification")
    for name, sample in (("sampled", True), ("greedy", False)):
        measured = draft(
            frozen,
            draft_model.model,
            tokenizer,
            prompts,
            max_new_tokens=length,
            drafted=drafted,
            sample=sample,
            seed=settings.seed,
        )
        print(f"{name}: {measured.facts(drafted)}")


if __name__ == "__main__":
    main()
