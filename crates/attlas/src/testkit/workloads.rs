//! Synthetic inputs with structure: what the figures of accuracy are stated on.

use super::Case;
use crate::Problem;
use attlas_num::rng::StreamKey;

impl Case {
    /// Queries, keys and values around 64 random centres each: $q = \mu_{c'} + \xi/2$, $k = \mu_c + \xi/2$,
    /// $v = \nu_c + \xi/2$ with $\mu, \nu, \xi$ standard normal and $c, c'$ uniform. With $n = 2048$ and $d = 64$,
    /// the 64 largest keys of a row hold 94 % of its mass.
    pub fn clustered(problem: Problem, seed: u64) -> Self {
        const CENTRES: usize = 64;
        let mut case = Self::gaussian(problem, seed);
        let p = &case.problem;
        let key = StreamKey::new(seed).named("clustered");
        for (b, kv) in (0..p.batch).flat_map(|b| (0..p.n_kv_heads).map(move |kv| (b, kv))) {
            let mut rng = key.with(b as u64).with(kv as u64).rng();
            let mut centres = |d: usize| (0..CENTRES * d).map(|_| rng.normal()).collect::<Vec<f64>>();
            let (mu, nu) = (centres(p.d), centres(p.d_v));
            let group = p.group_size();
            for row in 0..group * p.n_q {
                let start = ((b * p.n_heads + kv * group) * p.n_q + row) * p.d;
                around(&mut case.q[start..start + p.d], &mu, rng.below(CENTRES));
            }
            for row in 0..p.n_k {
                let (c, place) = (rng.below(CENTRES), (b * p.n_kv_heads + kv) * p.n_k + row);
                around(&mut case.k[place * p.d..(place + 1) * p.d], &mu, c);
                around(&mut case.v[place * p.d_v..(place + 1) * p.d_v], &nu, c);
            }
        }
        case
    }

    /// Standard normal inputs, except that the first four keys lie along a direction $u$ that every query has
    /// $\sqrt d$ of: $q \mathrel{+}= \sqrt d\,u$, $k_j = \xi/10 + \sqrt d\,u$, and their values are a tenth.
    pub fn with_heavy_sinks(problem: Problem, seed: u64) -> Self {
        let mut case = Self::gaussian(problem, seed);
        let p = &case.problem;
        let mut rng = StreamKey::new(seed).named("sinks").rng();
        let mut u: Vec<f64> = (0..p.d).map(|_| rng.normal()).collect();
        let length = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        u.iter_mut().for_each(|x| *x *= (p.d as f64).sqrt() / length);
        case.q.chunks_exact_mut(p.d).for_each(|q| q.iter_mut().zip(&u).for_each(|(q, u)| *q += u));
        for head in case.k.chunks_exact_mut((p.n_k * p.d).max(1)) {
            for k in head.chunks_exact_mut(p.d).take(4) {
                k.iter_mut().zip(&u).for_each(|(k, u)| *k = 0.1 * *k + u);
            }
        }
        for head in case.v.chunks_exact_mut((p.n_k * p.d_v).max(1)) {
            head.iter_mut().take(4 * p.d_v).for_each(|v| *v *= 0.1);
        }
        case
    }
}

fn around(row: &mut [f64], centres: &[f64], c: usize) {
    let d = row.len();
    row.iter_mut().zip(&centres[c * d..(c + 1) * d]).for_each(|(x, m)| *x = m + 0.5 * *x);
}
