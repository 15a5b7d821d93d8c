//! Coresets as plain numbers for exchange between processes: rows $[k \mid V \mid w]$.

use super::{CompressKeys, Coreset, Fallback, Finish, Values, attend_coreset};
use crate::group::{Group, StandIns};
use crate::{Error, MatRef, Real, Result, RunInfo};

/// Returns the coreset of one piece of the keys, or all keys unchanged if it would keep at least that many.
pub fn stand_ins<T: Real>(compressor: &impl CompressKeys, seed: u64, piece: StandIns<'_, T>) -> Vec<T> {
    let StandIns { k, v, scale, index, piece, cx } = piece;
    let size = compressor.size(k.rows());
    let values = Values::Plain(v);
    let coreset = if size.rank >= k.rows() {
        Coreset::verbatim(k, values)
    } else {
        let stream = index.stream_key(seed).named("piece").with(piece);
        compressor.compress(k, values, size, scale, stream, cx)
    };
    let (keys, values) = (coreset.keys(), coreset.values());
    let rows = keys.iter_rows().zip(values.iter_rows());
    rows.flat_map(|(key, values)| key.iter().chain(&values[..values.len() - 1])).copied().collect()
}

/// Attends with the queries of `g` to such rows, those of several pieces one after another. A row whose denominator
/// cancels gets no weight in a merge: the keys for an exact row are on other processes.
pub fn attend_stand_ins<T: Real>(mut g: Group<'_, T>, numbers: &[T]) -> Result<RunInfo> {
    let (d, d_v) = (g.k.cols(), g.d_v());
    let width = d + d_v + 1;
    if !numbers.len().is_multiple_of(width) {
        return Err(Error::shape("stand-ins", format!("rows of {width} numbers"), numbers.len()));
    }
    if numbers.is_empty() || g.n_q() == 0 {
        return Ok(g.fill_empty());
    }
    let mut all = Coreset::empty(d, d_v);
    for row in MatRef::new(numbers, numbers.len() / width, width).iter_rows() {
        all.push(&row[..d], &row[d..d + d_v], row[d + d_v]);
    }
    let info = attend_coreset(&mut g, &all, Finish { clip: false, fallback: Fallback::Zero })?;
    Ok(RunInfo { rank: Some(all.len()), ..info })
}
