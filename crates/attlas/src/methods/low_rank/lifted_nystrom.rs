//! Lifted Nyström: softmax attention through landmarks of the lifted exponential kernel.
//!
//! **Idea.** The scores $e^{\beta q^\top k}$ are an off-diagonal block of the positive semidefinite kernel of queries
//! and keys together. Approximate this block by Nyström with a few queries or keys as landmarks.
//!
//! **Math.** With $x = \sqrt\beta\,\tau q$ and centred $y = \sqrt\beta\, k / \tau$ the score is
//! $e^{\|x\|^2/2}\, g(x, y)\, e^{\|y\|^2/2}$, $g$ the Gaussian kernel. Nyström commutes with diagonal scaling and the
//! factor of the query cancels in the normalisation, so for landmarks $L$, $M = g(L, L) + \gamma I$ and
//! $c = \max_j \|y_j\|^2/2$
//! $$[V_S \mid w] = \mathrm{diag}(e^{c - \|l\|^2/2})\, M^{-1} g(L, Y)\, \mathrm{diag}(e^{\|y\|^2/2 - c})\, [V \mid 1]$$
//! and $o = \sum_s e^{x^\top l_s} V_s / \sum_s e^{x^\top l_s} w_s$: no large exponential is ever formed. The overflow
//! that is sometimes given as the reason to leave softmax disappears with this choice of gauge; the authors' own reason
//! is instability in training.
//!
//! **Reference.** chen2021skyformer, its lifted Nyström step applied to softmax; the Gaussian model of that paper is
//! `skyformer`. Landmarks from keys are pivoted Cholesky with uniform pivots, see `wildcat`.
//!
//! **Cost.** $2m(n_q + n_k)(d + d_v + 1) + 2m^2 d + m^3/3$; memory $m^2 + m(d + d_v)$ and the scaled keys. With
//! landmarks from keys the heads of a group share everything but the last step.
//!
//! **Guarantees.** Exact when `landmarks` covers the keys. As $\gamma \to 0$ the rows and columns of landmarks are
//! reproduced; the residual of the lifted kernel is positive semidefinite, so the error of an entry is at most
//! $\sqrt{\kappa(x, x)\, \mathrm{res}(y)}$. Landmarks drawn twice change nothing. If $\|y\|^2/2$ spreads over more than
//! 60 (600 in double precision), weights would underflow and attention is computed exactly.
//!
//! **When to use.** As the yardstick of landmark methods: uniform landmarks miss isolated keys, which `wildcat` finds.
//! Raise `tau` for large keys and small queries.

