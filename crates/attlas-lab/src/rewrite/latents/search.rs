//! Searches for parameters of a conversion by their loss.

use crate::rewrite::Bench;
use crate::table::number;
use crate::{Error, Result};
use attlas::conversions::mla::Params;
use attlas_model::Model;
use std::sync::Arc;

/// Doubles the fold while the perplexity of the `partial`ly rotated model falls.
pub(super) fn search_fold(
    bench: &Bench<'_>,
    params: &Params,
    tokens: &[u32],
    partial: impl Fn(&Params) -> Result<Model>,
) -> Result<Vec<(usize, f64)>> {
    let Some(rope) = &bench.before.config.rope else { return Ok(Vec::new()) };
    let collapse = rope.dim / params.rope_dim.unwrap_or(rope.dim.min(64)).max(1);
    let mut found: Vec<(usize, f64)> = Vec::new();
    let mut fold = collapse.max(1);
    while (rope.dim / 2).is_multiple_of(fold) {
        let params = Params { fold: Some(fold), ..params.clone() };
        let model = Arc::new(partial(&params)?);
        let (ppl, _) = bench.read(&model, tokens, "searching the fold")?.perplexity();
        let worse = found.last().is_some_and(|(_, before)| ppl >= *before);
        found.push((fold, ppl));
        if worse {
            break;
        }
        fold *= 2;
    }
    Ok(found)
}

/// Finds the smallest rank up to `full` that loses at most `most`, by bisection to a step of $1/64$ of `full`, and
/// returns the divergences of the ranks tried; an error if even `full` exceeds `most`.
pub(super) fn search_rank(
    full: usize,
    most: f64,
    mut of: impl FnMut(usize, &mut dyn FnMut(usize, usize)) -> Result<f64>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<(usize, f64)>> {
    let whole = of(full, progress)?;
    let mut found = vec![(full, whole)];
    // NaN is past every limit.
    if whole > most || whole.is_nan() {
        let expected = format!("more than {}, which dropping rotations costs at full rank", number(whole));
        return Err(Error::argument("--max-kl", expected, number(most)));
    }
    let step = full.div_ceil(64);
    let (mut below, mut within) = (0, full);
    while within - below > step {
        let rank = (below + (within - below) / 2).next_multiple_of(step).min(within - 1);
        let kl = of(rank, progress)?;
        found.push((rank, kl));
        if kl <= most { within = rank } else { below = rank }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_rank_within_a_loss_is_found_by_bisection() {
        // Falls with the rank, and is within 0.1 from 200 on.
        let kl = |rank: usize| 20.0 / rank as f64;
        let tried = search_rank(320, 0.1, |rank, _| Ok(kl(rank)), &mut |_, _| {}).unwrap();
        let best = tried.iter().filter(|(_, kl)| *kl <= 0.1).map(|(rank, _)| *rank).min().unwrap();
        assert!((200..205).contains(&best) && tried.len() < 9, "{tried:?}");
        assert!(tried.iter().all(|&(rank, found)| found == kl(rank)));
        let error = search_rank(320, 0.06, |rank, _| Ok(kl(rank)), &mut |_, _| {}).unwrap_err().to_string();
        assert!(error.contains("--max-kl") && error.contains("0.0625"), "{error}");
        assert!(search_rank(320, 0.06, |_, _| Ok(f64::NAN), &mut |_, _| {}).is_err());
        assert_eq!(search_rank(1, 1.0, |_, _| Ok(0.5), &mut |_, _| {}).unwrap(), [(1, 0.5)]);
    }
}
