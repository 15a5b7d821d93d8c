"""Threads, forks and the lock of the interpreter."""

import os
import sys
import threading
import time

import attlas
import numpy as np
import pytest
from conftest import qkv


def test_the_same_bits_whatever_the_number_of_threads():
    q, k, v = qkv(batch=2, n_q=300, n_k=300)
    for method in ("exact", "hyper", "performer"):
        want = attlas.attention(q, k, v, method=method, causal=True, num_threads=1)
        for n in (2, 8):
            np.testing.assert_array_equal(attlas.attention(q, k, v, method=method, causal=True, num_threads=n), want)


def test_eight_threads_share_one_plan():
    plan = attlas.plan("hyper", n_q=200, n_k=200, heads=6, kv_heads=2, d=16, causal=True)
    inputs = [qkv(batch=1, n_q=200, n_k=200, seed=i) for i in range(8)]
    want = [plan(*x) for x in inputs]
    got, failed = [None] * 8, []

    def work(i):
        try:
            for _ in range(5):
                got[i] = plan(*inputs[i], num_threads=1 + i % 2)
        except Exception as error:  # passed to the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failed
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_child_of_fork_attends():
    q, k, v = qkv(n_q=200, n_k=200)

    def attend(m):
        learnt = m.claims.needs == "calibration"
        calibration = attlas.calibrate(m.id, q, k, v, causal=m.claims.causal) if learnt else None
        return attlas.attention(q, k, v, method=m.id, causal=m.claims.causal, calibration=calibration)

    all_methods = attlas.methods()
    want = {m.id: attend(m) for m in all_methods}
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = all(np.array_equal(attend(m), want[m.id]) for m in all_methods)
        finally:
            os._exit(0 if good else 1)
    for _ in range(100):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child did not end within ten seconds")
    assert os.waitstatus_to_exitcode(status) == 0


def test_other_threads_run_during_a_call():
    q, k, v = qkv(batch=1, heads=4, kv_heads=4, n_q=4000, n_k=4000, d=64, d_v=64)
    counted, stop = 0, False

    def count():
        nonlocal counted
        while not stop:
            counted += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    time.sleep(0.05)
    before = counted
    attlas.attention(q, k, v)
    during = counted - before
    stop = True
    thread.join()
    assert during > 100


def test_a_stream_belongs_to_one_thread_at_a_time():
    plan = attlas.plan("exact", n_q=1, n_k=60_000, heads=4, d=64, causal=True)
    stream = plan.stream()
    k = np.random.default_rng(0).standard_normal((1, 4, 60_000, 64), dtype=np.float32)
    errors = []
    begun = threading.Event()

    def push():
        begun.set()
        for _ in range(5):
            stream.push(k, k)

    thread = threading.Thread(target=push)
    thread.start()
    begun.wait()
    while thread.is_alive():
        try:
            len(stream)
        except RuntimeError as error:
            errors.append(error)
    thread.join()
    assert errors and "another thread" in str(errors[0])


def test_numbers_of_threads_are_set_and_read(monkeypatch):
    monkeypatch.delenv("ATTLAS_NUM_THREADS", raising=False)
    before = attlas.get_num_threads()
    attlas.set_num_threads(3)
    assert attlas.get_num_threads() == 3
    attlas.set_num_threads(0)
    monkeypatch.setenv("ATTLAS_NUM_THREADS", "5")
    assert attlas.get_num_threads() == 5
    monkeypatch.delenv("ATTLAS_NUM_THREADS")
    assert attlas.get_num_threads() == before
    with pytest.raises(attlas.ParameterError):
        attlas.set_num_threads("many")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/task")
def test_work_stays_on_the_pools_of_the_package():
    """Rayon's own pool has unnamed threads, in a number that no caller chose."""
    import subprocess

    code = """
import glob, attlas, numpy as np
def others():
    return sum(not open(f).read().startswith("attlas-") for f in glob.glob("/proc/self/task/*/comm"))
before = others()
draw = np.random.default_rng(0).standard_normal
ids = [m.id for m in attlas.methods() if m.claims.needs != "calibration" and not m.claims.oracle]
for threads in (1, 2):
    for n_q, n_k in ((1, 1), (1, 1024), (1, 9000), (1, 0), (64, 64)):
        q, k, v = (draw((1, h, n, 16), dtype=np.float32) for h, n in ((4, n_q), (2, n_k), (2, n_k)))
        for method in ids:
            for layout in ("bhnd", "bnhd"):
                x = [q, k, v] if layout == "bhnd" else [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
                try:
                    attlas.attention(*x, method=method, layout=layout, num_threads=threads)
                except attlas.UnsupportedError:
                    continue
        wide = draw((1, n_q, 4, 20), dtype=np.float32)[..., :16].swapaxes(1, 2)
        attlas.plan("exact", n_q=n_q, n_k=n_k, heads=4, kv_heads=2, d=16)(wide, k, v, num_threads=threads)
print(others() - before)
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "0"


@pytest.mark.skipif(not hasattr(sys, "_is_gil_enabled"), reason="an interpreter with its lock")
def test_importing_leaves_the_interpreter_free():
    if not __import__("sysconfig").get_config_var("Py_GIL_DISABLED"):
        pytest.skip("not a free-threaded build")
    assert not sys._is_gil_enabled()
