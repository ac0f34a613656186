"""How often the right word names a cluster, beside c-TF-IDF as BERTopic computes it.

    python -m benchmarks.naming --text wikitext2_test.raw

Each article of WikiText (Merity et al., 2016; the raw text of any split) is a cluster of known
topic: its title. Its texts are its sentences, a random number of them or all; titles and headings
are cut out. A name is right where one of its first words is a word of the title, of four letters or
more. Few clusters are a random choice of the articles, drawn `--draws` times. BERTopic's rows need
`pip install bertopic`; "by hand" is the same formula on scikit-learn's counts, and the list of stop
words is scikit-learn's English one: ssl_kd has none.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import types
from collections.abc import Callable
from importlib import util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

from ssl_kd.naming import class_tfidf, names_from_texts
from ssl_kd.naming.words import TOKEN

TITLE = re.compile(r"^ ?= ([^=]+?) = ?$")
HEADING = re.compile(r"^ ?= .* = ?$")
# Clusters (None: all) and sentences of each (None: all).
CASES = ((3, 20), (10, 20), (None, 5), (None, 20), (None, None))
Namer = Callable[[list[str], NDArray], list[list[str]]]


def articles(path: Path) -> dict[str, list[str]]:
    """Title -> sentences, of articles with ten or more."""
    found: dict[str, list[str]] = {}
    own: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if title := TITLE.match(line):
            own = found.setdefault(title[1], [])
        elif line.strip() and not HEADING.match(line):
            own += [sentence for sentence in re.split(r" [.;] ", line) if len(sentence) > 20]
    return {title: sentences for title, sentences in found.items() if len(sentences) >= 10}


def ours(texts: list[str], clusters: NDArray) -> list[list[str]]:
    """`ssl_kd.naming`."""
    names = names_from_texts(texts, {"cluster": clusters}).levels["cluster"]
    return [[w for w, _ in names[c].words] if c in names else [] for c in np.unique(clusters)]


def joined(texts: list[str], clusters: NDArray) -> list[str]:
    """One text a cluster."""
    return [
        " ".join(text for text, c in zip(texts, clusters, strict=True) if c == k)
        for k in np.unique(clusters)
    ]


def weighted(weigh: Callable[[sparse.csr_matrix], sparse.csr_matrix], stop: str | None) -> Namer:
    """The heaviest words by some weighting of the counts."""

    def namer(texts: list[str], clusters: NDArray) -> list[list[str]]:
        counter = CountVectorizer(token_pattern=TOKEN, stop_words=stop)
        counts = sparse.csr_matrix(counter.fit_transform(joined(texts, clusters)))
        weights, words = weigh(counts).toarray(), counter.get_feature_names_out()
        return [words[np.argsort(-row, kind="stable")[:3]].tolist() for row in weights]

    return namer


def tfidf(texts: list[str], clusters: NDArray) -> list[list[str]]:
    """scikit-learn's TF-IDF, a document a cluster."""
    weigher = TfidfVectorizer(token_pattern=TOKEN, sublinear_tf=False)
    weights = weigher.fit_transform(joined(texts, clusters)).toarray()
    words = weigher.get_feature_names_out()
    return [words[np.argsort(-row, kind="stable")[:3]].tolist() for row in weights]


def bertopics() -> Callable[[sparse.csr_matrix], sparse.csr_matrix] | None:
    """BERTopic's own transformer, without what else its package imports; None: not installed."""
    found = util.find_spec("bertopic")
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0]) / "vectorizers" / "_ctfidf.py"
    module = types.ModuleType("ctfidf")
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
    return lambda counts: module.ClassTfidfTransformer().fit_transform(counts)


def namers() -> dict[str, Namer]:
    """Every way, by name."""
    found: dict[str, Namer] = {
        "ssl_kd": ours,
        "c-TF-IDF, by hand": weighted(class_tfidf, None),
        "c-TF-IDF, by hand, stop words out": weighted(class_tfidf, "english"),
        "TF-IDF of scikit-learn": tfidf,
    }
    if (theirs := bertopics()) is not None:
        found["BERTopic's c-TF-IDF"] = weighted(theirs, None)
        found["BERTopic's c-TF-IDF, stop words out"] = weighted(theirs, "english")
    return found


def right(name: list[str], title: str, most: int) -> bool:
    """Whether one of the first words is of the title."""
    wanted = {word for word in re.findall(TOKEN, title.lower()) if len(word) > 3}
    return bool(wanted & set(name[:most]))


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=20)
    given = parser.parse_args(argv)
    known = articles(given.text)
    titles = [t for t in known if any(len(w) > 3 for w in re.findall(TOKEN, t.lower()))]
    print(f"{len(titles)} articles of {given.text.name}; right among the first 1 | 3 words, in %")
    ways = namers()
    for topics, sentences in CASES:
        draws = 1 if sentences is None else max(1, given.draws if topics else given.draws // 5)
        hits, asked = {way: np.zeros(2) for way in ways}, 0
        for seed in range(draws):
            draw = random.Random(seed)
            chosen = draw.sample(titles, topics) if topics else titles
            asked += len(chosen)
            texts, clusters = drawn(known, chosen, sentences, draw)
            for way, namer in ways.items():
                pairs = list(zip(namer(texts, clusters), chosen, strict=True))
                hits[way] += [sum(right(n, t, most) for n, t in pairs) for most in (1, 3)]
        print(f"\n{topics or 'all'} clusters, {sentences or 'all'} sentences each, {draws} draws")
        for way, found in hits.items():
            first, three = 100 * found / asked
            print(f"  {way:<38} {first:5.1f} | {three:5.1f}")
    return 0


def drawn(
    known: dict[str, list[str]], chosen: list[str], sentences: int | None, draw: random.Random
) -> tuple[list[str], NDArray]:
    """Sentences of the chosen articles, and the number of the article of each."""
    texts, clusters = list[str](), list[int]()
    for number, title in enumerate(chosen):
        own = known[title]
        own = own if sentences is None else draw.sample(own, min(sentences, len(own)))
        texts += own
        clusters += [number] * len(own)
    return texts, np.array(clusters)


if __name__ == "__main__":
    sys.exit(main())
