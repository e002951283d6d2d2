"""The paper of a method, from the docstring of its file, and its BibTeX entry.

The second paragraph of the docstring begins with the citation: "Authors: Title, VENUE YEAR." The venue may be missing,
and a note in parentheses may follow the year: for arXiv, the identifier.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import NamedTuple

from coterie.core.method import AnyMethod

CITATION = re.compile(
    r"(?P<authors>[^:]+): (?P<title>.+?), (?:(?P<venue>[A-Za-z][A-Za-z ]*) )?(?P<year>(?:19|20)\d\d)"
    r"(?: \((?P<note>[^)]*)\))?\.(?: (?P<details>.*))?"
)
JOURNALS = ("IEEE TNNLS",)


class Citation(NamedTuple):
    authors: tuple[str, ...]  # surnames
    title: str
    venue: str  # empty if the docstring names none
    year: int
    note: str

    def __str__(self) -> str:
        return f"{', '.join(self.authors)}: {self.title}, {f'{self.venue} {self.year}'.strip()}"


class Description(NamedTuple):
    """The docstring of a method's file."""

    about: str  # one sentence
    citation: Citation | None
    details: str  # deviations from the paper, and readings of it


def described(kind: type[AnyMethod]) -> Description:
    """Works for any method; one that is not written like ours has no citation."""
    paragraphs = (sys.modules[kind.__module__].__doc__ or "").split("\n\n")
    about, text, *more = [" ".join(part.split()) for part in paragraphs] + [""]
    found = CITATION.fullmatch(text)
    if not found:
        return Description(about, None, " ".join([text, *more]).strip())
    authors = tuple(found["authors"].split(", "))
    citation = Citation(authors, found["title"], found["venue"] or "", int(found["year"]), found["note"] or "")
    return Description(about, citation, " ".join([found["details"] or "", *more]).strip())


def key(name: str, citation: Citation) -> str:
    """Such as zhang2023fedala."""
    plain = unicodedata.normalize("NFKD", f"{citation.authors[0].split()[0]}{citation.year}{name}")
    return re.sub("[^a-z0-9]", "", plain.lower())


def bibtex(name: str, citation: Citation) -> str:
    """name: of the method, for the key. Surnames of several words are in braces."""
    authors = " and ".join(f"{{{author}}}" if " " in author else author for author in citation.authors)
    fields = {"author": authors, "title": f"{{{citation.title}}}"}
    kind = "inproceedings"
    match citation.venue:
        case "":
            kind = "misc"
        case "arXiv":
            kind = "misc"
            fields |= {"eprint": citation.note, "archiveprefix": "arXiv"}
        case journal if journal in JOURNALS:
            kind = "article"
            fields["journal"] = journal
        case conference:
            fields["booktitle"] = conference
    fields["year"] = str(citation.year)
    lines = [f"  {field} = {{{value}}}," for field, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key(name, citation)},", *lines, "}"])
