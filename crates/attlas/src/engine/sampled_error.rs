//! The error of a run on sampled rows, for which exact outputs are computed.

use crate::group::Group;
use crate::{Real, RunInfo};
use attlas_num::MatRef;
use attlas_num::kernels::{Attend, Band, Precision};
use attlas_num::par::*;

/// Adds the figure `error_estimate` to `info`: the relative Frobenius error of the outputs in `g.out` on `tokens` rows
/// of every head, one in each of `tokens` equal stretches of the sequence.
pub fn add_sampled_error<T: Real>(g: &Group<'_, T>, tokens: usize, info: &mut RunInfo) {
    let (n_q, d, d_v, heads) = (g.n_q(), g.k.cols(), g.d_v(), g.q.heads());
    let tokens = tokens.min(n_q);
    if tokens == 0 || heads == 0 {
        return;
    }
    let squares = |t: usize| {
        // The golden ratio spreads the positions within the stretches.
        let place = (t as f64 * 0.618_033_988_749_894_9).fract();
        let (from, to) = (t * n_q / tokens, (t + 1) * n_q / tokens);
        let i = from + ((to - from) as f64 * place) as usize;
        let seen = g.visible(i);
        let (mut o, mut lse) = (vec![T::ZERO; heads * d_v], vec![T::ZERO; heads]);
        let mut queries = Vec::with_capacity(heads * d);
        (0..heads).for_each(|h| queries.extend_from_slice(g.q.head(h).row(i)));
        // Every key is read once for all heads.
        let job = Attend {
            q: MatRef::new(&queries, heads, d),
            k: g.k.sub_rows(0..seen),
            v: g.v.sub_rows(0..seen),
            scale: g.scale,
            bias: None,
            band: Band::ALL,
            tile_k: 0,
            isa: g.cx.schedule.isa,
            precision: Precision::Full,
            decode: true,
            softcap: None,
        };
        job.run(g.cx.scratch, &mut o, &mut lse);
        let (mut gap, mut size) = (0.0, 0.0);
        for (h, o) in o.chunks_exact(d_v.max(1)).enumerate() {
            for (x, y) in g.out[(h * n_q + i) * d_v..][..d_v].iter().zip(o) {
                gap += (x.to_f64() - y.to_f64()).powi(2);
                size += y.to_f64().powi(2);
            }
        }
        (gap, size)
    };
    let squares: Vec<(f64, f64)> = (0..tokens).into_par_iter().map(squares).collect();
    let (gap, size) = squares.iter().fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
    if size > 0.0 {
        info.figures.insert("error_estimate", (gap / size).sqrt());
    }
}
