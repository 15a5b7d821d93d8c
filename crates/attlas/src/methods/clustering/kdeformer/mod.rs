//! KDEformer: a hashed block diagonal and columns sampled by importance, normalised by kernel densities.
//!
//! **Idea.** The row sums of softmax attention are weighted Gaussian kernel densities, and so are the squared
//! norms of its columns. Estimated densities normalise rows and decide which columns to sample; hashing first takes out
//! heavy entries.
//!
//! **Math.** For weights $x_j \ge 0$ and $W = \sum_j x_j e^{|k_j|^2/2}$,
//! $$\kappa(q, K, x) = \sum_j x_j e^{\langle q, k_j\rangle} = e^{|q|^2/2}\, W \sum_j e^{-(|q - k_j|^2 + y_j^2)/2},
//!   \qquad y_j^2 = 2 \ln \frac{W}{x_j e^{|k_j|^2/2}} \ge 0,$$
//! a kernel density of the points $[k_j; y_j]$ at $[q; 0]$. With $q, k$ scaled by $\sqrt\beta$ it gives
//! $z_i = \kappa(q_i, K, 1)$, and with $\sqrt{2\beta}$ the column norms
//! $b_l = \kappa(k_l, Q, z^{-2}) = |P e_l|^2$ of $P = \mathrm{diag}(z)^{-1} A$.
//!
//! *Practical* (`z_mode = self_norm`): a query attends exactly to its block of the keys sorted by a sign hash, and
//! with logits $s_{il} - \ln(m p_l)$ to the $m$ sampled columns outside it; both are normalised together.
//! *Theory* (`z_mode = kde`): $\hat o_i = \hat z_i^{-1} \sum_t e^{s_{i l_t}} v_{l_t} / (m p_{l_t})$ over all columns.
//! Columns are drawn independently by
//!
//! | `p_mode` | $p_l$ proportional to |
//! |---|---|
//! | `uniform` | $1$ |
//! | `value_mix` | $\lvert v_l\rvert^2 / 2\lVert V\rVert_F^2 + 1/2n$ |
//! | `public` | $\lvert \hat v_l\rvert / \lambda_{\max}(\hat V^\top \hat V) + 1/n$ with $\hat v = [v, 1]$, as in the authors' code |
//! | `kde` | $b_l + \lvert v_l\rvert^2 / \lVert V\rVert_2^2$, in the practical pipeline mixed half and half with $1/n$ |
//!
//! Token by token, the last `n_min` keys are exact; among the others a query sees the `block` keys around its Gray
//! rank, and `samples` uniform draws stand for the rest (`engine::hashed_stream`). The paper has no decoding.
//!
//! **Reference.** zandieh2023; charikar2017 and karppa2022 for the estimators; survey, clustering and sampling.
//! The densities are estimated by the backends of `kde`: the paper's primitive of Charikar et al. cannot be implemented
//! as such, and the authors did not implement it. Corrections of the survey's text: both density identities need the
//! factor $e^{|q|^2/2}$; $W$ has $e^{|k|^2/2}$, not $e^{|k|^2}$; the density is taken at $[q; 0]$; sampling is by norms
//! of *columns*, with keys as query points and queries as data; the block diagonal has sorted blocks of equal size, not
//! buckets of equal codes; $\gamma = 1/\lVert V\rVert_2^2$ stands for $\lVert P\rVert_2^2 / \lVert V\rVert_2^2$ with
//! $\lVert P\rVert_2$ taken as 1; the probability is a sum of two terms. All sums are kept in the log domain; public
//! code exponentiates raw logits. Estimated $\hat z_i$ are at least the largest exponential sampled, a lower bound of
//! $z_i$.
//!
//! **Cost.** Practical $2(n_q + n_k)\, d\, r + 2 n_q (b + m)(d + d_v)$, memory $n_q (d_v + O(1)) + m (d + d_v)$. The
//! paper's bound for the theory is $O(\epsilon^{-2} d\, n^{1.173})$ (quoted).
//!
//! **Guarantees.** Practical: the normaliser is unbiased, rows are convex combinations of values, the error falls
//! as $m^{-1/2}$; tested here. Theory: $\lVert O - \hat O\rVert_2 \le \epsilon \lVert P\rVert_2 \lVert V\rVert_2$ for
//! $m = \Omega(\epsilon^{-2} \ln n\,(\mathrm{srank}\,P + \mathrm{srank}\,V))$ (quoted). Exact when `block` or
//! `samples` cover all keys.
//!
//! **When to use.** Without a mask, where values differ much in size; otherwise HyperAttention's uniform samples
//! without replacement do as well. Heavy keys outside the block dominate the variance: cover them with a near
//! field. With a causal mask the choice of columns must not depend on queries: `kde` modes are refused.

