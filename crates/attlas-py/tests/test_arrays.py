"""Arrays of every library, layout, rank and type, without copies."""

import sys
import tracemalloc

import attlas
import numpy as np
import pytest
from attlas import _native
from conftest import draw, has, need, qkv, reference
from hypothesis import given, settings
from hypothesis import strategies as st

LIBRARIES = ["numpy", *(n for n in ("torch", "jax") if has(n))]


def to(library, x):
    if library == "torch":
        import torch

        return torch.from_numpy(np.array(x)) if x.dtype != "bfloat16" else torch.from_numpy(np.array(x, np.float32)).bfloat16()
    if library == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
        return jax.numpy.asarray(x)
    return x


def back(x):
    module = type(x).__module__
    if module.startswith("torch"):
        return x.double().numpy()
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 4e-6), ("float64", 1e-13), ("float16", 2e-3), ("bfloat16", 1.6e-2)])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("rank", [4, 3, 2])
def test_every_library_type_layout_and_rank(library, dtype, tolerance, layout, rank):
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        kind = ml_dtypes.bfloat16
    else:
        kind = np.dtype(dtype)
    q, k, v = qkv(heads=6 if rank > 2 else 1, kv_heads=2 if rank > 2 else 1, d_v=24, dtype=np.float64)
    q, k, v = (x.astype(kind) for x in (q, k, v))
    want, want_lse = reference(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    given = [q, k, v]
    if layout == "bnhd":
        given = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in given]
        want = want.swapaxes(1, 2)
    if rank < 4:
        given, want, want_lse = [x[0] for x in given], want[0], want_lse[0]
    if rank == 2:
        axis = 1 if layout == "bnhd" else 0
        given, want, want_lse = [x.take(0, axis) for x in given], want.take(0, axis), want_lse[0]
    arrays = [to(library, np.ascontiguousarray(x)) for x in given]
    o, lse, info = attlas.attention(*arrays, causal=True, layout=layout, return_lse=True, return_info=True)
    assert type(o) is type(arrays[0]) and o.dtype == arrays[0].dtype and tuple(o.shape) == want.shape
    assert str(lse.dtype).endswith("float64" if dtype == "float64" else "float32")
    np.testing.assert_allclose(back(o), want, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(back(lse), want_lse, atol=max(1e-6, tolerance * 1e-3) if dtype != "float64" else 1e-13, rtol=1e-6)
    assert info.status == "complete"


def test_nothing_is_copied():
    q, k, v = qkv(batch=1, heads=4, kv_heads=2, n_q=4, n_k=200_000, d=32, d_v=32)
    out = np.empty_like(q)
    attlas.attention(q, k, v, out=out)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    assert attlas.attention(q, k, v, out=out) is out
    assert tracemalloc.get_traced_memory()[1] - before < 100_000, "a copy of the keys would be 50 MB"
    tracemalloc.stop()


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_memory_that_rust_reads_is_the_arrays_own(library):
    q, _, _ = qkv(batch=2, heads=4, n_q=10, d=8)
    x = to(library, q)
    address = {"numpy": lambda: x.ctypes.data, "torch": lambda: x.data_ptr(), "jax": lambda: x.unsafe_buffer_pointer()}[library]()
    assert _native.view(x) == (address, [2, 4, 10, 8], [320, 80, 8])
    assert _native.view(x, True) == (address, [2, 10, 4, 8], [320, 8, 80])
    if library != "jax":
        assert _native.view(x[1:, 1:, 2::2, :5]) == (address + 4 * (320 + 80 + 16), [1, 3, 4, 5], [0, 80, 16])
    if library == "torch":
        assert _native.view(x[:1].expand(3, -1, -1, -1)) == (address, [3, 4, 10, 8], [0, 80, 8])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@pytest.mark.parametrize("library", [n for n in LIBRARIES if n != "jax"])
def test_a_limit_on_memory_leaves_no_room_for_a_copy(library):
    """128 MiB of keys are attended to while the process may have 32 MiB more than it has."""
    import subprocess

    code = f"""
import numpy as np, attlas, resource
make = np.ones
if "{library}" == "torch":
    import torch
    make = lambda shape, dtype: torch.ones(shape)
k = make((1, 1, 1 << 19, 64), np.float32)
q, out = make((1, 2, 1, 64), np.float32), make((1, 2, 1, 64), np.float32)
run = lambda: attlas.attention(q, k, k, out=out, num_threads=1)
run()
has = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (has + (32 << 20),) * 2)
assert run() is out and (out == 1).all()
try:
    k + 1
except (MemoryError, RuntimeError):
    print("a copy does not fit")
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.stdout.strip() == "a copy does not fit", told.stderr


@need("torch")
def test_torch_memory_is_read_and_written_in_place():
    import torch

    q, k, v = (torch.from_numpy(x) for x in qkv())
    out = torch.full_like(q, torch.nan)
    address = out.data_ptr()
    assert attlas.attention(q, k, v, out=out) is out and out.data_ptr() == address
    np.testing.assert_allclose(out.numpy(), reference(q, k, v)[0], atol=4e-6)


def views(x):
    """The same numbers in other memory layouts."""
    yield "read-only", np.lib.stride_tricks.as_strided(x, writeable=False)
    yield "transposed tokens and heads", np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    wide[..., : x.shape[-1]] = x
    yield "a slice of wider rows", wide[..., : x.shape[-1]]
    long = np.full((x.shape[0], x.shape[1], 2 * x.shape[2], x.shape[3]), np.nan, x.dtype)
    long[:, :, ::2] = x
    yield "every second row", long[:, :, ::2]
    yield "columns in the other order", np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    yield "rows in the other order", np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]
    yield "Fortran order", np.asfortranarray(x)
    yield "the other order of bytes", x.astype(x.dtype.newbyteorder(">"))
    raw = np.zeros(x.nbytes + 1, np.uint8)
    odd = raw[1:].view(x.dtype).reshape(x.shape) if x.nbytes else x
    odd[...] = x
    yield "not aligned", odd


def test_memory_may_lie_in_any_way():
    q, k, v = qkv()
    want = attlas.attention(q, k, v, causal=True)
    for (name, a), (_, b), (_, c) in zip(views(q), views(k), views(v), strict=True):
        np.testing.assert_array_equal(attlas.attention(a, b, c, causal=True), want, err_msg=name)


def test_expanded_axes_are_views():
    q, k, v = qkv(batch=3)
    k1, v1 = k[:1], v[:1]
    expanded = [np.broadcast_to(x, (3, *x.shape[1:])) for x in (k1, v1)]
    copied = [np.ascontiguousarray(x) for x in expanded]
    np.testing.assert_array_equal(attlas.attention(q, *expanded), attlas.attention(q, *copied))
    tokens = np.broadcast_to(k[:, :, :1], k.shape)
    np.testing.assert_array_equal(attlas.attention(q, tokens, v), attlas.attention(q, np.ascontiguousarray(tokens), v))


def test_empty_arrays_have_an_answer():
    for n_q, n_k in [(0, 5), (5, 0), (0, 0)]:
        q, k, v = qkv(n_q=n_q, n_k=n_k)
        o, lse, info = attlas.attention(q, k, v, return_lse=True, return_info=True)
        assert o.shape == q.shape and (o == 0).all() and (lse == -np.inf).all()
        assert info.empty_rows == (2 * 6 * n_q if n_k == 0 else 0)


def test_out_is_refused_where_it_cannot_be_written():
    q, k, v = qkv()
    frozen = np.empty_like(q)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        attlas.attention(q, k, v, out=frozen)
    with pytest.raises(ValueError, match="share"):
        attlas.attention(q, k, v, out=q)
    with pytest.raises(ValueError, match="two at the same"):
        attlas.attention(q, k, v, out=np.lib.stride_tricks.as_strided(np.empty(16, np.float32), q.shape, (0, 0, 0, 4)))
    with pytest.raises(attlas.ShapeError, match="out"):
        attlas.attention(q, k, v, out=np.empty((1, 2, 3, 4), np.float32))
    with pytest.raises(TypeError, match="float32"):
        attlas.attention(q, k, v, out=np.empty(q.shape))
    half = [x.astype(np.float16) for x in (q, k, v)]
    with pytest.raises(ValueError, match="share"):
        attlas.attention(*half, out=half[0])
    plan = attlas.plan("exact", n_q=33, n_k=33, heads=6, kv_heads=2, d=16, batch=2)
    with pytest.raises(ValueError, match=r"out: .*contiguous"):
        plan(q, k, v, out=np.empty((*q.shape[:-1], 32), np.float32)[..., ::2])
    out = np.empty_like(half[0])
    assert attlas.attention(*half, out=out) is out
    np.testing.assert_array_equal(out, attlas.attention(*half))


@pytest.mark.parametrize("bad", [[[1.0]], "text", None, 3.0, np.ma.masked_array(np.zeros((4, 4), np.float32))])
def test_what_is_no_array_is_a_type_error_that_names_what_is_accepted(bad):
    good = draw(4, 4)
    with pytest.raises(TypeError, match="NumPy, PyTorch"):
        attlas.attention(bad, good, good)


@pytest.mark.parametrize("dtype", [np.int64, np.complex64, bool, np.uint8, object])
def test_other_element_types_are_refused_by_name(dtype):
    x = np.ones((4, 4)).astype(dtype)
    with pytest.raises(TypeError, match="float32, float64, bfloat16 or float16"):
        attlas.attention(x, x, x)
    with pytest.raises(TypeError, match="one element type"):
        attlas.attention(draw(4, 4), x, x)


def test_wrong_ranks_and_sizes_are_named():
    with pytest.raises(attlas.ShapeError, match="axes"):
        attlas.attention(draw(4), draw(4), draw(4))
    with pytest.raises(attlas.ShapeError, match="axes"):
        attlas.attention(*[draw(1, 1, 1, 4, 4)] * 3)
    with pytest.raises(attlas.ShapeError, match="k: expected 3 axes"):
        attlas.attention(draw(1, 4, 4), draw(4, 4), draw(4, 4))
    q, k, v = qkv()
    with pytest.raises(attlas.ShapeError):
        attlas.attention(q, k[..., :8], v)
    with pytest.raises(attlas.ShapeError):
        attlas.attention(q, k, v[:, :, :5])
    with pytest.raises(attlas.ShapeError, match="multiple"):
        attlas.attention(q[:, :5], k, v)
    with pytest.raises(attlas.ParameterError, match="layout"):
        attlas.attention(q, k, v, layout="hbnd")


@need("torch")
def test_tensors_elsewhere_and_lazy_ones():
    import torch

    meta = torch.empty(1, 1, 4, 4, device="meta")
    with pytest.raises(attlas.UnsupportedError, match="meta"):
        attlas.attention(meta, meta, meta)
    x = torch.randn(1, 1, 4, 4, dtype=torch.complex64)
    lazy = x.conj().imag
    assert lazy.is_neg()
    y = lazy.contiguous()
    torch.testing.assert_close(attlas.attention(lazy, lazy, lazy), attlas.attention(y.clone(), y.clone(), y.clone()))
    assert not attlas.attention(y, y, y, out=torch.zeros_like(y)).is_neg()
    with pytest.raises((ValueError, RuntimeError), match=r"negative|negated"):
        attlas.attention(y, y, y, out=torch.zeros(1, 1, 4, 4, dtype=torch.complex64).conj().imag)
    with pytest.raises(TypeError, match="one library"):
        attlas.attention(y, y.numpy(), y)
    with torch.no_grad():
        z = y.clone().requires_grad_()
        torch.testing.assert_close(attlas.attention(z, y, y), attlas.attention(y, y, y))
        torch.testing.assert_close(attlas.attention(torch.nn.Parameter(y), y, y), attlas.attention(y, y, y))


sizes = st.integers(0, 9)


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 3), groups=st.integers(1, 3), size=st.integers(1, 3), n_q=sizes, n_k=sizes, d=st.integers(1, 9),
    d_v=st.integers(1, 9), causal=st.booleans(), perm=st.permutations(range(4)), steps=st.tuples(*[st.sampled_from([1, 2, -1])] * 4),
    scale=st.sampled_from([None, 0.0, 0.3, -1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_shapes_and_strides_against_numpy(batch, groups, size, n_q, n_k, d, d_v, causal, perm, steps, scale, seed):
    def strided(x):
        index = tuple(slice(None, None, s) for s in steps)
        big = np.full([n * abs(s) for n, s in zip(x.shape, steps, strict=True)], np.nan)
        big = np.ascontiguousarray(big.transpose(perm)).transpose(np.argsort(perm))
        view = big[index][tuple(slice(n) for n in x.shape)]
        view[...] = x
        return view

    arrays = qkv(batch, groups * size, groups, n_q, n_k, d, d_v, np.float64, seed)
    want, want_lse = reference(*arrays, causal=causal, scale=scale)
    got, lse, _ = attlas.attention(*(strided(x) for x in arrays), causal=causal, scale=scale, return_lse=True)
    np.testing.assert_allclose(got, want, atol=1e-12, rtol=1e-12)
    np.testing.assert_allclose(lse, want_lse, atol=1e-12, rtol=1e-12)


def test_a_capsule_of_the_old_kind_is_read():
    class Old:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, stream=None):
            return self.x.__dlpack__()

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    q, k, v = qkv()
    out = np.empty_like(q)
    _native.attend(Old(q), Old(k), Old(v), out, None, False, "exact", None, False, None, None, None, 1, False)
    np.testing.assert_array_equal(out, attlas.attention(q, k, v))


def test_importing_brings_numpy_alone():
    import subprocess

    code = "import attlas, sys; print(sorted(m for m in ('torch', 'pandas', 'jax', 'transformers') if m in sys.modules), __import__('threading').active_count())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[] 1"
