"""Names by a language model on the user's machine, from a few texts of each cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ssl_kd.errors import InputError, printable
from ssl_kd.settings.import_paths import explain
from ssl_kd.workbench.naming.names import Name, Names
from ssl_kd.workbench.naming.words import TOKEN, names_from_texts

EXAMPLES = 12
LONGEST = 60  # characters of a name


def names_from_model(
    texts: Sequence[str],
    levels: Mapping[str, NDArray[np.integer]],
    describe: Callable[[list[str]], str],
    *,
    examples: int = EXAMPLES,
) -> Names:
    """Name each cluster by what a language model says of its most telling texts.

    Args:
        texts: of each sample, `[n]`.
        levels: level -> each sample's cluster `[n]`, coarsest level first; -1 is no cluster.
        describe: texts of a cluster -> its name; of a longer answer the first line is taken. Where
            it says nothing, the name by words stays.
        examples: texts that it gets, those with the most of the cluster's own words.

    Raises:
        InputError: as `names_from_texts`; `describe` failed, or gave no text.
    """
    by_words = names_from_texts(texts, levels)
    found: dict[str, dict[int, Name]] = {}
    for level, clusters in levels.items():
        names = dict(by_words.levels[level])
        for cluster in np.unique(clusters[clusters >= 0]).tolist():
            weights = dict(names[cluster].words) if cluster in names else {}
            shown = _telling(texts, np.flatnonzero(clusters == cluster), weights, examples)
            if not shown:
                continue
            text = _asked(describe, shown, level, cluster)
            if text:
                names[cluster] = replace(names.get(cluster, Name("")), text=text, made=text)
        found[level] = _told_apart(names)
    return Names(found)


def _telling(
    texts: Sequence[str], rows: NDArray[np.int64], weights: Mapping[str, float], most: int
) -> list[str]:
    distinct: dict[str, float] = {}
    for text in (texts[int(row)] for row in rows):
        if text.strip():
            words = set(re.findall(TOKEN, text.lower()))
            distinct[text] = sum(weights.get(word, 0.0) for word in words)
    return sorted(distinct, key=lambda text: -distinct[text])[:most]


def _asked(describe: Callable[[list[str]], str], shown: list[str], level: str, cluster: int) -> str:
    try:
        answer = describe(shown)
    except Exception as error:
        raise InputError(
            f"the language model failed at {level} {cluster}: {explain(error)}"
        ) from error
    if not isinstance(answer, str):
        raise InputError(
            f"the language model gave {answer!r} for {level} {cluster}, expected a name: text"
        )
    line = next((line for line in answer.splitlines() if line.strip()), "")
    return printable(line.strip(" \t\"'`*.:"))[:LONGEST].strip()


def _told_apart(names: Mapping[int, Name]) -> dict[int, Name]:
    """Clusters of the same name say their heaviest words, too; at last their numbers."""
    found, taken = {}, set()
    for cluster, name in names.items():
        text = name.text
        for more in (", ".join(w for w, _ in name.words[:2]), str(cluster)):
            if text.casefold() in taken and more:
                text = f"{name.text} ({more})"
        taken.add(text.casefold())
        found[cluster] = replace(name, text=text, made=text)
    return found
