"""Parse the `prompt_logprobs` of a valid response, in a tenth of the time of the json module."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import Meta

_TokenID = Annotated[int, Meta(ge=0, lt=10**9)]


class _Candidate(msgspec.Struct):
    logprob: Annotated[int, Meta(ge=-(2**53), lt=2**53)] | float
    rank: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


_Entry = dict[_TokenID, _Candidate]
Columns = tuple[list[int], list[float], list[int], list[int]]


class _Choice(msgspec.Struct):
    prompt_logprobs: list[_Entry | None]


class _Completion(msgspec.Struct):
    model: str
    choices: Annotated[list[_Choice], Meta(min_length=1, max_length=1)]


_DECODER = msgspec.json.Decoder(_Completion)


def parse(content: bytes, model: str, prompt: Sequence[int]) -> Columns | None:
    """Return the columns of the candidates for each token of a prompt but the first.

    None if the response is not valid, or holds a NaN or an infinity, which JSON does not have.
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
    if content.count(b'"logprob"') != sum(map(len, filled)):  # a key occurs twice in an object
        return None
    return in_columns(filled)


def converted(entry: object) -> _Entry | None:
    """Return an entry that the json module has read; None if its fields are not valid."""
    try:
        return msgspec.convert(entry, _Entry, str_keys=True)
    except msgspec.ValidationError:
        return None


def in_columns(entries: Sequence[_Entry]) -> Columns:
    """Return each candidate's id, log-probability and rank (0: none), and the entries' sizes."""
    candidates = list(chain.from_iterable(entry.values() for entry in entries))
    return (
        list(chain.from_iterable(entries)),
        [candidate.logprob for candidate in candidates],
        [candidate.rank or 0 for candidate in candidates],
        list(map(len, entries)),
    )
