"""What pages are made of: charts, and the page itself, without any script.

Charts escape text from outside, such as the names of classes. The policy of `page.html` forbids
scripts and requests, even if such text came through as HTML.
"""

from pathlib import Path
from string import Template

from .svg import line_chart, parallel_coordinates, reliability_diagram

PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

__all__ = ["PAGE", "line_chart", "parallel_coordinates", "reliability_diagram"]
