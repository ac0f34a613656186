"""Record which teacher wrote the answers that a student was trained on, and compare it later.

Offline on-policy distillation needs the teacher of the student's supervised fine-tuning: with
another one, its optimum is biased, however long it trains (Wu et al., Lightning OPD, arXiv
2604.13010, call this teacher consistency).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from ssl_kd.errors import InputError
from ssl_kd.files import atomic_write_json
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import CausalLM

logger = logging.getLogger(__name__)

RECORD = "text_teacher.json"  # in the folder of a student


def text_teacher(student: CausalLM) -> Mapping[str, str] | None:
    """Return `name` and `weights` of the teacher whose text a student learned; None if unknown."""
    file = Path(student.name).expanduser() / RECORD
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return {name: str(record[name]) for name in ("name", "weights")}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is damaged ({error}): remove it, or train again") from error


def save_text_teacher(folder: Path, student: CausalLM, writer: CausalLM | None) -> None:
    """Record in a student's folder who wrote its text; None keeps what `student` has on record."""
    record = text_teacher(student)
    if writer is not None:
        record = {"name": writer.name, "weights": writer.weights_id}
    if record is not None:
        atomic_write_json(folder / RECORD, record)


def check_same_teacher(student: CausalLM, teacher: CausalLM) -> None:
    """Raise SettingsError if a student learned from text that another teacher wrote."""
    record = text_teacher(student)
    if record is None or record["weights"] == teacher.weights_id:
        return
    if teacher.weights_id.startswith("served "):
        message = "the student learned from text by %s: check that the server runs this teacher"
        logger.warning(message, record["name"])
        return
    raise SettingsError(
        f"STUDENT_TEXT is above 0, but the student {student.name} learned from text by the teacher"
        f" {record['name']} (weights {record['weights']}), and TEACHER_MODEL is {teacher.name}"
        f" (weights {teacher.weights_id}): name the first one, or train the student on text by this"
        f" one (--teacher_text 1 --alpha_kd 0 --alpha_ce 1), or use ON_POLICY. If the weights are"
        f" the same in another file, remove {RECORD} from the student's folder"
    )
