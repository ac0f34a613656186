"""Use a teacher that runs on an HTTP server (TEACHER_URL)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.language.evaluate.tokens import TokenScores, TokenValues
from ssl_kd.language.losses.teacher_output import TeacherOutput, TopKTeacher
from ssl_kd.language.losses.token_distillation import next_token_targets
from ssl_kd.language.models.causal import CausalLM, load_tokenizer, n_ids
from ssl_kd.language.settings.groups import TeacherSettings
from ssl_kd.language.teachers.base import Rows, Scores, Teacher, TeacherContext
from ssl_kd.language.teachers.cache_methods import LOWEST, as_cached
from ssl_kd.language.teachers.server import CompletionServer, PromptTopK
from ssl_kd.language.text.blocks import Batch, Blocks

if TYPE_CHECKING:
    from ssl_kd.language.evaluate.judge import LanguageJudge

CONCURRENT_PROMPTS = 16  # which the server batches
ROUNDING = 1e-7  # of a sum of probabilities in float32


def served_lm(tokenizer_of: str, served_as: str | None) -> CausalLM:
    """Return the tokenizer and the name of a served teacher as a `CausalLM` without a model."""
    name = served_as or tokenizer_of
    return CausalLM(None, load_tokenizer(tokenizer_of), name, f"served {name}")


class ServedTeacher:
    """Return a server's answers to a batch; each document of the batch is a prompt.

    The `k` most likely tokens are returned, and all others are one more outcome. `rounded` answers
    are bit-identical to those of a `topk` cache; False writes that cache.
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
        self.server = server
        self.k = min(k, vocabulary)
        self.vocabulary = vocabulary
        self.device, self._rounded = torch.device(device), rounded
        self._pool = ThreadPoolExecutor(CONCURRENT_PROMPTS, "teacher")
        self._prefetched: dict[tuple[int, ...], Future[PromptTopK]] = {}

    @classmethod
    def of(
        cls,
        teacher: TeacherSettings,
        block_size: int,
        tokenizer: Any,
        device: torch.device,
        **options: Any,
    ) -> ServedTeacher:
        """Return the teacher at TEACHER_URL, or raise ServerFailed if it does not respond."""
        assert teacher.teacher_url is not None
        name = teacher.teacher_served_as or teacher.teacher_model
        server = CompletionServer(teacher.teacher_url, name)
        server.check(block_size)
        return cls(server, teacher.cache_spec[1], n_ids(tokenizer), device=device, **options)

    def __call__(self, batch: Batch, rows: Tensor) -> TopKTeacher:
        """Return the k most likely tokens at ascending positions, or raise ServerFailed."""
        top_k = self.top_k_at(batch, rows)
        answer = _with_tail(top_k.tokens, top_k.log_probs, self.vocabulary)
        if self._rounded:
            answer = as_cached(answer)
        return TopKTeacher(*(x.to(rows.device) for x in vars(answer).values()))

    def top_k_at(self, batch: Batch, rows: Tensor) -> PromptTopK:
        """Return the server's answer at some positions of a batch, `[n, k]`, on the CPU."""
        answers = [
            (self._prefetched.pop(tuple(prompt), None) or self._submit(prompt, row, first), wanted)
            for wanted, prompt, row, first in _prompts(batch, rows.cpu())
        ]
        parts = [[column[wanted] for column in answer.result()] for answer, wanted in answers]
        if not parts:
            tokens = torch.zeros(0, self.k, dtype=torch.int64)
            return PromptTopK(tokens, tokens.double(), tokens[:, 0].double())
        return PromptTopK(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def prefetch(self, batches: Sequence[Batch]) -> None:
        """Request answers in the background; an error is raised when its answer is used."""
        for batch in batches:
            rows, _ = next_token_targets(batch.input_ids, batch.counts)
            for _, prompt, row, first in _prompts(batch, rows.cpu()):
                if tuple(prompt) not in self._prefetched:
                    self._prefetched[tuple(prompt)] = self._submit(prompt, row, first)

    def _submit(self, prompt: list[int], row: int, first: int) -> Future[PromptTopK]:
        place = f"row {row} of the text"
        return self._pool.submit(self.server.top_k, prompt, self.k, self.vocabulary, place, first)

    def scores(self, blocks: Blocks, batch_size: int) -> TokenScores:
        """Score the teacher's predictions of the targets in some rows of tokens."""
        scores = TokenScores()
        for start in range(0, len(blocks), batch_size):
            places = range(start, min(start + batch_size, len(blocks)))
            batch = blocks.batch(places)
            rows, targets = next_token_targets(batch.input_ids, batch.counts)
            top_k = self.top_k_at(batch, rows)
            correct = (top_k.tokens[:, 0] == targets).double()
            values = TokenValues(-top_k.own, top_k.log_probs[:, 0].exp().clamp(max=1), correct)
            scores.add([values], places, batch.target_bytes)
        return scores


class Served(Teacher):
    """A teacher on a server; the first of `ranks` has it scored."""

    compares = "tokens"

    def __init__(
        self,
        server: ServedTeacher,
        lms: Sequence[CausalLM] = (),
        *,
        url: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        self.server = server
        self.lms = lms
        self._url = url
        self._ranks = ranks
        self.prefetch = server.prefetch

    @classmethod
    def open(cls, context: TeacherContext, rows: Rows) -> Self:
        """Return the teacher at TEACHER_URL, or raise ServerFailed if it does not respond."""
        settings, (lm,) = context.settings, context.lms
        device = context.precision.device
        server = ServedTeacher.of(settings, settings.block_size, lm.tokenizer, device)
        return cls(server, [lm], url=settings.teacher_url or "", ranks=context.ranks)

    def describe(self) -> str:
        """Return the name and the address of the teacher."""
        return f"{self.lms[0].name}, served at {self._url}"

    def score(self, judge: LanguageJudge) -> Scores:
        """Score the teacher's predictions; it generates no texts."""
        assert judge.teacher is not None and self._ranks is not None  # open
        blocks = judge.teacher.blocks
        scores = self._ranks.from_first(lambda: self.server.scores(blocks, judge.batch_size))
        return [scores.table_row("teacher")], [""] * judge.generations

    def answer(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the answer of the server."""
        return [self.server(batch, rows)]


def _prompts(batch: Batch, rows: Tensor) -> Iterator[tuple[Tensor, list[int], int, int]]:
    """Yield the prompt of each document that has some of the positions `rows`.

    Yields the indices of these positions in the prompt, the prompt's ids up to the last target, its
    row of the text, and its first position in the row.
    """
    ids, documents = batch.input_ids.cpu(), batch.documents.cpu()
    row, column = rows // ids.shape[1], rows % ids.shape[1]
    document = documents[row, column].long() + row * (int(documents.max()) + 1)
    _, sizes = torch.unique_consecutive(document, return_counts=True)
    ends = sizes.cumsum(0).tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        at, columns = int(row[begin]), column[begin:end]
        same = documents[at] == documents[at, columns[0]]
        first = int(same.nonzero()[0])
        prompt = ids[at, first : int(columns[-1]) + 2].tolist()
        yield columns - first, prompt, int(batch.rows[at]), first


def _with_tail(tokens: Tensor, log_probs: Tensor, vocabulary: int) -> TopKTeacher:
    """Add the log of the mass of all other tokens, which is 1 minus the sum of the top k.

    None of them is more likely than the last of the top k, which limits their mass. Within this
    limit the mass is at least ROUNDING, since a mass rounded to 0 makes a reverse KL infinite.
    """
    masses, others = log_probs.exp(), vocabulary - tokens.shape[-1]
    tail = (1 - masses.sum(-1)).clamp(min=ROUNDING).minimum(others * masses[:, -1])
    return TopKTeacher(tokens, log_probs.clamp(min=LOWEST).float(), tail.log().float())