use crate::engine::{
    Assign, Columns, HashedRule, HashedStream, Operands, Ranks, Rectangle, Row, SortHashes, SortedBlocks,
    attend_blocks, causal_pairs, causalize, divide_by, draw_sort_hashes, exact_group, exact_rows,
};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream, Queries};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, Promise, RunInfo, Spec, Status, Support, Tunable,
    Withdrawn,
};
use crate::workspace::Context;
use crate::{Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::Mat;
use attlas_num::cluster::inverse_order;
use attlas_num::hash::kde::{Backend, log_exp_sums, log_sum_exp};
use attlas_num::kernels::{Attend, Band, merge_lse};
use attlas_num::par::*;
use attlas_num::randla::operator_norm;
use attlas_num::rng::StreamKey;
use std::ops::Range;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "kdeformer",
    family: Family::Clustering,
    title: "KDEformer: hashed block diagonal and columns sampled by importance",
    reference: "zandieh2023",
    claims: Claims {
        decode: true,
        exact_at: &[("block", Budget::NumKeys), ("samples", Budget::NumKeys)],
        unbiased: true,
        deterministic: false,
        exponent: 1.173,
        except: &[
            (Law::KeyOrder, "columns are drawn by their place"),
            (Law::QueriesAlone, "without a mask, queries are cut into blocks by their rank among each other"),
            (Law::LinearInValues, "columns are drawn by the norms of their values"),
            (
                Law::DecodeIsPrefill,
                "a prompt is halved recursively with columns of its own in each part; decoding draws keys uniformly",
            ),
        ],
        withdrawn: &[
            Withdrawn {
                param: "z_mode",
                value: "kde",
                promise: Promise::RowStochastic,
                reason: "numerator and normaliser come from different samples",
            },
            Withdrawn {
                param: "z_mode",
                value: "kde",
                promise: Promise::Unbiased,
                reason: "the estimated normaliser is raised to the largest exponential sampled",
            },
            Withdrawn {
                param: "samples",
                value: "0",
                promise: Promise::Unbiased,
                reason: "what lies outside the block is left out",
            },
            Withdrawn {
                param: "precision",
                value: "bf16",
                promise: Promise::RowStochastic,
                reason: "values rounded to 8 significant bits leave the hull of the values",
            },
            Withdrawn {
                param: "precision",
                value: "bf16",
                promise: Promise::Unbiased,
                reason: "operands are rounded to 8 significant bits",
            },
        ],
        spread: Spread::Ring { window: None, shared: &["block", "samples"] },
        ..Claims::BASE
    },
    probes: &[
        &[("block", "8"), ("samples", "24"), ("n_min", "8")],
        &[("block", "7"), ("samples", "20"), ("n_min", "1"), ("p_mode", "uniform")],
        &[("block", "8"), ("samples", "20"), ("n_min", "9"), ("p_mode", "public")],
        &[("block", "8"), ("samples", "20"), ("p_mode", "kde"), ("kde", "weighted")],
        &[("block", "8"), ("samples", "24"), ("z_mode", "kde"), ("p_mode", "kde")],
        &[("block", "8"), ("samples", "24"), ("z_mode", "kde"), ("kde", "hbe"), ("kde_tables", "8")],
        &[("block", "8"), ("samples", "24"), ("z_mode", "kde"), ("p_mode", "kde"), ("kde", "exact")],
    ],
    subsets: &[&[("block", "6"), ("samples", "0"), ("n_min", "4")]],
    exact_below: Some("n_min"),
    tunable: &[Tunable::budget("block"), Tunable::budget("samples"), Tunable::values("precision", &["bf16"])],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Source of a row's normaliser.
    pub enum Normaliser {
        /// From the same block and samples as the numerator.
        SelfNorm = "self_norm",
        /// From a separate kernel density estimate.
        Kde = "kde",
    }
}

