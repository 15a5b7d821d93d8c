//! LevAttention: a small set of keys that holds every large weight of every query.
//!
//! **Idea.** For weights $|\langle q, k\rangle|^p$ every set of keys has a subset $U$, of a size independent of their
//! number, such that no normalised weight of *any* query outside $U$ exceeds $\varepsilon$. It follows from the keys
//! alone.
//!
//! **Math.** The sensitivity $\alpha_j = \sup_y |\langle k_j, y\rangle|^p / \sum_l |\langle k_l, y\rangle|^p$ bounds the weight of key $j$; any upper bound
//! gives a valid superset. $p = 2$: $\alpha_j$ is the leverage score $k_j^\top (K^\top K)^+ k_j$. Otherwise bounds follow from $\ell_p$ Lewis
//! weights, $\alpha_j \le w_j$ ($p \le 2$) or $(\sum w')^{p/2-1} w'_j$ with certified $w'$ ($p \ge 2$). $U = \{j : \text{bound} \ge \varepsilon\}$, or
//! the `keys` largest. Then $o_i = \sum_{j \in U} f_{ij} v_j / Z_i$, $f = |\tau\langle q, k\rangle|^p$, where $Z_i$ is $\sum_U f$ (`over_u`), the full sum
//! $\tau^2 q^\top K^\top K q$ (`exact2`, $p = 2$), or $\sum_U f$ plus an unbiased estimate of the rest from `draws` keys drawn once with
//! $\pi \propto w$ (`sampled`). `weights = softmax` uses $e^{\tau\langle q, k\rangle}$ on the kept keys. A `window`
//! adds near keys, block by block: every row sees at least its `window` nearest keys. It is a parameter here because a
//! near field is merged by softmax's normaliser, which $|\langle q, k\rangle|^p$ has not.
//!
//! *With a causal mask* one set from all keys would leak. Rows of a block see the set of the prefix before the block
//! and their own block. The leverage scores $\tau_j$ of a prefix only fall as keys arrive; rank-one updates of
//! $P = (K^\top K + \lambda I)^{-1}$, with $\lambda = 10^{-6} \|k\|^2$ of the first key, maintain them, and they are
//! recomputed every 4096 keys. For $p \le 2$ a weight is at most $\tau_j^{p/2}$, so the set
//! $\{\tau_j^{p/2} \ge \varepsilon\}$ holds every key with a weight of at least $\varepsilon$. For $p > 2$ the bound is
//! $t^{p/2-1} \tau_j^{p/2}$ after $t$ keys, and with `keys` the smallest score is dropped as keys arrive: both are
//! heuristics, since a dropped key could deserve to come back.
//!
//! **Reference.** kannan2025; cohen2015 for Lewis weights. Errata of the survey: $U$ depends on $K$ and is universal over
//! queries only; the guarantee is for the full normaliser, and `over_u` inflates weights; bounds are in $d$, the head's
//! width. The streaming set, the damped iteration and the certificate are constructions of this project.
//!
//! **Cost.** $4 n_k d^2$ for leverage (times iterations for $p \ne 2$), then $2 n_q |U| (d + d_v)$; causally $n_k (4 d^2 + 2|U| d)$.
//!
//! **Guarantees.** Any exact weight of at least $\varepsilon$ belongs to a kept key, causally for $p \le 2$ (tested);
//! `keys_needed` in `figures` is the number of keys for $\varepsilon$ = `target_error`. With all keys kept and `over_u`
//! it is polynomial attention. It does not approximate softmax, and the mass outside $U$ can be close to one.
//!
//! **When to use.** In models trained with it, or to find keys that matter to all queries.

mod decode;
mod normaliser;
mod rows;
mod streaming;
#[cfg(test)]
mod tests;
mod universal;

