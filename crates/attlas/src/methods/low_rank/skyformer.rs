//! Skyformer: Gaussian kernelized attention, through landmarks of the lifted Gaussian kernel.
//!
//! **Idea.** Replace softmax by the Gaussian kernel, without normalisation, and approximate that kernel by Nyström on
//! queries and keys together.
//!
//! **Math.** With $x = \sqrt\beta\, q$, $y = \sqrt\beta\, k$ and $g(a, b) = e^{-\|a - b\|^2/2}$ the target is
//! $\mathrm{KA}(Q, K, V) = g(X, Y) V$: no division by a row sum. For landmarks $L$ from the rows of $X$ and $Y$,
//! $$O = g(X, L)\,(g(L, L) + \gamma I)^{-1} g(L, Y) V.$$
//! The factor $1/\sqrt m$ on the sampling matrix in the paper cancels, and its display of the Gaussian misses a minus
//! sign. `solver = razavi` iterates on $D M D$, $D = \mathrm{diag}(M 1)^{-1/2}$, whose spectrum lies in $(0, 1]$: the
//! paper's lemma excludes 1, which is always attained.
//!
//! **Reference.** chen2021skyformer. Departures from the authors' code: the scale is the problem's and not
//! $32^{-1/4}$; landmarks are drawn without replacement by default; the iteration starts from the identity, not from
//! a norm taken over the whole batch.
//!
//! **Cost.** $2m(n_q + n_k)(d + d_v) + 2m^2 d + m^3/3$ per query head (with `source = keys` the keys' share is computed
//! once per group); memory $m^2 + m d_v$ and the scaled keys.
//!
//! **Guarantees.** As $\gamma \to 0$ with all keys or all queries as landmarks, the target; when `landmarks` covers the
//! keys the target is computed directly. Entries of the kernel lie in $[0, 1]$; their error is at most
//! $\sqrt{\mathrm{res}(x)\,\mathrm{res}(y)}$. The target does not change under a common translation of queries and
//! keys, but changes under a translation of the keys alone. Linear in the values.
//!
//! **Decoding.** With `source = keys` a plan without a mask offers a stream: it compresses the first pushed keys at
//! once, like the plan, and computes any number of later queries in $2m(d + d_v)$ operations each. Sums over disjoint
//! keys add up, so later keys are stored uncompressed until eight times `landmarks` of them get their own landmarks.
//! There is no causal form: tokens would see landmarks of later tokens in the prompt.
//!
//! **When to use.** In models trained with it: it is not an approximation of softmax attention, and where the survey
//! lists it among methods that compress trained models, this applies to `lifted_nystrom` only. Outputs grow with the
//! number of keys. Poor on short sequences.

use crate::engine::PerGroup;
use crate::engine::gaussian::{self, Points, Sampling, SolverKind, Source};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Claims, Cost, Family, Law, Method, Needs, RunInfo, Spec, Status, Support, Tunable,
};
use crate::workspace::Context;
use crate::{Mask, Mat, MatRef, Problem, Real, Result};
use attlas_num::randla::{GaussianKernel, rp_cholesky, rpcholesky};
use attlas_num::rng::StreamKey;
use std::borrow::Cow;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "skyformer",
    family: Family::LowRank,
    title: "Gaussian kernelized attention by Nyström (Skyformer)",
    reference: "chen2021skyformer",
    claims: Claims {
        causal: false,
        row_stochastic: false,
        deterministic: false,
        softmax: false,
        lse: false,
        exponent: 1.0,
        needs: Needs::Training,
        except: &[
            (Law::KeyOrder, "landmarks are drawn by position; another order is another draw"),
            (Law::QueriesAlone, "half of the landmarks are queries"),
        ],
        ..Claims::BASE
    },
    probes: &[
        &[("landmarks", "20")],
        &[("landmarks", "20"), ("source", "keys"), ("sampling", "uniform_wr")],
        &[("landmarks", "16"), ("solver", "razavi"), ("gamma", "0.01")],
        &[("landmarks", "16"), ("sampling", "rpcholesky"), ("gamma", "0")],
        &[("landmarks", "16"), ("sampling", "rpcholesky"), ("source", "keys")],
    ],
    tunable: &[Tunable::budget("landmarks")],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`Skyformer`].
    pub struct Params {
        /// Number of landmarks.
        landmarks: usize = 128, in 1..=1 << 20;
        /// Source of the landmarks.
        source: Source = Source::Both;
        /// Sampling of the landmarks.
        sampling: Sampling = Sampling::UniformWor;
        /// Shift added to the diagonal of the kernel of the landmarks.
        gamma: f64 = 0.1, in 0.0..=1e6;
        /// Solver of the small system.
        solver: SolverKind = SolverKind::Cholesky;
        /// Steps of `solver = razavi`.
        iters: usize = 6, in 1..=25;
        /// Seed of the landmarks.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(
            p.mask == Mask::Causal,
            "landmarks see later tokens; for causal attention use lifted_nystrom or wildcat, which have block-causal forms",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Skyformer::new(x.problem, self)
    }
}

