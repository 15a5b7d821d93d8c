//! LevAttention: a small set of keys that holds every large weight of every query.
//!
//! **Idea.** For weights $|\langle q, k\rangle|^p$ there is, for each set of keys, a subset $U$ whose size does not depend on their number,
//! outside which no normalised weight of *any* query exceeds $\varepsilon$. It is found from the keys alone.
//!
//! **Math.** The sensitivity $\alpha_j = \sup_y |\langle k_j, y\rangle|^p / \sum_l |\langle k_l, y\rangle|^p$ bounds the weight of key $j$; any upper bound
//! gives a valid superset. $p = 2$: $\alpha_j$ is the leverage score $k_j^\top (K^\top K)^+ k_j$. Otherwise bounds follow from $\ell_p$ Lewis
//! weights, $\alpha_j \le w_j$ ($p \le 2$) or $(\sum w')^{p/2-1} w'_j$ with certified $w'$ ($p \ge 2$). $U = \{j : \text{bound} \ge \varepsilon\}$, or
//! the `keys` largest. Then $o_i = \sum_{j \in U} f_{ij} v_j / Z_i$, $f = |\tau\langle q, k\rangle|^p$, where $Z_i$ is $\sum_U f$ (`over_u`), the full sum
//! $\tau^2 q^\top K^\top K q$ (`exact2`, $p = 2$), or $\sum_U f$ plus an unbiased estimate of the rest from `draws` keys drawn once with
//! $\pi \propto w$ (`sampled`). `weights = softmax` uses $e^{\tau\langle q, k\rangle}$ on the kept keys. A `window` adds near keys, block by
//! block: every row sees at least its `window` nearest.
//!
//! *Causally* one set from all keys would leak. Rows of a block see the set of the prefix before the block and their own
//! block. For $p = 2$ scores of a prefix only fall as keys arrive, so the set $\{\tau_j \ge \varepsilon\}$ is kept exactly by rank-one
//! updates of $P = (K^\top K + \lambda I)^{-1}$, $\lambda = 10^{-6} \|k\|^2$ of the first key, recomputed every 4096 keys. For other $p$ the score
//! is the bound $t^{p/2-1} \tau_j^{p/2}$, and with `keys` the smallest score is dropped as keys arrive: heuristics, since a dropped
//! key could deserve to come back.
//!
//! **Reference.** kannan2025; cohen2015 for Lewis weights. Errata of the survey: $U$ depends on $K$ and is universal over
//! queries only; the guarantee is for the full normaliser, and `over_u` inflates weights; bounds are in $d$, the head's
//! width. The streaming set, the damped iteration and the certificate are constructions of this project.
//!
//! **Cost.** $4 n_k d^2$ for leverage (times iterations for $p \ne 2$), then $2 n_q |U| (d + d_v)$; causally $n_k (4 d^2 + 2|U| d)$.
//!
//! **Guarantees.** Any exact weight of at least $\varepsilon$ belongs to a kept key (tested); `keys_needed` in `figures` says how
//! many keys that takes for $\varepsilon$ = `target_error`. With all keys kept and `over_u` it is
//! polynomial attention. It does not approximate softmax, and the mass outside $U$ can be close to one.
//!
//! **When to use.** In models trained with it, or to find keys that matter to all queries.

use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Claims, Cost, Family, Law, Method, Needs, RunInfo, Status, Support};
use crate::methods::common::poly_state::{GEMM_SCRATCH_BYTES, KeyTile, PowerKernel, augment_into};
use crate::methods::common::{exact_rows, exact_scratch_bytes, top_indices};
use crate::workspace::Context;
use crate::{Mask, MatRef, Problem, Real, Result};
use attlas_num::Mat;
use attlas_num::kernels::{Band, dot, merge_lse};
use attlas_num::linalg::inverse;
use attlas_num::randla::{LewisOptions, LewisWeights, lewis_weights};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "lev",
    family: Family::Kernel,
    title: "Universal set of heavy keys (LevAttention)",
    reference: "kannan2025",
    claims: Claims {
        decode: true,
        row_stochastic: false,
        deterministic: false,
        softmax: false,
        lse: false,
        exponent: 1.0,
        needs: Needs::Training,
        except: &[(Law::KeyOrder, "windows go by position, and sampled normalisers draw by index")],
        ..Claims::BASE
    },
    params: Params::SPECS,
    probes: &[
        &[("keys", "10"), ("block", "16")],
        &[("eps", "0.2"), ("normaliser", "exact2"), ("block", "8")],
        &[("keys", "12"), ("degree", "4"), ("normaliser", "sampled"), ("draws", "20")],
        &[("keys", "9"), ("weights", "softmax"), ("window", "7"), ("block", "10")],
        &[("keys", "9"), ("degree", "3"), ("window", "12"), ("block", "8")],
        &[("eps", "0.1"), ("degree", "1.5"), ("block", "32")],
    ],
    supports: |p, options| match Params::from_options(options) {
        Ok(params) => params.support(p),
        Err(_) => Support::yes(),
    },
    calibrate: None,
    build: |p, options, _| Ok(Lev::new(p, Params::from_options(options)?)?.boxed(p)),
};

