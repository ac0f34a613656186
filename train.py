"""The main job: embed, train, judge, report. `python train.py --help` lists every setting.

`python train.py extract` embeds only, on one machine or many.
"""

import sys
from pathlib import Path

from ssl_kd.cli import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], config=Path(__file__).with_name("config.py"), prog=sys.argv[0]))
