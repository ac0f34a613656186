"""The Trainer that distills batches of images: the same losses for any collator."""

import math
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ssl_kd.hf_trainer import DistillationTrainer  # noqa: E402
from ssl_kd.language.losses.teacher_output import LinearTeacher  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.models.student import freeze_tower  # noqa: E402
from ssl_kd.language.teachers.live import Live  # noqa: E402
from ssl_kd.language.text.dataset import open_text  # noqa: E402
from ssl_kd.language.text.picture_blocks import make_picture_blocks  # noqa: E402
from ssl_kd.language.train.objective import Objective  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.language.hf_trainer.test_distillation import arguments  # noqa: E402
from tests.marks import slow  # noqa: E402
from tests.tiny_vlm import draw, model_of, processor_of, records, write_records  # noqa: E402

KINDS = ("llava", "qwen2_5_vl")
ROWS = 6


class Data:
    """Records as blocks, and as batches of a user's collator."""

    def __init__(self, kind, folder):
        self.kind, self.processor = kind, processor_of(kind)
        self.records = records(folder, ROWS)
        texts = open_text(write_records(folder / "a.jsonl", self.records), "all")
        self.blocks = make_picture_blocks(texts, self.processor, 96)
        self.images = [
            [draw(folder / f"{i}-{k}.png", i + k) for k in range(i % 3)] for i in range(6)
        ]

    def model(self, seed=1):
        model = model_of(self.kind, self.processor, seed, layers=2)
        freeze_tower(model, images=True)
        return model

    def collate(self, samples, side="right"):
        """As TRL's collator for models of images: the processor pads, and labels are masked."""
        rows = [sample["row"] for sample in samples]
        tokenizer, template = self.processor.tokenizer, self.processor.chat_template
        texts = [
            tokenizer.apply_chat_template(
                self.records[i]["messages"], chat_template=template, tokenize=False
            )
            for i in rows
        ]
        tokenizer.padding_side = side
        inputs = self.processor(
            text=texts,
            images=[image for i in rows for image in self.images[i]] or None,
            add_special_tokens=False,
            padding=True,
            return_tensors="pt",
        )
        tokenizer.padding_side = "right"
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        for label, i in zip(labels, rows, strict=True):
            learned = int(self.blocks.counts[i].sum())  # the last tokens of the row
            real = (label != -100).nonzero()[:, 0]
            label[real[:-learned]] = -100
        return {**inputs, "labels": labels}


@pytest.fixture(scope="module", params=KINDS)
def data(request, tmp_path_factory):
    return Data(request.param, tmp_path_factory.mktemp(request.param))


SAMPLES = [{"row": i} for i in range(ROWS)]


def trained(data, folder, teacher=None, side="right", **options):
    own = {n: options.pop(n) for n in ("alpha_kd", "eval_dataset") if n in options}
    options = {"max_steps": 3, "per_device_train_batch_size": ROWS, **options}
    trainer = DistillationTrainer(
        data.model(),
        teacher,
        arguments(folder, remove_unused_columns=False, **options),
        train_dataset=SAMPLES,
        processing_class=data.processor,
        data_collator=lambda samples: data.collate(samples, side),
        **own,
    )
    trainer.train()
    return trainer, [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize("side", ["right", slow("left")])
def test_the_losses_of_a_processors_batch_are_those_of_our_rows(data, tmp_path, tiny, side):
    teacher = FrozenTeacher(data.model(2))
    trainer, begun = trained(
        data, tmp_path, teacher.answer, side, eval_dataset=SAMPLES, max_steps=1, learning_rate=0.0
    )
    objective = Objective(
        data.model(), tiny.settings(temperature=1.0), tiny.precision, Live(teacher)
    )
    batch = data.blocks.batch(range(ROWS))
    with torch.no_grad():
        terms, n = objective.terms(batch), int(batch.counts.sum())
    line, judged = trainer.state.log_history[0], trainer.evaluate()
    for name in ("ce", "kd"):
        wanted = pytest.approx(terms[name].item() / n, rel=1e-4)
        assert line[name] == wanted and judged[f"eval_{name}"] == wanted
    _, moved = trained(data, tmp_path, data.model(2), side)
    assert not same(begun, moved)


def test_a_nan_in_kd_leaves_the_step_of_cross_entropy_alone(data, tmp_path):
    frozen = FrozenTeacher(data.model(2))

    def sick(inputs, rows):
        answer: Any = frozen.answer(inputs, rows)
        return LinearTeacher(answer.hidden * math.nan, answer.weight, answer.bias)

    _, ours = trained(data, tmp_path / "a", sick)
    _, alone = trained(data, tmp_path / "b", None, alpha_kd=0.0)
    assert same(ours, alone)
