"""The site has every page, every link in it leads somewhere, and it asks nothing of other hosts."""

import re
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
import website
from conftest import PROJECT, ROOT, python, run, tracked_files

ELSEWHERE = {"PULL_REQUEST_TEMPLATE.md"}  # on GitHub


class Names(HTMLParser):
    """The anchors of a page, what it links to, and what a browser loads to show it."""

    def __init__(self, path):
        super().__init__()
        self.anchors = {""}
        self.links = []
        self.loaded = []
        self.language = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        """Note what a tag names."""
        have = dict(attrs)
        self.anchors.add(have.get("id", ""))
        if tag == "html":
            self.language = have["lang"]
        elif tag == "a" and "href" in have:
            self.links.append(have["href"])
        elif "src" in have or (tag == "link" and "href" in have):
            self.loaded.append(have.get("src", have.get("href")))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    python("docs/website.py", str(folder), folder=ROOT)
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site):
    return {path: Names(path) for path in site.rglob("*.html")}


def test_every_page_is_there(pages, site):
    names = {name for name in tracked_files(ROOT) if name.suffix == ".md"}
    assert (PROJECT / "src/image_classifier/tools/lora/README.md").relative_to(ROOT) in names
    for name in names:
        if not str(name).endswith(tuple(ELSEWHERE)):
            assert (site / website.place(ROOT / name)).with_suffix(".html") in pages, name


def test_every_link_leads_somewhere_and_every_page_can_be_reached_from_the_first(pages, site):
    reached = set()
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            if not re.match("https?:|data:", link):
                name, _, anchor = link.partition("#")
                target = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
                assert target.is_file(), (path, link)
                assert target not in pages or unquote(anchor) in pages[target].anchors, (path, link)
                reached |= {target} if path == site / "index.html" else set()
    assert {*pages} - reached <= {site / "genindex.html"}


def test_the_korean_page_says_its_language(pages, site):
    assert pages[site / "articles.ko.html"].language == "ko"
    assert pages[site / "articles.html"].language == "en"


def test_nothing_is_loaded_from_other_hosts(pages, site):
    loaded = [name for page in pages.values() for name in page.loaded]
    assert len(loaded) > len(pages)
    assert [name for name in loaded if ":" in name and not name.startswith("data:")] == []
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\([\"']?(https?:)?//", text), sheet


def test_a_link_that_leads_nowhere_is_an_error(here):
    links = ["[x](no_page.md)", "[x](#no-anchor)", "[x](more.md#no-title)", "![x](no_image.png)"]
    (here / "index.md").write_text("# Home\n\n" + "\n".join(["[x](more.md#more)", *links]))
    (here / "more.md").write_text("---\norphan: true\n---\n\n# More\n")
    code = "import website; from pathlib import Path; print(website.build(Path(), Path('site')))"
    done = run(sys.executable, "-c", code, folder=here, PYTHONPATH=str(ROOT / "docs"))
    assert done.stdout == "False\n"
    warnings = [line for line in done.stderr.splitlines() if "index.md:" in line]
    assert len(warnings) == len(links)
    for name in ("no_page", "no-anchor", "no-title", "no_image"):
        assert any(name in line for line in warnings), name