/// Query rows per task.
const ROWS: usize = 192;

impl Params {
    /// True if the target is computed directly.
    fn covers(&self, n_q: usize, n_k: usize) -> bool {
        let m = self.landmarks;
        m >= n_k || self.source == Source::Both && m / 2 >= n_q.min(n_k)
    }

    /// Draws landmarks uniformly; indices from `n_k` on are queries. `None` if pivots choose them, or there are none.
    fn uniform(&self, n_q: usize, n_k: usize, index: GroupIndex) -> Option<Vec<usize>> {
        if self.covers(n_q, n_k) || self.sampling == Sampling::RpCholesky {
            return None;
        }
        let stream = index.stream_key(self.seed).named("landmarks");
        let replace = self.sampling == Sampling::UniformWr;
        let from_q = if self.source == Source::Keys { 0 } else { self.landmarks / 2 };
        let of_k = gaussian::uniform(n_k, self.landmarks - from_q, replace, stream.named("keys"));
        let of_q = gaussian::uniform(n_q, from_q, replace, stream.named("queries"));
        Some(of_k.into_iter().chain(of_q.into_iter().map(|i| n_k + i)).collect())
    }
}

/// The plan: the parameters, and uniform landmarks for the planned lengths.
#[derive(Clone, Debug)]
pub struct Skyformer {
    params: Params,
    uniform: PerGroup<Option<Vec<usize>>>,
    /// Planned numbers of queries and keys.
    planned: (usize, usize),
}

/// Landmarks with their transformed values: a few keys for the Gaussian kernel.
struct Compressed<T> {
    landmarks: Mat<T>,
    half_norms: Vec<T>,
    values: Mat<T>,
    steps: Option<usize>,
}

impl Skyformer {
    /// Creates a plan with these parameters; draws uniform landmarks.
    pub(crate) fn new(p: &Problem, params: Params) -> Result<Self> {
        let uniform = PerGroup::draw(p, |index| Ok(params.uniform(p.n_q, p.n_k, index)))?;
        Ok(Self { params, uniform, planned: (p.n_q, p.n_k) })
    }

    /// Finds pivots among scaled keys `y` and queries `x`; indices below the number of keys are keys.
    fn pivots<T: Real>(
        &self,
        y: MatRef<'_, T>,
        x: Option<Lifted<'_, T>>,
        stream: StreamKey,
        cx: Context<'_>,
    ) -> Option<Vec<usize>> {
        let (n, d, m) = (y.rows(), y.cols(), self.params.landmarks);
        let n_q = x.map_or(0, |x| x.q.rows());
        let mut all = cx.scratch.take::<T>((n + n_q) * d);
        all.chunks_exact_mut(d).enumerate().for_each(|(i, dst)| row_into(y, x, i, dst));
        let kernel = GaussianKernel::new(MatRef::new(&all[..], n + n_q, d));
        let options = rpcholesky::Options::rank(m);
        Some(rp_cholesky(&kernel, None, options, stream.named("pivots"), cx.scratch).ok()?.pivots)
    }

