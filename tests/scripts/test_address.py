"""What package indexes show of a distribution leads to files of the repository."""

import shutil
import subprocess
import sys

import pytest

from tests.documents import ROOT

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brought it")
ADDRESS = "https://example.org/owner/name"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a copy of the metadata and READMEs, with an address."""
    copy = tmp_path_factory.mktemp("source")
    for folder in ("firstnan", ".", "explore"):
        (copy / folder).mkdir(exist_ok=True)
        for name in ("README.md", "pyproject.toml"):
            shutil.copy(ROOT / folder / name, copy / folder)
    command = [sys.executable, ROOT / ".ci" / "address.py", copy, ADDRESS, "v1.2.3"]
    subprocess.run(command, check=True)
    return copy


@pytest.mark.parametrize("folder", ["firstnan", ".", "explore"])
def test_links_of_a_readme_and_of_its_metadata_lead_into_the_repository(source, folder):
    readme = (source / folder / "README.md").read_text(encoding="utf-8")
    with (source / folder / "pyproject.toml").open("rb") as file:
        urls = tomllib.load(file)["project"]["urls"]
    assert urls["Repository"] == ADDRESS
    links = [link.partition(")")[0] for link in readme.split("](")[1:]] + [urls["Changelog"]]
    for link in links:
        assert link.startswith("https://"), link
        if link.startswith(ADDRESS):
            view, tag, place = link.removeprefix(f"{ADDRESS}/").split("/", 2)
            assert (ROOT / place.partition("#")[0]).is_file() and tag == "v1.2.3", link
            assert (view == "raw") == place.endswith((".jpg", ".png", ".svg")), link
