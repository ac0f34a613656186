import pkgutil
import re

import pytest

from ssl_kd.core.settings import SettingsError
from ssl_kd.vision.settings import TeacherSettings
from ssl_kd.vision.teacher_kinds import KINDS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.loader.rpartition(".")[2])
def test_every_kind_has_a_function_and_values_of_its_own(kind):
    assert callable(pkgutil.resolve_name(kind.loader))
    values = (*kind.names, *kind.more)
    assert values or kind.form is not None
    for value in values:
        assert [other for other in KINDS if other.has(value)] == [kind]
        assert TeacherSettings(teacher=value).teacher == value


@pytest.mark.parametrize("name", [name for kind in KINDS for name in (*kind.names, *kind.more)])
def test_a_misspelt_name_is_suggested(name):
    with pytest.raises(SettingsError, match=re.escape(f"Did you mean {name}?")):
        TeacherSettings(teacher=f"{name}%")
