"""Names by a language model of the user's: any callable."""

import numpy as np
import pytest

from ssl_kd.errors import InputError
from ssl_kd.workbench.naming import names_from_model

TEXTS = ["a tabby cat", "tabby on a sofa", "a photo", "old ship", "a ship", "photo"]
LEVELS = {"cluster": np.array([0, 0, 0, 1, 1, 1])}


def test_it_gets_the_most_telling_texts_and_gives_the_name():
    asked = []

    def describe(texts):
        asked.append(texts)
        return '\n **"House cats"**\nbecause ...' if "tabby" in texts[0] else ""

    names = names_from_model(TEXTS, LEVELS, describe, examples=2)
    assert set(asked[0]) == {"a tabby cat", "tabby on a sofa"} and set(asked[1]) == set(TEXTS[3:5])
    assert names.of("cluster", 0) == "House cats"
    assert names.of("cluster", 1) == "ship"  # it said nothing, so the words stay
    assert names.edits == {"cluster": {}}


def test_the_same_answer_twice_is_told_apart():
    names = names_from_model(TEXTS, LEVELS, lambda texts: "things " * 30)
    first, second = (names.of("cluster", c) for c in (0, 1))
    assert first != second and len(first) <= 60 and second.endswith("(ship)")


def test_an_answer_that_is_none():
    with pytest.raises(InputError, match="gave 3 for cluster 0, expected a name"):
        names_from_model(TEXTS, LEVELS, lambda texts: 3)
    with pytest.raises(InputError, match="failed at cluster 0: ZeroDivisionError"):
        names_from_model(TEXTS, LEVELS, lambda texts: str(1 / 0))
    assert names_from_model([""] * 6, LEVELS, lambda texts: "x").of("cluster", 0) == "0"
