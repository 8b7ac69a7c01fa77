"""The last layer that fine-tuning begins with, fitted to features that are computed once."""

from .features import predict_features
from .fitting import begin_at_zero, start_from
