"""`scripts/config.py` and the settings of the language mode say the same."""

import ast
import re
from pathlib import Path

import pytest

from ssl_kd.language.presets import PRESETS
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.settings import RunSettings

CONFIG = Path(__file__).parents[2] / "scripts" / "config.py"
TEXT = CONFIG.read_text(encoding="utf-8")
ASSIGNMENTS = [node for node in ast.parse(TEXT).body if isinstance(node, ast.Assign)]


def test_file_and_dataclass_hold_the_same_names_and_defaults_in_the_same_order():
    written = {}
    for node in ASSIGNMENTS:
        (target,) = node.targets
        assert isinstance(target, ast.Name)
        written[target.id] = ast.literal_eval(node.value)
    # The plain defaults: a preset changes less than the file would otherwise say.
    assert written == LanguageSettings().to_dict()
    inherited = {name.upper() for name in RunSettings.rules()}  # a dataclass puts them first
    own = [name for name in LanguageSettings().to_dict() if name not in inherited]
    assert [name for name in written if name not in inherited] == own
    assert LanguageSettings.from_file(CONFIG) == LanguageSettings()


def test_every_setting_of_the_file_has_a_comment_above_it():
    lines = TEXT.splitlines()
    for node in ASSIGNMENTS:
        assert lines[node.lineno - 2].startswith("# "), f"line {node.lineno} has no comment"


@pytest.mark.parametrize("name", LanguageSettings.rules())
def test_the_comment_names_the_range_and_the_choices_that_the_code_checks(name):
    comment = re.findall(rf"((?:^#.*\n)+){name.upper()} =", TEXT, flags=re.M)[0]
    rule = LanguageSettings.rules()[name][2]
    for border in (rule.low, rule.above, rule.high, rule.below):
        if border is not None:
            assert re.search(rf"\b({border:g}|{border})\b", comment), f"{name}: {border}"
    for choice in rule.choices:
        assert re.search(rf"\b{choice}\b", comment), f"{name}: {choice}"


def test_every_preset_is_valid_and_changes_something():
    for name, values in PRESETS.items():
        assert LanguageSettings(**values) != LanguageSettings(), name