use crate::engine::coreset::{
    BlockCausal, Cache, CacheMode, CompressKeys, Coreset, CoresetStream, Fallback, Finish, Prefix, Size,
    Values, attend_coreset, attend_stand_ins, stand_ins,
};
use crate::engine::exact_group;
use crate::engine::gaussian::{self, Points, Sampling, SolverKind, Source};
use crate::engine::moments::mean_of;
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream, Queries, StandIns};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Support, Tunable,
};
use crate::workspace::Context;
use crate::{Mask, MatRef, Problem, Real, Result, Spread, TensorRef};
use attlas_num::par::*;
use attlas_num::randla::{GaussianKernel, rp_cholesky, rpcholesky};
use attlas_num::rng::StreamKey;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "lifted_nystrom",
    family: Family::LowRank,
    title: "Nyström approximation of the lifted softmax kernel",
    reference: "chen2021skyformer",
    claims: Claims {
        decode: true,
        exact_at: &[("landmarks", Budget::NumKeys)],
        row_stochastic: false,
        deterministic: false,
        exponent: 1.0,
        except: &[
            (Law::LinearInValues, "outputs are clipped to the range of the values"),
            (Law::KeyOrder, "landmarks are drawn by position; another order is another draw"),
            (Law::QueriesAlone, "with source = both some landmarks are queries"),
            (Law::DecodeIsPrefill, "with cache = prefix a stream compresses its first tokens at once"),
        ],
        spread: Spread::Gather,
        ..Claims::BASE
    },
    exact_below: Some("block"),
    probes: &[
        &[("landmarks", "24"), ("block", "16"), ("sinks", "2"), ("window", "5"), ("cache", "prefix")],
        &[("landmarks", "20"), ("source", "both"), ("clip", "false")],
        &[
            ("landmarks", "20"),
            ("sampling", "uniform_wr"),
            ("solver", "razavi"),
            ("tau", "1.5"),
            ("block", "30"),
        ],
        &[
            ("landmarks", "9"),
            ("sampling", "rpcholesky"),
            ("centre", "false"),
            ("block", "20"),
            ("tree", "true"),
        ],
        &[("landmarks", "12"), ("sampling", "rpcholesky"), ("source", "both"), ("fallback", "zero_clip")],
    ],
    tunable: &[Tunable::budget("landmarks")],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`LiftedNystrom`].
    pub struct Params {
        /// Number of landmarks; with a causal mask, per block.
        landmarks: usize = 128, in 1..=1 << 20;
        /// Source of the landmarks.
        source: Source = Source::Keys;
        /// Sampling of the landmarks.
        sampling: Sampling = Sampling::UniformWor;
        /// Shift added to the diagonal of the kernel of the landmarks.
        gamma: f64 = 1e-8, in 0.0..=1e6;
        /// Solver of the small system.
        solver: SolverKind = SolverKind::Cholesky;
        /// Steps of `solver = razavi`.
        iters: usize = 6, in 1..=25;
        /// Temperature: queries are multiplied and keys divided by it before the Gaussian kernel is taken.
        tau: f64 = 1.0, in 1e-6..=1e6;
        /// Subtract the mean of the keys first.
        centre: bool = true;
        /// Clip outputs to the range of the values.
        clip: bool = true;
        /// Output of a row whose denominator cancels.
        fallback: Fallback = Fallback::Exact;
        /// Queries per block, with a causal mask.
        block: usize = 1024, in 1..=1 << 30;
        /// With a causal mask, join coresets of equal numbers of blocks and compress them again.
        tree: bool = false;
        /// Keys that a stream compresses.
        cache: CacheMode = CacheMode::Blocks;
        /// With `cache = prefix`, number of first tokens kept uncompressed.
        sinks: usize = 32, in 0..=1 << 30;
        /// With `cache = prefix`, number of last tokens of the prefix kept uncompressed.
        window: usize = 32, in 0..=1 << 30;
        /// With `cache = prefix`, share of the tokens in between that is kept.
        ratio: f64 = 0.25, in 0.0..=1.0;
        /// With `cache = prefix`, keys kept per bin.
        bin_rank: usize = 12, in 1..=1 << 20;
        /// Seed of the landmarks.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(
            p.mask == Mask::Causal && self.source == Source::Both,
            "query landmarks would let later queries act on earlier rows: set source = keys, which has a causal form",
        )
    }

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(LiftedNystrom::new(self))
    }
}

/// The plan, which is also the compressor of keys.
#[derive(Clone, Debug)]
pub struct LiftedNystrom {
    params: Params,
}

/// Landmarks, before they receive values.
struct Landmarks<T> {
    /// Coordinates in the space of the Gaussian kernel.
    scaled: Vec<T>,
    /// Keys of the softmax: logits with queries are `scale · qᵀl`.
    keys: Vec<T>,
}

impl LiftedNystrom {
    /// Creates a plan with these parameters.
    pub(crate) fn new(params: Params) -> Self {
        Self { params }
    }

    fn finish(&self) -> Finish {
        Finish { clip: self.params.clip, fallback: self.params.fallback }
    }

    fn causal(&self) -> BlockCausal<Self> {
        let Params { block, tree, .. } = self.params;
        BlockCausal { compressor: self.clone(), block, tree, finish: self.finish() }
    }

    /// True if nothing is approximated.
    fn covers(&self, n_q: usize, n_k: usize, mask: Mask) -> bool {
        let m = self.params.landmarks;
        match (mask, self.params.source) {
            (Mask::Causal, _) => m >= n_k || self.params.block >= n_k,
            (Mask::None, Source::Keys) => m >= n_k,
            // With all queries as landmarks the result is exact, as with all keys.
            (Mask::None, Source::Both) => m >= n_k || m / 2 >= n_q.min(n_k),
        }
    }

