#!/usr/bin/env python3
"""Writes columns.json: outputs of sampled_columns from its definition in NumPy, double precision, dense masks.

    python3 goldens/sampled_columns/make.py

Inputs come from a 64-bit linear congruential generator that the test repeats, so only outputs are stored. `sampled_columns`
below is the definition: one key head k [n, d], v [n, dv] and the query heads that share it, q [heads, n, d]; causal.
"""
import json
import pathlib

import numpy as np


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sampled_columns(q, k, v, scale, block, sinks, window, scouts, keys, diagonals, far_block, far):
    heads, n, _ = q.shape
    out = np.zeros((heads, n, v.shape[1]))
    prefix_k = np.concatenate([np.zeros((1, k.shape[1])), np.cumsum(k, 0)])
    prefix_v = np.concatenate([np.zeros((1, v.shape[1])), np.cumsum(v, 0)])
    recent = []  # votes (distance, scout, weight) of the blocks before
    for first in range(0, n, block):
        rows = np.arange(first, min(first + block, n))
        edge = max(first - window, 0)  # keys from here on are near, for every row of the block
        sink = min(sinks, edge)
        chosen = np.zeros(n, bool)
        if edge > sink:
            # Scouts: the block's first row, the others spread over the block before. None is later than `first`.
            before = max(first - block, 0)
            rest = [before + (block * (s + 1)) // scouts - 1 for s in range(scouts - 1)]
            mass, own = np.zeros(n), []
            for r in sorted({first, *[r for r in rest if r < first]}):
                for h in range(heads):
                    p = softmax(scale * (k[: r + 1] @ q[h, r]))
                    mass[: r + 1] += p
                    # A heavy key votes for its distance.
                    own += [(r - j, r, p[j]) for j in range(sink, min(edge, r + 1)) if p[j] >= 1 / 128]
            recent.append(own)
            votes = {}
            for distance, r, weight in sum(recent[-8:], []):
                of_scouts = votes.setdefault(distance, {})
                of_scouts[r] = of_scouts.get(r, 0) + weight
            far_keys = np.arange(sink, edge)
            best = far_keys[np.lexsort((far_keys, -mass[far_keys]))][:keys]  # ties to the smaller index
            chosen[best] = True
            # A distance counts the votes of all scouts but the one that gives most.
            count = {d: sum(w.values()) - (max(w.values()) if scouts > 1 else 0) for d, w in votes.items()}
            taken = []
            for distance in sorted((d for d in count if count[d] > 0), key=lambda d: (-count[d], d)):
                run = np.arange(first - distance, first - distance + block)
                run = run[(run >= sink) & (run < edge)]
                beside = any(abs(distance - other) <= 2 for other in taken)
                if beside or len(taken) < diagonals:
                    chosen[run] = True
                    if not beside and len(run) > 0:
                        taken.append(distance)
        exact = np.zeros(n, bool)
        exact[:sink] = True
        exact[edge:] = True
        exact |= chosen
        # Far field: one pseudo key for each aligned run of keys that were not chosen.
        pk, pv, bias = [], [], []
        if far and edge > sink:
            for a in range((sink // far_block) * far_block, edge, far_block):
                lo, hi = max(a, sink), min(a + far_block, edge)
                taken = np.flatnonzero(chosen[lo:hi]) + lo
                count = hi - lo - len(taken)
                if count > 0:
                    pk.append((prefix_k[hi] - prefix_k[lo] - k[taken].sum(0)) / count)
                    pv.append((prefix_v[hi] - prefix_v[lo] - v[taken].sum(0)) / count)
                    bias.append(np.log(count))
        for r in rows:
            seen = np.flatnonzero(exact[: r + 1])
            for h in range(heads):
                s = scale * (k[seen] @ q[h, r])
                values = v[seen]
                if pk:
                    s = np.concatenate([s, scale * (np.array(pk) @ q[h, r]) + bias])
                    values = np.concatenate([values, pv])
                out[h, r] = softmax(s) @ values
    return out


def draw(count, state):
    values = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        values.append((state >> 40) / 2**23 - 1)
    return 3 * np.array(values), state


SETTINGS = [
    dict(block=16, sinks=3, window=16, scouts=4, keys=12, diagonals=1, far_block=8, far=True),
    dict(block=16, sinks=0, window=5, scouts=7, keys=6, diagonals=2, far_block=16, far=True),
    dict(block=10, sinks=4, window=20, scouts=1, keys=9, diagonals=0, far_block=7, far=False),
]

if __name__ == "__main__":
    heads, n, d, d_v = 2, 120, 6, 2
    q, state = draw(heads * n * d, 1)
    k, state = draw(n * d, state)
    v, state = draw(n * d_v, state)
    q, k, v = q.reshape(heads, n, d), k.reshape(n, d), v.reshape(n, d_v)
    cases = []
    for setting in SETTINGS:
        o = sampled_columns(q, k, v, 0.25, **setting)
        cases.append({"setting": setting, "o": [float(f"{x:.12g}") for x in o.ravel()]})
    path = pathlib.Path(__file__).with_name("columns.json")
    path.write_text(json.dumps({"heads": heads, "n": n, "d": d, "d_v": d_v, "scale": 0.25, "cases": cases}) + "\n")