    /// Transfers the values to the chosen landmarks; `None` if numbers are not finite.
    fn compress<T: Real>(
        &self,
        y: Points<'_, T>,
        x: Option<Lifted<'_, T>>,
        v: MatRef<'_, T>,
        chosen: &[usize],
        cx: Context<'_>,
    ) -> Option<Compressed<T>> {
        let mut landmarks = Mat::zeros(chosen.len(), y.x.cols());
        chosen.iter().enumerate().for_each(|(s, &i)| row_into(y.x, x, i, landmarks.row_mut(s)));
        let mut half_norms = vec![T::ZERO; chosen.len()];
        gaussian::half_norms_into(landmarks.as_ref(), &mut half_norms);
        let at = Points { x: landmarks.as_ref(), half_norms: &half_norms };
        let sums = gaussian::apply_long(at, y, v.cols(), cx, |j, row| row.copy_from_slice(v.row(j)));
        let solver = self.params.solver.with_steps(self.params.iters);
        let (solved, steps) = gaussian::solve(at, self.params.gamma, solver, &sums, cx)?;
        let values = solved.cast::<T>();
        let finite = values.data().iter().all(|x| x.is_finite());
        finite.then_some(Compressed { landmarks, half_norms, values, steps })
    }
}

/// Queries that join the keys after multiplication by a factor.
#[derive(Clone, Copy)]
struct Lifted<'a, T> {
    q: MatRef<'a, T>,
    factor: T,
}

/// Writes row `i` of the keys or, past their end, of the queries.
fn row_into<T: Real>(y: MatRef<'_, T>, x: Option<Lifted<'_, T>>, i: usize, out: &mut [T]) {
    match x {
        Some(Lifted { q, factor }) if i >= y.rows() => scale_row(q.row(i - y.rows()), factor, out),
        _ => out.copy_from_slice(y.row(i)),
    }
}

/// Multiplies a row by a factor.
fn scale_row<T: Real>(row: &[T], factor: T, out: &mut [T]) {
    out.iter_mut().zip(row).for_each(|(x, &r)| *x = factor * r);
}

impl GroupPlan for Skyformer {
    fn cost(&self, p: &Problem) -> Cost {
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let wide = (p.d + p.d_v) as u64;
        let groups = (p.batch * p.n_kv_heads) as u64;
        let bytes = 4 * (groups * p.n_k as u64 + rows) * wide;
        if self.params.covers(p.n_q, p.n_k) {
            return Cost { setup_flops: 0, run_flops: 2 * p.visible_pairs() * wide, bytes };
        }
        let m = self.params.landmarks as u64;
        let times = match self.params.source {
            Source::Keys => groups,
            Source::Both => (p.batch * p.n_heads) as u64,
        };
        let setup = 2 * m * p.n_k as u64 * wide + 2 * m * m * p.d as u64 + m * m * m / 3;
        Cost { setup_flops: times * setup, run_flops: 2 * rows * m * wide, bytes }
    }