crate::choices! {
    /// Probabilities by which columns are drawn.
    pub enum Probabilities {
        /// Equal probabilities.
        Uniform = "uniform",
        /// Squared norms of values, mixed with uniform.
        ValueMix = "value_mix",
        /// As in the authors' code.
        Public = "public",
        /// Estimated column norms and squared norms of values.
        Kde = "kde",
    }
}

crate::choices! {
    /// Method of estimating kernel densities.
    pub enum Density {
        /// All terms.
        Exact = "exact",
        /// Keys drawn by their weight.
        Weighted = "weighted",
        /// The query's hashed block exactly, the rest from a uniform sample.
        NearPlusSample = "near_plus_sample",
        /// Hashing-based estimators: hash tables of Euclidean space.
        Hbe = "hbe",
    }
}

crate::params! {
    /// Parameters of [`KdeFormer`].
    pub struct Params {
        /// Maximum number of keys in a block.
        block: usize = 64, in 1..=1 << 30;
        /// Columns drawn, shared by all queries of a head; 0 leaves out everything but the block.
        samples: usize = 128, in 0..=1 << 30;
        /// Bits of the hash; 0 keeps the order of tokens.
        hashes: usize = 7, in 0..=31;
        /// Precision of the products with 512 or more sampled columns: full, or bf16 with sums in single precision,
        /// whose rounding is far below the sampling error.
        precision: Operands = Operands::Full;
        /// Base of the causal recursion: squares of at most this number of rows are exact.
        n_min: usize = 1024, in 0..=1 << 30;
        /// Source of the normalisers: self_norm, or kde (the theory, without the block).
        z_mode: Normaliser = Normaliser::SelfNorm;
        /// Probabilities by which columns are drawn.
        p_mode: Probabilities = Probabilities::ValueMix;
        /// Method of estimating kernel densities, where a mode needs them.
        kde: Density = Density::NearPlusSample;
        /// Samples per density estimate; auto takes the number of columns.
        kde_samples: Option<usize> = None, in 1..=1 << 30;
        /// Width of the buckets of hbe.
        kde_width: f64 = 4.0, in 1e-3..=1e6;
        /// Hash functions per table of hbe.
        kde_functions: usize = 2, in 1..=64;
        /// Tables of hbe.
        kde_tables: usize = 64, in 1..=1 << 16;
        /// Groups of tables: the estimate is the median of the groups' means, with 1 the mean of all tables.
        kde_groups: usize = 1, in 1..=1 << 16;
        /// Seed of directions and samples.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        let causal = p.mask == Mask::Causal;
        Support::yes()
            .and_unless(
                causal && self.p_mode == Probabilities::Kde,
                "p_mode = kde chooses columns by all queries, which would leak later tokens: use value_mix, public \
                 or uniform for causal problems",
            )
            .and_unless(
                causal && self.z_mode == Normaliser::Kde,
                "z_mode = kde estimates the rows together, which would leak later tokens: use z_mode = self_norm for \
                 causal problems",
            )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        KdeFormer::new(x.problem, self)
    }
}

/// The plan: the parameters.
#[derive(Clone, Debug)]
pub struct KdeFormer {
    params: Params,
    hashes: SortHashes,
}

impl KdeFormer {
    /// Creates a plan with these parameters.
    pub(crate) fn new(p: &Problem, params: Params) -> Result<Self> {
        params.validate()?;
        if params.z_mode == Normaliser::Kde && params.samples == 0 {
            return Err(crate::Error::param("samples", 0, "at least 1 with z_mode = kde"));
        }
        let hashes = draw_sort_hashes(p, params.seed, params.hashes)?;
        Ok(Self { params, hashes })
    }

    fn is_exact(&self, n_k: usize) -> bool {
        n_k <= self.params.block.max(self.params.samples)
    }

    fn covers(&self, n_q: usize, n_k: usize, mask: Mask) -> bool {
        self.is_exact(n_k) || mask == Mask::Causal && n_q.max(n_k) <= self.params.n_min
    }

    fn needs_density(&self) -> bool {
        self.params.z_mode == Normaliser::Kde || self.params.p_mode == Probabilities::Kde
    }

