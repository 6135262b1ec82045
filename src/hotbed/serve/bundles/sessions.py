"""ONNX models as onnxruntime runs them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["Session", "session_of"]


class _Named(Protocol):
    name: str


class Session(Protocol):
    """An ``onnxruntime.InferenceSession``."""

    def get_inputs(self) -> Sequence[_Named]: ...
    def run(
        self, names: Sequence[str], given: Mapping[str, NDArray[np.generic]]
    ) -> Sequence[NDArray[np.generic]]: ...


def session_of(model: str | bytes, threads: int = 0) -> Session:
    """Return what runs an ONNX model, by its path or its bytes.

    Args:
        threads: that compute one batch; 0: as many as there are cores.

    Raises:
        ImportError: onnxruntime is not there.
    """
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return cast(Session, session)
