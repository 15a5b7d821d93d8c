//! Tokenisers from the metadata of GGUF files.

use super::{Kind, SentencePiece, Tokenizer, failed};
use crate::error::{Error, Result};
use crate::gguf::{Array, Gguf, Value};
use std::sync::Arc;
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::{BertNormalizer, NFC};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// Kinds of tokens, as llama.cpp numbers them.
pub(super) mod token_type {
    pub(crate) const UNKNOWN: i64 = 2;
    pub(crate) const CONTROL: i64 = 3;
    pub(crate) const USER_DEFINED: i64 = 4;
    pub(crate) const UNUSED: i64 = 5;
    pub(crate) const BYTE: i64 = 6;
}

/// Supported pre-tokenisers of byte-level BPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pre {
    /// The GPT-2 expression.
    Gpt2,
    /// Every digit separately, then the GPT-2 expression.
    Digits,
    /// Digits in groups of three; whole words that are tokens are not merged.
    Llama3,
    /// As Llama 3, but all words are merged.
    Cl100k,
    /// As Llama 3 with single digits; text is composed first (NFC).
    Qwen2,
    /// Words begin with capitals; single digits; whole words that are tokens are not merged.
    Tekken,
    /// One script after another.
    DeepseekLlm,
    /// Letters, punctuation, Chinese and single digits, one after another.
    DeepseekCoder,
}

impl Pre {
    /// Returns true if words that are tokens are taken whole; by default, files of these kinds also begin texts with a
    /// token.
    pub(super) fn keeps_words(self) -> bool {
        matches!(self, Self::Llama3 | Self::Tekken)
    }

    /// Returns true if text is composed first (NFC).
    pub(super) fn composes(self) -> bool {
        self == Self::Qwen2
    }
}

pub(super) const PRE: [(&str, Pre); 20] = [
    ("gpt-2", Pre::Gpt2),
    ("default", Pre::Gpt2),
    ("smollm", Pre::Digits),
    ("starcoder", Pre::Digits),
    ("refact", Pre::Digits),
    ("command-r", Pre::Digits),
    ("llama-bpe", Pre::Llama3),
    ("llama-v3", Pre::Llama3),
    ("llama3", Pre::Llama3),
    ("falcon3", Pre::Llama3),
    ("dbrx", Pre::Cl100k),
    ("smaug-bpe", Pre::Cl100k),
    ("glm4", Pre::Cl100k),
    ("chatglm-bpe", Pre::Cl100k),
    ("olmo", Pre::Gpt2),
    ("tekken", Pre::Tekken),
    ("deepseek-llm", Pre::DeepseekLlm),
    ("deepseek-coder", Pre::DeepseekCoder),
    ("qwen2", Pre::Qwen2),
    ("deepseek-r1-qwen", Pre::Qwen2),
];

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LINES: &str = r"[\r\n]";
const EAST_ASIAN: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
/// Letters with case, without the scripts and blocks that the model's own list omits: Armenian small letters, Georgian,
/// late Latin and Cyrillic additions, Vithkuqi, Garay, Medefaidrin, mathematical letters.
const CASED: &str = r"\s?[[\p{Lu}\p{Ll}\p{Lt}]--[\x{560}-\x{588}\x{10C7}\x{10CD}\x{10D0}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}\x{AB30}-\x{AB68}\x{10570}-\x{105BF}\x{10D50}-\x{10D85}\x{16E40}-\x{16EBF}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2F}]]+";
const SIGNS: &str = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";

