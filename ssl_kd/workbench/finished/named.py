"""The clusters of a finished run get names, at every level of its tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.naming import (
    Names,
    file_words,
    names_from_model,
    names_from_texts,
    read_captions,
)


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
