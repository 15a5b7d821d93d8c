"""Which method for which head, within an error that I accept? Tunes a transformers model and runs it by the recipe."""

import attlas
import attlas.transformers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, file = ".models/smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)

# Heads are measured on the first 256 tokens, recipes are checked on the 256 behind them. A real search takes longer texts.
tuned = attlas.tune(
    model, "data/alice29.txt", tokenizer=tokenizer, tokens=256, check_tokens=256, max_kl=0.05, effort="quick",
    methods=["sink_window", "top_k"],
)  # fmt: skip
print(tuned)
if tuned.recipe is None:
    raise SystemExit("no recipe holds that error: allow more, or keep exact attention")

inputs = tokenizer("The capital of France is", return_tensors="pt")
with attlas.transformers.use(model, tuned.recipe) as used:
    text = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
    print(tokenizer.decode(text[0]), used.stats().calls)
