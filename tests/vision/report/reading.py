"""Write the files of a run folder, and parse the report made from them."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from ssl_kd.vision.report import write_report


def put(folder: Path, name: str, value) -> None:
    (folder / name).write_text(json.dumps(value))


def change(folder: Path, name: str, **new) -> None:
    put(folder, name, json.loads((folder / name).read_text()) | new)


class Reader(HTMLParser):
    """Parses text, tags and attributes of a page; fails if tags do not match."""

    void = {"meta", "img", "br"}

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.ids, self.links, self.open, self.text = [], [], [], [], ""
        self.feed(page)
        assert not self.open, f"unclosed {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for key, value in attrs if key == "id"]
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def columns_of_rows(source: str, section: str) -> list[int]:
    """Return how many columns each row of a section's first table spans, header rows first."""
    table = source[source.index(f'id="{section}"') :].partition("<table>")[2].partition("</table>")
    spans = []
    for row in table[0].split("<tr")[1:]:
        cells = re.findall(r"<t[hd]\b[^>]*>", row)
        spans.append(
            sum(int(re.findall(r'colspan="(\d+)"', cell + 'colspan="1"')[0]) for cell in cells)
        )
    return spans


def check_that_nothing_is_loaded(source: str, page: Reader) -> None:
    """Check that a page is self-contained and every anchor exists once."""
    assert page.links and all(link.startswith(("data:image/", "#")) for link in page.links)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "default-src 'none'" in source and "prefers-color-scheme: dark" in source
    assert not re.search(r"url\((?!#)|@import", source)
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', source)) <= set(page.ids)


def write_and_read(folder: Path, write=write_report, **options) -> tuple[str, Reader]:
    """Write the report, by default of a clustering run; return source and page."""
    path = write(folder, **options)
    assert path == folder / "report.html"
    page = path.read_text(encoding="utf-8")
    return page, Reader(page)
