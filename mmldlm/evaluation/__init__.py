"""What is measured on held-out documents, each metric beside its control; docs/evaluation.md has the definitions."""

from mmldlm.evaluation.evaluator import Evaluation, EvaluationConfig
from mmldlm.evaluation.statistics import BITS, cosine

__all__ = ["BITS", "Evaluation", "EvaluationConfig", "cosine"]
