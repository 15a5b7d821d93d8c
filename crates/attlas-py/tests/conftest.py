"""Shared parts of the tests: the reference in double precision, arrays of every library, tiny models, the real one."""

from __future__ import annotations

import importlib.util
import os
import pathlib

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = pathlib.Path(__file__).resolve().parents[3]


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def need(*names: str) -> pytest.MarkDecorator:
    missing = [n for n in names if not has(n)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def reference(q, k, v, causal=False, scale=None):
    """Exact attention of `[B, H, N, D]` arrays in double precision; output and log-sum-exp."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    size = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, size, 1), np.repeat(v, size, 1)
    s = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        n_q, n_k = s.shape[-2:]
        s = np.where(np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q, s, -np.inf)
    with np.errstate(all="ignore"):
        top = np.max(s, -1, keepdims=True, initial=-np.inf)
        e = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = e.sum(-1, keepdims=True)
        lse = np.where(total > 0, np.log(total) + np.where(np.isfinite(top), top, 0), -np.inf)[..., 0]
        out = np.where(total > 0, e @ v / np.where(total > 0, total, 1), 0)
    return out, lse


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(batch=2, heads=6, kv_heads=2, n_q=33, n_k=33, d=16, d_v=16, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, n_q, d), (batch, kv_heads, n_k, d), (batch, kv_heads, n_k, d_v)]
    return tuple(rng.standard_normal(s).astype(dtype) for s in shapes)


@pytest.fixture(scope="session")
def models():
    folder = pathlib.Path(os.environ.get("ATTLAS_MODELS") or ROOT / ".models")
    if not (folder / "smollm2").is_dir():
        pytest.fail(f"{folder} holds no smollm2: run scripts/fetch-models")
    return folder
