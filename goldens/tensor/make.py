"""Reference answers for attlas_num::tensor, printed as JSON.

Run with: python make.py > tensorly.json   (needs tensorly 0.10 and numpy 2)

Products, polyadic and Tucker answers come from TensorLy. It has no block terms; those are computed here
with explicit regressors and numpy's least squares, which the Rust code never forms.
"""

import json

import numpy as np
import tensorly as tl
from tensorly.cp_tensor import CPTensor, cp_to_tensor
from tensorly.decomposition import parafac, partial_tucker, tucker
from tensorly.tenalg import khatri_rao, kronecker, multi_mode_dot
from tensorly.tucker_tensor import tucker_to_tensor

MASK = (1 << 64) - 1


def fill(shape, seed):
    def entry(k):
        z = (seed * 0x9E3779B97F4A7C15 + (k + 1) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        return 2 * ((z >> 11) * 2.0**-53) - 1

    return np.array([entry(k) for k in range(int(np.prod(shape)))]).reshape(shape)


def factors(shape, rank, seed):
    return [fill((n, rank), seed + m) for m, n in enumerate(shape)]


def relative(t, model):
    return float(np.linalg.norm(t - model) / np.linalg.norm(t))


def products():
    t = fill((2, 3, 4), 70)
    mats = [fill((j, i), 71 + m) for m, (j, i) in enumerate([(3, 2), (2, 3), (5, 4)])]
    a, b = fill((2, 3), 75), fill((4, 3), 76)
    return {
        "unfold": [tl.unfold(t, m).ravel().tolist() for m in range(3)],
        "multi_mode_dot": multi_mode_dot(t, mats).ravel().tolist(),
        "khatri_rao": khatri_rao([a, b]).ravel().tolist(),
        "kronecker": kronecker([a, b]).ravel().tolist(),
        "cp_to_tensor": cp_to_tensor(CPTensor((np.array([2.0, -0.5]), factors((2, 3, 4), 2, 80)))).ravel().tolist(),
    }


def polyadic():
    cases = []
    for shape, rank, seed in [((4, 5, 6), 3, 50), ((3, 4), 2, 51), ((3, 2, 4, 3), 4, 52), ((2, 9, 8), 6, 53)]:
        t = fill(shape, seed)
        start = CPTensor((None, factors(shape, rank, 100)))
        cp, errors = parafac(t, rank, n_iter_max=12, init=start, tol=0, return_errors=True)
        model = cp_to_tensor(cp)
        cases.append(
            {
                "shape": shape,
                "rank": rank,
                "seed": seed,
                "errors": [float(e) for e in errors],
                "model_head": model.ravel()[:6].tolist(),
            }
        )
    # Two terms: the best three of this tensor cancel and grow, and no implementation reaches the infimum.
    t = fill((4, 5, 6), 50)
    best = min(
        relative(t, cp_to_tensor(parafac(t, 2, n_iter_max=3000, init="random", tol=1e-13, random_state=s)))
        for s in range(30)
    )
    return {"cases": cases, "best_of_30": best}


def st_hosvd(t, ranks):
    """Core and bases, modes truncated from the first to the last."""
    bases = []
    for mode, r in enumerate(ranks):
        u = np.linalg.svd(tl.unfold(t, mode), full_matrices=False)[0][:, :r]
        bases.append(u)
        t = tl.tenalg.mode_dot(t, u.T, mode)
    return t, bases


def tucker_errors():
    cases = []
    for shape, seed, ranks in [
        ((4, 5, 6), 50, (2, 2, 2)),
        ((4, 5, 6), 50, (3, 3, 3)),
        ((4, 5, 6), 50, (2, 3, 4)),
        ((3, 4, 2, 5), 54, (2, 3, 2, 3)),
        ((3, 4, 2, 5), 54, (1, 1, 1, 1)),
    ]:
        t = fill(shape, seed)
        start = st_hosvd(t, ranks)
        start_error = relative(t, tucker_to_tensor(start))
        # HOOI has several optima; the same start must lead to the same one. TensorLy overwrites the start.
        model = tucker_to_tensor(tucker(t, rank=list(ranks), n_iter_max=5000, tol=1e-14, init=start))
        cases.append(
            {
                "shape": shape,
                "seed": seed,
                "ranks": ranks,
                "st_hosvd": start_error,
                "hooi": relative(t, model),
                "hooi_head": model.ravel()[:4].tolist(),
            }
        )
    t = fill((4, 5, 6), 50)
    (core, bases), _ = partial_tucker(t, rank=[2, 3], modes=[1, 2], n_iter_max=5000, tol=1e-14, init="svd")
    partial = relative(t, multi_mode_dot(core, bases, modes=[1, 2]))
    return {"cases": cases, "partial_modes_1_2": {"ranks": [4, 2, 3], "rel_error": partial}}


def block_terms(shape, blocks, ranks, seed, sweeps):
    t = fill(shape, seed)
    bases = [[fill((n, r), 200 + 10 * p + m) for m, (n, r) in enumerate(zip(shape, ranks))] for p in range(blocks)]
    cores = [fill(ranks, 300 + p) for p in range(blocks)]
    errors = []
    for _ in range(sweeps):
        for mode in range(len(shape)):
            rows = [
                tl.unfold(multi_mode_dot(g, [b for m, b in enumerate(bs) if m != mode],
                                         modes=[m for m in range(len(shape)) if m != mode]), mode)
                for g, bs in zip(cores, bases)
            ]
            regressor = np.concatenate(rows)
            solved = np.linalg.lstsq(regressor.T, tl.unfold(t, mode).T, rcond=None)[0].T
            for p in range(blocks):
                bases[p][mode] = solved[:, p * ranks[mode]:(p + 1) * ranks[mode]]
        regressor = np.concatenate([kronecker(bs) for bs in bases], axis=1)
        solved = np.linalg.lstsq(regressor, t.ravel(), rcond=None)[0]
        cores = [c.reshape(ranks) for c in np.split(solved, blocks)]
        errors.append(relative(t, sum(multi_mode_dot(g, bs) for g, bs in zip(cores, bases))))
    return {"shape": shape, "blocks": blocks, "ranks": ranks, "seed": seed, "errors": errors}


print(
    json.dumps(
        {
            "tensorly": tl.__version__,
            "products": products(),
            "polyadic": polyadic(),
            "tucker": tucker_errors(),
            "block_terms": [
                block_terms((5, 6, 4), 2, (2, 2, 2), 55, 8),
                block_terms((4, 5, 6), 3, (1, 2, 2), 56, 8),
                block_terms((4, 5), 2, (1, 1), 57, 5),
            ],
        },
        indent=1,
    )
)
