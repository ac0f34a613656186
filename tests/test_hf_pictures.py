"""The Trainer that distils, with batches of images: whoever makes them, the same losses."""

import math
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ssl_kd.datasets.picture_blocks import image_tokens, make_picture_blocks  # noqa: E402
from ssl_kd.datasets.text import open_text  # noqa: E402
from ssl_kd.errors import InputError  # noqa: E402
from ssl_kd.hf_trainer import DistillationTrainer  # noqa: E402
from ssl_kd.hf_trainer.batches import batch_of  # noqa: E402
from ssl_kd.language.objective import Objective  # noqa: E402
from ssl_kd.language.sources import Plain  # noqa: E402
from ssl_kd.losses.teacher_output import LinearTeacher  # noqa: E402
from ssl_kd.teachers.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.teachers.tower import freeze_tower  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.seeing import draw, model_of, processor_of, records, write_records  # noqa: E402

CPU = torch.device("cpu")
KINDS = ("llava", "qwen2_5_vl")
ROWS = 6


class Data:
    """Records as our blocks hold them, and as a collator of somebody's own makes batches."""

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
        freeze_tower(model, train_tower=False, images=True)
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


def trained(data, folder, teacher=None, dataset=None, resume=None, **options):
    own = {n: options.pop(n) for n in ("alpha_kd", "eval_dataset", "data_collator") if n in options}
    settings = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    } | options  # fmt: skip
    trainer = DistillationTrainer(
        data.model(),
        teacher,
        transformers.TrainingArguments(**settings),
        train_dataset=dataset or data.blocks,
        processing_class=data.processor,
        **own,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_of_a_processor_is_that_of_our_rows(data, side):
    images = image_tokens(data.model().config)
    ours = data.blocks.batch(range(ROWS))
    inputs = data.collate(SAMPLES, side)
    for labels in (inputs["labels"], None):
        batch = batch_of({**inputs, "labels": labels}, CPU, images)
        real = ours.documents > 0
        assert torch.equal(batch.documents, ours.documents)
        assert torch.equal(batch.input_ids[real], ours.input_ids[real])
        assert not (batch.counts & torch.isin(batch.input_ids, torch.tensor(images))).any()
        assert batch.pictures.inputs.keys() == ours.pictures.inputs.keys()
        for name, value in ours.pictures.inputs.items():
            assert torch.equal(batch.pictures.inputs[name], value), name
        if labels is None:
            of_images = torch.isin(ours.input_ids, torch.tensor(images))
            expected = real & ~of_images
            expected[:, 0] = False
            assert torch.equal(batch.counts, expected)
        else:
            assert torch.equal(batch.counts, ours.counts)


@pytest.mark.parametrize("side", ["right", "left"])
def test_it_learns_the_same_from_rows_and_from_a_collators_batches(data, tmp_path, side):
    def collator(samples):
        return data.collate(samples, side)

    _, ours = trained(data, tmp_path / "a", data.model(2))
    _, theirs = trained(data, tmp_path / "b", data.model(2), SAMPLES, data_collator=collator)
    assert same(ours, theirs) and not same(ours, [*data.model().parameters()])


def test_evaluation_is_that_of_the_losses_and_gives_logits(data, tmp_path, tiny):
    teacher = FrozenTeacher(data.model(2))
    trainer, _ = trained(
        data, tmp_path, teacher, eval_dataset=data.blocks, max_steps=1, learning_rate=0.0
    )
    found = trainer.evaluate()
    objective = Objective(
        data.model(), tiny.settings(temperature=1.0), tiny.precision, Plain(teacher)
    )
    objective.student.eval()
    batch = data.blocks.batch(range(ROWS))
    with torch.no_grad():
        terms, n = objective.terms(batch), int(batch.counts.sum())
        wanted = objective.student(**batch.model_inputs()).logits
    assert found["eval_loss"] == pytest.approx(terms["ce"].item() / n, rel=1e-4)
    assert found["eval_kd"] == pytest.approx(terms["kd"].item() / n, rel=1e-4)
    inputs = next(iter(trainer.get_eval_dataloader()))
    handler: Any = trainer.callback_handler
    handler.eval_dataloader = trainer.get_eval_dataloader()
    _, logits, _ = trainer.prediction_step(trainer.model, inputs, False)
    logits = logits[0] if isinstance(logits, tuple) else logits  # Llava's come with its images
    real = batch.documents > 0
    torch.testing.assert_close(logits[real], wanted[real], rtol=1e-3, atol=1e-3)


def test_a_nan_in_kd_leaves_the_step_of_cross_entropy_alone(data, tmp_path):
    frozen = FrozenTeacher(data.model(2))

    def sick(batch, rows):
        said: Any = frozen(batch, rows)
        return LinearTeacher(said.hidden * math.nan, said.weight, said.bias)

    _, ours = trained(data, tmp_path / "a", sick)
    _, alone = trained(data, tmp_path / "b", None, alpha_kd=0.0)
    assert same(ours, alone)


def test_a_training_that_is_resumed_ends_with_the_same_bits(data, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    _, whole = trained(data, tmp_path / "a", data.model(2), **saved)
    checkpoint = str(tmp_path / "a" / "checkpoint-1")
    _, resumed = trained(data, tmp_path / "b", data.model(2), resume=checkpoint, **saved)
    assert same(whole, resumed)


def test_images_for_a_model_of_text_and_films_are_refused(data, tmp_path):
    inputs = data.collate(SAMPLES)
    with pytest.raises(InputError, match="the batch has .*pixel_values: expected"):
        batch_of(inputs, CPU)
    films = {**inputs, "pixel_values_videos": inputs["pixel_values"]}
    with pytest.raises(InputError, match="the batch has pixel_values_videos: expected"):
        batch_of(films, CPU, image_tokens(data.model().config))
