"""The paper of a method, from the docstring of its file, and its BibTeX entry.

The second paragraph of the docstring begins with the citation: "Authors: Title, VENUE YEAR." Authors have their full
names, as BibTeX reads them: a surname of several words is in braces. The venue may be missing, and a note in
parentheses may follow the year: for arXiv, the identifier.
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
JOURNALS = {
    "IEEE TNNLS": "IEEE Transactions on Neural Networks and Learning Systems",
    "IEEE TSP": "IEEE Transactions on Signal Processing",
}
CONFERENCES = {
    "AAAI": "Proceedings of the AAAI Conference on Artificial Intelligence",
    "ACM MM": "Proceedings of the ACM International Conference on Multimedia",
    "AISTATS": "International Conference on Artificial Intelligence and Statistics",
    "CVPR": "Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition",
    "ECML PKDD": "Machine Learning and Knowledge Discovery in Databases (ECML PKDD)",
    "ICCV": "Proceedings of the IEEE/CVF International Conference on Computer Vision",
    "ICLR": "International Conference on Learning Representations",
    "ICML": "International Conference on Machine Learning",
    "IEEE SMC": "IEEE International Conference on Systems, Man, and Cybernetics",
    "IJCAI": "Proceedings of the International Joint Conference on Artificial Intelligence",
    "KDD": "Proceedings of the ACM SIGKDD Conference on Knowledge Discovery and Data Mining",
    "MLSys": "Proceedings of Machine Learning and Systems",
    "NeurIPS": "Advances in Neural Information Processing Systems",
    "PRICAI": "Pacific Rim International Conference on Artificial Intelligence",
}


class Citation(NamedTuple):
    authors: tuple[str, ...]  # as in BibTeX: First Last, First {Two Words}
    title: str
    venue: str  # empty if the docstring names none
    year: int
    note: str


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
    return Description(about, parsed(found), " ".join([found["details"] or "", *more]).strip())


def cited(text: str) -> Citation:
    """The citation of a text that is one."""
    found = CITATION.fullmatch(text)
    assert found, text
    return parsed(found)


def parsed(found: re.Match[str]) -> Citation:
    authors = tuple(found["authors"].split(", "))
    return Citation(authors, found["title"], found["venue"] or "", int(found["year"]), found["note"] or "")


def key(name: str, citation: Citation) -> str:
    """Such as zhang2023fedala."""
    first = citation.authors[0]
    surname = first.partition("{")[2] or first.rpartition(" ")[2]
    plain = unicodedata.normalize("NFKD", f"{surname}{citation.year}{name}")
    return re.sub("[^a-z0-9]", "", plain.lower())


def bibtex(name: str, citation: Citation) -> str:
    """A complete entry, in UTF-8. name: of the method, for the key. An unknown venue stays as it is."""
    fields = {"author": " and ".join(citation.authors), "title": f"{{{citation.title}}}"}
    kind = "inproceedings"
    match citation.venue:
        case "":
            kind = "misc"
            fields["note"] = citation.note
        case "arXiv":
            kind = "misc"
            fields |= {"eprint": citation.note, "archiveprefix": "arXiv"}
        case journal if journal in JOURNALS:
            kind = "article"
            fields["journal"] = JOURNALS[journal]
        case conference:
            fields["booktitle"] = CONFERENCES.get(conference, conference)
    fields["year"] = str(citation.year)
    lines = [f"  {field} = {{{value}}}," for field, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key(name, citation)},", *lines, "}"])
