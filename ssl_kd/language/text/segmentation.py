"""Align two tokenizations of the same text.

Each token gets a number: the end of the smallest piece of text that contains the token and whose
boundaries no token crosses. The numbers that occur in both tokenizations are the boundaries of the
common segmentation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ssl_kd.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPACES = np.array([c for c in range(0x3001) if chr(c).isspace()])


def partition(text: str, offsets: np.ndarray) -> np.ndarray:
    """Split a text into the smallest pieces that no token crosses, given the token offsets.

    Overlapping tokens, such as the bytes of one character, are in the same piece. Characters
    without a token (skipped spaces, marks composed by normalization) belong to the token before
    them up to the first space, and from the space on to the token after them. Offsets `[token, 2]`
    are in code points; the result is the end of each token's piece, int64 `[token]`.

    >>> partition("a cat", np.array([[0, 1], [2, 4], [3, 5]]))  # no token contains the space
    array([1, 5, 5])
    """
    if not text or not len(offsets):
        return np.zeros(len(offsets), dtype=np.int64)
    begin, end = offsets.T
    reach = np.maximum.accumulate(end)[:-1]
    ahead = np.minimum.accumulate(begin[::-1])[::-1][1:]
    characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    spaces = np.append(np.flatnonzero(np.isin(characters, _SPACES)), len(text))
    cuts = np.minimum(spaces[np.searchsorted(spaces, reach)], ahead)
    clean = np.flatnonzero((reach <= ahead) & (cuts > 0) & (cuts < len(text)))
    # A token of width 0, such as a prefix of a word, belongs to the piece after it.
    cuts, first = np.unique(cuts[clean], return_index=True)
    stretch = np.searchsorted(clean[first], np.arange(len(offsets)))
    return np.append(cuts, len(text))[stretch]


def byte_positions(text: str) -> np.ndarray:
    """Return where each character of a text begins in its UTF-8 bytes, and where the text ends.

    The result is int64 `[len(text) + 1]`.

    >>> byte_positions("a€é")
    array([0, 1, 4, 6])
    """
    characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    lengths = 1 + sum((characters > last).astype(np.int64) for last in (0x7F, 0x7FF, 0xFFFF))
    return np.pad(np.cumsum(lengths), (1, 0))


class Alignment(NamedTuple):
    """The finest segmentation that two tokenizations have in common."""

    ends: np.ndarray  # [group], ascending
    student: np.ndarray  # group of each token, ascending; -1 for special tokens
    teacher: np.ndarray  # group of each token


def align(student_ends: np.ndarray, teacher_ends: np.ndarray) -> Alignment:
    """Group the tokens of two tokenizations, as from `partition`, by the characters they cover.

    >>> # BOS, "ab", "c", "de" and "a", "bc", "de"
    >>> align(np.array([0, 2, 3, 5]), np.array([1, 3, 5]))
    Alignment(ends=array([3, 5]), student=array([-1,  0,  0,  1]), teacher=array([0, 0, 1]))
    """
    common = np.intersect1d(student_ends, teacher_ends)
    common = common[common > 0]
    student, teacher = (
        np.where((ends > 0) & (len(common) > 0), np.searchsorted(common, ends), -1)
        for ends in (student_ends, teacher_ends)
    )
    return Alignment(common, student, teacher)


def check_fast(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise InputError unless a tokenizer is fast, and so returns token offsets."""
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} returns no token offsets: use a fast tokenizer, which "
            "AutoTokenizer.from_pretrained loads if the folder has a tokenizer.json"
        )


class TextReader:
    """Tokenizes texts, and corrects the positions of the tokens.

    Some tokenizers silently drop unknown characters, and return too small offsets after them. Such
    characters are detected by tokenizing each character once, and removed before a text is
    tokenized. The token ids do not change, except for a space that some tokenizers prefix.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        check_fast(tokenizer)
        self.tokenizer = tokenizer
        self._dropped: dict[str, bool] = {}

    def read(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize a text without special tokens; return the IDs and the result of `partition`."""
        dropped = self._drops(text)
        places = [i for i, c in enumerate(text) if c not in dropped]
        encoded: Any = self.tokenizer(
            "".join(text[i] for i in places) if dropped else text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        if dropped:
            begins, ends = np.array([*places, len(text)]), np.array([0, *(i + 1 for i in places)])
            offsets = np.stack([begins[offsets[:, 0]], ends[offsets[:, 1]]], axis=1)
        return np.array(encoded["input_ids"], dtype=np.int64), partition(text, offsets)

    def _drops(self, text: str) -> set[str]:
        present = set(text)
        new = sorted(present - self._dropped.keys())
        if new:
            ids: Any = self.tokenizer(
                ["xx", *(f"x{c}x" for c in new)], add_special_tokens=False, verbose=False
            )["input_ids"]
            known = self.tokenizer.unk_token_id not in ids[0]
            self._dropped.update(
                (c, known and i == ids[0]) for c, i in zip(new, ids[1:], strict=True)
            )
        return {c for c in present if self._dropped[c]}
