"""`python -m ssl_kd.doctor [gradients]`, the same as the command `ssl_kd doctor`."""

import sys

from ssl_kd.cli import main

raise SystemExit(main(["doctor", *sys.argv[1:]]))
