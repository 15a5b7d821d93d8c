//! Loki: keys ranked by a few principal components, exact attention over the best ones.
//!
//! **Idea.** Keys of a head lie near a subspace that a short calibration finds. Score all keys with the first `rank`
//! coordinates in its basis, keep the best, and attend to these with all coordinates.
//!
//! **Math.** Calibration: eigenvectors $P$ of the covariance of the keys of each key head, descending. For a query,
//! $\hat q = P^\top q$ and $a_j = \langle \hat q_{:r}, (P^\top k_j)_{:r} \rangle$; the chosen set holds the $k$ largest $a_j$ (ties to the
//! smaller index); softmax attention over it. Ranking needs no
//! softmax and no values, and the mean is never subtracted: it shifts all $a_j$ of a query equally. With
//! `basis = qk_optimal`, the default, the ranking uses $\langle A_q^\top q, A_k^\top k \rangle$ with
//! $U S W^\top = R_q^{1/2} \Sigma_k^{1/2}$, $A_q = R_q^{-1/2} U_r S_r^{1/2}$, $A_k = \Sigma_k^{-1/2} W_r S_r^{1/2}$:
//! the bilinear form of rank $r$ with the least expected squared error of scores, for queries with second moment $R_q$
//! independent of keys with covariance $\Sigma_k$; key PCA is the case $R_q = I$.
//!
//! **Reference.** singhania2024. The survey's softmax and values over approximate scores do not occur; selection takes
//! linear time; the cost at a fixed fraction of keys stays quadratic. The calibration's keys decide if $P$ is fitted
//! before or after rotary embedding; it is always applied to the keys and queries that attention sees. The authors rank
//! by `pca`, which misses keys with a large product with all queries, such as attention sinks: over 63 heads of
//! SmolLM2-135M (2048 tokens, a quarter of the keys kept, calibrated on another text) the mean error is 0.319 with
//! `pca` and 0.071 with `qk_optimal`. A fractional `rank` in the authors' code counts one dimension less than
//! `variance` here.
//!
//! **Cost.** Per query $2d^2 + 2 n r + O(n) + 2k(d + d_v)$ when decoding; the rows of a prompt compute all $2n(d + d_v)$
//! products in dense tiles and hide keys that were not chosen, which is faster than gathering the chosen ones. Decoding
//! stores $KP$ in two arrays, the $r$ ranked columns and the rest, so that ranking reads $n r$ numbers and the rest of
//! a key is read only if it is kept; memory is that of the cache itself, plus $r$ numbers per token with `qk_optimal`.
//!
//! **Guarantees.** $|o - \hat o|_c \le (1 - p_S)\,\mathrm{range}_c$ with the captured mass $p_S = e^{\hat\ell - \ell}$.
//! $|q^\top k - a| \le \|(I - P_rP_r^\top) q\|\,\|(I - P_rP_r^\top) k\|$. With `rank` of $d$, or keys in the span of the first $r$
//! eigenvectors, the set is that of exact top-k. Exact when all keys are kept.
//!
//! **When to use.** Decoding with peaked heads. It fails on flat attention: a quarter of the keys of an unstructured
//! head holds little more than half of its mass. Prefill gains little.

mod decode;
mod learn;

pub use learn::Calibrator;

