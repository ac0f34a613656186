"""Get a model's log-probabilities from an HTTP server, and check them."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssl_kd.core.errors import UserError, printable
from ssl_kd.core.files import strict_json
from ssl_kd.core.settings.import_paths import check_installed
from ssl_kd.language.teachers.http_client import (
    Answer,
    NoAnswer,
    api_key,
    check_url,
    exchange,
    hide_key,
    short,
)

if TYPE_CHECKING:
    from ssl_kd.language.teachers.prompt_logprobs import Columns

logger = logging.getLogger(__name__)

TIMEOUT, PATIENCE = 120.0, 300.0  # seconds, see `CompletionServer`
UNCONNECTED_PATIENCE = 5.0  # seconds, of a server that has never responded
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds between two attempts
RETRIED = (408, 409, 425, 429)  # HTTP statuses that are retried, besides all from 500 on
# A parsed response takes many times the memory of its numbers, so one is parsed at a time.
_PARSING = threading.Lock()
_ID = re.compile("0|[1-9][0-9]{0,8}")  # one spelling for each token
TOLERANCE = 1e-3  # of a probability, for the server's rounding
# Largest size of a response: vLLM writes about 90 bytes for a token.
BYTES_PER_TOKEN = 512
OVERHEAD = 2**24
LARGEST = 2**30


class ServerFailed(UserError, RuntimeError):
    """Raised if a server cannot be reached, refuses a request, or sends an invalid response."""


class PromptTopK(NamedTuple):
    """The most likely next tokens at the first n - 1 positions of a prompt of n tokens."""

    tokens: Tensor  # the most likely first, int64 [n - 1, k]
    log_probs: Tensor  # natural, at temperature 1, float64 [n - 1, k]
    own: Tensor  # log-probabilities of the prompt's own next tokens, float64 [n - 1]


@dataclass
class _Retry(Exception):
    """Raised after a failed attempt if another may succeed after `after` seconds."""

    message: str
    after: float = 0.0
    connected: bool = True


@dataclass
class InvalidResponse(UserError):
    """Raised for a response that is invalid at one `token` of the prompt, or as a whole."""

    message: str
    token: int | None = None
    is_nan: bool = False


class CompletionServer:
    """Client of a server with OpenAI's completions API and `prompt_logprobs`, such as vLLM.

    Prompts are sent as token IDs, so the server does not tokenize. vLLM returns log-probabilities
    at temperature 1, before any sampling settings apply. The key in the environment variable
    TEACHER_API_KEY, if set, is sent to the server as a bearer token.

    An attempt fails after `timeout` seconds; failed attempts are repeated for `patience` seconds,
    at growing intervals or as requested by the server's Retry-After header. A server to which no
    connection was ever possible is given up after 5 seconds: its address may be wrong.
    """

    role, who = "TEACHER", "the teacher's server"

    def __init__(
        self, url: str, model: str, *, timeout: float = TIMEOUT, patience: float = PATIENCE
    ) -> None:
        check_url(url, self.role)
        api_key(f"{self.role}_API_KEY")
        check_installed(["aiohttp", "msgspec"], "llm")
        self.url, self.model = url.rstrip("/"), model
        self._timeout, self._patience = timeout, patience
        self._warned = False  # since the last complete answer
        self._has_responded = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, {self.model!r})"

    def check(self, tokens: int) -> None:
        """Raise ServerFailed unless the server has the model and accepts prompts of this length."""
        answer = self._parse(self._request("models"))
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list) or not all(isinstance(m, dict) for m in models):
            raise self._failure(f"lists no models, but {short(answer)}: check TEACHER_URL")
        offered = {str(model.get("id")): model for model in models}
        if self.model not in offered:
            raise self._failure(
                f"does not have the model {self.model!r}; it has {short(list(offered)[:5])}: set "
                "TEACHER_SERVED_AS to one of these names"
            )
        room = offered[self.model].get("max_model_len")
        if type(room) is int and tokens + 1 > room:  # at least one token is generated
            raise self._failure(
                f"accepts prompts of at most {room - 1} tokens, but rows have {tokens}: set "
                f"BLOCK_SIZE to {room - 1} or less, or start the server with a larger "
                "--max-model-len"
            )

    def top_k(
        self, prompt: Sequence[int], k: int, vocabulary: int, where: str = "prompt", first: int = 0
    ) -> PromptTopK:
        """Return the k most likely tokens after each token of a prompt of at least two tokens.

        Raises ServerFailed also for an invalid response: from another model, misaligned, with too
        few tokens or unknown IDs, with log-probabilities that are NaN, above 0 or out of order, or
        with probabilities that cannot sum to 1. The message names the token from the text `where`,
        in which the prompt begins at the token `first`.
        """
        from ssl_kd.language.teachers.prompt_logprobs import parse  # needs msgspec

        options = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
        request = {"model": self.model, "prompt": list(prompt), **options}
        try:
            content = self._request("completions", request)
            with _PARSING:
                columns = parse(content, self.model, prompt)
                if columns is None:  # name what is wrong
                    columns = _checked_columns(self._parse(content), self.model, prompt)
                return _read(columns, prompt, k, vocabulary)
        except InvalidResponse as fault:
            token = "" if fault.token is None else f", token {first + fault.token}"
            raise self._failure(f"{fault.message} ({where}{token})") from None

    def _failure(self, message: str) -> ServerFailed:
        return ServerFailed(printable(hide_key(f"{self.who} {self.url} {message}")))

    def _parse(self, content: bytes) -> Any:
        try:
            return strict_json(content, nan=True)
        except ValueError as error:
            start = short(content[:4096].decode(errors="replace"))
            reason = short(str(error), 60)
            raise self._failure(f"sends a response that is not JSON ({reason}): {start}") from None

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the content of the response, with repeated attempts for `patience` seconds."""
        start, pause = time.monotonic(), FIRST_PAUSE
        while True:
            try:
                content = self._attempt(path, body)
            except _Retry as fault:
                patience, way = self._patience, "Start again when the server is back"
                if not fault.connected and not self._has_responded:
                    patience = min(patience, UNCONNECTED_PATIENCE)
                    way = f"Start the server, or correct {self.role}_URL"
                left = start + patience - time.monotonic()
                if left <= 0 or fault.after > left:
                    raise self._failure(
                        f"{fault.message}; retried for {patience:g} s. {way}; to continue a run,"
                        " add --resume"
                    ) from None
                if not self._warned:
                    self._warned = True
                    message = printable(hide_key(f"{fault.message}; retrying for {left:.0f} s"))
                    logger.warning("%s %s %s", self.who, self.url, message)
                time.sleep(max(fault.after, min(pause, left)))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self._warned = False
                return content

    def _attempt(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        largest = OVERHEAD
        data = None
        prompt = ""
        if body is not None:
            data, n = json.dumps(body).encode(), len(body.get("prompt", ()))
            k = body.get("prompt_logprobs")
            values = body.get("max_tokens", 0) if k is None else n * (k + 1)
            largest += values * BYTES_PER_TOKEN
            prompt = f" to a prompt of {n:,} tokens"
        limits = {"timeout": self._timeout, "largest": min(largest, LARGEST)}
        try:
            url = f"{self.url}/{path}"
            answer = exchange(url, data, **limits, key=f"{self.role}_API_KEY")
        except NoAnswer as error:
            if error.again:
                message = f"does not respond ({error})"
                raise _Retry(message, connected=error.connected) from None
            raise self._failure(f"{error}{prompt}: is {self.role}_URL the right server?") from None
        self._has_responded = True
        if 200 <= answer.status < 300:
            return answer.content
        raise self._refusal(answer, path, body)

    def _refusal(self, answer: Answer, path: str, body: Mapping[str, Any] | None) -> Exception:
        """Return the exception that an HTTP status other than 2xx means."""
        message = f"responds with {answer.status} {short(answer.reason)}{_message(answer.content)}"
        is_load = body is not None and "prompt" not in body  # of weights, refused by a 500
        if answer.status in RETRIED or answer.status >= 500 + is_load:
            after = answer.headers.get("Retry-After", "")  # seconds; a date is ignored
            return _Retry(message, float(after) if re.fullmatch("[0-9]+", after) else 0.0)
        if 300 <= answer.status < 400:
            message += (
                "; redirects are not followed, because the key would be sent to another host: set "
                f"{self.role}_URL to the final address, which curl -i {self.url}/{path} shows"
            )
        elif answer.status in (401, 403):
            message += f"; put the server's key into the environment variable {self.role}_API_KEY"
        elif answer.status == 404 and path == "models":
            message += "; expected an OpenAI-style API, such as http://host:8000/v1"
        elif is_load:
            message += (
                "; to load weights, start vllm serve with VLLM_SERVER_DEV_MODE=1, or for LORA_RANK "
                "with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 --enable-lora --max-lora-rank, and set "
                "RUNS_DIR to a folder that it reads under the same path"
            )
        elif "not JSON compliant" in message:  # vLLM's response if a value is NaN
            reason = (
                "has log-probabilities that are not finite, because the served weights hold a NaN "
                "or overflow: check the weights, or serve them in another --dtype"
            )
            return InvalidResponse(reason, is_nan=True)
        elif body is not None and "prompt_logprobs" in body:
            message += f" (CACHE_METHOD is topk:{body['prompt_logprobs']}, model {self.model!r})"
        return self._failure(message)


def continuation_of(choice: Mapping[str, Any], room: int, ends: Sequence[int]) -> Any:
    """Return the tokens of a completion, up to `room` or an end, and their log-probabilities."""
    try:
        tokens, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        is_valid = {*map(type, tokens)} == {int} and {*map(type, values)} <= {int, float}
        is_valid = is_valid and len(tokens) == len(values) <= room and max(values) <= TOLERANCE
        is_valid = is_valid and (len(tokens) == room or tokens[-1] in ends)
    except (TypeError, KeyError):
        is_valid = False
    if not is_valid:
        raise InvalidResponse(
            f"returns {short(choice)}; expected token_ids and logprobs of {room} tokens, or up to "
            "an end token: use vLLM 0.10.2 or later with --generation-config vllm"
        )
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def _message(content: bytes) -> str:
    """Return a colon and the message of an error response; empty if there is no message."""
    text: Any = content.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):  # not in OpenAI's form
        text = json.loads(content)["error"]
        text = text["message"]
    return f": {text}" if (text := short(text, 240).strip()) else ""


