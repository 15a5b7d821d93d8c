#!/usr/bin/env python3
"""Approximate attention against PyTorch packages from PyPI, on the same threads and settings.

Both sides run alternately, one run each; the table gives medians. Only attention is timed: projections of tokens to
queries, keys and values are removed from the packages' modules. Set-up counts on our side (drawing directions,
clustering) except for Linformer, whose projections are parameters on both sides.

    bench/peers/methods.py                 installs the packages into .cache/peers, builds attlas, prints the table
    bench/peers/methods.py --out FILE.md   also writes it
"""
import argparse, importlib.metadata, pathlib, subprocess

from sdpa import ROOT, VENV, Attlas, cpu_model, ensure, interleave

PACKAGES = ["performer-pytorch", "nystrom-attention", "reformer-pytorch", "linformer", "routing-transformer", "linear-attention-transformer"]
HEADS, N, D = 1, 16384, 64


def peers(torch):
    """(package, description of settings, their call, request to attlas) of each comparison."""
    from linear_attention_transformer.linear_attention_transformer import linear_attn
    from linformer import LinformerSelfAttention
    from nystrom_attention import NystromAttention
    from performer_pytorch.performer_pytorch import FastAttention
    from reformer_pytorch.reformer_pytorch import LSHAttention
    from routing_transformer.routing_transformer import KmeansAttention

    q, k, v = (torch.randn(1, HEADS, N, D) for _ in range(3))
    rows = torch.randn(1, N, D)
    same = torch.nn.Identity()

    class Given(torch.nn.Module):
        """Replacement of a projection with a constant output."""

        def __init__(self, output):
            super().__init__()
            self.output = output

        def forward(self, _):
            return self.output

    performer = FastAttention(D, nb_features=256).eval()
    yield "performer-pytorch", "256 positive features", lambda: performer(q, k, v), dict(
        method="performer", set=dict(map="pos", features=256))

    causal = FastAttention(D, nb_features=256, causal=True).eval()
    yield "performer-pytorch", "256 positive features, causal", lambda: causal(q, k, v), dict(
        method="performer", set=dict(map="pos", features=256), causal=True)

    nystrom = NystromAttention(dim=D, dim_head=D, heads=HEADS, num_landmarks=64, pinv_iterations=6, residual=False).eval()
    qkv = torch.cat([q[:, 0], k[:, 0], v[:, 0]], -1)
    nystrom.to_qkv, nystrom.to_out = Given(qkv), same
    yield "nystrom-attention", "64 landmarks, 6 steps", lambda: nystrom(rows), dict(method="nystromformer")

    reformer = LSHAttention(bucket_size=64, n_hashes=4, causal=False).eval()
    yield "reformer-pytorch", "4 rounds, chunks of 64, shared keys", lambda: reformer(q[:, 0], v[:, 0]), dict(
        method="reformer", set=dict(rounds=4, block=64, keys="shared"))

    hashed = LSHAttention(bucket_size=64, n_hashes=4, causal=True).eval()
    yield "reformer-pytorch", "the same, causal", lambda: hashed(q[:, 0], v[:, 0]), dict(
        method="reformer", set=dict(rounds=4, block=64, keys="shared"), causal=True)

    linformer = LinformerSelfAttention(dim=D, seq_len=N, k=256, heads=HEADS).eval()
    linformer.to_q = linformer.to_k = linformer.to_v = linformer.to_out = same
    yield "linformer", "rank 256, dense projections", lambda: linformer(rows), dict(
        method="linformer", set=dict(rank=256, source="learned"), learn="projections", setup=False)

    routing = KmeansAttention(num_clusters=128, window_size=128, num_heads=HEADS, head_dim=D).eval()
    routing(q, k, v)
    yield "routing-transformer", "128 clusters of 128", lambda: routing(q, k, v), dict(
        method="routing", set=dict(clusters=128, window=128, merge="mean"), learn="centroids", setup=False)

    yield "linear-attention-transformer", "softmax of features", lambda: linear_attn(q, k, v), dict(
        method="linear", set=dict(map="softmax"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", help="write the table to this Markdown file")
    args = parser.parse_args()
    ensure(VENV, "torch", "numpy", *PACKAGES)
    import time, torch

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    attlas = Attlas()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    lines = []

    def say(text=""):
        print(text, flush=True)
        lines.append(text)

    say("# Approximate attention beside PyTorch packages")
    say()
    say(f"CPU {cpu_model()}; {args.threads} threads; torch {torch.__version__}; attlas {commit}; {HEADS} head, {N} tokens, d = {D}, f32;")
    say(f"median of {args.repeats} alternating runs. Command: `bench/peers/methods.py`.")
    say()
    peak = attlas.ask(kind="fma_peak", threads=args.threads)["gflops"]
    say(f"Peak of multiply-adds {peak:.0f} GF/s. *At most* is the ratio of a run that did nothing but the counted operations of")
    say("attlas' method at this peak: both sides run the same dense products, and no code gets past it.")
    say()
    say("| package | settings | theirs, ms | attlas, ms | ratio | share of peak | at most |")
    say("|---|---|---|---|---|---|---|")

    def timed(run):
        def once():
            with torch.inference_mode():
                start = time.perf_counter()
                run()
                return time.perf_counter() - start

        return once

    for package, words, theirs, request in peers(torch):
        request = dict(dict(kind="attend", threads=args.threads, heads=HEADS, n=N, d=D, setup=True), **request)
        ours, other, _ = interleave(timed(theirs), lambda: attlas.ask(**request)["seconds"], args.repeats)
        least = attlas.ask(**request)["flops"] / peak / 1e9
        version = importlib.metadata.version(package)
        say(
            f"| {package} {version} | {words} | {other * 1e3:.1f} | {ours * 1e3:.1f} | {other / ours:.1f} "
            f"| {least / ours:.0%} | {other / least:.1f} |"
        )
    if args.out:
        pathlib.Path(args.out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
