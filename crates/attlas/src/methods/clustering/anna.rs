//! ANNA: every query averages the values of the keys it collides with in hash tables.
//!
//! **Idea.** Approximate nearest neighbours as an attention primitive: a key counts when it is near the query, and
//! not otherwise. It is a separate model with near-neighbour semantics, not an approximation of softmax.
//!
//! **Math.** `rounds` tables of `hashes` p-stable functions $\lfloor(\langle w, x\rangle + b)/\mathrm{width}\rfloor$.
//! With $c_{ij}$ the number of tables in which $q_i$ and $k_j$ share a bucket, $n_i = \sum_j c_{ij}$,
//! $o_i = \sum_j (c_{ij}/n_i) v_j$ and the log-sum-exp is $\ln n_i$; a query that collides with no key gives 0 and −∞
//! or, with a causal mask, the output chosen by `fallback`. For a radius $r$ and a factor $c$ this satisfies the
//! paper's definition: with probability at least $1 - \eta$, $w_{ij} > 0$ only if $|q_i - k_j| \le cr$, and
//! $|q_i - k_j| \le r$ implies $w_{ij} \ge 1/((|N(q_i, cr)| - 1)\,\mathrm{rounds} + 1)$. With $p_1 = p(r)$,
//! $p_2 = p(cr)$ the collision probabilities of one function, the theory takes $\lceil 3 \ln n / \ln(1/p_2) \rceil$
//! functions and $\lceil p_1^{-\mathrm{hashes}} \ln n \rceil$ tables; `auto` takes these. Sub-quadratic cost needs
//! $\rho = \ln p_1 / \ln p_2 < 1/3$, about $c > \sqrt 3$. `weights = softmax` takes the softmax over the *set* of
//! colliding keys instead; `filter` drops keys farther than $cr$.
//!
//! **Reference.** liu2025 (ANNA); survey, appendix, which gives no definition: weights are uniform over collisions, not
//! softmax.
//!
//! **Cost.** $2 (n_q + n_k)\,\mathrm{rounds} \cdot \mathrm{hashes} \cdot d$ for the codes, then one addition of a row
//! per query and table, also when causal and when decoding. Scratch $O(n d_v)$, one table at a time. With `softmax` or
//! `filter`, every collision is visited.
//!
//! **Guarantees.** Equal vectors always collide. Strictly causal: a bucket is a running sum over positions. With
//! `softmax`, the error is at most the lost mass times the spread of the values. All are tested, the weight bound by
//! brute force.
//!
//! **When to use.** For models made for it (matching, induction); as an approximation of softmax attention it is crude.

