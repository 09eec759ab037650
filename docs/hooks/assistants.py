"""Writes `llms.txt` and `llms-full.txt` beside the site, for language models that read documentation.

A mkdocs hook, named in mkdocs.yml. The first lists the pages with a sentence each, in the order of the navigation; the
second holds the text of those that explain something. Reference pages are left out of it: they consist of docstrings.
"""

import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

SUMMARY = (
    "A neural-network library for JAX in which a model is an ordinary Python object and a training step runs as fast "
    "as one written by hand. It is not flax.nnx: if you know Flax, read nnx-for-flax first."
)
LEFT_OUT = ("api/", "decisions/", "notebooks/", "examples/", "changelog.md", "contributing.md")

_texts: dict[str, str] = {}
_pages: list[Page] = []


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Remembers the order of the pages."""
    _pages[:] = nav.pages
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remembers the text of a page."""
    _texts[page.file.src_uri] = markdown
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the two files."""
    site = pathlib.Path(config.site_dir)
    pages = [(page.file.url, str(page.title), _texts.get(page.file.src_uri, "")) for page in _pages]
    (site / "llms.txt").write_text(index(pages))
    explaining = [page for page in pages if not page[0].replace(".html", ".md").startswith(LEFT_OUT)]
    (site / "llms-full.txt").write_text("\n\n".join(f"<!-- {url} -->\n\n{text.strip()}" for url, _, text in explaining))


def index(pages: list[tuple[str, str, str]]) -> str:
    """Returns the list of pages, each as its address, its title and its first sentence."""
    lines = [f"- [{title}]({url}): {first_sentence(text)}" for url, title, text in pages]
    return f"# NNX\n\n> {SUMMARY}\n\n## Pages\n\n" + "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """Returns the first sentence of the first paragraph of a page, without markup."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL))
    prose = [part for part in paragraphs if re.match(r"[A-Za-z`*\[]", part.strip())]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose[0].split())) if prose else ""
    return re.split(r"(?<=[.:])\s", plain)[0].rstrip(":")
