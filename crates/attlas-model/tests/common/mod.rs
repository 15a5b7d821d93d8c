//! Helpers of the integration tests: paths of the real models, and a writer of small GGUF files.
#![allow(dead_code, unreachable_pub)]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the folder of pretrained models, fetched if it is missing; fails if that is impossible.
pub fn models() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder =
            std::env::var_os("ATTLAS_MODELS").map_or_else(|| repository().join(".models"), PathBuf::from);
        let complete =
            || smollm2_in(&folder).is_file() && minilm_in(&folder).join("model.safetensors").is_file();
        if !complete() {
            let script = repository().join("scripts/fetch-models");
            let status = std::process::Command::new(&script).arg(&folder).status();
            assert!(
                status.as_ref().is_ok_and(|s| s.success()) && complete(),
                "the models are not in {} and {} could not fetch them: {status:?}",
                folder.display(),
                script.display()
            );
        }
        folder
    })
}

fn smollm2_in(folder: &Path) -> PathBuf {
    folder.join("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
}

fn minilm_in(folder: &Path) -> PathBuf {
    folder.join("all-minilm-l6-v2")
}

/// SmolLM2-135M-Instruct, a GGUF file.
pub fn smollm2() -> PathBuf {
    smollm2_in(models())
}

/// all-MiniLM-L6-v2, a Hugging Face folder.
pub fn minilm() -> PathBuf {
    minilm_in(models())
}

/// The text of Alice in Wonderland.
pub fn alice() -> String {
    std::fs::read_to_string(repository().join("data/alice29.txt")).expect("data/alice29.txt")
}

/// A stored golden file.
pub fn golden(name: &str) -> serde_json::Value {
    let path = repository().join("goldens/model").join(name);
    serde_json::from_slice(&std::fs::read(&path).expect(name)).expect(name)
}

/// The numbers of an array in a golden file: little-endian, single precision, hexadecimal.
pub fn numbers(value: &serde_json::Value) -> Vec<f32> {
    let digits = value.as_str().expect("hexadecimal digits").as_bytes();
    let words = digits.chunks_exact(8).map(|w| {
        let word =
            u32::from_str_radix(std::str::from_utf8(w).expect("ASCII"), 16).expect("hexadecimal digits");
        f32::from_bits(word.swap_bytes())
    });
    words.collect()
}

/// Writes GGUF files.
#[derive(Clone, Default)]
pub struct Writer {
    metadata: Vec<u8>,
    n_metadata: u64,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

pub fn text(s: &str) -> Vec<u8> {
    let mut out = (s.len() as u64).to_le_bytes().to_vec();
    out.extend(s.as_bytes());
    out
}

impl Writer {
    /// An entry with its type number and encoded value.
    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.metadata.extend(text(key));
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend(value);
        self.n_metadata += 1;
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub fn boolean(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, &[u8::from(value)])
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &text(value))
    }

    fn array(self, key: &str, kind: u32, n: usize, elements: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let mut value = kind.to_le_bytes().to_vec();
        value.extend((n as u64).to_le_bytes());
        elements.into_iter().for_each(|e| value.extend(e));
        self.raw(key, 9, &value)
    }

    pub fn texts<S: AsRef<str>>(self, key: &str, values: &[S]) -> Self {
        self.array(key, 8, values.len(), values.iter().map(|s| text(s.as_ref())))
    }

    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        self.array(key, 5, values.len(), values.iter().map(|v| v.to_le_bytes().to_vec()))
    }

    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        self.array(key, 6, values.len(), values.iter().map(|v| v.to_le_bytes().to_vec()))
    }

    /// A tensor; dimensions are outermost first.
    pub fn tensor(mut self, name: &str, shape: &[u64], kind: u32, data: Vec<u8>) -> Self {
        let reversed = shape.iter().rev().copied().collect();
        self.tensors.push((name.to_owned(), reversed, kind, data));
        self
    }

    /// A tensor of single-precision numbers.
    pub fn tensor_f32(self, name: &str, shape: &[u64], value: impl Fn(usize) -> f32) -> Self {
        let n = shape.iter().product::<u64>() as usize;
        self.tensor(name, shape, 0, (0..n).flat_map(|i| value(i).to_le_bytes()).collect())
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend(self.n_metadata.to_le_bytes());
        out.extend(&self.metadata);
        let mut offset = 0u64;
        for (name, dims, kind, data) in &self.tensors {
            out.extend(text(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (data.len() as u64).next_multiple_of(32);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        for (.., data) in &self.tensors {
            out.extend(data);
            out.resize(out.len().next_multiple_of(32), 0);
        }
        out
    }
}

/// A llama of one layer, a few hundred bytes of weights and a vocabulary of single bytes.
pub fn tiny_llama() -> Writer {
    let tokens: Vec<String> = ["<s>", "a", "b", "c", "ab", "Ġ", "Ġa", "</s>"].map(str::to_owned).to_vec();
    let matrix = |i: usize| ((i * 7919) % 13) as f32 / 13.0 - 0.5;
    // Two rows of Q4_1 blocks: scale 1, minimum −8.
    let q4_1 = |blocks: usize| -> Vec<u8> {
        (0..blocks)
            .flat_map(|b| {
                [vec![0x00, 0x3c, 0x00, 0xc8], (0..16).map(|i| (i * 11 + b) as u8).collect()].concat()
            })
            .collect()
    };
    Writer::default()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 64)
        .u32("llama.embedding_length", 32)
        .u32("llama.feed_forward_length", 64)
        .u32("llama.attention.head_count", 4)
        .u32("llama.attention.head_count_kv", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("llama.rope.freq_base", 10000.0)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .texts("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &[3, 1, 1, 1, 1, 1, 1, 3])
        .texts("tokenizer.ggml.merges", &["a b", "Ġ a"])
        .u32("tokenizer.ggml.bos_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 7)
        .tensor_f32("token_embd.weight", &[8, 32], matrix)
        .tensor_f32("blk.0.attn_norm.weight", &[32], |_| 1.0)
        .tensor("blk.0.attn_q.weight", &[32, 32], 3, q4_1(32))
        .tensor_f32("blk.0.attn_k.weight", &[16, 32], matrix)
        .tensor_f32("blk.0.attn_v.weight", &[16, 32], matrix)
        .tensor_f32("blk.0.attn_output.weight", &[32, 32], matrix)
        .tensor_f32("blk.0.ffn_norm.weight", &[32], |_| 1.0)
        .tensor_f32("blk.0.ffn_gate.weight", &[64, 32], matrix)
        .tensor_f32("blk.0.ffn_up.weight", &[64, 32], matrix)
        .tensor("blk.0.ffn_down.weight", &[32, 64], 3, q4_1(64))
        .tensor_f32("output_norm.weight", &[32], |_| 1.0)
}
