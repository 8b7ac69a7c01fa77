"""From Python: `load(run).predict(images)`, and `fit` trains in a program or a notebook."""
