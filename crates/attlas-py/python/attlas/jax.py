"""Attention under `jax.jit`, by a callback; exact attention has its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._core import Result, _merged
from ._core import attention as _attention
from ._errors import missing

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
except ImportError:
    raise missing("jax", "jax") from None


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    method: str = "exact",
    causal: bool = False,
    scale: float | None = None,
    options: Mapping[str, Any] | None = None,
    **params: Any,
) -> Any:
    """Attention on `[B, H, N, D]` arrays, also inside `jit` and `vmap`.

    The gradient is that of exact attention; other methods raise `NotImplementedError`.

    >>> import jax, jax.numpy as jnp
    >>> q = jnp.ones((1, 2, 8, 4))
    >>> jax.jit(lambda x: attention(x, x, x, causal=True))(q).shape
    (1, 2, 8, 4)
    """
    given = tuple(sorted((_merged(options, params) or {}).items()))
    factor = float(q.shape[-1]) ** -0.5 if scale is None else float(scale)
    return _forward(q, k, v, method, causal, factor, given)


def _call(q: Any, k: Any, v: Any, method: str, causal: bool, scale: float, given: tuple[Any, ...]) -> tuple[Any, Any]:
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    shapes = (jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype), jax.ShapeDtypeStruct(q.shape[:-1], wide))

    def host(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        # Leading axes from vmap are folded into the batch.
        lead = q.shape[:-3]
        a, b, c = (np.ascontiguousarray(np.asarray(x)).reshape(-1, *x.shape[-3:]) for x in (q, k, v))
        wanted = method == "exact"
        done = _attention(a, b, c, method=method, causal=causal, scale=scale, options=dict(given), return_lse=wanted)
        out, lse = (done.out, done.lse) if isinstance(done, Result) else (done, np.zeros(a.shape[:-1], a.dtype))
        return out.reshape(*lead, *out.shape[-3:]), lse.reshape(*lead, *lse.shape[-2:]).astype(shapes[1].dtype)

    return jax.pure_callback(host, shapes, q, k, v, vmap_method="broadcast_all")  # type: ignore[no-any-return]


def _only(q: Any, k: Any, v: Any, method: str, causal: bool, scale: float, given: tuple[Any, ...]) -> Any:
    return _call(q, k, v, method, causal, scale, given)[0]


def _save(q: Any, k: Any, v: Any, method: str, causal: bool, scale: float, given: tuple[Any, ...]) -> tuple[Any, Any]:
    if method != "exact" or any(name == "precision" for name, _ in given):
        raise NotImplementedError(f"{method} has no gradient: use method='exact' without settings for training")
    out, lse = _call(q, k, v, method, causal, scale, given)
    return out, (q, k, v, out, lse)


def _gradient(method: str, causal: bool, scale: float, given: tuple[Any, ...], saved: Any, d_out: Any) -> tuple[Any, Any, Any]:
    q, k, v, out, lse = saved
    size = q.shape[1] // k.shape[1]
    wide = lse.dtype
    kr, vr = (jnp.repeat(x.astype(wide), size, axis=1) for x in (k, v))
    qw, ow, dw = (x.astype(wide) for x in (q, out, d_out))
    scores = qw @ kr.swapaxes(-1, -2) * scale - lse[..., None]
    n_q, n_k = q.shape[-2], k.shape[-2]
    seen = jnp.ones((n_q, n_k), bool)
    if causal:
        seen = jnp.arange(n_k)[None] <= jnp.arange(n_q)[:, None] + (n_k - n_q)
    p = jnp.where(seen, jnp.exp(scores), 0)
    ds = p * (dw @ vr.swapaxes(-1, -2) - (dw * ow).sum(-1)[..., None]) * scale

    def summed(x: Any) -> Any:
        return x.reshape(x.shape[0], k.shape[1], size, *x.shape[2:]).sum(2)

    dk, dv = summed(ds.swapaxes(-1, -2) @ qw), summed(p.swapaxes(-1, -2) @ dw)
    return (ds @ kr).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


_forward = jax.custom_vjp(_only, nondiff_argnums=(3, 4, 5, 6))
_forward.defvjp(_save, _gradient)

__all__ = ["attention"]