def choice_of(answer: Any, model: str | None) -> dict[str, Any]:
    """Return the only completion of a response by a model; None: by the base model."""
    try:
        name, (choice,) = answer["model"], answer["choices"]
        choice.get("prompt_logprobs")
    except (TypeError, KeyError, ValueError, AttributeError):
        raise InvalidResponse(f"sends something other than a completion: {short(answer)}") from None
    if model is not None and name != model:
        raise InvalidResponse(f"responds as the model {short([name])[1:-1]}; expected {model!r}")
    return choice


def _checked_columns(answer: Any, model: str, prompt: Sequence[int]) -> Columns:
    """Convert vLLM's list `[null, {id: {"logprob", "rank"}, ...}, ...]` as `parse` does."""
    from ssl_kd.language.teachers.prompt_logprobs import converted, in_columns

    entries = choice_of(answer, model).get("prompt_logprobs")
    if entries is None:
        raise InvalidResponse(
            "returns no prompt_logprobs: use vLLM or another server that returns them"
        )
    if not isinstance(entries, list) or len(entries) != len(prompt):
        n = len(entries) if isinstance(entries, list) else short(entries)
        raise InvalidResponse(f"returns prompt_logprobs of {n} tokens; expected {len(prompt)}")
    filled = []
    for token, entry in enumerate(entries[1:], 1):
        if not isinstance(entry, dict) or not entry:
            message = f"returns no log-probabilities: {short(entry)}; expected {{id: {{...}}}}"
        elif str(prompt[token]) not in entry:
            message = (
                "does not return the log-probability of the prompt's own token "
                f"{prompt[token]}, so its prompt_logprobs may be off by one position"
            )
        elif odd := [name for name in entry if not _ID.fullmatch(name)]:
            message = f"returns the id {short(odd[:1])[1:-1]}; expected one such as '10'"
        elif (valid := converted(entry)) is None:
            message = f"returns {short(entry)}; expected {{id: {{'logprob': ..., 'rank': ...}}}}"
        else:
            filled.append(valid)
            continue
        raise InvalidResponse(message, token)
    return in_columns(filled)


