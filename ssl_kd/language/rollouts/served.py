"""Let a vLLM server continue rows of text with the student's weights, which it gets before."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.language.models.causal import evaluating, without_adapters
from ssl_kd.language.models.student import save_for_server
from ssl_kd.language.teachers.server import (
    CompletionServer,
    InvalidResponse,
    choice_of,
    continuation_of,
)

TIMEOUT = 1800.0  # seconds for a continuation, including the wait for others
CONCURRENT_PROMPTS = 64  # which the server batches
# Most nats per token by which rounding moves a served model's log-probabilities.
MISMATCH = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}
# The served model's own sampling settings and penalties must not apply.
PLAIN = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0}
PLAIN |= {"frequency_penalty": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}


class ServedSampler(CompletionServer):
    """Sample on the server at ROLLOUT_URL, with the interface and options of a `Sampler`.

    All ranks call it once a step, for their own rows; rank 0 first sends the weights through files
    in `folder`. A server may ignore them without an error, so one continuation is compared: `sums`
    are the absolute differences of its log-probabilities, and their number.
    """

    role, who = "ROLLOUT", "the rollout server"

    def __init__(self, url: str, local: Any, dtype: Any, folder: Path, ranks: Ranks) -> None:
        super().__init__(f"{url.rstrip('/').removesuffix('/v1')}/v1", "", timeout=TIMEOUT)
        self.ends = local.ends
        self.sick = 0
        self._local = local
        self._dtype = dtype
        self._folder, self._ranks = folder.absolute(), ranks
        self._pool = ThreadPoolExecutor(CONCURRENT_PROMPTS, "rollouts")
        rows = len(without_adapters(local.model).get_output_embeddings().weight)
        padding = {str(token): -100 for token in range(local.vocabulary, rows)}
        self._options: dict[str, Any] = {**PLAIN, "logit_bias": padding}
        self._options |= {"temperature": local.temperature, "stop_token_ids": local.ends}

    def __call__(
        self, prompts: Sequence[Sequence[int]], rooms: Sequence[int], seeds: Sequence[int]
    ) -> list[list[int]]:
        """Continue each prompt; raise ServerFailed if the server has other weights."""
        self._options |= self._ranks.from_first(self._send)
        samples = list(self._pool.map(self._continue, prompts, rooms, seeds))
        sick = [i for i, (_, values) in enumerate(samples) if not math.isfinite(sum(values))]
        self.sick, self.sums = self.sick + len(sick), {"difference": 0.0, "compared": 0.0}
        for i in [*sick, *range(len(samples))][:1]:
            self._compare(prompts[i], *samples[i])
        return [tokens for tokens, _ in samples]

    def _send(self) -> dict[str, Any]:
        folder = self._folder / f"student-{secrets.token_hex(8)}"
        try:
            if adapters := save_for_server(self._local.model, folder, self._dtype):
                body = {"lora_name": folder.name, "lora_path": str(folder)}
                self._request("load_lora_adapter", body)
            else:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._request("../collective_rpc", body)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        # The salt keeps the server from using its cache of prompts with old weights.
        return {"model": folder.name if adapters else None, "cache_salt": folder.name}

    def _continue(self, ids: Sequence[int], room: int, seed: int) -> tuple[list[int], list[float]]:
        """Return a continuation with log-probabilities; an end and NaN if they are not finite."""
        request = {**self._options, "prompt": list(ids), "max_tokens": room, "seed": seed}
        try:
            answer = self._parse(self._request("completions", request))
            return continuation_of(choice_of(answer, request["model"]), room, self.ends)
        except InvalidResponse as fault:
            if fault.is_nan:
                return self.ends[:1], [math.nan]
            raise self._failure(fault.message) from None

    def _compare(self, prompt: Sequence[int], tokens: list[int], values: list[float]) -> None:
        """Compare a continuation's log-probabilities with the student's; refuse other weights."""
        n, model = len(tokens), self._local.model
        ids = torch.tensor([[*prompt, *tokens]], device=next(model.parameters()).device)
        with evaluating(model), self._local.autocast():
            logits = model(input_ids=ids, use_cache=False).logits[0, -n - 1 : -1]
        ours = logits.double().log_softmax(-1).gather(-1, ids[0, -n:, None])[:, 0].cpu()
        theirs = torch.tensor(values, dtype=torch.float64)
        gap, most = (ours - theirs).abs(), MISMATCH[self._dtype]
        self.sums = {"difference": float(gap.sum()), "compared": float(n)}
        if ours.isfinite().all() and not gap.mean() <= most:  # else the guard finds it in the loss
            raise self._failure(
                f"does not have the student's weights: the mean log-probability of {n} tokens that"
                f" it sampled is {float(theirs.mean()):.4f} there and {float(ours.mean()):.4f} in"
                f" the student ({float(gap.mean()):.2g} nats apart per token, expected at most"
                f" {most:g}). Serve STUDENT_MODEL in the dtype of MODEL_DTYPE, with raw_logprobs"
            )
