"""Opening a model path, whatever its format.

Shell: reads model files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.models.config import ModelConfig
from services.models.errors import ModelFileError
from services.models.gguf_file import GgufFile
from services.models.hf_dir import HfDirectory

SUPPORTED_FORMATS = "a .gguf file, or a directory with config.json and safetensors"


class ModelSource(Protocol):
    """Config and weights of one model; weights go by the names of the original checkpoint."""

    path: Path
    config: ModelConfig

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """One weight as float32; raises ModelFileError if it is not there."""


def open_model(path: Path) -> ModelSource:
    """Open a GGUF file or a Hugging Face directory; raises ModelFileError."""
    if path.is_dir():
        return HfDirectory(path)
    if not path.exists():
        raise ModelFileError(path, "does not exist", SUPPORTED_FORMATS)
    if path.suffix in (".bin", ".pt", ".pth", ".safetensors"):
        raise ModelFileError(path, f"a {path.suffix} file by itself", SUPPORTED_FORMATS)
    return GgufFile(path)