def _read(columns: Columns, prompt: Sequence[int], k: int, vocabulary: int) -> PromptTopK:
    # NumPy converts a list five times as fast as torch.
    kinds = ("i8", "f8", "i8", "i8", "i8")
    arrays = map(np.array, (*columns, prompt[1:]), kinds)
    top_k = _most_likely(*map(torch.from_numpy, arrays), k=min(k, vocabulary))
    _check_distribution(top_k, vocabulary)
    return top_k


def _most_likely(
    ids: Tensor, values: Tensor, ranks: Tensor, sizes: Tensor, own: Tensor, k: int
) -> PromptTopK:
    """Return the k most likely of `sizes` candidates of each token, which are concatenated."""
    token = torch.arange(len(sizes)).repeat_interleave(sizes)
    message = "returns the log-probability {:g} of the token {}; expected 0 or less"
    _refuse(~(values <= TOLERANCE), token, message, values, ids)
    is_ranked = ranks > 0
    by_rank = (token * 2**31 + ranks)[is_ranked].argsort()
    ranked, of = values[is_ranked][by_rank], token[is_ranked]
    wrong = torch.zeros_like(is_ranked)
    wrong[is_ranked.nonzero()[1:, 0]] = (ranked.diff() > TOLERANCE) & (of[1:] == of[:-1])
    _refuse(wrong, token, "returns log-probabilities that contradict their ranks")
    # The prompt's own token may come in addition to the most likely ones.
    counts = torch.bincount(token[ranks <= k], minlength=len(sizes))
    message = (
        f"returns the {{}} most likely tokens; expected at least {k}: lower CACHE_METHOD topk:K, "
        "or raise --max-logprobs"
    )
    _refuse((counts < k)[token], token, message, counts[token])
    by_value = values.argsort(stable=True, descending=True)
    by_value = by_value[token[by_value].argsort(stable=True)]
    first = by_value[(sizes.cumsum(0) - sizes)[:, None] + torch.arange(k)]
    return PromptTopK(ids[first], values[first], values[ids == own[token]])


def _check_distribution(top_k: PromptTopK, vocabulary: int) -> None:
    """Raise InvalidResponse if an id exceeds the vocabulary, or probabilities cannot sum to 1."""
    token, largest = torch.arange(len(top_k.tokens)), top_k.tokens.amax(-1)
    message = (
        f"returns the token {{}}, but the tokenizer has {vocabulary} tokens: the server uses "
        "another tokenizer, or the padding of its vocabulary is untrained"
    )
    _refuse(largest >= vocabulary, token, message, largest)
    masses = top_k.log_probs.exp()
    total, least = masses.sum(-1), masses[:, -1]
    # No other token is more likely than the last. Twice, since the vocabulary may be padded.
    most = total + 2 * vocabulary * least
    message = (
        "returns probabilities that sum to {:.4g}, the smallest being {:.2g}: with all other "
        "tokens they cannot sum to 1"
    )
    _refuse((total > 1 + TOLERANCE) | (most < 1 - TOLERANCE), token, message, total, least)


def _refuse(wrong: Tensor, token: Tensor, message: str, *shown: Tensor) -> None:
    """Raise InvalidResponse for the first entry that is wrong, with its values in the message."""
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise InvalidResponse(message.format(*(x[at] for x in shown)), int(token[at]) + 1)