crate::params! {
    /// Parameters of [`Lev`].
    pub struct Params {
        /// The power p of the weights that the set is universal for.
        degree: f64 = 2.0, in 1.0..=16.0;
        /// Keys kept, those of largest sensitivity; at most all of them.
        keys: usize = 32, in 1..=1 << 30;
        /// Keeps the keys of at least this sensitivity, whatever their number; auto goes by `keys`.
        eps: Option<f64> = None, in 1e-9..=1.0;
        /// What weights are divided by.
        normaliser: Normaliser = Normaliser::OverU;
        /// Keys drawn for a sampled normaliser.
        draws: usize = 64, in 1..=1 << 20;
        /// The weights of the kept keys.
        weights: Weights = Weights::Power;
        /// Nearest keys that every row sees besides, its own included.
        window: usize = 0, in 0..=1 << 30;
        /// Rows that share a window; causally the keys after which the set is renewed.
        block: usize = 64, in 1..=1 << 20;
        /// Directions of the keys below this share of the largest are dropped.
        rank_tol: f64 = 1e-6, in 0.0..=0.1;
        /// Most iterations for Lewis weights.
        iters: usize = 30, in 0..=1000;
        /// Relative change at which they have converged.
        tol: f64 = 1e-6, in 0.0..=1.0;
        /// The error that the figures `keys_needed` (no weight above it outside the kept keys) and `draws_needed` (relative
        /// standard deviation of a sampled normaliser) are for.
        target_error: f64 = 0.1, in 1e-6..=1.0;
        /// Stream of a sampled normaliser.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

crate::choices! {
    /// What weights are divided by.
    pub enum Normaliser {
        /// Their sum over the kept keys.
        OverU = "over_u",
        /// The sum over all keys, from their Gram matrix; degree 2 only.
        Exact2 = "exact2",
        /// The sum over the kept keys plus an unbiased estimate of the rest.
        Sampled = "sampled",
    }
}

crate::choices! {
    /// The weights of the kept keys.
    pub enum Weights {
        /// The power that the set is universal for.
        Power = "power",
        /// Softmax over the kept keys, as for weights trained with softmax.
        Softmax = "softmax",
    }
}

impl Params {
    fn support(&self, p: &Problem) -> Support {
        let sampled = self.normaliser == Normaliser::Sampled;
        let softmax = self.weights == Weights::Softmax;
        Support::yes()
            .and_unless(
                self.normaliser == Normaliser::Exact2 && self.degree != 2.0,
                "normaliser = exact2 needs degree = 2",
            )
            .and_unless(
                softmax && self.normaliser != Normaliser::OverU,
                "softmax weights need normaliser = over_u",
            )
            .and_unless(
                sampled && p.mask == Mask::Causal,
                "a sampled normaliser draws from all keys and has no causal form: use over_u or exact2",
            )
            .and_unless(sampled && self.window > 0, "a sampled normaliser needs window = 0")
    }
}

/// Keys after which the streaming set is recomputed.
const REFRESH: usize = 4096;

/// The plan.
#[derive(Clone, Debug)]
pub struct Lev {
    params: Params,
    kernel: PowerKernel,
}

/// What is seen by the rows of one block, beside near keys: kept keys, gathered.
#[derive(Debug)]
struct Kept<T> {
    k: Vec<T>,
    v: Vec<T>,
    len: usize,
}

impl<T: Real> Kept<T> {
    fn gather(k: MatRef<'_, T>, v: MatRef<'_, T>, index: impl Iterator<Item = usize>) -> Self {
        let mut kept = Self { k: Vec::new(), v: Vec::new(), len: 0 };
        for j in index {
            kept.push(k.row(j), v.row(j));
        }
        kept
    }

    fn push(&mut self, k: &[T], v: &[T]) {
        self.k.extend_from_slice(k);
        self.v.extend_from_slice(v);
        self.len += 1;
    }
}

/// Keys drawn for a sampled normaliser, each with $1/(s\pi)$.
#[derive(Debug, Default)]
struct Draws {
    drawn: Vec<(usize, f64)>,
}

/// Something added to the normaliser of row `i` with a given unit: `extra(i, q, top)` in units of $\mathrm{top}^p$, or the
/// whole of it in the place of the sum over what was visited.
type Extra<'a, T> = &'a (dyn Fn(usize, &[T], f64) -> (f64, bool) + Sync);

impl Lev {
    /// A plan with these parameters.
    pub fn new(problem: &Problem, params: Params) -> Result<Self> {
        params.validate()?;
        let kernel = PowerKernel { scale: problem.scale, shift: 0.0, power: params.degree };
        Ok(Self { params, kernel })
    }

    /// Most keys that a stream keeps besides near ones, where there is a bound: scores of degree 2 sum to the rank.
    fn most_held(&self, d: usize) -> Option<usize> {
        match self.params.eps {
            None => Some(self.params.keys),
            Some(eps) => (self.params.degree == 2.0).then(|| (d as f64 / eps) as usize),
        }
    }

    /// Kept keys in increasing order, bounds on sensitivities, and what is to be told of a run.
    fn select<T: Real>(&self, k: MatRef<'_, T>, cx: Context<'_>) -> (Vec<usize>, Vec<f64>, RunInfo) {
        let Params { degree, rank_tol, iters, tol, .. } = self.params;
        let (n, d) = (k.rows(), k.cols());
        let mut wide = cx.scratch.take::<f64>(n * d);
        // Keys that are not finite are kept in any case, so that they are seen; they would spoil all other scores.
        let widen = |(j, out): (usize, &mut [f64])| {
            let row = k.row(j);
            let finite = row.iter().all(|x| x.is_finite());
            out.iter_mut().zip(row).for_each(|(o, x)| *o = if finite { x.to_f64() } else { 0.0 });
            (!finite).then_some(j)
        };
        let spoiled: Vec<usize> =
            wide.par_chunks_exact_mut(d).enumerate().with_min_len(256).filter_map(widen).collect();
        let options = LewisOptions { iters, tol, rank_tol };
        // A factorisation that fails on finite keys leaves the bound that always holds.
        let weights = lewis_weights(MatRef::new(&wide, n, d), degree, options).unwrap_or_else(|_| {
            LewisWeights { weights: vec![1.0; n], certificate: 1.0, iterations: 0, converged: false }
        });
        let mut bounds = weights.sensitivity_bounds(degree);
        spoiled.iter().for_each(|&j| bounds[j] = 1.0);
        let kept = match self.params.eps {
            Some(eps) => (0..n).filter(|&j| bounds[j] >= eps).collect(),
            None => top_indices(&bounds, self.params.keys),
        };
        let info = RunInfo {
            rank: Some(kept.len()),
            iterations: Some(weights.iterations),
            status: if weights.converged { Status::Complete } else { Status::StoppedEarly },
            figures: BTreeMap::from([
                ("sensitivity_sum", bounds.iter().sum()),
                ("keys_needed", bounds.iter().filter(|&&b| b >= self.params.target_error).count() as f64),
            ]),
            ..RunInfo::default()
        };
        (kept, bounds, info)
    }

    /// Draws from the complement of `kept`, in proportion to the bounds.
    fn draw(&self, bounds: &[f64], kept: &[usize], index: GroupIndex) -> Draws {
        let mut rest: Vec<f64> = bounds.to_vec();
        kept.iter().for_each(|&j| rest[j] = 0.0);
        let total: f64 = rest.iter().sum();
        if total <= 0.0 {
            return Draws::default();
        }
        let mut sums = rest.clone();
        (1..sums.len()).for_each(|j| sums[j] += sums[j - 1]);
        let mut rng = index.stream_key(self.params.seed).named("lev normaliser").rng();
        let s = self.params.draws;
        let drawn = (0..s)
            .map(|_| {
                let target = rng.uniform() * sums[sums.len() - 1];
                let j = sums.partition_point(|&c| c <= target).min(sums.len() - 1);
                (j, total / (rest[j] * s as f64))
            })
            .collect();
        Draws { drawn }
    }

    /// Attends with some rows to kept keys and to near keys, of which row `i` sees `0..near_seen(i)`.
    #[allow(clippy::too_many_arguments)]
    fn attend<T: Real>(
        &self,
        q: MatRef<'_, T>,
        kept: &Kept<T>,
        near: (MatRef<'_, T>, MatRef<'_, T>),
        near_upper: Option<isize>,
        extra: Extra<'_, T>,
        out: &mut [T],
        cx: Context<'_>,
    ) {
        let (rows, d, d_v) = (q.rows(), q.cols(), near.1.cols());
        let (k, v) = (MatRef::new(&kept.k, kept.len, d), MatRef::new(&kept.v, kept.len, d_v));
        let band = Band { lower: None, upper: near_upper };
        if self.params.weights == Weights::Softmax {
            let scale = T::from_f64(self.kernel.scale);
            let mut lse = cx.scratch.take::<T>(rows);
            exact_rows(q, k, v, None, scale, Band::ALL, cx, out, &mut lse);
            if near.0.rows() > 0 {
                let mut other = cx.scratch.take::<T>(rows * d_v);
                let mut other_lse = cx.scratch.take::<T>(rows);
                exact_rows(q, near.0, near.1, None, scale, band, cx, &mut other, &mut other_lse);
                for (i, (o, other)) in out.chunks_exact_mut(d_v).zip(other.chunks_exact(d_v)).enumerate() {
                    merge_lse(o, &mut lse[i], other, other_lse[i]);
                }
            }
            return;
        }
        let cols = d_v + 1;
        let mut acc = cx.scratch.take_zeroed::<T>(rows * cols);
        let mut top = cx.scratch.take_zeroed::<T>(rows);
        for (k, v, band) in [(k, v, Band::ALL), (near.0, near.1, band)] {
            let n = k.rows();
            let mut augmented = cx.scratch.take::<T>(n * cols);
            let spoiled = augment_into(v, &mut augmented);
            let tile = KeyTile { k, v, augmented: MatRef::new(&augmented, n, cols), spoiled: &spoiled };
            self.kernel.add_tile(q, tile, |i| band.range(i, n), &mut acc, &mut top, cx);
        }
        for (i, (acc, out)) in acc.chunks_exact(cols).zip(out.chunks_exact_mut(d_v)).enumerate() {
            let unit = top[i].to_f64();
            let (more, whole) = extra(i, q.row(i), unit);
            let visited = acc[d_v].to_f64();
            let total = if whole { more } else { visited + more };
            if total == 0.0 || visited == 0.0 {
                out.fill(T::ZERO);
            } else {
                let inverse = T::from_f64(1.0 / total);
                out.iter_mut().zip(acc).for_each(|(o, &x)| *o = x * inverse);
            }
        }
    }

    fn run_all<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let (k, v, cx, n_k) = (g.k, g.v, g.cx, g.k.rows());
        let (kept, bounds, mut info) = self.select(k, cx);
        let draws = match self.params.normaliser {
            Normaliser::Sampled => self.draw(&bounds, &kept, g.index),
            _ => Draws::default(),
        };
        if !draws.drawn.is_empty() {
            let rest = bounds.iter().sum::<f64>() - kept.iter().map(|&j| bounds[j]).sum::<f64>();
            info.figures.insert("predicted_rel_sd", (rest / self.params.draws as f64).sqrt());
            info.figures.insert("draws_needed", (rest / self.params.target_error.powi(2)).ceil());
        }
        let gram = (self.params.normaliser == Normaliser::Exact2).then(|| gram_of(k));
        let power = self.kernel.power;
        let scale = self.kernel.scale;
        let extra = |_: usize, q: &[T], top: f64| -> (f64, bool) {
            if let Some(gram) = &gram {
                return (quadratic(gram, q) * scale * scale / (top * top), true);
            }
            let term = |&(j, weight): &(usize, f64)| {
                weight * ((scale * dot(q, k.row(j)).to_f64()).abs() / top).powf(power)
            };
            (draws.drawn.iter().map(term).sum(), false)
        };
        let offset = n_k as isize - g.n_q() as isize;
        let window = self.params.window as isize;
        let all = (window == 0).then(|| Kept::gather(k, v, kept.iter().copied()));
        let visited = g.par_row_blocks(self.params.block, |block| {
            let rows = block.q.rows();
            if let Some(all) = &all {
                let none = (k.sub_rows(0..0), v.sub_rows(0..0));
                self.attend(block.q, all, none, None, &extra, block.out, cx);
                return Ok((rows * all.len) as u64);
            }
            let first = block.first as isize + offset;
            let clip = |x: isize| x.clamp(0, n_k as isize) as usize;
            let near = clip(first - window + 1)..clip(first + rows as isize - 1 + window);
            let others = Kept::gather(k, v, kept.iter().copied().filter(|j| !near.contains(j)));
            let visited = rows * (others.len + near.len());
            let near = (k.sub_rows(near.clone()), v.sub_rows(near));
            self.attend(block.q, &others, near, None, &extra, block.out, cx);
            Ok(visited as u64)
        })?;
        info.keys_visited = visited.into_iter().sum::<u64>() + (g.lse.len() * draws.drawn.len()) as u64;
        Ok(info)
    }

    fn run_causal<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let (k, v, cx) = (g.k, g.v, g.cx);
        let (n_q, n_k, d_v, block) = (g.n_q(), k.rows(), g.d_v(), self.params.block);
        let offset = n_k as isize - n_q as isize;
        // What the rows of each block of positions see, and the quadratic forms of earlier keys.
        let mut set = StreamingSet::new(&self.params, k.cols());
        let mut before: Vec<(Vec<usize>, Option<Vec<f64>>)> = Vec::new();
        for j in 0..n_k {
            if j % block == 0 {
                let gram = (self.params.normaliser == Normaliser::Exact2).then(|| set.gram.clone());
                before.push((set.indices(), gram));
            }
            set.push(k.row(j));
        }
        let most = before.iter().map(|(kept, _)| kept.len()).max();
        // Rows of blocks of queries cross blocks of positions: one row block per block of positions and head.
        let mut jobs = Vec::new();
        let blind = n_q.saturating_sub(n_k);
        for (h, out) in g.out.chunks_exact_mut(n_q * d_v).enumerate() {
            let (zero, mut rest) = out.split_at_mut(blind * d_v);
            zero.fill(T::ZERO);
            let mut row = blind;
            while row < n_q {
                let position = (row as isize + offset) as usize;
                let rows = (block - position % block).min(n_q - row);
                let (own, tail) = std::mem::take(&mut rest).split_at_mut(rows * d_v);
                rest = tail;
                jobs.push((g.q.head(h).sub_rows(row..row + rows), position, own));
                row += rows;
            }
        }
        let scale = self.kernel.scale;
        let visited: u64 = jobs
            .into_par_iter()
            .with_max_len(1)
            .map(|(q, position, out)| {
                let start = position - position % block;
                let low = (start + 1).saturating_sub(self.params.window.max(1));
                let (kept, gram) = &before[position / block];
                let kept = Kept::gather(k, v, kept.iter().copied().filter(|&j| j < low));
                let end = position + q.rows();
                let near = (k.sub_rows(low..end), v.sub_rows(low..end));
                let extra = |i: usize, q: &[T], top: f64| match gram {
                    Some(gram) => (full_form(gram, q, k, start..position + i + 1, scale, top), true),
                    None => (0.0, false),
                };
                self.attend(q, &kept, near, Some((position - low) as isize), &extra, out, cx);
                (q.rows() * (kept.len + end - low)) as u64
            })
            .sum();
        let empty = (blind * g.q.heads()) as u64;
        Ok(RunInfo { keys_visited: visited, empty_rows: empty, rank: most, ..RunInfo::default() })
    }
}

