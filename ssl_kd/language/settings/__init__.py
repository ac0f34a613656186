"""The settings of the language mode in one class, and the checks between their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.settings.import_paths import check_installed
from ssl_kd.language.losses.divergences import selects_by_student
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

    def check_together(self) -> None:
        """Raise SettingsError if settings that are valid alone contradict each other."""
        super().check_together()
        no_teacher, cached = self.teacher_model == "none", self.teacher_cache is not None
        template = self.teacher_prompt_template
        _refuse(
            (
                self.push_to_hub != (self.hub_model_id is not None),
                f"PUSH_TO_HUB is {self.push_to_hub} and HUB_MODEL_ID is {self.hub_model_id!r}: set"
                " both, or neither.",
            ),
            (
                no_teacher and self.alpha_ce == 0,
                "TEACHER_MODEL is 'none' and ALPHA_CE is 0, so there is no loss: set ALPHA_CE above"
                " 0, or name a teacher.",
            ),
            (
                no_teacher and cached,
                f"TEACHER_CACHE is {self.teacher_cache!r}, but TEACHER_MODEL is 'none': set"
                " TEACHER_MODEL to the teacher whose answers the cache holds.",
            ),
            (
                cached and (self.router_mode in ("sar", "ka") or self.align != "auto"),
                f"TEACHER_CACHE is set, but ROUTER_MODE {self.router_mode!r} with ALIGN"
                f" {self.align!r} needs a live teacher: set TEACHER_CACHE to None, or ROUTER_MODE"
                " to 'all' or 'native' and ALIGN to 'auto'.",
            ),
            (
                self.router_mode == "sar" and self.align != "auto",
                f"ALIGN is {self.align!r}, but ROUTER_MODE 'sar' needs teacher and student to have"
                " the same tokenizer: set ROUTER_MODE to 'all' or 'ka', or ALIGN to 'auto'.",
            ),
            (
                self.legacy_clamp is not None and cached,
                "LEGACY_CLAMP is set, but it needs the logits of a live teacher: set TEACHER_CACHE"
                " or LEGACY_CLAMP to None.",
            ),
            (
                any(part not in template for part in ("{prompt}", "{privileged_context}")),
                f"TEACHER_PROMPT_TEMPLATE is {template!r}: add {{prompt}}, {{privileged_context}}.",
            ),
        )
        if self.teacher_model == "self":
            self._check_defaults(
                "TEACHER_MODEL is 'self', which is the student in this process",
                *("teacher_cache", "teacher_url", "teacher_text"),
                *("align", "router_mode", "router_weights"),
            )
        if self.teacher_url is not None or self.rollout_url is not None:
            self._check_urls()
        if self.teacher_url is not None:
            self._check_served()
        if len(self.teacher_names) > 1 or self.teacher_field:
            self._check_several()
        if self.quantization is not None:
            self._check_quantization()
        self._check_generation(no_teacher, cached)

    def check_images(self, *first_images: str | None) -> None:
        """Raise SettingsError if the text holds images and these settings cannot use them.

        Args:
            *first_images: for each text, the place of its first image; None without images.
        """
        first = next((image for image in first_images if image is not None), None)
        if first is None:
            return
        fresh = self.student_model.startswith(("fresh:", "llama:"))
        text_only = f"STUDENT_MODEL is {self.student_model!r}, which reads only text"
        for conflict, reason, fix in (
            (self.to_train, "TEACHER_MODEL is 'train'", "name a model that reads images"),
            (self.teacher_model == "self", "TEACHER_MODEL is 'self'", "name a model"),
            (len(self.teacher_names) > 1, "TEACHER_MODEL names several", "name one"),
            (fresh, text_only, "set it to layers:N, or to the folder of a model"),
            (self.align != "auto", f"ALIGN is {self.align!r}", "set it to 'auto'"),
            (self.teacher_url, "TEACHER_URL supports only text", "name the teacher's folder"),
            (self.on_policy, "ON_POLICY supports only text", "set it to 0"),
            (self.teacher_text, "TEACHER_TEXT supports only text", "set it to 0"),
            (self.student_text, "STUDENT_TEXT supports only text", "set it to 0"),
        ):
            _refuse((conflict, f"the text holds images, first in {first}, but {reason}: {fix}."))

    def _check_urls(self) -> None:
        from ssl_kd.language.teachers.http_client import check_url  # late: --help needs no torch

        try:
            for role in ("TEACHER", "ROLLOUT"):
                check_url(getattr(self, f"{role.lower()}_url") or "http://none", role)
        except InputError as error:
            raise SettingsError(f"{error}.") from error

    def _check_defaults(self, reason: str, *names: str) -> None:
        """Raise SettingsError for the first of these settings that has not its default."""
        for name in names:
            value, default = getattr(self, name), getattr(type(self), name)
            setting = name.upper()
            message = f"{setting} is {value!r}, but {reason}: set {setting} to {default!r}."
            _refuse((value != default, message))

    def _check_served(self) -> None:
        _refuse(
            (
                self.to_train or self.teacher_model == "none",
                f"TEACHER_MODEL is {self.teacher_model!r}, but TEACHER_URL needs the tokenizer of"
                " the served teacher: set TEACHER_MODEL to the teacher's folder or Hub name.",
            ),
            (
                self.temperature != 1,
                f"TEMPERATURE is {self.temperature:g}, but the server at TEACHER_URL returns"
                " probabilities at temperature 1 only: set TEMPERATURE to 1.",
            ),
            (
                self.student_model.startswith("layers:"),
                f"STUDENT_MODEL is {self.student_model!r}, which is cut from the teacher, but"
                " TEACHER_URL runs the teacher on a server: set STUDENT_MODEL to a folder, or to"
                " llama:LAYERSxDIM.",
            ),
            (
                selects_by_student(self.divergence),
                f"DIVERGENCE is {self.divergence!r}, which needs the teacher's probabilities of the"
                " student's likeliest tokens, but TEACHER_URL provides only the teacher's own: set"
                " DIVERGENCE to 'reverse_kl'.",
            ),
        )
        router = () if self.router_mode == "auto" else ("router_mode",)  # native for a server
        self._check_defaults(
            "the server at TEACHER_URL returns only the likeliest tokens of an unchanged teacher",
            *("align", *router, "router_weights", "legacy_clamp"),
        )

    def _check_several(self) -> None:
        names, tags = self.teacher_names, self.teacher_tags
        single = any(name.partition(":")[0] in ("train", "none", "") for name in names)
        plain = all((*tags, *names)) and len({*tags}) == len(names) > 1 and not self.teacher_shares
        _refuse(
            (
                tags and (self.teacher_url or self.teacher_text or not plain),
                f"TEACHER_FIELD is set, and TEACHER_MODEL is {self.teacher_model!r}: expected local"
                " ones, each with its own tag and no weight: 'math=A, code=B', and TEACHER_TEXT 0.",
            ),
            (
                not tags and all("=" in name and not Path(name).is_dir() for name in names),
                f"TEACHER_MODEL is {self.teacher_model!r}, but TEACHER_FIELD is None: set it to the"
                " field of the records that holds these tags.",
            ),
            (
                single,
                f"TEACHER_MODEL is {self.teacher_model!r}: expected folders, or names on the Hub,"
                " separated by commas ('train' and 'none' cannot be combined).",
            ),
        )
        self._check_defaults(
            "TEACHER_MODEL names several teachers, which run live, unchanged and with the student's"
            " tokenizer",
            *("align", "router_mode", "router_weights", "teacher_cache"),
        )

    def _check_quantization(self) -> None:
        kind = self.student_model.partition(":")[0]
        base = self.lora_rank and kind not in ("fresh", "llama", "layers", IN_MEMORY)
        loaded = self.teacher_url is None and self.teacher_model not in ("none", "self", IN_MEMORY)
        for conflict, fix in (
            (
                not (loaded or (base and self.quantization == "nf4")),
                "but no frozen model is loaded: name a TEACHER_MODEL, or a STUDENT_MODEL with"
                " LORA_RANK above 0",
            ),
            (kind == "layers", "but STUDENT_MODEL 'layers:N' needs unquantized weights: change it"),
        ):
            _refuse((conflict, f"QUANTIZATION is {self.quantization!r}, {fix}, or set it to None."))

    def _check_generation(self, no_teacher: bool, cached: bool) -> None:
        kinds = ("on_policy", "teacher_text", "student_text")
        names = " and ".join(kind.upper() for kind in kinds if getattr(self, kind))
        scored = "STUDENT_TEXT" if self.student_text else "ON_POLICY"
        built = self.student_model.startswith(("fresh:", "layers:", "llama:"))
        _refuse(
            (
                self.rollout_url and (built or not self.on_policy),
                f"ROLLOUT_URL is set, but STUDENT_MODEL is {self.student_model!r} and ON_POLICY"
                f" {self.on_policy:g}: expected a saved model, which a server loads, and above 0.",
            ),
            (
                self.rollout_url and self.modules_to_save,
                f"MODULES_TO_SAVE is {self.modules_to_save!r}, but the vLLM server at ROLLOUT_URL"
                " loads only adapters: set one of them to None.",
            ),
            (
                self.divergence == "distillm2" and not self.on_policy,
                "DIVERGENCE 'distillm2' contrasts text with the student's continuations: set"
                " ON_POLICY above 0; 1 makes a pair of each row.",
            ),
            (
                self.student_text and names != "STUDENT_TEXT",
                f"{names} are above 0, but STUDENT_TEXT cannot be combined with other generated"
                " text: set one of them to 0 (train on the teacher's text in an earlier run).",
            ),
            (
                names and (no_teacher or (names != "TEACHER_TEXT" and self.alpha_kd == 0)),
                f"{names} is above 0, which needs a teacher; only it scores generated text: name a"
                f" TEACHER_MODEL, and for {scored} set ALPHA_KD above 0.",
            ),
            (
                self.student_text and self.align != "auto",
                f"STUDENT_TEXT is above 0, but ALIGN is {self.align!r}: set ALIGN to 'auto', and"
                " name a teacher with the student's tokenizer.",
            ),
            (
                names and not self.student_text and (cached or self.align != "auto"),
                f"{names} is above 0, which needs a live teacher with the student's tokenizer: set"
                " TEACHER_CACHE to None and ALIGN to 'auto'.",
            ),
            (
                not self.learn_thoughts and (names or self.align != "auto"),
                f"LEARN_THOUGHTS is False, but {names or 'ALIGN'} is set: choose one of them.",
            ),
            (
                self.teacher_text and self.teacher_url is not None,
                "TEACHER_TEXT is above 0, which needs a local teacher, but TEACHER_URL is set: set"
                " TEACHER_TEXT to 0 or TEACHER_URL to None.",
            ),
        )


def _refuse(*conflicts: tuple[object, str]) -> None:
    """Raise SettingsError with the message of the first (condition, message) pair that is true."""
    for conflict, message in conflicts:
        if conflict:
            raise SettingsError(message)
