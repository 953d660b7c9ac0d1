"""The one error that a model file can cause.

Pure: a value with a message.
"""

from __future__ import annotations

from pathlib import Path


class ModelFileError(Exception):
    """A model file is missing, damaged or of a kind that is not supported.

    path:      the file or directory at fault
    problem:   what is wrong with it
    supported: what would be right; empty when that goes without saying
    """

    def __init__(self, path: Path | str, problem: str, supported: str = "") -> None:
        self.path = str(path)
        self.problem = problem
        self.supported = supported
        hint = f" (supported: {supported})" if supported else ""
        super().__init__(f"{self.path}: {problem}{hint}")
