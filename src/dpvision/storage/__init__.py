"""A run on disk: ``release/`` may be given away, ``private/`` may not.

Every file is written whole or not at all, and nothing is written outside the folder. Torch is imported only where
tensors are turned into bytes or back, so that a run can be verified without it.
"""
