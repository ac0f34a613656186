"""In the place of vLLM: the calls of its 0.32 that rollouts make, by a model of transformers.

It shows that weights, rooms, seeds and ends arrive there, and nothing about vLLM itself.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from weakref import finalize

import torch


@dataclass
class SamplingParams:
    temperature: float
    top_p: float
    stop_token_ids: list
    ignore_eos: bool
    allowed_token_ids: list | None
    detokenize: bool
    max_tokens: int
    seed: int | None = None
    prompt_logprobs: int | None = None


class LLM:
    fault = None  # called with the names and weights that are sent: what arrives

    def __init__(self, folder, **options):
        from transformers import AutoConfig, AutoModelForCausalLM

        if options["max_model_len"] > 10_000:
            raise ValueError("max_model_len is too large")
        config = AutoConfig.from_pretrained(folder)
        assert options["load_format"] == "dummy" and config.architectures
        torch.manual_seed(0)  # as vLLM does
        self.model = AutoModelForCausalLM.from_config(config).eval()
        self.options, self.asked = options, []
        client = SimpleNamespace()
        client._finalizer = finalize(self, int)
        self.llm_engine = SimpleNamespace(engine_core=client)

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        weights = dict(kwargs["weights_iterator"])
        if LLM.fault is not None:
            weights = LLM.fault(weights)
        self.model.load_state_dict(weights, strict=LLM.fault is None)

    def apply_model(self, function):
        return [function(self.model)]

    @torch.no_grad()
    def generate(self, prompts, sampling_params, use_tqdm):
        assert len(prompts) == len(sampling_params)
        self.asked.append((prompts, sampling_params))
        pairs = zip(prompts, sampling_params, strict=True)
        return [self._answer(prompt["prompt_token_ids"], asked) for prompt, asked in pairs]

    def _answer(self, prompt, asked):
        assert len(prompt) + asked.max_tokens <= self.options["max_model_len"]
        log_p = self.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        own = [{t: SimpleNamespace(logprob=float(log_p[i, t]))} for i, t in enumerate(prompt[1:])]
        new, dice = [], torch.Generator().manual_seed(asked.seed or 0)
        while len(new) < asked.max_tokens and not {*new[-1:]} & {*asked.stop_token_ids}:
            logits = self.model(torch.tensor([[*prompt, *new]])).logits[0, -1]
            if asked.allowed_token_ids is not None:
                logits = logits[asked.allowed_token_ids]  # these are the first
            draw = torch.multinomial(logits.softmax(-1), 1, generator=dice)
            new.append(int(draw if asked.temperature else logits.argmax()))
        said = SimpleNamespace(token_ids=tuple(new))
        return SimpleNamespace(outputs=[said], prompt_logprobs=[None, *own])


MODULE = SimpleNamespace(
    __version__="stand-in", __spec__="there", LLM=LLM, SamplingParams=SamplingParams
)
