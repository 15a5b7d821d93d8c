"""Which methods are accurate on the heads of my model? Takes queries, keys and values from a transformers model and compares."""

import attlas
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, file = ".models/smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
trace = attlas.extract(model, "data/alice29.txt", tokenizer=tokenizer, tokens=512, layers=[5, 20])
comparison = attlas.compare(trace, methods=["sink_window", "top_k", "hyper"], seeds=2, num_threads=2)
print(comparison)
print(comparison.to_pandas()[["method", "layer", "head", "rel_fro.mean", "speedup"]].head(9))
