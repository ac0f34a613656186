"""A teacher behind an HTTP server: its log-probabilities, each number checked."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssl_kd.errors import UserError, printable
from ssl_kd.files import strict_json
from ssl_kd.settings.import_paths import check_installed
from ssl_kd.teachers.http_client import (
    KEY,
    Answer,
    NoAnswer,
    api_key,
    check_url,
    exchange,
    hide_key,
    short,
)

logger = logging.getLogger(__name__)

TIMEOUT, PATIENCE = 120.0, 300.0  # seconds, see `CompletionServer`
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds between two attempts
RETRIED = (408, 409, 425, 429)  # HTTP statuses; all from 500 on are retried, too
# Parsed answers take many times the memory of their numbers, so one is parsed at a time.
_PARSING = threading.Lock()
TOLERANCE = 1e-3  # of a probability, for the server's rounding
# Bytes read of an answer: vLLM writes about 90 for a token; never more than LARGEST.
BYTES_PER_TOKEN, OVERHEAD, LARGEST = 512, 2**24, 2**30


class ServerFailed(UserError, RuntimeError):
    """A server cannot be reached, refuses, or gives an invalid answer; the message names it."""


class PromptTopK(NamedTuple):
    """The most likely tokens after each token of a prompt except the last.

    Attributes:
        tokens: int64 `[n - 1, k]`, the most likely first.
        log_probs: float64 `[n - 1, k]`, natural logarithms at temperature 1.
        own: float64 `[n - 1]`, log-probability of the token that follows in the prompt.
    """

    tokens: Tensor
    log_probs: Tensor
    own: Tensor


@dataclass
class _Retry(Exception):
    """An attempt failed, but another may succeed after this many seconds."""

    message: str
    after: float = 0.0


@dataclass
class _Invalid(Exception):
    """An invalid answer at one token of the prompt; None: as a whole."""

    message: str
    token: int | None = None


class CompletionServer:
    """A server with OpenAI's completions API that returns `prompt_logprobs`, such as vLLM.

    Prompts are sent as token ids, so the server tokenizes nothing. vLLM's log-probabilities are
    those before sampling, at temperature 1.

    Args:
        url: of the API, such as `http://host:8000/v1`. If TEACHER_API_KEY is set in the
            environment, it is sent to this host as a bearer token.
        model: the name under which the server offers the teacher.
        timeout: seconds after which an attempt without a complete answer has failed.
        patience: seconds during which failed attempts are repeated, at growing intervals or as the
            server's Retry-After says.

    Raises:
        InputError: the address, or the key in the environment, is invalid.
        MissingPackage: aiohttp is not installed.
    """

    def __init__(
        self, url: str, model: str, *, timeout: float = TIMEOUT, patience: float = PATIENCE
    ) -> None:
        check_url(url)
        api_key()
        check_installed(["aiohttp"], "llm")
        self.url, self.model = url.rstrip("/"), model
        self._timeout, self._patience = timeout, patience
        self._warned = False  # since the last complete answer

    def __repr__(self) -> str:
        return f"CompletionServer({self.url!r}, {self.model!r})"

    def check(self, tokens: int) -> None:
        """Check that the server has the model and takes prompts of this many tokens.

        Raises:
            ServerFailed: it does not; or as `top_k`.
        """
        answer = self._parse(self._request("models"))
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list) or not all(isinstance(m, dict) for m in models):
            raise self._failure(f"lists no models: {short(answer)}")
        offered = {str(model.get("id")): model for model in models}
        if self.model not in offered:
            raise self._failure(
                f"does not have the model {self.model!r}, only {short([*offered][:5])}: set "
                "TEACHER_SERVED_AS to one of them"
            )
        room = offered[self.model].get("max_model_len")
        if type(room) is int and tokens + 1 > room:  # at least one token is generated
            raise self._failure(
                f"takes prompts of {room - 1} tokens, and rows have {tokens}: set BLOCK_SIZE to "
                f"{room - 1} or less, or start the server with a larger --max-model-len"
            )

    def top_k(
        self, prompt: Sequence[int], k: int, vocabulary: int, where: str = "prompt", first: int = 0
    ) -> PromptTopK:
        """Return the k most likely tokens after each token of a prompt.

        Args:
            prompt: ids of at least two tokens.
            k: how many; vLLM allows as many as its `--max-logprobs`, by default 20.
            vocabulary: number of ids of the teacher's tokenizer; larger ids are refused.
            where: name of the prompt in error messages.
            first: position of the prompt's first token within `where`, for messages.

        Raises:
            ServerFailed: the server did not answer within the patience, refused, or gave an
                invalid answer: of another model, misaligned, too few tokens, log-probabilities
                that are NaN, above 0 or out of order, ids beyond the vocabulary, or probabilities
                that cannot sum to 1. The message names server, prompt and token.
        """
        request = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": k,
        }
        try:
            content = self._request("completions", request)
            with _PARSING:
                entries = _entries(self._parse(content), self.model)
                return _read(entries, prompt, k, vocabulary)
        except _Invalid as fault:
            token = "" if fault.token is None else f", token {first + fault.token}"
            raise self._failure(f"{fault.message} ({where}{token})") from None

    def _failure(self, message: str) -> ServerFailed:
        return ServerFailed(printable(hide_key(f"the teacher's server {self.url} {message}")))

    def _parse(self, content: bytes) -> Any:
        try:
            return strict_json(content, nan=True)
        except ValueError as error:
            start = short(content[:4096].decode(errors="replace"))
            reason = short(str(error), 60)
            raise self._failure(f"answers with what is not JSON ({reason}): {start}") from None

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the content of the answer, after as many attempts as the patience allows."""
        deadline, pause = time.monotonic() + self._patience, FIRST_PAUSE
        while True:
            try:
                content = self._attempt(path, body)
            except _Retry as fault:
                left = deadline - time.monotonic()
                if left <= 0 or fault.after > left:
                    raise self._failure(
                        f"{fault.message}; retried for {self._patience:g} s. Start again once it "
                        "is back (a run with --resume)"
                    ) from None
                if not self._warned:
                    self._warned = True
                    message = printable(hide_key(f"{fault.message}; retrying for {left:.0f} s"))
                    logger.warning("the teacher's server %s %s", self.url, message)
                time.sleep(max(fault.after, min(pause, left)))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self._warned = False
                return content

    def _attempt(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        largest, data, prompt = OVERHEAD, None, ""
        if body is not None:
            data, n = json.dumps(body).encode(), len(body["prompt"])
            largest += n * (body["prompt_logprobs"] + 1) * BYTES_PER_TOKEN
            prompt = f" to a prompt of {n:,} tokens"
        largest = min(largest, LARGEST)
        try:
            url = f"{self.url}/{path}"
            answer = exchange(url, data, timeout=self._timeout, largest=largest)
        except NoAnswer as error:
            if error.again:
                raise _Retry(f"does not answer ({error})") from None
            raise self._failure(f"{error}{prompt}: is TEACHER_URL the right server?") from None
        if 200 <= answer.status < 300:
            return answer.content
        raise self._refusal(answer, path, body)

    def _refusal(self, answer: Answer, path: str, body: Mapping[str, Any] | None) -> Exception:
        """Return the exception that an HTTP status other than 2xx means."""
        message = f"answers {answer.status} {short(answer.reason)}{_message(answer.content)}"
        if answer.status in RETRIED or answer.status >= 500:
            after = answer.headers.get("Retry-After", "")  # seconds; a date is ignored
            return _Retry(message, float(after) if re.fullmatch("[0-9]+", after) else 0.0)
        if 300 <= answer.status < 400:
            message += (
                "; redirects are not followed, because the key would go to another host: set "
                f"TEACHER_URL to the final address (curl -i {self.url}/{path} shows it)"
            )
        elif answer.status in (401, 403):
            message += f"; set its key in the environment variable {KEY}"
        elif answer.status == 404 and path == "models":
            message += "; expected an OpenAI-style API, such as http://host:8000/v1"
        elif "not JSON compliant" in message:  # how vLLM answers where a value is NaN
            return _Invalid(
                "cannot write log-probabilities that are not finite: the weights it serves hold a "
                "NaN, or overflow in its --dtype"
            )
        elif body is not None:
            message += f" (CACHE_METHOD is topk:{body['prompt_logprobs']}, model {self.model!r})"
        return self._failure(message)


def _message(content: bytes) -> str:
    """Return the message of an error response, after a colon; empty if there is none."""
    text: Any = content.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):  # not in OpenAI's form
        text = json.loads(content)["error"]
        text = text["message"]
    return f": {text}" if (text := short(text, 240).strip()) else ""


