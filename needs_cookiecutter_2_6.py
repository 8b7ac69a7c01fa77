"""Where cookiecutter finds the gate: 1.7 finds nothing beside a template, and shows this name."""

from pretuned_answers.gate import Gate

__all__ = ["Gate"]
