"""Attention, plans, streams, calibrations and the registry."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from . import _native
from ._arrays import JAX, NUMPY, TORCH, Library, check_device, common, plain, same_library, threads_for
from ._errors import NeedsCopy, ParameterError, ShapeError

A = TypeVar("A")


@dataclass(frozen=True)
class RunInfo:
    """Counts of a run: pairs scored, rows without a key, rows answered by a fallback, ranks, iterations."""

    keys_visited: int
    empty_rows: int
    fallback_rows: int
    rank: int
    iterations: int
    status: str
    figures: Mapping[str, float]


class Result(NamedTuple):
    """Output, log-sum-exp and counts; parts not requested are `None`."""

    out: Any
    lse: Any = None
    info: RunInfo | None = None


@dataclass(frozen=True)
class Problem:
    """The sizes of an attention problem."""

    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    d: int
    d_v: int
    scale: float
    causal: bool


@dataclass(frozen=True)
class Cost:
    """Work counted from the sizes."""

    setup_flops: int
    run_flops: int
    bytes: int


def _tokens_first(layout: str) -> bool:
    if layout == "bhnd":
        return False
    if layout == "bnhd":
        return True
    expected = "bhnd or bnhd"
    raise ParameterError(f"layout = {layout!r} is not accepted; expected {expected}", "layout", str(layout), expected)


def _merged(options: Mapping[str, Any] | str | None, params: dict[str, Any]) -> Any:
    if not params:
        return dict(options) if isinstance(options, Mapping) else options
    if options is None:
        return params
    if isinstance(options, str):
        options = dict(part.split("=", 1) for part in options.split(",") if "=" in part)
    both = sorted(set(options) & set(params))
    if both:
        raise ParameterError(f"{both[0]} is given twice: as a keyword and in options", both[0], str(params[both[0]]), "one value")
    return {**options, **params}


def _info(told: tuple[Any, ...]) -> RunInfo:
    keys, empty, fallback, rank, iterations, status, figures = told
    return RunInfo(keys, empty, fallback, rank, iterations, status, MappingProxyType(dict(figures)))


def _shape(x: Any, name: str, rank: int) -> tuple[int, ...]:
    shape = tuple(x.shape)
    if len(shape) != rank or rank not in (2, 3, 4):
        expected = f"{rank} axes, as q" if rank in (2, 3, 4) else "2, 3 or 4 axes"
        raise ShapeError(f"{name}: expected {expected}, found shape {shape}", name, expected, str(shape))
    return shape


def _sizes(q: Any, k: Any, v: Any, tokens_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the output and of its log-sum-exp."""
    qs, ks, vs = q.shape, k.shape, v.shape
    rank = len(qs)
    if not 2 <= rank <= 4 or len(ks) != rank or len(vs) != rank:
        for x, name in ((q, "q"), (k, "k"), (v, "v")):
            _shape(x, name, rank)
    lead = (qs[0], qs[2], qs[1]) if tokens_first and rank == 4 else qs[1::-1] if tokens_first and rank == 3 else qs[:-1]
    return (*qs[:-1], vs[-1]), tuple(lead)


