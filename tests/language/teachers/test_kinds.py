"""Which kind of teacher the settings ask for, and that a new one is a class and a line."""

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.language.losses.teacher_output import LinearTeacher  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from ssl_kd.language.teachers import kinds, live  # noqa: E402
from ssl_kd.language.teachers.base import Teacher  # noqa: E402
from tests.language.test_run import metrics, weights  # noqa: E402


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"teacher_model": "none"}, "Teacher"),
        ({"teacher_model": "self"}, "SelfTeacher"),
        ({"teacher_model": "a"}, "Live"),
        ({"teacher_model": "a, b"}, "Live"),
        ({"teacher_model": "x=a, y=b", "teacher_field": "kind"}, "Tagged"),
        ({"teacher_model": "a", "teacher_cache": "c"}, "Cached"),
        ({"teacher_model": "a", "teacher_cache": "c", "router_mode": "all"}, "Cached"),
        ({"teacher_model": "a", "teacher_url": "http://a", "temperature": 1.0}, "Served"),
        ({"teacher_model": "a", "router_mode": "ka"}, "Routed"),
        ({"teacher_model": "a", "router_mode": "ka", "align": "uld"}, "Aligned"),
    ],
    ids=str,
)
def test_the_settings_choose_the_class(changes, name):
    chosen = kinds.teacher_class(LanguageSettings(**{"student_model": "llama:1x16", **changes}))
    assert chosen.__name__ == name and issubclass(chosen, Teacher)


def test_every_kind_that_is_chosen_checks_the_settings():
    """A cache holds the answers of a server: both refuse what they do not support."""
    both = {"teacher_model": "a", "teacher_url": "http://a", "teacher_cache": "c"}
    both |= {"student_model": "llama:1x16", "temperature": 1.0}
    assert [kind.path for kind in kinds.kinds_of(LanguageSettings(**both))][:2] == [
        "cached.Cached",
        "served.Served",
    ]
    with pytest.raises(SettingsError, match="ON_POLICY is 0.5, which needs a live teacher"):
        LanguageSettings(**both, on_policy=0.5)
    with pytest.raises(SettingsError, match="TEMPERATURE is 2, but the server"):
        LanguageSettings(**both | {"temperature": 2.0})


SERVED = {"teacher_model": "a", "teacher_url": "http://a", "temperature": 1.0}
TAGGED = {"teacher_model": "x=a, y=b", "teacher_field": "kind"}


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({**SERVED, "teacher_text": 0.5}, "set TEACHER_TEXT to 0."),
        ({**TAGGED, "teacher_text": 0.5}, "set TEACHER_TEXT to 0."),
        ({"align": "uld", "learn_thoughts": False}, "set LEARN_THOUGHTS to True."),
        ({"align": "uld", "student_text": 0.5}, "set ALIGN to 'auto'."),
        ({"teacher_model": "none", "teacher_text": 0.5}, "name a TEACHER_MODEL."),
        ({"teacher_cache": "c", "on_policy": 0.5}, "set TEACHER_CACHE to None."),
        ({"push_to_hub": True}, "set HUB_MODEL_ID."),
        ({"hub_model_id": "a/b"}, "set PUSH_TO_HUB to True."),
    ],
    ids=str,
)
def test_a_refusal_ends_in_the_one_setting_to_change(changes, fix):
    with pytest.raises(SettingsError) as refused:
        LanguageSettings(**{"teacher_model": "a", "student_model": "llama:1x16", **changes})
    message = str(refused.value)
    assert message.endswith(f": {fix}") and message.count(": ") == 1


def test_settings_are_checked_without_torch():
    code = (
        "import sys; from ssl_kd.language.settings import LanguageSettings as S;"
        "S(teacher_model='a', router_mode='ka', align='uld'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_new_kind_is_a_class_and_a_line(settings, models, monkeypatch):
    class Halved(live.Live):
        """A teacher whose logits are halved, which is the teacher at twice the temperature."""

        def answer(self, batch, rows, student):
            (answer,) = super().answer(batch, rows, student)
            assert isinstance(answer, LinearTeacher)
            return [LinearTeacher(answer.hidden / 2, answer.weight)]

    def check(settings):
        if settings.temperature != 1:
            raise SettingsError("TEMPERATURE is not 1: set it to 1.")

    kind = kinds.Kind("live.Halved", lambda s: s.teacher_served_as == "halved", check)
    monkeypatch.setattr(live, "Halved", Halved, raising=False)
    monkeypatch.setattr(kinds, "KINDS", (kind, *kinds.KINDS))
    with pytest.raises(SettingsError, match="TEMPERATURE is not 1"):
        settings(teacher_served_as="halved", temperature=2.0)
    short = {"temperature": 1.0, "max_steps": 2, "generations": 0}
    path = run(settings(**short, teacher_served_as="halved"))
    plain = run(settings(**short, run_name="plain"))
    rows = [metrics(each)["table"][0] for each in (path, plain)]
    assert (
        rows[0]["name"] == "teacher" and rows[0] == rows[1]
    )  # scored with the weights that were loaded
    assert weights(path) != weights(plain)
