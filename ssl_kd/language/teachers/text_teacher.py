"""Record who wrote a student's text: offline, another teacher biases it (Lightning OPD)."""

from __future__ import annotations

from pathlib import Path

from ssl_kd.core.files import atomic_write_text
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.models.causal import CausalLM

RECORD = "text_teacher.txt"  # in a student's folder: identity of the weights, and name


def text_teacher(student: CausalLM) -> str:
    """Return the identity and name of the teacher whose text a student learned; empty if none."""
    file = Path(student.name).expanduser() / RECORD
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def save_text_teacher(folder: Path, student: CausalLM, writer: CausalLM | None) -> None:
    """Record in a student's folder who wrote its text; None keeps what `student` has on record."""
    record = text_teacher(student) if writer is None else f"{writer.weights_id} {writer.name}"
    if record:
        atomic_write_text(folder / RECORD, f"{record}\n")


def check_same_teacher(student: CausalLM, teacher: CausalLM | None) -> None:
    """Raise SettingsError if a student learned another teacher's text; a served one may be any."""
    weights, _, name = text_teacher(student).partition(" ")
    if teacher is None or teacher.weights_id.startswith("served "):
        return
    if weights in ("", teacher.weights_id):
        return
    raise SettingsError(
        f"STUDENT_TEXT is above 0, but the student {student.name} learned from text by the teacher"
        f" {name} (weights {weights}), and TEACHER_MODEL is {teacher.name} (weights"
        f" {teacher.weights_id}): name the first one, train the student on text by this one"
        f" (--teacher_text 1 --alpha_kd 0 --alpha_ce 1), or use ON_POLICY. If the weights are the"
        f" same in another file, remove {RECORD} from the student's folder"
    )