impl Tokenizer {
    /// Builds the tokeniser from the metadata of a GGUF file.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let missing = |key: &str| Error::MissingKey { key: key.to_owned() };
        let model = gguf.text("tokenizer.ggml.model")?.ok_or_else(|| missing("tokenizer.ggml.model"))?;
        let tokens = gguf.texts("tokenizer.ggml.tokens")?.ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
        if u32::try_from(tokens.len()).is_err() || tokens.is_empty() {
            return Err(Error::invalid("the number of tokens", tokens.len(), "1 to 4294967295"));
        }
        let types = token_types(gguf, tokens.len())?;
        let id = |key: &str| -> Result<Option<u32>> {
            let key = format!("tokenizer.ggml.{key}_token_id");
            match gguf.integer(&key)? {
                Some(id) if id >= tokens.len() => {
                    Err(Error::invalid(key, id, format!("below the number of tokens, {}", tokens.len())))
                }
                id => Ok(id.map(|id| id as u32)),
            }
        };
        let flag = |key: &str, default: bool| -> Result<bool> {
            Ok(gguf.boolean(&format!("tokenizer.ggml.add_{key}"))?.unwrap_or(default))
        };
        let (kind, bos, eos, wants_bos, wants_eos) = match model {
            "gpt2" => {
                let name = gguf.text("tokenizer.ggml.pre")?.unwrap_or("default");
                let pre = PRE.iter().find(|(n, _)| *n == name).map(|(_, pre)| *pre).ok_or_else(|| {
                    Error::invalid(
                        "tokenizer.ggml.pre",
                        name,
                        format!("one of {}", PRE.map(|(n, _)| n).join(", ")),
                    )
                })?;
                let merges =
                    gguf.texts("tokenizer.ggml.merges")?.ok_or_else(|| missing("tokenizer.ggml.merges"))?;
                let inner = byte_level_bpe(tokens, merges, &types, pre)?;
                (Kind::HuggingFace(Box::new(inner)), id("bos")?, id("eos")?, pre.keeps_words(), false)
            }
            "llama" => {
                let scores = match gguf.get("tokenizer.ggml.scores") {
                    Some(Value::Array(Array::F32(scores))) if scores.len() == tokens.len() => scores.clone(),
                    _ => {
                        return Err(Error::invalid(
                            "tokenizer.ggml.scores",
                            "absent, mistyped or of another length",
                            format!("{} numbers", tokens.len()),
                        ));
                    }
                };
                let unknown = id("unknown")?.unwrap_or(0);
                let inner =
                    SentencePiece::new(tokens.to_vec(), scores, &types, unknown, flag("space_prefix", true)?);
                (Kind::SentencePiece(inner), id("bos")?.or(Some(1)), id("eos")?.or(Some(2)), true, false)
            }
            "bert" => {
                let bos = id("cls")?.or(id("bos")?);
                let eos = id("seperator")?.or(id("separator")?).or(id("eos")?);
                (Kind::HuggingFace(Box::new(word_piece(tokens, &types)?)), bos, eos, true, true)
            }
            other => {
                return Err(Error::invalid("tokenizer.ggml.model", other, "gpt2, llama or bert"));
            }
        };
        let (add_bos, add_eos) = (flag("bos_token", wants_bos)?, flag("eos_token", wants_eos)?);
        Ok(Self {
            kind: Arc::new(kind),
            add_bos: bos.filter(|_| add_bos),
            add_eos: eos.filter(|_| add_eos),
            bos,
            eos,
            entries: Some(Arc::new(gguf.tokenizer_entries().clone())),
        })
    }
}

/// Returns the kind of every token; ordinary if the file does not say.
fn token_types(gguf: &Gguf, n: usize) -> Result<Vec<i64>> {
    let Some(value) = gguf.get("tokenizer.ggml.token_type") else { return Ok(vec![1; n]) };
    match value {
        Value::Array(array) if array.len() == n => array.to_integers(),
        _ => None,
    }
    .ok_or_else(|| {
        Error::invalid("tokenizer.ggml.token_type", "mistyped or of another length", format!("{n} integers"))
    })
}

fn vocabulary<'a>(tokens: impl Iterator<Item = std::borrow::Cow<'a, str>>) -> Result<Vocab> {
    let mut vocab = Vocab::new();
    for (id, token) in tokens.enumerate() {
        if vocab.insert(token.to_string(), id as u32).is_some() {
            return Err(Error::invalid("a token", format!("{token:?} twice"), "distinct tokens"));
        }
    }
    Ok(vocab)
}

/// Adds control tokens as special tokens, and user-defined ones; both are matched in the text before anything else.
fn add_tokens(inner: &mut tokenizers::Tokenizer, tokens: &[String], types: &[i64]) {
    let of = |kind: i64, special: bool| -> Vec<AddedToken> {
        let chosen = tokens.iter().zip(types).filter(|(t, k)| **k == kind && !t.is_empty());
        chosen.map(|(t, _)| AddedToken::from(t.clone(), special).normalized(false)).collect()
    };
    inner.add_special_tokens(&of(token_type::CONTROL, true));
    inner.add_tokens(&of(token_type::USER_DEFINED, false));
}

