"""Text from outside, such as the name of a folder, as a terminal and a log file can bear it."""

import unicodedata

# They move the cursor, break lines, turn the direction of what follows, or can't be encoded.
CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
JOINERS = "\u200c\u200d"  # but these two join and part letters, in many scripts and in emoji


def printable(text: str) -> str:
    r"""`text` in one line; what would control the terminal is shown as Python writes it: `\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(visible, text))


def visible(character: str) -> str:
    """`character`, or its escape sequence if it is none to be seen."""
    if unicodedata.category(character) not in CATEGORIES or character in JOINERS:
        return character
    return character.encode("unicode_escape").decode("ascii")
