#!/usr/bin/env python3
"""Loads a folder that `attlas convert --to mla` wrote with the stock class of transformers and compares logits.

    pip install torch transformers
    attlas convert model.gguf --to mla --text book.txt --out converted
    python goldens/model/check_converted.py [--trust] converted [text]

No code of the folder runs, unless `--trust` is given, which a model with biases in its feed-forward layers needs: the
stock class has no place for those. Compared are the logits that attlas wrote to `check.json`, computed here in one pass and
token by token with the cache, and, where a text is given, its tokens as both tokenisers see them. Exit status 0 if
nothing differs by more than 1e-3.
"""

import json
import pathlib
import sys

import torch
import transformers

TOLERANCE = 1e-3


def main(folder, text=None, trust=False):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=trust, output_loading_info=True
    )
    model.eval()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], f"{kind}: {info[kind]}"
    assert trust or type(model) is transformers.DeepseekV3ForCausalLM, type(model)
    print(f"transformers {transformers.__version__}: {type(model).__name__}, "
          f"{sum(p.numel() for p in model.parameters())} parameters")

    proof = json.loads((folder / "check.json").read_text())
    want = torch.stack(
        [torch.frombuffer(bytearray.fromhex(row), dtype=torch.float32) for row in proof["logits"]]
    )
    tokens = torch.tensor([proof["tokens"]])
    with torch.no_grad():
        once = model(tokens).logits[0][:, proof["ids"]]
        cache, steps = None, []
        for t in range(tokens.shape[1]):
            out = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits[0, -1, proof["ids"]])
    differences = {"in one pass": once - want, "with the cache": torch.stack(steps) - want}
    for name, difference in differences.items():
        print(f"{want.numel()} logits up to {want.abs().max():.2f}, {name}: "
              f"largest difference {difference.abs().max():.2e}")
    ok = all(d.abs().max() <= TOLERANCE for d in differences.values())

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    print("continuation:", json.dumps(continuation(model, tokenizer)))
    if text:
        ids = tokenizer(pathlib.Path(text).read_text(), add_special_tokens=False)["input_ids"]
        print(f"{len(ids)} tokens of {text}, first {ids[:12]}")
    return ok


def continuation(model, tokenizer, prompt="The capital of France is"):
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                         max_new_tokens=12, do_sample=False)
    return tokenizer.decode(out[0])


if __name__ == "__main__":
    names = [a for a in sys.argv[1:] if a != "--trust"]
    sys.exit(0 if main(pathlib.Path(names[0]), *names[1:2], trust="--trust" in sys.argv) else 1)
