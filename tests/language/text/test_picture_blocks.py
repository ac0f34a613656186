"""Records with images: valid forms, tokens with loss, and refused input."""

import base64
from typing import Any

import pytest
import torch
from PIL import Image

from ssl_kd.core.errors import InputError
from ssl_kd.core.images.decode import UnreadableImage
from ssl_kd.language.text.aligned import aligned_blocks
from ssl_kd.language.text.blocks import make_blocks
from ssl_kd.language.text.dataset import open_text
from ssl_kd.language.text.records import as_example

pytest.importorskip("transformers")

from ssl_kd.language.text.picture_blocks import make_picture_blocks  # noqa: E402
from tests.faults.matrix import row as fault
from tests.tiny_vlm import KINDS, draw, processor_of, records, write_records  # noqa: E402

SAID = {"role": "assistant", "content": "a fox"}
PLACE = {"type": "image"}


@pytest.fixture
def here(tmp_path):
    for i in range(3):
        draw(tmp_path / f"{i}.png", i)
    return tmp_path


@pytest.fixture(scope="module", params=KINDS)
def processor(request):
    return processor_of(request.param)


def example_of(record, folder, where="w") -> Any:
    return as_example(record, where, None, folder)


def question(*content):
    return [{"role": "user", "content": [*content]}, SAID]


def text(what):
    return {"type": "text", "text": what}


def colour(example, i=0):
    return example.images[i].image("it").getpixel((0, 0))


@pytest.mark.parametrize("key", ["path", "image_url", "bytes", "data"])
def test_every_way_to_name_an_image_is_the_same_image(here, key):
    content = (here / "1.png").read_bytes()
    sources = {
        "image_url": {"type": "image_url", "image_url": {"url": "1.png"}},
        "bytes": {"type": "image", "image": {"bytes": content, "path": None}},
        "data": {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"},
        },
    }
    part = sources.get(key, {"type": "image", key: "1.png"})
    record = {"messages": question(part, text("what?"))}
    plain = example_of({"messages": question({**PLACE, "path": "1.png"}, text("what?"))}, here)
    assert example_of(record, here).content() == plain.content()
    assert colour(plain) == Image.open(here / "1.png").getpixel((0, 0))


@pytest.mark.parametrize(
    "record",
    [
        {"images": ["1.png"], "messages": question(text("what?"))},
        {
            "image": {"path": "1.png"},
            "messages": [{"role": "user", "content": "<image>what?"}, SAID],
        },
        {
            "image": "1.png",
            "conversations": [
                {"from": "human", "value": "<image>what?"},
                {"from": "gpt", "value": "a fox"},
            ],
        },
        {"images": ["1.png"], "prompt": question(PLACE, text("what?"))[:1], "completion": [SAID]},
    ],
)
def test_images_beside_the_messages_stand_at_their_places(here, record):
    found = example_of(record, here)
    assert found.messages[0]["content"] == [PLACE, text("what?")]
    assert len(found.images) == 1


def test_several_images_keep_their_order(here):
    named = {**PLACE, "path": "2.png"}
    record = {"images": ["0.png", "1.png"], "messages": question(PLACE, named, text("and"), PLACE)}
    found = example_of(record, here)
    assert [colour(found, i) for i in range(3)] == [
        Image.open(here / f"{i}.png").getpixel((0, 0)) for i in (0, 2, 1)
    ]


@pytest.mark.parametrize(
    "record, words",
    [
        (
            {"image": "none.png", "prompt": "a", "completion": "b"},
            "none.png cannot be read: No such",
        ),
        (
            {"image": "https://x.org/a.png", "prompt": "a", "completion": "b"},
            "expected a local file",
        ),
        (
            {"images": ["0.png", "1.png"], "messages": question(PLACE, text("a"))},
            "2 images, but 1 pos",
        ),
        ({"images": ["0.png"], "messages": question(PLACE, PLACE)}, "1 images, but 2 positions"),
        ({"messages": question(PLACE, text("a"))}, "0 images, but 1 positions"),
        ({"image": 5, "prompt": "a", "completion": "b"}, "an image is int; expected"),
        (
            {"image": "0.png", "prompt": "a", "completion": "b<image>"},
            "the completion contains an image",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**PLACE, "path": "0.png"}]}]},
            "assistant",
        ),
        (
            {"messages": question({"type": "video", "path": "a.mp4"})},
            "has the type 'video'; expected text or",
        ),
    ],
)
def test_image_errors_name_the_record(here, record, words):
    message = example_of(record, here, "rows.jsonl:3")
    assert isinstance(message, str) and message.startswith("rows.jsonl:3: ") and words in message


