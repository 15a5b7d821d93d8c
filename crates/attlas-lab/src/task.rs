//! Texts whose last tokens can only be predicted from distant keys, made from the user's own text.
//!
//! The perplexity of ordinary prose hardly depends on keys thousands of tokens back, and hardly changes if a method
//! drops them. Each [`Task`] builds one prompt and names the tokens to score: those that the model can predict only
//! from distant keys.
//!
//! - `repeat`: a passage, other text, the passage again; the second reading is scored. `repeat=1024` sets the tokens of
//!   the passage; a prompt of twice that length has no other text between the readings.
//! - `needle`: sentences with a random number hidden at even depths, and a question for each at the end; the
//!   numbers of the answers are scored.
//! - `lookup`: a list of words with random numbers, other text, half of the words again in another order; their
//!   numbers are scored.

use crate::text::Text;
use crate::{Error, Result};
use attlas_model::Tokenizer;
use attlas_num::rng::{Rng, StreamKey};
use std::collections::BTreeSet;
use std::ops::Range;

/// Needles hidden in a text.
const NEEDLES: usize = 8;
/// Entries of the look-up list.
const ENTRIES: usize = 24;
/// Most tokens of the repeated passage by default.
const PASSAGE: usize = 1024;

/// A kind of text that needs distant keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A passage read twice.
    Repeat {
        /// Its tokens; if absent, a quarter of the prompt, at most 1024.
        passage: Option<usize>,
    },
    /// Facts hidden in a long text.
    Needle,
    /// A look-up list.
    Lookup,
}

impl Task {
    /// Returns the name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Task::Repeat { .. } => "repeat",
            Task::Needle => "needle",
            Task::Lookup => "lookup",
        }
    }
}

impl std::fmt::Display for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Task::Repeat { passage: Some(tokens) } => write!(f, "repeat={tokens}"),
            other => f.write_str(other.name()),
        }
    }
}

impl serde::Serialize for Task {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl std::str::FromStr for Task {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let expected = "repeat, repeat=TOKENS, needle or lookup";
        match text.split_once('=') {
            Some(("repeat", tokens)) => match tokens.parse() {
                Ok(tokens) if tokens > 1 => Ok(Task::Repeat { passage: Some(tokens) }),
                _ => Err(Error::argument("--task", "repeat=TOKENS with at least two tokens", text)),
            },
            Some(_) => Err(Error::argument("--task", expected, text)),
            None => match text {
                "repeat" => Ok(Task::Repeat { passage: None }),
                "needle" => Ok(Task::Needle),
                "lookup" => Ok(Task::Lookup),
                _ => Err(Error::argument("--task", expected, text)),
            },
        }
    }
}

/// A prompt and its scored tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// All tokens.
    pub tokens: Vec<u32>,
    /// Scored ranges of `tokens`, in ascending order; none contains token 0.
    pub targets: Vec<Range<usize>>,
}

impl Prompt {
    /// Returns the number of scored tokens.
    pub fn scored(&self) -> usize {
        self.targets.iter().map(ExactSizeIterator::len).sum()
    }

    fn push(&mut self, tokens: &[u32], scored: bool) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        if scored {
            self.targets.push(start..self.tokens.len());
        }
    }
}

/// Builds a prompt of at most `context` tokens from `text`.
pub fn prompt(task: Task, tokenizer: &Tokenizer, text: &Text, context: usize, seed: u64) -> Result<Prompt> {
    let encode = |piece: &str| -> Result<Vec<u32>> { Ok(tokenizer.encode(piece, false)?) };
    let mut rng = StreamKey::new(seed).named("task").named(task.name()).rng();
    match task {
        Task::Repeat { passage } => repeat(&text.tokens, context, passage),
        Task::Needle => {
            let words = words(&tokenizer.decode(&text.tokens, true)?, NEEDLES, &mut rng)?;
            needle(&text.tokens, &words, context, &encode, &mut rng)
        }
        Task::Lookup => {
            let words = words(&tokenizer.decode(&text.tokens, true)?, ENTRIES, &mut rng)?;
            lookup(&text.tokens, &words, context, &encode, &mut rng)
        }
    }
}

