"""Scores of written text: how often it repeats itself, and how much of another text it has."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from statistics import fmean


def repetition(texts: Sequence[Sequence[Hashable]], n: int = 4) -> float | None:
    """The share of n-grams that stood in the same text before, a mean over texts.

    `seq-rep-n = 1 - unique n-grams / n-grams`

    Args:
        texts: each in tokens; one of fewer than n has no n-gram, and does not count.
        n: tokens of an n-gram.

    Returns:
        From 0 to 1; None where no text has an n-gram.

    References:
        Welleck et al., Neural text generation with unlikelihood training, ICLR 2020, equation 10.

    Example:
        >>> repetition([["so", "it", "goes"] * 3], n=3)
        0.5714285714285714
    """
    every = [grams for text in texts if (grams := _ngrams(text, n))]
    return fmean(1 - len(set(grams)) / len(grams) for grams in every) if every else None


def distinct(texts: Sequence[Sequence[Hashable]], n: int = 2) -> float | None:
    """The share of different n-grams among those of all texts; it falls as the texts get longer.

    Args:
        texts: each in tokens.
        n: tokens of an n-gram.

    Returns:
        From 0 to 1; None where no text has an n-gram.

    References:
        Li et al., A diversity-promoting objective function for neural conversation models,
        NAACL 2016, section 5.3.

    Example:
        >>> distinct([["a", "b", "c"], ["a", "b", "d"]])
        0.75
    """
    every = [gram for text in texts for gram in _ngrams(text, n)]
    return len(set(every)) / len(every) if every else None


def rouge_l(text: str, reference: str) -> float | None:
    """ROUGE-L of a text: F1 by the longest common subsequence of words.

    `P = lcs / words of the text`, `R = lcs / words of the reference`, `F1 = 2 P R / (P + R)`. Words
    are runs of letters and digits of any script without regard to case, without stemming; for
    English without accents those of the package `rouge-score`.

    Args:
        text: what was written.
        reference: what it is compared with.

    Returns:
        From 0 to 1; None where the reference has no word.

    References:
        Lin, ROUGE: a package for automatic evaluation of summaries, 2004, section 3.1, with
        beta = 1, as in MiniLLM and DistiLLM.

    Example:
        >>> rouge_l("police kill the gunman", "police killed the gunman")
        0.75
    """
    mine, other = (re.findall(r"[^\W_]+", s.casefold()) for s in (text, reference))
    if not other:
        return None
    return 2 * _common(mine, other) / (len(mine) + len(other))


def _ngrams(text: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)  # of the words of `a` so far with each beginning of `b`
    for word in a:
        before = row
        row = [0]
        for j, other in enumerate(b):
            row.append(before[j] + 1 if word == other else max(row[j], before[j + 1]))
    return row[-1]
