"""Align two tokenizations of one text.

Each side is reduced to one number per token, its `ends`: the end of the smallest stretch of text
that contains the token and whose borders no token crosses. The common segmentation is then the
intersection of two sorted sets, computed for a batch of rows at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ssl_kd.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPACES = np.array([c for c in range(0x3001) if chr(c).isspace()])


def partition(text: str, offsets: np.ndarray) -> np.ndarray:
    """Turn a tokenizer's offsets into a partition of the text.

    A cut is between two tokens if no token before reaches beyond it and no token after begins
    before it; overlapping tokens, such as the bytes of one character, stay together. Characters
    without a token (spaces that some offsets leave out, marks composed by normalization) belong to
    the token before, up to the first space; from there on to the token after.

    Args:
        text: the tokenized text, in characters (code points).
        offsets: `[token, 2]`, begin and end of each token.

    Returns:
        `[token]` int64, the end of the stretch that contains each token. It never decreases, and
        the last is `len(text)`: the stretches cover every character once.

    >>> partition("a cat", np.array([[0, 1], [2, 4], [3, 5]]))  # the space is left out; "a" twice
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
    # A token of width 0 at a cut belongs to the stretch after it: a prefix before a word.
    cuts, first = np.unique(cuts[clean], return_index=True)
    stretch = np.searchsorted(clean[first], np.arange(len(offsets)))
    return np.append(cuts, len(text))[stretch]


class Alignment(NamedTuple):
    """The finest segmentation common to two partitions.

    Attributes:
        ends: `[group]`, the end of each group, ascending.
        student: `[token]`, the group of each student token, ascending; -1 for a special one.
        teacher: `[token']`, the same of the teacher.
    """

    ends: np.ndarray
    student: np.ndarray
    teacher: np.ndarray


def align(student_ends: np.ndarray, teacher_ends: np.ndarray) -> Alignment:
    """Group the tokens of two sides that cover the same characters.

    Args:
        student_ends: from `partition`; `[token]`, 0 for special tokens.
        teacher_ends: `[token']`, of the same text.

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
    """Raise InputError for a tokenizer that gives no offsets."""
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} gives no offsets: use a fast tokenizer, which "
            "AutoTokenizer.from_pretrained loads if there is a tokenizer.json"
        )


class TextReader:
    """A fast tokenizer with correct positions of its tokens in the text.

    Some tokenizers silently drop unknown characters, and give too small offsets after them. Such
    characters are found by tokenizing each one once, and removed before tokenizing: the ids do not
    change (except for a space that a tokenizer prefixes to a text that begins with one).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        check_fast(tokenizer)
        self.tokenizer = tokenizer
        self._dropped: dict[str, bool] = {}

    def read(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and ends (see `partition`) of a text, `[token]` int64 each.

        Special tokens are not added; the text must not contain half surrogate pairs.
        """
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
        """Return the characters of the text that leave no token between two others."""
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
