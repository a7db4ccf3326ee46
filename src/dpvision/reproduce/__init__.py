"""The papers' tables, run again: rows as ordinary runs, the paper's figures beside ours."""

from __future__ import annotations

from dpvision.reproduce.job import SCALES, Job, Report, reproduce
from dpvision.reproduce.table import Row, Table
from dpvision.reproduce.tables import all_tables, find_table

__all__ = ["SCALES", "Job", "Report", "Row", "Table", "all_tables", "find_table", "reproduce"]
