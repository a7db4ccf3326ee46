"""Opacus's names on dpvision's engine: a script changes its import and keeps its loop."""

from dpvision.compat.privacy_engine import DPOptimizer, PrivacyEngine, PrivateDataLoader
from dpvision.compat.utils.batch_memory_manager import BatchMemoryManager
from dpvision.compat.validators import ModuleValidator, UnsupportedModuleError

__all__ = [
    "BatchMemoryManager",
    "DPOptimizer",
    "ModuleValidator",
    "PrivacyEngine",
    "PrivateDataLoader",
    "UnsupportedModuleError",
]