    fn backend(&self) -> Backend {
        let Params { block, samples, hashes, kde_samples, .. } = self.params;
        let samples = kde_samples.unwrap_or(samples.max(1));
        match self.params.kde {
            Density::Exact => Backend::Exact,
            Density::Weighted => Backend::Weighted { samples },
            Density::NearPlusSample => Backend::NearPlusSample { block, samples, bits: hashes },
            Density::Hbe => Backend::Hbe {
                width: self.params.kde_width,
                functions: self.params.kde_functions,
                tables: self.params.kde_tables,
                groups: self.params.kde_groups,
            },
        }
    }

    /// Counts the inner products of densities at `points` of `data`; an upper bound where they are hashed.
    fn density_scores(&self, points: usize, data: usize) -> u64 {
        let each = match self.backend() {
            Backend::Exact => data,
            Backend::Weighted { samples } => samples,
            Backend::NearPlusSample { block, samples, .. } => block.min(data) + samples.min(data),
            Backend::Hbe { tables, .. } => tables,
        };
        (points * each) as u64
    }

    /// Computes attention without a mask in a part of a group.
    fn part<T: Real>(&self, mut group: Group<'_, T>, part: &Rectangle, assign: Assign) -> Result<RunInfo> {
        if self.is_exact(group.n_k()) {
            return exact_group(&mut group);
        }
        let key = group.index.stream_key(self.params.seed);
        let of_part = part.stream(key);
        if !self.needs_density() {
            let (q, k, v, index) = (group.q, group.k, group.v, group.index);
            let (blocks, drawn) = join(
                || self.blocks(q, k, assign, index),
                || self.columns(&self.weights(v, None, of_part), of_part),
            );
            return self.attend(&mut group, &blocks, &drawn);
        }
        // Densities depend on one head's queries, so heads run one at a time.
        let (rows, d_v) = (group.n_q(), group.d_v());
        let mut info = RunInfo::default();
        for h in 0..group.q.heads() {
            let head = Group {
                q: group.q.only(h),
                out: &mut group.out[h * rows * d_v..(h + 1) * rows * d_v],
                lse: &mut group.lse[h * rows..(h + 1) * rows],
                ..group
            };
            info = info.merge(self.by_density(head, assign, of_part)?);
        }
        Ok(info)
    }

    /// Computes one head with columns drawn by estimated norms, or rows divided by estimated sums.
    fn by_density<T: Real>(
        &self,
        mut group: Group<'_, T>,
        assign: Assign,
        of_part: StreamKey,
    ) -> Result<RunInfo> {
        let (q, k, scale, cx) = (group.q.head(0), group.k, group.scale, group.cx);
        let log_z = log_row_sums(q, k, scale, self.backend(), of_part.named("rows"), cx);
        let columns = (self.params.p_mode == Probabilities::Kde).then(|| {
            log_column_norms(q, k, scale, &log_z, self.backend(), of_part.named("column norms"), cx)
        });
        let weights = self.weights(group.v, columns.as_deref(), of_part);
        let mut info = match self.params.z_mode {
            Normaliser::SelfNorm => {
                let blocks = self.blocks(group.q, k, assign, group.index);
                self.attend(&mut group, &blocks, &self.columns(&weights, of_part))?
            }
            Normaliser::Kde => self.divide(&mut group, &weights, &log_z, of_part)?,
        };
        // The row sums visit keys for every query, the column norms queries for every key.
        info.keys_visited += self.density_scores(q.rows(), k.rows());
        if columns.is_some() {
            info.keys_visited += self.density_scores(k.rows(), q.rows());
        }
        if let Some(columns) = columns {
            // ‖P‖_F², which lies between 1 and n where z is exact.
            info.figures.insert("weights_fro2", log_sum_exp(&columns).exp());
        }
        Ok(info)
    }