use crate::engine::poly_state::PowerKernel;
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Accepted, Claims, Cost, Family, Law, Method, Needs, RunInfo, Spec, Support, Tunable};
use crate::{Mask, Problem, Real, Result};
use attlas_num::kernels::dot;
use attlas_num::par::*;
use decode::LeverageStream;
use normaliser::{Draws, full_form, gram_of, quadratic};
use rows::KeptRows;
use streaming::StreamingSet;

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
    probes: &[
        &[("keys", "10"), ("block", "16")],
        &[("eps", "0.2"), ("normaliser", "exact2"), ("block", "8")],
        &[("keys", "12"), ("degree", "4"), ("normaliser", "sampled"), ("draws", "20")],
        &[("keys", "9"), ("weights", "softmax"), ("window", "7"), ("block", "10")],
        &[("keys", "9"), ("degree", "3"), ("window", "12"), ("block", "8")],
        &[("eps", "0.1"), ("degree", "1.5"), ("block", "32")],
    ],
    tunable: &[Tunable::budget("keys")],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`Lev`].
    pub struct Params {
        /// Power p of the weights for which the set is universal.
        degree: f64 = 2.0, in 1.0..=16.0;
        /// Number of keys kept, those of largest sensitivity; at most all keys.
        keys: usize = 32, in 1..=1 << 30;
        /// Keep all keys of at least this sensitivity, whatever their number; auto uses `keys`.
        eps: Option<f64> = None, in 1e-9..=1.0;
        /// Normaliser of the weights.
        normaliser: Normaliser = Normaliser::OverU;
        /// Keys drawn for a sampled normaliser.
        draws: usize = 64, in 1..=1 << 20;
        /// Weights of the kept keys.
        weights: Weights = Weights::Power;
        /// Nearest keys that every row also sees, its own included.
        window: usize = 0, in 0..=1 << 30;
        /// Rows that share a window; with a causal mask, also the number of keys between updates of the set.
        block: usize = 64, in 1..=1 << 20;
        /// Directions of the keys below this share of the largest are dropped.
        rank_tol: f64 = 1e-6, in 0.0..=0.1;
        /// Maximum number of iterations for Lewis weights.
        iters: usize = 30, in 0..=1000;
        /// Relative change at which Lewis weights count as converged.
        tol: f64 = 1e-6, in 0.0..=1.0;
        /// Error that the figures `keys_needed` (largest weight outside the kept keys) and `draws_needed` (relative
        /// standard deviation of a sampled normaliser) aim at.
        target_error: f64 = 0.1, in 1e-6..=1.0;
        /// Seed of the sampled normaliser.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        self.support(p)
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Lev::new(x.problem, self)
    }
}

crate::choices! {
    /// Normaliser of the weights.
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
    /// Weights of the kept keys.
    pub enum Weights {
        /// The power for which the set is universal.
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

/// The plan.
#[derive(Clone, Debug)]
pub struct Lev {
    params: Params,
    kernel: PowerKernel,
}

impl Lev {
    /// Creates a plan with these parameters.
    pub(crate) fn new(problem: &Problem, params: Params) -> Result<Self> {
        params.validate()?;
        let kernel = PowerKernel { scale: problem.scale, shift: 0.0, power: params.degree };
        Ok(Self { params, kernel })
    }

    /// Maximum number of keys that a stream keeps besides near ones, if bounded: scores of degree 2 sum to the rank.
    fn most_held(&self, d: usize) -> Option<usize> {
        match self.params.eps {
            None => Some(self.params.keys),
            Some(eps) => (self.params.degree == 2.0).then(|| (d as f64 / eps) as usize),
        }
    }
}

impl GroupPlan for Lev {
    fn cost(&self, p: &Problem) -> Cost {
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let kept = match self.params.eps {
            // Leverage scores sum to at most d, and those of kept keys are at least ε^(2/p).
            Some(eps) => ((p.d as f64 / eps.powf((2.0 / self.params.degree).max(1.0))) as usize).min(p.n_k),
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
        if let Some(cached) = self.most_held(d) {
            let near = self.params.window.max(1) - 1 + self.params.block;
            let rows = (cached + near) * (d + d_v) * size_of::<T>();
            info.figures.insert("decode_bytes", (rows + (3 * d + cached + 1) * d * size_of::<f64>()) as f64);
        }
        Ok(info)
    }

    fn stream<T: Real>(&self, p: &Problem, _: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        if self.params.normaliser == Normaliser::Sampled {
            return None;
        }
        Some(Box::new(LeverageStream::new(self, p)))
    }
}

impl Lev {
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
        let all = (window == 0).then(|| KeptRows::gather(k, v, kept.iter().copied()));
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
            let others = KeptRows::gather(k, v, kept.iter().copied().filter(|j| !near.contains(j)));
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
        // For each block of positions, the keys its rows see and the Gram matrix of earlier keys.
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
        // Blocks of queries may straddle blocks of positions: cut one job per block of positions and head.
        let mut jobs = Vec::new();
        let unseen_rows = n_q.saturating_sub(n_k);
        for (h, out) in g.out.chunks_exact_mut(n_q * d_v).enumerate() {
            let (zero, mut rest) = out.split_at_mut(unseen_rows * d_v);
            zero.fill(T::ZERO);
            let mut row = unseen_rows;
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
                let kept = KeptRows::gather(k, v, kept.iter().copied().filter(|&j| j < low));
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
        let empty = (unseen_rows * g.q.heads()) as u64;
        Ok(RunInfo { keys_visited: visited, empty_rows: empty, rank: most, ..RunInfo::default() })
    }
}
