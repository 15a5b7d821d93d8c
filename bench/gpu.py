#!/usr/bin/env python3
"""Device forms against cuDNN, in one process: the acceptance table of the CUDA backend.

    cargo build --release -p attlas-cuda --example attlas_cuda_c
    python3 bench/gpu.py --lib target/release/examples/libattlas_cuda_c.so [--cache DIR] [--nvrtc PATH] [--quick]

bf16, batch 1, forward, medians of replayed graphs. Times vary by some 5 % from run to run with the power of the chip:
only ratios within a run count. Exit status 1 if a ratio lies below its floor (a regression).
"""
import argparse
import ctypes
import math
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda"


class Attlas:
    """The C interface of crates/attlas-cuda/examples/attlas_cuda_c.rs."""

    def __init__(self, path, cache, nvrtc):
        self.lib = ctypes.CDLL(path)
        for name, result in (("open", ctypes.c_void_p), ("plan", ctypes.c_void_p), ("error", ctypes.c_char_p)):
            getattr(self.lib, "attlas_" + name).restype = result
        self.cache, self.nvrtc = cache.encode(), nvrtc.encode()
        self.devices = {}

    def check(self, ok):
        if not ok:
            raise RuntimeError(self.lib.attlas_error().decode())

    def device(self, family):
        if family not in self.devices:
            device = self.lib.attlas_open(self.cache, self.nvrtc, ctypes.c_int(family))
            self.check(device)
            self.devices[family] = ctypes.c_void_p(device)
        return self.devices[family]

    def plan(self, method, options, q, k, causal, family=0, learn=None):
        """`learn`: queries and keys on the host for calibration, with the same number of tokens."""
        _, heads, n_q, d = q.shape
        sizes = (ctypes.c_int64 * 8)(q.shape[0], heads, k.shape[1], n_q, k.shape[2], d, d, int(causal))
        where = [ctypes.c_void_p(0)] * 2
        if learn is not None:
            learn = [t.float().contiguous() for t in learn]
            where = [ctypes.c_void_p(t.data_ptr()) for t in learn]
        tokens = ctypes.c_int64(0 if learn is None else learn[0].shape[2])
        plan = self.lib.attlas_plan(self.device(family), method.encode(), options.encode(), sizes, ctypes.c_int(0), *where, tokens)
        self.check(plan)
        return Plan(self, ctypes.c_void_p(plan))


class Plan:
    def __init__(self, attlas, plan):
        self.attlas, self.plan = attlas, plan

    def _stream(self):
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def __call__(self, q, k, v, o):
        p = [ctypes.c_uint64(t.data_ptr()) for t in (q, k, v, o)]
        self.attlas.check(self.attlas.lib.attlas_run(self.plan, self._stream(), *p, ctypes.c_uint64(0)) == 0)

    def push(self, k, v):
        p = [ctypes.c_uint64(t.data_ptr()) for t in (k, v)]
        n = ctypes.c_int64(k.shape[2])
        self.attlas.check(self.attlas.lib.attlas_push(self.plan, self._stream(), *p, n) == 0)

    def attend(self, q, o):
        p = [ctypes.c_uint64(t.data_ptr()) for t in (q, o)]
        self.attlas.check(self.attlas.lib.attlas_attend(self.plan, self._stream(), *p) == 0)

    def __del__(self):
        self.attlas.lib.attlas_free(self.plan)