    /// Returns the unnormalised probabilities of the columns.
    fn weights<T: Real>(&self, v: MatRef<'_, T>, log_columns: Option<&[f64]>, key: StreamKey) -> Vec<f64> {
        let n = v.rows() as f64;
        match self.params.p_mode {
            Probabilities::Uniform => vec![1.0; v.rows()],
            Probabilities::ValueMix => {
                let squares = par_relative_squares(v);
                let total: f64 = squares.iter().sum();
                squares.iter().map(|s| s / (2.0 * total) + 0.5 / n).collect()
            }
            Probabilities::Public => {
                let augmented = Mat::from_fn(v.rows(), v.cols() + 1, |i, j| {
                    if j < v.cols() { v.row(i)[j].to_f64() } else { 1.0 }
                });
                let norm = operator_norm(&augmented, NORM_TOL, &mut key.named("norm").rng()).value;
                let length = |i: usize| augmented.row(i).iter().map(|x| x * x).sum::<f64>().sqrt();
                (0..v.rows()).map(|i| length(i) / norm / norm + 1.0 / n).collect()
            }
            Probabilities::Kde => {
                let columns = log_columns.unwrap_or(&[]);
                let norm = operator_norm(&v, NORM_TOL, &mut key.named("norm").rng()).value;
                let term = |row: &[T]| row.iter().map(|x| (x.to_f64() / norm).powi(2)).sum::<f64>().ln();
                let both: Vec<f64> = v
                    .iter_rows()
                    .zip(columns)
                    .map(|(row, &b)| if norm > 0.0 { log_sum_exp(&[b, term(row)]) } else { b })
                    .collect();
                let total = log_sum_exp(&both);
                let mix = if self.params.z_mode == Normaliser::Kde { 0.0 } else { 0.5 };
                both.iter().map(|b| (1.0 - mix) * (b - total).exp() + mix / n).collect()
            }
        }
    }

    fn blocks<T: Real>(
        &self,
        q: Queries<'_, T>,
        k: MatRef<'_, T>,
        assign: Assign,
        index: GroupIndex,
    ) -> SortedBlocks {
        let block = self.params.block;
        let ranks = Ranks::new(q, k, self.hashes.of(index).as_ref());
        SortedBlocks::new(&ranks, &Rectangle { rows: 0..q.n_q(), keys: 0..k.rows() }, None, block, assign)
    }

    fn columns(&self, weights: &[f64], key: StreamKey) -> Columns {
        Columns::draw(weights, self.params.samples, key.named("columns"))
    }

    /// Number of blocks that share one pass over the columns outside them: enough rows to repay the packing of keys.
    fn blocks_together(&self) -> usize {
        (SHARED_ROWS / self.params.block).max(1)
    }

    /// Computes the practical pipeline: block and samples, normalised together.
    ///
    /// All queries share the samples, except those in a query's own block. With many samples, a few blocks together
    /// attend to the samples outside all of them, gathered once; each block then attends to its own keys and the few
    /// samples in its neighbours.
    fn attend<T: Real>(
        &self,
        group: &mut Group<'_, T>,
        blocks: &SortedBlocks,
        drawn: &Columns,
    ) -> Result<RunInfo> {
        let together = self.blocks_together();
        let sampled = Sampled::<T>::new(drawn, blocks);
        let many = sampled.keys.len() >= SHARED_ROWS;
        let near = |c: usize| {
            let first = c / together * together;
            let around = match many {
                true => sampled.inside(blocks, first..(first + together).min(blocks.blocks())),
                false => 0..sampled.keys.len(),
            };
            let own = sampled.inside(blocks, c..c + 1);
            let beside = (around.start..own.start).chain(own.end..around.end);
            beside.map(|t| (sampled.keys[t], sampled.bias[t])).collect()
        };
        let mut info = attend_blocks(group, blocks, near)?;
        if many {
            info.keys_visited += self.attend_sampled(group, blocks, &sampled);
        }
        Ok(info)
    }

