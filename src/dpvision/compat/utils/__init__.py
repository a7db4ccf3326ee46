"""Opacus's place for ``BatchMemoryManager``."""

from dpvision.compat.utils.batch_memory_manager import BatchMemoryManager

__all__ = ["BatchMemoryManager"]