/// $\tau^2 (q^\top G q + \sum_j \langle q, k_j\rangle^2)$ over keys of the current block, in units of $\mathrm{top}^2$.
fn full_form<T: Real>(
    gram: &[f64],
    q: &[T],
    k: MatRef<'_, T>,
    own: std::ops::Range<usize>,
    scale: f64,
    top: f64,
) -> f64 {
    let own: f64 = own.map(|j| dot(q, k.row(j)).to_f64().powi(2)).sum();
    (quadratic(gram, q) + own) * scale * scale / (top * top)
}

/// $K^\top K$, row by row.
fn gram_of<T: Real>(k: MatRef<'_, T>) -> Vec<f64> {
    let mut gram = vec![0.0; k.cols() * k.cols()];
    k.iter_rows().for_each(|row| add_outer(&mut gram, row));
    gram
}

fn add_outer<T: Real>(gram: &mut [f64], row: &[T]) {
    for (gram, &a) in gram.chunks_exact_mut(row.len()).zip(row) {
        gram.iter_mut().zip(row).for_each(|(g, &b)| *g += a.to_f64() * b.to_f64());
    }
}

/// $q^\top G q$, never below 0.
fn quadratic<T: Real>(gram: &[f64], q: &[T]) -> f64 {
    let form =
        |(row, &a): (&[f64], &T)| a.to_f64() * row.iter().zip(q).map(|(g, &b)| g * b.to_f64()).sum::<f64>();
    let sum: f64 = gram.chunks_exact(q.len()).zip(q).map(form).sum();
    // Not `max`, which would turn NaN into 0.
    if sum < 0.0 { 0.0 } else { sum }
}

