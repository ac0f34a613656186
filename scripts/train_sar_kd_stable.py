"""Distill with the preset `stable`: python scripts/train_sar_kd_stable.py --help."""

import sys
from pathlib import Path

from ssl_kd.cli import distill

if __name__ == "__main__":
    config = Path(__file__).with_name("config.py")
    sys.exit(distill(sys.argv[1:], preset="stable", config=config, prog=sys.argv[0]))
