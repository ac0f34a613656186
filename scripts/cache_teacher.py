"""Cache a teacher's distributions: python scripts/cache_teacher.py --teacher_model FOLDER."""

import sys
from pathlib import Path

from ssl_kd.cli import cache_teacher

if __name__ == "__main__":
    config = Path(__file__).with_name("config.py")
    sys.exit(cache_teacher(sys.argv[1:], config=config, prog=sys.argv[0]))
