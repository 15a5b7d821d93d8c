//! Tokenisers: `tokenizer.json` of Hugging Face folders, and the vocabulary in the metadata of GGUF files.
//!
//! | GGUF `tokenizer.ggml.model` | what is built |
//! |---|---|
//! | `gpt2` | byte-level BPE, with the pre-tokeniser that `tokenizer.ggml.pre` names |
//! | `llama` | SentencePiece BPE: merges by score, unknown characters as bytes ([`SentencePiece`]) |
//! | `bert` | WordPiece, uncased |
//!
//! Truncation and padding set in a file are switched off.

mod gguf;
mod sentencepiece;
mod to_gguf;

pub use sentencepiece::SentencePiece;

use crate::error::{Error, Result};
use crate::gguf::Entries;
use serde_json::json;
use std::sync::Arc;

/// A tokeniser. Cloning it copies no vocabulary.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    kind: Arc<Kind>,
    /// Token put before every text, unless it is already there.
    add_bos: Option<u32>,
    /// Token put after every text.
    add_eos: Option<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    /// The entries of the GGUF file it was read from, if any.
    entries: Option<Arc<Entries>>,
}

#[derive(Debug)]
enum Kind {
    HuggingFace(Box<tokenizers::Tokenizer>),
    SentencePiece(SentencePiece),
}

/// Runs code of the `tokenizers` crate, which panics on some malformed files instead of reporting them.
fn guarded<T, E: std::fmt::Display>(f: impl FnOnce() -> std::result::Result<T, E>) -> Result<T> {
    match crate::quiet::catch(f) {
        Some(result) => result.map_err(failed),
        None => Err(Error::Tokenizer("the tokeniser's description is inconsistent".into())),
    }
}

fn failed(e: impl std::fmt::Display) -> Error {
    Error::Tokenizer(e.to_string())
}

/// Most bytes that a tokeniser may make of one byte of text.
const GROWTH: usize = 64;

/// Fails if the steps before or after the model multiply texts, or claim more memory than the file has bytes.
fn check_growth(json: &serde_json::Value) -> Result<()> {
    for part in ["normalizer", "pre_tokenizer", "decoder"] {
        let growth = growth(&json[part])?;
        if growth > GROWTH {
            let found = format!("one that makes up to {growth} bytes of one");
            return Err(Error::invalid(part, found, format!("at most {GROWTH}")));
        }
    }
    // A template's pieces are added to every text and may repeat the text itself any number of times.
    let pieces = pieces(&json["post_processor"]);
    if pieces > GROWTH {
        let found = format!("a template of {pieces} pieces");
        return Err(Error::invalid("post_processor", found, format!("at most {GROWTH}")));
    }
    Ok(())
}

/// Returns the number of pieces of the longest template among the steps.
fn pieces(step: &serde_json::Value) -> usize {
    let of = |name: &str| step[name].as_array().map_or(0, Vec::len);
    let inner = step["processors"].as_array().into_iter().flatten().map(pieces).max();
    of("single").max(of("pair")).max(inner.unwrap_or(0))
}

/// Returns the number of bytes that the step, or the steps in sequence, may make of one.
fn growth(step: &serde_json::Value) -> Result<usize> {
    let lists = ["normalizers", "pretokenizers", "decoders"];
    if let Some(steps) = lists.iter().find_map(|name| step[*name].as_array()) {
        return steps.iter().try_fold(1usize, |all, step| Ok(all.saturating_mul(growth(step)?)));
    }
    match step["type"].as_str() {
        Some("Replace") => {
            let content = step["content"].as_str().unwrap_or_default().len();
            // An expression may match between any two bytes.
            Ok(match step["pattern"]["String"].as_str() {
                Some(pattern) if !pattern.is_empty() => content.div_ceil(pattern.len()).max(1),
                _ => content.saturating_add(1),
            })
        }
        // A text may be split at every added token, and each piece gets the prefix.
        Some("Prepend") => Ok(1 + step["prepend"].as_str().unwrap_or_default().len()),
        Some("Precompiled") => {
            let map = step["precompiled_charsmap"].as_str().unwrap_or_default();
            // The first four bytes are the length of the table that follows.
            let first = map.bytes().take(6).try_fold(0u64, |n, c| Some(n << 6 | u64::from(base64_digit(c)?)));
            let claimed =
                first.map_or(0, |n| u32::from_le_bytes([n >> 28, n >> 20, n >> 12, n >> 4].map(|b| b as u8)));
            if claimed as usize > map.len() {
                let expected = format!("at most the {} characters that follow", map.len());
                return Err(Error::invalid(
                    "the table of precompiled_charsmap",
                    format!("{claimed} bytes"),
                    expected,
                ));
            }
            Ok(1)
        }
        _ => Ok(1),
    }
}