    fn has_lse(&self) -> bool {
        false
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        g.lse.fill(T::NEG_INFINITY);
        if g.n_k() == 0 {
            return Ok(g.fill_empty());
        }
        let (n, d, n_q, cx, v) = (g.n_k(), g.k.cols(), g.n_q(), g.cx, g.v);
        let (root, lift) = factors(g.scale);
        let mut y = cx.scratch.take::<T>(n * d);
        let mut half = cx.scratch.take::<T>(n);
        gaussian::points_into(g.k, |row, y| scale_row(row, root, y), &mut y, &mut half);
        let y = MatRef::new(&y[..], n, d);
        let keys = Points { x: y, half_norms: &half };
        let stream = g.index.stream_key(self.params.seed).named("landmarks");

        let uniform: Option<Cow<'_, [usize]>> = match (n_q, n) == self.planned {
            true => self.uniform.of(g.index).as_deref().map(Cow::Borrowed),
            false => self.params.uniform(n_q, n, g.index).map(Cow::Owned),
        };
        let mut made: Vec<Compressed<T>> = Vec::new();
        if !self.params.covers(n_q, n) {
            let shared = self.params.source == Source::Keys;
            for h in 0..if shared { 1 } else { g.q.heads() } {
                let x = (!shared).then(|| Lifted { q: g.q.head(h), factor: lift });
                let chosen = match &uniform {
                    Some(drawn) => Some(drawn.to_vec()),
                    None => self.pivots(y, x, stream, cx),
                };
                let found = chosen.and_then(|s| self.compress(keys, x, v, &s, cx));
                made.extend(found);
            }
        }
        // Non-finite inputs use the target itself, which passes them on only to the rows that see them.
        let wanted = if self.params.source == Source::Keys { 1 } else { g.q.heads() };
        let direct = made.len() < wanted;
        let rows = g.lse.len();
        g.par_row_blocks(ROWS, |block| {
            let count = block.lse.len();
            let mut x = cx.scratch.take::<T>(count * d);
            let mut half = cx.scratch.take::<T>(count);
            x.chunks_exact_mut(d).zip(block.q.iter_rows()).for_each(|(x, q)| scale_row(q, lift, x));
            let x = MatRef::new(&x[..], count, d);
            gaussian::half_norms_into(x, &mut half);
            let x = Points { x, half_norms: &half };
            if direct {
                gaussian::apply_rows(x, keys, v, block.out, cx);
            } else {
                let c = &made[block.head.min(made.len() - 1)];
                let at = Points { x: c.landmarks.as_ref(), half_norms: &c.half_norms };
                gaussian::apply_rows(x, at, c.values.as_ref(), block.out, cx);
            }
            Ok(())
        })?;
        let rank = if direct { n } else { made.iter().map(|c| c.half_norms.len()).max().unwrap_or(0) };
        Ok(RunInfo {
            keys_visited: (rows * rank) as u64,
            rank: Some(rank),
            iterations: made.iter().filter_map(|c| c.steps).max(),
            status: Status::Complete,
            ..RunInfo::default()
        })
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        // Query landmarks belong to one problem; a stream has no fixed set of queries.
        (self.params.source == Source::Keys).then(|| {
            Box::new(LandmarkStream {
                plan: self.clone(),
                factors: factors(T::from_f64(p.scale)),
                stream: index.stream_key(self.params.seed).named("landmarks"),
                points: Vec::new(),
                half_norms: Vec::new(),
                values: Vec::new(),
                d: p.d,
                d_v: p.d_v,
                landmarks: 0,
                compressed: 0,
            }) as _
        })
    }
}

/// Returns the factors of keys and of queries; a negative scale negates the queries.
fn factors<T: Real>(scale: T) -> (T, T) {
    let root = scale.abs().sqrt();
    (root, if scale < T::ZERO { -root } else { root })
}

/// Uncompressed keys of a stream, per landmark, before they get their own landmarks.
const KEPT: usize = 8;

/// Landmarks for older keys, then uncompressed newer keys: both are points with values, and outputs are sums over all
/// points.
#[derive(Debug)]
struct LandmarkStream<T> {
    plan: Skyformer,
    /// Factors of keys and of queries.
    factors: (T, T),
    stream: StreamKey,
    points: Vec<T>,
    half_norms: Vec<T>,
    values: Vec<T>,
    d: usize,
    d_v: usize,
    /// Number of points that are landmarks.
    landmarks: usize,
    /// Number of compressions so far.
    compressed: u64,
}

impl<T: Real> LandmarkStream<T> {
    fn point_count(&self) -> usize {
        self.half_norms.len()
    }

    fn append(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>) {
        let first = self.point_count();
        self.points.resize((first + k.rows()) * self.d, T::ZERO);
        self.half_norms.resize(first + k.rows(), T::ZERO);
        let (root, new) = (self.factors.0, &mut self.points[first * self.d..]);
        gaussian::points_into(k, |row, y| scale_row(row, root, y), new, &mut self.half_norms[first..]);
        v.iter_rows().for_each(|row| self.values.extend_from_slice(row));
    }

