"""Lines and bars of charts lie where their numbers are."""

import re

import pytest
import torch

from image_classifier.metrics import BINS
from image_classifier.tools.report import charts


def points_of(chart):
    """The places of the points of its only line, in pixels from the left and from above."""
    (path,) = re.findall('<polyline points="([^"]*)"', chart)
    return [tuple(map(float, point.split(","))) for point in path.split()]


def test_a_line_goes_to_the_right_with_x_and_up_with_y_as_its_axes_say():
    chart = charts.line_chart("loss", {"val": [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)]})
    across, down = zip(*points_of(chart), strict=True)
    assert across == (charts.LEFT, (charts.LEFT + charts.RIGHT) / 2, charts.RIGHT)
    places = dict(re.findall(r'<text class="y" x="[\d.]+" y="([\d.]+)">(\d)</text>', chart))
    levels = {level: float(place) - 4 for place, level in places.items()}
    assert down == (levels["1"], levels["3"], levels["2"])
    assert down[0] > down[2] > down[1]


def test_a_logarithmic_axis_has_powers_of_ten_at_equal_distances():
    points = [(0.001, 1.0), (0.01, 2.0), (0.1, 3.0)]
    across, _ = zip(*points_of(charts.line_chart("loss", {"": points}, is_log=True)), strict=True)
    assert across == (charts.LEFT, (charts.LEFT + charts.RIGHT) / 2, charts.RIGHT)
    assert charts.powers_of_ten(0.002, 30) == pytest.approx([0.01, 0.1, 1, 10])  # none outside


@pytest.mark.parametrize(
    ("lowest", "low", "begin"), [(900.0, None, "900"), (900.0, 0, "0"), (-900.0, 0, "-1,000")]
)
def test_an_axis_of_amounts_begins_at_zero_and_others_near_the_lowest(lowest, low, begin):
    chart = charts.line_chart("loss", {"val": [(0.0, lowest), (1.0, 950.0)]}, low=low)
    assert re.findall('<text class="y"[^>]*>([^<]*)</text>', chart)[0] == begin


def test_of_many_lines_the_main_one_is_in_color_on_top_and_named():
    lines = {name: [(0.0, 1.0), (1.0, 2.0)] for name in ("val", "002", "train")}
    for main, styles, named in (
        ("002", ["train", "train", "val"], ["002 2"]),
        (None, ["val", "val", "train"], ["val 2", "002 2", "train 2"]),
    ):
        chart = charts.line_chart("loss", lines, main=main)
        assert re.findall('<g class="([^"]*)"><polyline', chart) == styles
        assert re.findall("</i>([^<]*)</span>", chart) == named


def test_a_line_of_many_points_ends_with_the_last_of_them():
    chart = charts.line_chart("loss", {"val": [(float(n), 0.5 * n) for n in range(1002)]})
    points = points_of(chart)
    assert len(points) <= charts.MOST_POINTS
    assert points[-1][0] == charts.RIGHT
    assert ">500.5</span>" in chart


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.013, 0.027), (-3, 1), (2.3, 2.31), (5, 5), (0, 0), (1e-7, 9e8)]
)
def test_a_few_ticks_reach_from_the_lowest_value_to_the_highest(low, high):
    ticks = charts.ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low
    assert ticks[-1] >= high


def test_a_bar_is_as_high_as_the_accuracy_of_its_confidence():
    bins = torch.zeros(3, BINS)
    bins[:, BINS - 1] = torch.tensor([12, 0.95, 0.25])  # images, said, right
    chart = charts.reliability_diagram(bins)
    assert "<title>12 images: confidence 95.0%, accuracy 25.0%</title>" in chart
    (place,) = re.findall(r'<rect x="[\d.]+" y="([\d.]+)"', chart)
    assert float(place) == charts.BOTTOM - (charts.BOTTOM - charts.TOP) / 4
    ((left, height),) = re.findall(r'<rect x="([\d.]+)" .* height="([\d.]+)"', chart)
    begin = charts.RIGHT - (charts.RIGHT - charts.LEFT) / BINS  # of the last of its bins
    assert float(left) == pytest.approx(begin, abs=1.1)
    assert float(height) == charts.BOTTOM - float(place)


def test_numbers_of_an_axis_are_short():
    numbers = {1e-4: "0.0001", 2.5: "2.5", 9800: "9,800", 12_500: "12.5k", 3e6: "3M", 4e9: "4G"}
    assert [charts.short(number) for number in numbers] == [*numbers.values()]
