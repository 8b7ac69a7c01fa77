"""The tool `report`: the page of a run, `report.html`."""
