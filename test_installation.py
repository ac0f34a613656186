"""Is everything here, does it compute? `python test_installation.py` says, 0 or 1."""

import sys

from ssl_kd.cli import main


def test_installation():
    assert main(["install-check"]) == 0


if __name__ == "__main__":
    sys.exit(main(["install-check", *sys.argv[1:]]))
