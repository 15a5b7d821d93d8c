"""Detection of an array's library, copies where views are impossible, and outputs of the same kind."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from ._errors import ParameterError, UnsupportedError

_ACCEPTED = "float32, float64, bfloat16 or float16"
_HALF = frozenset({"float16", "bfloat16"})
_FULL = frozenset({"float32", "float64"})

_chosen: int | None = None


def set_num_threads(n: int) -> None:
    """Set the number of threads of calls that do not name one; 0 restores the default.

    >>> import attlas
    >>> attlas.set_num_threads(2)
    >>> attlas.get_num_threads()
    2
    >>> attlas.set_num_threads(0)
    """
    global _chosen
    _chosen = _count(n) or None


def get_num_threads() -> int:
    """The number of threads of calls on NumPy arrays that do not name one."""
    return threads_for(None, None)


def _count(n: Any) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__") or not 0 <= n.__index__() <= 4096:
        expected = "a whole number from 0 to 4096"
        raise ParameterError(f"num_threads = {n!r} is not accepted; expected {expected}", "num_threads", repr(n), expected)
    return int(n)


def threads_for(n: int | None, library: Library | None) -> int:
    """Threads of a call, from the call, `set_num_threads`, the environment, torch, or the limit of the process."""
    if n:
        return _count(n)
    if n is not None:
        _count(n)
    if _chosen:
        return _chosen
    word = os.environ.get("ATTLAS_NUM_THREADS", "")
    if word.isdecimal() and int(word) > 0:
        return min(int(word), 4096)
    if library is not None and library.name == "torch":
        return int(sys.modules["torch"].get_num_threads())
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


class Library:
    """The operations that differ between array libraries."""

    name = ""

    def dtype(self, x: Any) -> str:
        raise NotImplementedError

    def widen(self, x: Any) -> Any:
        raise NotImplementedError

    def copy(self, x: Any) -> Any:
        raise NotImplementedError

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def finish(self, x: Any, dtype: str) -> Any:
        """Convert the output of `empty` to the element type of the inputs."""
        raise NotImplementedError


_NAMES: dict[Any, str] = {}
"""Names of element types: making one takes longer than a short call may."""


class _Numpy(Library):
    name = "numpy"

    def dtype(self, x: Any) -> str:
        name = _NAMES.get(x.dtype)
        if name is None:
            name = _NAMES[x.dtype] = str(x.dtype.name)
        return name

    def widen(self, x: Any) -> Any:
        return x.astype(np.float32)

    def copy(self, x: Any) -> Any:
        x = np.asarray(x, dtype=x.dtype.newbyteorder("="))
        return x.copy() if x.flags.c_contiguous else np.ascontiguousarray(x)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        dtype = like.dtype
        return np.empty(shape, dtype if dtype.isnative else dtype.newbyteorder("="))

    def finish(self, x: Any, dtype: str) -> Any:
        if dtype == "float16":
            return x.astype(np.float16)
        if dtype == "bfloat16":
            import ml_dtypes  # imported already: the input was one of its arrays

            return x.astype(ml_dtypes.bfloat16)
        return x


class _Torch(Library):
    name = "torch"

    def dtype(self, x: Any) -> str:
        name = _NAMES.get(x.dtype)
        if name is None:
            name = _NAMES[x.dtype] = str(x.dtype).removeprefix("torch.")
        return name

    def widen(self, x: Any) -> Any:
        return x.detach().float()

    def copy(self, x: Any) -> Any:
        x = x.detach().resolve_neg().resolve_conj()
        return x.clone(memory_format=sys.modules["torch"].contiguous_format)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return sys.modules["torch"].empty(shape, dtype=like.dtype)

    def finish(self, x: Any, dtype: str) -> Any:
        return x if dtype in _FULL else x.to(getattr(sys.modules["torch"], dtype))


class _Jax(Library):
    name = "jax"

    def dtype(self, x: Any) -> str:
        return str(x.dtype.name)

    def widen(self, x: Any) -> Any:
        return np.asarray(x).astype(np.float32)

    def copy(self, x: Any) -> Any:
        return np.array(x, order="C")

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, np.float64 if str(like.dtype) == "float64" else np.float32)

    def finish(self, x: Any, dtype: str) -> Any:
        jnp = sys.modules["jax"].numpy
        return jnp.asarray(x, dtype=dtype)


NUMPY, TORCH, JAX = _Numpy(), _Torch(), _Jax()


def library(x: Any, name: str) -> Library:
    """The library of one array; for anything else a `TypeError` that names the accepted kinds."""
    if type(x) is np.ndarray:
        return NUMPY
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return TORCH
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        return JAX
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
        return NUMPY
    found = f"{type(x).__module__}.{type(x).__qualname__}"
    raise TypeError(f"{name}: expected an array of NumPy, PyTorch (cpu) or JAX, found {found}")


def check_type(lib: Library, **arrays: Any) -> str:
    """The one element type of all arrays."""
    names = [lib.dtype(x) for x in arrays.values()]
    if names[0] in _FULL and names.count(names[0]) == len(names):
        return names[0]
    found = dict(zip(arrays, names, strict=True))
    first = next(iter(found.values()))
    if any(dtype != first for dtype in found.values()):
        words = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
        raise TypeError(f"expected one element type for all arrays, found {words}")
    if first not in _FULL and first not in _HALF:
        raise TypeError(f"{next(iter(found))}: expected elements {_ACCEPTED}, found {first}")
    return first


def check_device(lib: Library, **arrays: Any) -> None:
    """Refuse tensors that are not on the cpu, and those without memory of their own."""
    if lib is NUMPY:
        return
    for name, x in arrays.items():
        if lib is TORCH:
            if not x.is_cpu:
                reason = f"tensors are read on the cpu, {name} is on {x.device}: move it with .cpu()"
                raise UnsupportedError(f"attention cannot do this: {reason}", "attention", [reason])
            if x.layout is not sys.modules["torch"].strided:
                raise TypeError(f"{name}: expected a dense tensor, found layout {x.layout}: use .to_dense()")
        elif lib is JAX and any(d.platform != "cpu" for d in x.devices()):
            reason = f"arrays are read on the cpu, {name} is on {x.devices()}"
            raise UnsupportedError(f"attention cannot do this: {reason}", "attention", [reason])


def common(q: Any, k: Any, v: Any) -> tuple[Library, str]:
    """The library and element type of queries, keys and values on the cpu; the order of the checks is that of the three below."""
    kind = type(q)
    lib = library(q, "q") if type(k) is kind and type(v) is kind else same_library(q=q, k=k, v=v)
    dtype = q.dtype
    name = lib.dtype(q) if k.dtype is dtype and v.dtype is dtype else ""
    if name not in _FULL:
        name = check_type(lib, q=q, k=k, v=v)
    check_device(lib, q=q, k=k, v=v)
    return lib, name


def same_library(**arrays: Any) -> Library:
    """The library of all arrays."""
    items = list(arrays.items())
    lib = library(items[0][1], items[0][0])
    for name, x in items[1:]:
        other = library(x, name)
        if other is not lib:
            raise TypeError(f"expected arrays of one library, found {items[0][0]} of {lib.name}, {name} of {other.name}")
    return lib


def plain(lib: Library, x: Any) -> Any:
    """A tensor whose memory can be exported: no gradient, nothing lazy. The native module handles plain tensors."""
    if lib is TORCH and type(x) is not sys.modules["torch"].Tensor:
        if x.requires_grad:
            x = x.detach()
        if x.is_neg() or x.is_conj():
            x = x.resolve_neg().resolve_conj()
    return x
