"""Names of classes that may be a mistake in a table."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ...data import look

SEPARATORS = ",;/+&\n "  # with which others write several labels
MAYBE_MISSING = ("none", "na", "-", "--", "?")  # or the name of a class
MOST_GROUPS = 3  # of names, in a note


def loose_name(name: str) -> str:
    """What is equal for names that look alike: but for case, spaces, or the form of letters."""
    with suppress(ValueError):
        return str(float(name))
    return re.sub(r"[\s_-]+", " ", look(name))


def groups_text(groups: Iterable[list[str]]) -> str:
    """The first groups of several names; nothing if there are none."""
    found = [" and ".join(map(ascii, own)) for own in groups if len(own) > 1]
    return ", ".join(found[:MOST_GROUPS]) + ", ..." * (len(found) > MOST_GROUPS)


def notes_of_names(spellings: dict[str, list[str]]) -> list[str]:
    """What may be a mistake in the names of classes, each with the ways it is written."""
    notes = []
    if shown := groups_text(spellings.values()):
        notes.append(f"equal names are one class: {shown}")
    groups: dict[str, list[str]] = defaultdict(list)
    for name in spellings:
        groups[loose_name(name)].append(name)
    if shown := groups_text(groups.values()):
        what = f"classes with names that look alike: {shown}; if they are one, write it in one way"
        notes.append(what)
    notes += [
        f"{name!a} is a class; if it means that there is none, leave out these rows"
        for name in spellings
        if name.lower() in MAYBE_MISSING
    ]
    return [*notes, *joined([*spellings])]


def joined(names: list[str]) -> Iterator[str]:
    """A note of names that look like several labels, whose parts are in many names."""
    for mark in SEPARATORS:
        parts = {name: [part.strip() for part in name.split(mark)] for name in names}
        several = [name for name in names if len(parts[name]) > 1 and all(parts[name])]
        # With few parts in many names, as in `sky, sea, sky sea`, these are labels.
        if several and len({part for own in parts.values() for part in own}) < len(names):
            example = "|".join(parts[several[0]])
            yield (
                f"class {several[0]!a} looks like several labels, but {mark!a} does not separate "
                f"labels: write {example!a}"
            )
            return