def _arrays(lib: Library, dtype: str, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    if lib is NUMPY and dtype in ("float32", "float64"):
        return q, k, v
    if dtype in ("float32", "float64"):
        return plain(lib, q), plain(lib, k), plain(lib, v)
    return lib.widen(q), lib.widen(k), lib.widen(v)


def _call(lib: Library, q: Any, k: Any, v: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
    try:
        return run(q, k, v)
    except NeedsCopy:
        q, k, v = lib.copy(q), lib.copy(k), lib.copy(v)
    try:
        return run(q, k, v)
    except NeedsCopy as error:  # the output is the only array left
        raise ValueError(f"{error}: leave it out, or give an array with contiguous rows") from None


def _check_out(lib: Library, out: Any, q: Any, dtype: str, shape: tuple[int, ...]) -> None:
    same_library(q=q, out=out)
    if lib is JAX:
        raise ValueError("out: expected an array that can be written, found a JAX array: leave it out")
    check_device(lib, out=out)
    if lib.dtype(out) != dtype:
        raise TypeError(f"out: expected elements {dtype}, as the inputs, found {lib.dtype(out)}")
    if tuple(out.shape) != shape:
        raise ShapeError(f"out: expected shape {shape}, found {tuple(out.shape)}", "out", str(shape), str(tuple(out.shape)))
    if lib is TORCH and out.requires_grad:
        raise ValueError("out: expected a tensor without a gradient, found one that requires it")


def _store(lib: Library, out: Any, result: Any) -> None:
    if lib is TORCH:
        out.copy_(result)
    else:
        out[...] = result


def attention(
    q: A,
    k: A,
    v: A,
    *,
    method: str = "exact",
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhnd",
    key_lengths: Any = None,
    calibration: Calibration | None = None,
    out: A | None = None,
    return_lse: bool = False,
    return_info: bool = False,
    num_threads: int | None = None,
    options: Mapping[str, Any] | str | None = None,
    **params: Any,
) -> Any:
    """Attention by one method of the atlas.

    Parameters
    ----------
    q, k, v : arrays of NumPy, PyTorch (cpu) or JAX (cpu)
        ``layout="bhnd"``: ``[B, H, Nq, D]``, ``[B, Hkv, Nk, D]``, ``[B, Hkv, Nk, Dv]``; ``"bnhd"`` has tokens before
        heads. Three axes are ``[H, N, D]`` (``[N, H, D]``), two are ``[N, D]``. ``H`` is a multiple of ``Hkv``. Elements are
        float32, float64, bfloat16 or float16; half types are widened to float32 once and rounded once at the end.
    method : id of a method; `attlas.methods()` lists them.
    causal : bool
        Bottom right, as in flash-attn: query ``i`` sees key ``j`` if ``j <= i + Nk - Nq``. `is_causal` of PyTorch is top
        left. They agree if ``Nq == Nk``. For 2 queries and 5 keys::

            here (bottom right)    torch (top left)
            1 1 1 1 0              1 0 0 0 0
            1 1 1 1 1              1 1 0 0 0

        Rows without a key are 0 with a log-sum-exp of ``-inf``.
    scale : factor on the inner products; ``1/sqrt(D)`` by default.
    key_lengths : valid keys of each sequence, ``[B]``
        The last query is aligned to the last valid key. With ``causal=True`` this does not fit a right-padded prompt, whose
        queries are padded, too: `attlas.transformers` handles those.
    calibration : the result of `attlas.calibrate`, for methods that need one.
    out : array to write into, of the kind, type and shape of the result.
    return_lse, return_info : return a `Result` with the log-sum-exp, and with a `RunInfo`.
    num_threads : threads of this call.
    options, **params : parameters of the method, such as ``block=128``; `attlas.method(id).params` lists them.

    Returns
    -------
    The output, of the library and type of the inputs; a named tuple `Result` with `return_lse` or `return_info`.

    Examples
    --------
    >>> import attlas, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 6, 2, 8))
    >>> k, v = rng.standard_normal((2, 1, 2, 5, 8))
    >>> o, lse, info = attlas.attention(q, k, v, causal=True, return_lse=True, return_info=True)
    >>> o.shape, lse.shape, info.keys_visited
    ((1, 6, 2, 8), (1, 6, 2), 54)
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        tracked = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v))
        if tracked or torch.compiler.is_compiling():
            from .torch import _through_op

            same_library(q=q, k=k, v=v)
            return _through_op(
                q, k, v, method, causal, scale, layout, key_lengths, calibration, out, return_lse, return_info,
                num_threads, _merged(options, params),
            )  # fmt: skip
    lib, dtype = common(q, k, v)
    tokens_first = _tokens_first(layout)
    shape, lse_shape = _sizes(q, k, v, tokens_first)
    wide = dtype in ("float32", "float64")
    threads = threads_for(num_threads, lib)
    if params or options is not None:
        options = _merged(options, params)
    lengths = None if key_lengths is None else _lengths(key_lengths)
    if out is not None:
        _check_out(lib, out, q, dtype, shape)
    a, b, c = _arrays(lib, dtype, q, k, v)
    target = lib.empty(a, shape) if out is None or not wide else out
    lse = lib.empty(a, lse_shape) if return_lse else None
    scale = None if scale is None else float(scale)
    try:
        told = _native.attend(
            a, b, c, target, lse, tokens_first, method, options, causal, scale, lengths, _learnt(calibration), threads,
            return_info,
        )  # fmt: skip
    except NeedsCopy:
        a, b, c = lib.copy(a), lib.copy(b), lib.copy(c)
        strange = out is not None and wide
        if strange:
            target = lib.empty(a, shape)
        told = _native.attend(
            a, b, c, target, lse, tokens_first, method, options, causal, scale, lengths, _learnt(calibration), threads,
            return_info,
        )  # fmt: skip
        if strange:
            _check_writable(lib, out, q, k, v)
            _store(lib, out, target)
            target = out
    if out is not None and not wide:
        _check_writable(lib, out, q, k, v)
        _store(lib, out, lib.finish(target, dtype))
        result: Any = out
    else:
        result = target if target is out else lib.finish(target, dtype)
    if not (return_lse or return_info):
        return result
    if lse is not None and lib is JAX:
        lse = lib.finish(lse, str(lse.dtype))
    return Result(result, lse, _info(told) if told is not None else None)


def _check_writable(lib: Library, out: Any, *inputs: Any) -> None:
    """Check `out` if a copy replaces it and the native module cannot."""
    import numpy as np

    arrays = [x.detach().view(sys.modules["torch"].int16) if lib is TORCH and x.element_size() == 2 else x for x in (out, *inputs)]
    views = [np.asarray(x.detach()) if lib is TORCH else x for x in arrays]
    if not views[0].flags.writeable:
        raise ValueError("out: expected an array that can be written, found a read-only one")
    if any(np.may_share_memory(views[0], x) for x in views[1:]):
        raise ValueError("out: expected memory of its own, found memory that an input may share")
    if any(s == 0 and n > 1 for s, n in zip(views[0].strides, views[0].shape, strict=True)):
        raise ValueError("out: expected every element at a place of its own, found two at the same one")


def _learnt(calibration: Calibration | None) -> _native.Calibration | None:
    return None if calibration is None else calibration._native


def _lengths(x: Any) -> list[int]:
    values = x.tolist() if hasattr(x, "tolist") else list(x)
    if not isinstance(values, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in values):
        expected = "a whole number of keys for each sequence"
        raise ParameterError(f"key_lengths: expected {expected}, found {x!r}", "key_lengths", repr(x), expected)
    return values


class Calibration:
    """Data that a method learnt: passed to `attention` and `plan`, saved and loaded as JSON."""

    def __init__(self, native: _native.Calibration) -> None:
        self._native = native

    @property
    def method(self) -> str:
        """Id of the method that learnt it."""
        return self._native.method

    def save(self, path: Any) -> None:
        """Write it to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._native.to_json())

    @staticmethod
    def load(path: Any) -> Calibration:
        """Read what `save` wrote."""
        with open(path, encoding="utf-8") as file:
            return Calibration(_native.Calibration.from_json(file.read()))

    def __repr__(self) -> str:
        return repr(self._native)


def calibrate(
    method: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhnd",
    num_threads: int | None = None,
    options: Mapping[str, Any] | str | None = None,
    **params: Any,
) -> Calibration:
    """Learn from sample inputs, for methods that need it.

    >>> import attlas, numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 64, 8), dtype=np.float32)
    >>> attlas.calibrate("loki", q, k, v, causal=True).method
    'loki'
    """
    lib, dtype = common(q, k, v)
    a, b, c = _arrays(lib, dtype, q, k, v)
    given, first, threads = _merged(options, params), _tokens_first(layout), threads_for(num_threads, lib)

    def run(a: Any, b: Any, c: Any) -> _native.Calibration:
        return _native.calibrate(method, given, [(a, b, c)], first, causal, scale, threads)

    return Calibration(_call(lib, a, b, c, run))


class Plan:
    """A plan: all decisions about a problem that do not depend on the data; immutable, can be shared by threads."""

    def __init__(self, native: _native.Plan, method: str) -> None:
        self._native, self.method = native, method

    @property
    def problem(self) -> Problem:
        """The planned problem."""
        sizes, scale, causal = self._native.problem
        batch, heads, kv_heads, n_q, n_k, d, d_v = sizes
        return Problem(batch, heads, kv_heads, n_q, n_k, d, d_v, scale, causal)

    @property
    def cost(self) -> Cost:
        """Counted work."""
        return Cost(*self._native.cost)

    def workspace_bytes(self, threads: int = 1) -> int:
        """Most scratch bytes in use at one time: measured by a run on random inputs, not a bound."""
        return self._native.workspace_bytes(threads)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any = None,
        layout: str = "bhnd",
        key_lengths: Any = None,
        return_lse: bool = False,
        return_info: bool = False,
        num_threads: int | None = None,
    ) -> Any:
        """Run it, as in `attention`."""
        lib, dtype = common(q, k, v)
        if lib is TORCH:
            torch = sys.modules["torch"]
            if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
                raise ValueError("a plan gives no gradients: use attlas.attention, or torch.no_grad()")
        first = _tokens_first(layout)
        shape, lse_shape = _sizes(q, k, v, first)
        if out is not None:
            _check_out(lib, out, q, dtype, shape)
            if dtype not in ("float32", "float64"):
                raise TypeError(f"out: expected float32 or float64 with a plan, found {dtype}")
        a, b, c = _arrays(lib, dtype, q, k, v)
        target = lib.empty(a, shape) if out is None else out
        lse = lib.empty(a, lse_shape) if return_lse else None
        lengths = None if key_lengths is None else _lengths(key_lengths)
        threads = threads_for(num_threads, lib)

        def run(a: Any, b: Any, c: Any) -> Any:
            return self._native.execute(a, b, c, target, lse, first, lengths, threads)

        told = _call(lib, a, b, c, run)
        result = target if out is not None else lib.finish(target, dtype)
        if not (return_lse or return_info):
            return result
        if lse is not None and lib is JAX:
            lse = lib.finish(lse, str(lse.dtype))
        return Result(result, lse, _info(told) if return_info else None)

    def stream(self, dtype: str = "float32") -> Stream | None:
        """Token-by-token decoding; `None` if the method has none."""
        if dtype not in ("float32", "float64"):
            expected = "float32 or float64"
            raise ParameterError(f"dtype = {dtype!r} is not accepted; expected {expected}", "dtype", str(dtype), expected)
        native = self._native.stream(dtype == "float64")
        return None if native is None else Stream(native)

    def __repr__(self) -> str:
        p = self.problem
        mask = ", causal" if p.causal else ""
        return f"<plan of {self.method}: {p.batch} × {p.heads} heads ({p.kv_heads} key heads), {p.n_q} × {p.n_k}, d = {p.d}{mask}>"


