"""Names as a file: edited by hand, damaged, of another version."""

import json

import numpy as np
import pytest

from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError
from ssl_kd.workbench.naming import Name, Names
from tests.faults.matrix import row as fault


def made() -> Names:
    words = (("cat", 0.5), ("fur", 0.25))
    return Names({"level_2": {0: Name("cat", "cat", words)}, "cluster": {3: Name("dog", "dog")}})


NAME = '{"name": "x", "made": null, "words": []}'
HOSTILE = {
    "a number twice": f'{{"1": {NAME}, "1": {NAME}}}',
    "a number in two ways": f'{{"01": {NAME}}}',
    "5,000 digits": f'{{"{"9" * 5000}": {NAME}}}',
    "NaN as text": '{"1": {"name": "x", "words": [["a", "nan"]]}}',
    "infinity": '{"1": {"name": "x", "words": [["a", 1e999]]}}',
    "a number for a name": '{"1": {"name": 5}}',
    "a list for what it was": '{"1": {"name": "x", "made": []}}',
    "no name": '{"1": {"name": "  "}}',
    "deep brackets": "[" * 100_000,
    "a list": "[]",
}


@pytest.mark.parametrize("level", HOSTILE.values(), ids=HOSTILE.keys())
@fault(137)
def test_a_damaged_level_is_refused(tmp_path, level):
    path = tmp_path / "names.json"
    path.write_text(f'{{"format": 1, "levels": {{"cluster": {level}}}}}')
    with pytest.raises(CorruptFileError, match=r"names\.json is damaged") as error:
        Names.load(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_saved_and_loaded(tmp_path):
    path = made().save(tmp_path)
    assert Names.load(tmp_path) == made() and path.name == "names.json"
    assert Names.load(tmp_path / "nowhere").of("cluster", 3) == "3"
    column = made().column("cluster", np.array([3, -1, 3, 4]))
    assert column.tolist() == ["dog", "-1", "dog", "4"]
    path.write_text(path.read_text().replace('"name": "dog"', '"name": "wolf"'))
    names = Names.load(tmp_path)
    assert names.edits == {"level_2": {}, "cluster": {3: "wolf"}}
    assert made().edited(names.edits) == names


def test_edits_add_change_and_remove():
    edits = {"cluster": {3: " ", 4: " my\nname "}, "level_9": {1: "x"}}
    found = made().edited(edits)
    assert [found.of("cluster", c) for c in (3, 4)] == ["3", "my\\nname"]
    assert found.of("level_9", 1) == "x" and found.of("level_2", 0) == "cat"
    renamed = made().edited({"cluster": {4: "Dog"}})
    assert renamed.of("cluster", 3) == "3"  # an automatic name gives way
    with pytest.raises(InputError, match="clusters 3 and 4 of cluster are all called 'wolf'"):
        made().edited({"cluster": {3: "wolf"}}).edited({"cluster": {4: "Wolf"}})


@fault(137)
def test_a_damaged_file_or_one_of_another_version(tmp_path):
    path = made().save(tmp_path)
    content = json.loads(path.read_text())
    for damage in ("{", "[]", '{"format": 1}'):
        path.write_text(damage)
        with pytest.raises(CorruptFileError, match=r"names\.json is damaged"):
            Names.load(tmp_path)
    path.write_text(json.dumps(content | {"format": 2}))
    with pytest.raises(InputError, match="format 2, expected 1: another version"):
        Names.load(tmp_path)
    content["levels"]["cluster"]["4"] = content["levels"]["cluster"]["3"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        InputError, match=r"json: the clusters 3 and 4 of cluster are all called 'dog'"
    ):
        Names.load(tmp_path)