/// The set of a growing prefix.
#[derive(Clone, Debug)]
struct StreamingSet {
    d: usize,
    keys: usize,
    eps: Option<f64>,
    degree: f64,
    /// $(K^\top K + \lambda I)^{-1}$; empty before the first key that is not zero.
    inverse: Vec<f64>,
    gram: Vec<f64>,
    lambda: f64,
    seen: usize,
    since_refresh: usize,
    index: Vec<usize>,
    rows: Vec<f64>,
    scores: Vec<f64>,
}

/// The ridge, relative to the squared length of the first key.
const RIDGE: f64 = 1e-6;

impl StreamingSet {
    fn new(params: &Params, d: usize) -> Self {
        Self {
            d,
            keys: params.keys,
            eps: params.eps,
            degree: params.degree,
            inverse: Vec::new(),
            gram: vec![0.0; d * d],
            lambda: 0.0,
            seen: 0,
            since_refresh: 0,
            index: Vec::new(),
            rows: Vec::new(),
            scores: Vec::new(),
        }
    }

    /// Kept keys, in increasing order.
    fn indices(&self) -> Vec<usize> {
        self.index.clone()
    }

    /// Takes the next key.
    fn push<T: Real>(&mut self, key: &[T]) {
        let j = self.seen;
        self.seen += 1;
        let k: Vec<f64> = key.iter().map(|x| x.to_f64()).collect();
        let length: f64 = k.iter().map(|x| x * x).sum();
        if length == 0.0 {
            return;
        }
        if !length.is_finite() {
            // Nothing can be said of it: it stays, and takes no part in the scores of others.
            self.keep(j, vec![0.0; self.d], f64::INFINITY);
            return;
        }
        if self.inverse.is_empty() {
            self.lambda = RIDGE * length;
            self.inverse = vec![0.0; self.d * self.d];
            (0..self.d).for_each(|i| self.inverse[i * self.d + i] = 1.0 / self.lambda);
        }
        add_outer(&mut self.gram, &k);
        let u: Vec<f64> = self.inverse.chunks_exact(self.d).map(|row| dot(row, &k)).collect();
        let g = 1.0 + dot(&k, &u);
        for (row, score) in self.rows.chunks_exact(self.d).zip(&mut self.scores) {
            let along = dot(row, &u);
            *score -= along * along / g;
        }
        for (row, a) in self.inverse.chunks_exact_mut(self.d).zip(&u) {
            row.iter_mut().zip(&u).for_each(|(p, b)| *p -= a * b / g);
        }
        let score = dot(&k, &u) / g;
        self.keep(j, k, score);
        self.since_refresh += 1;
        if self.since_refresh == REFRESH {
            self.refresh();
        }
        self.drop_light();
    }

