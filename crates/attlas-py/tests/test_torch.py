"""The operator: checks of torch itself, gradients, compilation."""

import attlas
import pytest
from conftest import need, qkv

pytestmark = need("torch")
torch = pytest.importorskip("torch")
import attlas.torch  # noqa: E402


def tensors(grad=False, dtype=torch.float64, **sizes):
    return tuple(torch.from_numpy(x).to(dtype).requires_grad_(grad) for x in qkv(**sizes))


def test_opcheck():

    for method, options, dtype in [("exact", "", torch.float32), ("exact", "", torch.bfloat16), ("hyper", "block=16", torch.float32), ("linear", "", torch.float64)]:
        x = tensors(dtype=dtype, grad=method == "exact" and dtype == torch.float32)
        tests = ("test_schema", "test_faketensor") + (("test_autograd_registration", "test_aot_dispatch_dynamic") if method == "exact" and dtype == torch.float32 else ())
        torch.library.opcheck(torch.ops.attlas.attention.default, (*x, method, options, True, 0.25, 1), test_utils=tests)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_q", "n_k"), [(7, 7), (3, 6), (6, 3)])
def test_gradcheck_of_output_and_log_sum_exp(causal, n_q, n_k):
    x = tensors(grad=True, batch=2, heads=4, kv_heads=2, n_q=n_q, n_k=n_k, d=3, d_v=5)

    def both(q, k, v):
        o, lse, _ = attlas.attention(q, k, v, causal=causal, scale=0.7, return_lse=True)
        return o, torch.where(lse.isinf(), 0, lse)

    assert torch.autograd.gradcheck(both, x)


def test_the_gradient_is_that_of_sdpa_in_single_precision():
    x = tensors(grad=True, dtype=torch.float32, n_q=700, n_k=700)
    attlas.attention(*x, causal=True).square().sum().backward()
    ours = [t.grad.clone() for t in x]
    for t in x:
        t.grad = None
    torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True).square().sum().backward()
    for a, t in zip(ours, x, strict=True):
        torch.testing.assert_close(a, t.grad, atol=2e-4, rtol=2e-4)


def test_other_methods_run_forward_and_refuse_backward_by_name():
    x = tensors(grad=True, dtype=torch.float32)
    for params in ({"method": "performer"}, {"method": "exact", "precision": "bf16"}):
        o = attlas.attention(*x, causal=True, **params)
        assert o.requires_grad
        with pytest.raises(NotImplementedError, match=params["method"]):
            o.sum().backward()
    attlas.torch.attention(*x, method="performer", causal=True, backward="exact").sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in x)


def test_what_cannot_be_differentiated_is_refused_with_all_reasons():
    x = tensors(grad=True, dtype=torch.float32)
    with pytest.raises(attlas.UnsupportedError) as caught:
        attlas.attention(*x, key_lengths=[1, 1], out=torch.empty(2, 6, 33, 16), return_info=True)
    assert len(caught.value.reasons) == 3
    with torch.no_grad():
        assert attlas.attention(*x, key_lengths=[1, 1]).shape == (2, 6, 33, 16)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_compiles_into_one_graph(layout):
    x = tensors(dtype=torch.float32)
    x = tuple(t.transpose(1, 2).contiguous() for t in x) if layout == "bnhd" else x

    def f(q, k, v):
        return attlas.attention(q * 1.0, k, v, method="hyper", causal=True, layout=layout, block=16) + 1

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*x), f(*x), rtol=0, atol=0)


def test_exports():
    class M(torch.nn.Module):
        def forward(self, q, k, v):
            return attlas.attention(q, k, v, causal=True)

    x = tensors(dtype=torch.float32)
    program = torch.export.export(M(), x)
    assert "attlas.attention" in str(program.graph)
    torch.testing.assert_close(program.module()(*x), attlas.attention(*x, causal=True), rtol=0, atol=0)