/// Builds a prompt from the first tokens of a text as a passage, the following ones as filler, and the passage again.
fn repeat(text: &[u32], context: usize, passage: Option<usize>) -> Result<Prompt> {
    let passage = passage.unwrap_or((context / 4).min(PASSAGE));
    let Some(filler) = context.checked_sub(passage.saturating_mul(2)) else {
        let expected = format!("--context of at least {}", passage.saturating_mul(2));
        return Err(Error::argument("--task repeat", expected, format!("a context of {context}")));
    };
    if passage < 2 || text.len() < passage + filler {
        let expected = format!("a text of at least {} tokens for --context {context}", passage + filler);
        return Err(Error::argument("--task repeat", expected, format!("{} tokens", text.len())));
    }
    let mut prompt = Prompt { tokens: Vec::with_capacity(context), targets: Vec::new() };
    prompt.push(&text[..passage + filler], false);
    // Nothing announces the second reading: its first token is unpredictable.
    prompt.push(&text[..1], false);
    prompt.push(&text[1..passage], true);
    Ok(prompt)
}

type Encode<'a> = &'a dyn Fn(&str) -> Result<Vec<u32>>;

/// A word and its number, as two runs of tokens.
struct Fact {
    statement: Vec<u32>,
    number: Vec<u32>,
}

fn facts(
    words: &[String],
    encode: Encode<'_>,
    rng: &mut Rng,
    wording: fn(&str) -> String,
) -> Result<Vec<Fact>> {
    let one = |word: &String| {
        let number = 10_000 + rng.below(90_000);
        Ok(Fact { statement: encode(&wording(word))?, number: encode(&format!(" {number}"))? })
    };
    words.iter().map(one).collect()
}

fn filler(task: &str, text: &[u32], context: usize, taken: usize) -> Result<usize> {
    let room = context.saturating_sub(taken);
    if room < taken || text.len() < room {
        let expected = format!("--context of at least {} and a text of as many tokens", 2 * taken);
        return Err(Error::argument(
            format!("--task {task}"),
            expected,
            format!("a context of {context} and {} tokens", text.len()),
        ));
    }
    Ok(room)
}

/// Builds a prompt with facts at even depths of the text and one question for each at the end.
fn needle(
    text: &[u32],
    words: &[String],
    context: usize,
    encode: Encode<'_>,
    rng: &mut Rng,
) -> Result<Prompt> {
    let wording = |word: &str| format!("\nThe secret number of the {word} is");
    let facts = facts(words, encode, rng, wording)?;
    let end = encode(".\n")?;
    let size: usize = facts.iter().map(|f| 2 * (f.statement.len() + f.number.len() + end.len())).sum();
    let room = filler("needle", text, context, size)?;
    let mut prompt = Prompt { tokens: Vec::with_capacity(context), targets: Vec::new() };
    let piece = room / (facts.len() + 1);
    for (i, fact) in facts.iter().enumerate() {
        prompt.push(&text[i * piece..(i + 1) * piece], false);
        [&fact.statement, &fact.number, &end].into_iter().for_each(|part| prompt.push(part, false));
    }
    prompt.push(&text[facts.len() * piece..room], false);
    for i in rng.permutation(facts.len()) {
        prompt.push(&facts[i].statement, false);
        prompt.push(&facts[i].number, true);
        prompt.push(&end, false);
    }
    Ok(prompt)
}

/// Builds a prompt with a list at the start, the text, and half of the list again in another order.
fn lookup(
    text: &[u32],
    words: &[String],
    context: usize,
    encode: Encode<'_>,
    rng: &mut Rng,
) -> Result<Prompt> {
    let facts = facts(words, encode, rng, |word| format!("\n{word}:"))?;
    let asked: Vec<usize> = rng.permutation(facts.len()).into_iter().take(facts.len() / 2).collect();
    let len = |f: &Fact| f.statement.len() + f.number.len();
    let size = facts.iter().map(len).sum::<usize>() + asked.iter().map(|&i| len(&facts[i])).sum::<usize>();
    let room = filler("lookup", text, context, size)?;
    let mut prompt = Prompt { tokens: Vec::with_capacity(context), targets: Vec::new() };
    for fact in &facts {
        prompt.push(&fact.statement, false);
        prompt.push(&fact.number, false);
    }
    prompt.push(&text[..room], false);
    for i in asked {
        prompt.push(&facts[i].statement, false);
        prompt.push(&facts[i].number, true);
    }
    Ok(prompt)
}

