"""How do I call a method on my arrays, and what did it do?"""

import attlas
import numpy as np

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 8, 2048, 64), dtype=np.float32)
k, v = rng.standard_normal((2, 1, 2, 2048, 64), dtype=np.float32)
exact = attlas.attention(q, k, v, causal=True)
for method in ("hyper", "sink_window", "performer"):
    o, _, info = attlas.attention(q, k, v, method=method, causal=True, return_info=True)
    error = np.linalg.norm(o - exact) / np.linalg.norm(exact)
    print(f"{method:12} error {error:.3f}, {info.keys_visited} scores, {info.status}")