    /// Builds a coreset on landmarks from the keys and `queries`; returns it with the steps of the iteration, or `None`
    /// if weights would underflow or numbers are not finite.
    #[allow(clippy::too_many_arguments)]
    fn coreset<T: Real>(
        &self,
        k: MatRef<'_, T>,
        values: Values<'_, T>,
        queries: Option<MatRef<'_, T>>,
        m: usize,
        scale: f64,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Option<(Coreset<T>, Option<usize>)> {
        let choose = |y: MatRef<'_, T>| self.choose(y, queries, m, scale, stream, cx);
        self.coreset_at(k, values, queries, scale, cx, choose)
    }

    /// Builds a coreset on the landmarks chosen by `choose`: indices below the number of keys are keys, others queries.
    fn coreset_at<T: Real>(
        &self,
        k: MatRef<'_, T>,
        values: Values<'_, T>,
        queries: Option<MatRef<'_, T>>,
        scale: f64,
        cx: Context<'_>,
        choose: impl FnOnce(MatRef<'_, T>) -> Option<Vec<usize>>,
    ) -> Option<(Coreset<T>, Option<usize>)> {
        let (n, d) = (k.rows(), k.cols());
        let mean = if self.params.centre { mean_of(k) } else { vec![0.0; d] };
        let factor = scale.abs().sqrt() / self.params.tau;
        let mut y = cx.scratch.take::<T>(n * d);
        let mut half = cx.scratch.take::<T>(n);
        let centred = |key: &[T], y: &mut [T]| {
            let centred = key.iter().zip(&mean).map(|(k, m)| T::from_f64((k.to_f64() - m) * factor));
            y.iter_mut().zip(centred).for_each(|(y, c)| *y = c);
        };
        gaussian::points_into(k, centred, &mut y, &mut half);
        let y = MatRef::new(&y[..], n, d);
        let points = Points { x: y, half_norms: &half };
        let landmarks = self.gather(k, y, queries, &mean, scale, &choose(y)?);
        let m = landmarks.keys.len() / d;
        if m == 0 {
            return None;
        }
        let l = MatRef::new(&landmarks.scaled, m, d);
        let mut half_l = vec![T::ZERO; m];
        gaussian::half_norms_into(l, &mut half_l);
        let wide = half.iter().chain(&half_l).map(|h| h.to_f64());
        let (low, high) = wide.fold((f64::INFINITY, 0.0f64), |(a, b), h| {
            (a.min(h), if h.is_nan() { f64::INFINITY } else { b.max(h) })
        });
        let limit = if T::ROUNDOFF < 1e-10 { 600.0 } else { 60.0 };
        if (high - low).is_nan() || high - low > limit {
            return None;
        }
        let top = half.iter().map(|h| h.to_f64()).fold(0.0, f64::max);
        let cols = values.d_v() + 1;
        let at = Points { x: l, half_norms: &half_l };
        let sums = gaussian::apply_long(at, points, cols, cx, |j, row| {
            values.scaled_into(j, T::from_f64((half[j].to_f64() - top).exp()), row);
        });
        let solver = self.params.solver.with_steps(self.params.iters);
        let (solved, steps) = gaussian::solve(at, self.params.gamma, solver, &sums, cx)?;
        let mut coreset = Coreset::empty(d, cols - 1);
        let mut row = vec![T::ZERO; cols];
        for (s, key) in landmarks.keys.chunks_exact(d).enumerate() {
            let back = (top - half_l[s].to_f64()).exp();
            row.iter_mut().zip(solved.row(s)).for_each(|(r, x)| *r = T::from_f64(back * x));
            coreset.push(key, &row[..cols - 1], row[cols - 1]);
        }
        coreset.is_finite().then_some((coreset, steps))
    }

    /// Returns the factor on queries. A negative scale of inner products flips the sign of the queries.
    fn lift(&self, scale: f64) -> f64 {
        scale.abs().sqrt() * self.params.tau * scale.signum()
    }

    fn choose<T: Real>(
        &self,
        y: MatRef<'_, T>,
        queries: Option<MatRef<'_, T>>,
        m: usize,
        scale: f64,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Option<Vec<usize>> {
        let (n, d) = (y.rows(), y.cols());
        let n_q = queries.map_or(0, |q| q.rows());
        if self.params.sampling != Sampling::RpCholesky {
            let replace = self.params.sampling == Sampling::UniformWr;
            let from_q = if n_q == 0 { 0 } else { m / 2 };
            let stream = stream.named("landmarks");
            let of_k = gaussian::uniform(n, m - from_q, replace, stream.named("keys"));
            let of_q = gaussian::uniform(n_q, from_q, replace, stream.named("queries"));
            return Some(of_k.into_iter().chain(of_q.into_iter().map(|i| n + i)).collect());
        }
        let lift = self.lift(scale);
        let mut all = cx.scratch.take::<T>((n + n_q) * d);
        let (of_k, of_q) = all.split_at_mut(n * d);
        of_k.chunks_exact_mut(d).zip(y.iter_rows()).for_each(|(dst, row)| dst.copy_from_slice(row));
        if let Some(q) = queries {
            for (dst, row) in of_q.chunks_exact_mut(d).zip(q.iter_rows()) {
                dst.iter_mut().zip(row).for_each(|(x, q)| *x = T::from_f64(lift * q.to_f64()));
            }
        }
        let kernel = GaussianKernel::new(MatRef::new(&all[..], n + n_q, d));
        let log_scale: Vec<f64> = kernel.half_norms().iter().map(|h| h.to_f64()).collect();
        let (options, stream) = (rpcholesky::Options::rank(m), stream.named("pivots").with(0));
        Some(rp_cholesky(&kernel, Some(&log_scale), options, stream, cx.scratch).ok()?.pivots)
    }

    fn gather<T: Real>(
        &self,
        k: MatRef<'_, T>,
        y: MatRef<'_, T>,
        queries: Option<MatRef<'_, T>>,
        mean: &[f64],
        scale: f64,
        chosen: &[usize],
    ) -> Landmarks<T> {
        let (lift, stretch) = (self.lift(scale), self.params.tau * self.params.tau * scale.signum());
        let mut found = Landmarks { scaled: Vec::new(), keys: Vec::new() };
        for &i in chosen {
            match queries {
                Some(q) if i >= k.rows() => {
                    let q = q.row(i - k.rows());
                    found.scaled.extend(q.iter().map(|q| T::from_f64(lift * q.to_f64())));
                    let key = |(q, m): (&T, &f64)| T::from_f64(stretch * q.to_f64() + m);
                    found.keys.extend(q.iter().zip(mean).map(key));
                }
                _ => {
                    found.scaled.extend_from_slice(y.row(i));
                    found.keys.extend_from_slice(k.row(i));
                }
            }
        }
        found
    }

    /// Computes one head, with landmarks from its own queries.
    fn run_head<T: Real>(&self, mut g: Group<'_, T>, stream: StreamKey) -> Result<RunInfo> {
        let queries = Some(g.q.head(0));
        let (m, scale) = (self.params.landmarks, g.scale.to_f64());
        match self.coreset(g.k, Values::Plain(g.v), queries, m, scale, stream, g.cx) {
            None => Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? }),
            Some((coreset, iterations)) => {
                let info = attend_coreset(&mut g, &coreset, self.finish())?;
                Ok(RunInfo { rank: Some(coreset.len()), iterations, ..info })
            }
        }
    }
}

impl CompressKeys for LiftedNystrom {
    fn compress<T: Real>(
        &self,
        keys: MatRef<'_, T>,
        values: Values<'_, T>,
        size: Size,
        scale: f64,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Coreset<T> {
        let n = keys.rows();
        let bins = size.bins.clamp(1, n.max(1));
        let (len, m) = ((n / bins).max(1), size.rank.div_ceil(bins));
        let parts: Vec<Coreset<T>> = (0..n.div_ceil(len))
            .into_par_iter()
            .with_max_len(1)
            .map(|b| {
                let range = b * len..((b + 1) * len).min(n);
                let (k, v) = (keys.sub_rows(range.clone()), values.rows(range));
                let made = if k.rows() > m {
                    self.coreset(k, v, None, m, scale, stream.with(b as u64), cx)
                } else {
                    None
                };
                made.map_or_else(|| Coreset::verbatim(k, v), |m| m.0)
            })
            .collect();
        let mut all = Coreset::empty(keys.cols(), values.d_v());
        parts.iter().for_each(|part| all.append(part));
        all
    }

    fn size(&self, _: usize) -> Size {
        Size { rank: self.params.landmarks, bins: 1 }
    }
}

impl GroupPlan for LiftedNystrom {
    fn cost(&self, p: &Problem) -> Cost {
        let groups = (p.batch * p.n_kv_heads) as u64;
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let bytes = 4 * (groups * (p.n_k * (p.d + p.d_v)) as u64 + rows * (p.d + p.d_v) as u64);
        if self.covers(p.n_q, p.n_k, p.mask) {
            let run_flops = 2 * p.visible_pairs() * (p.d + p.d_v) as u64;
            return Cost { setup_flops: 0, run_flops, bytes };
        }
        let (m, wide) = (self.params.landmarks as u64, (p.d + p.d_v + 1) as u64);
        let one = |n: usize| 2 * n as u64 * m * wide + 2 * m * m * p.d as u64 + m * m * m / 3;
        let (setup_flops, run_flops) = match (p.mask, self.params.source) {
            (Mask::None, Source::Keys) => (groups * one(p.n_k), 2 * rows * m * wide),
            (Mask::None, Source::Both) => ((p.batch * p.n_heads) as u64 * one(p.n_k), 2 * rows * m * wide),
            (Mask::Causal, _) => {
                let blocks = (p.n_k / self.params.block) as u64;
                (groups * blocks * one(self.params.block), self.causal().run_flops(p))
            }
        };
        Cost { setup_flops, run_flops, bytes }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if self.covers(g.n_q(), g.n_k(), g.mask) {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let stream = g.index.stream_key(self.params.seed);
        if g.mask == Mask::Causal {
            return self.causal().run(&mut g, stream);
        }
        if self.params.source == Source::Keys {
            let (m, scale) = (self.params.landmarks, g.scale.to_f64());
            let made = self.coreset(g.k, Values::Plain(g.v), None, m, scale, stream, g.cx);
            return match made {
                None => Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? }),
                Some((coreset, iterations)) => {
                    let info = attend_coreset(&mut g, &coreset, self.finish())?;
                    Ok(RunInfo { rank: Some(coreset.len()), iterations, ..info })
                }
            };
        }
        let (n_q, d_v) = (g.n_q(), g.d_v());
        let mut info = RunInfo::default();
        for h in 0..g.q.heads() {
            let q = g.q.head(h);
            let tensor = TensorRef::new(q.data(), [1, 1, n_q, q.cols()], [0, 0, q.stride()])?;
            let head = Group {
                q: Queries::new(tensor),
                k: g.k,
                v: g.v,
                scale: g.scale,
                mask: g.mask,
                out: &mut g.out[h * n_q * d_v..(h + 1) * n_q * d_v],
                lse: &mut g.lse[h * n_q..(h + 1) * n_q],
                index: g.index,
                cx: g.cx,
            };
            info = info.merge(self.run_head(head, stream)?);
        }
        Ok(info)
    }