class Stream:
    """Decoding: keys and values are pushed, the query of the last token attends. One thread at a time."""

    def __init__(self, native: _native.Stream) -> None:
        self._native = native

    def push(self, k: Any, v: Any, *, layout: str = "bhnd", num_threads: int | None = None) -> None:
        """Append the keys and values of one or more tokens."""
        lib = same_library(k=k, v=v)
        check_device(lib, k=k, v=v)
        first, threads = _tokens_first(layout), threads_for(num_threads, lib)
        try:
            self._native.push(plain(lib, k), plain(lib, v), first, threads)
        except NeedsCopy:
            self._native.push(lib.copy(k), lib.copy(v), first, threads)

    def attend(self, q: A, *, out: Any = None, layout: str = "bhnd", num_threads: int | None = None) -> A:
        """Attend with the query `[B, H, 1, D]` of the last token to everything pushed."""
        lib = same_library(q=q)
        check_device(lib, q=q)
        first, threads = _tokens_first(layout), threads_for(num_threads, lib)
        (_, _, _, _, _, _, d_v), _, _ = self._native.problem
        shape = (*q.shape[:-1], d_v)  # type: ignore[attr-defined]
        if out is not None:
            _check_out(lib, out, q, lib.dtype(q), shape)
        x = plain(lib, q)
        target = lib.empty(x, shape) if out is None else out
        try:
            self._native.attend(x, target, first, threads)
        except NeedsCopy:
            self._native.attend(lib.copy(x), target, first, threads)
        return target if out is not None else lib.finish(target, lib.dtype(q))  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._native)

    @property
    def nbytes(self) -> int:
        """Bytes of state held now."""
        return self._native.nbytes