use crate::engine::{Fallback, PerGroup, attend_subset, exact_group};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Accepted, Claims, Cost, Family, Method, Needs, RunInfo, Spec, Status, Support, Tunable};
use crate::workspace::Context;
use crate::{Error, Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::cluster::order_by;
use attlas_num::hash::stable::collision_probability;
use attlas_num::hash::{Lsh, PStable};
use attlas_num::kernels::{axpy, scale, sq_dist};
use attlas_num::par::*;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "anna",
    family: Family::Clustering,
    title: "ANNA: averages over hash collisions",
    reference: "liu2025",
    claims: Claims {
        decode: true,
        row_stochastic: false,
        deterministic: false,
        softmax: false,
        drops: true,
        exponent: 1.75,
        needs: Needs::Training,
        spread: Spread::Refused {
            reason: "a row that meets no key of its own piece falls back there, though it may meet some of another",
        },
        ..Claims::BASE
    },
    probes: &[
        &[("weights", "softmax"), ("hashes", "2"), ("fallback", "self_key")],
        &[("filter", "true"), ("radius", "2.5"), ("hashes", "2"), ("fallback", "sink_window")],
        &[("weights", "softmax"), ("filter", "true"), ("radius", "2.2"), ("rounds", "3")],
        &[("hashes", "0"), ("rounds", "2")],
    ],
    subsets: &[&[("weights", "softmax"), ("rounds", "3"), ("hashes", "2")]],
    tunable: &[Tunable::budget("rounds")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Weighting of the keys that a query collides with.
    pub enum Weights {
        /// By the number of tables in which they collide.
        Uniform = "uniform",
        /// By the softmax of their logits, each key once.
        Softmax = "softmax",
    }
}

crate::params! {
    /// Parameters of [`Anna`].
    pub struct Params {
        /// Hash tables; auto takes the number of the theory, at most 4096.
        rounds: Option<usize> = Some(8), in 1..=4096;
        /// Hash functions per table; with 0, every pair collides. Auto takes the number of the theory, at most 64.
        hashes: Option<usize> = Some(3), in 0..=64;
        /// Width of a bucket, in units of the queries and keys.
        width: f64 = 4.0, in 1e-9..=1e9;
        /// Distance up to which a key must count; used by auto and by the filter.
        radius: f64 = 1.0, in 1e-9..=1e9;
        /// Multiple of the radius beyond which no key should count; used by auto and by the filter.
        factor: f64 = 2.0, in 1.0..=1e6;
        /// Weighting of the keys that a query collides with.
        weights: Weights = Weights::Uniform;
        /// Drop keys farther than `factor · radius`.
        filter: bool = false;
        /// Output of a causal row that collides with no key.
        fallback: Fallback = Fallback::SelfKey;
        /// Seed of the hash functions.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(
            !p.near.is_none() && self.weights != Weights::Softmax,
            "weights = uniform counts collisions, which have no normaliser in common with the exact near keys; set \
             weights = softmax",
        )
        .and_unless(
            p.scale < 0.0 && self.weights == Weights::Softmax,
            "tables hold the keys nearest to a query, and a negative scale weighs the farthest: negate the queries and the \
             scale",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Anna::new(self, x.problem)
    }
}

/// Returns the functions per table and the number of tables in the theory, for `n` keys.
pub fn theory(n: usize, radius: f64, factor: f64, width: f64) -> (f64, f64) {
    let ln_n = (n.max(2) as f64).ln();
    let (near, far) = (collision_probability(radius, width), collision_probability(factor * radius, width));
    let hashes = (3.0 * ln_n / -far.ln()).ceil();
    (hashes, (near.powf(-hashes) * ln_n).ceil())
}

/// The plan: tables, functions and weighing.
#[derive(Clone, Debug)]
pub struct Anna {
    params: Params,
    rounds: usize,
    hashes: usize,
    functions: PerGroup<PStable<f64>>,
}

impl Anna {
    /// Creates a plan for the problem's number of keys.
    pub(crate) fn new(params: Params, p: &Problem) -> Result<Self> {
        let (hashes, _) = theory(p.n_k, params.radius, params.factor, params.width);
        let hashes = params.hashes.unwrap_or(hashes.clamp(0.0, 64.0) as usize);
        let near = collision_probability(params.radius, params.width);
        let tables = (near.powi(-(hashes as i32)) * (p.n_k.max(2) as f64).ln()).ceil();
        let rounds = params.rounds.unwrap_or(tables.clamp(1.0, 4096.0) as usize);
        let functions = PerGroup::draw(p, |index| {
            let key = index.stream_key(params.seed).named("anna");
            PStable::new(key, p.d, params.width, hashes, rounds)
                .ok_or_else(|| Error::param("width", params.width, "positive and finite"))
        })?;
        Ok(Self { params, rounds, hashes, functions })
    }

    /// True if every collision must be visited, not only the sums of buckets.
    fn lists(&self) -> bool {
        self.params.filter || self.params.weights == Weights::Softmax
    }

    /// Weights the keys of `met`, which may name a key several times; returns the log-sum-exp and the number of
    /// distances and logits computed.
    fn weigh<T: Real>(
        &self,
        q: &[T],
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        met: &mut Vec<usize>,
        tau: T,
        out: &mut [T],
    ) -> (T, u64) {
        if self.params.weights == Weights::Softmax {
            met.sort_unstable();
            met.dedup();
        }
        let mut scored = 0;
        if self.params.filter {
            let limit = (self.params.factor * self.params.radius).powi(2);
            scored += met.len();
            met.retain(|&j| sq_dist(q, k.row(j)).to_f64() <= limit);
        }
        if self.params.weights == Weights::Softmax {
            scored += met.len();
            let lse = attend_subset(q, k, v, met, tau, &mut vec![T::ZERO; met.len()], out);
            return (lse, scored as u64);
        }
        out.fill(T::ZERO);
        met.iter().for_each(|&j| axpy(T::ONE, v.row(j), out));
        (finish(met.len() as u64, out), scored as u64)
    }

    fn info(&self, visited: u64) -> RunInfo {
        let mut info = RunInfo::visited(visited);
        info.figures.insert("rounds", self.rounds as f64);
        info.figures.insert("hashes", self.hashes as f64);
        info
    }
}

/// Divides a sum of `n` rows by `n`; returns the log-sum-exp.
fn finish<T: Real>(n: u64, out: &mut [T]) -> T {
    if n == 0 {
        return T::NEG_INFINITY;
    }
    scale(T::from_f64(1.0 / n as f64), out);
    T::from_f64((n as f64).ln())
}

/// Tables whose keys are sorted together.
const BATCH: usize = 4;
/// Rows per task.
const ROWS: usize = 1024;

impl GroupPlan for Anna {
    fn cost(&self, p: &Problem) -> Cost {
        let (heads, groups) = ((p.batch * p.n_heads * p.n_q) as u64, (p.batch * p.n_kv_heads * p.n_k) as u64);
        let (tables, d_v) = (self.rounds as u64, p.d_v as u64);
        let codes = 2 * tables * (self.hashes * p.d) as u64;
        Cost {
            setup_flops: groups * (codes + tables * d_v),
            run_flops: heads * (codes + tables * d_v).max(1),
            bytes: 4 * tables * (heads + 2 * groups) * d_v,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if self.hashes == 0 && self.params.weights == Weights::Softmax && !self.params.filter {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let functions = self.functions.of(g.index).cast::<T>();
        let visited = if self.lists() {
            self.run_lists(&mut g, &functions)?
        } else {
            self.run_sums(&mut g, &functions)
        };
        let mut info = self.info(visited);
        if g.mask == Mask::Causal && self.params.fallback != Fallback::Zero {
            info.fallback_rows = self.fall_back(&mut g)?;
        }
        info.empty_rows = g.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64;
        Ok(info)
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(Box::new(Tables {
            plan: self.clone(),
            functions: self.functions.of(index).cast(),
            tables: vec![HashMap::default(); self.rounds],
            k: Vec::new(),
            v: Vec::new(),
            len: 0,
            d: p.d,
            d_v: p.d_v,
        }))
    }
}

impl Anna {
    /// Computes uniform weights from running sums over the buckets, one table at a time.
    fn run_sums<T: Real>(&self, g: &mut Group<'_, T>, functions: &PStable<T>) -> u64 {
        let (n_k, n_q, d_v, cx) = (g.n_k(), g.n_q(), g.d_v(), g.cx);
        let heads: Vec<MatRef<'_, T>> = (0..g.q.heads()).map(|h| g.q.head(h)).collect();
        let visible: Vec<usize> = (0..n_q).map(|i| g.visible(i)).collect();
        let mut sums = cx.scratch.take::<T>(n_k * d_v);
        let mut counts = cx.scratch.take_zeroed::<u64>(heads.len() * n_q);
        g.out.par_chunks_mut(ROWS * d_v).for_each(|out| out.fill(T::ZERO));
        let (k, v) = (g.k, g.v);
        let mut visited = 0;
        for first in (0..self.rounds).step_by(BATCH) {
            let batch = first..(first + BATCH).min(self.rounds);
            let tables: Vec<Table> = batch.into_par_iter().map(|u| Table::new(functions, k, u)).collect();
            for table in &tables {
                table.running_sums(v, &mut sums);
                for (h, q) in heads.iter().enumerate() {
                    let rows = h * n_q..(h + 1) * n_q;
                    visited += g.out[rows.start * d_v..rows.end * d_v]
                        .par_chunks_mut(ROWS * d_v)
                        .zip(counts[rows].par_chunks_mut(ROWS))
                        .enumerate()
                        .map(|(t, (out, counts))| {
                            let mut sums_read = 0;
                            let first = t * ROWS;
                            let codes = functions.codes(q.sub_rows(first..first + counts.len()), table.round);
                            for (((out, count), code), i) in
                                out.chunks_exact_mut(d_v).zip(counts).zip(codes).zip(first..)
                            {
                                let met = table.met(code, visible[i]);
                                *count += met.len() as u64;
                                if !met.is_empty() {
                                    sums_read += 1;
                                    axpy(T::ONE, &sums[(met.end - 1) * d_v..met.end * d_v], out);
                                }
                            }
                            sums_read
                        })
                        .sum::<u64>();
                }
            }
        }
        let rows = g.out.par_chunks_mut(ROWS * d_v).zip(g.lse.par_chunks_mut(ROWS));
        rows.zip(counts.par_chunks(ROWS)).for_each(|((out, lse), counts)| {
            for ((out, lse), &n) in out.chunks_exact_mut(d_v).zip(lse).zip(counts) {
                *lse = finish(n, out);
            }
        });
        visited
    }

    /// Computes softmax or filtered weights over the keys that collide in any table, row by row.
    fn run_lists<T: Real>(&self, g: &mut Group<'_, T>, functions: &PStable<T>) -> Result<u64> {
        let (k, v, tau) = (g.k, g.v, g.scale);
        let visible: Vec<usize> = (0..g.n_q()).map(|i| g.visible(i)).collect();
        let tables: Vec<Table> =
            (0..self.rounds).into_par_iter().map(|u| Table::new(functions, k, u)).collect();
        let visited = g.par_row_blocks(ROWS, |block| {
            let codes: Vec<Vec<u64>> = (0..self.rounds).map(|u| functions.codes(block.q, u)).collect();
            let (mut met, mut visited) = (Vec::new(), 0);
            for (r, (out, lse)) in block.out.chunks_exact_mut(v.cols()).zip(block.lse).enumerate() {
                met.clear();
                for (table, codes) in tables.iter().zip(&codes) {
                    let places = table.met(codes[r], visible[block.first + r]);
                    met.extend(table.order[places].iter().map(|&j| j as usize));
                }
                let scored;
                (*lse, scored) = self.weigh(block.q.row(r), k, v, &mut met, tau, out);
                visited += scored;
            }
            Ok(visited)
        })?;
        Ok(visited.into_iter().sum())
    }

    /// Applies the fallback to rows without a collision; returns the number of outputs written.
    fn fall_back<T: Real>(&self, g: &mut Group<'_, T>) -> Result<u64> {
        let (k, v, tau, fallback) = (g.k, g.v, g.scale, self.params.fallback);
        let visible: Vec<usize> = (0..g.n_q()).map(|i| g.visible(i)).collect();
        let rows = g.par_row_blocks(ROWS, |block| {
            let mut answered = 0;
            for (r, (out, lse)) in block.out.chunks_exact_mut(v.cols()).zip(block.lse).enumerate() {
                if *lse == T::NEG_INFINITY {
                    *lse = fallback.answer(block.q.row(r), k, v, visible[block.first + r], tau, out);
                    answered += u64::from(*lse != T::NEG_INFINITY);
                }
            }
            Ok(answered)
        })?;
        Ok(rows.into_iter().sum())
    }
}

/// Codes are fingerprints: they need no further hashing.
#[derive(Clone, Copy, Debug, Default)]
struct Fingerprint(u64);

impl Hasher for Fingerprint {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.0 = self.0.rotate_left(8) ^ u64::from(b));
    }
    fn write_u64(&mut self, x: u64) {
        self.0 = x;
    }
}

type ByCode<V> = HashMap<u64, V, BuildHasherDefault<Fingerprint>>;

/// Keys of one table, ordered by bucket, then by position.
struct Table {
    round: usize,
    order: Vec<u32>,
    buckets: ByCode<Range<u32>>,
    /// Start of every bucket in `order`, then the number of keys.
    starts: Vec<u32>,
}

impl Table {
    fn new<T: Real>(functions: &PStable<T>, k: MatRef<'_, T>, round: usize) -> Self {
        let codes = functions.codes(k, round);
        let order = order_by(&codes);
        let (mut starts, mut end) = (Vec::new(), 0);
        for bucket in order.chunk_by(|&a, &b| codes[a as usize] == codes[b as usize]) {
            starts.push(end);
            end += bucket.len() as u32;
        }
        starts.push(end);
        let buckets = starts.windows(2).map(|w| (codes[order[w[0] as usize] as usize], w[0]..w[1])).collect();
        Self { round, order, buckets, starts }
    }

    /// Returns the places of the keys below `visible` in the bucket of `code`.
    fn met(&self, code: u64, visible: usize) -> Range<usize> {
        let Some(bucket) = self.buckets.get(&code) else { return 0..0 };
        let (start, end) = (bucket.start as usize, bucket.end as usize);
        start..start + self.order[start..end].partition_point(|&j| (j as usize) < visible)
    }

    /// Writes, at every place, the sum of its bucket's values up to there.
    fn running_sums<T: Real>(&self, v: MatRef<'_, T>, sums: &mut [T]) {
        let d_v = v.cols();
        // Tasks take whole buckets, with about equally many keys.
        let (mut pieces, mut rest) = (Vec::new(), sums);
        let mut first = 0;
        for (b, &start) in self.starts.iter().enumerate() {
            let places = (start - self.starts[first]) as usize;
            if places >= ROWS || b + 1 == self.starts.len() {
                let (own, tail) = rest.split_at_mut(places * d_v);
                rest = tail;
                pieces.push((&self.starts[first..=b], own));
                first = b;
            }
        }
        pieces.into_par_iter().with_max_len(1).for_each(|(starts, mut out)| {
            let mut sum = vec![0.0; d_v];
            for bucket in starts.windows(2) {
                let keys = &self.order[bucket[0] as usize..bucket[1] as usize];
                let (own, tail) = out.split_at_mut(keys.len() * d_v);
                out = tail;
                // Double precision keeps long buckets accurate; the sum is rounded once, when stored.
                sum.fill(0.0);
                for (&j, out) in keys.iter().zip(own.chunks_exact_mut(d_v)) {
                    for ((s, &x), o) in sum.iter_mut().zip(v.row(j as usize)).zip(out) {
                        *s += x.to_f64();
                        *o = T::from_f64(*s);
                    }
                }
            }
        });
    }
}

/// A bucket of a stream.
#[derive(Clone, Debug, Default)]
struct Bucket {
    sum: Vec<f64>,
    count: u64,
    /// Positions, where lists are needed.
    members: Vec<u32>,
}

/// Decoding state: the tables, and keys and values only where they are read again.
#[derive(Debug)]
struct Tables<T> {
    plan: Anna,
    functions: PStable<T>,
    tables: Vec<ByCode<Bucket>>,
    k: Vec<T>,
    v: Vec<T>,
    len: usize,
    d: usize,
    d_v: usize,
}

impl<T: Real> Tables<T> {
    fn keeps_rows(&self) -> bool {
        self.plan.lists() || self.plan.params.fallback != Fallback::Zero
    }

    /// True if only the last token is kept: the fallback reads nothing else.
    fn keeps_last(&self) -> bool {
        !self.plan.lists() && self.plan.params.fallback == Fallback::SelfKey
    }
}

impl<T: Real> GroupStream<T> for Tables<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        let (functions, lists, first) = (&self.functions, self.plan.lists(), self.len);
        self.tables.par_iter_mut().enumerate().for_each(|(u, table)| {
            for ((code, v), j) in functions.codes(k, u).into_iter().zip(v.iter_rows()).zip(first..) {
                let bucket = table.entry(code).or_default();
                bucket.count += 1;
                if lists {
                    bucket.members.push(j as u32);
                } else {
                    bucket.sum.resize(v.len(), 0.0);
                    bucket.sum.iter_mut().zip(v).for_each(|(s, x)| *s += x.to_f64());
                }
            }
        });
        if self.keeps_last() && k.rows() > 0 {
            let last = k.rows() - 1;
            self.k = k.row(last).to_vec();
            self.v = v.row(last).to_vec();
        } else if self.keeps_rows() {
            k.iter_rows().for_each(|row| self.k.extend_from_slice(row));
            v.iter_rows().for_each(|row| self.v.extend_from_slice(row));
        }
        self.len += k.rows();
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        tau: T,
        out: &mut [T],
        lse: &mut [T],
        _: Context<'_>,
    ) -> Result<RunInfo> {
        let cached = self.k.len() / self.d;
        let (k, v) = (MatRef::new(&self.k, cached, self.d), MatRef::new(&self.v, cached, self.d_v));
        let codes: Vec<Vec<u64>> = (0..self.plan.rounds).map(|u| self.functions.codes(q, u)).collect();
        let mut info = self.plan.info(0);
        for (h, (out, lse)) in out.chunks_exact_mut(self.d_v).zip(lse).enumerate() {
            let buckets = self.tables.iter().zip(&codes).filter_map(|(table, codes)| table.get(&codes[h]));
            if self.plan.lists() {
                let mut met: Vec<usize> =
                    buckets.flat_map(|b| b.members.iter().map(|&j| j as usize)).collect();
                let scored;
                (*lse, scored) = self.plan.weigh(q.row(h), k, v, &mut met, tau, out);
                info.keys_visited += scored;
            } else {
                let (mut sum, mut n) = (vec![0.0; self.d_v], 0);
                for bucket in buckets {
                    info.keys_visited += 1;
                    n += bucket.count;
                    sum.iter_mut().zip(&bucket.sum).for_each(|(s, x)| *s += x);
                }
                out.iter_mut().zip(&sum).for_each(|(o, &s)| *o = T::from_f64(s));
                *lse = finish(n, out);
            }
            if *lse == T::NEG_INFINITY && self.plan.params.fallback != Fallback::Zero {
                *lse = self.plan.params.fallback.answer(q.row(h), k, v, cached, tau, out);
                info.fallback_rows += u64::from(*lse != T::NEG_INFINITY);
            }
            info.empty_rows += u64::from(*lse == T::NEG_INFINITY);
        }
        Ok(info)
    }

    fn state_bytes(&self) -> usize {
        let bucket = |b: &Bucket| 16 + 8 * b.sum.len() + 4 * b.members.len();
        let tables: usize = self.tables.iter().flat_map(HashMap::values).map(bucket).sum();
        tables + (self.k.len() + self.v.len()) * size_of::<T>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::testkit::{Case, assert_rows_close, check_method, reference, reference_masked, run_method};
    use attlas_num::rng::StreamKey;

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn a_negative_scale_is_refused_where_it_would_weigh_the_farthest_keys() {
        let p = Problem { scale: -0.5, ..Problem::new(1, 80, 5) };
        let options = Options::new().with("weights", "softmax");
        assert!(!METHOD.support(&p, &options).is_yes() && METHOD.plan(&p, &options).is_err());
        // Counts of collisions do not use the scale.
        assert!(METHOD.support(&p, &Options::new()).is_yes());
    }

    /// Number of tables in which each pair collides.
    fn meetings(case: &Case, options: &Options) -> Vec<Vec<usize>> {
        let p = &case.problem;
        let plan = Anna::new(Params::from_options(options).unwrap(), p).unwrap();
        let functions = plan.functions.of(GroupIndex { batch: 0, kv_head: 0 });
        let (q, k) = (MatRef::new(&case.q, p.n_q, p.d), MatRef::new(&case.k, p.n_k, p.d));
        let mut met = vec![vec![0; p.n_k]; p.n_q];
        for u in 0..plan.rounds {
            let (a, b) = (functions.codes(q, u), functions.codes(k, u));
            (0..p.n_q).for_each(|i| (0..p.n_k).for_each(|j| met[i][j] += usize::from(a[i] == b[j])));
        }
        met
    }

    /// A case whose outputs are the weights: the values are unit vectors.
    fn named_values(p: Problem, seed: u64) -> Case {
        let mut case = Case::gaussian(Problem { d_v: p.n_k, ..p }, seed);
        case.v.iter_mut().enumerate().for_each(|(i, v)| *v = f64::from(u8::from(i / p.n_k == i % p.n_k)));
        case
    }

    #[test]
    fn weights_are_the_shares_of_collisions() {
        for problem in [Problem::new(1, 80, 5), Problem::new(1, 80, 5).causal()] {
            let case = named_values(problem, 1);
            let options = Options::new().with("hashes", 2).with("width", 3.0).with("fallback", "zero");
            let met = meetings(&case, &options);
            let (o, lse) = run_method(&METHOD, &options, &case);
            for i in 0..80 {
                let last = if problem.mask == Mask::Causal { i + 1 } else { 80 };
                let n: usize = met[i][..last].iter().sum();
                assert!(n == 0 && lse[i] == f64::NEG_INFINITY || (lse[i] - (n as f64).ln()).abs() < 1e-14);
                for j in 0..80 {
                    let want = if n == 0 || j >= last { 0.0 } else { met[i][j] as f64 / n as f64 };
                    assert!((o[i * 80 + j] - want).abs() < 1e-14);
                }
            }
        }
    }

    #[test]
    fn the_softmax_is_over_the_set_of_keys_met() {
        let case = Case::gaussian(Problem::new(1, 80, 5).causal(), 2);
        let options = Options::new()
            .with("hashes", 2)
            .with("width", 3.0)
            .with("fallback", "zero")
            .with("weights", "softmax");
        let met = meetings(&case, &options);
        let (want, want_lse) = reference_masked(&case, |i, j| met[i][j] > 0);
        let (o, lse) = run_method(&METHOD, &options, &case);
        assert_rows_close(&o, &want, 1e-12, "outputs");
        assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
        // The lost mass bounds the error.
        let (exact, exact_lse) = reference(&case);
        let spread = 2.0 * case.v.iter().fold(0.0f64, |a, v| a.max(v.abs()));
        for i in 0..80 {
            let lost = 1.0 - (lse[i] - exact_lse[i]).exp();
            assert!((0..5).all(|c| (o[i * 5 + c] - exact[i * 5 + c]).abs() <= lost * spread + 1e-12));
        }
        let (o, _) = run_method(&METHOD, &options.clone().with("hashes", 0), &case);
        assert_rows_close(&o, &exact, 1e-12, "one bucket");
    }

    #[test]
    fn a_causal_row_without_a_collision_is_its_own_value() {
        let case = Case::gaussian(Problem { d_v: 3, ..Problem::new(1, 40, 5).causal() }, 6);
        let narrow = Options::new().with("hashes", 8).with("width", 0.01);
        assert_rows_close(&run_method(&METHOD, &narrow, &case).0, &case.v, 1e-15, "own values");
    }

    #[test]
    fn the_filter_drops_far_keys() {
        let case = named_values(Problem::new(1, 80, 3), 3);
        let options = Options::new().with("hashes", 1).with("filter", true).with("radius", 0.75);
        let met = meetings(&case, &options);
        let (o, _) = run_method(&METHOD, &options, &case);
        for i in 0..80 {
            let near = |j: usize| {
                (0..3).map(|c| (case.q[i * 3 + c] - case.k[j * 3 + c]).powi(2)).sum::<f64>() <= 1.5 * 1.5
            };
            let n: usize = (0..80).filter(|&j| near(j)).map(|j| met[i][j]).sum();
            for j in 0..80 {
                let want = if near(j) && n > 0 { met[i][j] as f64 / n as f64 } else { 0.0 };
                assert!((o[i * 80 + j] - want).abs() < 1e-14);
            }
        }
    }

    #[test]
    fn without_functions_every_row_is_the_mean_of_the_values() {
        let case = Case::gaussian(Problem::new(1, 50, 4), 4);
        let mean: Vec<f64> = (0..4).map(|c| case.v.iter().skip(c).step_by(4).sum::<f64>() / 50.0).collect();
        for rounds in [1usize, 7] {
            let options = Options::new().with("hashes", 0).with("rounds", rounds);
            let (o, lse) = run_method(&METHOD, &options, &case);
            assert_rows_close(&o, &mean.repeat(50), 1e-13, "mean");
            assert!(lse.iter().all(|l| (l - (50.0 * rounds as f64).ln()).abs() < 1e-13));
        }
    }

    #[test]
    fn a_permuted_copy_is_looked_up_exactly() {
        let p = Problem::new(1, 100, 6);
        let mut case = Case::gaussian(p, 5);
        case.k.iter_mut().for_each(|x| *x *= 100.0);
        let target = |i: usize| (i * 37 + 11) % 100;
        (0..100).for_each(|i| {
            let key = case.k[target(i) * 6..][..6].to_vec();
            case.q[i * 6..(i + 1) * 6].copy_from_slice(&key);
        });
        for rounds in [1usize, 8] {
            let options = Options::new().with("hashes", 8).with("rounds", rounds);
            let (o, _) = run_method(&METHOD, &options, &case);
            let want: Vec<f64> = (0..100).flat_map(|i| case.v[target(i) * 6..][..6].to_vec()).collect();
            assert_rows_close(&o, &want, 1e-15, "copies");
        }
    }

    #[test]
    fn near_keys_have_the_promised_weight_where_no_far_key_collides() {
        let (radius, factor, rounds) = (0.3, 4.0, 12usize);
        let options = Options::new().with("hashes", 6).with("rounds", rounds).with("width", 2.0);
        let mut checked = 0;
        for seed in 0..10 {
            let mut case = named_values(Problem::new(1, 60, 4), seed);
            // Well separated groups of five keys; queries lie on keys.
            case.k.iter_mut().enumerate().for_each(|(i, x)| {
                let (j, c) = (i / 4, i % 4);
                *x = 0.05 * *x + 40.0 * ((j / 5 * 7 + c * c * 3) % 13) as f64;
            });
            case.q.copy_from_slice(&case.k);
            let met = meetings(&case, &options);
            let (o, _) = run_method(&METHOD, &options, &case);
            let distance = |i: usize, j: usize| {
                (0..4).map(|c| (case.q[i * 4 + c] - case.k[j * 4 + c]).powi(2)).sum::<f64>().sqrt()
            };
            for i in 0..60 {
                let far_collides = (0..60).any(|j| distance(i, j) > factor * radius && met[i][j] > 0);
                let neighbours = (0..60).filter(|&j| distance(i, j) <= factor * radius).count();
                let bound = 1.0 / ((neighbours - 1) as f64 * rounds as f64 + 1.0);
                for j in (0..60).filter(|&j| !far_collides && distance(i, j) <= radius && met[i][j] > 0) {
                    assert!(o[i * 60 + j] >= bound, "{} < {bound}", o[i * 60 + j]);
                    checked += 1;
                }
                assert_eq!(met[i][i], rounds, "equal vectors always meet");
            }
        }
        assert!(checked > 1000, "{checked}");
    }

    #[test]
    fn a_pair_meets_as_often_as_its_distance_says() {
        for (distance, hashes, width) in [(1.0, 1, 1.0), (2.0, 2, 4.0), (0.5, 3, 1.0)] {
            let p = Problem { d_v: 1, ..Problem::new(1, 1, 3) };
            let case =
                Case { q: vec![0.3, -1.0, 2.0], k: vec![0.3 + distance, -1.0, 2.0], ..Case::gaussian(p, 1) };
            let options = Options::new().with("hashes", hashes).with("rounds", 4096).with("width", width);
            let (_, lse) = run_method(&METHOD, &options, &case);
            let p = collision_probability(distance, width).powi(hashes);
            let error = (p * (1.0 - p) / 4096.0).sqrt();
            assert!(
                (lse[0].exp() / 4096.0 - p).abs() <= 5.0 * error,
                "{} instead of {p}",
                lse[0].exp() / 4096.0
            );
        }
    }

    #[test]
    fn tokens_that_sum_to_zero_find_each_other() {
        // Match2: queries at the angle of x, keys at that of −x; 32 tokens of Z/37.
        let (n, m) = (32, 37);
        let p = Problem { d_v: 1, ..Problem::new(1, n, 2) };
        let (hashes, rounds, width, radius) = (8usize, 8usize, 0.5, 10.0);
        let options = Options::new().with("hashes", hashes).with("rounds", rounds).with("width", width);
        let mut wrong = 0;
        for seed in 0..20 {
            let mut rng = StreamKey::new(seed).rng();
            let x: Vec<usize> = (0..n).map(|_| rng.below(m)).collect();
            let point = |x: f64| {
                let angle = std::f64::consts::TAU * x / m as f64;
                [radius * angle.cos(), radius * angle.sin()]
            };
            let mut case = Case::gaussian(p, 0);
            case.q = x.iter().flat_map(|&x| point(x as f64)).collect();
            // −x and m − x give the same point, rounding included.
            case.k = x.iter().flat_map(|&x| point(((m - x) % m) as f64)).collect();
            case.v = vec![1.0; n];
            let (_, lse) = run_method(&METHOD, &options.clone().with("seed", seed), &case);
            for i in 0..n {
                let found = lse[i] > f64::NEG_INFINITY;
                let expected = (0..n).any(|j| (x[i] + x[j]).is_multiple_of(m));
                assert!(found || !expected, "a partner is never missed");
                wrong += usize::from(found && !expected);
            }
        }
        let bound = (20 * n * n * rounds) as f64
            * collision_probability(2.0 * radius * (std::f64::consts::PI / m as f64).sin(), width)
                .powi(hashes as i32);
        assert!(bound < 0.5 && wrong == 0, "{wrong} false matches, at most {bound} expected");
    }

    #[test]
    fn the_theory_asks_for_what_it_prints() {
        let (hashes, tables) = theory(1000, 1.0, 3.0, 4.0);
        let (p1, p2) = (collision_probability(1.0, 4.0), collision_probability(3.0, 4.0));
        assert_eq!(hashes, (3.0 * 1000f64.ln() / (1.0 / p2).ln()).ceil());
        assert_eq!(tables, (p1.powf(-hashes) * 1000f64.ln()).ceil());
        let p = Problem::new(1, 1000, 4);
        let auto = Params { hashes: None, rounds: None, factor: 3.0, ..Params::default() };
        let plan = Anna::new(auto, &p).unwrap();
        assert_eq!((plan.hashes as f64, plan.rounds as f64), (hashes, tables.min(4096.0)));
    }
}
