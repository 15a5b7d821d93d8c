"""attlas: an atlas of fast attention.

Every method of the atlas on NumPy arrays, PyTorch tensors and JAX arrays on the cpu, and the lab that measures them.

>>> import attlas, numpy as np
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 4, 100, 16), dtype=np.float32) for _ in range(3))
>>> o = attlas.attention(q, k, v, method="hyper", causal=True)
>>> o.shape
(1, 4, 100, 16)
"""

from __future__ import annotations

import os
from typing import Any

from . import _arrays, _native
from ._arrays import get_num_threads, set_num_threads
from ._core import (
    Calibration,
    Cost,
    Method,
    Plan,
    Problem,
    Result,
    RunInfo,
    Stream,
    attention,
    calibrate,
    method,
    methods,
    plan,
)
from ._errors import (
    DataError,
    Error,
    ModelError,
    NumericalError,
    ParameterError,
    RecipeError,
    ShapeError,
    ThreadsError,
    TooLargeError,
    UnsupportedError,
)
from ._records import Record
from .lab import Recipe, Report, Trace, compare, demo, extract, inspect, perplexity, report, synthetic, tune

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_native.after_fork)

__all__ = [
    "Calibration", "Cost", "DataError", "Error", "Method", "ModelError", "NumericalError", "ParameterError", "Plan",
    "Problem", "Recipe", "RecipeError", "Record", "Report", "Result", "RunInfo", "ShapeError", "Stream", "ThreadsError",
    "TooLargeError", "Trace", "UnsupportedError", "attention", "calibrate", "compare", "demo", "extract",
    "get_num_threads", "inspect", "method", "methods", "perplexity", "plan", "report", "set_num_threads", "synthetic",
    "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attlas")
    raise AttributeError(f"module 'attlas' has no attribute {name!r}")


del _arrays
