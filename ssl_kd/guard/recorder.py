"""The flight recorder: the first fault of a part, saved as one small file that can be run again."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd.guard.events import Event
from ssl_kd.guard.files import CorruptFileError, load_tensors, save_tensors

logger = logging.getLogger(__name__)

_FORMAT = "ssl_kd flight recorder 1"


@dataclass(frozen=True)
class Bundle:
    """One step of one part, as it was when it went wrong.

    Attributes:
        event: what the guard saw.
        step: the optimizer step.
        part: which part, `head 3`.
        indices: which samples or tokens the batch was made of.
        tensors: what the step is computed from.
        settings: plain values: numbers, strings, lists of them.
        rng: state of torch's CPU generator `[byte]` uint8.
        left_out: names of tensors that were over the size limit.
    """

    event: Event
    step: int
    part: str
    indices: Tensor
    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    rng: Tensor
    left_out: list[str]


def save_bundle(
    path: str | Path,
    *,
    event: Event,
    step: int,
    part: str,
    indices: Tensor,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    rng: Tensor | None = None,
    optional: Collection[str] = ("views",),
    limit_mib: float = 64,
) -> None:
    """Write a bundle, atomically.

    Args:
        path: the file; its folder is made if it is missing.
        event: as in `Bundle`, like the others.
        step: the optimizer step.
        part: which part.
        indices: of the samples.
        tensors: copied to the CPU.
        settings: plain values only, since nothing else is read back.
        rng: by default the state of torch's CPU generator now.
        optional: names that are left out first, largest first, when all is over the limit.
        limit_mib: of all tensors together.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    kept = dict(tensors)
    first = sorted(kept, key=lambda name: (name in optional, kept[name].nbytes), reverse=True)
    left_out = []
    while sum(tensor.nbytes for tensor in kept.values()) > limit_mib * 2**20:
        left_out.append(first.pop(0))
        del kept[left_out[-1]]
    bundle = Bundle(
        event=event,
        step=step,
        part=part,
        indices=indices.detach().cpu(),
        # Cloned: a view would bring the whole storage behind it into the file.
        tensors={name: tensor.detach().cpu().clone() for name, tensor in kept.items()},
        settings=dict(settings),
        rng=torch.get_rng_state() if rng is None else rng,
        left_out=left_out,
    )
    content = {field.name: getattr(bundle, field.name) for field in fields(Bundle)}
    save_tensors(path, content | {"event": asdict(event), "format": _FORMAT})


def load_bundle(path: str | Path) -> Bundle:
    """Read a bundle back; nothing in it is executed.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is damaged, or no bundle.
    """
    content = load_tensors(path)
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise CorruptFileError(
            f"{path} is not a bundle of the flight recorder. Expected one of the files that a run "
            "leaves in its folder when a part goes wrong."
        )
    return Bundle(**{**content, "event": Event(**content["event"])})


class FlightRecorder:
    """Saves the first fault of each part, and no more than a few in all.

    Args:
        folder: where bundles go, `head-3-step300.pt`; made with the first one. Those that are there
            already count, so a resumed run records no part twice.
        limit_mib: size limit of each.
        most: bundles in all.
    """

    def __init__(self, folder: str | Path, limit_mib: float = 64, most: int = 8) -> None:
        self.folder, self.limit_mib, self.most = Path(folder), limit_mib, most
        self._recorded = {file.stem.rpartition("-step")[0] for file in self.folder.glob("*.pt")}

    def wants(self, part: str) -> bool:
        """Whether a fault of this part would be saved; ask before gathering what belongs to it."""
        return len(self._recorded) < self.most and _slug(part) not in self._recorded

    def bundles(self) -> list[Path]:
        """What was saved, oldest first."""
        return sorted(self.folder.glob("*.pt"), key=lambda file: file.stat().st_mtime_ns)

    def record(
        self,
        part: str,
        *,
        event: Event,
        step: int,
        indices: Tensor,
        tensors: Mapping[str, Tensor],
        settings: Mapping[str, Any],
        rng: Tensor | None = None,
    ) -> Path | None:
        """Save a fault as `save_bundle` does; the file, or None where it is not wanted.

        A disk that is full must not end a run whose guard has dealt with the fault: then a warning
        is logged, and nothing is saved.
        """
        if not self.wants(part):
            return None
        self._recorded.add(_slug(part))
        path = self.folder / f"{_slug(part)}-step{step}.pt"
        try:
            save_bundle(
                path,
                event=event,
                step=step,
                part=part,
                indices=indices,
                tensors=tensors,
                settings=settings,
                rng=rng,
                limit_mib=self.limit_mib,
            )
        except OSError as error:
            logger.warning("step %d, %s: the fault could not be recorded: %s", step, part, error)
            return None
        return path


def _slug(part: str) -> str:
    return re.sub(r"\W+", "-", part)
