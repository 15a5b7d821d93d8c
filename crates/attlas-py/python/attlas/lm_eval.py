"""`python -m attlas.lm_eval …`: the harness of EleutherAI with every attention of attlas registered.

Takes the arguments of `lm_eval`; `--model_args pretrained=DIR,attn_implementation=attlas:hyper` names the attention. Batches are
padded on the right without a mask there, which does not affect causal attention but does affect a budget that depends
on the length: use `--batch_size 1` for approximate methods.
"""

from __future__ import annotations

from ._errors import missing


def main() -> None:
    """Register the attentions and run lm-eval."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise missing("lm_eval", "lm-eval") from None
    from .transformers import register

    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
