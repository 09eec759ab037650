"""The table of families in the guide, from what `parity` found.

    python tools/family_table.py    writes the table again

`docs/parity.json` has, for each family of decoders, how many random configurations were compared with `transformers`,
the worst relative error of each way, and how many greedy texts were equal; and, if `conformance` ran, for how many
changes of its config the result agreed (`ok`), was refused, or differed.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import nnx

ROOT = pathlib.Path(__file__).parent.parent
DATA = ROOT / "docs" / "parity.json"
PAGE = ROOT / "docs" / "guide" / "published-models.md"
START, END = "<!-- families: written by tools/family_table.py -->\n", "<!-- end of families -->"


def stored() -> dict[str, dict[str, Any]]:
    """Returns what was found, by family."""
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def store(family: str, found: Mapping[str, Any]) -> None:
    """Stores what was found about one family, with two digits of each error, next to what is known of it."""
    rounded = {key: float(f"{value:.1e}") if isinstance(value, float) else value for key, value in found.items()}
    everything = dict(sorted({**stored(), family: {**stored().get(family, {}), **rounded}}.items()))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in everything.items())
    DATA.write_text("{\n" + lines + "\n}\n")


def table() -> str:
    """Returns the table: a row per family, with a dash where nothing was compared."""
    rows = ["| family | class | configurations | read | written | scanned | bfloat16 | greedy texts | changes |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    data = stored()
    for name, family in nnx.models.FAMILIES.items():
        found = data.get(name, {})
        written = "—" if not found else "equal" if found["write"] == 0 else f"{found['write']:.0e}"
        errors = [f"{found[way]:.0e}" if way in found else "—" for way in ("read", "scanned", "bfloat16")]
        cells = [f"`{name}`", f"`{family.class_of(None)}`" if isinstance(family.classes, str) else "—"]
        cells += [str(found.get("configurations", "—")), errors[0], written, *errors[1:], found.get("greedy", "—")]
        cells.append(f"{found['ok']} + {found['refused']}" if "ok" in found else "—")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def updated(text: str) -> str:
    """Returns the page with today's table."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
