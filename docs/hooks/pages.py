"""What the site takes from the repository instead of keeping a copy: the version, the root's pages and the examples.

A mkdocs hook, named in mkdocs.yml. *Root pages* are files such as CHANGELOG.md, shown as pages of the site. An *example
page* shows the source of one example, so that links to it work without knowing where the repository is published.
"""

import ast
import os
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parent.parent.parent
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# Pages that mention everything, and would come up first in every search although another page explains it.
SEARCH_BOOST = {"api/": 0.5, "decisions/": 0.5, "notebooks/": 0.5, "changelog.md": 0.2, "contributing.md": 0.5}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the version to the site's name, and the link to the repository if its address is known."""
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "nnx" / "__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    config.site_name = f"{config.site_name} {version[1]}"
    config.repo_url = os.environ.get("NNX_REPOSITORY")
    config.repo_name = "Repository"
    return config


def root_page(text: str) -> str:
    """The text of a root page with its links into docs/ made relative to the site."""
    return re.sub(r"\]\(docs/", "](", text)


def example_page(path: pathlib.Path) -> str:
    """A page with the title, the description and the source of an example."""
    source = path.read_text()
    name = path.relative_to(ROOT).as_posix()
    title = (ast.get_docstring(ast.parse(source)) or name).splitlines()[0].rstrip(".")
    up = "../" * name.count("/")
    # Sources repeat words of the pages that explain them, and would push those down in the search results.
    return (
        f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {title}\n\n"
        f"`{name}`, one of the [examples]({up}examples.md).\n\n````python\n{source}````\n"
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the root pages and the example pages."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=root_page((ROOT / name).read_text())))
    for path in sorted((ROOT / "examples").glob("**/*.py")):
        page = path.relative_to(ROOT).with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=example_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Ranks reference pages below the pages that explain, unless a page says otherwise."""
    for prefix, boost in SEARCH_BOOST.items():
        if page.file.src_uri.startswith(prefix):
            page.meta.setdefault("search", {"boost": boost})
    return markdown
