"""Metrics on held-out documents, each with its baseline. docs/evaluation.md defines them."""

from mmldlm.evaluation.evaluator import Evaluation, EvaluationConfig
from mmldlm.evaluation.statistics import BITS, cosine

__all__ = ["BITS", "Evaluation", "EvaluationConfig", "cosine"]