    /// Merges into every row the samples outside the blocks that share its pass. Returns the pairs visited.
    fn attend_sampled<T: Real>(
        &self,
        group: &mut Group<'_, T>,
        blocks: &SortedBlocks,
        sampled: &Sampled<T>,
    ) -> u64 {
        let (q, k, v, scale, cx) = (group.q, group.k, group.v, group.scale, group.cx);
        let (m, n_q, d, d_v) = (sampled.keys.len(), group.n_q(), k.cols(), v.cols());
        let index = || sampled.keys.iter().map(|&l| l as usize);
        let mut keys = cx.scratch.take::<T>(m * d);
        let mut values = cx.scratch.take::<T>(m * d_v);
        k.gather_into(index(), &mut keys);
        v.gather_into(index(), &mut values);
        let (keys, values) = (MatRef::new(&keys, m, d), MatRef::new(&values, m, d_v));

        // Results are in the order of blocks; a task takes rows of blocks that share a pass.
        let rows: Vec<Row> = (0..blocks.blocks()).flat_map(|c| blocks.block_rows(c)).copied().collect();
        let mut parts = cx.scratch.take::<T>(rows.len() * d_v);
        let mut part_lse = cx.scratch.take::<T>(rows.len());
        let mut tasks = Vec::new();
        let (mut parts_left, mut lse_left, mut rows_left) = (&mut parts[..], &mut part_lse[..], &rows[..]);
        let mut visited = 0;
        for first in (0..blocks.blocks()).step_by(self.blocks_together()) {
            let some = first..(first + self.blocks_together()).min(blocks.blocks());
            let hidden = sampled.inside(blocks, some.clone());
            let mut left: usize = some.map(|c| blocks.block_rows(c).len()).sum();
            visited += (left * (m - hidden.len())) as u64;
            while left > 0 {
                let count = left.min(SHARED_ROWS);
                left -= count;
                let (out, more) = parts_left.split_at_mut(count * d_v);
                let (lse, more_lse) = lse_left.split_at_mut(count);
                let (own, more_rows) = rows_left.split_at(count);
                (parts_left, lse_left, rows_left) = (more, more_lse, more_rows);
                tasks.push((own, hidden.clone(), out, lse));
            }
        }
        tasks.into_par_iter().with_max_len(1).for_each(|(rows, hidden, out, lse)| {
            let mut queries = cx.scratch.take::<T>(rows.len() * d);
            for (r, to) in rows.iter().zip(queries.chunks_exact_mut(d)) {
                to.copy_from_slice(q.head(r.head as usize).row(r.row as usize));
            }
            let mut bias = cx.scratch.take_copy::<T>(&sampled.bias);
            bias[hidden].fill(T::NEG_INFINITY);
            let job = Attend {
                q: MatRef::new(&queries, rows.len(), d),
                k: keys,
                v: values,
                scale,
                bias: Some(&bias),
                band: Band::ALL,
                tile_k: cx.schedule.tile_k,
                isa: cx.schedule.isa,
                precision: self.params.precision.precision(),
                decode: false,
                softcap: None,
            };
            job.run(cx.scratch, out, lse);
        });

        let mut place = vec![0u32; rows.len()];
        rows.iter().zip(0..).for_each(|(r, at)| place[r.head as usize * n_q + r.row as usize] = at);
        let merge = |((out, lse), place): ((&mut [T], &mut [T]), &[u32])| {
            for ((out, lse), &at) in out.chunks_exact_mut(d_v).zip(lse).zip(place) {
                let at = at as usize;
                merge_lse(out, lse, &parts[at * d_v..(at + 1) * d_v], part_lse[at]);
            }
        };
        group
            .out
            .par_chunks_mut(SHARED_ROWS * d_v)
            .zip(group.lse.par_chunks_mut(SHARED_ROWS))
            .zip(place.par_chunks(SHARED_ROWS))
            .for_each(merge);
        visited
    }

    /// Computes the theory variant: sampled columns divided by the estimated normaliser.
    fn divide<T: Real>(
        &self,
        group: &mut Group<'_, T>,
        weights: &[f64],
        log_z: &[f64],
        key: StreamKey,
    ) -> Result<RunInfo> {
        let (k, v, scale, cx) = (group.k, group.v, group.scale, group.cx);
        let drawn = Columns::draw(weights, self.params.samples, key.named("columns"));
        let (m, d, d_v) = (drawn.index.len(), k.cols(), v.cols());
        let mut keys = cx.scratch.take::<T>(m * d);
        let mut values = cx.scratch.take::<T>(m * d_v);
        k.gather_into(drawn.index.iter().copied(), &mut keys);
        v.gather_into(drawn.index.iter().copied(), &mut values);
        let (keys, values) = (MatRef::new(&keys, m, d), MatRef::new(&values, m, d_v));
        let bias: Vec<T> = drawn.bias.iter().map(|&b| T::from_f64(b)).collect();
        let log_total = T::from_f64(drawn.log_total);
        group.par_row_blocks(TASK_ROWS, |block| {
            exact_rows(block.q, keys, values, Some(&bias), scale, Band::ALL, cx, block.out, block.lse);
            let z = &log_z[block.first..];
            for ((o, l), &z) in block.out.chunks_exact_mut(d_v).zip(block.lse.iter_mut()).zip(z) {
                *l = divide_by(o, *l, T::from_f64(z), log_total);
            }
            Ok(())
        })?;
        Ok(RunInfo::visited((group.n_q() * m) as u64))
    }
}