    fn all(&self) -> (Points<'_, T>, MatRef<'_, T>) {
        let n = self.point_count();
        let x = MatRef::new(&self.points, n, self.d);
        (Points { x, half_norms: &self.half_norms }, MatRef::new(&self.values, n, self.d_v))
    }

    /// Replaces the newer keys by landmarks; non-finite keys stay.
    fn compress(&mut self, cx: Context<'_>) {
        let (newer, params) = (self.landmarks..self.point_count(), &self.plan.params);
        let (keys, v) = self.all();
        let (keys, v) = (keys.rows(newer.clone()), v.sub_rows(newer.clone()));
        // The first keys get the same landmarks as in a plan.
        let stream = if self.compressed == 0 { self.stream } else { self.stream.with(self.compressed) };
        let chosen = match params.sampling {
            Sampling::RpCholesky => self.plan.pivots(keys.x, None, stream, cx),
            _ => {
                let replace = params.sampling == Sampling::UniformWr;
                Some(gaussian::uniform(newer.len(), params.landmarks, replace, stream.named("keys")))
            }
        };
        let found = chosen.and_then(|s| self.plan.compress(keys, None, v, &s, cx));
        self.compressed += 1;
        let Some(found) = found else {
            self.landmarks = newer.end;
            return;
        };
        self.points.truncate(newer.start * self.d);
        self.values.truncate(newer.start * self.d_v);
        self.half_norms.truncate(newer.start);
        self.points.extend_from_slice(found.landmarks.data());
        self.values.extend_from_slice(found.values.data());
        self.half_norms.extend_from_slice(&found.half_norms);
        self.landmarks = self.point_count();
    }
}

