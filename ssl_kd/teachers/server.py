"""A teacher behind an HTTP server: what it says of a prompt, asked for and checked."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import torch
from torch import Tensor

from ssl_kd.errors import UserError, printable
from ssl_kd.settings.import_paths import check_installed
from ssl_kd.teachers.http_client import (
    KEY,
    Answer,
    NoAnswer,
    api_key,
    check_url,
    exchange,
    hidden,
    short,
)

logger = logging.getLogger(__name__)

TIMEOUT, PATIENCE = 120.0, 300.0  # seconds, see `CompletionServer`
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds between two attempts
TRY_AGAIN = (408, 409, 425, 429)  # of HTTP; and all from 500
# One answer at a time is Python objects, many times its numbers: in a row they take no longer.
_READING = threading.Lock()
TOLERANCE = 1e-3  # of a probability: what a server's rounding may do
# Bytes that are read of an answer: vLLM writes about 90 for a token; never more than LARGEST.
PER_TOKEN, LISTED, LARGEST = 512, 2**24, 2**30


class ServerFailed(UserError, RuntimeError):
    """A server cannot be reached, refuses, or gives an invalid answer; names the server."""


class PromptTopK(NamedTuple):
    """The likeliest tokens after each token of a prompt but the last.

    Attributes:
        tokens: int64 `[n - 1, k]`, the likeliest first.
        log_probs: float64 `[n - 1, k]`, natural logarithms, at temperature 1.
        own: float64 `[n - 1]`, of the token that the prompt itself goes on with.
    """

    tokens: Tensor
    log_probs: Tensor
    own: Tensor


@dataclass
class _Again(Exception):
    """An attempt failed in a way that may pass; the seconds that the server asked for."""

    words: str
    after: float = 0.0


@dataclass
class _Wrong(Exception):
    """An invalid answer after a token of the prompt; None: the whole answer is invalid."""

    words: str
    token: int | None = None


class CompletionServer:
    """A server of OpenAI's completions that gives `prompt_logprobs`, as vLLM does.

    Prompts are token ids, so that nothing is tokenised on the other side. The log-probabilities
    that vLLM gives are those before its sampling: of temperature 1.

    Args:
        url: of the API, such as `http://host:8000/v1`. Where the environment has TEACHER_API_KEY,
            it is sent as a bearer token, to this host alone.
        model: the name that the server knows the teacher by.
        timeout: seconds after which an attempt without a whole answer counts as failed.
        patience: seconds for which an attempt that failed is made again, at growing intervals or
            as the server's Retry-After says.

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
        self._lock, self._in_trouble = threading.Lock(), False

    def __repr__(self) -> str:
        return f"CompletionServer({self.url!r}, {self.model!r})"

    def check(self, tokens: int) -> None:
        """See whether the server has the model, for prompts of so many tokens.

        Raises:
            ServerFailed: it has not; or as by `top_k`.
        """
        listed = self._parsed(self._ask("models"))
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not all(isinstance(m, dict) for m in models):
            raise self._failed(f"lists no models: {short(listed)}")
        known = {str(model.get("id")): model for model in models}
        if self.model not in known:
            names = ", ".join(_quoted(m) for m in [*known][:5])
            names += ", ..." if len(known) > 5 else ""
            raise self._failed(
                f"does not have the model {self.model!r}, but {names or 'none'}: set "
                "TEACHER_SERVED_AS to the one that is meant"
            )
        room = known[self.model].get("max_model_len")
        if type(room) is int and tokens + 1 > room:  # one token is generated, at least
            raise self._failed(
                f"takes prompts of {room - 1} tokens, and rows have {tokens}: set BLOCK_SIZE to "
                f"{room - 1} or less, or start the server with a larger --max-model-len"
            )

    def top_k(
        self, prompt: Sequence[int], k: int, vocabulary: int, where: str = "prompt", first: int = 0
    ) -> PromptTopK:
        """The k likeliest tokens after each token of a prompt.

        Args:
            prompt: ids of two tokens or more.
            k: how many; a server of vLLM gives as many as its `--max-logprobs`, 20 by
                default.
            vocabulary: ids that the teacher's tokenizer has; none beyond may be among them.
            where: what the prompt is called in an error.
            first: number of its first token there.

        Raises:
            ServerFailed: the server did not answer for as long as the patience; it refused; or its
                answer is invalid: of another model, misaligned, of fewer tokens, with
                log-probabilities that are NaN, above 0 or unsorted, with ids beyond the
                vocabulary, or with more than all of the mass. Names server, prompt and token.
        """
        try:
            entries = self._complete(prompt, k)
            with _READING:
                return _read(entries(), prompt, k, vocabulary)
        except _Wrong as fault:
            place = "" if fault.token is None else f", token {first + fault.token}"
            raise self._failed(f"{fault.words} ({where}{place})") from None

    def texts(self, prompt: Sequence[int], k: int) -> dict[int, str]:
        """What the server's own tokenizer writes for the k likeliest tokens of a prompt, by id.

        Empty where it does not say so.

        Raises:
            ServerFailed: as by `top_k`, of which `prompt` and `k` are.
        """
        try:
            entries = [entry for entry in self._complete(prompt, k)() if entry]
            pairs = [(i, one.get("decoded_token")) for entry in entries for i, one in entry.items()]
            return {_token_id(i, 0): text for i, text in pairs if isinstance(text, str)}
        except _Wrong as fault:
            raise self._failed(fault.words) from None
        except (TypeError, AttributeError) as fault:
            words = f"gives no log-probabilities: {short(str(fault))}"
            raise self._failed(words) from None

    def _complete(self, prompt: Sequence[int], k: int) -> Callable[[], Any]:
        """Ask; return what reads the `prompt_logprobs` of the answer, unchecked."""
        asked = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": k,
        }
        content = self._ask("completions", asked)
        return lambda: _entries(self._parsed(content), self.model)

    def _failed(self, words: str) -> ServerFailed:
        return ServerFailed(printable(hidden(f"the teacher's server {self.url} {words}")))

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """What the server answers, in as many attempts as the patience allows."""
        until, pause = time.monotonic() + self._patience, FIRST_PAUSE
        while True:
            try:
                answer = self._attempt(path, body)
            except _Again as fault:
                left = until - time.monotonic()
                if left <= 0 or fault.after > left:
                    raise self._failed(
                        f"{fault.words}; it was asked again for {self._patience:g} s. Once it is "
                        "back, start again (a run with --resume)"
                    ) from None
                self._say(f"{fault.words}: it is asked again for {left:.0f} s")
                time.sleep(max(fault.after, min(pause, left)))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                with self._lock:
                    self._in_trouble = False
                return answer

    def _say(self, words: str) -> None:
        """Warn, once until it answers again."""
        with self._lock:
            was_in_trouble, self._in_trouble = self._in_trouble, True
        if not was_in_trouble:
            logger.warning("the teacher's server %s %s", self.url, printable(hidden(words)))

    def _attempt(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        largest, data = LISTED, None
        if body is not None:
            data = json.dumps(body).encode()
            largest += len(body["prompt"]) * (body["prompt_logprobs"] + 1) * PER_TOKEN
        try:
            answer = exchange(
                f"{self.url}/{path}", data, timeout=self._timeout, largest=min(largest, LARGEST)
            )
        except NoAnswer as error:
            if error.again:
                raise _Again(f"does not answer ({error})") from None
            of = "" if body is None else f" to a prompt of {len(body['prompt']):,} tokens"
            raise self._failed(f"{error}{of}: see that it is the server that is meant") from None
        if 200 <= answer.status < 300:
            return answer.content
        raise self._refused(answer, path, body)

    def _parsed(self, content: bytes) -> Any:
        try:
            return read_json(content)
        except ValueError as error:
            raise self._failed(f"answers what is {error}") from None

    def _refused(self, answer: Answer, path: str, body: Mapping[str, Any] | None) -> Exception:
        """What an HTTP status other than 2xx means."""
        words = f"answers {answer.status} {short(answer.reason)}{_message(answer.content)}"
        if answer.status in TRY_AGAIN or answer.status >= 500:
            return _Again(words, _seconds(answer.headers.get("Retry-After")))
        if 300 <= answer.status < 400:
            words += (
                f" and sends on to {_target(f'{self.url}/{path}', answer.headers)}, which is not"
                " followed, as the key would go there: set TEACHER_URL to the address that is meant"
            )
        elif answer.status in (401, 403):
            words += f"; it takes the key in the environment variable {KEY}"
        elif answer.status == 404 and path == "models":
            words += "; expected the address of an OpenAI-style API, as in http://host:8000/v1"
        elif "not JSON compliant" in words:  # a 400 of vLLM
            return _Wrong(
                "cannot write log-probabilities that are not finite: the weights it serves hold a "
                "NaN or overflow in its --dtype"
            )
        elif body is not None:
            words += f" (CACHE_METHOD is topk:{body['prompt_logprobs']}, the model {self.model!r})"
        return self._failed(words)


def read_json(content: bytes) -> Any:
    """Parse JSON from elsewhere, in which no object may have a name twice.

    Raises:
        ValueError: it is no such thing; the message begins with "not JSON" and shows it.
    """
    try:
        return json.loads(content, object_pairs_hook=_without_repeats)
    except RecursionError:
        reason = " that can be read (its brackets are too deep)"
    except _Repeated as error:
        reason = f" with one meaning (it has the name {error} twice in an object)"
    except ValueError:
        reason = ""
    raise ValueError(f"not JSON{reason}: {short(content[:4096].decode(errors='replace'))}")


class _Repeated(ValueError):
    """A name that an object has twice."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(values := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(_quoted(next(name for name in names if names.count(name) > 1)))
    return values


def _quoted(name: Any) -> str:
    """Return what a message shows of a foreign name."""
    return short([name])[1:-1]


def _target(url: str, headers: Mapping[str, str]) -> str:
    """Return the address that a redirect names, without what may be secret in it."""
    try:
        parts = urlsplit(urljoin(url, headers["Location"]))
    except (KeyError, ValueError):
        return "no address"
    return short(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After in seconds; 0 for none, or for a date."""
    return float(retry_after) if retry_after and re.fullmatch("[0-9]+", retry_after) else 0.0


def _message(content: bytes) -> str:
    """What a server says of its refusal, with a colon before it."""
    text: Any = content.decode(errors="replace")
    try:
        text = read_json(content)
        text = text.get("error", text)
        text = text["message"] if isinstance(text, dict) else text
    except (ValueError, KeyError, AttributeError):
        pass  # not in OpenAI's form: as it came
    return f": {shown}" if (shown := short(text, 240).strip()) else ""


def _entries(answer: Any, model: str) -> Any:
    """The `prompt_logprobs` of an answer."""
    try:
        name, (choice,) = answer["model"], answer["choices"]
        entries = choice.get("prompt_logprobs")
    except (TypeError, KeyError, ValueError, AttributeError):
        raise _Wrong(f"answers what is no completion: {short(answer)}") from None
    if name != model:
        raise _Wrong(f"was asked for the model {model!r} and answers as {_quoted(name)}")
    if entries is None:
        raise _Wrong("gives no prompt_logprobs: expected vLLM, or a server that gives them as it")
    return entries


def _read(entries: Any, prompt: Sequence[int], k: int, vocabulary: int) -> PromptTopK:
    """Tensors of vLLM's `[null, {id: {"logprob", "rank"}, ...}, ...]`, an entry a token."""
    if not isinstance(entries, list) or len(entries) != len(prompt):
        n = len(entries) if isinstance(entries, list) else short(entries)
        raise _Wrong(f"gives prompt_logprobs of {n} tokens for a prompt of {len(prompt)}")
    for token, entry in enumerate(entries[1:], 1):
        if not isinstance(entry, dict) or not entry:
            raise _Wrong(f"gives no log-probabilities: {short(entry)}", token)
    _check_alignment(entries, prompt)
    k, rows, own = min(k, vocabulary), [], []
    for token, entry in enumerate(entries[1:], 1):
        ids, values = _sorted(entry, token, k)
        own.append(values[ids.index(prompt[token])])
        rows.append((ids[:k], values[:k]))
    found = PromptTopK(
        torch.tensor([ids for ids, _ in rows]),
        torch.tensor([values for _, values in rows], dtype=torch.float64),
        torch.tensor(own, dtype=torch.float64),
    )
    _check_mass(found, vocabulary)
    return found


def _check_alignment(entries: list[Any], prompt: Sequence[int]) -> None:
    """Each entry holds the prompt's own token: that of another place is at another place."""

    def fits(shift: int) -> bool:
        places = range(max(1, 1 - shift), len(prompt) - max(shift, 0))
        return all(str(prompt[t + shift]) in entries[t] for t in places)

    if fits(0):
        return
    token = next(t for t in range(1, len(prompt)) if str(prompt[t]) not in entries[t])
    words = f"does not give the log-probability of the prompt's own token {prompt[token]}"
    for shift, other in ((1, "next"), (-1, "previous")):
        if len(prompt) > 3 and fits(shift):
            words += f", but of the {other} one: its prompt_logprobs are misaligned by one position"
    raise _Wrong(words, token)


def _token_id(name: str, token: int) -> int:
    """Return the id that a name writes in its one form, so that no two names are the same id."""
    if re.fullmatch("0|[1-9][0-9]{0,8}", name) is None:
        raise _Wrong(f"gives the id {_quoted(name)}, expected a number as '10'", token)
    return int(name)


def _sorted(entry: Mapping[str, Any], token: int, k: int) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities, the likeliest first, and at least k of them."""
    found = []
    for name, given in entry.items():
        fields = given if isinstance(given, dict) else {}
        value, rank = fields.get("logprob", ""), fields.get("rank")
        number = isinstance(value, float) or (type(value) is int and abs(value) < 2**53)
        if not number or not (rank is None or (type(rank) is int and 0 < rank < 2**31)):
            words = f"gives {short(entry)}, expected {{id: {{'logprob': ..., 'rank': ...}}, ...}}"
            raise _Wrong(words, token)
        found.append((_token_id(name, token), float(value), rank))
    for i, value, _ in found:
        if math.isnan(value) or value > TOLERANCE:
            raise _Wrong(f"gives the token {i} the log-probability {value:g}", token)
    found.sort(key=lambda one: -one[1])
    ranked = [(rank, value) for _, value, rank in found if isinstance(rank, int)]
    by_rank = [value for _, value in sorted(ranked, key=lambda one: one[0])]
    if any(b > a + TOLERANCE for a, b in zip(by_rank, by_rank[1:], strict=False)):
        raise _Wrong("gives log-probabilities that are not in the order of their ranks", token)
    likeliest = sum(not isinstance(rank, int) or rank <= k for *_, rank in found)
    if likeliest < k:  # the prompt's own token may come in addition
        words = f"gives the {likeliest} likeliest tokens, expected {k} or more"
        raise _Wrong(f"{words}: lower CACHE_METHOD topk:K, or allow more prompt_logprobs", token)
    return [i for i, _, _ in found], [value for _, value, _ in found]


def _check_mass(found: PromptTopK, vocabulary: int) -> None:
    """Ids are tokens, and all probabilities together are 1."""
    beyond = (found.tokens < 0) | (found.tokens >= vocabulary)
    if beyond.any():
        row, column = beyond.nonzero()[0].tolist()
        raise _Wrong(
            f"gives the token {int(found.tokens[row, column])} among the likeliest, and the "
            f"tokenizer has {vocabulary}: another tokenizer, or a padded teacher whose padding "
            "was never trained away",
            row + 1,
        )
    masses = found.log_probs.exp()
    total = masses.sum(-1)
    if (high := total > 1 + TOLERANCE).any():
        row = int(high.nonzero()[0])
        raise _Wrong(f"gives probabilities that sum to {float(total[row]):.4g}", row + 1)
    # None of the others is likelier than the last; twice, as the vocabulary may be padded.
    most = 2 * vocabulary * masses[:, -1]
    if (low := total + most < 1 - TOLERANCE).any():
        row = int(low.nonzero()[0])
        raise _Wrong(
            f"gives probabilities that sum to {float(total[row]):.4g}, the last of them "
            f"{float(masses[row, -1]):.2g}: the rest cannot be in the other tokens, so this is no "
            "distribution over them",
            row + 1,
        )
