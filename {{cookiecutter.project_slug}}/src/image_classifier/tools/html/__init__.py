"""What pages are made of: charts, and the page itself, without any script.

Both escape text from outside, such as the names of classes.
"""

from .style import PAGE
from .svg import line_chart, reliability_diagram

__all__ = ["PAGE", "line_chart", "reliability_diagram"]
