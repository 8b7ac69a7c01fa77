"""Pictures of a run for the README: the terminal, `docs/session.svg`, and its `docs/report.png`.

    python benchmarks/session.py --photos trash    # a folder of a folder for each class

A project is made in an empty folder, fine-tunes a network on the photographs, and predicts one of
them, in the environment of this repository. Progress lines are left out. Needs Chromium.
"""

import argparse
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measurements import ROOT
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

DOCS = ROOT / "docs"
WIDTH = 110  # characters of a line
RUN = "runs/finetune_lite0"
PROGRESS = re.compile(r"\bETA |\) is the limit| is the limit: |^importing|^an image: ")
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # from another host
SIZE = {"width": 1160, "height": 1500}  # of the picture of the report, in pixels


def main() -> None:
    """Run the session in a folder of its own, and write both pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, required=True)
    photos = parser.parse_args().photos.resolve()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "photos").symlink_to(photos)
        one = sorted(photos.glob("*/*"))[0].relative_to(photos)
        show(console, here, "pretuned --no-input")
        show(console, None, "cd image-classifier")
        project = here / "image-classifier"
        show(console, project, "python train.py finetune_lite0 --data.root ../photos")
        show(console, project, f"image-classifier predict {RUN} {shlex.quote(f'../photos/{one}')}")
        take_picture(project / RUN / "report.html", DOCS / "report.png")
    svg = console.export_svg(title="a folder of photographs", theme=MONOKAI)
    (DOCS / "session.svg").write_text(FONTS.sub("", svg), encoding="utf-8")


def show(console: Console, folder: Path | None, command: str) -> None:
    """Run a command in a folder, and print it with what it prints."""
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    if folder is None:
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(folder / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}")
    for line in done.stdout.splitlines():
        if not PROGRESS.search(line):
            console.print(Text(line))


def take_picture(page: Path, path: Path) -> None:
    """Write the upper part of a page as a picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        tab = browser.new_page(viewport=SIZE)
        tab.goto(page.as_uri())
        tab.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    main()
