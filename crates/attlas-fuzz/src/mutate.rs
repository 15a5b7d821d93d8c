//! Mutations aimed at headers: extreme integers, cut and repeated pieces, numbers and words of text.

use attlas_num::rng::Rng;

/// Integers that break arithmetic on sizes.
const EXTREMES: [u64; 14] = [
    0,
    1,
    2,
    31,
    255,
    0x7fff,
    0xffff,
    1 << 20,
    u32::MAX as u64,
    (1 << 31) - 1,
    1 << 40,
    (1 << 61) - 1,
    1 << 63,
    u64::MAX,
];

/// Pieces of text that are critical for parsers of JSON, TOML, templates and array headers.
const WORDS: [&str; 24] = [
    "null",
    "true",
    "-1",
    "1e999",
    "18446744073709551616",
    "4294967296",
    "0.0",
    "NaN",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "\\u0000",
    "\\ud800",
    ",",
    ":",
    "{{",
    "}}",
    "{%",
    "%}",
    "\u{2581}",
    "[[",
    "'",
];

/// Mutates a member of `pool`: mostly one of the first `seeds`, which are valid, and mostly once, which lets many
/// inputs pass the first check.
pub(crate) fn mutated(pool: &[Vec<u8>], seeds: usize, rng: &mut Rng) -> Vec<u8> {
    let among = if rng.below(4) > 0 { seeds } else { pool.len() };
    let mut out = pool[rng.below(among)].clone();
    let changes = 1 + (rng.next_u32() | 1 << 6).trailing_zeros();
    for _ in 0..changes {
        let at = rng.below(out.len() + 1);
        let rest = out.len() - at;
        match rng.below(12) {
            0 if rest > 0 => out[at] ^= 1 << rng.below(8),
            1 if rest > 0 => out[at] = rng.next_u32() as u8,
            2 if rng.below(4) == 0 => out.truncate(at),
            3..=5 => {
                let width = [1, 2, 4, 8][rng.below(4)];
                let value = EXTREMES[rng.below(EXTREMES.len())].to_le_bytes();
                out[at..].iter_mut().zip(&value[..width]).for_each(|(b, v)| *b = *v);
            }
            6 => drop(out.drain(at..(at + 1 + rng.below(24)).min(at + rest))),
            7 => {
                let word = WORDS[rng.below(WORDS.len())];
                out.splice(at..at, word.bytes());
            }
            8 => replace_number(&mut out, at, rng),
            9 if !out.is_empty() => {
                // Inserts a piece of the input again, or overwrites with it.
                let from = rng.below(out.len());
                let piece = out[from..(from + 1 + rng.below(64)).min(out.len())].to_vec();
                let end = if rng.below(2) == 0 { at } else { (at + piece.len()).min(out.len()) };
                out.splice(at..end, piece);
            }
            10 => {
                let other = &pool[rng.below(pool.len())];
                if !other.is_empty() {
                    let from = rng.below(other.len());
                    let piece = &other[from..(from + 1 + rng.below(256)).min(other.len())];
                    out.splice(at..(at + rng.below(piece.len() + 1)).min(out.len()), piece.iter().copied());
                }
            }
            _ => {
                // Changes an integer slightly.
                if let Some(field) = out[at..].first_chunk_mut::<4>() {
                    let moved = u32::from_le_bytes(*field).wrapping_add(rng.below(9) as u32).wrapping_sub(4);
                    *field = moved.to_le_bytes();
                }
            }
        }
    }
    out
}

/// Replaces the first run of decimal digits after `at` by another number.
fn replace_number(out: &mut Vec<u8>, at: usize, rng: &mut Rng) {
    let Some(start) = out[at..].iter().position(u8::is_ascii_digit).map(|i| at + i) else { return };
    let len = out[start..].iter().take_while(|b| b.is_ascii_digit()).count();
    let number = EXTREMES[rng.below(EXTREMES.len())].to_string();
    out.splice(start..start + len, number.bytes());
}
