"""The operator `attlas::attention` for PyTorch: one opaque op for `torch.compile` and `torch.export`, with the exact gradient
of exact attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from . import _native
from ._arrays import TORCH, check_device, check_type, plain, threads_for
from ._core import Calibration, Result, _sizes, _tokens_first
from ._errors import NeedsCopy, UnsupportedError, missing

try:
    import torch
except ImportError:
    raise missing("torch", "torch") from None

_BLOCK = 512
"""Query rows that the gradient holds scores of at one time."""


def _text(options: Any) -> str:
    """Options as text: `block=64,seed=1`."""
    if not options:
        return ""
    if isinstance(options, str):
        return options
    words = {True: "true", False: "false", None: "auto"}
    return ",".join(f"{k}={words[v] if v is None or isinstance(v, bool) else v}" for k, v in sorted(options.items()))


def _has_lse(method: str) -> bool:
    from ._core import _registry

    return any(m["id"] == method and m["claims"]["lse"] for m in _registry()["methods"])


def _wide(x: Any) -> Any:
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "attlas::attention",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, str method, str options, bool causal, float scale, int threads) -> (Tensor, Tensor)",
)
def _op(
    q: Any, k: Any, v: Any, method: str, options: str, causal: bool, scale: float, threads: int
) -> tuple[Any, Any]:
    dtype = check_type(TORCH, q=q, k=k, v=v)
    wide = _wide(q)
    a, b, c = (plain(TORCH, x).to(wide) for x in (q, k, v))
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=wide)
    lse = torch.empty(q.shape[:-1] if _has_lse(method) else (0,), dtype=wide)
    args = (lse if lse.numel() or _has_lse(method) else None, False, method, options, causal, scale, None, None)
    threads = threads or threads_for(None, TORCH)
    try:
        _native.attend(a, b, c, out, *args, threads, False)
    except NeedsCopy:
        _native.attend(TORCH.copy(a), TORCH.copy(b), TORCH.copy(c), out, *args, threads, False)
    return TORCH.finish(out, dtype), lse


@_op.register_fake  # type: ignore[untyped-decorator]
def _fake(q: Any, k: Any, v: Any, method: str, options: str, causal: bool, scale: float, threads: int) -> tuple[Any, Any]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1] if _has_lse(method) else (0,), dtype=_wide(q))
    return out, lse


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    q, k, v, ctx.method, ctx.options, ctx.causal, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, *output)


def _refuse(method: str) -> NotImplementedError:
    return NotImplementedError(
        f"{method} has no gradient: train with attn_implementation='sdpa' or method='exact', or take exact attention's "
        f"gradient at the same inputs, which is biased, with attlas.torch.attention(..., method={method!r}, backward='exact')"
    )


def _backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    rounded = "precision=" in ctx.options and "precision=full" not in ctx.options
    if ctx.method != "exact" or rounded:
        raise _refuse(f"{ctx.method} with {ctx.options}" if rounded else ctx.method)
    q, k, v, out, lse = ctx.saved_tensors
    n_q, n_k = q.shape[-2], k.shape[-2]
    ends = torch.full((1, n_q), n_k)
    if ctx.causal:
        ends = (torch.arange(n_q) + (n_k - n_q + 1)).clamp(0, n_k)[None]
    grads = exact_gradient(q, k, v, out, lse, d_out, d_lse, ctx.scale, torch.zeros_like(ends), ends)
    return (*grads, None, None, None, None, None)


_op.register_autograd(_backward, setup_context=_setup)


def exact_gradient(
    q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, scale: float, starts: Any, ends: Any
) -> tuple[Any, Any, Any]:
    """The gradient of exact attention, in blocks of query rows, from the saved output and log-sum-exp.

    Row `i` of sequence `b` sees the keys `starts[b, i]` to `ends[b, i]`.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, n_q, d = q.shape
    groups, n_k, d_v = k.shape[1], k.shape[2], v.shape[-1]
    size = heads // groups

    def grouped(x: Any, width: int) -> Any:
        return x.to(wide).reshape(batch, groups, size, n_q, width)

    qg, og, dog = grouped(q, d), grouped(out, d_v), grouped(d_out, d_v)
    kg, vg = k.to(wide)[:, :, None], v.to(wide)[:, :, None]
    delta = (dog * og).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse.to(wide).reshape(batch, groups, size, n_q)
    lse = lse.reshape(batch, groups, size, n_q, 1)
    dq = torch.empty_like(qg)
    dk = torch.zeros((batch, groups, n_k, d), dtype=wide)
    dv = torch.zeros((batch, groups, n_k, d_v), dtype=wide)
    keys = torch.arange(n_k)
    for at in range(0, n_q, _BLOCK):
        rows = slice(at, min(at + _BLOCK, n_q))
        seen = (keys >= starts[:, rows, None]) & (keys < ends[:, rows, None])
        scores = qg[..., rows, :] @ kg.transpose(-1, -2) * scale - lse[..., rows, :]
        p = torch.where(seen[:, None, None], scores.exp(), 0.0)
        ds = p * (dog[..., rows, :] @ vg.transpose(-1, -2) - delta[..., rows, None]) * scale
        dq[..., rows, :] = ds @ kg
        dk += (ds.transpose(-1, -2) @ qg[..., rows, :]).sum(2)
        dv += (p.transpose(-1, -2) @ dog[..., rows, :]).sum(2)
    return dq.reshape(q.shape).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Straight(torch.autograd.Function):  # type: ignore[misc]
    """A method forward, exact attention's gradient backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, method: str, options: str, causal: bool, scale: float, threads: int) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.causal, ctx.scale, ctx.threads = causal, scale, threads
        return _op(q, k, v, method, options, causal, scale, threads)[0]

    @staticmethod
    def backward(ctx: Any, d_out: Any) -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out, _ = _op(*inputs, "exact", "", ctx.causal, ctx.scale, ctx.threads)
        return (*torch.autograd.grad(out, inputs, d_out), None, None, None, None, None)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    method: str = "exact",
    causal: bool = False,
    scale: float | None = None,
    backward: str | None = None,
    num_threads: int | None = None,
    options: Mapping[str, Any] | str | None = None,
    **params: Any,
) -> Any:
    """Attention on `[B, H, N, D]` tensors as one operator.

    With `backward="exact"` the gradient of a method is exact attention's at the same inputs: biased, because it is the
    gradient of a function other than the one computed.

    >>> import torch
    >>> q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    >>> attention(q, k, v, method="top_k", keys=4, backward="exact").sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 8, 4])
    """
    from ._core import _merged

    given = _text(_merged(options, params))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    threads = 0 if num_threads is None else threads_for(num_threads, TORCH)
    if backward is None:
        return _op(q, k, v, method, given, causal, scale, threads)[0]
    if backward != "exact":
        raise ValueError(f"backward: expected None or 'exact', found {backward!r}")
    return _Straight.apply(q, k, v, method, given, causal, scale, threads)


def _through_op(
    q: Any, k: Any, v: Any, method: str, causal: bool, scale: float | None, layout: str, key_lengths: Any,
    calibration: Calibration | None, out: Any, return_lse: bool, return_info: bool, num_threads: int | None, options: Any,
) -> Any:  # fmt: skip
    """`attlas.attention` as an operator, which keeps the graph."""
    reasons = [
        f"{name} has no gradient and cannot be compiled: use torch.no_grad()"
        for name, x in (("key_lengths", key_lengths), ("calibration", calibration), ("out", out))
        if x is not None
    ]
    if return_info:
        reasons.append("return_info cannot be compiled or differentiated: use torch.no_grad()")
    if return_lse and not _has_lse(method):
        reasons.append(f"{method} has no log-sum-exp: its sums are not exponentials of logits")
    if reasons:
        raise UnsupportedError(f"{method} cannot do this: {'; '.join(reasons)}", method, reasons)
    check_type(TORCH, q=q, k=k, v=v)
    if not torch.compiler.is_compiling():
        check_device(TORCH, q=q, k=k, v=v)
    tokens_first = _tokens_first(layout)
    rank = q.dim()
    _sizes(q, k, v, tokens_first)

    def four(x: Any) -> Any:
        if rank == 2:
            return x[None, None]
        x = x[None] if rank == 3 else x
        return x.transpose(1, 2) if tokens_first else x

    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    threads = 0 if num_threads is None else threads_for(num_threads, TORCH)
    o, lse = _op(four(q), four(k), four(v), method, _text(options), causal, scale, threads)
    if tokens_first and rank > 2:
        o = o.transpose(1, 2)
    o = o.reshape(o.shape[4 - rank :])
    return Result(o, lse.reshape(lse.shape[4 - rank :])) if return_lse else o


__all__ = ["attention", "exact_gradient"]
