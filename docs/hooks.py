"""What the site needs beyond its Markdown: pages from elsewhere, links, and that it is offline.

mkdocs calls these functions. The pages stay such that a code host shows them well, too: links to
source files are relative, and lead into the repository where `repo_url` names one.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
LINK = re.compile(r"(\[[^\]\[]*\])\(([^)\s:#]+)(#[^)\s]*)?\)")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//"
)


def on_files(files: Files, config: Any) -> Files:
    """Add the changelog and the rest of the repository's own pages, and the notebooks as pages."""
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        text = LINK.sub(lambda m: m[0] if _is_page(files, m[2]) else _from_root(m), text)
        files.append(File.generated(config, page, content=text))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        page = notebook.src_uri.replace(".ipynb", ".md")
        name = Path(page).stem
        names = {"unique_key": name, "output_files_dir": name}
        body, more = MarkdownExporter().from_filename(notebook.abs_src_path, resources=names)
        files.append(File.generated(config, page, content=body))
        for picture, content in more["outputs"].items():
            place = posixpath.join(posixpath.dirname(page), picture)
            files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links out of docs/ lead into the repository, or are plain text where it has no address."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def follow(found: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, found[2]))
        if place.startswith("docs/"):
            return found[0].replace(".ipynb)", ".md)")
        if not (ROOT / place).exists():
            raise PluginError(f"{page.file.src_uri} links to {found[2]}, which is not there")
        if not config.repo_url:
            return found[1][1:-1]
        return f"{found[1]}({config.repo_url.rstrip('/')}/blob/main/{place}{found[3] or ''})"

    return LINK.sub(follow, markdown)


def on_post_build(config: Any) -> None:
    """No page may load anything from another host: the site has to open without a network."""
    for page in Path(config.site_dir).rglob("*.html"):
        for found in LOADED.finditer(page.read_text(encoding="utf-8")):
            if 'rel="canonical"' not in found[0]:
                raise PluginError(f"{page} loads from another host: {found[0]}")


def _is_page(files: Files, link: str) -> bool:
    return files.get_file_from_path(link) is not None


def _from_root(found: re.Match[str]) -> str:
    return f"{found[1]}(../{found[2]}{found[3] or ''})"
