"""PyTorch's flight-recorder analyser, run over a folder of dumps from inside this process."""

from __future__ import annotations

import gc
import io
import logging
import pickle
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support.torch_features import has, reason

if not has("analyser"):
    pytest.skip(reason("analyser"), allow_module_level=True)
from torch.distributed.flight_recorder import fr_trace


def analyse(folder: Path) -> tuple[list[Any], str]:
    """Return the analyser's table of collectives and its log."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    try:
        with tempfile.NamedTemporaryFile() as output:
            fr_trace.main([str(folder), "-o", output.name])
            _, database = pickle.loads(Path(output.name).read_bytes())
    finally:
        logger.removeHandler(handler)
        gc.enable()  # the analyser switches it off
    return database.collectives, said.getvalue()


def complaints(said: str) -> list[str]:
    """Return the lines in which the analyser says that something is wrong."""
    return re.findall(r"(?m)^(?:Not all ranks|.*has errors|Input/output mismatch|We cannot).*", said)
