"""The doctor: are model, losses, gradients and cache free of NaN? 0 healthy, 1 not."""

import sys

from ssl_kd.cli import main


def test_nan_issues():
    assert main(["doctor"]) == 0


if __name__ == "__main__":
    sys.exit(main(["doctor"]))
