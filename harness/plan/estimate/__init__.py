"""`harness estimate`: memory, communication, speed and cost of a job by strategy and number of ranks."""

from harness.plan.estimate.document import document
from harness.plan.estimate.question import EstimateRequest, question
from harness.plan.estimate.row import EstimateRow, estimate

__all__ = ["EstimateRequest", "EstimateRow", "document", "estimate", "question"]
