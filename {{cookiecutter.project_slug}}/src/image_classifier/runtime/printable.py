"""Text from outside, such as the name of a folder, as a terminal and a log file can bear it."""

import os
import re
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


def printable_path(name: bytes) -> str:
    """A path that can be printed, and from which `path_of` makes the same bytes."""
    shown = ""
    for letter in os.fsdecode(name).replace("\\", "\\\\"):
        codes = "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))
        shown += letter if letter.isprintable() else codes
    return shown


def path_of(text: str) -> bytes:
    r"""The path that `printable_path` shows as `text`."""
    return re.sub(
        rb"\\(?:x([0-9a-f]{2})|\\)",
        lambda found: bytes.fromhex(found[1].decode()) if found[1] else b"\\",
        text.encode(),
    )
