"""The settings of the language mode: checked together, and moved over a run by SCHEDULE."""

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
    GIVEN,
    HEADING,
    INSTEAD,
    PER_PROCESS,
)
from ssl_kd.language.setting_groups import (
    LossSettings,
    RolloutSettings,
    RouterSettings,
    StudentSettings,
    TextSettings,
    TrainingSettings,
)
from ssl_kd.language.teacher_settings import TeacherSettings
from ssl_kd.settings import SettingsError
from ssl_kd.settings.import_paths import check_installed

DRY_STEPS = 5


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
        """DIVERGENCE of text, decided where it is `auto`."""
        if self.divergence != "auto":
            return "skew_kl" if self.is_contrastive else self.divergence
        return "forward_kl" if self.router_mode == "native" else "reverse_kl"

    @property
    def kind_on_policy(self) -> Any:
        """DIVERGENCE of what the student writes."""
        return "skew_reverse_kl" if self.is_contrastive else self.kind_of_divergence

    @property
    def teacher_placement(self) -> dict[str, bool]:
        """Where a teacher's weights are while it answers, as `at_work` takes it."""
        return {"offload": self.teacher_offload, "shard": self.shard}

    @property
    def learns_text(self) -> bool:
        """Whether there are rows that the student does not write."""
        return self.on_policy < 1 or self.is_contrastive

    def known(self) -> dict[str, Any]:
        """Return name in lower case -> value, LEARNING_RATE decided: what advice may change."""
        values = {name.lower(): value for name, value in self.to_dict().items()}
        return values | {"learning_rate": self.peak_lr}

    def of_cache(self) -> Self:
        """Return the settings with ROUTER_MODE auto as native beside a cache: no router learns."""
        if self.teacher_cache is None or self.router_mode != "auto":
            return self
        return self.replace(router_mode="native")

    def dry(self) -> Self:
        """Return these settings with five steps that try everything once."""
        trained = self.to_train
        return self.replace(
            teacher_model=f"train:{trained[0]}:{DRY_STEPS}" if trained else self.teacher_model,
            max_steps=DRY_STEPS,
            epochs=None,
            eval_every=DRY_STEPS,
            checkpoint_every=DRY_STEPS,
            log_every=1,
            eval_rows=min(self.eval_rows, 8),
            generations=min(self.generations, 2),
        )

    def check_packages(self) -> None:
        """Raise MissingPackage where what these settings need is not installed, before any work."""
        texts = (self.data_path, self.eval_path or "")
        needed = {
            "transformers": True,
            "peft": self.lora_rank > 0,
            "datasets": any(text.startswith("hf:") for text in texts),
            "aiohttp": self.teacher_url is not None,
        }
        check_installed([name for name, needs in needed.items() if needs], "llm")

    def check_together(self) -> None:
        """Raise SettingsError where settings that are fine alone do not fit together."""
        super().check_together()
        if self.teacher_model == "none" and self.alpha_ce == 0:
            raise SettingsError("TEACHER_MODEL is 'none', so ALPHA_CE must be above 0.")
        if self.teacher_model == "none" and self.teacher_cache is not None:
            raise SettingsError("TEACHER_CACHE needs the TEACHER_MODEL that it was made by.")
        live = self.router_mode == "sar" or self.align != "auto"
        if self.teacher_cache is not None and live:
            way = "Set TEACHER_CACHE to None, or ROUTER_MODE to 'ka' and ALIGN to 'auto'"
            raise SettingsError(
                "TEACHER_CACHE holds the teacher's distributions alone: a router that learns "
                f"(ROUTER_MODE 'sar') and ALIGN need the teacher itself. {way}."
            )
        if self.router_mode == "sar" and self.align != "auto":
            raise SettingsError(
                "ROUTER_MODE 'sar' compares teacher and student token by token, so ALIGN must be"
                " 'auto' and the tokenizers the same; 'all' and 'ka' go with any ALIGN."
            )
        if self.legacy_clamp is not None and self.teacher_cache is not None:
            raise SettingsError(
                "LEGACY_CLAMP holds the logits of teacher and student, as older scripts did:"
                " TEACHER_CACHE must be None."
            )
        if self.teacher_cache and any(move.name == "temperature" for move in self.moves):
            raise SettingsError(
                "SCHEDULE moves TEMPERATURE, but TEACHER_CACHE holds answers at one temperature:"
                " leave one of them."
            )
        if self.shard and (self.baseline or self.teacher_offload):
            raise SettingsError(
                "SHARD keeps pieces of the models on each GPU: BASELINE (a second student) and"
                " TEACHER_OFFLOAD do not go with it, so set them to False."
            )
        if self.shard and (self.router_mode != "native" or self.router_weights is not None):
            raise SettingsError(
                "SHARD takes a teacher with the experts and router that it came with: set"
                " ROUTER_MODE to 'native' and ROUTER_WEIGHTS to None."
            )
        if self.teacher_url is not None:
            self._check_served(self.teacher_url)
        if len(self.teacher_names) > 1:
            self._check_several()
        self._check_features()
        self._check_quantization()
        self._check_on_policy()

    def check_images(self, *texts: str | None) -> None:
        """Raise SettingsError where these settings cannot learn from text with images.

        Args:
            *texts: where the first image of each text is; None where it has none.
        """
        first = next((text for text in texts if text is not None), None)
        fresh = self.student_model.startswith(("fresh:", "llama:"))
        text_alone = f"STUDENT_MODEL is {self.student_model!r}, which reads text alone"
        for unfit, why, way in (
            (self.to_train, "TEACHER_MODEL is 'train'", "name a model of images"),
            (len(self.teacher_names) > 1, "TEACHER_MODEL names several", "name one"),
            (fresh, text_alone, "take layers:N, or a folder"),
            (self.align != "auto", f"ALIGN is {self.align!r}", "set it to 'auto'"),
            (self.teacher_url, "TEACHER_URL is asked about text", "name the teacher's folder"),
            (self.on_policy, "ON_POLICY continues text", "set it to 0"),
            (self.teacher_text, "TEACHER_TEXT continues text", "set it to 0"),
            (self.shard, "SHARD is True", "set it to False"),
        ):
            if first is not None and unfit:
                raise SettingsError(f"the text holds images, first in {first}, but {why}: {way}.")

    def _check_served(self, url: str) -> None:
        from ssl_kd.teachers.http_client import check_url  # --help does without torch

        try:
            check_url(url)
        except InputError as error:
            raise SettingsError(f"{error}.") from error
        if self.to_train or self.teacher_model == "none":
            raise SettingsError(
                "TEACHER_URL needs the tokenizer of the teacher that is served, and TEACHER_MODEL"
                f" is {self.teacher_model!r}: name its folder, or its name on the Hub."
            )
        if self.temperature != 1:
            raise SettingsError(
                f"TEMPERATURE is {self.temperature:g}, and a server gives the likeliest tokens at"
                " temperature 1, from which those of another one do not follow: set it to 1."
            )
        if self.student_model.startswith("layers:"):
            raise SettingsError(
                f"STUDENT_MODEL {self.student_model!r} is cut from the teacher, whose weights are"
                " on a server (TEACHER_URL): name a folder, or new weights as llama:LAYERSxDIM."
            )
        native = self.router_mode in ("native", "auto") and self.router_weights is None
        if self.align != "auto" or not native or self.legacy_clamp is not None:
            raise SettingsError(
                "TEACHER_URL gives a teacher's likeliest tokens alone: ALIGN must be 'auto',"
                " ROUTER_MODE 'native', and ROUTER_WEIGHTS and LEGACY_CLAMP None."
            )

    def _check_several(self) -> None:
        names = self.teacher_names
        alone = [name for name in names if name.partition(":")[0] in ("train", "none")]
        if alone or not all(names):
            raise SettingsError(
                f"TEACHER_MODEL is {self.teacher_model!r}: expected folders, or names on the Hub,"
                " separated by commas ('train' and 'none' stand alone)."
            )
        native = self.router_mode == "native" and self.router_weights is None
        apart = self.teacher_cache is not None or self.shard
        if self.align != "auto" or not native or apart:
            raise SettingsError(
                "Several teachers are asked as they came, on the student's tokens: ALIGN must be"
                " 'auto', ROUTER_MODE 'native', ROUTER_WEIGHTS and TEACHER_CACHE None, SHARD False."
            )

    def _check_features(self) -> None:
        """What compares layers needs the teacher itself, at the student's tokens."""
        if not self.alpha_hidden:
            return
        none, routed = self.teacher_model == "none", self.router_mode not in ("native", "auto")
        for unfit, why, way in (
            (none, "TEACHER_MODEL is 'none'", "name a teacher"),
            (self.teacher_url, "the teacher is on a server (TEACHER_URL)", "name its folder"),
            (len(self.teacher_names) > 1, "TEACHER_MODEL names several", "name one"),
            (self.teacher_cache, "TEACHER_CACHE holds distributions alone", "set it to None"),
            (self.align != "auto", f"ALIGN is {self.align!r}", "set it to 'auto'"),
            (routed, f"ROUTER_MODE is {self.router_mode!r}", "set it to 'native'"),
            (self.router_weights, "ROUTER_WEIGHTS is another router's", "set it to None"),
        ):
            if unfit:
                raise SettingsError(
                    "ALPHA_HIDDEN compares layers of the student with those of a live teacher that"
                    f" reads the same tokens, unchanged, but {why}: {way}, or ALPHA_HIDDEN to 0."
                )

    def _check_quantization(self) -> None:
        """Weights in fewer bits are loaded for one device, and stay as they are."""
        kind = self.student_model.partition(":")[0]
        base = self.lora_rank and kind not in ("fresh", "llama", "layers", GIVEN)
        loaded = self.teacher_url is None and self.teacher_model not in ("none", GIVEN)
        for unfit, way in (
            (not (loaded or base), "name a TEACHER_MODEL, or with LORA_RANK a STUDENT_MODEL"),
            (kind == "layers", f"STUDENT_MODEL {kind!r} cuts whole weights"),
            (loaded and self.teacher_offload, "set TEACHER_OFFLOAD to False"),
            (self.shard, "set SHARD to False"),
        ):
            if self.quantization is not None and unfit:
                raise SettingsError(
                    f"QUANTIZATION is {self.quantization!r}: {way}, or set it to None."
                )

    def _check_on_policy(self) -> None:
        if self.is_contrastive and not self.on_policy:
            raise SettingsError(
                "DIVERGENCE 'distillm2' contrasts text with what the student writes: set ON_POLICY"
                " above 0, 1 for a pair of each row."
            )
        names = [name for name in ("on_policy", "teacher_text") if getattr(self, name)]
        if not names:
            return
        who = " and ".join(map(str.upper, names))
        if self.teacher_model == "none" or (self.on_policy and self.alpha_kd == 0):
            raise SettingsError(
                f"{who} needs a teacher (TEACHER_MODEL), and ON_POLICY an ALPHA_KD above 0: the"
                " student learns from its own text by the teacher's judgement alone."
            )
        if self.teacher_cache is not None or self.align != "auto" or self.shard:
            raise SettingsError(
                f"{who} needs a teacher at work, with the student's tokenizer, and whole models:"
                " set TEACHER_CACHE to None, ALIGN to 'auto' and SHARD to False."
            )
        if self.teacher_text and self.teacher_url is not None:
            raise SettingsError(
                "TEACHER_TEXT is written by a teacher that is here, and TEACHER_URL names a server:"
                " set one of them to its default."
            )