/// Query rows per task of the theory variant.
const TASK_ROWS: usize = 192;

/// Query rows that share a pass over the samples, and the least number of samples for such a pass.
const SHARED_ROWS: usize = 512;

/// Drawn columns without repetition, in the order of the sorted keys.
struct Sampled<T> {
    /// Rank of each among the sorted keys.
    ranks: Vec<u32>,
    keys: Vec<u32>,
    /// Bias of each logit, which includes the number of times the column was drawn.
    bias: Vec<T>,
}

impl<T: Real> Sampled<T> {
    fn new(drawn: &Columns, blocks: &SortedBlocks) -> Self {
        let rank = inverse_order(blocks.keys());
        let mut all: Vec<(u32, f64)> =
            drawn.index.iter().zip(&drawn.bias).map(|(&l, &bias)| (rank[l], bias)).collect();
        all.sort_unstable_by_key(|&(rank, _)| rank);
        let (mut ranks, mut bias) = (Vec::new(), Vec::new());
        for equal in all.chunk_by(|a, b| a.0 == b.0) {
            ranks.push(equal[0].0);
            bias.push(T::from_f64(equal[0].1 + (equal.len() as f64).ln()));
        }
        let keys = ranks.iter().map(|&r| blocks.keys()[r as usize]).collect();
        Self { ranks, keys, bias }
    }

    /// Returns the range of columns in some consecutive blocks.
    fn inside(&self, blocks: &SortedBlocks, some: Range<usize>) -> Range<usize> {
        let (start, end) = (blocks.ranks(some.start).start, blocks.ranks(some.end - 1).end);
        let before = |rank: usize| self.ranks.partition_point(|&r| (r as usize) < rank);
        before(start)..before(end)
    }
}

/// Relative accuracy of the spectral norms, sufficient for probabilities.
const NORM_TOL: f64 = 1e-3;

/// Squared norms of rows relative to the largest entry, so that they cannot overflow; NaN where all are zero.
fn par_relative_squares<T: Real>(x: MatRef<'_, T>) -> Vec<f64> {
    let mut squares = vec![0.0; x.rows()];
    let rows = |t: usize, len: usize| x.sub_rows(t * SHARED_ROWS..t * SHARED_ROWS + len);
    let largest = squares
        .par_chunks(SHARED_ROWS)
        .enumerate()
        .map(|(t, part)| {
            rows(t, part.len()).iter_rows().fold(0.0, |a: f64, row| {
                // `max` ignores NaN, whatever the order.
                row.iter().fold(a, |a, v| a.max(v.to_f64().abs()))
            })
        })
        .reduce(|| 0.0, f64::max);
    squares.par_chunks_mut(SHARED_ROWS).enumerate().for_each(|(t, part)| {
        let rows = rows(t, part.len());
        for (square, row) in part.iter_mut().zip(rows.iter_rows()) {
            *square = row.iter().map(|v| (v.to_f64() / largest).powi(2)).sum();
        }
    });
    squares
}

/// $\ln z_i = \ln \sum_j e^{\beta q_i^\top k_j}$, exact or estimated.
fn log_row_sums<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    scale: T,
    backend: Backend,
    key: StreamKey,
    cx: Context<'_>,
) -> Vec<f64> {
    let root = scale.abs().sqrt();
    let queries = scaled(q, if scale < T::ZERO { -root } else { root }, cx);
    let keys = scaled(k, root, cx);
    let (queries, keys) = (MatRef::new(&queries, q.rows(), q.cols()), MatRef::new(&keys, k.rows(), k.cols()));
    log_exp_sums(queries, keys, None, backend, key).unwrap_or_else(|| vec![f64::NAN; q.rows()])
}

