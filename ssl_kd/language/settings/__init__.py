"""The settings of the language mode in one class, and the checks between their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.settings.import_paths import check_installed
from ssl_kd.language.settings.foreign_names import (
    ALIASES,
    FIRST,
    FREE_ON_RESUME,
    HEADING,
    IN_MEMORY,
    PER_PROCESS,
)
from ssl_kd.language.settings.groups import (
    ChatSettings,
    LossSettings,
    RolloutSettings,
    RouterSettings,
    StudentSettings,
    TeacherSettings,
    TextSettings,
    TrainingSettings,
)
from ssl_kd.language.teachers.kinds import kinds_of


@dataclass(frozen=True)
class LanguageSettings(
    TeacherSettings,
    StudentSettings,
    TextSettings,
    ChatSettings,
    LossSettings,
    RolloutSettings,
    RouterSettings,
    TrainingSettings,
):
    """Every setting of `scripts/distill.py`; `scripts/config.py` holds them in UPPER_CASE."""

    free_on_resume: ClassVar[frozenset[str]] = FREE_ON_RESUME
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    per_process: ClassVar[frozenset[str]] = PER_PROCESS
    obsolete: ClassVar[frozenset[str]] = frozenset({"SHARD"})
    first: ClassVar[tuple[str, ...]] = FIRST
    file_heading: ClassVar[str] = HEADING

    @property
    def kind_of_divergence(self) -> Any:
        """Return the divergence on text: DIVERGENCE, or its default for this teacher."""
        if self.divergence != "auto":
            return "skew_kl" if self.divergence == "distillm2" else self.divergence
        return "forward_kl" if self.router_mode == "native" else "reverse_kl"

    @property
    def kind_on_policy(self) -> Any:
        """Return the divergence on text that the student generates."""
        return "skew_reverse_kl" if self.divergence == "distillm2" else self.kind_of_divergence

    @property
    def teacher_tags(self) -> tuple[str, ...]:
        """The tag before each name in TEACHER_MODEL; empty without TEACHER_FIELD."""
        names = super().teacher_names if self.teacher_field else ()
        return tuple(name.partition("=")[0].strip() for name in names)

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """The name of each teacher in TEACHER_MODEL, without its tag."""
        names = super().teacher_names
        return tuple(n.partition("=")[2].strip() for n in names) if self.teacher_field else names

    @property
    def learns_text(self) -> bool:
        """Return whether the student also trains on rows that it did not generate."""
        by_student = max(self.on_policy, self.student_text)
        return by_student < 1 or self.divergence == "distillm2"

    @property
    def packs(self) -> bool:
        """Return whether training rows may hold several documents: without generated text."""
        generated = self.on_policy or self.teacher_text or self.student_text
        return self.packing and not generated and self.teacher_model != "self"

    @property
    def rate_schedule(self) -> tuple[float, float, str, int, float]:
        """Return the arguments of `learning_rate_at` after the number of steps."""
        warmup = self.warmup_fraction, self.lr_schedule, self.warmup_steps
        return self.peak_lr, *warmup, self.min_lr_rate

    def known(self) -> dict[str, Any]:
        """Return all values by lower-case name, with the default LEARNING_RATE filled in."""
        values = {name.lower(): value for name, value in self.to_dict().items()}
        return values | {"learning_rate": self.peak_lr}

    def with_cache_router(self) -> Self:
        """Return the settings with ROUTER_MODE native in place of auto if there is a cache."""
        if self.teacher_cache is None or self.router_mode != "auto":
            return self
        return self.replace(router_mode="native")

    def check_packages(self) -> None:
        """Raise MissingPackage if these settings need a package that is not installed."""
        texts = (self.data_path, self.eval_path or "")
        needed = {
            "transformers": True,
            "peft": self.lora_rank > 0,
            "datasets": any(text.startswith("hf:") for text in texts),
            "aiohttp": self.teacher_url is not None or self.rollout_url is not None,
            "msgspec": self.teacher_url is not None,
        }
        check_installed([name for name, needs in needed.items() if needs], "llm")

    @property
    def generates(self) -> str:
        """Return the settings by which a model continues rows of text, as "A and B", or ""."""
        names = ("on_policy", "teacher_text", "student_text")
        return " and ".join(name.upper() for name in names if getattr(self, name))

    def check_together(self) -> None:
        """Raise SettingsError if settings that are valid alone contradict each other."""
        super().check_together()
        if self.push_to_hub and self.hub_model_id is None:
            raise SettingsError("PUSH_TO_HUB is True, but HUB_MODEL_ID is None: set HUB_MODEL_ID.")
        if self.hub_model_id is not None and not self.push_to_hub:
            raise SettingsError(
                f"HUB_MODEL_ID is {self.hub_model_id!r}, but PUSH_TO_HUB is False: set PUSH_TO_HUB"
                " to True."
            )
        template = self.teacher_prompt_template
        if "{prompt}" not in template or "{privileged_context}" not in template:
            raise SettingsError(
                f"TEACHER_PROMPT_TEMPLATE is {template!r}: add {{prompt}}, {{privileged_context}}."
            )
        if self.teacher_url is not None or self.rollout_url is not None:
            self._check_urls()
        for kind in kinds_of(self):
            kind.check(self)
        if self.quantization is not None:
            self._check_quantization()
        self._check_generation()

    def check_images(self, *first_images: str | None) -> None:
        """Raise SettingsError if the text holds images and these settings cannot use them.

        Args:
            *first_images: for each text, the place of its first image; None without images.
        """
        first = next((image for image in first_images if image is not None), None)
        if first is None:
            return
        text = f"the text holds images, first in {first}, but"
        for kind in kinds_of(self):
            if kind.reads_no_images is not None:
                setting, fix = kind.reads_no_images
                value = getattr(self, setting.lower())
                raise SettingsError(f"{text} {setting} is {value!r}: {fix}.")
        if self.student_model.startswith(("fresh:", "llama:")):
            raise SettingsError(
                f"{text} STUDENT_MODEL is {self.student_model!r}, which reads only text: set it to"
                " layers:N, or to the folder of a model."
            )
        if self.generates:
            setting = self.generates.partition(" ")[0]
            raise SettingsError(f"{text} {setting} supports only text: set it to 0.")

    def _check_urls(self) -> None:
        from ssl_kd.language.teachers.http_client import check_url  # late: --help needs no torch

        try:
            for role in ("TEACHER", "ROLLOUT"):
                check_url(getattr(self, f"{role.lower()}_url") or "http://none", role)
        except InputError as error:
            raise SettingsError(f"{error}.") from error

    def _check_quantization(self) -> None:
        kind = self.student_model.partition(":")[0]
        base = self.lora_rank and kind not in ("fresh", "llama", "layers", IN_MEMORY)
        loaded = self.teacher_url is None and self.teacher_model not in ("none", "self", IN_MEMORY)
        if not (loaded or (base and self.quantization == "nf4")):
            raise SettingsError(
                f"QUANTIZATION is {self.quantization!r}, but no frozen model is loaded: name a"
                " TEACHER_MODEL, or a STUDENT_MODEL with LORA_RANK above 0, or set it to None."
            )
        if kind == "layers":
            raise SettingsError(
                f"QUANTIZATION is {self.quantization!r}, but STUDENT_MODEL 'layers:N' needs"
                " unquantized weights: change it, or set QUANTIZATION to None."
            )

    def _check_generation(self) -> None:
        names = self.generates
        if self.rollout_url is not None:
            self._check_rollout_url()
        if self.divergence == "distillm2" and not self.on_policy:
            raise SettingsError(
                "DIVERGENCE 'distillm2' contrasts text with the student's continuations: set"
                " ON_POLICY above 0; 1 makes a pair of each row."
            )
        if self.student_text and names != "STUDENT_TEXT":
            raise SettingsError(
                f"{names} are above 0, but STUDENT_TEXT cannot be combined with other generated"
                " text: set one of them to 0 (train on the teacher's text in an earlier run)."
            )
        if names not in ("", "TEACHER_TEXT") and self.alpha_kd == 0:
            raise SettingsError(
                f"{names} is above 0, but ALPHA_KD is 0, and only the teacher scores the student's"
                " text: set ALPHA_KD above 0."
            )
        if names and not self.learn_thoughts:
            raise SettingsError(f"LEARN_THOUGHTS is False, but {names} is set: choose one of them.")

    def _check_rollout_url(self) -> None:
        if self.student_model.startswith(("fresh:", "layers:", "llama:")):
            raise SettingsError(
                f"STUDENT_MODEL is {self.student_model!r}, but the server at ROLLOUT_URL loads a"
                " saved model: set STUDENT_MODEL to its folder or Hub name."
            )
        if not self.on_policy:
            raise SettingsError(
                "ROLLOUT_URL is set, but ON_POLICY is 0, so nothing is sampled: set ON_POLICY above"
                " 0."
            )
        if self.modules_to_save:
            raise SettingsError(
                f"MODULES_TO_SAVE is {self.modules_to_save!r}, but the vLLM server at ROLLOUT_URL"
                " loads only adapters: set one of them to None."
            )