    fn keep(&mut self, j: usize, row: Vec<f64>, score: f64) {
        self.index.push(j);
        self.rows.extend(row);
        self.scores.push(score);
    }

    /// Computes the inverse and all scores anew, against the drift of the updates.
    fn refresh(&mut self) {
        self.since_refresh = 0;
        let d = self.d;
        let ridged = Mat::from_fn(d, d, |i, j| self.gram[i * d + j] + if i == j { self.lambda } else { 0.0 });
        let Ok(inverse) = inverse(ridged.as_ref()) else { return };
        self.inverse = inverse.into_vec();
        for (row, score) in self.rows.chunks_exact(d).zip(&mut self.scores).filter(|(_, s)| s.is_finite()) {
            *score = self.inverse.chunks_exact(d).zip(row).map(|(p, a)| a * dot(p, row)).sum();
        }
    }

    /// Drops what is below the threshold, or the smallest scores past the number to keep.
    fn drop_light(&mut self) {
        let factor = if self.degree > 2.0 { (self.seen as f64).powf(0.5 * self.degree - 1.0) } else { 1.0 };
        let power = if self.degree > 2.0 { 0.5 * self.degree } else { 1.0 };
        let mut t = 0;
        while t < self.index.len() {
            let light = match self.eps {
                Some(eps) => factor * self.scores[t].max(0.0).powf(power) < eps,
                None => self.index.len() > self.keys && t == self.lightest(),
            };
            if light {
                self.index.remove(t);
                self.scores.remove(t);
                self.rows.drain(t * self.d..(t + 1) * self.d);
            } else {
                t += 1;
            }
        }
    }

    /// The smallest score, ties to the later key.
    fn lightest(&self) -> usize {
        let mut best = 0;
        for (t, s) in self.scores.iter().enumerate() {
            if *s <= self.scores[best] {
                best = t;
            }
        }
        best
    }
}

