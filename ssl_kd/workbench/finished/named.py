"""The clusters of a finished run get names, at every level of its tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ssl_kd.errors import InputError
from ssl_kd.workbench.finished.samples import Samples
from ssl_kd.workbench.naming import (
    Names,
    cluster_means,
    file_words,
    names_from_model,
    names_from_texts,
    names_from_vocabulary,
    read_captions,
)
from ssl_kd.workbench.naming.vocabulary import Encode

BLOCK = 4096


def levels_of(samples: Samples) -> dict[str, NDArray[np.int64]]:
    """Each sample's cluster at every level `[n]`, coarsest first; -1 is none."""
    return {name: samples.column(name).astype(np.int64) for name in samples.levels}


def texts_of(
    samples: Samples,
    captions: str | Path | Sequence[str] | None = None,
    *,
    column: str | None = None,
) -> list[str]:
    """A text of each sample `[n]`: its caption, or the words of its file's name.

    Args:
        samples: of a run.
        captions: a table (`ssl_kd.workbench.naming.read_captions`), or the texts themselves; None:
            the words of file names and folders, without folders that are labels.
        column: of the table, where the captions have another name.

    Raises:
        InputError, FileNotFoundError: as `read_captions`.
    """
    files = samples.column("file").tolist()
    if captions is None:
        labels = samples.column("label") if "label" in samples.table.column_names else ()
        return file_words(files, leave_out={label for label in labels if label})
    if isinstance(captions, str | Path):
        return read_captions(captions, files, samples.column("split").tolist(), column=column)
    return list(captions)


def name_samples(
    samples: Samples,
    captions: str | Path | Sequence[str] | None = None,
    *,
    column: str | None = None,
    describe: Callable[[list[str]], str] | None = None,
) -> Names:
    """Names by the words of captions or file names; with `describe`, by a language model.

    No label is looked at, and a name that somebody gave in the run's `names.json` stays.

    Args:
        samples: of a run.
        captions: as `texts_of`.
        column: as `texts_of`.
        describe: texts of a cluster -> its name (`ssl_kd.workbench.naming.names_from_model`).

    Raises:
        InputError, FileNotFoundError: as `texts_of` and `names_from_model`.
    """
    texts, levels = texts_of(samples, captions, column=column), levels_of(samples)
    if describe is None:
        found = names_from_texts(texts, levels)
    else:
        found = names_from_model(texts, levels, describe)
    return found.edited(Names.load(samples.path).edits)


def name_by_vocabulary(
    samples: Samples, vocabulary: Sequence[str], encode: Encode, *, teacher: str
) -> Names:
    """Names from a vocabulary, where a CLIP embedded the images.

    Args:
        samples: of a run.
        vocabulary: words.
        encode: texts -> `[m, d]`, that CLIP's text tower.
        teacher: what the run calls that CLIP's image tower: the `teacher` of its cache.

    Raises:
        InputError: another teacher made the cache, or as `names_from_vocabulary`.
        FileNotFoundError: the cache is gone.
    """
    made_by = samples.store().fingerprint.teacher
    if teacher != made_by:
        raise InputError(
            f"the embeddings of {samples.path} are {made_by}'s, and the words would be "
            f"{teacher}'s: they lie in one space only where one CLIP made both"
        )

    def blocks():
        for split, run in samples.splits.items():
            for start, x in samples.store(split).blocks(BLOCK):
                yield run.start + start, x

    levels = levels_of(samples)
    means = cluster_means(blocks(), levels)
    found = names_from_vocabulary(means, levels, vocabulary, encode)
    return found.edited(Names.load(samples.path).edits)
