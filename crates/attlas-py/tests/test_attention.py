"""Every method through Python, its errors, plans, streams, calibrations."""

import inspect
import json
import subprocess
import sys

import attlas
import numpy as np
import pytest
from conftest import qkv, reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

IDS = [m.id for m in attlas.methods()]


def test_the_registry_is_the_command_lines():
    told = json.loads(subprocess.check_output([sys.executable, "-m", "attlas", "methods", "--json"], text=True))
    assert [m["id"] for m in told["methods"]] == IDS
    hyper = attlas.method("hyper")
    assert hyper.family == "clustering" and "hyper" in hyper.__doc__
    assert [p.name for p in hyper.params] == [p["name"] for p in next(m for m in told["methods"] if m["id"] == "hyper")["params"]]
    assert "<table>" in attlas.methods("kernel")._repr_html_()


def test_keywords_collide_with_no_parameter():
    names = set(inspect.signature(attlas.attention).parameters) | set(inspect.signature(attlas.plan).parameters)
    for m in attlas.methods():
        assert not names & {p.name for p in m.params}, m.id


def test_alignment_is_bottom_right():
    for n_q, n_k in [(2, 5), (5, 2)]:
        q, k, v = qkv(n_q=n_q, n_k=n_k, dtype=np.float64)
        want, want_lse = reference(q, k, v, causal=True)
        o, lse, info = attlas.attention(q, k, v, causal=True, return_lse=True, return_info=True)
        np.testing.assert_allclose(o, want, atol=1e-13)
        np.testing.assert_array_equal(np.isinf(lse), np.isinf(want_lse))
        assert info.empty_rows == 2 * 6 * max(n_q - n_k, 0)


def test_key_lengths_leave_padding_unread():
    q, k, v = qkv(batch=3, n_q=4, n_k=9)
    k[1, :, 5:], v[1, :, 5:] = np.nan, np.nan
    o = attlas.attention(q, k, v, key_lengths=[9, 5, 0])
    np.testing.assert_allclose(o[1], reference(q[1:2], k[1:2, :, :5], v[1:2, :, :5])[0][0], atol=4e-6)
    assert (o[2] == 0).all() and np.isfinite(o).all()
    for bad in ([9, 5], [9, 5, 10], [9, 5, -1], [9, 5, 1.5], 3):
        with pytest.raises((ValueError, TypeError)):
            attlas.attention(q, k, v, key_lengths=bad)


@pytest.mark.parametrize("id", IDS)
def test_every_method_runs_or_refuses_with_its_reasons(id):
    method = attlas.method(id)
    q, k, v = qkv(batch=1, n_q=96, n_k=96)
    for causal in (False, True):
        reasons = method.supports(n=96, heads=6, kv_heads=2, d=16, causal=causal)
        calibration = None
        if method.claims.needs == "calibration":
            if not reasons:
                calibration = attlas.calibrate(id, q, k, v, causal=causal)
            with pytest.raises(attlas.UnsupportedError, match="calibration"):
                attlas.attention(q, k, v, method=id, causal=causal)
        if reasons:
            with pytest.raises(ValueError) as caught:
                attlas.attention(q, k, v, method=id, causal=causal, calibration=calibration)
            assert isinstance(caught.value, attlas.UnsupportedError) and caught.value.method == id
            assert set(reasons) <= set(caught.value.reasons)
            continue
        o, lse, info = attlas.attention(
            q, k, v, method=id, causal=causal, calibration=calibration, return_lse=method.claims.lse, return_info=True
        )
        assert np.isfinite(o).all() and info.keys_visited > 0
        plan = attlas.plan(id, n_q=96, n_k=96, heads=6, kv_heads=2, d=16, causal=causal, calibration=calibration)
        np.testing.assert_array_equal(plan(q, k, v), o)
        assert plan.problem.n_q == 96 and plan.cost.run_flops > 0 and plan.workspace_bytes(2) >= 0
        if method.claims.lse:
            assert lse.shape == (1, 6, 96)
        else:
            with pytest.raises(attlas.UnsupportedError, match="log-sum-exp"):
                attlas.attention(q, k, v, method=id, causal=causal, calibration=calibration, return_lse=True)


def test_errors_carry_facts():
    q, k, v = qkv()
    with pytest.raises(attlas.ParameterError) as caught:
        attlas.attention(q, k, v, method="top_k", keys=0)
    assert caught.value.name == "keys" and "whole number" in caught.value.expected and isinstance(caught.value, ValueError)
    with pytest.raises(attlas.ParameterError, match="there is no parameter kays"):
        attlas.attention(q, k, v, method="top_k", kays=3)
    with pytest.raises(attlas.ParameterError, match="known are"):
        attlas.attention(q, k, v, method="nonsense")
    with pytest.raises(attlas.ParameterError, match="twice"):
        attlas.attention(q, k, v, method="top_k", keys=3, options={"keys": 4})
    with pytest.raises(attlas.ParameterError):
        attlas.attention(q, k, v, scale=float("nan"))
    with pytest.raises(attlas.ParameterError):
        attlas.attention(q, k, v, num_threads=-1)
    with pytest.raises(MemoryError):
        attlas.plan("exact", n_q=1 << 50, n_k=1 << 50, heads=1 << 10)
    same = attlas.attention(q, k, v, method="top_k", keys=3)
    np.testing.assert_array_equal(same, attlas.attention(q, k, v, method="top_k", options={"keys": np.int64(3)}))
    np.testing.assert_array_equal(same, attlas.attention(q, k, v, method="top_k", options="keys=3"))


