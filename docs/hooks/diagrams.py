"""Puts the drawings in docs/assets/diagrams into the pages that show them.

A mkdocs hook, named in mkdocs.yml. A page refers to a drawing as an image, which also works where no site is built. On
the site, the image is replaced by the SVG itself, so that the drawing follows the color scheme of the page.
"""

import pathlib
import re
from html import unescape

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

IMAGE = re.compile(
    r'<p><img alt="(?P<alt>[^"]*)" src="[^"]*assets/(?P<path>diagrams/[\w-]+\.svg)"\s*/?></p>',
)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces every image of a drawing by the drawing."""
    assets = pathlib.Path(config.docs_dir) / "assets"

    def drawing(match: re.Match[str]) -> str:
        svg = (assets / match["path"]).read_text()
        label = unescape(match["alt"]).replace('"', "'")
        # The text inside is a picture's, not the page's: keep it out of the search index.
        return f'<figure class="diagram" role="img" aria-label="{label}" data-search-exclude>{svg}</figure>'

    return IMAGE.sub(drawing, html)
