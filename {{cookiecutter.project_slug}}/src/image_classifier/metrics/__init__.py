"""What is made of the predictions of an evaluation: one table of metrics, and when they count."""

from .decision import NO_DECISION, THRESHOLD, Decision, choose_decision, read_decision
from .predictions import (
    BINS,
    Predictions,
    calibrate,
    calibration_error,
    confusion_of,
    counted_and_correct,
    mistakes_of,
)
from .table import (
    METRICS,
    against_the_rest,
    average_precisions,
    better,
    class_scores,
    find_metric,
    metric_number,
    metric_text,
    metric_title,
    phrase,
    recalls,
    scale,
    scores_text,
    words,
)