def _entries(answer: Any, model: str) -> Any:
    """Return the `prompt_logprobs` of an answer."""
    try:
        name, (choice,) = answer["model"], answer["choices"]
        entries = choice.get("prompt_logprobs")
    except (TypeError, KeyError, ValueError, AttributeError):
        raise _Invalid(f"answers with something other than a completion: {short(answer)}") from None
    if name != model:
        raise _Invalid(f"answers as the model {short([name])[1:-1]}, requested was {model!r}")
    if entries is None:
        raise _Invalid("returns no prompt_logprobs: expected vLLM, or a server that returns them")
    return entries


def _read(entries: Any, prompt: Sequence[int], k: int, vocabulary: int) -> PromptTopK:
    """Convert vLLM's `[null, {id: {"logprob", "rank"}, ...}, ...]`, one entry a token."""
    if not isinstance(entries, list) or len(entries) != len(prompt):
        n = len(entries) if isinstance(entries, list) else short(entries)
        raise _Invalid(f"returns prompt_logprobs of {n} tokens for a prompt of {len(prompt)}")
    for token, entry in enumerate(entries[1:], 1):
        if not isinstance(entry, dict) or not entry:
            raise _Invalid(f"returns no log-probabilities: {short(entry)}", token)
    _check_alignment(entries, prompt)
    k, rows, own = min(k, vocabulary), [], []
    for token, entry in enumerate(entries[1:], 1):
        ids, values = _sorted(entry, token, k)
        own.append(values[ids.index(prompt[token])])
        rows.append((ids[:k], values[:k]))
    top_k = PromptTopK(
        torch.tensor([ids for ids, _ in rows]),
        torch.tensor([values for _, values in rows], dtype=torch.float64),
        torch.tensor(own, dtype=torch.float64),
    )
    _check_distribution(top_k, vocabulary)
    return top_k