def test_nan_reaches_the_rows_that_see_it_and_no_other():
    q, k, v = qkv(batch=1, heads=1, kv_heads=1, n_q=20, n_k=20)
    v[0, 0, 7] = np.nan
    o = attlas.attention(q, k, v, causal=True)
    assert np.isfinite(o[0, 0, :7]).all() and np.isnan(o[0, 0, 7:]).all()


@pytest.mark.parametrize("id", [m.id for m in attlas.methods() if m.claims.decode])
def test_streams_give_the_rows_of_the_prompt(id):
    q, k, v = qkv(batch=2, n_q=40, n_k=40, dtype=np.float64)
    method = attlas.method(id)
    calibration = attlas.calibrate(id, q, k, v, causal=True) if method.claims.needs == "calibration" else None
    plan = attlas.plan(id, n_q=40, n_k=40, heads=6, kv_heads=2, d=16, batch=2, causal=True, calibration=calibration)
    stream = plan.stream("float64")
    rows = []
    for i in range(40):
        stream.push(k[:, :, i : i + 1], v[:, :, i : i + 1])
        rows.append(stream.attend(q[:, :, i : i + 1]))
    assert len(stream) == 40 and stream.nbytes > 0
    if not any(e.law == "decode_is_prefill" for e in method.claims["except"]):
        np.testing.assert_allclose(np.concatenate(rows, 2), plan(q, k, v), atol=1e-9, rtol=1e-7)
    with pytest.raises(TypeError, match="as the stream was made for"):
        stream.attend(q[:, :, :1].astype(np.float32))
    with pytest.raises(attlas.ShapeError):
        stream.attend(q)


def test_calibrations_are_saved_and_checked(tmp_path):
    q, k, v = qkv(batch=1, n_q=64, n_k=64)
    learnt = attlas.calibrate("loki", q, k, v, causal=True)
    learnt.save(tmp_path / "c.json")
    again = attlas.Calibration.load(tmp_path / "c.json")
    a = attlas.attention(q, k, v, method="loki", causal=True, calibration=learnt)
    np.testing.assert_array_equal(a, attlas.attention(q, k, v, method="loki", causal=True, calibration=again))
    with pytest.raises(attlas.ParameterError, match="calibration"):
        attlas.attention(q, k[:, :1], v[:, :1], method="loki", causal=True, calibration=learnt)
    with pytest.raises(attlas.UnsupportedError, match="learns nothing"):
        attlas.calibrate("exact", q, k, v)


def test_python_gives_the_bits_of_the_crate():
    """One core, no arithmetic in the binding: the error of every method is the one that the lab measures in Rust.

    Both are sums in double precision over the same outputs in single precision.
    """
    ids = [m.id for m in attlas.methods(causal=True) if m.claims.needs != "calibration" and not m.claims.oracle]
    layer = attlas.demo()[5]
    q, k, v = (np.ascontiguousarray(x[:, :512]) for x in (layer.q, layer.k, layer.v))
    told = attlas.compare(attlas.Trace.from_arrays({5: (q, k, v)}, causal=True, scale=layer.scale), methods=ids, seeds=1)
    exact = attlas.attention(q, k, v, causal=True, scale=layer.scale).astype(np.float64)
    seen = set()
    for row in told.rows:
        if row.method not in ids:
            continue
        params = {"seed": 0} if any(p.name == "seed" for p in attlas.method(row.method).params) else {}
        o = attlas.attention(q, k, v, method=row.method, causal=True, scale=layer.scale, **params)
        error = np.linalg.norm(o[row.head] - exact[row.head]) / np.linalg.norm(exact[row.head])
        assert error == pytest.approx(row.rel_fro.mean, rel=1e-11, abs=0), (row.method, row.head)
        seen.add((row.method, row.head))
    assert len(seen) == 2 * len(ids)


values = st.one_of(
    st.integers(-3, 1 << 70), st.floats(allow_nan=True), st.booleans(), st.none(), st.text(max_size=4), st.lists(st.integers(0, 5), max_size=3)
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_arbitrary_arrays_and_parameters_never_panic(data):
    method = attlas.method(data.draw(st.sampled_from(IDS)))
    names = st.sampled_from([p.name for p in method.params] or ["seed"]) | st.text(max_size=3)
    params = data.draw(st.dictionaries(names, values, max_size=3))
    groups, size = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    n_q, n_k, d, d_v = (data.draw(st.integers(0 if i < 2 else 1, 40)) for i in range(4))
    q, k, v = qkv(1, groups * size, groups, n_q, n_k, d, d_v, seed=data.draw(st.integers(0, 9)))
    special = data.draw(st.sampled_from([None, 0.0, np.nan, np.inf, -np.inf, 1e38, 1e-38]))
    if special is not None and n_k:
        k[0, 0, data.draw(st.integers(0, n_k - 1))] = special
    causal = data.draw(st.booleans())
    try:
        calibration = attlas.calibrate(method.id, q, k, v, causal=causal) if method.claims.needs == "calibration" else None
        o = attlas.attention(q, k, v, method=method.id, causal=causal, calibration=calibration, options=params)
    except (attlas.Error, TypeError, ValueError):
        return
    assert o.shape == (1, groups * size, n_q, d_v)
    if special in (None, 0.0, 1e-38):
        assert np.isfinite(o).all()
