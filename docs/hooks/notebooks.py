"""Shows the notebooks in docs/notebooks as pages of the site.

A mkdocs hook, named in mkdocs.yml. A notebook becomes a Markdown page: its text, its code, and the outputs that are
stored in it. Nothing runs while the site is built; `make notebooks` runs them and stores the outputs.
"""

import json
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def output_block(output: dict[str, Any]) -> str:
    """An output of a cell as Markdown."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png']).strip()}){{ .output }}"
    text = "".join(output.get("text") or data.get("text/plain") or [])
    return f"````{{ .text .output }}\n{text.rstrip()}\n````"


def notebook_page(notebook: dict[str, Any], name: str) -> str:
    """The Markdown page of a notebook, with a link to the file below its title."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
        else:
            blocks += [f"````python\n{source}\n````", *map(output_block, cell["outputs"])]
    title, _, rest = blocks[0].partition("\n")
    download = f"This page is a notebook: [download {name}]({name}) to run it."
    return "\n\n".join([title, download, rest.strip(), *blocks[1:]]) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every notebook; the notebooks themselves stay as files to download."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            name = file.src_uri.rpartition("/")[2]
            page = notebook_page(json.loads(file.content_string), name)
            files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=page))
    return files
