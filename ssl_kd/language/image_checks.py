"""Check that models and settings can learn from text with images."""

from __future__ import annotations

from collections.abc import Sequence

from ssl_kd.datasets.picture_blocks import PictureBlocks, processor_state
from ssl_kd.datasets.text import TextDataset
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import CausalLM, sees


def check_settings(settings: LanguageSettings, *texts: TextDataset) -> None:
    """Refuse settings that do not go with images, before any model is loaded.

    Raises:
        SettingsError: names the setting, and a record with an image.
    """
    first = next((text.pictured for text in texts if text.pictured is not None), None)
    if first is None:
        return
    student = settings.student_model.partition(":")[0]
    for unfit, why, way in (
        (settings.to_train, "TEACHER_MODEL is 'train'", "name a model of images"),
        (len(settings.teacher_names) > 1, "TEACHER_MODEL names several", "name one"),
        (
            student in ("fresh", "llama"),
            f"STUDENT_MODEL is {settings.student_model!r}, which reads text alone",
            "take layers:N, or a folder",
        ),
        (settings.align != "auto", f"ALIGN is {settings.align!r}", "set it to 'auto'"),
        (settings.teacher_url, "TEACHER_URL is asked about text", "name the teacher's folder"),
        (settings.on_policy, "ON_POLICY continues text", "set it to 0"),
        (settings.teacher_text, "TEACHER_TEXT continues text", "set it to 0"),
        (settings.shard, "SHARD is True", "set it to False"),
    ):
        if unfit:
            raise SettingsError(f"the text holds images, first in {first}, but {why}: {way}.")


def check_models(texts: TextDataset, student: CausalLM, teachers: Sequence[CausalLM]) -> None:
    """Refuse models that do not see the images of a text, or not the same.

    Raises:
        SettingsError: names the model, and what differs.
    """
    if (first := texts.pictured) is None:
        return
    for who, lm in (("student", student), *(("teacher", lm) for lm in teachers)):
        if lm.processor is None:
            why = "reads text alone"
            if lm.model is not None and sees(lm.model):
                why = "has no processor that can be read (processor.save_pretrained(folder))"
            raise SettingsError(
                f"the text holds images, first in {first}, and the {who} {lm.name} {why}: take one "
                "that AutoModelForImageTextToText and AutoProcessor load, such as a Llava or a "
                "Qwen2.5-VL"
            )
    own = processor_state(student.processor)
    for lm in teachers:
        other = processor_state(lm.processor)
        differ = [k for k in sorted({*own, *other}) if own.get(k) != other.get(k)]
        if differ:
            of = ", ".join(f"{k} {other.get(k)!r} and {own.get(k)!r}" for k in differ[:3])
            raise SettingsError(
                f"teacher {lm.name} and student {student.name} prepare images differently ({of}), "
                "and one picture is made for both: save the teacher's processor beside the student"
            )


def check_ranks_see(blocks: object, world: int) -> None:
    """Refuse what several processes cannot do: they average the same gradients at each step.

    Raises:
        SettingsError: rows without images beside others.
    """
    if world == 1 or not isinstance(blocks, PictureBlocks) or not any(blocks.pictures):
        return
    if not all(blocks.pictures):
        raise SettingsError(
            f"{world} processes average the gradients of the same weights at each step, and some"
            " rows hold no image: start one process, or give each record an image."
        )