impl<T: Real> GroupStream<T> for LandmarkStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        let m = self.plan.params.landmarks;
        if self.point_count() == 0 && k.rows() > m {
            self.append(k, v);
            self.compress(cx);
            return Ok(());
        }
        for j in 0..k.rows() {
            self.append(k.sub_rows(j..j + 1), v.sub_rows(j..j + 1));
            if self.point_count() - self.landmarks >= KEPT.saturating_mul(m) {
                self.compress(cx);
            }
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
        let mut x = cx.scratch.take::<T>(q.rows() * self.d);
        let mut half = cx.scratch.take::<T>(q.rows());
        x.chunks_exact_mut(self.d).zip(q.iter_rows()).for_each(|(x, q)| scale_row(q, self.factors.1, x));
        let x = MatRef::new(&x[..], q.rows(), self.d);
        gaussian::half_norms_into(x, &mut half);
        let (points, values) = self.all();
        gaussian::apply_rows(Points { x, half_norms: &half }, points, values, out, cx);
        Ok(RunInfo {
            keys_visited: (q.rows() * self.point_count()) as u64,
            rank: Some(self.point_count()),
            ..RunInfo::default()
        })
    }

    fn state_bytes(&self) -> usize {
        (self.points.len() + self.half_norms.len() + self.values.len()) * size_of::<T>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{Case, How, assert_rows_close, check_method, golden, run_method, run_with};
    use crate::{Options, Workspace};

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    fn options(pairs: &[(&str, &str)]) -> Options {
        pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
    }

    fn run(pairs: &[(&str, &str)], case: &Case) -> Vec<f64> {
        run_method(&METHOD, &options(pairs), case).0
    }

    /// Gaussian kernel of queries and keys of a one-head case.
    fn kernel(case: &Case) -> Mat<f64> {
        let p = &case.problem;
        let square = |i: usize, j: usize| {
            let (q, k) = (&case.q[i * p.d..(i + 1) * p.d], &case.k[j * p.d..(j + 1) * p.d]);
            q.iter().zip(k).map(|(a, b)| (a - b) * (a - b)).sum::<f64>()
        };
        Mat::from_fn(p.n_q, p.n_k, |i, j| (-0.5 * p.scale * square(i, j)).exp())
    }

    fn target(case: &Case) -> Vec<f64> {
        let v = MatRef::new(&case.v, case.problem.n_k, case.problem.d_v);
        attlas_num::linalg::matmul(kernel(case).as_ref(), v).into_vec()
    }

    /// Outputs with given landmarks.
    fn outputs(pairs: &[(&str, &str)], case: &Case, chosen: &[usize]) -> Vec<f64> {
        let p = &case.problem;
        let plan = Skyformer::new(p, Params::from_options(&options(pairs)).unwrap()).unwrap();
        let ws = Workspace::single().unwrap();
        let scaled = |x: &[f64]| x.iter().map(|x| x * p.scale.sqrt()).collect::<Vec<f64>>();
        let (x, y) = (scaled(&case.q), scaled(&case.k));
        let (x, y) = (MatRef::new(&x, p.n_q, p.d), MatRef::new(&y, p.n_k, p.d));
        let (mut hx, mut hy) = (vec![0.0; p.n_q], vec![0.0; p.n_k]);
        gaussian::half_norms_into(x, &mut hx);
        gaussian::half_norms_into(y, &mut hy);
        let v = MatRef::new(&case.v, p.n_k, p.d_v);
        let keys = Points { x: y, half_norms: &hy };
        let c = plan.compress(keys, Some(Lifted { q: x, factor: 1.0 }), v, chosen, ws.context()).unwrap();
        let mut out = vec![f64::NAN; p.n_q * p.d_v];
        let at = Points { x: c.landmarks.as_ref(), half_norms: &c.half_norms };
        let x = Points { x, half_norms: &hx };
        gaussian::apply_rows(x, at, c.values.as_ref(), &mut out, ws.context());
        out
    }

    #[test]
    fn golden_values_of_the_target_and_of_given_landmarks() {
        let case = golden::inputs();
        let o = run(&[], &case);
        golden::assert_row(&o, 0, &[1.792_420_950_4, 1.156_484_953_0, 0.273_802_437_1]);
        golden::assert_fro(&o, 6.136_281_186_0);
        let o = outputs(&[], &case, &[6, 9, 1, 4]);
        golden::assert_row(&o, 0, &[1.718_213_970_4, 1.109_340_883_7, 0.255_263_102_4]);
        golden::assert_fro(&o, 4.891_496_018_4);
    }

    #[test]
    fn all_landmarks_reach_the_target_only_without_ridge() {
        let p = Problem { d_v: 5, ..Problem::new(1, 1, 8).with_lens(40, 64) };
        let case = Case::gaussian(p, 1);
        let want = target(&case);
        assert_rows_close(&run(&[("landmarks", "64")], &case), &want, 1e-12, "direct");
        let keys: Vec<usize> = (0..64).collect();
        let queries: Vec<usize> = (64..104).collect();
        for all in [&keys, &queries] {
            assert_rows_close(&outputs(&[("gamma", "0")], &case, all), &want, 1e-10, "no ridge");
        }
        let ridge = crate::metrics::relative_frobenius(&outputs(&[], &case, &keys), &want);
        assert!((0.05..0.5).contains(&ridge), "{ridge}");
        // A query that is a landmark reproduces its own row.
        let o = outputs(&[("gamma", "0")], &case, &[3, 9, 20, 64 + 7, 64 + 39]);
        for i in [7, 39] {
            assert_rows_close(&o[i * 5..(i + 1) * 5], &want[i * 5..(i + 1) * 5], 1e-10, "landmark");
        }
    }

    #[test]
    fn the_lifted_residual_is_semidefinite_and_bounds_the_block() {
        // Queries and keys as one set of points, on landmarks of both kinds.
        let p = Problem { d_v: 30, ..Problem::new(1, 30, 4) };
        let base = Case::gaussian(p, 2);
        let both: Vec<f64> = [&base.q[..], &base.k[..]].concat();
        let chosen: Vec<usize> = vec![1, 4, 8, 17, 33, 41, 59];
        let lifted = Case {
            problem: Problem { d_v: 60, scale: p.scale, ..Problem::new(1, 60, 4) },
            q: both.clone(),
            k: both,
            v: Mat::<f64>::identity(60).into_vec(),
            single: false,
        };
        let b = kernel(&lifted);
        let b_hat = outputs(&[("gamma", "0")], &lifted, &chosen);
        let gap = Mat::from_fn(60, 60, |i, j| b[(i, j)] - b_hat[i * 60 + j]);
        let least = *attlas_num::linalg::symmetric_eigen(gap.as_ref()).unwrap().values.last().unwrap();
        assert!(least > -1e-10, "{least}");
        let block = Mat::from_fn(30, 30, |i, j| gap[(i, 30 + j)]);
        assert!(block.frobenius() <= gap.frobenius());
        for i in 0..30 {
            for j in 0..30 {
                let (ri, rj) = (gap[(i, i)].max(0.0), gap[(30 + j, 30 + j)].max(0.0));
                assert!(block[(i, j)].abs() <= (ri * rj).sqrt() + 1e-9);
            }
        }
        let values = attlas_num::linalg::singular_values(gap.as_ref()).unwrap();
        assert!(attlas_num::linalg::singular_values(block.as_ref()).unwrap()[0] <= values[0] + 1e-12);
        assert!(b.data().iter().all(|g| (0.0..=1.0).contains(g)));
    }

    #[test]
    fn moving_queries_and_keys_together_changes_nothing() {
        let case = Case::gaussian(Problem::new(1, 50, 6), 3);
        let shift =
            |x: &[f64]| x.iter().enumerate().map(|(i, x)| x + [0.5, -1.0][i % 2]).collect::<Vec<f64>>();
        for pairs in [&[][..], &[("landmarks", "12")]] {
            let first = run(pairs, &case);
            let together = Case { q: shift(&case.q), k: shift(&case.k), ..case.clone() };
            assert_rows_close(&run(pairs, &together), &first, 1e-10, "together");
            let alone = run(pairs, &Case { k: shift(&case.k), ..case.clone() });
            assert!(crate::metrics::relative_frobenius(&alone, &first) > 0.1);
        }
    }

    #[test]
    fn duplicated_landmarks_and_both_solvers_agree() {
        let case = Case::gaussian(Problem::new(1, 40, 6), 4);
        let once = outputs(&[("gamma", "0")], &case, &[1, 5, 9, 30, 41, 77]);
        let twice = outputs(&[("gamma", "0")], &case, &[1, 5, 5, 9, 30, 41, 41, 77]);
        assert_rows_close(&twice, &once, 1e-6, "twice");
        let ridge = outputs(&[], &case, &[1, 5, 9, 30, 41, 77]);
        let razavi = outputs(&[("solver", "razavi"), ("iters", "12")], &case, &[1, 5, 9, 30, 41, 77]);
        assert_rows_close(&razavi, &ridge, 1e-10, "twelve steps");
        let plan =
            METHOD.plan(&case.problem, &options(&[("landmarks", "12"), ("solver", "razavi")])).unwrap();
        let ran = run_with(&*plan, &case, How { lse: false, ..How::default() }).unwrap();
        assert_eq!((ran.info.iterations, ran.info.rank), (Some(6), Some(12)));
    }

    /// Outputs of all queries after each piece of the keys, and the bytes held at the end.
    fn streamed(pairs: &[(&str, &str)], case: &Case, pieces: &[usize]) -> (Vec<Vec<f64>>, usize) {
        let p = &case.problem;
        let plan = METHOD.plan(p, &options(pairs)).unwrap();
        let mut stream = plan.stream(crate::DType::F64).unwrap();
        let mut ws = Workspace::single().unwrap();
        let mut done = 0;
        let outputs = pieces.iter().map(|&piece| {
            let (k, v) = (&case.k[done * p.d..][..piece * p.d], &case.v[done * p.d_v..][..piece * p.d_v]);
            done += piece;
            let k = crate::TensorRef::bhnd(k, [1, 1, piece, p.d]).unwrap();
            let v = crate::TensorRef::bhnd(v, [1, 1, piece, p.d_v]).unwrap();
            stream.push(k.into(), v.into(), &mut ws).unwrap();
            let row = |q: &[f64]| {
                let mut o = vec![f64::NAN; p.d_v];
                let out = crate::Out::new(crate::TensorMut::bhnd(&mut o, [1, 1, 1, p.d_v]).unwrap());
                let q = crate::TensorRef::bhnd(q, [1, 1, 1, p.d]).unwrap();
                stream.attend(q.into(), &mut out.into(), &mut ws).unwrap();
                o
            };
            case.q.chunks_exact(p.d).flat_map(row).collect()
        });
        (outputs.collect(), stream.state_bytes())
    }

    #[test]
    fn a_stream_answers_later_queries_from_its_landmarks() {
        let p = Problem { d_v: 5, ..Problem::new(1, 1, 6).with_lens(9, 300) };
        let case = Case::gaussian(p, 5);
        let first = |n: usize| Case {
            problem: p.with_lens(9, n),
            k: case.k[..n * 6].to_vec(),
            v: case.v[..n * 5].to_vec(),
            ..case.clone()
        };
        for sampling in ["uniform_wor", "uniform_wr", "rpcholesky"] {
            let pairs = [("landmarks", "12"), ("source", "keys"), ("sampling", sampling)];
            let (outputs, bytes) = streamed(&pairs, &case, &[120, 1, 94, 1, 84]);
            // A prompt is compressed as the plan compresses it.
            assert_rows_close(&outputs[0], &run(&pairs, &first(120)), 1e-10, sampling);
            // Later keys contribute the same as in the target.
            let more: Vec<f64> =
                target(&first(215)).iter().zip(target(&first(120))).map(|(a, b)| a - b).collect();
            let sum: Vec<f64> = outputs[0].iter().zip(&more).map(|(a, b)| a + b).collect();
            assert_rows_close(&outputs[2], &sum, 1e-10, sampling);
            // At the 96th of them, they get their own landmarks.
            assert_eq!(bytes, 8 * (12 + 12 + 84) * (6 + 1 + 5));
            assert_ne!(outputs[3], outputs[2]);
        }
        let few = [("landmarks", "64"), ("source", "keys")];
        let (outputs, _) = streamed(&few, &first(200), &[50, 150]);
        assert_rows_close(&outputs[1], &target(&first(200)), 1e-12, "keys as they are");
        let both = METHOD.plan(&p, &options(&[("landmarks", "12")])).unwrap();
        assert!(both.stream(crate::DType::F64).is_none(), "queries of one problem are landmarks");
        let mut broken = first(120);
        broken.k[3] = f64::NAN;
        let (outputs, _) = streamed(&[("landmarks", "12"), ("source", "keys")], &broken, &[120]);
        assert!(outputs[0].iter().all(|x| x.is_nan()));
    }

    #[test]
    fn errors_fall_with_landmarks() {
        let case = crate::testkit::heads::Workload::Smooth.case(512, 8, 1);
        let want = target(&case);
        let error = |m: &str| {
            crate::metrics::relative_frobenius(&run(&[("landmarks", m), ("gamma", "1e-8")], &case), &want)
        };
        let errors = ["16", "64", "256"].map(error);
        assert!(errors[0] > 2.0 * errors[1] && errors[1] > 2.0 * errors[2], "{errors:?}");
        let negative = case.with_problem(Problem { scale: -case.problem.scale, ..case.problem });
        let mirrored = Case { q: case.q.iter().map(|x| -x).collect(), ..negative };
        let pairs = [("landmarks", "64")];
        assert_rows_close(&run(&pairs, &mirrored), &run(&pairs, &case), 1e-12, "other sign");
    }
}
