"""Write a repository's address into metadata and READMEs: python .ci/address.py SOURCE ADDRESS TAG.

SOURCE is a copy of the repository. Package indexes show a README without the files beside it, so
links of the READMEs lead to the files of TAG at ADDRESS, as GitHub lays them out, and each
`pyproject.toml` names ADDRESS and its changelog.
"""

import posixpath
import re
import sys
from pathlib import Path

CHANGELOGS = {"": "CHANGELOG.md", "firstnan": "firstnan/CHANGELOG.md", "explore": "CHANGELOG.md"}
LINK = re.compile(r"(!?)(\[[^\]\[]*\])\(([^)\s:#]+)(#[^)\s]*)?\)")


def main(source, address, tag):
    """Change the READMEs and `pyproject.toml` files of all three distributions in place."""
    for folder, changelog in CHANGELOGS.items():

        def absolute(link, folder=folder):
            picture, text, place, section = link.groups("")
            path = posixpath.normpath(posixpath.join(folder, place))
            view = "raw" if picture else "blob"
            return f"{picture}{text}({address}/{view}/{tag}/{path}{section})"

        readme = Path(source, folder, "README.md")
        readme.write_text(LINK.sub(absolute, readme.read_text(encoding="utf-8")), encoding="utf-8")
        with Path(source, folder, "pyproject.toml").open("a", encoding="utf-8") as project:
            project.write(f'\n[project.urls]\nRepository = "{address}"\n')
            project.write(f'Changelog = "{address}/blob/{tag}/{changelog}"\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
