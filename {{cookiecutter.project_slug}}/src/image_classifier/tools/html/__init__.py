"""What pages are made of: charts, tables, images, and the page itself, without any script.

All of it escapes text from outside, such as the names of classes.
"""

from .images import Picture, gallery
from .style import PAGE
from .svg import line_chart, reliability_diagram
from .tables import class_table, confused_pairs, confusion_matrix, definitions

__all__ = [
    "PAGE",
    "Picture",
    "class_table",
    "confused_pairs",
    "confusion_matrix",
    "definitions",
    "gallery",
    "line_chart",
    "reliability_diagram",
]
