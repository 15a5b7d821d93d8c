"""Attention under JAX's transformations."""

import attlas
import numpy as np
import pytest
from conftest import need, qkv, reference

pytestmark = need("jax")
jax = pytest.importorskip("jax")
import attlas.jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

jax.config.update("jax_enable_x64", True)


def arrays(**sizes):
    return tuple(jnp.asarray(x) for x in qkv(dtype=np.float64, **sizes))


def exact(q, k, v, causal):
    size = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, size, 1), jnp.repeat(v, size, 1)
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        n_q, n_k = s.shape[-2:]
        s = jnp.where(jnp.arange(n_k) <= jnp.arange(n_q)[:, None] + n_k - n_q, s, -jnp.inf)
    return jax.nn.softmax(s, -1) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_jit_and_vmap(causal):
    x = arrays(n_q=9, n_k=12)
    want = reference(*x, causal=causal)[0]
    f = jax.jit(lambda *x: attlas.jax.attention(*x, causal=causal))
    np.testing.assert_allclose(f(*x), want, atol=1e-13)
    stacked = [jnp.stack([a, 2 * a, a - 1]) for a in x]
    each = [reference(*(a[i] for a in stacked), causal=causal)[0] for i in range(3)]
    np.testing.assert_allclose(jax.vmap(f)(*stacked), np.stack(each), atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_of_exact_attention(causal):
    x = arrays(n_q=7, n_k=9, d=5, d_v=3)
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((2, 6, 7, 3)))
    ours = jax.grad(lambda *x: (attlas.jax.attention(*x, causal=causal) * weights).sum(), (0, 1, 2))(*x)
    theirs = jax.grad(lambda *x: (exact(*x, causal) * weights).sum(), (0, 1, 2))(*x)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_other_methods_run_and_have_no_gradient():
    x = arrays()
    o = jax.jit(lambda *x: attlas.jax.attention(*x, method="sink_window", window=4, sinks=1, causal=True))(*x)
    np.testing.assert_array_equal(o, attlas.attention(*x, method="sink_window", window=4, sinks=1, causal=True))
    with pytest.raises(NotImplementedError, match="sink_window"):
        jax.grad(lambda q: attlas.jax.attention(q, *x[1:], method="sink_window", causal=True).sum())(x[0])


def test_half_types_come_back_as_they_are():
    x = tuple(a.astype(jnp.bfloat16) for a in arrays())
    o = jax.jit(lambda *x: attlas.jax.attention(*x, causal=True))(*x)
    assert o.dtype == jnp.bfloat16
    want = reference(*(np.asarray(a, np.float64) for a in x), causal=True)[0]
    np.testing.assert_allclose(np.asarray(o, np.float64), want, atol=2e-2, rtol=2e-2)
