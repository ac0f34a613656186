"""Make tiny language models and token rows, and inject faults into their training."""

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from ssl_kd.core.precision import Precision
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.models.student import save_student
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.text.blocks import Blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.new_tokenizer import train_tokenizer
from ssl_kd.language.text.records import Example
from ssl_kd.language.train.loop import train
from ssl_kd.language.train.step import Distiller

NAN = math.nan
VOCABULARY, BLOCK, ROWS = 64, 12, 40
CPU = Precision.for_device("cpu")
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
OTHER = {"Mixtral": {"num_local_experts": 4}, "Gemma2": {"head_dim": 16}}
FAST = {
    "max_steps": 8,
    "batch_size": 4,
    "block_size": 32,
    "learning_rate": 1e-2,
    "temperature": 2.0,
    "alpha_kd": 0.5,
    "alpha_ce": 0.5,
    "log_every": 2,
    "eval_every": 100,
    "eval_rows": 8,
    "checkpoint_every": 3,
    "generations": 1,
    "max_new_tokens": 4,
    "device": "cpu",
    "model_dtype": "float32",
}


def make_model(kind="Llama", seed=0, **changes) -> Any:
    """Return a causal LM in evaluation mode, with random weights large enough to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, f"{kind}Config")(**SMALL | OTHER.get(kind, {}) | changes)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.2)
    return model


def make_rows(n=ROWS) -> Blocks:
    """Return token rows of different lengths; the first three tokens are a prompt without loss."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (n, BLOCK), generator=generator)
    documents = torch.ones(n, BLOCK, dtype=torch.int32)
    for row in range(n):
        documents[row, BLOCK - row % 4 :] = 0
    counts = documents > 0
    counts[:, :3] = False
    return Blocks(ids, counts, documents, torch.ones(n, dtype=torch.int64), (), "rows")


class ByHand(Distiller):
    """A distiller that leaves out terms by hand, as the guard is expected to."""

    left_out: tuple[str, ...] = ()  # terms that the guard does not get in this step
    batches: tuple[int, ...] = ()  # the batches of the step without these terms
    _batch = 0

    def step(self, batches, learning_rate):
        self._batch = 0
        return super().step(batches, learning_rate)

    def _count(self, batches):
        super()._count(batches)
        for i in self.batches if self.left_out else ():
            counts = self.counts([batches[i]])
            self._subtract({name: counts[name] for name in self.left_out})

    def weighted(self, terms):
        losses = super().weighted(terms)
        out = self.left_out if self._batch in self.batches else ()
        self._batch += 1
        return {name: loss for name, loss in losses.items() if name not in out}


@dataclass
class TrainedStudent:
    """A distiller, the result of each step, and the trained state before each step."""

    distiller: Distiller
    results: list = field(default_factory=list)
    before: list = field(default_factory=list)

    @property
    def events(self):
        return self.distiller.guard.events.events

    def of(self, part):
        """Return the events of one part as (step from 0 as in `strike`, stage, action)."""
        return [(e.step - 1, e.stage, e.action) for e in self.events if e.part == part]

    def explained(self, part):
        """Return the replay's explanation of a part's fault."""
        (event,) = [e for e in self.events if e.part == part and e.stage == "replay"]
        return event.reason

    def owned(self, step=None):
        """Return weights, moments and step counts before a step, or at the end."""
        return owned(self.distiller) if step is None else self.before[step]


def owned(distiller):
    """Return all state that a step changes: weights, moments and step counts, also the router's."""
    state = distiller.state()
    copy = {f"student {name}": p.clone() for name, p in state["student"].items()}
    copy |= {f"router {name}": p.clone() for name, p in state["router"].get("routers", {}).items()}
    for who in ("optimizer", "router"):
        optimizer = state["router"].get("optimizer", {}) if who == "router" else state[who]
        for i, moments in optimizer.get("state", {}).items():
            copy |= {f"{who} {i} {name}": value.clone() for name, value in moments.items()}
    return copy


def trained_student(
    strike=lambda distiller, step: None,
    steps=6,
    rows=None,
    student=None,
    teacher=None,
    source=None,
    precision=CPU,
    **settings,
):
    """Train with `train()`, and call `strike(distiller, step)` before each step."""
    options = LanguageSettings(**{**FAST, "block_size": BLOCK, **settings})
    student = make_model(seed=1) if student is None else student
    if source is None:
        source = Live(FrozenTeacher(teacher or make_model(seed=2)))
    training = TrainedStudent(ByHand(student, options, precision, source))

    def before_each():
        strike(training.distiller, len(training.before))
        training.before.append(owned(training.distiller))
        return False

    train(
        training.distiller,
        make_rows() if rows is None else rows,
        steps,
        on_step=lambda step, result: training.results.append(result),
        should_stop=before_each,
    )
    return training