def test_only_answer_tokens_count_and_no_image_token(processor, here):
    made = [
        *records(here, 6),
        {"image": "1.png", "prompt": "What is it? ", "completion": "a fox"},
        {"image": "1.png", "prompt": "", "completion": "a fox"},
    ]
    texts = open_text(write_records(here / "a.jsonl", made), "all")
    blocks = make_picture_blocks(texts, processor, 96)
    assert len(blocks) == len(made) and not blocks.left_out
    kinds = torch.tensor(processor.image_token_id)
    for i, example in enumerate(texts.examples):
        batch = blocks.batch([i])
        ids, counts = batch.input_ids[0], batch.counts[0]
        of_images = ids == kinds
        assert not (counts & of_images).any()
        learned = processor.tokenizer.decode(ids[counts], skip_special_tokens=True)
        answer = example.completion or example.messages[-1]["content"]
        assert learned.strip() == answer.strip()
        assert int(blocks.row_bytes[i]) == len(answer)
        if example.images:  # as many as its processor gives the images
            alone = processor(
                images=[picture.image("") for picture in example.images],
                text=[processor.image_token * len(example.images)],
            )
            seen = torch.as_tensor(alone["input_ids"][0]) == kinds
            assert int(of_images.sum()) == int(seen.sum()) > 0
        else:
            assert batch.pictures is None and not of_images.any()


def test_a_batch_holds_the_images_of_its_rows_in_their_order(processor, here):
    texts = open_text(write_records(here / "a.jsonl", records(here, 6)), "all")
    blocks = make_picture_blocks(texts, processor, 96)
    whole, parts = blocks.batch([5, 0, 4]).pictures, [blocks.batch([i]).pictures for i in (5, 4)]
    for name in {"pixel_values", "image_grid_thw"} & whole.inputs.keys():
        assert torch.equal(whole.inputs[name], torch.cat([p.inputs[name] for p in parts]))
    assert [len(of.split()) for of in whole.of] == [2, 0, 1]
    assert torch.equal(
        blocks.part(slice(4, 6)).batch([1]).pictures.inputs["pixel_values"],
        parts[0].inputs["pixel_values"],
    )


def test_an_image_is_never_cut(processor, here):
    long = {"image": "1.png", "prompt": "what? ", "completion": "a fox " * 60}
    texts = open_text(write_records(here / "a.jsonl", [long, *records(here, 3)]), "all")
    blocks = make_picture_blocks(texts, processor, 80)
    assert len(blocks) == 3
    assert "for 1 images; expected at most 80: raise --block_size" in blocks.left_out[0]
    plain = {"prompt": "what? ", "completion": "a fox " * 60}  # is split, as without a processor
    texts = open_text(write_records(here / "a.jsonl", [plain]), "all")
    assert len(make_picture_blocks(texts, processor, 80)) > 1


@fault(139)
def test_unreadable_images_are_left_out_by_name_and_one_that_vanishes_is_an_error(here):
    made = records(here, 4, images=lambda i: 1)
    (here / "2-0.png").write_bytes(b"not an image")
    blocks = make_picture_blocks(
        open_text(write_records(here / "a.jsonl", made), "all"), processor_of("llava"), 96
    )
    assert len(blocks) == 3 and blocks.left_out[0].startswith("a.jsonl:3: image 1, ")
    (here / "3-0.png").unlink()
    with pytest.raises(UnreadableImage, match="an image of row 2"):
        blocks.batch([2])


def test_the_digest_is_of_the_images_and_their_preparation(here):
    def digest(processor):
        texts = open_text(write_records(here / "a.jsonl", made), "all")
        return texts.digest, make_picture_blocks(texts, processor, 96).digest

    made = records(here, 4)
    first = digest(processor_of("llava"))
    assert digest(processor_of("llava")) == first
    other = processor_of("llava")
    other.image_processor.image_mean = [0.1, 0.2, 0.3]
    assert digest(other)[0] == first[0] and digest(other)[1] != first[1]
    draw(here / "1-0.png", 3)
    assert digest(processor_of("llava"))[0] != first[0]


def test_parquet_with_images_of_datasets(here):
    datasets = pytest.importorskip("datasets")
    made = [
        {"prompt": f"what {i}?", "completion": "a fox", "image": Image.open(here / f"{i}.png")}
        for i in range(3)
    ]
    datasets.Dataset.from_list(made).to_parquet(here / "rows.parquet")
    texts = open_text(here / "rows.parquet", "all")
    assert [colour(e) for e in texts.examples] == [one["image"].getpixel((0, 0)) for one in made]
    datasets.Dataset.from_list(made).save_to_disk(here / "saved")
    assert open_text(here / "saved", "all").digest == texts.digest


def test_other_tokens_around_an_image_are_refused(here, monkeypatch):
    processor = processor_of("llava")
    monkeypatch.setattr(type(processor), "replace_image_token", lambda *a, **k: "<image>.<image>")
    texts = open_text(write_records(here / "a.jsonl", records(here, 3)), "all")
    with pytest.raises(InputError, match="LlavaProcessor inserts tokens around an image"):
        make_picture_blocks(texts, processor, 96)


def test_a_tokenizer_alone_does_not_pass_over_images(here):
    texts = open_text(write_records(here / "a.jsonl", records(here, 3)), "all")
    tokenizer = processor_of("llava").tokenizer
    with pytest.raises(InputError, match="a.jsonl:2 contains images; expected text"):
        make_blocks(texts, tokenizer, 64)
    with pytest.raises(InputError, match="a.jsonl:2 contains images"):
        aligned_blocks(texts, tokenizer, tokenizer, 64)
