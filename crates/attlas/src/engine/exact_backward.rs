//! The gradient of exact attention for one group, over threads.

use crate::gradient::GroupBackward;
use attlas_num::Real;
use attlas_num::kernels::AttendBackward;
use rayon::prelude::*;
use std::ops::Range;

/// Parts that a call is cut into, at most, over all of its groups. Every part sums gradients of keys and values of its own,
/// added in order at the end: a fixed number, so that threads cannot change a bit and memory stays proportional to the
/// number of tokens.
const PARTS: usize = 16;
/// Rows of a part, at least.
const ROWS: usize = 96;

/// Some rows of one head.
#[derive(Clone)]
struct Rows {
    head: usize,
    rows: Range<usize>,
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
    let run = |units: &[Rows], dq: &mut [T], dk: &mut [T], dv: &mut [T]| {
        let mut dq = dq;
        for Rows { head, rows } in units.iter().cloned() {
            let (own, rest) = std::mem::take(&mut dq).split_at_mut(rows.len() * d);
            dq = rest;
            let of_head = head * n_q + rows.start..head * n_q + rows.end;
            let job = AttendBackward {
                q: g.q.head(head).sub_rows(rows.clone()),
                k: g.k,
                v: g.v,
                d_out: g.d_o.head(head).sub_rows(rows.clone()),
                lse: &g.lse[of_head.clone()],
                delta: &g.delta[of_head],
                scale: g.scale,
                band: band.from_row(rows.start),
                isa: g.cx.schedule.isa,
            };
            job.run(g.cx.scratch, own, dk, dv);
        }
    };
    if parts <= 1 {
        return run(&units, g.dq, g.dk, g.dv);
    }
    let (keys, values) = (n_k * d, n_k * d_v);
    let mut own = g.cx.scratch.take_zeroed::<T>(parts * (keys + values));
    let mut work = Vec::with_capacity(parts);
    let (mut dq, mut sums) = (g.dq, &mut own[..]);
    for part in 0..parts {
        let units = &units[units.len() * part / parts..units.len() * (part + 1) / parts];
        let rows: usize = units.iter().map(|u| u.rows.len()).sum();
        let (head, tail) = std::mem::take(&mut dq).split_at_mut(rows * d);
        let (own, rest) = std::mem::take(&mut sums).split_at_mut(keys + values);
        (dq, sums) = (tail, rest);
        work.push((units, head, own));
    }
    // Under a causal mask the last parts are the long ones.
    work.into_par_iter().rev().with_max_len(1).for_each(|(units, dq, own)| {
        let (dk, dv) = own.split_at_mut(keys);
        run(units, dq, dk, dv);
    });
    for part in own.chunks_exact(keys + values) {
        let (dk, dv) = part.split_at(keys);
        g.dk.iter_mut().zip(dk).for_each(|(sum, &x)| *sum += x);
        g.dv.iter_mut().zip(dv).for_each(|(sum, &x)| *sum += x);
    }
}
