"""The site builds without warnings, links to nothing that is missing, and its search finds what people look for."""

import html
import json
import pathlib
import re
import urllib.parse
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import nnx
from tests.site_search import SearchIndex
from tools.benchmark_bars import drawings

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
ATTRIBUTE = re.compile(r'<(?P<tag>\w+)[^>]*?\s(?:href|src)="(?P<link>[^"]*)"')

# What people type, and the page that should come up first.
SEARCHES = {
    "freeze": "recipes/freeze-parameters.html",
    "fine-tune": "recipes/fine-tuning.html",
    "mixed precision": "recipes/mixed-precision.html",
    "gradient clipping": "recipes/gradient-clipping.html",
    "accumulation": "recipes/gradient-accumulation.html",
    "weight tying": "recipes/weight-tying.html",
    "learning rate": "recipes/learning-rates.html",
    "data loading": "recipes/data-loading.html",
    "NaN": "recipes/debugging-nans.html",
    "profiling": "recipes/profiling.html",
    "multi-GPU": "recipes/multi-gpu.html",
    "serving": "recipes/serving.html",
    "sharding": "guide/sharding.html",
    "Flax": "cheat-sheet.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The built site; a warning of mkdocs is an error."""
    directory = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the packages that build the site
        patch.chdir(ROOT)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory), strict=True)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    return directory


@pytest.fixture(scope="module")
def pages(site: pathlib.Path) -> dict[str, str]:
    """The HTML of every page, by its path."""
    return {path.relative_to(site).as_posix(): path.read_text() for path in sorted(site.rglob("*.html"))}


@pytest.fixture(scope="module")
def index(site: pathlib.Path) -> SearchIndex:
    return SearchIndex(site / "search" / "search_index.json")


def links(text: str) -> Iterator[tuple[str, str]]:
    """The tag and the target of everything that a page links to or loads."""
    for match in ATTRIBUTE.finditer(text):
        yield match["tag"], html.unescape(match["link"])


def test_every_link_leads_somewhere(site: pathlib.Path, pages: dict[str, str]):
    anchors = {name: set(re.findall(r'\s(?:id|name)="([^"]+)"', text)) for name, text in pages.items()}
    broken = []
    for name, text in pages.items():
        for _, link in links(text):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or name == "404.html":
                continue
            target = (site / name).parent / urllib.parse.unquote(parts.path) if parts.path else site / name
            target = target / "index.html" if target.is_dir() else target
            page = target.resolve().relative_to(site.resolve()).as_posix()
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists() or (anchor and page in anchors and anchor not in anchors[page]):
                broken.append((name, link))
    assert broken == []


def test_pages_load_nothing_from_elsewhere(pages: dict[str, str]):
    loaded = [(name, link) for name, text in pages.items() for tag, link in links(text) if tag != "a"]
    assert [(name, link) for name, link in loaded if link.startswith(("http:", "https:", "//"))] == []


def test_pages_show_the_version_and_their_neighbors(pages: dict[str, str]):
    assert f"NNX {nnx.__version__}" in pages["index.html"]
    assert "md-footer__link--prev" in pages["guide/transforms.html"]
    assert "md-footer__link--next" in pages["guide/transforms.html"]


def test_changelog_and_contributing_are_those_of_the_repository(pages: dict[str, str]):
    first_change = re.search(r"^- (\w+ \w+ \w+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first_change and first_change[1] in pages["changelog.html"]
    assert "What we expect of a change" in pages["contributing.html"]


def test_drawings_are_part_of_their_pages(pages: dict[str, str]):
    for page in ("guide/state-and-filters.html", "guide/transforms.html", "performance.html"):
        assert '<figure class="diagram"' in pages[page] and "</svg>" in pages[page]


def test_the_picture_of_the_home_page_is_that_of_its_model():
    code = (DOCS / "index.md").read_text().split("```python\n")[1]
    namespace: dict[str, Any] = {}
    exec(code.split("optimizer = ")[0], namespace)
    picture = nnx.plot_model(namespace["model"], jax.ShapeDtypeStruct((12, 4), "float32"))
    assert (DOCS / "assets" / "classifier.svg").read_text() == picture.svg


def test_charts_show_the_stored_figures():
    assert [path.name for path, svg in drawings().items() if path.read_text() != svg] == []


def test_no_figure_of_a_chart_is_cut_off():
    for path, svg in drawings().items():
        (width,) = re.findall(r'viewBox="0 0 (\d+) ', svg)
        figures = re.findall(r'<text class="note" x="([\d.]+)" y="\d+">([^<]+)<', svg)
        assert figures and all(float(x) + 7 * len(text) < int(width) for x, text in figures), path.name


@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_finds_its_page_first(index: SearchIndex, query: str):
    assert index.search(query)[:1] == [SEARCHES[query]]


def test_titles_and_rare_words_rank_higher(tmp_path: pathlib.Path):
    entries = [
        {"location": "a.html", "title": "Layers", "text": "freeze " * 9},
        {"location": "b.html", "title": "Freeze parameters", "text": "how to"},
        {"location": "c.html", "title": "Reference", "text": "<code>freezes</code>", "boost": 0.1},
    ]
    config = {"separator": r"[\s\-]+", "fields": {"title": {"boost": 1000.0}, "text": {"boost": 1.0}}}
    (tmp_path / "index.json").write_text(json.dumps({"config": config, "docs": entries}))
    index = SearchIndex(tmp_path / "index.json")
    assert index.search("freeze") == ["b.html", "a.html", "c.html"]
    assert index.search("absent") == []


def test_every_example_is_shown_with_its_figure_and_picture():
    page = (DOCS / "examples.md").read_text()
    results = json.loads((DOCS / "assets" / "examples" / "results.json").read_text())
    programs = [path for path in sorted((ROOT / "examples").rglob("*.py")) if path.name != "run_all.py"]
    sources = [path.relative_to(ROOT).with_suffix(".md").as_posix() for path in programs]
    assert [source for source in sources if f"({source})" not in page] == []
    assert set(results) == {path.stem for path in programs if path.parent.name == "examples"}
    for name, figure in results.items():
        assert f"`{figure}` · [examples/{name}.py]" in page
    pictures = sorted((DOCS / "assets" / "examples").glob("*.png"))
    assert [path.name for path in pictures if f"(assets/examples/{path.name})" not in page] == []
    assert max(path.stat().st_size for path in pictures) < 60_000


def test_language_models_find_a_list_of_the_pages_and_the_text_of_those_that_explain(site):
    listed = (site / "llms.txt").read_text()
    links = re.findall(r"^- \[.+?\]\((.+?)\): \S", listed, re.MULTILINE)
    assert {"index.html", "nnx-for-flax.html", "guide/modules.html", "api/core.html"} <= set(links)
    assert [link for link in links if not (site / link).exists()] == []
    full = (site / "llms-full.txt").read_text()
    assert "\n# Modules\n" in full and "\n::: nnx." not in full
