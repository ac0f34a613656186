"""Distill a language model: python scripts/distill.py --preset stable --teacher_model FOLDER."""

import sys
from pathlib import Path

from ssl_kd.cli import distill

if __name__ == "__main__":
    config = Path(__file__).with_name("config.py")
    sys.exit(distill(sys.argv[1:], config=config, prog=sys.argv[0]))
