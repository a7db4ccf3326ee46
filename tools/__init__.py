"""Programs for those who work on dpvision itself."""
