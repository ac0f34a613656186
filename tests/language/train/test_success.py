"""The success rate counts the tokens of each loss term that updated the student."""

import pytest

from ssl_kd.language.report.tables import success_text
from ssl_kd.language.train.success import Success


def test_a_step_without_an_update_and_rows_left_out_lower_the_rate_of_their_term():
    success = Success()
    assert success.rate == 0 and success.rates == {}
    for shares in ({"ce": 1.0, "kd": 1.0}, {"ce": 1.0, "kd": 0.5}, {"ce": 0.0, "kd": 0.0}):
        success.add(shares)
    success.add({"kd": 1.0})  # a step without text
    assert success.rates == {"ce": pytest.approx(2 / 3), "kd": 2.5 / 4}
    assert success.rate == pytest.approx((2 / 3 + 2.5 / 4) / 2)


def test_counts_are_restored_from_their_state():
    success = Success()
    success.add({"ce": 0.25})
    restored = Success(**success.state())
    restored.add({"ce": 0.75})
    assert restored.rates == {"ce": 0.5} and success.rates == {"ce": 0.25}


def test_the_screen_names_the_rate_of_each_term():
    text = success_text({"success_rate": 0.9, "success_rates": {"ce": 1, "kd": 0.8}, "steps": 2000})
    assert text == "Success rate 90.0 % of 2,000 steps (ce 100.0 %, kd 80.0 %)"
