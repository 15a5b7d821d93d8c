//! SentencePiece BPE: the tokeniser of Llama 2 and Mistral.
//!
//! Spaces become U+2581. A text starts as single characters; the adjacent pair whose concatenation is the
//! token with the highest score is merged, the leftmost on ties, until no pair is a token. Characters that are no token
//! become their bytes, `<0x41>`, or the unknown token if those are missing.
//!
//! Reference: Kudo and Richardson 2018.

use super::gguf::token_type;
use serde_json::json;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, HashSet};

/// A vocabulary with scores.
#[derive(Debug)]
pub struct SentencePiece {
    tokens: Vec<String>,
    scores: Vec<f32>,
    ids: HashMap<String, u32>,
    /// The token of each byte.
    bytes: Vec<Option<u32>>,
    /// Tokens matched in a text before anything else, by first byte, longest first.
    literal: HashMap<u8, Vec<u32>>,
    control: Vec<bool>,
    unknown: u32,
    space_prefix: bool,
}

/// A possible merge of two neighbours.
#[derive(Debug)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Length of the text when the pair was found; if it has changed, the pair is stale.
    len: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// A piece of the text being merged: a doubly linked list by index.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: usize,
    len: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

impl SentencePiece {
    /// Creates a tokeniser. `types` are llama.cpp's numbers of token kinds; all lists have the same length.
    pub fn new(
        tokens: Vec<String>,
        scores: Vec<f32>,
        types: &[i64],
        unknown: u32,
        space_prefix: bool,
    ) -> Self {
        assert!(tokens.len() == scores.len() && tokens.len() == types.len());
        let mut ids = HashMap::with_capacity(tokens.len());
        let mut bytes = vec![None; 256];
        let mut literal: HashMap<u8, Vec<u32>> = HashMap::new();
        for (id, (token, &kind)) in tokens.iter().zip(types).enumerate() {
            let id = id as u32;
            match kind {
                token_type::BYTE => {
                    let value = token
                        .strip_prefix("<0x")
                        .and_then(|t| t.strip_suffix('>'))
                        .and_then(|t| u8::from_str_radix(t, 16).ok());
                    if let Some(value) = value {
                        bytes[usize::from(value)] = Some(id);
                    }
                }
                token_type::CONTROL | token_type::USER_DEFINED => {
                    if let Some(&first) = token.as_bytes().first() {
                        literal.entry(first).or_default().push(id);
                    }
                }
                _ => {
                    ids.entry(token.clone()).or_insert(id);
                }
            }
        }
        for list in literal.values_mut() {
            list.sort_by_key(|&id| std::cmp::Reverse(tokens[id as usize].len()));
        }
        let control = types.iter().map(|&k| k == token_type::CONTROL).collect();
        Self { tokens, scores, ids, bytes, literal, control, unknown, space_prefix }
    }

