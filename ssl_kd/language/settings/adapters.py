"""Declare the settings of LoRA adapters, by the names of peft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ssl_kd.core.settings import Settings, SettingsError, setting


@dataclass(frozen=True)
class AdapterSettings(Settings):
    """Choose the adapters that are trained instead of all weights."""

    lora_rank: int = setting(
        0, "rank of the LoRA adapters that are trained; 0: train all weights", low=0
    )
    lora_alpha: float = setting(
        16.0, "LoRA alpha; the adapters are scaled by LORA_ALPHA / LORA_RANK", above=0
    )
    lora_dropout: float = setting(0.0, "dropout on the input of the adapters", low=0, below=1)
    lora_target_modules: str = setting(
        "all-linear",
        "layers with adapters: all-linear (not the output head) | names, as in q_proj,v_proj",
    )
    modules_to_save: str | None = setting(
        None,
        "layers that are trained in full beside the adapters, as copies that are saved with them:"
        " names, as in embed_tokens,lm_head; None: none",
    )
    use_rslora: bool = setting(False, "scale the adapters by LORA_ALPHA / sqrt(LORA_RANK)")
    use_dora: bool = setting(False, "also train the magnitude of each adapted weight (DoRA)")

    @property
    def lora_options(self) -> dict[str, Any]:
        """The keyword arguments of `add_lora`."""
        names = "lora_alpha lora_dropout lora_target_modules modules_to_save use_rslora use_dora"
        return {name: getattr(self, name) for name in names.split()}

    def check_together(self) -> None:
        """Raise SettingsError if an option of adapters has nothing to apply to."""
        super().check_together()
        for name, value in self.lora_options.items():
            if not self.lora_rank and name != "lora_alpha" and value != getattr(type(self), name):
                raise SettingsError(
                    f"{name.upper()} is {value!r}, but there are no adapters: set LORA_RANK above 0"
                )
        lists = (self.lora_target_modules, self.modules_to_save or "")
        adapted, copied = ({name.strip() for name in names.split(",")} for names in lists)
        if both := sorted(adapted & copied):
            raise SettingsError(
                f"LORA_TARGET_MODULES and MODULES_TO_SAVE both name {', '.join(both)}: name it once"
            )