def _check_alignment(entries: list[Any], prompt: Sequence[int]) -> None:
    """Check that each entry holds the prompt's own token, and name a shift by one position."""

    def fits(shift: int) -> bool:
        positions = range(max(1, 1 - shift), len(prompt) - max(shift, 0))
        return all(str(prompt[t + shift]) in entries[t] for t in positions)

    if fits(0):
        return
    token = next(t for t in range(1, len(prompt)) if str(prompt[t]) not in entries[t])
    message = f"does not return the log-probability of the prompt's own token {prompt[token]}"
    for shift, neighbor in ((1, "next"), (-1, "previous")):
        if len(prompt) > 3 and fits(shift):
            message += f", only that of the {neighbor} one: prompt_logprobs are off by one position"
    raise _Invalid(message, token)


def _sorted(entry: Mapping[str, Any], token: int, k: int) -> tuple[list[int], list[float]]:
    """Return ids and log-probabilities, the most likely first, at least k of them."""
    candidates = []
    for name, fields in entry.items():
        if re.fullmatch("0|[1-9][0-9]{0,8}", name) is None:  # one spelling for each id
            raise _Invalid(f"returns the id {short([name])[1:-1]}, expected one as '10'", token)
        fields = fields if isinstance(fields, dict) else {}
        value, rank = fields.get("logprob", ""), fields.get("rank")
        number = isinstance(value, float) or (type(value) is int and abs(value) < 2**53)
        if not number or not (rank is None or (type(rank) is int and 0 < rank < 2**31)):
            message = f"returns {short(entry)}, expected {{id: {{'logprob': ..., 'rank': ...}}}}"
            raise _Invalid(message, token)
        if math.isnan(value) or value > TOLERANCE:
            raise _Invalid(f"returns the log-probability {value:g} of the token {name}", token)
        candidates.append((int(name), float(value), rank))
    candidates.sort(key=lambda candidate: -candidate[1])
    ranked = [candidate for candidate in candidates if candidate[2] is not None]
    values = [value for _, value, _ in sorted(ranked, key=lambda candidate: candidate[2])]
    if any(b > a + TOLERANCE for a, b in zip(values, values[1:], strict=False)):
        raise _Invalid("returns log-probabilities that are not in the order of their ranks", token)
    n = sum(rank is None or rank <= k for *_, rank in candidates)
    if n < k:  # the prompt's own token may come in addition to the most likely ones
        message = f"returns the {n} most likely tokens, expected at least {k}"
        raise _Invalid(f"{message}: lower CACHE_METHOD topk:K, or raise --max-logprobs", token)
    return [i for i, *_ in candidates], [value for _, value, _ in candidates]


def _check_distribution(top_k: PromptTopK, vocabulary: int) -> None:
    """Check that ids are in the vocabulary, and that the probabilities can sum to 1."""
    if len(rows := (top_k.tokens >= vocabulary).nonzero()):
        row, column = rows[0].tolist()
        raise _Invalid(
            f"returns the token {int(top_k.tokens[row, column])}, and the tokenizer has "
            f"{vocabulary}: it uses another tokenizer, or a padded vocabulary whose padding was "
            "never trained away",
            row + 1,
        )
    masses = top_k.log_probs.exp()
    total = masses.sum(-1)
    # No other token is more likely than the last; twice, since the vocabulary may be padded.
    most = total + 2 * vocabulary * masses[:, -1]
    for wrong in (total > 1 + TOLERANCE, most < 1 - TOLERANCE):
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise _Invalid(
                f"returns probabilities that sum to {float(total[row]):.4g}, the smallest "
                f"{float(masses[row, -1]):.2g}: with all other tokens they cannot sum to 1",
                row + 1,
            )
