"""All settings of the language mode, and the checks between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from ssl_kd.errors import InputError
from ssl_kd.language.foreign_names import (
    ALIASES,
    FIRST,
    FREE_ON_RESUME,
    HEADING,
    IN_MEMORY,
    INSTEAD,
    PER_PROCESS,
)
from ssl_kd.language.setting_groups import (
    LossSettings,
    RolloutSettings,
    RouterSettings,
    StudentSettings,
    TeacherSettings,
    TextSettings,
    TrainingSettings,
)
from ssl_kd.settings import SettingsError
from ssl_kd.settings.import_paths import check_installed


@dataclass(frozen=True)
class LanguageSettings(
    TeacherSettings,
    StudentSettings,
    TextSettings,
    LossSettings,
    RolloutSettings,
    RouterSettings,
    TrainingSettings,
):
    """Every setting of `scripts/distill.py`; `scripts/config.py` holds them in UPPER_CASE."""

    free_on_resume: ClassVar[frozenset[str]] = FREE_ON_RESUME
    extended_by: ClassVar[str | None] = "max_steps"
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    per_process: ClassVar[frozenset[str]] = PER_PROCESS
    instead: ClassVar[Mapping[str, str]] = INSTEAD
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
    def learns_text(self) -> bool:
        """Return whether the student also trains on rows that it did not generate."""
        return self.on_policy < 1 or self.divergence == "distillm2"

    def known(self) -> dict[str, Any]:
        """Return lower-case name -> value, with LEARNING_RATE resolved, for a diagnosis."""
        values = {name.lower(): value for name, value in self.to_dict().items()}
        return values | {"learning_rate": self.peak_lr}

    def with_cache_router(self) -> Self:
        """Return the settings with ROUTER_MODE auto resolved to native if a cache is used."""
        if self.teacher_cache is None or self.router_mode != "auto":
            return self
        return self.replace(router_mode="native")

    def check_packages(self) -> None:
        """Raise MissingPackage if a package that these settings need is not installed."""
        texts = (self.data_path, self.eval_path or "")
        needed = {
            "transformers": True,
            "peft": self.lora_rank > 0,
            "datasets": any(text.startswith("hf:") for text in texts),
            "aiohttp": self.teacher_url is not None,
        }
        check_installed([name for name, needs in needed.items() if needs], "llm")

    def check_together(self) -> None:
        """Raise SettingsError if settings that are valid alone contradict each other."""
        super().check_together()
        no_teacher, cached = self.teacher_model == "none", self.teacher_cache is not None
        clamped, changed_router = self.legacy_clamp is not None, self.router_weights is not None
        original = self.router_mode in ("native", "auto") and not changed_router
        _refuse(
            (
                no_teacher and self.alpha_ce == 0,
                "TEACHER_MODEL is 'none', so ALPHA_CE must be above 0.",
            ),
            (no_teacher and cached, "TEACHER_CACHE needs the TEACHER_MODEL that it was made by."),
            (
                cached and (self.router_mode in ("sar", "ka") or self.align != "auto"),
                "TEACHER_CACHE holds one answer per token: ROUTER_MODE 'sar' or 'ka' and ALIGN need"
                " the teacher itself. Set TEACHER_CACHE to None, or ROUTER_MODE to 'all' and ALIGN"
                " to 'auto'.",
            ),
            (
                self.router_mode == "sar" and self.align != "auto",
                "ROUTER_MODE 'sar' compares teacher and student token by token, so ALIGN must be"
                " 'auto' and the tokenizers the same; 'all' and 'ka' work with any ALIGN.",
            ),
            (clamped and cached, "LEGACY_CLAMP needs live logits: TEACHER_CACHE must be None."),
            (
                self.shard and (self.router_mode != "native" or changed_router),
                "SHARD needs the teacher's original experts and router: set ROUTER_MODE to"
                " 'native' and ROUTER_WEIGHTS to None.",
            ),
        )
        if self.teacher_url is not None:
            self._check_served(self.teacher_url, original and not clamped)
        if len(self.teacher_names) > 1:
            self._check_several(cached)
        if self.quantization is not None:
            self._check_quantization()
        self._check_generation(no_teacher, cached)

    def check_images(self, *first_images: str | None) -> None:
        """Raise SettingsError if the text holds images and these settings cannot use them.

        Args:
            *first_images: where the first image of each text is; None without images.
        """
        first = next((image for image in first_images if image is not None), None)
        if first is None:
            return
        fresh = self.student_model.startswith(("fresh:", "llama:"))
        text_only = f"STUDENT_MODEL is {self.student_model!r}, which reads only text"
        for conflict, reason, fix in (
            (self.to_train, "TEACHER_MODEL is 'train'", "name a model of images"),
            (len(self.teacher_names) > 1, "TEACHER_MODEL names several", "name one"),
            (fresh, text_only, "use layers:N, or a folder"),
            (self.align != "auto", f"ALIGN is {self.align!r}", "set it to 'auto'"),
            (self.teacher_url, "TEACHER_URL supports only text", "name the teacher's folder"),
            (self.on_policy, "ON_POLICY supports only text", "set it to 0"),
            (self.teacher_text, "TEACHER_TEXT supports only text", "set it to 0"),
            (self.shard, "SHARD is True", "set it to False"),
        ):
            _refuse((conflict, f"the text holds images, first in {first}, but {reason}: {fix}."))

    def _check_served(self, url: str, original: bool) -> None:
        from ssl_kd.teachers.http_client import check_url  # late: --help needs no torch

        try:
            check_url(url)
        except InputError as error:
            raise SettingsError(f"{error}.") from error
        _refuse(
            (
                self.to_train or self.teacher_model == "none",
                "TEACHER_URL needs the tokenizer of the served teacher, and TEACHER_MODEL is"
                f" {self.teacher_model!r}: name its folder, or its name on the Hub.",
            ),
            (
                self.temperature != 1,
                f"TEMPERATURE is {self.temperature:g}, but a server returns its most likely tokens"
                " at temperature 1 only: set TEMPERATURE to 1.",
            ),
            (
                self.student_model.startswith("layers:"),
                f"STUDENT_MODEL {self.student_model!r} is cut from the teacher, whose weights are"
                " on a server (TEACHER_URL): name a folder, or new weights as llama:LAYERSxDIM.",
            ),
            (
                self.align != "auto" or not original,
                "TEACHER_URL returns only the teacher's most likely tokens: ALIGN must be 'auto',"
                " ROUTER_MODE 'native', and ROUTER_WEIGHTS and LEGACY_CLAMP None.",
            ),
        )

    def _check_several(self, cached: bool) -> None:
        names = self.teacher_names
        single = any(name.partition(":")[0] in ("train", "none", "") for name in names)
        _refuse(
            (
                single,
                f"TEACHER_MODEL is {self.teacher_model!r}: expected folders, or names on the Hub,"
                " separated by commas ('train' and 'none' cannot be combined).",
            ),
            (
                self.align != "auto" or self.is_routed or cached or self.shard,
                "Several teachers must share the student's tokenizer and run unchanged: ALIGN must"
                " be 'auto', ROUTER_MODE 'native', ROUTER_WEIGHTS and TEACHER_CACHE None, SHARD"
                " False.",
            ),
        )

    def _check_quantization(self) -> None:
        kind = self.student_model.partition(":")[0]
        base = self.lora_rank and kind not in ("fresh", "llama", "layers", IN_MEMORY)
        loaded = self.teacher_url is None and self.teacher_model not in ("none", IN_MEMORY)
        for conflict, fix in (
            (not (loaded or base), "name a TEACHER_MODEL, or with LORA_RANK a STUDENT_MODEL"),
            (kind == "layers", f"STUDENT_MODEL {kind!r} needs unquantized weights"),
            (self.shard, "set SHARD to False"),
        ):
            _refuse((conflict, f"QUANTIZATION is {self.quantization!r}: {fix}, or set it to None."))

    def _check_generation(self, no_teacher: bool, cached: bool) -> None:
        names = " and ".join(n.upper() for n in ("on_policy", "teacher_text") if getattr(self, n))
        _refuse(
            (
                self.divergence == "distillm2" and not self.on_policy,
                "DIVERGENCE 'distillm2' contrasts text with the student's continuations: set"
                " ON_POLICY above 0; 1 makes a pair of each row.",
            ),
            (
                names and (no_teacher or (self.on_policy and self.alpha_kd == 0)),
                f"{names} needs a teacher (TEACHER_MODEL), and ON_POLICY an ALPHA_KD above 0: only"
                " the teacher scores what the student generates.",
            ),
            (
                names and (cached or self.align != "auto" or self.shard),
                f"{names} needs a live teacher with the student's tokenizer, unsharded: set"
                " TEACHER_CACHE to None, ALIGN to 'auto' and SHARD to False.",
            ),
            (
                self.teacher_text and self.teacher_url is not None,
                "TEACHER_TEXT needs a local teacher, and TEACHER_URL names a server: set one of"
                " them to its default.",
            ),
        )


def _refuse(*conflicts: tuple[object, str]) -> None:
    """Raise SettingsError with the message of the first pair whose condition is true."""
    for conflict, message in conflicts:
        if conflict:
            raise SettingsError(message)