def plan(
    method: str,
    *,
    n_q: int,
    n_k: int,
    heads: int = 1,
    kv_heads: int | None = None,
    d: int = 64,
    d_v: int | None = None,
    batch: int = 1,
    causal: bool = False,
    scale: float | None = None,
    calibration: Calibration | None = None,
    num_threads: int | None = None,
    options: Mapping[str, Any] | str | None = None,
    **params: Any,
) -> Plan:
    """Plan a problem that is run many times.

    >>> import attlas
    >>> p = attlas.plan("sink_window", n_q=64, n_k=64, heads=4, kv_heads=2, d=16, causal=True, window=8)
    >>> p.problem.kv_heads, p.cost.run_flops > 0
    (2, True)
    """
    sizes = [batch, heads, heads if kv_heads is None else kv_heads, n_q, n_k, d, d if d_v is None else d_v]
    for name, n in zip(("batch", "heads", "kv_heads", "n_q", "n_k", "d", "d_v"), sizes, strict=True):
        if isinstance(n, bool) or not hasattr(n, "__index__") or not 0 <= n < 1 << 62:
            raise ParameterError(f"{name} = {n!r} is not accepted; expected a whole number", name, repr(n), "a whole number")
    given = _merged(options, params)
    threads = threads_for(num_threads, None)
    native = _native.Plan(method, given, sizes, causal, scale, _learnt(calibration), threads)
    return Plan(native, method)