/// $\ln |P e_l|^2 = \ln \sum_i e^{2\beta q_i^\top k_l} / z_i^2$: keys are the query points, queries the data.
fn log_column_norms<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    scale: T,
    log_z: &[f64],
    backend: Backend,
    key: StreamKey,
    cx: Context<'_>,
) -> Vec<f64> {
    let root = (scale.abs() + scale.abs()).sqrt();
    let points = scaled(k, if scale < T::ZERO { -root } else { root }, cx);
    let data = scaled(q, root, cx);
    let (points, data) = (MatRef::new(&points, k.rows(), k.cols()), MatRef::new(&data, q.rows(), q.cols()));
    // A row without a normaliser has no weight on any column.
    let weight = |z: &f64| if *z == f64::NEG_INFINITY { f64::NEG_INFINITY } else { -2.0 * z };
    let weights: Vec<f64> = log_z.iter().map(weight).collect();
    log_exp_sums(points, data, Some(&weights), backend, key).unwrap_or_else(|| vec![f64::NAN; k.rows()])
}

fn scaled<'a, T: Real>(x: MatRef<'_, T>, factor: T, cx: Context<'a>) -> attlas_num::scratch::Buf<'a, T> {
    let mut copy = cx.scratch.take::<T>(x.rows() * x.cols());
    for (to, from) in copy.chunks_exact_mut(x.cols()).zip(x.iter_rows()) {
        to.iter_mut().zip(from).for_each(|(t, &f)| *t = factor * f);
    }
    copy
}

impl GroupPlan for KdeFormer {
    fn cost(&self, p: &Problem) -> Cost {
        let Params { block, samples, hashes, n_min, .. } = self.params;
        let (d, d_v, heads) = (p.d as u64, p.d_v as u64, (p.batch * p.n_heads) as u64);
        let (rows, keys) = (heads * p.n_q as u64, (p.batch * p.n_kv_heads * p.n_k) as u64);
        if self.covers(p.n_q, p.n_k, p.mask) {
            let bytes = 4 * (rows + keys) * (d + d_v);
            return Cost { setup_flops: 0, run_flops: 2 * p.visible_pairs() * (d + d_v), bytes };
        }
        let part = |rows: usize, keys: usize| {
            rows as u64 * (if self.is_exact(keys) { keys } else { (block + samples).min(keys) }) as u64
        };
        let (pairs, levels) = match p.mask {
            Mask::None => (part(p.n_q, p.n_k), 1),
            Mask::Causal => {
                let levels = (p.n_q / n_min.max(1)).max(1).ilog2().max(1);
                (causal_pairs(p.n_q, p.n_k, n_min, &part), u64::from(levels))
            }
        };
        let per_density = match self.backend() {
            Backend::Exact => rows * p.n_k as u64,
            Backend::Weighted { samples } => rows * samples as u64,
            Backend::NearPlusSample { block, samples, .. } => rows * (block + samples) as u64,
            Backend::Hbe { functions, tables, .. } => (rows + keys) * ((functions + 1) * tables) as u64,
        };
        let densities = u64::from(self.needs_density()) + u64::from(self.params.p_mode == Probabilities::Kde);
        Cost {
            setup_flops: 2 * levels * (rows + keys) * d * hashes as u64 + 2 * densities * per_density * d,
            run_flops: 2 * heads * pairs * (d + d_v),
            bytes: 4 * levels * (rows + keys) * (d + d_v),
        }
    }

    fn run<T: Real>(&self, mut group: Group<'_, T>) -> Result<RunInfo> {
        if self.covers(group.n_q(), group.n_k(), group.mask) {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut group)? });
        }
        match group.mask {
            Mask::None => {
                let whole = Rectangle::whole(&group);
                self.part(group, &whole, Assign::Balanced)
            }
            Mask::Causal => causalize(&mut group, self.params.n_min, &|part_rows, part| {
                part_rows.run(|group| self.part(group, &part, Assign::Alone))
            }),
        }
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        if self.needs_density() {
            return None;
        }
        let Params { block, samples, n_min, seed, .. } = self.params;
        let key = index.stream_key(seed);
        let rule = HashedRule { block, samples, replacement: false, recent: n_min, key };
        Some(Box::new(HashedStream::new(rule, self.hashes.of(index).as_ref(), (p.d, p.d_v), index)))
    }
}

#[cfg(test)]
mod tests;
