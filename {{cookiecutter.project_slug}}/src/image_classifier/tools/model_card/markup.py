"""Markdown and YAML, in which text from outside, such as the name of a class, stays text."""

import json
import re
from collections.abc import Iterable, Sequence

from ...runtime.console import printable

# What may begin markup, HTML, a formula or a link within a line.
MARKUP = re.compile(r"[\\`*_\[\]<>#&|~$:@]|(?<=www)\.", re.IGNORECASE)

Yaml = str | int | float | list["Yaml"] | dict[str, "Yaml"]


def escape(text: str) -> str:
    """`text` in one line of Markdown, also in a cell of a table."""
    return MARKUP.sub(r"\\\g<0>", printable(text))


def code(language: str, *lines: str) -> str:
    """Lines of code as a block."""
    return "\n".join([f"```{language}", *map(printable, lines), "```"])


def items(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names and what they are, both Markdown."""
    return "\n".join(f"- {name}: {value}" for name, value in pairs)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1) -> str:
    """A table; cells are Markdown, after the first `num_texts` of a row numbers."""
    marks = [*["---"] * num_texts, *["---:"] * (len(heads) - num_texts)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, marks, *rows))


def yaml_lines(value: Yaml) -> list[str]:
    """The lines of a value in YAML, one at least; text is quoted as in JSON."""
    if isinstance(value, dict):
        return [line for key, inner in value.items() for line in entry(f"{key}:", inner)]
    if isinstance(value, list):
        return [line for inner in value for line in entry("-", inner)]
    return [json.dumps(printable(value) if isinstance(value, str) else value, ensure_ascii=False)]


def entry(head: str, value: Yaml) -> list[str]:
    """The lines of a key or a dash with its value, which begins in the same line if it can."""
    first, *others = yaml_lines(value)
    if isinstance(value, dict | list) and head != "-":
        return [head, *(f"  {line}" for line in (first, *others))]
    return [f"{head} {first}", *(f"  {line}" for line in others)]
