//! The causal runtime against a plain implementation in double precision, on small models of every family with random
//! weights: biases, norms of heads, sliding windows, both layouts, tied and untied outputs.

mod common;

use attlas::Schedule;
use attlas_model::{Decoder, Linear, Model, Recipe, Rows, Weights};
use attlas_num::rng::StreamKey;
use attlas_num::rope::Layout;
use common::*;
use std::sync::Arc;

const D: usize = 32;
const FF: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DH: usize = 16;
const VOCAB: usize = 8;

fn random(name: &str, scale: f64, shift: f64) -> impl Fn(usize) -> f32 + use<> {
    let mut values = vec![0.0f64; FF * HEADS * DH];
    StreamKey::new(5).named(name).rng().fill_normal(&mut values);
    move |i| (shift + scale * values[i % values.len()]) as f32
}

/// Returns a model of two layers with the tensors that `architecture` requires.
fn model(architecture: &str, window: Option<u32>) -> Arc<Model> {
    let key = |k: &str| format!("{architecture}.{k}");
    let tokens: Vec<String> = ["<s>", "a", "b", "c", "ab", "Ġ", "Ġa", "</s>"].map(str::to_owned).to_vec();
    let mut w = Writer::default()
        .text("general.architecture", architecture)
        .u32(&key("block_count"), 2)
        .u32(&key("context_length"), 64)
        .u32(&key("embedding_length"), D as u32)
        .u32(&key("feed_forward_length"), FF as u32)
        .u32(&key("attention.head_count"), HEADS as u32)
        .u32(&key("attention.head_count_kv"), KV_HEADS as u32)
        .u32(&key("attention.key_length"), DH as u32)
        .u32(&key("attention.value_length"), DH as u32)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .f32(&key("rope.freq_base"), 100.0)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .texts("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &[3, 1, 1, 1, 1, 1, 1, 3])
        .texts("tokenizer.ggml.merges", &["a b", "Ġ a"]);
    if let Some(window) = window {
        w = w.u32(&key("attention.sliding_window"), window);
    }
    let matrix = |w: Writer, name: &str, rows: usize, cols: usize| {
        let scale = 1.5 / (cols as f64).sqrt();
        w.tensor_f32(&format!("{name}.weight"), &[rows as u64, cols as u64], random(name, scale, 0.0))
    };
    let norm = |w: Writer, name: &str, len: usize| {
        w.tensor_f32(&format!("{name}.weight"), &[len as u64], random(name, 0.2, 1.0))
    };
    w = norm(matrix(w, "token_embd", VOCAB, D), "output_norm", D);
    if architecture != "llama" {
        w = matrix(w, "output", VOCAB, D);
    }
    for l in 0..2 {
        let name = |part: &str| format!("blk.{l}.{part}");
        w = norm(norm(w, &name("attn_norm"), D), &name("ffn_norm"), D);
        for (part, heads) in [("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)] {
            w = matrix(w, &name(part), heads * DH, D);
            if architecture == "qwen2" {
                let bias = name(&format!("{part}.bias"));
                w = w.tensor_f32(&bias, &[(heads * DH) as u64], random(&bias, 0.5, 0.0));
            }
        }
        if architecture == "qwen3" {
            w = norm(norm(w, &name("attn_q_norm"), DH), &name("attn_k_norm"), DH);
        }
        w = matrix(w, &name("attn_output"), D, HEADS * DH);
        w = matrix(matrix(w, &name("ffn_gate"), FF, D), &name("ffn_up"), FF, D);
        w = matrix(w, &name("ffn_down"), D, FF);
    }
    Arc::new(Model::from_gguf_bytes(w.bytes()).unwrap())
}

fn apply(layer: &Linear, x: &[f64]) -> Vec<f64> {
    let w = layer.weight().to_f32();
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
    let mut y: Vec<f64> = w.chunks(x.len()).map(dot).collect();
    if let Some(bias) = layer.bias() {
        y.iter_mut().zip(bias).for_each(|(y, b)| *y += f64::from(*b));
    }
    y
}

fn rms_norm(x: &[f64], weight: &[f32], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * f64::from(*w)).collect()
}

fn rotate(x: &mut [f64], position: usize, base: f64, layout: Layout) {
    let half = x.len() / 2;
    for l in 0..half {
        let (re, im) = if layout == Layout::Half { (l, l + half) } else { (2 * l, 2 * l + 1) };
        let (sin, cos) = (position as f64 * base.powf(-(l as f64) / half as f64)).sin_cos();
        (x[re], x[im]) = (x[re] * cos - x[im] * sin, x[im] * cos + x[re] * sin);
    }
}

/// Returns the logits of every position, directly from the formulas.
fn reference(model: &Model, tokens: &[u32]) -> Vec<Vec<f64>> {
    let c = &model.config;
    let Weights::Decoder(w) = &model.weights else { panic!("a decoder") };
    let rope = c.rope.as_ref().unwrap();
    let embedding = w.embedding.to_f32();
    let mut x: Vec<Vec<f64>> = tokens
        .iter()
        .map(|&t| embedding[t as usize * D..][..D].iter().map(|&v| f64::from(v)).collect())
        .collect();
    for (l, layer) in w.layers.iter().enumerate() {
        let heads = |y: Vec<f64>, norm: &Option<Vec<f32>>, position: Option<usize>| -> Vec<Vec<f64>> {
            y.chunks(DH)
                .map(|head| {
                    let mut head = match norm {
                        Some(weight) => rms_norm(head, weight, c.norm_eps),
                        None => head.to_vec(),
                    };
                    if let Some(position) = position {
                        rotate(&mut head, position, rope.base, rope.layout);
                    }
                    head
                })
                .collect()
        };
        let normed: Vec<Vec<f64>> =
            x.iter().map(|x| rms_norm(x, layer.attention_norm.as_ref().unwrap(), c.norm_eps)).collect();
        let each = |i: usize, linear: &Linear| apply(linear, &normed[i]);
        let q: Vec<_> = (0..x.len()).map(|i| heads(each(i, &layer.q), &layer.q_norm, Some(i))).collect();
        let k: Vec<_> = (0..x.len()).map(|i| heads(each(i, &layer.k), &layer.k_norm, Some(i))).collect();
        let v: Vec<_> = (0..x.len()).map(|i| heads(each(i, &layer.v), &None, None)).collect();
        for i in 0..x.len() {
            let first = c.windows[l].map_or(0, |w| (i + 1).saturating_sub(w));
            let mut joined = Vec::new();
            for h in 0..HEADS {
                let g = h * KV_HEADS / HEADS;
                let weights: Vec<f64> = (first..=i)
                    .map(|j| {
                        let dot: f64 = q[i][h].iter().zip(&k[j][g]).map(|(a, b)| a * b).sum();
                        (dot / (DH as f64).sqrt()).exp()
                    })
                    .collect();
                let total: f64 = weights.iter().sum();
                joined
                    .extend((0..DH).map(|c| {
                        (first..=i).zip(&weights).map(|(j, w)| w / total * v[j][g][c]).sum::<f64>()
                    }));
            }
            x[i].iter_mut().zip(apply(&layer.o, &joined)).for_each(|(x, y)| *x += y);
        }
        for x in &mut x {
            let m = rms_norm(x, layer.ffn_norm.as_ref().unwrap(), c.norm_eps);
            let gated: Vec<f64> = apply(&layer.gate, &m)
                .into_iter()
                .zip(apply(&layer.up, &m))
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            x.iter_mut().zip(apply(&layer.down, &gated)).for_each(|(x, y)| *x += y);
        }
    }
    x.iter().map(|x| apply(&w.output, &rms_norm(x, &w.final_norm, c.norm_eps))).collect()
}

/// Returns the logits of every position from the runtime, fed in `chunks`.
fn logits(model: &Arc<Model>, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let schedule = Schedule { threads: 2, ..Schedule::default() };
    let mut decoder = Decoder::new(model.clone(), &Recipe::default(), schedule).unwrap();
    let (mut all, mut hidden) = (Vec::new(), Vec::new());
    for &n in chunks {
        let first = decoder.len();
        decoder.forward(&tokens[first..first + n], Rows::All, &mut hidden).unwrap();
        let mut logits = vec![f32::NAN; n * VOCAB];
        decoder.logits_into(&hidden, &mut logits);
        all.extend(logits);
    }
    assert_eq!(decoder.len(), tokens.len());
    all
}

#[test]
fn every_family_computes_its_formulas_in_one_go_in_chunks_and_token_by_token() {
    let tokens: Vec<u32> = (0..23).map(|i| (i * i + i / 3) % VOCAB as u32).collect();
    let families =
        [("llama", None), ("mistral", Some(5)), ("mistral", Some(1)), ("qwen2", None), ("qwen3", None)];
    for (architecture, window) in families {
        let model = model(architecture, window);
        let want = reference(&model, &tokens);
        // Two layers of products of at most 64 terms, on logits of order one.
        let tolerance = 1e-5 * want.iter().flatten().fold(1.0f64, |m, x| m.max(x.abs()));
        for chunks in [&[23][..], &[1; 23], &[7, 1, 9, 6]] {
            let got = logits(&model, &tokens, chunks);
            for (i, want) in want.iter().enumerate() {
                for (got, want) in got[i * VOCAB..].iter().zip(want) {
                    let error = (f64::from(*got) - want).abs();
                    assert!(error < tolerance, "{architecture} {window:?} {chunks:?} row {i}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn windows_and_biases_and_head_norms_matter() {
    let tokens: Vec<u32> = (0..23).map(|i| (i * i + i / 3) % VOCAB as u32).collect();
    let last = |architecture: &str, window| {
        let all = logits(&model(architecture, window), &tokens, &[23]);
        all[22 * VOCAB..].to_vec()
    };
    let far = |a: &[f32], b: &[f32]| a.iter().zip(b).any(|(x, y)| (x - y).abs() > 1e-2);
    assert!(far(&last("mistral", Some(5)), &last("mistral", None)));
    assert!(!far(&last("mistral", Some(23)), &last("mistral", None)), "a window over everything");
    assert!(far(&last("qwen2", None), &last("qwen3", None)));
}