use crate::engine::{attend_subset, exact_group, exact_rows};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream, RowBlock};
use crate::method::{
    Accepted, Budget, Calibration, Claims, Cost, Family, Law, Learn, Method, Needs, RunInfo, Spec, Status,
    Tunable,
};
use crate::workspace::Context;
use crate::{Error, Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::Mat;
use attlas_num::cluster::{Cut, select_top};
use attlas_num::kernels::{self, Band, Op};
use attlas_num::linalg::{self, variance_rank};
use attlas_num::par::*;
use decode::Split;
use learn::calibrate;
use std::ops::Range;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "loki",
    family: Family::LowRank,
    title: "Loki: keys ranked in a calibrated low-dimensional basis",
    reference: "singhania2024",
    claims: Claims {
        decode: true,
        exact_at: &[("keys", Budget::NumKeys)],
        drops: true,
        needs: Needs::Calibration,
        except: &[(Law::HeadsAlone, "group_max chooses keys for all heads of a group together")],
        spread: Spread::RANKS_KEYS,
        ..Claims::BASE
    },
    probes: &[
        &[("min_len", "1")],
        &[("min_len", "1"), ("keys", "9"), ("rank", "3")],
        &[("min_len", "20"), ("fraction", "0.1"), ("variance", "0.7"), ("group_select", "group_max")],
        &[("min_len", "1"), ("basis", "pca"), ("rank", "2")],
    ],
    subsets: &[
        &[("rank", "1"), ("keys", "6"), ("min_len", "0")],
        &[("keys", "6"), ("min_len", "0"), ("group_select", "group_max"), ("basis", "qk_optimal")],
    ],
    exact_below: Some("min_len"),
    tunable: &[Tunable::budget("keys")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Heads that choose keys together.
    pub enum GroupSelect {
        /// Every query head separately.
        PerHead = "per_head",
        /// All heads of a group together, by the largest score over heads.
        GroupMax = "group_max",
    }
}

crate::choices! {
    /// Basis that ranks keys.
    pub enum Basis {
        /// Principal components of the keys.
        Pca = "pca",
        /// The best bilinear form for the queries' second moment and the keys' covariance.
        QkOptimal = "qk_optimal",
    }
}

crate::params! {
    /// Parameters of [`Loki`].
    pub struct Params {
        /// Coordinates that rank keys, at most the width; auto takes a quarter of the width, or the number that
        /// `variance` needs.
        rank: Option<usize> = None, in 1..=1 << 20;
        /// Share of the keys' variance that the ranking coordinates must hold; their number is the largest over key
        /// heads. Not together with `rank`.
        variance: Option<f64> = None, in 0.0..=1.0;
        /// Keys kept for each query; auto keeps `fraction` of the visible ones.
        keys: Option<usize> = None, in 1..=1 << 30;
        /// Share of the visible keys that is kept, rounded up.
        fraction: f64 = 0.25, in 0.0..=1.0;
        /// Heads that choose keys together: per_head for none, or group_max for a group of heads.
        group_select: GroupSelect = GroupSelect::PerHead;
        /// Basis that ranks keys: pca of the keys, or qk_optimal, which also uses the queries.
        basis: Basis = Basis::QkOptimal;
        /// Rows that see fewer keys than this attend to all of them.
        min_len: usize = 64, in 0..=1 << 30;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;
    const CALIBRATE: Option<Learn<Self>> = Some(calibrate);

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Loki::new(x.problem, self, x.calibration.ok_or_else(|| wrong("a calibration", "none"))?)
    }
}

fn wrong(expected: impl ToString, found: impl ToString) -> Error {
    Error::Calibration { method: METHOD.id.into(), expected: expected.to_string(), found: found.to_string() }
}

/// The plan: parameters, the number of ranking coordinates and the bases.
#[derive(Clone, Debug)]
pub struct Loki {
    params: Params,
    rank: usize,
    bases: Vec<HeadBasis>,
}

/// Ranking basis of one key head.
#[derive(Clone, Debug)]
struct HeadBasis {
    /// Eigenvectors as columns, `d × d`.
    rotation: Mat<f64>,
    /// Ranking coordinates of queries and keys, `d × rank`.
    a_q: Mat<f64>,
    a_k: Mat<f64>,
}

/// Rows of queries that a task ranks together, and keys that they attend to at a time.
const BLOCK_ROWS: usize = 48;
const TILE_KEYS: usize = 512;

/// Keys that a task ranks; fixed, so that results do not depend on the number of threads.
const RANK_PIECE: usize = 4096;

/// Keys that a task scans for non-finite values.
const FINITE_PIECE: usize = 2048;

impl Loki {
    /// Creates a plan with the bases of `calibration`.
    pub fn new(p: &Problem, params: Params, calibration: &Calibration) -> Result<Self> {
        params.validate()?;
        if let (Some(rank), Some(_)) = (params.rank, params.variance) {
            return Err(Error::param("rank", rank, "auto where variance is set"));
        }
        let read = |name: &str, g: usize, rows: usize| {
            let m = calibration.matrix(&format!("{name}.{g}"))?;
            let fits = m.rows() == rows && m.cols() == p.d && m.data().iter().all(|x| x.is_finite());
            let expected = || format!("a finite {rows} × {} matrix {name}.{g}", p.d);
            if fits { Ok(m) } else { Err(wrong(expected(), format!("{} × {}", m.rows(), m.cols()))) }
        };
        let rank = match (params.rank, params.variance) {
            (Some(rank), _) => rank.min(p.d),
            (None, None) => (p.d / 4).max(1),
            (None, Some(share)) => {
                let of_head = |g| {
                    let deviations: Vec<f64> =
                        read("lambda", g, 1)?.data().iter().map(|x| x.sqrt()).collect();
                    Ok(variance_rank(&deviations, share).max(1))
                };
                (0..p.n_kv_heads).map(of_head).collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or(1)
            }
        };
        let leading = |m: Mat<f64>| Mat::from_fn(p.d, rank, |i, j| m[(i, j)]);
        let bases = (0..p.n_kv_heads)
            .map(|g| {
                let rotation = read("basis", g, p.d)?;
                let (a_q, a_k) = match params.basis {
                    Basis::Pca => (leading(rotation.clone()), leading(rotation.clone())),
                    Basis::QkOptimal => (leading(read("a_q", g, p.d)?), leading(read("a_k", g, p.d)?)),
                };
                Ok(HeadBasis { rotation, a_q, a_k })
            })
            .collect::<Result<_>>()?;
        Ok(Self { params, rank, bases })
    }

    /// Returns the number of coordinates that rank keys.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the maps of queries and of keys to the ranking coordinates of one key head, `d × rank`.
    pub fn maps(&self, kv_head: usize) -> [&Mat<f64>; 2] {
        let basis = &self.bases[kv_head];
        [&basis.a_q, &basis.a_k]
    }

    /// Returns the number of keys that a row with `n` visible ones keeps by rank.
    fn budget(&self, n: usize) -> usize {
        let share = || ((self.params.fraction * n as f64).ceil() as usize).max(1);
        self.params.keys.unwrap_or_else(share).min(n)
    }

    /// True if a row with `n` visible keys attends to all of them.
    fn keeps_all(&self, n: usize) -> bool {
        n < self.params.min_len || self.budget(n) >= n
    }

    /// Writes the keys chosen by `scores`, in increasing order.
    fn choose<T: Real>(&self, scores: &[T], chosen: &mut Vec<usize>) {
        let n = scores.len();
        select_top(scores, if self.keeps_all(n) { n } else { self.budget(n) }, chosen);
    }

    /// Returns the heads whose scores decide for head `h`.
    fn voters(&self, h: usize, heads: usize) -> Range<usize> {
        match self.params.group_select {
            GroupSelect::PerHead => h..h + 1,
            GroupSelect::GroupMax => 0..heads,
        }
    }

    fn run_rows<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let (q, k, v, scale, cx) = (g.q, g.k, g.v, g.scale, g.cx);
        let (n, d_v, r) = (k.rows(), v.cols(), self.rank);
        let basis = &self.bases[g.index.kv_head];
        let (a_q, a_k) = (basis.a_q.cast::<T>(), basis.a_k.cast::<T>());
        let mut reduced = cx.scratch.take::<T>(n * r);
        reduced.par_chunks_mut(RANK_PIECE * r).with_max_len(1).enumerate().for_each(|(piece, out)| {
            let rows = k.sub_rows(piece * RANK_PIECE..piece * RANK_PIECE + out.len() / r);
            linalg::gemm(T::ONE, linalg::Op::N(rows), linalg::Op::N(a_k.as_ref()), out, r, false);
        });
        let reduced = MatRef::new(&reduced, n, r);
        let visible: Vec<usize> = (0..g.n_q()).map(|i| g.visible(i)).collect();
        let (heads, finite) = (q.heads(), finite_rows(v));
        let kept = g.par_row_blocks(BLOCK_ROWS, |mut block| {
            let rows = block.lse.len();
            let most = visible[block.first..block.first + rows].iter().copied().max().unwrap_or(0);
            let mut q_r = cx.scratch.take::<T>(rows * r);
            let mut scores = cx.scratch.take::<T>(rows * most);
            let mut weights = cx.scratch.take::<T>(most);
            let voters = self.voters(block.head, heads);
            let mut other = cx.scratch.take::<T>(if voters.len() > 1 { rows * most } else { 0 });
            let product = |a: Op<MatRef<'_, T>>, b: Op<MatRef<'_, T>>, c: &mut [T], width: usize| {
                kernels::gemm(cx.schedule.isa, T::ONE, a, b, T::ZERO, c, width, cx.scratch);
            };
            for (turn, h) in voters.enumerate() {
                let q = q.head(h).sub_rows(block.first..block.first + rows);
                product(Op::N(q), Op::N(a_q.as_ref()), &mut q_r, r);
                let scored = if turn == 0 { &mut scores } else { &mut other };
                product(Op::N(MatRef::new(&q_r, rows, r)), Op::T(reduced.sub_rows(0..most)), scored, most);
                if turn > 0 {
                    scores.iter_mut().zip(other.iter()).for_each(|(a, &b)| *a = larger(*a, b));
                }
            }
            // Zero times a non-finite value is not zero: rows that see one are computed separately.
            let together = |n: usize| n <= finite && !self.keeps_all(n);
            let ranked: Vec<Ranked<'_, T>> = (0..rows)
                .map(|i| {
                    let scores = &scores[i * most..i * most + visible[block.first + i]];
                    let cut = together(scores.len()).then(|| Cut::largest(scores, self.budget(scores.len())));
                    Ranked { scores, cut }
                })
                .collect();
            let mut kept = self.attend_together(&mut block, &ranked, k, v, scale, cx);
            let mut chosen = Vec::new();
            for (i, (out, lse)) in block.out.chunks_exact_mut(d_v).zip(block.lse.iter_mut()).enumerate() {
                let scores = ranked[i].scores;
                let n = scores.len();
                if self.keeps_all(n) {
                    let (k, v) = (k.sub_rows(0..n), v.sub_rows(0..n));
                    let lse = std::slice::from_mut(lse);
                    exact_rows(block.q.sub_rows(i..i + 1), k, v, None, scale, Band::ALL, cx, out, lse);
                    kept += n;
                } else if !together(n) {
                    self.choose(scores, &mut chosen);
                    *lse = attend_subset(block.q.row(i), k, v, &chosen, scale, &mut weights, out);
                    kept += chosen.len();
                }
            }
            Ok(kept as u64)
        })?;
        let empty = visible.iter().filter(|&&n| n == 0).count() * heads;
        let rows = (g.n_q() * heads).max(1) as f64;
        let mean = kept.into_iter().sum::<u64>() as f64 / rows;
        Ok(RunInfo {
            rank: Some(r),
            empty_rows: empty as u64,
            figures: [("kept_keys", mean)].into(),
            // Every voter ranks every key, and the tiles compute every logit.
            ..RunInfo::visited(g.visible_pairs() * (1 + self.voters(0, heads).len() as u64))
        })
    }
}

