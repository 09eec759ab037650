"""The README as a package index shows it, where links to files of the repository lead nowhere.

With the address of the repository, such links become absolute; without it, only their text remains. `hatch_build.py`
uses this for the package's long description.
"""

import re

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def long_description(readme: str, repository: str = "", revision: str = "main") -> str:
    """Returns the README with links that work outside the repository.

    Args:
        readme: the text of README.md.
        repository: the address of the repository; empty if it has none.
        revision: the tag or branch that the links lead to.
    """

    def link(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"https?://|#|mailto:", target):
            return match[0]
        if not repository:
            return match["text"]
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({repository.rstrip('/')}/{kind}/{revision}/{target})"

    # Every second part is a block of code, in which brackets are no links.
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(FENCE.split(readme)))
