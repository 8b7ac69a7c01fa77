"""The notebook for newcomers does what it says, and is kept with what it shows."""

import re
from pathlib import Path

import first_project
import nbformat
import pytest
from first_project import NOTEBOOK, tagged
from image_classifier import configure

pytest.importorskip("onnxruntime")  # which the notebook imports: not for every Python at once

NUMBER = r"\d\.\d{4}"
PATH = r"/(?:tmp|home|root|Users|content|work|usr|opt|var)/|site-packages"  # of a machine


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The folder of an execution, and the notebook afterwards.

    Cells that install are skipped, as the environment of the tests has the libraries; `pretuned`
    itself makes the project. There is no network: nobody answers at the address of the proxy.
    """
    folder = tmp_path_factory.mktemp("notebook")
    nobody = "http://127.0.0.1:9"
    return folder, first_project.execute(folder, http_proxy=nobody, https_proxy=nobody)


def shown(notebook, tag, kind="text/plain"):
    """What the cell of a tag printed, or displayed of a kind, one a line."""
    (cell,) = tagged(notebook, tag)
    return "\n".join(
        output["text"] if output.output_type == "stream" else output.data.get(kind, "")
        for output in cell.outputs
    )


def test_a_newcomer_gets_a_project_a_run_with_its_report_and_an_onnx_file(executed):
    folder, notebook = executed
    assert (folder / "image-classifier/train.py").exists()
    assert "Most confident mistakes" in (folder / "runs/drawings/report.html").read_text()
    assert "Most confident mistakes" in shown(notebook, "report", "text/html")
    lines = re.findall(rf"(\w+) +ONNX ({NUMBER})  model ({NUMBER})", shown(notebook, "onnx"))
    assert [name for name, *_ in lines] == ["apple", "lemon", "plum"]
    assert all(abs(float(onnx) - float(model)) < 1e-3 for _, onnx, model in lines)


def test_a_new_image_gets_its_label_as_a_file_as_an_image_and_as_pixels(executed):
    assert re.match(rf"(plum {NUMBER}\n)\1\1", shown(executed[1], "predict"))


def test_images_in_the_wrong_folder_are_among_the_mistakes(executed):
    captions = shown(executed[1], "mistakes", "text/markdown")
    named = {int(number) for number in re.findall(r"drawings/\w+/(\d+)\.jpg", captions)}
    assert {number for number in named if number % 20 == 9} == {29, 69}


def test_photographs_of_the_reader_fine_tune_a_pretrained_network():
    (cell,) = tagged(nbformat.read(NOTEBOOK, as_version=4), "train")
    names = {"PHOTOS": "my/birds", "Path": Path, "configure": configure, "fit": lambda _: None}
    exec(cell.source, names)
    config = names["config"]
    assert (config.data.root, config.run.dir) == ("my/birds", "runs/birds")
    assert config.run.init_from == "pretrained"
    assert config.model.name == "timm/tf_efficientnet_lite0"


def test_it_is_kept_with_all_outputs_small_and_without_paths_of_a_machine():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    skipped = tagged(notebook, "installs")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell not in skipped]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(cell.outputs for cell in cells)
    assert not any(cell.outputs for cell in skipped)
    assert "image/png" in tagged(notebook, "report")[0].outputs[0].data
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 300_000
    words = re.sub(r'"image/\w+": ".*"', "", text)  # which may have any letters
    assert not re.findall(PATH, words)