/// Scores of one row for the keys it sees, and its cut, unless the row is computed separately.
struct Ranked<'a, T> {
    scores: &'a [T],
    cut: Option<Cut>,
}

impl Loki {
    /// Attends with the rows that have a cut, over tiles of keys with unchosen keys hidden: more products than for the
    /// chosen keys alone, but dense. Rows without a cut become zeros. Returns the number of keys chosen.
    fn attend_together<T: Real>(
        &self,
        block: &mut RowBlock<'_, T>,
        ranked: &[Ranked<'_, T>],
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        scale: T,
        cx: Context<'_>,
    ) -> usize {
        let (rows, d_v) = (ranked.len(), v.cols());
        let isa = cx.schedule.isa;
        let own = ranked.iter().filter(|r| r.cut.is_some());
        let width = own.map(|r| r.scores.len()).max().unwrap_or(0);
        let mut logits = cx.scratch.take::<T>(rows * TILE_KEYS.min(width));
        let (mut top, mut sum) = (vec![T::NEG_INFINITY; rows], vec![T::ZERO; rows]);
        let mut kept = 0;
        block.out.fill(T::ZERO);
        for start in (0..width).step_by(TILE_KEYS) {
            let len = TILE_KEYS.min(width - start);
            let logits = &mut logits[..rows * len];
            let (k, v) = (k.sub_rows(start..start + len), v.sub_rows(start..start + len));
            kernels::gemm(isa, scale, Op::N(block.q), Op::T(k), T::ZERO, logits, len, cx.scratch);
            for (i, (row, ranked)) in logits.chunks_exact_mut(len).zip(ranked).enumerate() {
                let n = ranked.scores.len();
                let (Some(cut), true) = (&ranked.cut, start < n) else {
                    row.fill(T::ZERO);
                    continue;
                };
                let (seen, hidden) = row.split_at_mut(len.min(n - start));
                hidden.fill(T::NEG_INFINITY);
                kept += seen.len();
                kept -= cut.hide_others(&ranked.scores[start..][..seen.len()], start, seen);
                let out = &mut block.out[i * d_v..(i + 1) * d_v];
                sum[i] = add_weights(row, &mut top[i], sum[i], out);
            }
            let weights = Op::N(MatRef::new(&*logits, rows, len));
            kernels::gemm(isa, T::ONE, weights, Op::N(v), T::ONE, block.out, d_v, cx.scratch);
        }
        for (i, out) in block.out.chunks_exact_mut(d_v).enumerate() {
            let seen = sum[i] != T::ZERO;
            block.lse[i] = if seen { top[i] + sum[i].ln() } else { T::NEG_INFINITY };
            if seen {
                kernels::scale(T::ONE / sum[i], out);
            }
        }
        kept
    }
}

/// Turns logits into weights relative to the largest logit so far, and rescales the sums in `out` to it. Returns the
/// sum of all weights so far.
fn add_weights<T: Real>(row: &mut [T], top: &mut T, mut sum: T, out: &mut [T]) -> T {
    let largest = kernels::max(row);
    if largest > *top {
        if *top > T::NEG_INFINITY {
            let factor = (*top - largest).exp();
            kernels::scale(factor, out);
            sum *= factor;
        }
        *top = largest;
    }
    // Only −∞ and NaN so far: −∞ has no weight, NaN makes the row NaN.
    let shift = if *top == T::NEG_INFINITY { T::ZERO } else { *top };
    sum + kernels::exp_sum(row, shift)
}

/// Counts the leading rows with finite entries only.
fn finite_rows<T: Real>(v: MatRef<'_, T>) -> usize {
    let pieces: Vec<usize> = (0..v.rows().div_ceil(FINITE_PIECE))
        .into_par_iter()
        .with_max_len(1)
        .map(|p| {
            let rows = v.sub_rows(p * FINITE_PIECE..((p + 1) * FINITE_PIECE).min(v.rows()));
            rows.iter_rows().take_while(|row| row.iter().fold(true, |ok, x| ok & x.is_finite())).count()
        })
        .collect();
    let whole = pieces.iter().take_while(|&&count| count == FINITE_PIECE).count();
    whole * FINITE_PIECE + pieces.get(whole).copied().unwrap_or(0)
}

/// Returns the larger one; NaN if either is NaN.
fn larger<T: Real>(a: T, b: T) -> T {
    if b > a || b.is_nan() { b } else { a }
}

impl GroupPlan for Loki {
    fn cost(&self, p: &Problem) -> Cost {
        let pairs = p.visible_pairs();
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let (d, r, width) = (p.d as u64, self.rank as u64, (p.d + p.d_v) as u64);
        let kept = match p.n_k {
            0 => 0,
            n if self.keeps_all(n) => pairs,
            n => pairs.min(pairs * self.budget(n) as u64 / n as u64 + rows),
        };
        let voters = self.voters(0, p.group_size()).len() as u64;
        Cost {
            setup_flops: 2 * keys * d * r,
            // Prompts compute the hidden products as well.
            run_flops: voters * 2 * (rows * d * r + pairs * r)
                + 2 * width * if p.n_q == 1 { kept } else { pairs },
            bytes: 4 * (pairs * r + kept * width),
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        // A row that sees fewer keys keeps a larger share of them.
        let all = match g.mask {
            Mask::None => self.keeps_all(g.n_k()),
            Mask::Causal => (0..=g.n_k()).rev().all(|n| self.keeps_all(n)),
        };
        if all {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        self.run_rows(&mut g)
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(Box::new(Split::new(self.clone(), p, index)))
    }
}

#[cfg(test)]
mod tests;
