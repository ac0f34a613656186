"""A teacher behind an HTTP server as a source of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.evaluate.tokens import TokenScores, TokenValues
from ssl_kd.language.kept.given import LOWEST, as_cached
from ssl_kd.language.teacher_settings import TeacherSettings
from ssl_kd.losses.teacher_output import TopKTeacher
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.teachers.causal import CausalLM, load_tokenizer, n_ids
from ssl_kd.teachers.server import CompletionServer, PromptTopK

IN_FLIGHT = 16  # prompts at once: the server makes batches of them
ROUNDING = 1e-7  # of a sum of probabilities in float32


def served_lm(tokenizer_of: str, served_as: str | None) -> CausalLM:
    """A served teacher as a run knows it: a tokenizer and a name, and no model."""
    name = served_as or tokenizer_of
    return CausalLM(None, load_tokenizer(tokenizer_of), name, f"served {name}")


class ServedTeacher:
    """Asks a server about every document of a batch; answers as a cache of them would, to the bit.

    A document is a prompt of its own, whatever row it shares. The tokens are those of the text.

    Args:
        server: where it is.
        k: likeliest tokens at each position; all others are one more outcome.
        vocabulary: ids that its tokenizer has.
        device: where answers go.
        rounded: to what a cache of `topk` keeps; False for the one that writes it.
    """

    def __init__(
        self,
        server: CompletionServer,
        k: int,
        vocabulary: int,
        *,
        device: torch.device | str = "cpu",
        rounded: bool = True,
    ) -> None:
        self.server, self.k, self.vocabulary = server, min(k, vocabulary), vocabulary
        self.device, self._rounded = torch.device(device), rounded
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "teacher")
        self._ahead: dict[tuple[int, ...], Future[PromptTopK]] = {}

    @classmethod
    def of(
        cls,
        settings: TeacherSettings,
        block_size: int,
        tokenizer: Any,
        device: torch.device,
        **options: Any,
    ) -> ServedTeacher:
        """The teacher that the settings name, once its server was seen to have it.

        Args:
            settings: TEACHER_URL, its name there, and the tokens of an answer.
            block_size: tokens of a row.
            tokenizer: of the teacher.
            device: where answers go.
            **options: of the class.

        Raises:
            ServerFailed: the server is not there, or has not this model.
        """
        assert settings.teacher_url is not None
        name = settings.teacher_served_as or settings.teacher_model
        server = CompletionServer(settings.teacher_url, name)
        server.check(block_size)
        return cls(server, settings.kept[1], n_ids(tokenizer), device=device, **options)

    def __call__(self, batch: Batch, rows: Tensor) -> TopKTeacher:
        """Its k likeliest tokens at some positions of a batch.

        Args:
            batch: rows of tokens.
            rows: int64 `[n]`, ascending, into the flattened `[batch * token]` positions.

        Returns:
            On the device of `rows`, in float32.

        Raises:
            ServerFailed: see `CompletionServer.top_k`.
        """
        found = self.top_k_at(batch, rows)
        answer = _with_tail(found.tokens, found.log_probs, self.vocabulary)
        if self._rounded:
            answer = as_cached(answer)
        return TopKTeacher(*(x.to(rows.device) for x in vars(answer).values()))

    def top_k_at(self, batch: Batch, rows: Tensor) -> PromptTopK:
        """Return the server's answer at some positions of a batch, `[n, k]`, on the CPU."""
        answers = [
            (self._ahead.pop(tuple(prompt), None) or self._sent(prompt, row, first), wanted)
            for wanted, prompt, row, first in _prompts(batch, rows.cpu())
        ]
        parts = [[column[wanted] for column in found.result()] for found, wanted in answers]
        if not parts:
            tokens = torch.zeros(0, self.k, dtype=torch.int64)
            return PromptTopK(tokens, tokens.double(), tokens[:, 0].double())
        return PromptTopK(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def ask_ahead(self, batches: Sequence[Batch]) -> None:
        """Have the server answer about batches that will be wanted, while something else is done.

        What goes wrong is raised when they are wanted.
        """
        for batch in batches:
            rows, _ = next_token_targets(batch.input_ids, batch.counts)
            for _, prompt, row, first in _prompts(batch, rows.cpu()):
                if tuple(prompt) not in self._ahead:
                    self._ahead[tuple(prompt)] = self._sent(prompt, row, first)

    def _sent(self, prompt: list[int], row: int, first: int) -> Future[PromptTopK]:
        where = f"row {row} of the text"
        return self._pool.submit(self.server.top_k, prompt, self.k, self.vocabulary, where, first)

    def scores(self, blocks: Blocks, batch_size: int) -> TokenScores:
        """Score how well the teacher predicts the targets of blocks, as `judge_tokens` does."""
        scores = TokenScores()
        for start in range(0, len(blocks), batch_size):
            places = range(start, min(start + batch_size, len(blocks)))
            batch = blocks.batch(places)
            rows, targets = next_token_targets(batch.input_ids, batch.counts)
            found = self.top_k_at(batch, rows)
            correct = (found.tokens[:, 0] == targets).double()
            values = TokenValues(-found.own, found.log_probs[:, 0].exp().clamp(max=1), correct)
            scores.add([values], places, batch.characters)
        return scores


def _prompts(batch: Batch, rows: Tensor) -> Iterator[tuple[Tensor, list[int], int, int]]:
    """Each document that is asked about: which answers are wanted, its ids, its row and place.

    Answer i of a prompt is after its token i; the ids end with what the last position predicts.
    """
    ids, documents = batch.input_ids.cpu(), batch.documents.cpu()
    row, column = rows // ids.shape[1], rows % ids.shape[1]
    inside = documents[row, column].long() + row * (int(documents.max()) + 1)
    _, sizes = torch.unique_consecutive(inside, return_counts=True)
    ends = sizes.cumsum(0).tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        at, columns = int(row[begin]), column[begin:end]
        same = documents[at] == documents[at, columns[0]]
        first = int(same.nonzero()[0])
        prompt = ids[at, first : int(columns[-1]) + 2].tolist()
        yield columns - first, prompt, int(batch.rows[at]), first


def _with_tail(tokens: Tensor, log_probs: Tensor, vocabulary: int) -> TopKTeacher:
    """The mass of all other tokens: what is left of 1, where rounding leaves that to be known.

    It is at most that of as many tokens as the last one kept, and not below ROUNDING otherwise: a
    reverse KL would make an infinite fault of a tail that only rounding made 0.
    """
    masses, others = log_probs.exp(), vocabulary - tokens.shape[-1]
    tail = (1 - masses.sum(-1)).clamp(min=ROUNDING).minimum(others * masses[:, -1])
    return TopKTeacher(tokens, log_probs.clamp(min=LOWEST).float(), tail.log().float())
