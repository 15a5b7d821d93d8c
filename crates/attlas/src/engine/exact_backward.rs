//! The gradient of exact attention for one group, in parallel.

use crate::gradient::GroupBackward;
use attlas_num::Real;
use attlas_num::kernels::AttendBackward;
use rayon::prelude::*;
use std::ops::Range;

/// Maximum number of parts of a call, over all of its groups. Every part sums its own gradients of keys and values,
/// which are added in order at the end. The number is fixed, so threads cannot change a bit and memory stays
/// proportional to the number of tokens.
const PARTS: usize = 16;
/// Minimum rows of a part.
const ROWS: usize = 96;
/// Keys of one task when the sums of the parts are added.
const KEYS: usize = 256;

/// Some rows of one head.
#[derive(Clone)]
struct Rows {
    head: usize,
    rows: Range<usize>,
}

/// Consecutive units of work, with the gradients of their queries and of the first `keys` keys, which are all that they
/// see.
struct Part<'a, T> {
    units: &'a [Rows],
    keys: usize,
    dq: &'a mut [T],
    dk: &'a mut [T],
    dv: &'a mut [T],
}

/// Writes the gradients of a group of exact attention, from its outputs' log-sum-exp: see [`AttendBackward`].
pub fn exact_backward<T: Real>(g: GroupBackward<'_, T>) {
    let (n_q, heads, d, d_v) = (g.n_q(), g.q.heads(), g.k.cols(), g.v.cols());
    let (n_k, band) = (g.k.rows(), g.band());
    let wanted = PARTS.div_ceil(g.cx.groups.max(1));
    let cuts = wanted.div_ceil(heads).min(n_q.div_ceil(ROWS)).max(1);
    let units: Vec<Rows> = (0..heads)
        .flat_map(|head| (0..cuts).map(move |c| Rows { head, rows: n_q * c / cuts..n_q * (c + 1) / cuts }))
        .collect();
    let parts = wanted.min(units.len());
    let run = |part: &mut Part<'_, T>| {
        part.dk.fill(T::ZERO);
        part.dv.fill(T::ZERO);
        let mut dq = &mut *part.dq;
        for Rows { head, rows } in part.units.iter().cloned() {
            let of_head = head * n_q + rows.start..head * n_q + rows.end;
            let job = AttendBackward {
                q: g.q.head(head).sub_rows(rows.clone()),
                k: g.k.sub_rows(0..part.keys),
                v: g.v.sub_rows(0..part.keys),
                d_out: g.d_o.head(head).sub_rows(rows.clone()),
                lse: &g.lse[of_head.clone()],
                delta: &g.delta[of_head],
                scale: g.scale,
                band: band.from_row(rows.start),
                isa: g.cx.schedule.isa,
            };
            let (own, rest) = dq.split_at_mut(rows.len() * d);
            dq = rest;
            job.run(g.cx.scratch, own, part.dk, part.dv);
        }
    };
    if parts <= 1 {
        return run(&mut Part { units: &units, keys: n_k, dq: g.dq, dk: g.dk, dv: g.dv });
    }
    let cut = |part: usize| &units[units.len() * part / parts..units.len() * (part + 1) / parts];
    let seen = |part: usize| cut(part).iter().map(|u| band.range(u.rows.end - 1, n_k).end).max().unwrap_or(0);
    let mut own = g.cx.scratch.take::<T>((0..parts).map(|part| seen(part) * (d + d_v)).sum());
    let mut work = Vec::with_capacity(parts);
    let (mut dq, mut sums) = (g.dq, &mut own[..]);
    for part in 0..parts {
        let (units, keys) = (cut(part), seen(part));
        let rows: usize = units.iter().map(|u| u.rows.len()).sum();
        let (head, tail) = std::mem::take(&mut dq).split_at_mut(rows * d);
        let (dk, rest) = std::mem::take(&mut sums).split_at_mut(keys * d);
        let (dv, rest) = rest.split_at_mut(keys * d_v);
        (dq, sums) = (tail, rest);
        work.push(Part { units, keys, dq: head, dk, dv });
    }
    // Under a causal mask the last parts take longest.
    work.par_iter_mut().rev().with_max_len(1).for_each(run);
    let keys = g.dk.par_chunks_mut(KEYS * d).zip(g.dv.par_chunks_mut(KEYS * d_v)).enumerate();
    keys.for_each(|(chunk, (dk, dv))| {
        for part in &work {
            let seen = chunk * KEYS..part.keys.min((chunk + 1) * KEYS).max(chunk * KEYS);
            for (sum, own, width) in [(&mut *dk, &*part.dk, d), (&mut *dv, &*part.dv, d_v)] {
                let own = own.get(seen.start * width..seen.end * width).unwrap_or(&[]);
                sum.iter_mut().zip(own).for_each(|(sum, &x)| *sum += x);
            }
        }
    });
}
