"""Will this run stay finite? `python test_nan_issues.py`: 0 healthy, 1 a problem."""

import sys

from ssl_kd.cli import main


def test_nan_issues():
    assert main(["doctor"]) == 0


if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