impl GroupPlan for Lev {
    fn cost(&self, p: &Problem) -> Cost {
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let kept = match self.params.eps {
            Some(eps) => ((p.d as f64 / eps) as usize).min(p.n_k),
            None => self.params.keys.min(p.n_k),
        };
        let d2 = (p.d * p.d) as u64;
        let causal = p.mask == Mask::Causal;
        let passes = if self.params.degree == 2.0 { 1 } else { 1 + self.params.iters as u64 };
        let setup = if causal { keys * (6 * d2 + (2 * kept * p.d) as u64) } else { 4 * keys * d2 * passes };
        let near = 2 * self.params.window + if causal { self.params.block } else { 0 };
        let seen = (kept + near.min(p.n_k)) as u64;
        Cost {
            setup_flops: setup,
            run_flops: 2 * rows * seen * (p.d + p.d_v) as u64,
            bytes: 4 * (keys + rows) * (p.d + p.d_v) as u64,
        }
    }

    fn scratch_bytes(&self, p: &Problem, threads: usize, size: usize) -> usize {
        let rows = self.params.block.min(p.n_q.max(1));
        let near = (self.params.block + 2 * self.params.window).min(p.n_k);
        let seen = match self.params.eps {
            Some(_) => p.n_k,
            None => self.params.keys.min(p.n_k),
        }
        .max(near);
        let per_thread = rows * (2 * p.d_v + 4 + seen) * size + seen * (p.d_v + 1) * size;
        p.n_k * p.d * size_of::<f64>()
            + threads * (per_thread + GEMM_SCRATCH_BYTES + 1024)
            + exact_scratch_bytes(p, threads, size)
            + 256
    }

    fn has_lse(&self) -> bool {
        false
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if g.n_k() == 0 || g.n_q() == 0 {
            return Ok(g.fill_empty());
        }
        g.lse.fill(T::NEG_INFINITY);
        let (d, d_v) = (g.k.cols(), g.d_v());
        let mut info = match g.mask {
            Mask::None => self.run_all(&mut g)?,
            Mask::Causal => self.run_causal(&mut g)?,
        };
        if let Some(held) = self.most_held(d) {
            let near = self.params.window.max(1) - 1 + self.params.block;
            let rows = (held + near) * (d + d_v) * size_of::<T>();
            info.figures.insert("decode_bytes", (rows + (3 * d + held + 1) * d * size_of::<f64>()) as f64);
        }
        Ok(info)
    }

    fn stream<T: Real>(&self, p: &Problem, _: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        if self.params.normaliser == Normaliser::Sampled {
            return None;
        }
        Some(Box::new(Decoder {
            set: StreamingSet::new(&self.params, p.d),
            plan: self.clone(),
            frozen: Vec::new(),
            gram: vec![0.0; p.d * p.d],
            rows: BTreeMap::new(),
            len: 0,
            d: p.d,
            d_v: p.d_v,
        }))
    }
}

/// Decoding: the set, the keys and values it holds, and the near ones.
#[derive(Debug)]
struct Decoder<T> {
    plan: Lev,
    set: StreamingSet,
    /// The set before the current block.
    frozen: Vec<usize>,
    gram: Vec<f64>,
    rows: BTreeMap<usize, (Vec<T>, Vec<T>)>,
    len: usize,
    d: usize,
    d_v: usize,
}

impl<T: Real> Decoder<T> {
    /// Start of the current block and of the near keys.
    fn near(&self) -> (usize, usize) {
        let Params { block, window, .. } = self.plan.params;
        let last = self.len.saturating_sub(1);
        let start = last - last % block;
        (start, (start + 1).saturating_sub(window.max(1)))
    }
}

