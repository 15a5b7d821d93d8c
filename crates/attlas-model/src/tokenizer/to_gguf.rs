//! Tokenisers as metadata of GGUF files.

use super::gguf::{PRE, token_type};
use super::{Kind, Tokenizer};
use crate::error::{Error, Result};
use crate::gguf::Entries;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use tokenizers::{NormalizedString, Normalizer, OffsetReferential, OffsetType};
use tokenizers::{PreTokenizedString, PreTokenizer};

/// A text that all known pre-tokenisers split differently.
const PROBE: &str = "Hello WORLD, it's 12345 o'clock!/\n\n  \t x=y1; HelloWorld ÄÖ É e\u{301} \
    \u{4f60}\u{597d} \u{43c}\u{438}\u{440} \u{561} \u{ff01}? #@&  \n";

fn refuse<T>(what: &str) -> Result<T> {
    let what = format!("{what} in a GGUF file");
    let instead = "a folder (--out without .gguf), which llama.cpp's own converter may read".into();
    Err(Error::UseInstead { what, instead })
}

impl Tokenizer {
    /// Returns the GGUF entries of this tokeniser for a model of `vocab` tokens: those of its own GGUF file, or new
    /// ones for a byte-level BPE whose pre-tokeniser llama.cpp knows.
    pub fn to_gguf(&self, vocab: usize) -> Result<Entries> {
        if let Some(entries) = &self.entries {
            return Ok(Entries::clone(entries));
        }
        let Kind::HuggingFace(inner) = &*self.kind else { return refuse("a tokeniser without its scores") };
        let json: Json = serde_json::from_slice(&self.to_json()?)?;
        let model = &json["model"];
        let merges = model["merges"].as_array();
        let (Some(merges), Some(known)) = (merges, model["vocab"].as_object()) else {
            return refuse("a tokeniser that is no byte-level BPE");
        };
        if model["byte_fallback"] == true {
            return refuse("a tokeniser that is no byte-level BPE");
        }
        let words = |step: &dyn Fn(&mut PreTokenizedString) -> tokenizers::Result<()>| {
            let mut text = NormalizedString::from(PROBE);
            if let Some(n) = inner.get_normalizer() {
                n.normalize(&mut text).ok()?;
            }
            let mut split = PreTokenizedString::from(text);
            step(&mut split).ok()?;
            let parts = split.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
            Some(parts.into_iter().map(|(word, ..)| word.to_owned()).collect::<Vec<_>>())
        };
        let own = words(&|s| inner.get_pre_tokenizer().map_or(Ok(()), |p| p.pre_tokenize(s)));
        let whole = model["ignore_merges"] == true;
        let composed = json["normalizer"]["type"] == "NFC";
        let same = |(_, pre): &&(&str, super::gguf::Pre)| {
            let theirs = pre.steps().ok().and_then(|steps| words(&|s| steps.pre_tokenize(s)));
            own.is_some() && own == theirs && whole == pre.keeps_words() && composed == pre.composes()
        };
        let Some((pre, _)) = PRE.iter().find(same) else {
            return refuse("a tokeniser that cuts words in a way that llama.cpp has no name for");
        };

        let mut tokens: BTreeMap<usize, (String, i32)> = BTreeMap::new();
        for (token, id) in known {
            tokens.insert(id.as_u64().unwrap_or_default() as usize, (token.clone(), 1));
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let kind = if added["special"] == true { token_type::CONTROL } else { token_type::USER_DEFINED };
            if let (Some(id), Some(text)) = (added["id"].as_u64(), added["content"].as_str()) {
                tokens.insert(id as usize, (text.to_owned(), kind as i32));
            }
        }
        if let Some((&last, _)) = tokens.last_key_value().filter(|(id, _)| **id >= vocab) {
            return Err(Error::invalid("the largest token", last, format!("below {vocab}")));
        }
        // Embeddings may have rows without a token.
        let spare = |id: usize| (format!("[PAD{id}]"), token_type::UNUSED as i32);
        let (texts, kinds): (Vec<String>, Vec<i32>) =
            (0..vocab).map(|id| tokens.remove(&id).unwrap_or_else(|| spare(id))).unzip();
        let merge = |m: &Json| match m {
            Json::String(text) => Some(text.clone()),
            pair => Some(format!("{} {}", pair[0].as_str()?, pair[1].as_str()?)),
        };
        let Some(merges) = merges.iter().map(merge).collect::<Option<Vec<String>>>() else {
            return refuse("a tokeniser whose merges are no pairs");
        };
        let mut out = Entries::default();
        out.text("tokenizer.ggml.model", "gpt2");
        out.text("tokenizer.ggml.pre", pre);
        out.texts("tokenizer.ggml.tokens", &texts);
        out.integers("tokenizer.ggml.token_type", &kinds);
        out.texts("tokenizer.ggml.merges", &merges);
        for (name, id) in [("bos", self.bos), ("eos", self.eos)] {
            if let Some(id) = id {
                out.integer(&format!("tokenizer.ggml.{name}_token_id"), id as usize)?;
            }
        }
        let around = self.encode("a", true)?;
        out.flag("tokenizer.ggml.add_bos_token", self.bos.is_some() && around.first() == self.bos.as_ref());
        out.flag("tokenizer.ggml.add_eos_token", self.eos.is_some() && around.last() == self.eos.as_ref());
        Ok(out)
    }
}
