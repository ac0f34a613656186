"""`ssl_kd verify`: live and cached losses agree with plain ones, or are reported."""

import pytest

from ssl_kd import cli
from ssl_kd.core.settings import SettingsError
from ssl_kd.doctor import verify as module
from ssl_kd.doctor.verify import verify
from ssl_kd.language.teachers.caching import cache_teacher

WAYS = ["plain", "live"]


@pytest.fixture
def settings(tiny, tmp_path, text_file):
    teacher = tiny.folder(tmp_path / "teacher", seed=1)
    student = tiny.folder(tmp_path / "student", seed=2)
    return tiny.settings(
        teacher_model=teacher, student_model=student, data_path=text_file, block_size=32
    )


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js", "tvd"])
def test_all_ways_agree_in_float32(settings, divergence):
    found = verify(settings.replace(divergence=divergence, model_dtype="float32"))
    assert [way.way for way in found] == WAYS and all(way.agrees for way in found)
    assert all(way.kd > 0.01 and way.ce > 1 for way in found)
    assert max(way.gradient_off for way in found) < 1e-5


@pytest.mark.parametrize("role", ["student_model", "teacher_model"])
def test_models_whose_logits_are_not_linear_agree(settings, tiny, tmp_path, role):
    model = tiny.folder(tmp_path / "granite", "Granite", seed=3, logits_scaling=3.0)
    found = verify(settings.replace(**{role: model, "model_dtype": "float32"}))
    assert [way.way for way in found] == WAYS and all(way.agrees for way in found)


def test_a_mixture_logs_how_many_tokens_change_experts(settings, tiny, tmp_path, caplog):
    teacher = tiny.folder(tmp_path / "mixture", "Mixtral", seed=3)
    with caplog.at_level("INFO"):
        verify(settings.replace(teacher_model=teacher, model_dtype="float32"))
    assert "teacher: 0.0% of the tokens change experts if" in caplog.text


def test_half_precision_agrees_within_its_rounding(settings, float16_here):
    found = verify(settings.replace(model_dtype="float16", device="cpu"))
    assert all(way.agrees and way.allowed == module.HALF for way in found)


def test_a_cache_is_compared_if_given(settings, tmp_path):
    cached = settings.replace(
        teacher_cache=str(tmp_path / "cache"), cache_method="topk", model_dtype="float32"
    )
    cache_teacher(cached.replace(cache_method="topk:200"))
    last = verify(cached)[-1]
    assert last.way == "cache, topk 200" and last.agrees and last.gradient_off > 0
    cache_teacher(cached.replace(cache_method="topk:1", force_recompute=True))
    assert not verify(cached)[-1].agrees


@pytest.mark.parametrize("dtype, limits", [("float32", "EXACT"), ("float16", "HALF")])
def test_a_cache_of_hidden_states_agrees_within_its_rounding(
    settings, tmp_path, float16_here, dtype, limits
):
    cached = settings.replace(
        teacher_cache=str(tmp_path / "cache"), cache_method="hidden", model_dtype="float32"
    )
    cache_teacher(cached.replace(temperature=3.0, model_dtype=dtype, device="cpu"))
    last = verify(cached)[-1]
    assert last.way == f"cache, hidden {dtype}"
    assert last.agrees and last.allowed == getattr(module, limits)


def test_a_term_that_is_off_or_nan_does_not_agree(settings, monkeypatch):
    terms = module.Distiller.terms
    for factor in (1.01, float("nan")):

        def changed(distiller, batch, factor=factor):
            return terms(distiller, batch) | {"kd": terms(distiller, batch)["kd"] * factor}

        monkeypatch.setattr(module.Distiller, "terms", changed)
        plain, live = verify(settings.replace(model_dtype="float32"))
        assert plain.agrees and not live.agrees


def test_incomparable_models_are_refused_by_name(settings):
    for changes, message in (
        ({"teacher_cache": "cache", "router_mode": "all"}, "ROUTER_MODE 'all'"),
        ({"teacher_cache": "cache", "router_weights": "r"}, "ROUTER_WEIGHTS 'r'"),
        ({"teacher_model": "none"}, "TEACHER_MODEL 'none'"),
        ({"align": "chunks"}, "ALIGN 'chunks'"),
        ({"teacher_url": "http://127.0.0.1:9/v1", "temperature": 1.0}, "TEACHER_URL is"),
    ):
        with pytest.raises(SettingsError, match=message):
            verify(settings.replace(**changes))


def test_the_command_prints_a_table_and_ends_in_1_where_they_differ(settings, monkeypatch, capsys):
    words = ["verify", "--teacher_model", settings.teacher_model, "--block_size", "32"]
    words += ["--student_model", settings.student_model, "--data_path", settings.data_path]
    words += ["--model_dtype", "float32"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(way in out for way in WAYS) and "DIFFERS" not in out
    monkeypatch.setattr(module, "EXACT", (0.0, 0.0))
    assert cli.main(words) == 1
    assert "DIFFERS" in capsys.readouterr().out
