"""Parse the `prompt_logprobs` of a valid response, in a tenth of the time of the json module."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import Meta

_TokenID = Annotated[int, Meta(ge=0, lt=10**9)]


class _Candidate(msgspec.Struct):
    logprob: Annotated[float, Meta(ge=-(2**53))]
    rank: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[_TokenID, _Candidate] | None]


class _Completion(msgspec.Struct):
    model: str
    choices: Annotated[list[_Choice], Meta(min_length=1, max_length=1)]


_DECODER = msgspec.json.Decoder(_Completion)


def parse(
    content: bytes, model: str, prompt: Sequence[int]
) -> tuple[list[int], list[float], list[int], list[int]] | None:
    """Return the candidates for each token of a prompt but the first, as a list per field.

    The fields are id, log-probability, rank (from 1; 0 if it is missing), and the count of
    candidates per token. None if the response is not valid.
    """
    try:
        answer = _DECODER.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return None
    _, *entries = answer.choices[0].prompt_logprobs or [None]
    if answer.model != model or len(entries) != len(prompt) - 1:
        return None
    filled = [entry for entry in entries if entry]
    if len(filled) < len(entries) or not all(map(dict.__contains__, filled, prompt[1:])):
        return None
    candidates = [*chain.from_iterable(entry.values() for entry in filled)]
    if content.count(b'"logprob"') != len(candidates):  # a key occurs twice in an object
        return None
    return (
        [*chain.from_iterable(filled)],
        [candidate.logprob for candidate in candidates],
        [candidate.rank or 0 for candidate in candidates],
        [*map(len, filled)],
    )