fn base64_digit(c: u8) -> Option<u8> {
    Some(match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

impl Tokenizer {
    /// Parses a `tokenizer.json`. Its post-processor determines the special tokens that it adds.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        // Syntax first: most malformed files fail here.
        let json = serde_json::from_slice(text)?;
        check_growth(&json)?;
        // Serialised again, because of a duplicate name the check sees the last value and `tokenizers` the first.
        let text = serde_json::to_vec(&json)?;
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(&text))?;
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        Ok(Self {
            kind: Arc::new(Kind::HuggingFace(Box::new(inner))),
            add_bos: None,
            add_eos: None,
            bos: None,
            eos: None,
            entries: None,
        })
    }

    /// Returns a `tokenizer.json` that makes the same tokens.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        let mut json = match &*self.kind {
            Kind::HuggingFace(inner) => serde_json::from_str(&inner.to_string(false).map_err(failed)?)?,
            Kind::SentencePiece(inner) => inner.to_json(),
        };
        if let Some(processor) = self.post_processor() {
            json["post_processor"] = processor;
        }
        Ok(serde_json::to_vec(&json)?)
    }

    /// Returns the post-processor that adds this tokeniser's tokens around a text.
    fn post_processor(&self) -> Option<serde_json::Value> {
        let token = |id: Option<u32>| id.and_then(|id| Some((id, self.token(id)?)));
        let (bos, eos) = (token(self.add_bos), token(self.add_eos));
        let known: serde_json::Map<String, serde_json::Value> = [&bos, &eos]
            .into_iter()
            .flatten()
            .map(|(id, text)| (text.clone(), json!({"id": text, "ids": [id], "tokens": [text]})))
            .collect();
        if known.is_empty() {
            return None;
        }
        let around = |name: &str| {
            let special = |t: &Option<(u32, String)>| {
                t.as_ref().map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}}))
            };
            let text = json!({"Sequence": {"id": name, "type_id": 0}});
            special(&bos).into_iter().chain([text]).chain(special(&eos)).collect::<Vec<_>>()
        };
        let pair = [around("A"), around("B")].concat();
        Some(json!({
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": pair,
            "special_tokens": known,
        }))
    }

    /// Takes the tokens that begin and end a text from a `tokenizer_config.json`, if it names them.
    pub fn name_special_tokens(&mut self, settings: &serde_json::Value) {
        let Kind::HuggingFace(inner) = &*self.kind else { return };
        let id = |key: &str| {
            let value = &settings[key];
            let token = value.as_str().or_else(|| value["content"].as_str())?;
            inner.token_to_id(token)
        };
        self.bos = id("bos_token").or(self.bos);
        self.eos = id("eos_token").or(self.eos);
    }

    /// Encodes a text. `special` adds the tokens that the model expects around a text, such as one for its beginning;
    /// special tokens spelled out in the text are always recognised.
    ///
    /// Byte-level vocabularies may lack single bytes (SmolLM2's has none for six control characters and for
    /// the first byte of U+40000 to U+BFFFF); like the reference tokenisers, this one omits such bytes.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let mut ids = match &*self.kind {
            Kind::HuggingFace(inner) => guarded(|| inner.encode_fast(text, special))?.get_ids().to_vec(),
            Kind::SentencePiece(inner) => inner.encode(text),
        };
        if special {
            if let Some(bos) = self.add_bos
                && ids.first() != Some(&bos)
            {
                ids.insert(0, bos);
            }
            ids.extend(self.add_eos);
        }
        Ok(ids)
    }

    /// Decodes tokens. Invalid UTF-8 becomes U+FFFD; unknown ids are left out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        match &*self.kind {
            Kind::HuggingFace(inner) => guarded(|| inner.decode(ids, skip_special)),
            Kind::SentencePiece(inner) => Ok(inner.decode(ids, skip_special)),
        }
    }

    /// Returns the token of an id, as spelled in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        match &*self.kind {
            Kind::HuggingFace(inner) => inner.id_to_token(id),
            Kind::SentencePiece(inner) => inner.token(id).map(str::to_owned),
        }
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        match &*self.kind {
            Kind::HuggingFace(inner) => inner.get_vocab_size(true),
            Kind::SentencePiece(inner) => inner.len(),
        }
    }

    /// Returns the token that begins a text, if the file names one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Returns the token that ends a text, if the file names one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }
}
