"""Names as a file: edited by hand, damaged, of another version."""

import json

import numpy as np
import pytest

from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError
from ssl_kd.naming import Name, Names
from tests.faults.matrix import row as fault


def made() -> Names:
    words = (("cat", 0.5), ("fur", 0.25))
    return Names({"level_2": {0: Name("cat", "cat", words)}, "cluster": {3: Name("dog", "dog")}})


def test_saved_and_loaded(tmp_path):
    path = made().save(tmp_path)
    assert Names.load(tmp_path) == made() and path.name == "names.json"
    assert Names.load(tmp_path / "nowhere").of("cluster", 3) == "3"
    column = made().column("cluster", np.array([3, -1, 3, 4]))
    assert column.tolist() == ["dog", "-1", "dog", "4"]


def test_a_name_edited_in_the_file_is_known_as_such(tmp_path):
    path = made().save(tmp_path)
    path.write_text(path.read_text().replace('"name": "dog"', '"name": "wolf"'))
    found = Names.load(tmp_path)
    assert found.edits == {"level_2": {}, "cluster": {3: "wolf"}}
    assert made().edited(found.edits) == found


def test_edits_add_change_and_take_off():
    edits = {"cluster": {3: " ", 4: " my\nname "}, "level_9": {1: "x"}}
    found = made().edited(edits)
    assert [found.of("cluster", c) for c in (3, 4)] == ["3", "my\\nname"]
    assert found.of("level_9", 1) == "x" and found.of("level_2", 0) == "cat"
    assert made().edited({"cluster": {4: "Dog"}}).of("cluster", 3) == "3"  # nobody called it so
    with pytest.raises(InputError, match="3 and 4 of cluster are both called 'wolf'"):
        made().edited({"cluster": {3: "wolf"}}).edited({"cluster": {4: "Wolf"}})


@fault(137)
def test_a_damaged_file_or_one_of_another_version(tmp_path):
    path = made().save(tmp_path)
    content = json.loads(path.read_text())
    for damage in ("{", "[]", '{"format": 1}', '{"format": 1, "levels": {"cluster": {"x": {}}}}'):
        path.write_text(damage)
        with pytest.raises(CorruptFileError, match=r"names\.json is damaged"):
            Names.load(tmp_path)
    path.write_text(json.dumps(content | {"format": 2}))
    with pytest.raises(InputError, match="format 2, expected 1: another version"):
        Names.load(tmp_path)
    content["levels"]["cluster"]["4"] = content["levels"]["cluster"]["3"]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"names\.json: 3 and 4 of cluster are both called 'dog'"):
        Names.load(tmp_path)