def milliseconds(work, repeat=1, replays=7):
    """Median of replayed graphs of `repeat` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeat):
                work()
    times = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeat)
    return sorted(times)[len(times) // 2]


def normal(heads, n, d):
    return torch.randn(1, heads, n, d, device=DEVICE, dtype=torch.bfloat16)


def torch_time(q, k, v, causal, backend=SDPBackend.CUDNN_ATTENTION, **how):
    with sdpa_kernel(backend):
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        return milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped), **how)


class Table:
    def __init__(self):
        self.failed = 0
        print(f"{'what':58} {'theirs ms':>10} {'ours ms':>9} {'ratio':>8} {'floor':>6}", flush=True)

    def row(self, what, theirs, ours, floor, note="", ratio=None):
        ratio = theirs / ours if ratio is None else ratio
        ok = floor is None or ratio >= floor
        self.failed += not ok
        shown = "" if floor is None else f"{floor:6.2f} {'pass' if ok else 'FAIL'}"
        print(f"{what:58} {theirs:10.4f} {ours:9.4f} {ratio:8.2f} {shown} {note}", flush=True)
        return ratio

    def line(self, text):
        print(text, flush=True)


def geometric(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def exact(table, attlas, quick):
    for d, heads, lengths, each, mean in ((64, 32, (4096, 16384, 65536), 0.9, 1.0), (128, 32, (4096, 16384, 65536), 0.9, 0.97),
                                          (256, 16, (4096, 16384), 0.9, 0.97)):
        ratios = []
        for n in lengths[:2] if quick else lengths:
            q, k, v = (normal(heads, n, d) for _ in range(3))
            o = torch.empty_like(q)
            for causal in (False, True):
                how = dict(repeat=5 if n < 10000 else 1, replays=7 if n < 60000 else 5)
                plan = attlas.plan("exact", "", q, k, causal)
                theirs, ours = torch_time(q, k, v, causal, **how), milliseconds(lambda: plan(q, k, v, o), **how)
                flops = 4 * n * n * d * heads / (2 if causal else 1)
                ratios.append(table.row(f"exact d{d} n{n}{' causal' if causal else ''}, {heads} heads", theirs, ours, each,
                                        f"{flops / ours / 1e9:.0f} TF/s"))
        g = geometric(ratios)
        table.failed += g < mean
        table.line(f"  geometric mean d{d}: {g:.3f}, floor {mean} {'pass' if g >= mean else 'FAIL'}")
    for d, floor in ((64, 0.45), (128, 0.40)):
        q, k, v = (normal(32, 16384, d) for _ in range(3))
        o = torch.empty_like(q)
        plan = attlas.plan("exact", "", q, k, False, family=1)
        table.row(f"exact by mma.sync d{d} n16384", torch_time(q, k, v, False), milliseconds(lambda: plan(q, k, v, o)), floor)


def long_prompts(table, attlas):
    n, d = 131072, 64
    q, k, v = (normal(32, n, d) for _ in range(3))
    o = torch.empty_like(q)
    once = dict(replays=3)
    theirs = {causal: torch_time(q, k, v, causal, **once) for causal in (False, True)}

    def ours(method, options, causal, **how):
        plan = attlas.plan(method, options, q, k, causal)
        return milliseconds(lambda: plan(q, k, v, o), **how)

    whole = ours("exact", "", True, **once)
    window = ours("sink_window", "sinks=4,window=4096", True, repeat=2)
    pairs = 4096 * n - 4096 * 4095 / 2
    rate = lambda pairs, ms: 4 * pairs * d * 32 / ms / 1e9
    table.row("sink_window 4096 causal n131072: TF/s beside our exact", whole, window, 0.8,
              f"{rate(pairs, window):.0f} of {rate(n * n / 2, whole):.0f} TF/s", rate(pairs, window) / rate(n * n / 2, whole))
    table.row("hyper block 256 samples 256 n131072", theirs[False], ours("hyper", "", False, repeat=5), 110)
    table.row("hyper causal n131072", theirs[True], ours("hyper", "", True, repeat=2), 11)
    table.row("linear causal n131072", theirs[True], ours("linear", "", True, repeat=5), 110)
    table.row("linear n131072", theirs[False], ours("linear", "", False, repeat=5), None)
    q, k, v = (t[:, :, :65536].contiguous() for t in (q, k, v))
    o = torch.empty_like(q)
    table.row("hyper causal n65536", torch_time(q, k, v, True, **once), ours("hyper", "", True, repeat=2), 5.5)


def stand_ins(table, attlas):
    """Random features, means and landmarks."""
    n, d = 131072, 64
    q, k, v = (normal(32, n, d) for _ in range(3))
    o = torch.empty_like(q)
    theirs = {causal: torch_time(q, k, v, causal, replays=3) for causal in (False, True)}

    def ours(method, options, causal, **how):
        plan = attlas.plan(method, options, q, k, causal)
        return milliseconds(lambda: plan(q, k, v, o), **how)

    table.row("performer 256 features causal n131072", theirs[True], ours("performer", "features=256", True, replays=3), None)
    table.row("performer 256 features n131072", theirs[False], ours("performer", "features=256", False, replays=3), None)
    table.row("polaformer causal n131072", theirs[True], ours("polaformer", "", True, replays=3), None)
    table.row("linformer 256 means causal n131072", theirs[True], ours("linformer", "", True, replays=3), None)
    table.row("linformer 256 means n131072", theirs[False], ours("linformer", "", False, replays=3), None)
    table.row("nystromformer 64 landmarks n131072", theirs[False], ours("nystromformer", "", False, replays=3), 150)


def decoding_by_rank(table, attlas):
    """One query over keys chosen by scores: `top_k` reads all coordinates of all keys, `loki` some of them."""
    d = 128
    q = normal(32, 1, d)
    o = torch.empty_like(q)
    for n in (131072, 1048576):
        k, v = normal(8, n, d), normal(8, n, d)
        theirs = torch_time(q, k, v, False, SDPBackend.FLASH_ATTENTION, repeat=10)
        plan = attlas.plan("top_k", "keys=4096", q, k, False)
        table.row(f"decode top_k 4096 keys of {n}, 32/8 heads d128", theirs, milliseconds(lambda: plan(q, k, v, o), repeat=10), None)
        sample = normal(32, 4096, d).cpu(), k[:, :, :4096].cpu()
        plan = attlas.plan("loki", "keys=4096,rank=32", torch.empty(1, 32, 1, d, device=DEVICE), k, True, learn=sample)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            plan.push(k, v)
            torch.cuda.synchronize()
        table.row(f"decode loki rank 32, 4096 keys of {n}", theirs, milliseconds(lambda: plan.attend(q, o), repeat=10), None)
        del plan


def decoding(table, attlas):
    d = 128
    q = normal(32, 1, d)
    o = torch.empty_like(q)
    for n, floor in ((131072, 0.95), (1048576, 0.93)):
        k, v = normal(8, n, d), normal(8, n, d)
        plan = attlas.plan("exact", "", torch.empty(1, 32, 1, d, device=DEVICE), k, True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            plan.push(k, v)
            torch.cuda.synchronize()
        theirs = math.inf
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            try:
                theirs = min(theirs, torch_time(q, k, v, False, backend, repeat=10))
            except RuntimeError:
                pass
        ours = milliseconds(lambda: plan.attend(q, o), repeat=10)
        bytes_read = 2 * 8 * n * d * 2
        rate = bytes_read / ours / 1e9
        ok = rate >= 4.08
        table.failed += not ok
        table.row(f"decode exact 32/8 heads d128 n{n}", theirs, ours, floor, f"{rate:.2f} TB/s (floor 4.08 {'pass' if ok else 'FAIL'})")
        del plan


def host(table, attlas):
    """Time of the first plan with cached kernels, and the host's share of later calls."""
    q, k, v = (normal(32, 4096, 64) for _ in range(3))
    o = torch.empty_like(q)
    start = time.perf_counter()
    plan = attlas.plan("exact", "", q, k, False)
    plan(q, k, v, o)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(50):
        plan(q, k, v, o)
    each = (time.perf_counter() - start) / 50 * 1e6
    torch.cuda.synchronize()
    ok = first <= 0.5 and each <= 25
    table.failed += not ok
    table.line(f"first call {first * 1e3:.0f} ms (floor 500), later calls {each:.1f} µs on the host (floor 20 and 5 a launch) {'pass' if ok else 'FAIL'}")


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--lib", required=True)
    a.add_argument("--cache", default="")
    a.add_argument("--nvrtc", default="")
    a.add_argument("--quick", action="store_true", help="leave out 65536 and longer")
    a.add_argument("--only", help="one part: long_prompts, stand_ins, decoding or decoding_by_rank")
    a = a.parse_args()
    torch.manual_seed(0)
    torch.zeros(1, device=DEVICE)
    attlas = Attlas(a.lib, a.cache, a.nvrtc)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {time.strftime('%Y-%m-%d')}")
    table = Table()
    if a.only is None:
        host(table, attlas)
        exact(table, attlas, a.quick)
    if not a.quick:
        for part in (long_prompts, stand_ins, decoding, decoding_by_rank):
            if a.only in (None, part.__name__):
                part(table, attlas)
    print(f"{table.failed} ratios lie below their floors" if table.failed else "no ratio lies below its floor")
    raise SystemExit(int(table.failed > 0))


if __name__ == "__main__":
    main()
