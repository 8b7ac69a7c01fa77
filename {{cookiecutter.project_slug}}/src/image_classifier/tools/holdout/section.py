"""The section "Test" of the page of a run."""

from html import escape
from types import ModuleType

from ...metrics import Decision, Predictions

told = ""  # what the observer has found of the run in this process


def build_section(_: Predictions, __: Decision, ___: ModuleType) -> str:
    """The scores on the test images; nothing before they are known."""
    return f"<h2>Test</h2><p>{escape(told)}; nothing was chosen by these images.</p>" * bool(told)
