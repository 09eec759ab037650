"""The search of the site in Python: ranks the pages as lunr and Material for MkDocs do in the browser.

An *entry* of the index is a page or one of its sections. Its *fields* (title, text) hold terms, and each term weighs as
much as its BM25 score with lunr's constants. Every word of a query also matches longer terms that begin with it.
"""

import json
import math
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import unescape
from typing import Any

K1 = 1.2  # how soon repeating a term stops to count; the length of a field does not matter (b = 0)
STOP_WORDS = set(
    """
    a able about across after all almost also am among an and any are as at be because been but by can
    cannot could dear did do does either else ever every for from get got had has have he her hers him
    his how however i if in into is it its just least let like likely may me might most must my neither
    no nor not of off often on only or other our own rather said say says she should since so some than
    that the their them then there these they this tis to too twas us wants was we were what when where
    which while who whom why will with would yet you your
    """.split()
)


class SearchIndex:
    """The index that a build of the site has written."""

    def __init__(self, path: pathlib.Path) -> None:
        built = json.loads(path.read_text())
        self.entries: list[dict[str, Any]] = built["docs"]
        self.separator = re.compile(built["config"]["separator"])
        self.field_boost = {name: field["boost"] for name, field in built["config"]["fields"].items()}
        # term -> field -> number of the entry -> how often
        self.postings: dict[str, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        for number, entry in enumerate(self.entries):
            for field in self.field_boost:
                value = entry.get(field, "")
                for term, count in Counter(self.terms(" ".join(value) if isinstance(value, list) else value)).items():
                    self.postings[term][field][number] = count

    def terms(self, text: str) -> Iterator[str]:
        """The terms of a text, without HTML tags."""
        for term in self.separator.split(unescape(re.sub(r"<[^>]*>", " ", text)).lower()):
            if term and term not in STOP_WORDS:
                yield term

    def weight(self, term: str, field: str, number: int) -> float:
        """What a term weighs in a field of an entry."""
        posting = self.postings[term]
        found = sum(len(entries) for entries in posting.values())
        rarity = math.log(1 + abs((len(self.entries) - found + 0.5) / (found + 0.5)))
        count = posting[field][number]
        boost = self.field_boost[field] * self.entries[number].get("boost", 1)
        return rarity * (K1 + 1) * count / (K1 + count) * boost

    def search(self, query: str) -> list[str]:
        """The addresses of the matching pages, best first."""
        words = [word for word in self.separator.split(query.lower()) if word]
        expanded = [(word, term) for term in self.postings for word in words if term.startswith(word)]
        length = math.sqrt(sum(count**2 for count in Counter(term for _, term in expanded).values()))
        scores: dict[int, float] = defaultdict(float)
        matched: dict[int, set[str]] = defaultdict(set)
        for word, term in expanded:
            for field, entries in self.postings[term].items():
                for number in entries:
                    scores[number] += self.weight(term, field, number) / length
                    matched[number].add(word)
        best: dict[str, float] = {}
        for number, score in scores.items():
            location = self.entries[number]["location"]
            page, _, section = location.partition("#")
            bonus = (not section) + len(matched[number]) / len(words)
            best[page] = max(best.get(page, 0), score * (1 + bonus**2))
        return sorted(best, key=lambda page: -best[page])
