"""`explain`: from the words of an error, or a whole log, to what it is and what helps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import log

from packaging.version import Version

from ds_patches.commands import page, symptoms
from ds_patches.commands.page import Section
from ds_patches.core import columns, release
from ds_patches.symptoms import OLDEST, SYMPTOMS, TESTED, Symptom

_MOST = 3
_REPORT = "report it where you got ds_patches, with the traceback and `ds-patches doctor --json`"


def explain(text: str, asked: Version | None, *, as_json: bool) -> bool:
    """Print what is known of a text, or a file's, for the release that is asked for, or installed.

    Returns whether anything is.
    """
    if os.path.isfile(text):
        with open(text, encoding="utf-8", errors="replace") as file:
            text = file.read()
    installed = release.installed()
    version = asked or (installed.version if installed else None)
    cures = symptoms.of_releases(asked) if asked else symptoms.here()
    found = [*answers(text, version, cures)]
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        unknown = [{"what": "not known", "do": _REPORT}]
        texts = ("\n".join(columns.aligned([*one.items()])) for one in found or unknown)
        print("\n\n".join(texts))
    return bool(found)


def answers(
    text: str, version: Version | None, cures: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield what is known of a text; cures: for each patch, why it would not be applied."""
    found = sections(text)
    applying = [one for one in found if not one[1] and _applies(one[0], version)]
    for section, said in applying or found:
        rows = _rows(section, said, version)
        told = [_of_row(one, section, version, cures) for one in rows] or [
            {
                "what": symptoms.plain(section.title),
                "do": _first(section.body),
                "read": _read(section),
            }
        ]
        # Without a message it is a guess, by the words.
        yield from (one if said else one | {"what": f"perhaps: {one['what']}"} for one in told)


def _applies(section: Section, version: Version | None) -> bool:
    return version is not None and any(symptoms.is_wrong(one, version) for one in _of(section))


def sections(text: str) -> list[tuple[Section, str]]:
    """Return the sections whose messages stand in a text; else the one that it is most about."""
    known = [
        (section, message)
        for section in page.sections()
        for message in (*section.messages, *chain.from_iterable(map(_told, _of(section))))
    ]
    found: dict[Section, str] = {}
    for section, said in page.hits(text, known):
        found.setdefault(section, said)
    return [*found.items()][:_MOST] or [(one, "") for one in _about(text)[:_MOST]]


def _told(one: Symptom) -> tuple[str, ...]:
    """Return the messages of a row; where it has none, its own words."""
    return tuple(page.codes(one.outcome)) or (
        symptoms.plain(one.outcome),
        symptoms.plain(one.script),
    )


def _about(text: str) -> list[Section]:
    """Return the sections that have most of a question's words, the rarer the better."""
    asked = page.words(text)
    if not asked or "\n" in text.strip():
        return []
    every = {section: (page.words(section.title), _words(section)) for section in page.sections()}
    rare = {w: log(len(every) / (1 + sum(w in all_ for _, all_ in every.values()))) for w in asked}

    def score(section: Section) -> float:
        title, all_ = every[section]
        return sum(rare[w] * ((w in title) + (w in all_)) for w in asked)

    best = max(map(score, every))
    return [one for one in every if score(one) == best > sum(rare.values()) / 2]


def _words(section: Section) -> frozenset[str]:
    rows = " ".join(f"{one.script} {one.outcome}" for one in _of(section))
    return page.words(f"{section.title} {section.body} {rows}")


def _of(section: Section) -> list[Symptom]:
    return [one for one in SYMPTOMS if section.anchor and one.anchor == section.anchor]


def _rows(section: Section, said: str, version: Version | None) -> Sequence[Symptom]:
    """Return the rows of a section: of this message, if any is, and of this release, if any is."""
    rows = _of(section)
    rows = [
        one for one in rows if any(page.pattern(message)[0].search(said) for message in _told(one))
    ] or rows
    here = [one for one in rows if version and symptoms.is_wrong(one, version)]
    return (here or rows)[:_MOST]


def _of_row(
    one: Symptom, section: Section, version: Version | None, cures: Mapping[str, str]
) -> dict[str, str]:
    where = f"ZeRO {', '.join(map(str, one.stages))}"
    right = f"right from {one.right}" if one.right else f"right in no release up to {TESTED}"
    answer = {
        "what": symptoms.plain(f"{one.script}, {where}: {one.outcome}"),
        "when": f"wrong from {one.first}, {right}",
    }
    if version is None:
        answer |= {"here": "DeepSpeed is not installed", "do": "say which: --release 0.18.4"}
    elif symptoms.is_wrong(one, version):
        cure = symptoms.cure(one, version, cures)
        answer |= {"here": f"DeepSpeed {version}: {cure.said}", "do": symptoms.plain(cure.do)}
    elif not Version(OLDEST) <= version <= Version(TESTED):
        answer |= {"here": f"DeepSpeed {version} was not tested", "do": _REPORT}
    else:
        answer |= {"here": f"DeepSpeed {version} is not known to do this", "do": _REPORT}
    return answer | {"read": _read(section)}


def _read(section: Section) -> str:
    return f"{page.path()}" + f"#{section.anchor}" * bool(section.anchor)


def _first(body: str) -> str:
    """Return what fits into a few lines of the first paragraph, in plain text."""
    sentences = re.split(r"(?<=[.:]) ", symptoms.plain(body.partition("\n\n")[0]))
    ends = accumulate(sentences, "{} {}".format)
    return [end for end in ends if len(end) < 300 or end == sentences[0]][-1]