    fn stand_ins<T: Real>(&self, piece: StandIns<'_, T>) -> Option<Vec<T>> {
        Some(stand_ins(self, self.params.seed, piece))
    }

    fn attend_stand_ins<T: Real>(&self, g: Group<'_, T>, numbers: &[T]) -> Result<RunInfo> {
        attend_stand_ins(g, numbers)
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let Params { sinks, window, ratio, bin_rank, seed, .. } = self.params;
        let cache = match self.params.cache {
            CacheMode::Blocks => Cache::Blocks,
            CacheMode::Prefix => Cache::Prefix(Prefix { sinks, window, ratio, bin_rank }),
        };
        // Query landmarks belong to one problem; a stream has no fixed set of queries.
        (self.params.source == Source::Keys)
            .then(|| Box::new(CoresetStream::new(self.causal(), cache, p, index, seed)) as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{Case, How, Ran, assert_rows_close, check_method, golden, reference, run_with};
    use crate::{Mat, Options, Workspace};
    use attlas_num::linalg;

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    fn options(pairs: &[(&str, &str)]) -> Options {
        pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
    }

    fn run(method: &Method, pairs: &[(&str, &str)], case: &Case) -> Ran {
        let plan = method.plan(&case.problem, &options(pairs)).unwrap();
        run_with(&*plan, case, How::default()).unwrap()
    }

    /// The coreset of a one-head case on given landmarks, with other values.
    fn coreset_on(pairs: &[(&str, &str)], case: &Case, v: MatRef<'_, f64>, chosen: &[usize]) -> Coreset<f64> {
        let plan = LiftedNystrom::new(Params::from_options(&options(pairs)).unwrap());
        let p = &case.problem;
        let (q, k) = (MatRef::new(&case.q, p.n_q, p.d), MatRef::new(&case.k, p.n_k, p.d));
        let ws = Workspace::single().unwrap();
        let chosen = |_: MatRef<'_, f64>| Some(chosen.to_vec());
        plan.coreset_at(k, Values::Plain(v), Some(q), p.scale, ws.context(), chosen).unwrap().0
    }

    /// $\sum_s e^{\beta q^\top l_s} [V_s \mid w_s]$ of every query.
    fn sums(case: &Case, coreset: &Coreset<f64>) -> Vec<Vec<f64>> {
        let p = &case.problem;
        let sum = |q: &[f64]| {
            let mut sum = vec![0.0; coreset.values().cols() - 1];
            for (key, row) in coreset.keys().iter_rows().zip(coreset.values().iter_rows()) {
                let e = (p.scale * q.iter().zip(key).map(|(a, b)| a * b).sum::<f64>()).exp();
                sum.iter_mut().zip(row).for_each(|(s, v)| *s += e * v);
            }
            sum
        };
        case.q.chunks(p.d).map(sum).collect()
    }

    fn outputs(pairs: &[(&str, &str)], case: &Case, chosen: &[usize]) -> Vec<f64> {
        let v = MatRef::new(&case.v, case.problem.n_k, case.problem.d_v);
        let rows = sums(case, &coreset_on(pairs, case, v, chosen)).into_iter();
        rows.flat_map(|row| row[..row.len() - 1].iter().map(|x| x / row[row.len() - 1]).collect::<Vec<_>>())
            .collect()
    }

    #[test]
    fn given_landmarks_give_the_golden_values() {
        let case = golden::inputs();
        let pairs = [("centre", "false"), ("gamma", "0")];
        let o = outputs(&pairs, &case, &[0, 2, 4]);
        golden::assert_row(&o, 0, &[0.651_174_206_8, 0.474_209_841_8, 0.181_506_458_4]);
        golden::assert_fro(&o, 2.393_876_870_1);
        // Query 0 is a landmark, so its row is exact.
        let o = outputs(&pairs, &case, &[6, 9, 1, 4]);
        golden::assert_row(&o, 0, &[0.657_205_142_1, 0.460_860_079_9, 0.164_858_709_1]);
        golden::assert_fro(&o, 2.289_241_177_8);
    }

    #[test]
    fn all_keys_or_all_queries_as_landmarks_reproduce_attention() {
        let p = Problem { d_v: 5, ..Problem::new(1, 1, 8).with_lens(20, 30) };
        let case = Case::gaussian(p, 1);
        let (want, _) = reference(&case);
        for tau in ["0.8", "1", "1.5"] {
            let pairs = [("gamma", "0"), ("tau", tau)];
            let keys: Vec<usize> = (0..30).collect();
            assert_rows_close(&outputs(&pairs, &case, &keys), &want, 1e-10, "all keys");
            let queries: Vec<usize> = (30..50).collect();
            assert_rows_close(&outputs(&pairs, &case, &queries), &want, 1e-10, "all queries");
        }
        // A query that is a landmark reproduces its own row; so do negated queries with a negative factor.
        let negative = case.with_problem(Problem { scale: -p.scale, ..p });
        for case in [&case, &negative] {
            let (want, _) = reference(case);
            let o = outputs(&[("gamma", "0")], case, &[3, 7, 33, 41]);
            assert_rows_close(&o[15..20], &want[15..20], 1e-10, "query 3");
            assert_rows_close(&o[55..60], &want[55..60], 1e-10, "query 11");
        }
    }

    #[test]
    fn it_is_wildcat_with_unit_temperature_on_the_same_pivots() {
        let wildcat = crate::registry::method("wildcat").unwrap();
        let case = Case::gaussian(Problem::new(2, 90, 8).with_kv_heads(1), 2);
        let a = run(&METHOD, &[("landmarks", "20"), ("sampling", "rpcholesky"), ("gamma", "0")], &case);
        let b = run(wildcat, &[("rank", "20"), ("tau", "1")], &case);
        assert_rows_close(&a.o, &b.o, 1e-9, "outputs");
        assert_rows_close(&a.lse, &b.lse, 1e-9, "log-sum-exp");
    }

    #[test]
    fn landmarks_drawn_twice_change_nothing() {
        let case = Case::gaussian(Problem::new(1, 40, 6), 3);
        for gamma in ["0", "1e-8"] {
            let once = outputs(&[("gamma", gamma)], &case, &[1, 5, 9, 30, 39]);
            let twice = outputs(&[("gamma", gamma)], &case, &[1, 1, 5, 9, 9, 9, 30, 39]);
            assert_rows_close(&twice, &once, 1e-6, gamma);
        }
    }

    #[test]
    fn entries_err_by_less_than_the_residuals_allow() {
        let p = Problem::new(1, 1, 5).with_lens(12, 25);
        let mut case = Case::gaussian(p, 4);
        case.k.iter_mut().for_each(|x| *x *= 0.7);
        let chosen = [2, 3, 11, 20, 24];
        let identity = Mat::identity(25);
        let pairs = [("gamma", "0"), ("centre", "false")];
        let rows = sums(&case, &coreset_on(&pairs, &case, identity.as_ref(), &chosen));
        let inner = |a: &[f64], b: &[f64]| p.scale * a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let k = |j: usize| &case.k[j * 5..(j + 1) * 5];
        let gram = Mat::from_fn(5, 5, |s, t| inner(k(chosen[s]), k(chosen[t])).exp());
        let residual = |x: &[f64]| {
            let column = Mat::from_fn(5, 1, |s, _| inner(k(chosen[s]), x).exp());
            let solved = linalg::solve(gram.as_ref(), column.as_ref()).unwrap();
            let explained: f64 = column.data().iter().zip(solved.data()).map(|(a, b)| a * b).sum();
            inner(x, x).exp() - explained
        };
        for (i, q) in case.q.chunks(5).enumerate() {
            for j in 0..25 {
                let gap = (inner(q, k(j)).exp() - rows[i][j]).abs();
                let (rq, rk) = (residual(q), residual(k(j)));
                assert!(rq > -1e-9 && rk > -1e-9);
                assert!(gap <= (rq.max(0.0) * rk.max(0.0)).sqrt() + 1e-9, "{i} {j}: {gap}");
                if chosen.contains(&j) {
                    assert!(gap < 1e-9 * inner(q, k(j)).exp());
                }
            }
        }
    }

    #[test]
    fn more_landmarks_give_less_error_and_six_steps_nearly_solve() {
        let case = crate::testkit::heads::Workload::Smooth.case(512, 16, 1);
        let (want, _) = reference(&case);
        let error =
            |pairs: &[(&str, &str)]| crate::metrics::relative_frobenius(&run(&METHOD, pairs, &case).o, &want);
        let errors = ["16", "64", "256"].map(|m| error(&[("landmarks", m)]));
        assert!(errors[0] > 1.5 * errors[1] && errors[1] > 1.5 * errors[2], "{errors:?}");
        let razavi = error(&[("landmarks", "64"), ("solver", "razavi"), ("gamma", "0.01")]);
        assert!(razavi < 2.0 * errors[1], "{razavi} and {errors:?}");
    }

    #[test]
    fn wide_spreads_are_answered_exactly() {
        for (single, size) in [(true, 12.0), (false, 40.0)] {
            let mut case = Case::gaussian(Problem::new(1, 90, 8), 5);
            case.key_rows(0).step_by(4).for_each(|row| row.iter_mut().for_each(|x| *x *= size));
            let case = if single { case.cast_f32() } else { case };
            let ran = run(&METHOD, &[("landmarks", "20")], &case);
            assert_eq!(ran.info.status, Status::Exact);
            let (want, _) = reference(&case);
            assert_rows_close(&ran.o, &want, if single { 1e-4 } else { 1e-12 }, "exact");
            let cooled = run(&METHOD, &[("landmarks", "20"), ("tau", "30")], &case);
            assert_eq!(cooled.info.status, Status::Complete);
        }
    }

    #[test]
    fn query_landmarks_have_no_causal_form() {
        let p = Problem::new(1, 300, 8).causal();
        let refused = METHOD.plan(&p, &options(&[("source", "both")])).unwrap_err();
        assert!(refused.to_string().contains("source = keys"), "{refused}");
    }
}
