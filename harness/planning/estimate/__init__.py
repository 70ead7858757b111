"""`harness estimate`: memory, communication, speed and cost of a job by strategy and number of ranks."""

from harness.planning.estimate.document import document
from harness.planning.estimate.question import Question, question
from harness.planning.estimate.row import EstimateRow, estimate

__all__ = ["EstimateRow", "Question", "document", "estimate", "question"]
