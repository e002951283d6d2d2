"""docs/methods.md: an index of the methods by family, and a section for each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields

from coterie.analysis.catalogue import CLIENTS, MethodEntry, entries, message
from coterie.analysis.choosing import NEEDS, derived, grouped, needed
from coterie.analysis.citations import bibtex
from coterie.analysis.tables import clean
from coterie.core.families import DERIVED, DESIGNED, FAMILIES, SITUATIONS
from coterie.federation.history import POINTS

HEADER = f"""# Methods

This page is made from the code (`coterie methods --markdown`). `coterie methods` lists the methods by family, with
filters; `--suggest` gives a short list with reasons for one or several [situations](#situations). `coterie cite` prints
complete BibTeX entries of their papers, with full names of authors and venues:

```sh
coterie methods --family "personal head" --year 2021-2023
coterie methods --task regression --sends head
coterie methods --needs classes --traffic 0.5
coterie methods --sort traffic
coterie methods --suggest "label shift" "new clients"
coterie cite fedala ditto
```

Bytes are those of one client in one round, for the network that FedPAC uses on Fashion-MNIST (117,066 parameters) and
{CLIENTS} clients, with default settings; methods that need normalization layers send theirs for `conv4` with BatchNorm
(112,586 parameters). `Weights` and `Tree` are named tensors of a network, `Tensor` is one tensor of
the shape in parentheses, with K classes, d features and m clients. Momentum that stays on a client is not listed. What
a method suits is read from its paper's design and from its code; it is not a measurement.

Formulas show what a method is about, with default settings; the paragraph below each names deviations from the paper.
Client i has n_i samples, n_ik of class k, and the loss f_i, their mean of ℓ. A model w has an encoder θ with features
z = θ(x) and a head φ with logits u = φ(z). SGD(f; w) is local training on f that begins with w, and η a learning rate.
The server sums over the participants of a round; p_i is n_i / Σ_j n_j. An arrow assigns what is kept for the next step
or round."""


def markdown() -> str:
    groups = grouped(entries())
    lines = [HEADER, "", "## Index", ""]
    for family, group in groups.items():
        lines += [f"**[{heading(family)}](#{anchor(family)})**: {FAMILIES[family]}", ""]
        lines += ["| method | what it does | sends | bytes down | bytes up | year |", "|---|---|---|--:|--:|--:|"]
        lines += [index_row(e) for e in group]
        lines += [""]
    lines += ["## Situations", "", "| situation | methods declare that | their code shows that |", "|---|---|---|"]
    lines += [f"| {word} | {DESIGNED.get(word, '')} | {DERIVED.get(word, '')} |" for word in SITUATIONS]
    lines += ["", "## Where results are measured", ""]
    lines += [f"- `{point}`: {meaning}" for point, meaning in POINTS.items()]
    for family, group in groups.items():
        lines += ["", f"## {heading(family)}", "", FAMILIES[family]]
        for e in group:
            lines += ["", *section(e)]
    return "\n".join(lines) + "\n"


def heading(family: str) -> str:
    return family[0].upper() + family[1:]


def anchor(text: str) -> str:
    return text.replace(" ", "-")


def index_row(e: MethodEntry) -> str:
    t = e.behavior
    return (
        f"| [`{e.name}`](#{e.name}) | {e.description.about} | {', '.join(e.behavior.sends)} "
        f"| {t.bytes_down:,} | {t.bytes_up:,} | {e.year or ''} |"
    )


def section(e: MethodEntry) -> Iterator[str]:
    t, method, citation = e.behavior, e.method, e.description.citation
    yield from (f"### {e.name}", "", f"**{method.title}**. {e.description.about}", "")
    if method.formula:
        yield from ("```text", inspect.cleandoc(method.formula), "```", "")
    rows = [*message_rows(e, "down"), *message_rows(e, "up")]
    if rows:
        yield from ("| message | field | type | content |", "|---|---|---|---|", *rows, "")
    yield f"- Bytes: {t.bytes_down:,} down, {t.bytes_up:,} up. A client keeps: {words(e.stays)}."
    yield f"- Reported: {', '.join(f'{name} (`{point}`)' for name, point in method.results.items())}."
    yield f"- Suits: {'; '.join(suited(e)) or 'no situation in particular'}."
    yield f"- Needs: {', '.join(what for need, what in NEEDS.items() if needed(e, need)) or 'nothing special'}."
    yield f"- Privacy with default settings: {', '.join(f'`{kind}`' for kind in e.behavior.private) or 'none'}."
    if e.variants:
        yield f"- Variants: {', '.join(f'`{name}` ({title})' for name, title in e.variants.items())}."
    yield from settings(e)
    if e.description.details:
        yield from ("", e.description.details)
    if citation:
        yield from ("", "```text", bibtex(e.name, citation), "```")


def message_rows(e: MethodEntry, way: str) -> Iterator[str]:
    """One row for each field that is sent, with the type and the comment of its declaration."""
    kind = message(e.method, "server_send") if way == "down" else message(e.method, "client_train").__args__[1]
    declared = re.findall(r"^    (\w+): ([^#\n]*)(?:#(.*))?$", inspect.getsource(kind), re.M)
    for name, typed, comment in declared:
        if name in getattr(e.behavior, way):
            plain = re.sub(r"Annotated\[(\w+), .*\]| \| tuple\[\(\)\]| = .*", r"\1", typed.strip())
            yield f"| {way} | `{name}` | `{plain}` | {clean(comment.strip())} |"


def suited(e: MethodEntry) -> list[str]:
    """The situations with a reason where it is a number."""
    return [
        f"{word} ({derived(e, word)})" if word == "little bandwidth" else word for word in SITUATIONS if e.meets(word)
    ]


def settings(e: MethodEntry) -> Iterator[str]:
    own = [f for f in fields(e.method) if f.name != "train"]
    if own:
        yield from ("", "| setting | default | what it is |", "|---|---|---|")
        yield from (f"| `{f.name}` | {f.default} | {clean(f.metadata.get('help', ''))} |" for f in own)


def words(names: tuple[str, ...]) -> str:
    return ", ".join(name.replace("_", " ") for name in names) or "nothing"
