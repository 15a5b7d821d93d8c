#!/usr/bin/env python3
"""Exact attention against PyTorch's scaled_dot_product_attention on CPU.

Both sides run in the same minutes on the same shapes and threads, alternately, one run each, and the table gives the median of
the repetitions. Flops are counted as 4 H N^2 d, half of that when causal.

    bench/peers/sdpa.py                 installs torch into .cache/peers, builds attlas, prints the table
    bench/peers/sdpa.py --quick         fewer repetitions
    bench/peers/sdpa.py --out FILE.md   also writes the table with machine and versions
"""
import argparse, importlib.util, json, math, os, pathlib, platform, statistics, subprocess, sys, time

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / ".cache" / "peers"
# OpenMP runtimes let idle threads spin for up to 0.2 s.
PAUSE = 0.3
# Seconds of warm-up runs.
WAKE = 0.05


def ensure(venv, *packages):
    """Runs this script again inside an environment that has the packages."""
    modules = {p: {"llama-cpp-python": "llama_cpp"}.get(p, p.replace("-", "_")) for p in packages}
    missing = [p for p, module in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        python = venv / "bin" / "python"
        if pathlib.Path(sys.prefix) == venv:
            sys.exit(f"installed, yet not found: {', '.join(missing)}")
        if not python.exists():
            subprocess.check_call([sys.executable, "-m", "venv", str(venv)])
        subprocess.check_call([str(python), "-m", "pip", "install", "-q", *packages])
        os.execv(str(python), [str(python), *sys.argv])


class Attlas:
    """The other side: a process that answers each request with the seconds of one run."""

    def __init__(self):
        command = ["cargo", "build", "--release", "-q", "-p", "xtask", "--example", "peer"]
        subprocess.check_call(command, cwd=ROOT)
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        self.process = subprocess.Popen(
            [str(target / "release" / "examples" / "peer")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def interleave(torch_run, attlas_run, repeats, ceiling=None):
    """Medians of alternating runs: seconds of attlas, seconds of torch, and the machine's possible work in the seconds
    of attlas, from its `ceiling` (work per second), measured after each run. The other side's threads spin for a while
    after their work: a pause lets them sleep; then warm-up runs wake this side's threads and warm up memory."""
    ours, theirs, possible = [], [], []
    for _ in range(repeats):
        for run, seconds in [(torch_run, theirs), (attlas_run, ours)]:
            time.sleep(PAUSE)
            woken = time.perf_counter() + WAKE
            run()
            while time.perf_counter() < woken:
                run()
            seconds.append(run())
        if ceiling:
            possible.append(ceiling() * ours[-1])
    return statistics.median(ours), statistics.median(theirs), statistics.median(possible or [math.nan])


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 repetitions instead of 7")
    parser.add_argument("--threads", default="1,2", help="thread counts, comma separated")
    parser.add_argument("--out", help="write the table to this Markdown file")
    args = parser.parse_args()
    ensure(VENV, "torch", "numpy")
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    attlas = Attlas()
    repeats = 3 if args.quick else 7
    threads_list = [int(t) for t in args.threads.split(",")]
    lines = []

    def say(text=""):
        print(text, flush=True)
        lines.append(text)

    def torch_attend(q, k, v, causal, gqa=False):
        def run():
            start = time.perf_counter()
            F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
            return time.perf_counter() - start

        return run

    say("# Exact attention beside PyTorch")
    say()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    say(f"CPU {cpu_model()}; torch {torch.__version__}; attlas {commit}; median of {repeats} alternating runs; f32 forward.")
    say("Command: `bench/peers/sdpa.py`.")
    say()
    for threads in threads_list:
        machine = attlas.ask(kind="machine", threads=threads)
        say(f"- {threads} thread(s): FMA peak {machine['fma_gflops']:.0f} GF/s, read bandwidth {machine['read_gbs']:.1f} GB/s")
    say()
    say("Peak and bandwidth are measured again after each run of attlas: clocks and neighbours change. A share is the median over the runs.")
    say()
    say("| threads | shape | d | mask | attlas GF/s | share of peak | torch GF/s | ratio |")
    say("|---|---|---|---|---|---|---|---|")
    ratios = []
    causal_share = {}
    for threads in threads_list:
        torch.set_num_threads(threads)
        for heads, n in [(8, 1024), (4, 4096), (1, 16384)]:
            for d in [64, 128]:
                for causal in [False, True]:
                    q, k, v = (torch.randn(1, heads, n, d) for _ in range(3))
                    request = dict(kind="attend", threads=threads, heads=heads, n=n, d=d, causal=causal)
                    ours, theirs, possible = interleave(
                        torch_attend(q, k, v, causal),
                        lambda: attlas.ask(**request)["seconds"],
                        repeats,
                        lambda: attlas.ask(kind="fma_peak", threads=threads)["gflops"],
                    )
                    flops = 4.0 * heads * n * n * d * (0.5 if causal else 1.0)
                    rate, torch_rate = flops / ours / 1e9, flops / theirs / 1e9
                    ratios.append((theirs / ours, n, causal))
                    causal_share.setdefault((threads, heads, n, d), {})[causal] = ours
                    mask = "causal" if causal else "none"
                    say(
                        f"| {threads} | H{heads} N{n} | {d} | {mask} | {rate:.0f} | {flops / possible / 1e9:.0%} "
                        f"| {torch_rate:.0f} | {theirs / ours:.2f} |"
                    )
    say()
    values = [r for r, _, _ in ratios]
    say(f"Ratio to torch: geometric mean {statistics.geometric_mean(values):.2f}, minimum {min(values):.2f}.")
    for n in [1024, 16384]:
        part = [r for r, m, causal in ratios if m == n and causal]
        say(f"Causal at N = {n}: minimum ratio {min(part):.2f}.")
    for (threads, _, n, d), pair in causal_share.items():
        if n == 16384:
            say(f"Causal time over non-causal at N = {n}, d = {d}, {threads} thread(s): {pair[True] / pair[False]:.3f}.")
    say()
    say("## Decoding: one query, 32 query heads over 8 key heads, d = 128, 32768 keys")
    say()
    say("| threads | attlas GB/s | share of read bandwidth | torch GB/s | ratio |")
    say("|---|---|---|---|---|")
    for threads in threads_list:
        torch.set_num_threads(threads)
        q = torch.randn(1, 32, 1, 128)
        k, v = (torch.randn(1, 8, 32768, 128) for _ in range(2))
        request = dict(kind="decode", threads=threads, heads=32, kv_heads=8, n=32768, d=128)
        ours, theirs, possible = interleave(
            torch_attend(q, k, v, False, gqa=True),
            lambda: attlas.ask(**request)["seconds"],
            max(repeats, 7),
            lambda: attlas.ask(kind="read_peak", threads=threads)["gbs"],
        )
        size = 2 * 8 * 32768 * 128 * 4 / 1e9
        say(f"| {threads} | {size / ours:.1f} | {size / possible:.0%} | {size / theirs:.1f} | {theirs / ours:.2f} |")
    say()
    say("## bf16 operands, f32 sums, against f32 of attlas")
    say()
    say("| threads | shape | d | f32 GF/s | bf16 GF/s | ratio | relative error |")
    say("|---|---|---|---|---|---|---|")
    for threads in threads_list:
        for d in [64, 128]:
            request = dict(kind="attend", threads=threads, heads=4, n=4096, d=d, causal=False)
            low = dict(request, set=dict(precision="bf16"))
            single, bf16 = [], []
            for _ in range(repeats):
                single.append(attlas.ask(**request)["seconds"])
                bf16.append(attlas.ask(**low)["seconds"])
            error = attlas.ask(kind="bf16_error", d=d)["rel_fro"]
            flops = 16.0 * 4096 * 4096 * d
            a, b = statistics.median(single), statistics.median(bf16)
            say(f"| {threads} | H4 N4096 | {d} | {flops / a / 1e9:.0f} | {flops / b / 1e9:.0f} | {a / b:.2f} | {error:.1e} |")
    if args.out:
        pathlib.Path(args.out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
