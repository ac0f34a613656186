"""Distill with the preset `fp16_safe`: python scripts/train_sar_kd_fp16_safe.py --help."""

import sys
from pathlib import Path

from ssl_kd.cli import distill

if __name__ == "__main__":
    config = Path(__file__).with_name("config.py")
    sys.exit(distill(sys.argv[1:], preset="fp16_safe", config=config, prog=sys.argv[0]))
