//! Words from outside: suggestions for misspelt names, and escapes for names that must not reach a terminal unchanged.

use crate::{Error, Result};

/// Splits a setting `parameter=value`, such as `example`, into name and value.
pub fn setting<'a>(text: &'a str, example: &str) -> Result<(&'a str, &'a str)> {
    let expected = || format!("parameter=value, such as {example}");
    text.split_once('=').ok_or_else(|| Error::argument("--set", expected(), format!("'{text}'")))
}

/// Escapes text for a terminal: control characters, which move cursors and change colours, and marks that change the
/// direction of a line become their codes. Line ends and tabs stay.
pub fn printable(text: &str) -> String {
    let turns =
        |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        if (c.is_control() && c != '\n' && c != '\t') || turns(c) {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
        out
    })
}

/// Returns the candidate that `word` probably means: at most a third of its letters differ.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let best = candidates.into_iter().map(|c| (distance(word, c), c)).min_by_key(|(d, _)| *d)?;
    let most = word.chars().count().div_ceil(3);
    (best.0 <= most && best.0 < best.1.chars().count()).then_some(best.1)
}

/// Returns the edit distance with swaps of neighbours (optimal string alignment), regardless of case.
fn distance(a: &str, b: &str) -> usize {
    let letters = |s: &str| s.to_lowercase().chars().collect::<Vec<char>>();
    let (a, b) = (letters(a), letters(b));
    let mut rows: [Vec<usize>; 3] = [Vec::new(), Vec::new(), (0..=b.len()).collect()];
    for i in 1..=a.len() {
        rows.rotate_left(1);
        let mut row = vec![i];
        for j in 1..=b.len() {
            let same = usize::from(a[i - 1] != b[j - 1]);
            let mut best = (rows[1][j] + 1).min(row[j - 1] + 1).min(rows[1][j - 1] + same);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[0][j - 2] + 1);
            }
            row.push(best);
        }
        rows[2] = row;
    }
    rows[2][b.len()]
}

/// Reads a count with an optional suffix: `4k` is 4096, `2m` is 2²¹.
pub fn parse_count(text: &str) -> Option<usize> {
    let lower = text.trim().to_ascii_lowercase();
    let (digits, factor) = match lower.strip_suffix(['k', 'm']) {
        Some(digits) if lower.ends_with('k') => (digits, 1 << 10),
        Some(digits) => (digits, 1 << 20),
        None => (lower.as_str(), 1),
    };
    digits.replace('_', "").parse::<usize>().ok()?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_take_suffixes() {
        assert_eq!(parse_count("4k"), Some(4096));
        assert_eq!(parse_count("1_000"), Some(1000));
        assert_eq!(parse_count("2M"), Some(1 << 21));
        for bad in ["", "k", "-1", "1.5k", "4kk", "99999999999999999999", "99999999999999999k"] {
            assert_eq!(parse_count(bad), None, "{bad}");
        }
    }

    #[test]
    fn letters_are_counted() {
        for (a, b, wanted) in
            [("hypr", "hyper", 1), ("demmo", "demo", 1), ("", "ab", 2), ("ab", "ba", 1), ("a", "a", 0)]
        {
            assert_eq!(distance(a, b), wanted, "{a} {b}");
            assert_eq!(distance(b, a), wanted, "{b} {a}");
        }
    }

    #[test]
    fn only_what_is_near_is_suggested() {
        let ids = ["hyper", "top_k", "sink_window"];
        assert_eq!(nearest("hypr", ids), Some("hyper"));
        assert_eq!(nearest("TOPK", ids), Some("top_k"));
        assert_eq!(nearest("nonsense", ids), None);
        assert_eq!(nearest("x", ids), None);
    }

    #[test]
    fn control_characters_are_shown_as_codes() {
        assert_eq!(printable("a\u{1b}[31mb\u{9b}2J\u{202e}\tc\nd"), "a\\u{1b}[31mb\\u{9b}2J\\u{202e}\tc\nd");
    }
}
