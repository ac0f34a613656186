"""The settings of a teacher: which one, where it answers, and what is kept of its answers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from ssl_kd.settings import Settings, SettingsError, setting

TRAINED = "4x192", 800  # LAYERSxDIM and steps of TEACHER_MODEL train
KEPT_TOKENS, SERVED_TOKENS = 128, 20  # at each position of a cache, and in an answer of a server
MOST_TOKENS = 65_535


@dataclass(frozen=True)
class TeacherSettings(Settings):
    """Which teacher answers, where, and what a cache keeps of its answers."""

    teacher_model: str = setting(
        "train",
        "folder written by save_pretrained, or name on the Hugging Face Hub | train, or"
        " train:LAYERSxDIM:STEPS (a small one is trained on the data first; 4x192 for 800 steps) |"
        " none (no teacher: cross-entropy alone)",
        "Several with the same tokenizer, separated by commas: the mean of their divergences; with"
        ' weights, made to sum to 1, as in "0.7*A, 0.3*B".',
        section="Teacher",
    )
    teacher_cache: str | None = setting(
        None,
        "folder that scripts/cache_teacher.py wrote; None: the teacher runs live",
        "With a cache, the teacher takes no memory in training.",
    )
    teacher_url: str | None = setting(
        None,
        "a server that answers for the teacher, such as http://host:8000/v1 of vLLM; None: it runs"
        " here",
        "TEACHER_MODEL is then where its tokenizer is. A key is taken from the environment variable"
        " TEACHER_API_KEY.",
    )
    teacher_served_as: str | None = setting(
        None, "name that the server knows the teacher by; None: TEACHER_MODEL"
    )
    cache_method: str = setting(
        "sample",
        "what cache_teacher.py keeps: sample (tokens drawn from the teacher: unbiased, for"
        " forward_kl) | topk (its likeliest tokens and the mass of the rest: for every divergence)"
        " | hidden (what its output head gets, and the head once: exact, for every divergence and"
        " temperature); sample:K and topk:K keep K tokens at each position, 128 without a K",
        "A server gives topk alone, 20 tokens without a K: vLLM as many as its --max-logprobs.",
        choices=("sample", "topk", "hidden"),
        forms=(("sample:K", r"sample:[1-9]\d*"), ("topk:K", r"topk:[1-9]\d*")),
    )
    quantization: str | None = setting(
        None,
        "keep the linear layers of a frozen teacher, and of the base that LORA_RANK trains adapters"
        " of (QLoRA), in fewer bits, by bitsandbytes: nf4 (4 bits); None: in MODEL_DTYPE",
        "For a GPU's memory: on a CPU neither time nor memory is saved.",
        choices=("nf4",),
    )
    trust_remote_code: bool = setting(
        False, "run Python files that come with a model, where it needs them; read them first"
    )
    teacher_offload: bool = setting(
        False, "keep the teacher in the host's memory between forward passes"
    )
    force_recompute: bool = setting(
        False, "ask the teacher about everything anew, whatever TEACHER_CACHE holds"
    )
    rebuild_damaged: bool = setting(False, "write the damaged files of a teacher's cache again")

    @property
    def kept(self) -> tuple[str, int]:
        """What a cache keeps (`sample`, `topk` or `hidden`), and how many tokens at a position."""
        method, _, k = self.cache_method.partition(":")
        if self.teacher_url is not None:  # a server gives its likeliest tokens, and no others
            return "topk", int(k) if k and method == "topk" else SERVED_TOKENS
        return method, int(k or KEPT_TOKENS)

    @property
    def to_train(self) -> tuple[str, int] | None:
        """LAYERSxDIM and steps of a teacher that is trained here; None where it is not."""
        if self.teacher_model == "train":
            return TRAINED
        found = re.fullmatch(r"train:(\d+x\d+):([1-9]\d*)", self.teacher_model)
        return found and (found[1], int(found[2]))

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Those of TEACHER_MODEL."""
        return tuple(name for _, name in self._parts())

    @property
    def teacher_shares(self) -> tuple[float, ...] | None:
        """The weights in TEACHER_MODEL; None where they are all alike."""
        given = [weight for weight, _ in self._parts()]
        return None if set(given) == {""} else tuple(map(float, given))

    def _parts(self) -> list[tuple[str, str]]:
        """Weight, or nothing, and name of each teacher: a folder's own name may have commas."""
        name = self.teacher_model
        if self.teacher_url is not None or "," not in name or Path(name).expanduser().is_dir():
            return [("", name)]
        parts = [part.rpartition("*") for part in name.split(",")]
        return [(weight.strip(), name.strip()) for weight, _, name in parts]

    def check_together(self) -> None:
        """Raise SettingsError where the teachers' weights, or the tokens of a cache, cannot be."""
        super().check_together()
        if self.teacher_model.startswith("train:") and self.to_train is None:
            raise SettingsError(
                f"TEACHER_MODEL is {self.teacher_model!r}: expected train:LAYERSxDIM:STEPS, as in"
                " 'train:4x192:800'."
            )
        try:
            fits = all(0 < share < math.inf for share in self.teacher_shares or ())
        except ValueError:
            fits = False
        if not fits:
            raise SettingsError(
                f"TEACHER_MODEL is {self.teacher_model!r}: expected a weight above 0 for each"
                " teacher, as in '0.7*A, 0.3*B', or for none."
            )
        if self.kept[1] > MOST_TOKENS:
            raise SettingsError(
                f"CACHE_METHOD is {self.cache_method!r}: expected at most {MOST_TOKENS} tokens."
            )
