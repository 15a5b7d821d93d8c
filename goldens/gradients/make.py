"""Gradients of exact, linear and third-order attention by PyTorch's automatic differentiation, in double precision.

Inputs are given by a formula, so that the test makes them again: entry t of tensor number s is
sin(0.7 (t + 1) + 1.3 s + 0.05 (t mod 11)^2).

    python goldens/gradients/make.py > goldens/gradients/torch.json
"""

import json
import math
import sys

import torch

B, H, G, N_Q, N_K, D, D_V = 2, 4, 2, 5, 7, 6, 3


def fill(s, *shape):
    t = torch.arange(math.prod(shape), dtype=torch.float64)
    x = torch.sin(0.7 * (t + 1) + 1.3 * s + 0.05 * (t % 11) ** 2)
    return x.reshape(shape).requires_grad_()


def mask(causal, n_q, n_k):
    seen = torch.ones(n_q, n_k, dtype=torch.bool)
    return seen.tril(n_k - n_q) if causal else seen


def gradients(output, lse, inputs, s):
    """The gradients of <output, fill(s)> + <lse, fill(s + 1)>."""
    loss = (output * fill(s, *output.shape)).sum()
    if lse is not None:
        loss = loss + (lse * fill(s + 1, *lse.shape)).sum()
    return [g.flatten().tolist() for g in torch.autograd.grad(loss, inputs)]


def pair(causal, weights):
    """Grouped-query attention with the logarithms of weights given by a function of repeated queries and keys."""
    q, k, v = fill(1, B, H, N_Q, D), fill(2, B, G, N_K, D), fill(3, B, G, N_K, D_V)
    kk, vv = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    logits = weights(q, kk).masked_fill(~mask(causal, N_Q, N_K), -math.inf)
    return gradients(logits.softmax(-1) @ vv, logits.logsumexp(-1), [q, k, v], 4)


def exact(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(D)


def linear(q, k):
    phi = lambda x: torch.nn.functional.elu(x) + 1
    return (phi(q) @ phi(k).transpose(-1, -2)).log()


def third(causal):
    """Trilinear attention of one head to all pairs, scale 0.5."""
    n = 6
    q, k1, k2 = (fill(s, n, D) for s in (1, 2, 3))
    v1, v2 = (fill(s, n, D_V) for s in (4, 5))
    logits = 0.5 * torch.einsum("il,jl,kl->ijk", q, k1, k2)
    seen = mask(causal, n, n)
    logits = logits.masked_fill(~(seen[:, :, None] & seen[:, None, :]), -math.inf)
    p = logits.reshape(n, -1).softmax(-1).reshape(n, n, n)
    return gradients(torch.einsum("ijk,je,ke->ie", p, v1, v2), None, [q, k1, k2, v1, v2], 6)


cases = {}
for causal in (False, True):
    end = "_causal" if causal else ""
    cases["exact" + end] = pair(causal, exact)
    cases["linear" + end] = pair(causal, linear)
    cases["third_order" + end] = third(causal)
json.dump({"torch": torch.__version__, "cases": cases}, sys.stdout)