@lru_cache(maxsize=1)
def _registry() -> dict[str, Any]:
    return json.loads(_native.atlas_json())  # type: ignore[no-any-return]


class Method:
    """An entry of the registry."""

    def __init__(self, entry: dict[str, Any]) -> None:
        from ._records import Record

        self.id: str = entry["id"]
        self.family: str = entry["family"]
        self.title: str = entry["title"]
        self.reference: str = entry["reference"]
        self.claims = Record(entry["claims"])
        self.params = [Record(p) for p in entry["params"]]

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return _native.method_text(self.id)

    def supports(
        self,
        *,
        n: int | None = None,
        n_q: int | None = None,
        n_k: int | None = None,
        heads: int = 1,
        kv_heads: int | None = None,
        d: int = 64,
        d_v: int | None = None,
        batch: int = 1,
        causal: bool = False,
        scale: float | None = None,
        options: Mapping[str, Any] | str | None = None,
        **params: Any,
    ) -> list[str]:
        """Every reason why it refuses a problem; empty if it accepts it."""
        n = 1024 if n is None else n
        sizes = [batch, heads, kv_heads or heads, n if n_q is None else n_q, n if n_k is None else n_k, d, d_v or d]
        return _native.supports(self.id, _merged(options, params), sizes, causal, scale)

    def __repr__(self) -> str:
        return f"<method {self.id}: {self.title}>"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.__doc__)}</pre>"


class _Methods(list[Method]):
    """Methods, shown as a table."""

    def __repr__(self) -> str:
        return _native.methods_text(None) if len(self) == len(_registry()["methods"]) else super().__repr__()

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><td><code>{m.id}</code></td><td>{m.family}</td><td>{escape(m.title)}</td><td>{escape(m.reference)}</td></tr>"
            for m in self
        )
        return f"<table><tr><th>method</th><th>family</th><th>title</th><th>reference</th></tr>{rows}</table>"


def _all() -> Iterator[Method]:
    return (Method(entry) for entry in _registry()["methods"])


def methods(family: str | None = None, causal: bool | None = None) -> list[Method]:
    """The methods of the atlas, of one family, with or without a causal form.

    >>> import attlas
    >>> sorted(m.id for m in attlas.methods("exact"))[:2]
    ['exact', 'naive']
    """
    found = _Methods(_all())
    known = sorted({m.family for m in found})
    if family is not None and family not in known:
        expected = f"one of {', '.join(known)}"
        raise ParameterError(f"family: expected {expected}, found {family!r}", "family", str(family), expected)
    return _Methods(m for m in found if family in (None, m.family) and causal in (None, m.claims.causal))


def method(id: str) -> Method:
    """One method.

    >>> import attlas
    >>> attlas.method("hyper").supports(n=4096, d=64, causal=True)
    []
    """
    for m in _all():
        if m.id == id:
            return m
    known = ", ".join(m.id for m in _all())
    raise ParameterError(f"there is no method {id}; known are {known}", "method", str(id), f"one of {known}")
