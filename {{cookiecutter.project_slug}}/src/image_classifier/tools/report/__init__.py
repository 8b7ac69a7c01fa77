"""The page of a run, `report.html`: curves, confusion matrix, classes, worst mistakes."""
