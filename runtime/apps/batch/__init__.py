"""Answers for whole tables of texts, by processes or on a Ray cluster. Needs the extra `batch`."""

from .job import run_batch
from .result import BatchResult
from .worker import BatchWorker

__all__ = ["BatchResult", "BatchWorker", "run_batch"]