class FaultyOutput:
    """Corrupts the output of a module, or its first tensor, while `on` is set.

    Args:
        module: Module to corrupt.
        place: Index into its output; by default one position of every row.
        value: Value to write there.
        when: Function of the output that returns whether to corrupt it.
    """

    def __init__(
        self, module, place=(slice(None), 4), value=float("nan"), when=lambda output: True
    ):
        self.on, self.place, self.value, self.when = False, place, value, when
        module.register_forward_hook(self._spoil)

    def _spoil(self, module, args, output):
        first = output[0] if isinstance(output, tuple) else output
        if not (self.on and self.when(first)):
            return output
        mask = torch.zeros_like(first, dtype=torch.bool)
        mask[self.place] = True
        corrupt = first.masked_fill(mask, self.value)
        return (corrupt, *output[1:]) if isinstance(output, tuple) else corrupt

    def at(self, *steps):
        """Return a strike that corrupts the output in these steps."""

        def strike(distiller, step):
            self.on = step in steps

        return strike


def leave_out(*terms, steps, batches=(0,)):
    """Return a strike that leaves out terms by hand in some batches of some steps."""

    def strike(distiller, step):
        distiller.left_out, distiller.batches = (terms if step in steps else ()), batches

    return strike


# --- whole runs -----------------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards quietly boxed".split()


def sentences(n=40, seed=0):
    chosen = torch.randint(len(WORDS), (n, 9), generator=torch.Generator().manual_seed(seed))
    return [" ".join(WORDS[i] for i in line) for line in chosen.tolist()]


def dataset(texts):
    examples = tuple(Example(f"texts:{i}", text=text) for i, text in enumerate(texts, 1))
    return TextDataset("texts", "all", examples, "texts", ())


def write_lines(path, records):
    """Write records to a `.jsonl` file; write strings as raw lines."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def spoil(folder, to, change):
    """Copy a model folder, apply `change` to its tensors, and return the copy."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


class World:
    """A folder with saved models and texts.

    Attributes:
        teacher: Folder of the teacher.
        student: Folder of a student with the teacher's tokenizer.
        stranger: Folder of a student with another tokenizer.
        mixture: Folder of a teacher with four experts.
        sick: Folder of the teacher with NaN in the embedding of a token of the training text only.
        text: File of training documents.
        questions: File of held-out questions with answers.
        own: Folder of one test.
        runs: Folder of its runs.
    """

    own: Path
    runs: Path

    def __init__(self, folder: Path):
        texts = sentences()
        self.tokenizer, other = (train_tokenizer(dataset(texts), size) for size in (300, 270))
        self.teacher, self.student, self.stranger = (
            folder / name for name in ("teacher", "student", "stranger")
        )
        self.save("Llama", 2, self.tokenizer, self.teacher)
        self.save("Llama", 1, self.tokenizer, self.student)
        self.save("Llama", 1, other, self.stranger)
        self.mixture = self.save("Mixtral", 2, self.tokenizer, folder / "mixture")
        self.text = write_lines(folder / "text.jsonl", [{"text": text} for text in texts])
        records = [
            {"prompt": f"{t}?", "completion": f"<answer>{i}</answer>"}
            for i, t in enumerate(sentences(8, seed=1))
        ]
        self.questions = write_lines(folder / "questions.jsonl", records)
        held_out = [f"{one['prompt']}{one['completion']}" for one in records]
        trained, judged = (
            {i for text in some for i in self.tokenizer(text).input_ids}
            for some in (texts, held_out)
        )
        rare = min(trained - judged)
        self.sick = spoil(self.teacher, folder / "sick", lambda t: t[EMBEDDING][rare].fill_(NAN))

    @staticmethod
    def save(kind, seed, tokenizer, folder):
        model = make_model(kind, seed, vocab_size=len(tokenizer))
        save_student(model, tokenizer, folder, "A tiny model.")
        return folder

    def with_fault(self, which, change):
        """Copy a model folder, apply `change` to its tensors, and return the copy."""
        return spoil(getattr(self, which), self.own / f"faulty {which}", change)

    def settings(self, **changes):
        """Return the settings of a fast run with changes."""
        own = {
            "data_path": str(self.text),
            "eval_path": str(self.questions),
            "teacher_model": str(self.teacher),
            "student_model": str(self.student),
            "runs_dir": str(self.runs),
        }
        return LanguageSettings(**{**FAST, **own, **changes})


def student_of(path):
    """Return the bytes of the saved student or adapters of a run."""
    (file,) = (Path(path) / "student").glob("*model.safetensors")
    return file.read_bytes()
