"""Names from a list of words, by a CLIP that sees images and words in one space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ssl_kd.errors import InputError
from ssl_kd.workbench.naming.names import Name, Names, siblings

KEPT = 50  # nearest words of each cluster that are looked at
WORDS = 5
BLOCK = 1024  # words encoded at a time

Encode = Callable[[list[str]], Any]


def cluster_means(
    blocks: Iterable[tuple[int, Any]], levels: Mapping[str, NDArray[np.integer]]
) -> dict[str, dict[int, NDArray[np.float64]]]:
    """The mean direction of each cluster of every level, in one pass.

    Args:
        blocks: number of the first row, and embeddings `[b, d]`.
        levels: level -> each sample's cluster `[n]`; -1 is no cluster.

    Returns:
        Level -> cluster -> mean of its unit embeddings, `[d]`.
    """
    sums: dict[str, dict[int, Any]] = {level: {} for level in levels}
    sizes: dict[str, dict[int, int]] = {level: {} for level in levels}
    for start, block in blocks:
        x = _unit(np.asarray(block, dtype=np.float64))
        for level, clusters in levels.items():
            own = clusters[start : start + len(x)]
            for cluster in np.unique(own[own >= 0]).tolist():
                part = x[own == cluster]
                sums[level][cluster] = sums[level].get(cluster, 0) + part.sum(0)
                sizes[level][cluster] = sizes[level].get(cluster, 0) + len(part)
    return {
        level: {cluster: total / sizes[level][cluster] for cluster, total in of.items()}
        for level, of in sums.items()
    }


def names_from_vocabulary(
    means: Mapping[str, Mapping[int, NDArray[np.floating]]],
    levels: Mapping[str, NDArray[np.integer]],
    vocabulary: Sequence[str],
    encode: Encode,
    *,
    prompt: str = "a photo of a {}",
) -> Names:
    """Name each cluster by the word that lies nearest to it, and nearer than to its siblings.

    A word's score is `<t, m> + (<t, m> - <t, m_siblings>)`: its cosine to the mean of the cluster,
    and how far that is above its siblings' mean. Each level's words are dealt out so that the sum
    of the scores is largest and no two clusters have the same.

    Args:
        means: `cluster_means` of the images' embeddings.
        levels: level -> each sample's cluster `[n]`, coarsest level first.
        vocabulary: words; those given twice count once.
        encode: texts -> `[m, d]`, by the text tower of the CLIP that embedded the images.
        prompt: the text of a word.

    Raises:
        InputError: no words; a prompt without `{}`; embeddings of another width, or not finite.
    """
    words = list(dict.fromkeys(word.strip() for word in vocabulary if word.strip()))
    if not words:
        raise InputError("the vocabulary has no word: give a file with one a line")
    if "{}" not in prompt:
        raise InputError(f"prompt is {prompt!r}; expected one with {{}}, where the word goes")
    width = next((len(mean) for of in means.values() for mean in of.values()), 0)
    texts = _encoded([prompt.format(word) for word in words], encode, width)
    found: dict[str, dict[int, Name]] = {}
    for level, of in means.items():
        beside, found[level] = siblings(levels, level), {}
        ids = sorted(of)
        scores = np.stack([_score(texts, of, cluster, beside[cluster]) for cluster in ids])
        best = np.argsort(-scores, axis=1, kind="stable")[:, :KEPT]
        columns = np.unique(best)
        rows, dealt = linear_sum_assignment(scores[:, columns], maximize=True)
        taken = dict(zip(rows.tolist(), columns[dealt].tolist(), strict=True))
        for row, cluster in enumerate(ids):
            first = taken.get(row)
            text = f"{words[best[row, 0]]} ({cluster})" if first is None else words[first]
            order = [at for at in best[row].tolist() if at != first]
            order = order if first is None else [first, *order]
            kept = tuple((words[at], float(scores[row, at])) for at in order[:WORDS])
            found[level][cluster] = Name(text, text, kept)
    return Names(found)


def _score(
    texts: NDArray[np.float64], means: Mapping[int, Any], cluster: int, others: Sequence[int]
) -> NDArray[np.float64]:
    own = texts @ _unit(means[cluster])
    if not others:
        return own
    return 2 * own - texts @ _unit(np.mean([_unit(means[c]) for c in others], axis=0))


def _unit(x: Any) -> NDArray[np.float64]:
    """Vectors, the last axis, at length 1."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _encoded(texts: list[str], encode: Encode, width: int) -> NDArray[np.float64]:
    blocks = []
    for start in range(0, len(texts), BLOCK):
        asked = texts[start : start + BLOCK]
        found = encode(asked)
        found = found.detach().cpu().float().numpy() if hasattr(found, "detach") else found
        x = np.asarray(found, dtype=np.float64)
        if x.shape != (len(asked), width):
            raise InputError(
                f"the text encoder gave {list(x.shape)} for {len(asked)} texts, and the "
                f"embeddings are {width} wide: expected the text tower of the CLIP that embedded "
                "the images, with its projection"
            )
        if not np.isfinite(x).all():
            raise InputError("the text encoder gave values that are not finite")
        blocks.append(_unit(x))
    return np.concatenate(blocks)
