"""What a cache of a teacher's answers was computed from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.datasets.blocks import Blocks
from ssl_kd.losses.mutual_information import check_temperature
from ssl_kd.store.fingerprint import BaseFingerprint
from ssl_kd.teachers.causal import tokenizer_id

if TYPE_CHECKING:
    from ssl_kd.datasets.text import TextDataset

METHODS = ("topk", "sample", "hidden")


@dataclass(frozen=True)
class TeacherFingerprint(BaseFingerprint):
    """Everything that decides what a cache of a teacher's answers holds.

    Hidden states serve every temperature and hold no tokens: for `hidden`, `k` and `temperature`
    are None, whatever is given.

    Args:
        teacher: name of the teacher, without the folder it lies in.
        weights: identity of its weights.
        tokenizer: identity of the tokenizer.
        text: identity of the documents and their order.
        block_size: tokens in a row.
        packed: whether some row holds more than one document.
        blocks: identity of the rows of tokens, and of which count.
        dtype: what the teacher computed in.
        method: `topk`, `sample` or `hidden`.
        k: tokens at each position.
        temperature: of the teacher's softmax.
    """

    way_out = (
        "Keep it and name another folder by --teacher_cache; cache_teacher.py --force_recompute "
        "with the settings of this run replaces it."
    )

    teacher: str
    weights: str
    tokenizer: str
    text: str
    block_size: int
    packed: bool
    blocks: str
    dtype: str
    method: str
    k: int | None
    temperature: float | None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; expected one of {', '.join(METHODS)}")
        if self.method == "hidden":
            object.__setattr__(self, "k", None)
            object.__setattr__(self, "temperature", None)
            return
        if self.k is None or self.k < 1:
            raise ValueError(f"k is {self.k}; expected at least 1")
        if self.temperature is None:
            raise ValueError(f"temperature is None; expected a number for method {self.method!r}")
        check_temperature("temperature", self.temperature)


def identity(
    teacher: str, weights: str, tokenizer: Any, dataset: TextDataset, blocks: Blocks
) -> dict[str, Any]:
    """The fields of a `TeacherFingerprint` that identify the teacher and the text.

    Args:
        teacher: name or path of the teacher.
        weights: its `weights_id`, which `files_id` gives without loading it.
        tokenizer: the tokenizer that made the blocks.
        dataset: the documents.
        blocks: their tokens, in rows.
    """
    return {
        "teacher": Path(teacher).name,
        "weights": weights,
        "tokenizer": tokenizer_id(tokenizer),
        "text": dataset.digest,
        "block_size": blocks.ids.shape[1],
        "packed": blocks.packed,
        "blocks": blocks.digest,
    }
