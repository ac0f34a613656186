"""An HTTP server of a tiny model with the responses of vLLM 0.32, and injected faults."""

import copy
import json
import math
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
import torch

from ssl_kd.language.rollouts import Sampler
from tests.local_server import LocalServer


class Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        served = self.server
        model = {"id": served.name, "object": "model", "owned_by": "vllm", "root": served.name}
        model |= {"parent": None, "max_model_len": served.room, "permission": []}
        self.answer({"object": "list", "data": [model]})

    def do_POST(self):
        served = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with served.lock:
            served.asked.append(asked | {"authorization": self.headers.get("Authorization")})
            number = len(served.asked) - 1
        if served.fault is not None and served.fault(self, asked, number):
            return
        if "model" not in asked:
            return self.answer(served.load(**asked))
        if asked["model"] not in (served.name, None):
            words = f"The model `{asked['model']}` does not exist. Valid aliases: {served.name}."
            return self.refuse(words, 404)
        try:
            self.answer(json.dumps(served.completion(asked), allow_nan=False).encode())
        except ValueError as error:  # NaN in JSON: vLLM responds with the error of the json module
            self.refuse(str(error), 400)

    def refuse(self, words, code):
        kind = {400: "BadRequestError", 404: "NotFoundError"}[code]
        self.answer({"error": {"message": words, "type": kind, "param": None, "code": code}}, code)

    def answer(self, content, status=200, headers=()):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(LocalServer):
    """Serves a model with the fields, their order, and the errors of vLLM 0.32.

    Args:
        model: a causal LM of transformers.
        name: model name in requests.
        most: --max-logprobs.

    Attributes:
        asked: the bodies of all requests.
        fault: `fault(handler, body, index)` is called before each completion, and returns true if
            it has sent a response.
        change: maps the logits `[token, vocab]` of a prompt to those that are served.
    """

    def __init__(self, model, name="teacher", most=1000, room=4096, tokenizer=None):
        super().__init__(Handler)
        self.model, self.name, self.most, self.room, self.base = model, name, most, room, model
        self.asked, self.fault, self.change = [], None, lambda logits: logits
        self.lock = threading.Lock()
        self.text = str if tokenizer is None else lambda token: tokenizer.decode([token])

    @property
    def url(self):
        return f"{super().url}/v1"

    @torch.no_grad()
    def entries(self, prompt, k):
        logits = self.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
        log_p = self.change(logits).log_softmax(-1)
        found = [None]
        for row, own in zip(log_p[:-1], prompt[1:], strict=True):
            values, tokens = row.topk(min(k, len(row)))
            # The prompt's own token first, whatever its rank; then the k likeliest tokens.
            rank = int((row > row[own]).sum()) + 1
            entry = {str(own): {"logprob": float(row[own]), "rank": rank}}
            for at, (value, token) in enumerate(zip(values, tokens, strict=True), 1):
                entry.setdefault(str(int(token)), {"logprob": float(value), "rank": at})
            for token, fields in entry.items():
                fields["decoded_token"] = self.text(int(token))
                if fields["logprob"] == -math.inf:
                    fields["logprob"] = -9999.0
            found.append(entry)
        return found

    def load(self, lora_name=None, lora_path=None, method=None, kwargs=None):
        if lora_path is None:
            self.model = self.model.from_pretrained(kwargs["weights_path"])
            return {"results": [None]}
        peft = pytest.importorskip("peft")
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(self.base), lora_path)
        self.model, self.name = adapted.merge_and_unload().eval(), lora_name
        return b"Success"

    def continuation(self, asked):
        draw = Sampler(self.model, asked["stop_token_ids"], temperature=asked["temperature"])
        with self.lock:
            (tokens,) = draw([asked["prompt"]], [asked["max_tokens"]], [asked["seed"]])
        entries = self.entries([*asked["prompt"], *tokens], 1)[-len(tokens) :]
        values = [e[str(token)]["logprob"] for e, token in zip(entries, tokens, strict=True)]
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": values}}
        return {"model": self.name, "choices": [choice]}

    def completion(self, asked):
        if "prompt_logprobs" not in asked:
            return self.continuation(asked)
        prompts = asked["prompt"] if isinstance(asked["prompt"][0], list) else [asked["prompt"]]
        k, vocabulary = asked["prompt_logprobs"], self.model.config.vocab_size
        if k > self.most:
            raise ValueError(
                f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.most} "
                f"(parameter=prompt_logprobs, value={k})"
            )
        if beyond := [i for prompt in prompts for i in prompt if i >= vocabulary]:
            raise ValueError(f"Token id {beyond[0]} is out of vocabulary")
        fields = {"text": "x", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        fields |= {"token_ids": None, "prompt_token_ids": None, "routed_experts": None}
        found = [self.entries(prompt, k) for prompt in prompts]
        choices = [{"index": i, **fields, "prompt_logprobs": e} for i, e in enumerate(found)]
        if asked.get("return_token_ids"):
            choices = [c | {"prompt_token_ids": p} for c, p in zip(choices, prompts, strict=True)]
        usage = {"prompt_tokens": sum(map(len, found)), "completion_tokens": len(found)}
        answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": self.name}
        return answer | {"choices": choices, "usage": usage}