/// Draws `count` distinct lower-case words of the text at random.
fn words(text: &str, count: usize, rng: &mut Rng) -> Result<Vec<String>> {
    let plain = |w: &&str| (5..=10).contains(&w.len()) && w.bytes().all(|b| b.is_ascii_lowercase());
    let distinct: BTreeSet<&str> = text.split_whitespace().filter(plain).collect();
    if distinct.len() < count {
        let expected = format!("a text with at least {count} words of five to ten letters");
        return Err(Error::argument("--task", expected, format!("{} of them", distinct.len())));
    }
    let all: Vec<&str> = distinct.into_iter().collect();
    Ok(rng.permutation(all.len()).into_iter().take(count).map(|i| all[i].to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One token for each byte.
    fn bytes(text: &str) -> Result<Vec<u32>> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn text(prompt: &[u32]) -> String {
        prompt.iter().map(|&t| char::from(t as u8)).collect()
    }

    fn made_of(prompt: &Prompt) -> Vec<String> {
        prompt.targets.iter().map(|t| text(&prompt.tokens[t.clone()])).collect()
    }

    #[test]
    fn a_repeated_passage_is_scored_from_its_second_token_on() {
        let source: Vec<u32> = (0..4096).collect();
        let prompt = repeat(&source, 4096, None).unwrap();
        assert_eq!(prompt.tokens.len(), 4096);
        assert!(prompt.targets.len() == 1 && prompt.targets[0] == (3073..4096));
        assert_eq!(prompt.tokens[3073..], source[1..1024]);
        assert!(repeat(&source[..100], 4096, None).is_err() && repeat(&source, 4, None).is_err());
        let at_once = repeat(&source, 2048, Some(1024)).unwrap();
        assert_eq!(at_once.tokens, [&source[..1024], &source[..1024]].concat());
        assert!(at_once.targets.len() == 1 && at_once.targets[0] == (1025..2048));
        let error = repeat(&source, 2047, Some(1024)).unwrap_err().to_string();
        assert!(error.contains("--context of at least 2048"), "{error}");
    }

    #[test]
    fn a_task_is_read_as_it_is_written() {
        for name in ["repeat", "repeat=1024", "needle", "lookup"] {
            let task: Task = name.parse().unwrap();
            assert_eq!(task.to_string(), name);
            assert_eq!(serde_json::to_string(&task).unwrap(), format!("\"{name}\""));
        }
        for wrong in ["", "repeat=", "repeat=1", "repeat=-4", "needle=3", "repeats"] {
            assert!(wrong.parse::<Task>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_scored_number_stands_earlier_in_the_prompt_beside_its_word() {
        let source = bytes(&"some filler text ".repeat(400)).unwrap();
        let words: Vec<String> = ["lantern", "garden", "kettle", "window"].map(String::from).to_vec();
        let mut rng = StreamKey::new(3).rng();
        let hidden = needle(&source, &words, 2000, &bytes, &mut rng).unwrap();
        let listed = lookup(&source, &words, 400, &bytes, &mut rng).unwrap();
        for (prompt, count) in [(hidden, 4), (listed, 2)] {
            let whole = text(&prompt.tokens);
            assert_eq!(prompt.targets.len(), count);
            assert!(prompt.tokens.len() <= 2000 && prompt.scored() == 6 * count);
            for (number, at) in made_of(&prompt).iter().zip(&prompt.targets) {
                let question = whole[..at.start].rsplit('\n').next().unwrap();
                let fact = format!("{question}{number}");
                assert!(whole.find(&fact).unwrap() + fact.len() < at.start, "{fact}");
            }
        }
    }

    #[test]
    fn a_context_that_is_too_short_is_refused() {
        let source = bytes(&"x ".repeat(400)).unwrap();
        let words = vec!["lantern".to_string()];
        let error = needle(&source, &words, 60, &bytes, &mut StreamKey::new(0).rng()).unwrap_err();
        assert!(error.to_string().contains("--context of at least"), "{error}");
    }

    #[test]
    fn words_are_distinct_and_reproducible() {
        let text = "alpha bravo charlie delta echoes foxtrot golfer Hotel a alpha bravo";
        let draw = |seed| words(text, 5, &mut StreamKey::new(seed).rng());
        let first = draw(1).unwrap();
        assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), 5);
        assert_eq!(first, draw(1).unwrap());
        assert!(words(text, 8, &mut StreamKey::new(1).rng()).is_err());
    }
}