    /// Returns a `tokenizer.json` without special tokens around a text: every split of a token into two tokens is a
    /// merge, high scores first, which merges the same pairs if all scores differ.
    pub fn to_json(&self) -> serde_json::Value {
        let plain = |id: usize| self.ids.get(&self.tokens[id]) == Some(&(id as u32));
        let mut merges: Vec<(f32, u32, u32)> = Vec::new();
        for (token, &id) in &self.ids {
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if let (Some(&l), Some(&r)) = (self.ids.get(left), self.ids.get(right)) {
                    merges.push((self.scores[id as usize], l, r));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let spelled = |id: u32| self.tokens[id as usize].as_str();
        let merges: Vec<[&str; 2]> = merges.iter().map(|&(_, l, r)| [spelled(l), spelled(r)]).collect();
        let bytes: HashSet<u32> = self.bytes.iter().copied().flatten().collect();
        let added: Vec<serde_json::Value> = (0..self.tokens.len())
            .filter(|&id| (!plain(id) && !bytes.contains(&(id as u32))) || id as u32 == self.unknown)
            .map(|id| {
                json!({"id": id, "content": self.tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false, "special": self.control[id] || id as u32 == self.unknown})
            })
            .collect();
        let vocab: serde_json::Map<String, serde_json::Value> =
            self.tokens.iter().enumerate().map(|(id, t)| (t.clone(), id.into())).collect();
        let mut normalizers =
            vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"})];
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if self.space_prefix {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": "\u{2581}"}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": spelled(self.unknown),
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true,
                "byte_fallback": bytes.len() == 256,
                "ignore_merges": false,
                "vocab": vocab,
                "merges": merges,
            },
        })
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The spelling of a token.
    pub fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut after_literal = true;
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            let found = self
                .literal
                .get(&text.as_bytes()[at])
                .and_then(|list| list.iter().find(|&&id| text[at..].starts_with(&self.tokens[id as usize])));
            if let Some(&id) = found {
                self.encode_plain(&text[start..at], after_literal, &mut ids);
                ids.push(id);
                after_literal = true;
                at += self.tokens[id as usize].len();
                start = at;
            } else {
                at += text[at..].chars().next().map_or(1, char::len_utf8);
            }
        }
        self.encode_plain(&text[start..], after_literal, &mut ids);
        ids
    }

    fn encode_plain(&self, text: &str, prefix: bool, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let mut escaped = String::with_capacity(text.len() + 3);
        if prefix && self.space_prefix {
            escaped.push('\u{2581}');
        }
        escaped.extend(text.chars().map(|c| if c == ' ' { '\u{2581}' } else { c }));
        for symbol in self.merge(&escaped) {
            let piece = &escaped[symbol.start..symbol.start + symbol.len];
            match self.ids.get(piece) {
                Some(&id) => ids.push(id),
                None => ids.extend(piece.bytes().map(|b| self.bytes[usize::from(b)].unwrap_or(self.unknown))),
            }
        }
    }

    /// Merges neighbours until no two form a token, and returns the pieces.
    fn merge(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::new();
        for (start, c) in text.char_indices() {
            let i = symbols.len();
            let next = (start + c.len_utf8() < text.len()).then_some(i + 1);
            symbols.push(Symbol { start, len: c.len_utf8(), prev: i.checked_sub(1), next });
        }
        let pair = |symbols: &[Symbol], left: usize, right: usize| {
            let (a, b) = (symbols[left], symbols[right]);
            let len = a.len + b.len;
            let id = *self.ids.get(&text[a.start..a.start + len])?;
            Some(Pair { score: self.scores[id as usize], left, right, len })
        };
        let mut queue: BinaryHeap<Pair> =
            (1..symbols.len()).filter_map(|i| pair(&symbols, i - 1, i)).collect();
        while let Some(Pair { left, right, len, .. }) = queue.pop() {
            // An empty symbol was merged into its left neighbour.
            if symbols[left].len == 0
                || symbols[right].len == 0
                || symbols[left].len + symbols[right].len != len
            {
                continue;
            }
            symbols[left].len = len;
            symbols[right].len = 0;
            let next = symbols[right].next;
            symbols[left].next = next;
            if let Some(next) = next {
                symbols[next].prev = Some(left);
                queue.extend(pair(&symbols, left, next));
            }
            if let Some(prev) = symbols[left].prev {
                queue.extend(pair(&symbols, prev, left));
            }
        }
        symbols.retain(|s| s.len > 0);
        symbols
    }

    /// Decodes tokens; removes the leading space that [`encode`](Self::encode) adds.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut out: Vec<u8> = Vec::new();
        for &id in ids {
            let Some(token) = self.tokens.get(id as usize) else { continue };
            if self.control[id as usize] {
                if !skip_special {
                    out.extend_from_slice(token.as_bytes());
                }
            } else if let Some(byte) = self.bytes.iter().position(|&b| b == Some(id)) {
                out.push(byte as u8);
            } else {
                out.extend_from_slice(token.replace('\u{2581}', " ").as_bytes());
            }
        }
        let text = String::from_utf8_lossy(&out);
        let first_is_text = ids.first().is_some_and(|&id| self.control.get(id as usize) == Some(&false));
        match text.strip_prefix(' ') {
            Some(rest) if self.space_prefix && (first_is_text || skip_special) => rest.to_owned(),
            _ => text.into_owned(),
        }
    }
}