fn byte_level_bpe(
    tokens: &[String],
    merges: &[String],
    types: &[i64],
    pre: Pre,
) -> Result<tokenizers::Tokenizer> {
    let vocab = vocabulary(tokens.iter().map(|t| t.as_str().into()))?;
    let merges = merges
        .iter()
        .map(|merge| match merge.split_once(' ') {
            Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
            None => Err(Error::invalid("a merge", format!("{merge:?}"), "two tokens with a space between")),
        })
        .collect::<Result<Vec<_>>>()?;
    let model = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(pre.keeps_words())
        .build()
        .map_err(failed)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_pre_tokenizer(Some(pre.steps()?));
    if pre.composes() {
        inner.with_normalizer(Some(NFC));
    }
    inner.with_decoder(Some(ByteLevel::default()));
    add_tokens(&mut inner, tokens, types);
    Ok(inner)
}
impl Pre {
    /// Returns the steps that split a text into words.
    pub(super) fn steps(self) -> Result<Sequence> {
        let bytes = |regex: bool| PreTokenizerWrapper::from(ByteLevel::new(false, true, regex));
        let split = |pattern: &str| {
            Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false)
                .map(PreTokenizerWrapper::from)
                .map_err(failed)
        };
        let steps = match self {
            Pre::Gpt2 => vec![bytes(true)],
            Pre::Digits => vec![PreTokenizerWrapper::from(Digits::new(true)), bytes(true)],
            Pre::Llama3 | Pre::Cl100k => vec![split(LLAMA3)?, bytes(false)],
            Pre::Qwen2 => vec![split(QWEN2)?, bytes(false)],
            Pre::Tekken => vec![split(TEKKEN)?, bytes(false)],
            Pre::DeepseekLlm => {
                let steps = [LINES, CASED, SIGNS, r"\s+$", EAST_ASIAN, r"\p{N}+"];
                steps.into_iter().map(split).chain([Ok(bytes(false))]).collect::<Result<_>>()?
            }
            Pre::DeepseekCoder => {
                let steps = [LINES, r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, r"\p{N}"];
                steps.into_iter().map(split).chain([Ok(bytes(false))]).collect::<Result<_>>()?
            }
        };
        Ok(Sequence::new(steps))
    }
}

/// Builds a WordPiece tokeniser. llama.cpp marks the starts of words with U+2581; BERT marks their continuations with
/// `##`.
fn word_piece(tokens: &[String], types: &[i64]) -> Result<tokenizers::Tokenizer> {
    let spelled = tokens.iter().map(|token| match token.strip_prefix('\u{2581}') {
        Some(start) => start.into(),
        None if token.starts_with('[') && token.ends_with(']') => token.as_str().into(),
        None => format!("##{token}").into(),
    });
    let unknown = tokens.iter().zip(types).find(|(_, k)| **k == token_type::UNKNOWN).map(|(t, _)| t.clone());
    let model = WordPiece::builder()
        .vocab(vocabulary(spelled)?)
        .unk_token(unknown.unwrap_or_else(|| "[UNK]".into()))
        .build()
        .map_err(failed)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_normalizer(Some(BertNormalizer::default()));
    inner.with_pre_tokenizer(Some(BertPreTokenizer));
    inner.with_decoder(Some(WordPieceDecoder::default()));
    add_tokens(&mut inner, tokens, types);
    Ok(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits a text into words, as bytes, before any merge.
    fn words(pre: &str, text: &str) -> Vec<String> {
        let kind = PRE.iter().find(|(n, _)| *n == pre).unwrap().1;
        // One token per byte: only word boundaries separate tokens.
        let inner = byte_level_bpe(&["a".to_owned()], &[], &[1], kind).unwrap();
        let mut split = tokenizers::PreTokenizedString::from(text);
        let step = inner.get_pre_tokenizer().unwrap();
        tokenizers::PreTokenizer::pre_tokenize(step, &mut split).unwrap();
        let ranges = split.get_splits(tokenizers::OffsetReferential::Original, tokenizers::OffsetType::Byte);
        ranges.into_iter().map(|(_, (a, b), _)| text[a..b].to_owned()).collect()
    }

    #[test]
    fn words_are_those_of_each_family() {
        assert_eq!(
            words("tekken", "HelloWorld I'm 123!/\n"),
            ["Hello", "World", " I", "'m", " ", "1", "2", "3", "!/\n"]
        );
        assert_eq!(words("falcon3", "Hi 12345"), ["Hi", " ", "123", "45"]);
        assert_eq!(words("glm4", "Hi 12345"), words("llama-bpe", "Hi 12345"));
        assert_eq!(
            words("deepseek-llm", "Hello, мир 12 中文\n"),
            ["Hello", ",", " мир", " ", "12", " ", "中文", "\n"]
        );
        // Armenian small letters are not in the model's list.
        assert_eq!(words("deepseek-llm", "aա"), ["a", "ա"]);
        assert_eq!(words("deepseek-coder", "x = y1\n中"), ["x", " =", " y", "1", "\n", "中"]);
    }
}