impl<T: Real> GroupStream<T> for Decoder<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            if self.len.is_multiple_of(self.plan.params.block) {
                self.frozen = self.set.indices();
                self.gram.clone_from(&self.set.gram);
                let low = (self.len + 1).saturating_sub(self.plan.params.window.max(1));
                let frozen = &self.frozen;
                self.rows.retain(|j, _| *j >= low || frozen.binary_search(j).is_ok());
            }
            self.rows.insert(self.len, (k.to_vec(), v.to_vec()));
            self.set.push(k);
            self.len += 1;
        }
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        _: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        lse.fill(T::NEG_INFINITY);
        if self.len == 0 {
            out.fill(T::ZERO);
            return Ok(RunInfo { empty_rows: lse.len() as u64, ..RunInfo::default() });
        }
        let (start, low) = self.near();
        let mut kept = Kept { k: Vec::new(), v: Vec::new(), len: 0 };
        let frozen = self.frozen.iter().filter(|j| **j < low);
        frozen.filter_map(|j| self.rows.get(j)).for_each(|(k, v)| kept.push(k, v));
        let mut near = Kept { k: Vec::new(), v: Vec::new(), len: 0 };
        self.rows.range(low..).for_each(|(_, (k, v))| near.push(k, v));
        let (near_k, near_v) =
            (MatRef::new(&near.k, near.len, self.d), MatRef::new(&near.v, near.len, self.d_v));
        let exact2 = self.plan.params.normaliser == Normaliser::Exact2;
        let scale = self.plan.kernel.scale;
        let extra = |_: usize, q: &[T], top: f64| match exact2 {
            true => (full_form(&self.gram, q, near_k, start - low..near.len, scale, top), true),
            false => (0.0, false),
        };
        self.plan.attend(q, &kept, (near_k, near_v), None, &extra, out, cx);
        Ok(RunInfo::visited((q.rows() * (kept.len + near.len)) as u64))
    }

    fn state_bytes(&self) -> usize {
        let rows = self.rows.len() * (self.d + self.d_v) * size_of::<T>();
        rows + (self.set.inverse.len() + 2 * self.gram.len() + self.set.rows.len()) * size_of::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{Case, How, assert_rows_close, check_method, run_method, run_with};
    use crate::{Options, Workspace};

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    fn run(x: &Case, options: &Options) -> Vec<f64> {
        run_method(&METHOD, options, x).0
    }

    fn polynomial(x: &Case, degree: usize) -> Vec<f64> {
        run_method(crate::registry::method("polynomial").unwrap(), &Options::new().with("degree", degree), x)
            .0
    }

    #[test]
    fn with_all_keys_it_is_polynomial_attention() {
        let p = Problem { d_v: 5, ..Problem::new(2, 50, 6).with_kv_heads(1) };
        for (p, degree) in [(p, 2usize), (p, 4), (p.causal(), 2), (p.causal(), 4)] {
            let x = Case::gaussian(p, 1);
            let options = Options::new().with("degree", degree as f64);
            let want = polynomial(&x, degree);
            assert_rows_close(&run(&x, &options.clone().with("keys", 50usize)), &want, 1e-12, "all keys");
            assert_rows_close(&run(&x, &options.with("eps", 1e-9)), &want, 1e-12, "no threshold");
        }
        // A window that covers all keys does the same, whatever is kept.
        let x = Case::gaussian(p, 2);
        let options = Options::new().with("keys", 1usize).with("window", 50usize);
        assert_rows_close(&run(&x, &options), &polynomial(&x, 2), 1e-12, "all near");
    }

    #[test]
    fn softmax_weights_over_all_keys_are_softmax() {
        for p in [Problem::new(1, 40, 6), Problem::new(1, 40, 6).causal()] {
            let x = Case::gaussian(p, 3);
            let options =
                Options::new().with("weights", "softmax").with("keys", 40usize).with("block", 9usize);
            let (want, _) = crate::testkit::reference(&x);
            assert_rows_close(&run(&x, &options), &want, 1e-12, "softmax");
        }
    }

    #[test]
    fn every_heavy_weight_belongs_to_a_kept_key() {
        let mut x = Case::gaussian(Problem { d_v: 1, ..Problem::new(1, 120, 5) }, 4);
        for (j, row) in x.key_rows(0).enumerate() {
            let size = if j % 11 == 3 { 4.0 } else { 0.3 };
            row.iter_mut().for_each(|v| *v *= size);
        }
        let ws = Workspace::single().unwrap();
        for (degree, eps) in [(1.0, 0.1), (2.0, 0.1), (3.0, 0.3), (4.0, 0.5)] {
            let params = Params { degree, eps: Some(eps), iters: 60, ..Params::default() };
            let plan = Lev::new(&x.problem, params).unwrap();
            let (kept, bounds, _) = plan.select(MatRef::new(&x.k, 120, 5), ws.context());
            assert!(kept.len() < 120);
            assert!(bounds.iter().sum::<f64>() <= 5f64.powf((degree / 2.0).max(1.0)) * (1.0 + 1e-6));
            for q in x.q.chunks(5) {
                let f = |j: usize| dot(q, &x.k[j * 5..(j + 1) * 5]).abs().powf(degree);
                let total: f64 = (0..120).map(f).sum();
                for j in (0..120).filter(|&j| f(j) / total >= eps) {
                    assert!(kept.binary_search(&j).is_ok(), "p = {degree}: key {j}");
                }
            }
        }
    }

    #[test]
    fn the_exact_normaliser_is_the_full_sum() {
        let p = Problem { d_v: 1, ..Problem::new(1, 70, 4) };
        for p in [p, p.causal()] {
            let x = Case::gaussian(p, 5);
            let base = Options::new().with("keys", 6usize).with("block", 8usize);
            let over = run(&x, &base);
            let full = run(&x, &base.clone().with("normaliser", "exact2"));
            let ones = Case { v: vec![1.0; x.v.len()], ..x.clone() };
            let (all, share) = (run(&ones, &base), run(&ones, &base.clone().with("normaliser", "exact2")));
            // Weights over the kept keys sum to one, over all keys to the kept mass, and outputs differ by it.
            assert_rows_close(&all, &vec![1.0; 70], 1e-12, "over U");
            assert!(share.iter().all(|&s| s > 0.0 && s <= 1.0 + 1e-12) && share.iter().any(|&s| s < 0.9));
            let want: Vec<f64> = over.iter().zip(&share).map(|(o, s)| o * s).collect();
            assert_rows_close(&full, &want, 1e-12, "exact2");
        }
        // The kept mass by its definition, without a mask.
        let x = Case::gaussian(p, 6);
        let ones = Case { v: vec![1.0; 70], ..x.clone() };
        let share = run(&ones, &Options::new().with("keys", 70usize).with("normaliser", "exact2"));
        assert_rows_close(&share, &vec![1.0; 70], 1e-11, "all keys kept");
    }

    #[test]
    fn the_sampled_normaliser_is_unbiased_within_its_stated_spread() {
        let p = Problem { d_v: 1, ..Problem::new(1, 60, 4).with_lens(5, 60) };
        let mut x = Case::gaussian(p, 7);
        x.v.fill(1.0);
        let base = Options::new().with("keys", 8usize).with("draws", 16usize);
        let share = run(&x, &base.clone().with("normaliser", "exact2"));
        let seeds = 600u32;
        let mut moments = vec![(0.0, 0.0); 5];
        let mut sd = 0.0;
        for seed in 0..seeds {
            let options = base.clone().with("normaliser", "sampled").with("seed", u64::from(seed));
            let plan = METHOD.plan(&p, &options).unwrap();
            let ran = run_with(&*plan, &x, How { lse: false, ..How::default() }).unwrap();
            sd = ran.info.figures["predicted_rel_sd"];
            for ((m, o), s) in moments.iter_mut().zip(&ran.o).zip(&share) {
                // 1/o is the normaliser in units of the kept mass; its mean is 1/share.
                let ratio = s / o;
                *m = (m.0 + ratio, m.1 + ratio * ratio);
            }
        }
        // The formula: (1/s)(Σ f²/π − (Σ f)²) over the keys that are not kept, relative to the squared normaliser.
        let ws = Workspace::single().unwrap();
        let plan = Lev::new(&p, Params { keys: 8, draws: 16, ..Params::default() }).unwrap();
        let (kept, bounds, _) = plan.select(MatRef::new(&x.k, 60, 4), ws.context());
        let rest: Vec<usize> = (0..60).filter(|j| kept.binary_search(j).is_err()).collect();
        let total: f64 = rest.iter().map(|&j| bounds[j]).sum();
        let variance = |q: &[f64]| {
            let f = |j: usize| dot(q, &x.k[j * 4..(j + 1) * 4]).powi(2);
            let squares: f64 = rest.iter().map(|&j| f(j) * f(j) * total / bounds[j]).sum();
            let sum: f64 = rest.iter().map(|&j| f(j)).sum();
            let all: f64 = (0..60).map(f).sum();
            (squares - sum * sum) / 16.0 / (all * all)
        };
        let n = f64::from(seeds);
        for ((sum, squares), q) in moments.into_iter().zip(x.q.chunks(4)) {
            let mean = sum / n;
            let spread = (squares / n - mean * mean).max(0.0);
            assert!((mean - 1.0).abs() <= 5.0 * (spread / n).sqrt(), "{mean} ± {spread}");
            // Sums of sixteen terms are close to normal: the variance of a sample variance is 2σ⁴/n, or a little more.
            let want = variance(q);
            assert!((spread - want).abs() <= 5.0 * want * (3.0 / n).sqrt(), "{spread}, {want}");
            assert!(want.sqrt() <= sd * (1.0 + 1e-9), "{want} > {sd}²");
        }
        // Far keys are bounded by the sum of their sensitivities, and more draws bring the error down to any target.
        let needed = (sd * sd * 16.0 / 0.01).ceil();
        let options = base.with("normaliser", "sampled");
        let ran = run_with(&*METHOD.plan(&p, &options).unwrap(), &x, How { lse: false, ..How::default() });
        assert_eq!(ran.unwrap().info.figures["draws_needed"], needed);
    }

    #[test]
    fn the_streaming_set_is_that_of_every_prefix() {
        let d = 4;
        let x = Case::gaussian(Problem::new(1, 90, d), 8);
        let params = Params { eps: Some(0.15), ..Params::default() };
        let mut set = StreamingSet::new(&params, d);
        for t in 0..90 {
            set.push(&x.k[t * d..(t + 1) * d]);
            let prefix = MatRef::new(&x.k[..(t + 1) * d], t + 1, d);
            let lambda = RIDGE * dot(&x.k[..d], &x.k[..d]);
            let scores = attlas_num::randla::ridge_leverage_scores(prefix, lambda).unwrap();
            let want: Vec<usize> = (0..=t).filter(|&j| scores[j] >= 0.15).collect();
            assert_eq!(set.indices(), want, "after {t}");
            assert!(want.len() as f64 <= d as f64 / 0.15);
            for (j, s) in set.index.iter().zip(&set.scores) {
                assert!((s - scores[*j]).abs() < 1e-8);
            }
        }
        let before = set.scores.clone();
        set.refresh();
        assert!(set.scores.iter().zip(&before).all(|(a, b)| (a - b).abs() < 1e-8));
    }

    #[test]
    fn the_default_set_ignores_the_order_of_keys_and_a_change_of_basis() {
        let x = Case::gaussian(Problem::new(1, 60, 3), 9);
        let options = Options::new().with("keys", 7usize);
        let reverse = |v: &[f64]| v.chunks(3).rev().flatten().copied().collect::<Vec<f64>>();
        let turned = Case { k: reverse(&x.k), v: reverse(&x.v), ..x.clone() };
        assert_rows_close(&run(&turned, &options), &run(&x, &options), 1e-11, "reversed");
        let ws = Workspace::single().unwrap();
        let plan = Lev::new(&x.problem, Params { keys: 7, ..Params::default() }).unwrap();
        let skew: Vec<f64> =
            x.k.chunks(3).flat_map(|k| [k[0] + 2.0 * k[1], k[1] - k[2], 3.0 * k[2]]).collect();
        let set = |k: &[f64]| plan.select(MatRef::new(k, 60, 3), ws.context()).0;
        assert_eq!(set(&x.k), set(&skew));
    }

    #[test]
    fn impossible_combinations_are_refused() {
        let p = Problem::new(1, 20, 4);
        for (options, causal) in [
            (Options::new().with("normaliser", "exact2").with("degree", 4.0), false),
            (Options::new().with("normaliser", "sampled"), true),
            (Options::new().with("normaliser", "sampled").with("window", 3usize), false),
            (Options::new().with("normaliser", "sampled").with("weights", "softmax"), false),
        ] {
            assert!(METHOD.plan(&if causal { p.causal() } else { p }, &options).is_err());
        }
    }
}
