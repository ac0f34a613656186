"""Link what wheels require, without extras, into a folder: python .ci/link.py FOLDER WHEEL...

The packages come from the environment of this Python; the wheels themselves are not linked.
"""

import re
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "firstnan" / "tests"))
from alone import collect, link  # noqa: E402


def main(folder, wheels):
    """Link the requirements of all wheels, and theirs."""
    own = {Path(wheel).name.split("-")[0]: None for wheel in wheels}
    distributions = dict(own)  # so that their requirements are read from the wheels alone
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            requirements = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
        for requirement in requirements:
            if "extra ==" not in requirement:
                collect(re.match(r"[\w.-]+", requirement).group(), distributions)
    link([found for name, found in distributions.items() if name not in own], Path(folder))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
