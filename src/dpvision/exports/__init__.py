"""Exports of a released model: files that other programs run without dpvision.

``export`` verifies the release, writes the model with its preprocessing as one graph, and compares that graph with the
original before the file appears.
"""

from dpvision.exports.formats import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
