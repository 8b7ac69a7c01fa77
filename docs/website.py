"""Build the site of all pages, to be read offline: `python docs/website.py [FOLDER]`.

The pages stay where they are. Copies are gathered in `FOLDER/site-src`, with links that fit their
places on the site, and Sphinx makes HTML of those, in `FOLDER/site`. A link or an anchor that leads
nowhere is an error. The folder is `build`, if none is given.
"""

import re
import shutil
import sys
from pathlib import Path
from posixpath import dirname, relpath
from urllib.parse import unquote

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "{{cookiecutter.project_slug}}"
HOME = ROOT / "README.md"
CHAPTERS = {  # patterns of pages; a page is in the first chapter that has it
    "Begin": ("docs/make_a_project.md", "docs/coming_from.md"),
    "Your project": (f"{PROJECT}/README.md", f"{PROJECT}/docs/guide.md", f"{PROJECT}/docs/*.md"),
    "Design and results": ("docs/design.md", "docs/*.md"),
    "Tools": (f"{PROJECT}/src/*/tools/*/README.md",),
    "Contribute": (
        "CONTRIBUTING.md",
        "SECURITY.md",
        f"{PROJECT}/AGENTS.md",
        "benchmarks/README.md",
    ),
    "History": ("CHANGELOG.md", "docs/notes/*.md"),
}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)[^)\s#]+")  # to a file, without an anchor in it
SETTINGS = {
    "project": "Pretuned",
    "html_title": "Pretuned",
    "html_theme": "furo",  # loads no fonts or scripts of other hosts
    "html_copy_source": False,
    "html_show_copyright": False,
    "extensions": ["myst_parser"],  # CommonMark, as GitHub shows it
    "myst_heading_anchors": 6,  # GitHub's, for headings down to this level
    "smartquotes": False,
    # Levels that a page skips, and code in a language that Pygments does not know.
    "suppress_warnings": ["myst.header", "misc.highlighting_failure"],
}


def chapters() -> dict[str, list[Path]]:
    """The pages of each chapter, in order."""
    found: dict[str, list[Path]] = {}
    seen: set[Path] = set()
    for title, patterns in CHAPTERS.items():
        pages = [page for pattern in patterns for page in sorted(ROOT.glob(pattern))]
        found[title] = [page for page in dict.fromkeys(pages) if page not in seen]
        seen.update(pages)
    return found


def place(page: Path) -> str:
    """Where on the site a page is: a path that ends in `.md`."""
    name = re.sub(r"docs/|src/\w+/", "", page.relative_to(ROOT).as_posix())
    return name.replace(PROJECT, "project").replace("README", "index")


def copy(page: Path, pages: list[Path], source: Path) -> None:
    """Copy a page to its place in the folder `source`, and beside it the files it shows."""
    target = source / place(page)
    target.parent.mkdir(parents=True, exist_ok=True)

    def fit(link: re.Match[str]) -> str:
        file = (page.parent / unquote(link[0])).resolve()
        if file in pages:
            return relpath(place(file), dirname(place(page)))
        if file.is_file():
            shutil.copy(file, target.parent)
        return file.name

    target.write_text(LINK.sub(fit, page.read_text(encoding="utf-8")), encoding="utf-8")


def gather(source: Path) -> None:
    """Copy all pages into the folder `source`; the first has the contents of the site."""
    contents = chapters()
    pages = [HOME, *(page for chapter in contents.values() for page in chapter)]
    for page in pages:
        copy(page, pages, source)
    with (source / place(HOME)).open("a", encoding="utf-8") as home:
        for title, chapter in contents.items():
            names = "\n".join(map(place, chapter))
            home.write(f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{names}\n```\n")


def set_language(_: Sphinx, name: str, _template: str, context: dict, _tree: object) -> None:
    """Give a page its language, by which browsers choose fonts and break lines."""
    context["language"] = "ko" if name.endswith(".ko") else "en"


def build(source: Path, site: Path) -> bool:
    """Build the site of the pages in `source`; False if a link of theirs leads nowhere."""
    trees = source / ".doctrees"
    app = Sphinx(source, None, site, trees, "html", SETTINGS, status=None, warningiserror=True)
    app.connect("html-page-context", set_language)
    app.build()
    return app.statuscode == 0


def main(folder: Path) -> int:
    """Build the site anew in `folder`, and return the exit code."""
    source = folder / "site-src"
    site = folder / "site"
    for old in (source, site):
        shutil.rmtree(old, ignore_errors=True)
    gather(source)
    return 0 if build(source, site) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build"))
