"""Does vLLM write what transformers writes, how soon, and by the weights of now? Needs vLLM.

    python -m benchmarks.rollouts --model FOLDER --data_path texts.jsonl

Rows go on from the first 16 tokens of held-out texts, all asked for at once, after a warm-up.
`equal` is the share of rows of likeliest tokens that are the same, token by token; `moved` is that
after the model's weights were changed. `again` is the share of drawn rows that are the same when
asked for twice with the same seeds, and `alone` when asked for one by one.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from ssl_kd.datasets.text import open_text
from ssl_kd.guard.precision import Precision
from ssl_kd.language.rollouts import sampler
from ssl_kd.language.rollouts_vllm import VllmRollouts
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.teachers.causal import load_causal_lm

PROMPT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data_path", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    precision = Precision.for_device(args.device)
    lm = load_causal_lm(args.model)
    model = lm.model.to(precision.device)
    texts = open_text(args.data_path, "test").examples[: args.rows]
    prompts = [lm.tokenizer(example.text)["input_ids"][:PROMPT] for example in texts]
    settings = LanguageSettings(
        on_policy=1.0, rollout_engine="vllm", rollout_temperature=0.0, batch_size=args.rows
    )
    ours = sampler(settings, model, lm.tokenizer)
    width = PROMPT + args.tokens
    began = time.perf_counter()
    theirs = VllmRollouts(model, ours.ends, lm.tokenizer, width, settings, precision)
    print(f"vLLM started in {time.perf_counter() - began:.1f} s")

    def ask(write: Any, some: slice = slice(None)) -> list[list[int]]:
        n = len(prompts[some])
        return write(prompts[some], [args.tokens] * n, range(len(prompts))[some])

    def timed(write: Any) -> tuple[list[list[int]], float]:
        ask(write)
        began = time.perf_counter()
        return ask(write), time.perf_counter() - began

    def share(a: list[list[int]], b: list[list[int]]) -> float:
        return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)

    (a, slow), (b, soon) = timed(ours), timed(theirs)
    print(f"{len(a)} rows, {sum(map(len, a))} tokens: transformers {slow:.2f} s, vLLM {soon:.2f} s")
    print(f"equal {share(a, b):.3f}")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * p.std() * torch.randn_like(p))
    moved = ask(theirs)
    print(f"moved {share(ask(ours), moved):.3f}, as before {share(b, moved):.3f}")
    settings = settings.replace(rollout_temperature=1.0)
    drawn = VllmRollouts(model, ours.ends, lm.tokenizer, width, settings, precision)
    c = ask(drawn)
    alone = [ask(drawn, slice(i, i + 1))[0] for i in range(len(prompts))]
    print(f"again {share(c, ask(drawn)):.3f}, alone {share(c, alone):.3f}")


if __name__ == "__main__":
    main()
