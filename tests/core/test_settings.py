"""The machinery of settings, on a small example class."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssl_kd import cli
from ssl_kd.cli.flags import read_settings
from ssl_kd.core.settings import Settings, SettingsError, setting
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.vision.settings import VisionSettings


@dataclasses.dataclass(frozen=True)
class Oven(Settings):
    heat: float = setting(180.0, "degrees", low=50, high=300)
    minutes: int = setting(40, "how long", above=0)
    fan: bool = setting(False, "blow")
    dish: str = setting("cake", "what", choices=("cake", "bread"))
    note: str | None = setting(None, "free text")
    share: float | None = setting(None, "of the tray", low=0, below=1)


def write(tmp_path, text):
    path = tmp_path / "config.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("heat", 49.9, "at least 50, at most 300"),
        ("heat", 300.1, "at least 50, at most 300"),
        ("heat", float("nan"), "a finite number"),
        ("heat", float("inf"), "a finite number"),
        ("heat", 10**400, "a finite number"),
        ("heat", "180", "a finite number"),
        ("heat", True, "a finite number"),
        ("heat", None, "a finite number"),
        ("minutes", 0, "above 0"),
        ("minutes", 40.0, "a whole number"),
        ("minutes", True, "a whole number"),
        ("fan", 1, "True or False"),
        ("fan", "True", "True or False"),
        ("dish", "pie", "one of 'cake', 'bread'"),
        ("dish", "bred", "Did you mean bread?"),
        ("note", " ", "text (or None)"),
        ("note", "a\0b", "text (or None)"),
        ("note", "a\udcff", "text (or None)"),
        ("share", 1.0, "at least 0, below 1 (or None)"),
    ],
)
def test_an_invalid_value_is_refused_with_name_value_and_range(name, value, allowed):
    with pytest.raises(SettingsError) as error:
        Oven(**{name: value})
    assert str(error.value).startswith(f"{name.upper()} is {value!r}, but must be ")
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("heat", 50), ("heat", 300.0), ("minutes", 1), ("share", 0), ("share", None), ("note", "x")],
)
def test_the_edge_of_the_range_is_allowed(name, value):
    assert getattr(Oven(**{name: value}), name) == value


def test_settings_are_frozen_and_replace_checks():
    oven = Oven(heat=200)
    assert type(oven.heat) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        oven.heat = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    assert oven.replace(fan=True).fan and not oven.fan
    with pytest.raises(SettingsError, match="MINUTES is -1"):
        oven.replace(minutes=-1)


def test_the_file_is_read_and_never_executed(tmp_path):
    path = write(tmp_path, '"""Oven."""\nHEAT = 1.2e2\nNOTE: str = "a"\nSHARE = None\nFAN = True\n')
    assert Oven.from_file(path) == Oven(heat=120.0, note="a", fan=True)
    marker = tmp_path / "ran"
    with pytest.raises(SettingsError, match="plain literal"):
        Oven.from_file(write(tmp_path, f"HEAT = open({str(marker)!r}, 'w').write('1')"))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nHEET = 100\n", "line 2: There is no setting HEET. Did you mean HEAT?"),
        ("HEAT = 20\n", "line 1: HEAT is 20, but must be"),
        ("HEAT = 2 * 100\n", "line 1: HEAT must be a plain literal such as"),
        ("import os\n", "line 1: expected only lines of `NAME"),
        ("if True:\n    HEAT = 100\n", "line 1: expected only lines of `NAME"),
        ("heat = 100\n", "line 1: expected only lines of `NAME"),
        ("HEAT = FAN = 1\n", "line 1: expected only lines of `NAME"),
        ("HEAT = 100\nHEAT = 120\n", "line 2: HEAT was set before, on line 1"),
        ("HEAT = 100\nDISH = 'cake\n", "line 2: this is not valid Python"),
        ("HEAT = 100\0", "this is not valid Python"),
        ("import sys; sys.exit(3)", "line 1: expected only lines of `NAME"),
        ("HEAT = exit(3)", "line 1: HEAT must be a plain literal"),
        ("HEAT = {[]: 1}", "line 1: HEAT must be a plain literal"),
        ("HEAT = " + "(" * 500 + ")" * 500, "this is not valid Python"),
        ("HEAT = " + "-" * 3000 + "1", "config.py, line 1: "),
        ("HEAT = " + "9" * 5000, "config.py, line 1: "),
    ],
)
def test_a_fault_in_the_file_is_named_with_its_line(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as error:
        Oven.from_file(path)
    assert str(error.value).startswith(f"{path}")
    assert message in str(error.value)


def test_undecodable_bytes_are_named(tmp_path):
    path = tmp_path / "config.py"
    path.write_bytes(b"\xff\xffH")
    with pytest.raises(SettingsError, match="this is not valid Python"):
        Oven.from_file(path)
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        bom = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
        path.write_bytes(bom + "HEAT = 100\n".encode(encoding))
        with pytest.raises(SettingsError, match="config.py is UTF-16, expected UTF-8: save it"):
            Oven.from_file(path)
    path.write_bytes("\ufeffNOTE = 'später'\n".encode())  # as some editors begin a file
    assert Oven.from_file(path).note == "später"


@pytest.mark.parametrize("place", ["a folder", "a broken link", "nothing"])
def test_a_settings_file_that_cannot_be_read_is_named(tmp_path, place):
    path = tmp_path / "config.py"
    if place == "a folder":
        path.mkdir()
    if place == "a broken link":
        path.symlink_to("nowhere")
    with pytest.raises(
        SettingsError, match="config.py cannot be read as a settings file: .*config"
    ):
        Oven.from_file(path)
    if place != "nothing":  # nor is it passed over where it is the default
        with pytest.raises(SettingsError, match="cannot be read as a settings file"):
            read_settings(Oven, [], path, prog="x")


def test_words_of_the_command_line():
    assert Oven.parse("heat", "1e2") == 100.0
    assert Oven.parse("minutes", "5") == 5
    assert Oven.parse("share", "None") is None
    assert Oven.parse("note", "none") is None
    assert Oven.parse("dish", "bread") == "bread"
    for name, word in (("heat", "hot"), ("heat", "nan"), ("minutes", "1.5"), ("dish", "none")):
        with pytest.raises(SettingsError, match=name.upper()):
            Oven.parse(name, word)


@given(
    heat=st.floats(50, 300),
    minutes=st.integers(1, 10**9),
    fan=st.booleans(),
    note=st.none()
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(str.strip),
    share=st.none() | st.floats(0, 1, exclude_max=True),
)
def test_valid_settings_survive_a_json_round_trip(heat, minutes, fan, note, share):
    oven = Oven(heat=heat, minutes=minutes, fan=fan, note=note, share=share)
    assert Oven.from_dict(json.loads(json.dumps(oven.to_dict()))) == oven
    assert set(oven.to_dict()) == {"HEAT", "MINUTES", "FAN", "DISH", "NOTE", "SHARE"}


@dataclasses.dataclass(frozen=True)
class Kiln(Oven):
    aliases = {"degrees": "heat", "how_long": "minutes"}


def test_an_alias_is_the_setting_it_stands_for(tmp_path):
    kiln = Kiln(heat=200.0, minutes=3)
    assert Kiln.named("DEGREES") == Kiln.named("degrees") == "heat"
    assert Kiln.named("how-long") == "minutes"
    assert Kiln.from_file(write(tmp_path, "DEGREES = 200\nHOW_LONG = 3\n")) == kiln
    assert Kiln.from_dict({"DEGREES": 200, "how_long": 3}) == kiln
    assert "DEGREES" not in kiln.to_dict()
    with pytest.raises(SettingsError, match="no setting DEGRES. Did you mean HEAT?"):
        Kiln.named("DEGRES")


def test_two_names_of_one_setting_are_refused_by_both_names(tmp_path):
    path = write(tmp_path, "HEAT = 180\nDEGREES = 180\n")
    with pytest.raises(SettingsError, match=f"^{path}: HEAT and DEGREES are the same setting"):
        Kiln.from_file(path)
    with pytest.raises(SettingsError, match="heat and DEGREES are the same setting"):
        Kiln.from_dict({"heat": 180, "DEGREES": 180})


def test_a_settings_file_of_the_defaults_documents_its_values_and_is_read_back(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Grill(Oven):
        file_heading = "Grill."
        coal: str = setting('a "fine" one', "what burns", "Dry.", section="Fuel")
        rate: float = setting(1e-5, "kilograms a second; 0: none", "Slowly. " * 20, low=0, below=1)

    assert Grill.file_text().splitlines()[:4] == ['"""Grill."""', "", "# --- Fuel " + "-" * 89, ""]
    text = Grill.file_text()
    assert '# What burns. Dry.\nCOAL = "a \\"fine\\" one"\n' in text
    assert "# Kilograms a second, at least 0, below 1; 0: none. Slowly. Slowly." in text
    assert "RATE = 1e-5\n# Degrees, at least 50, at most 300.\nHEAT = 180.0\n" in text
    assert "# Blow.\nFAN = False\n" in text
    assert max(map(len, text.splitlines())) <= 100
    assert Grill.from_file(write(tmp_path, text)) == Grill()


@pytest.mark.parametrize(
    ("command", "file", "cls"),
    [
        ("train", "config.py", VisionSettings),
        ("distill", "scripts/config.py", LanguageSettings),
    ],
)
def test_the_committed_settings_files_match_the_declarations(command, file, cls, capsys):
    assert cli.main(["config", command]) == 0
    path = Path(__file__).parents[2] / file
    text = capsys.readouterr().out
    assert text.encode() == path.read_bytes(), f"{file} is not new: make config"
    assert cls.from_file(path) == cls()
    for name, (_, _, rule) in cls.rules().items():
        comment = re.findall(rf"((?:^#.*\n)+){name.upper()} =", text, flags=re.M)[0]
        assert all(re.search(rf"\b{choice}\b", comment) for choice in rule.choices), name
    assert cli.main(["config", f"{command}s"]) == 2
    assert cli.main(["config"]) == 2


@dataclasses.dataclass(frozen=True)
class Kitchen(Settings):
    ovens: int | Literal["all"] | None = setting(None, "how many are hot", low=2)


def test_a_number_may_also_be_a_word():
    assert Kitchen(ovens="all").ovens == Kitchen.parse("ovens", "All") == "all"
    assert Kitchen.parse("ovens", "3") == 3 and Kitchen.parse("ovens", "none") is None
    for value in (1, "al", True, 2.0):
        with pytest.raises(SettingsError, match=r"at least 2 \(or 'all' or None\)"):
            Kitchen(ovens=value)
    with pytest.raises(SettingsError, match="Did you mean all?"):
        Kitchen.parse("ovens", "alll")


def test_a_name_of_another_setting_cannot_become_a_field():
    for names in ({"aliases": {"coal": "heat"}}, {"instead": {"coal": "Use --heat."}}):
        with pytest.raises(TypeError, match="declares coal, listed in `aliases`"):
            type("Grill", (Oven,), {"__annotations__": {"coal": str}, **names})
