"""Faults, injected for real into the project that is made: `python -m faults` has the table."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path.insert(0, str(PROJECT / "src"))
