"""Execute first_project.ipynb, and keep what its cells show: `python docs/first_project.py`.

Its cells have tags: those that install are skipped, as the environment has all they ask for; the
report is kept as a picture, as GitHub shows no frames, which `chromium` takes.
"""

import base64
import io
import os
import shutil
import sys
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image
from playwright.sync_api import sync_playwright

NOTEBOOK = Path(__file__).with_suffix(".ipynb")
PROJECT = "image-classifier"  # the folder of the project that the notebook makes
SECONDS = 300  # that a cell may take
SIZE = {"width": 1160, "height": 1020}  # of the picture of the report, in pixels
COLORS = 64  # in that picture, a quarter of the bytes


def execute(folder: Path, **variables: str) -> NotebookNode:
    """The notebook with what its cells show, executed in an empty folder.

    A cell that fails raises `CellExecutionError`. Processes that the notebook starts see the
    environment of this one, with the project that it makes as the installed one, and `variables`.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    metadata = deepcopy(notebook.metadata)
    # A name of its own: of the notebook's, the kernel would remember that nothing was there.
    installed = folder / "installed"
    installed.symlink_to(Path(PROJECT, "src"))
    settings = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{installed}{os.pathsep}{NOTEBOOK.parents[1] / 'src'}",
        "IPYTHONDIR": str(folder / ".ipython"),
        **variables,
    }
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # it warns of its ports, which are on 127.0.0.1
        resources={"metadata": {"path": str(folder)}},
        skip_cells_with_tag="installs",
        coalesce_streams=True,
        record_timing=False,
    )
    client.execute(env=os.environ | settings)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        if "text" in output:  # of a command, which believes that it has a terminal
            output.text = output.text.replace("\r\n", "\n")
    notebook.metadata = metadata  # the kernel wrote the versions of this machine into it
    return notebook


def tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    """The cells of a tag."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def picture_of(html: str) -> str:
    """A picture of a page as PNG in base64."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        tab = browser.new_page(viewport=SIZE)
        tab.set_content(html)
        taken = Image.open(io.BytesIO(tab.screenshot()))
        browser.close()
    content = io.BytesIO()
    taken.convert("RGB").quantize(COLORS).save(content, "png", optimize=True)
    return base64.b64encode(content.getvalue()).decode("ascii")


def main() -> None:
    """Execute the notebook, and write it with the outputs."""
    with TemporaryDirectory() as folder:
        notebook = execute(Path(folder))
    (report,) = tagged(notebook, "report")
    picture = {"image/png": picture_of(report.outputs[0].data["text/html"])}
    report.outputs = [nbformat.v4.new_output("display_data", picture)]
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
