//! Linformer: a few mixed keys and values stand for the whole sequence.
//!
//! **Idea.** Compress the sequence axis: multiply keys and values from the left by a matrix with few rows and attend
//! to the result.
//!
//! **Math.** With $E, F \in \mathbb R^{k \times n_k}$: $O = \operatorname{attn}(Q, EK, FV)$. Sources of $E$ and $F$:
//! - `pool`: means over $k$ segments of lengths $n_s$, with $\ln n_s$ added to the logits. With a causal mask segments
//!   have $c = \lceil n_k / k \rceil$ tokens, and a query sees the means of all complete segments before its own, each with
//!   bias $\ln c$, and the keys of its own segment up to itself.
//! - `learned`: trained matrices from a calibration made by [`with_projections`]; shorter sequences use the first
//!   columns.
//! - `fitted`: $E$ pools, $F = (G + \lambda \frac{\operatorname{tr} G}{k} I)^{-1} R$ from sample inputs of the same length, with
//!   $G = \sum S^\top S$, $R = \sum S^\top P$, $S$ the weights of the pooled keys and $P$ the exact ones: the least-squares
//!   fit of $S F$ to $P$, one per key head.
//! - `gaussian`: $E = F$ with independent $N(0, 1/k)$ entries; for study, it does not approximate attention.
//!
//! **Reference.** wang2020. $E$ and $F$ are $k \times n$, as they multiply from the left; the paper and the survey
//! declare the transpose. The normaliser divides rows: $D^{-1} \exp$, not $\exp D^{-1}$. The paper's existence proof takes
//! $E = \delta R$, $F = e^{-\delta} R$ with $\delta \to 0$, which is of no practical use. Masking the upper triangle of
//! the $n \times k$ weights, as some code does, is not causal: $EK$ has mixed the future in already.
//!
//! **Cost.** $n_k (d + d_v)$ to pool or $2 k n_k (d + d_v)$ to multiply, then $2 n_q k (d + d_v)$; causal
//! $2 n_q (k/2 + c/2)(d + d_v)$. Memory $k (d + d_v)$.
//!
//! **Guarantees.** `pool` is exact when keys are constant inside each segment, for any values and lengths, and when $k$
//! reaches the number of keys; its weights are non-negative and sum to one; its causal form never sees a later token.
//! At $\lambda = 0$ the rows of the fitted $F$ sum to one.
//!
//! **When to use.** `pool` where neighbouring keys are alike; `learned` with models trained with it.

use crate::group::{Group, GroupIndex, GroupPlan, GroupStream, RowBlock};
use crate::method::{Budget, Calibration, Claims, Cost, Family, Law, Method, RunInfo, Status, Support};
use crate::methods::common::pool::{Segments, landmark_weights, log_lens, pool_rows, pool_scratch_bytes};
use crate::methods::common::{exact_group, exact_rows, exact_scratch_bytes};
use crate::workspace::Context;
use crate::{Error, Inputs, Mask, MatRef, Options, Problem, Qkv, Real, Result, Workspace};
use attlas_num::Mat;
use attlas_num::kernels::{Band, merge_lse};
use attlas_num::linalg::{self, Op, psd_factor};
use attlas_num::rng::StreamKey;
use rayon::prelude::*;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "linformer",
    family: Family::LowRank,
    title: "Linformer: keys and values compressed along the sequence",
    reference: "wang2020",
    claims: Claims {
        decode: true,
        exact_at: &[("rank", Budget::NumKeys)],
        row_stochastic: false,
        deterministic: false,
        exponent: 1.0,
        except: &[(Law::KeyOrder, "keys are mixed according to their positions")],
        ..Claims::BASE
    },
    params: Params::SPECS,
    probes: &[
        &[("rank", "8")],
        &[("rank", "31")],
        &[("rank", "1")],
        &[("rank", "12"), ("source", "gaussian")],
    ],
    supports,
    calibrate: Some(calibrate),
    build: |p, options, calibration| {
        Ok(Linformer::new(p, Params::from_options(options)?, calibration)?.boxed(p))
    },
};

fn supports(p: &Problem, options: &Options) -> Support {
    let source = Params::from_options(options).map_or(Source::Pool, |params| params.source);
    Support::unless(
        p.mask == Mask::Causal && source != Source::Pool,
        "the projection mixes later keys into all of its rows, so a causal mask cannot be honoured: use source = pool",
    )
}

crate::choices! {
    /// Where the projections come from.
    pub enum Source {
        /// Means over segments; nothing to learn.
        Pool = "pool",
        /// Trained matrices, from a calibration.
        Learned = "learned",
        /// Values mixed as fitted to sample inputs, keys pooled; from a calibration.
        Fitted = "fitted",
        /// Random matrices.
        Gaussian = "gaussian",
    }
}

crate::params! {
    /// Parameters of [`Linformer`].
    pub struct Params {
        /// Mixed keys and values that stand for all of them; exact attention where they reach the number of keys.
        /// Learned and fitted matrices bring their own.
        rank: usize = 256, in 1..=1 << 20;
        /// Where the projections come from: pool (means over segments), learned, fitted or gaussian.
        source: Source = Source::Pool;
        /// Ridge of the fit, relative to the mean diagonal of its normal equations. Used by fitted alone.
        ridge: f64 = 1e-6, in 0.0..=1.0;
        /// Stream of the random projection. Used by gaussian alone.
        seed: u64 = 0, in 0..=u64::MAX;
    }
}

/// How trained projections are shared in a model of several layers and heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Every head of every layer has its own two matrices.
    None,
    /// The heads of a layer share both matrices.
    Headwise,
    /// The heads of a layer share one matrix for keys and values.
    KeyValue,
    /// One matrix for the whole model.
    Layerwise,
}

impl Sharing {
    /// Matrices that a model of this shape holds.
    pub fn matrices(self, layers: usize, heads: usize) -> usize {
        match self {
            Sharing::None => 2 * layers * heads,
            Sharing::Headwise => 2 * layers,
            Sharing::KeyValue => layers,
            Sharing::Layerwise => 1,
        }
    }
}

/// Trained projections as a calibration for `problem`: one matrix for all key heads or one for each; without `f`
/// values are mixed as keys are. Matrices may be $k \times n$ or $n \times k$; the longer side is the sequence.
pub fn with_projections(problem: &Problem, e: &[Mat<f64>], f: &[Mat<f64>]) -> Result<Calibration> {
    let mut calibration = Calibration::new(METHOD.id, problem);
    for (name, list) in [("e", e), ("f", f)] {
        let per_head = list.len() == problem.n_kv_heads && list.len() != 1;
        if !(per_head || list.len() == 1 || list.is_empty() && name == "f") {
            return Err(wrong(
                format!("one matrix {name}, or one for each of {} key heads", problem.n_kv_heads),
                list.len(),
            ));
        }
        for (g, m) in list.iter().enumerate() {
            let name = if per_head { format!("{name}.{g}") } else { name.into() };
            calibration.insert(name, &oriented(m)?);
        }
    }
    Ok(calibration)
}

fn wrong(expected: impl ToString, found: impl ToString) -> Error {
    Error::Calibration { method: METHOD.id.into(), expected: expected.to_string(), found: found.to_string() }
}

/// The matrix with the sequence along its rows' elements: `k × n`, `k ≤ n`.
fn oriented(m: &Mat<f64>) -> Result<Mat<f64>> {
    match m.rows().cmp(&m.cols()) {
        std::cmp::Ordering::Less => Ok(m.clone()),
        std::cmp::Ordering::Greater => Ok(m.transpose()),
        std::cmp::Ordering::Equal if *m == m.transpose() => Ok(m.clone()),
        std::cmp::Ordering::Equal => Err(wrong(
            "a projection with fewer rows than tokens, or a symmetric one",
            format!("a square one of {} rows, which may be transposed", m.rows()),
        )),
    }
}

/// Learns $F$ of every key head from inputs of the problem's length.
fn calibrate(p: &Problem, options: &Options, samples: &[Inputs<'_>]) -> Result<Calibration> {
    let params = Params::from_options(options)?;
    if samples.is_empty() || p.n_k == 0 {
        return Err(wrong("at least one sample with at least one key", "none"));
    }
    let mut calibration = Calibration::new(METHOD.id, p);
    let segments = Segments::new(p.n_k, params.rank);
    let k = params.rank.min(p.n_k);
    for kv in 0..p.n_kv_heads {
        let (mut gram, mut cross) = (Mat::zeros(k, k), Mat::zeros(k, p.n_k));
        for sample in samples {
            match sample {
                Inputs::F32(x) => accumulate(p, x, kv, &segments, &mut gram, &mut cross)?,
                Inputs::F64(x) => accumulate(p, x, kv, &segments, &mut gram, &mut cross)?,
            }
        }
        let ridge = params.ridge * (0..k).map(|i| gram[(i, i)]).sum::<f64>() / k as f64;
        (0..k).for_each(|i| gram[(i, i)] += ridge);
        let fitted = psd_factor(gram.as_ref())
            .and_then(|f| f.solve(cross.as_ref()))
            .map_err(|e| wrong("finite samples", e))?;
        calibration.insert(format!("fitted.{kv}"), &fitted);
    }
    Ok(calibration)
}

/// Adds $S^\top S$ and $S^\top P$ of one sample, a block of rows at a time.
fn accumulate<T: Real>(
    p: &Problem,
    x: &Qkv<'_, T>,
    kv: usize,
    segments: &Segments,
    gram: &mut Mat<f64>,
    cross: &mut Mat<f64>,
) -> Result<()> {
    let [batch, ..] = x.k.dims();
    x.validate(&Problem { batch, ..*p })?;
    let ws = Workspace::single()?;
    let (k, n) = (gram.rows(), p.n_k);
    let mut pooled = vec![T::ZERO; k * p.d];
    for b in 0..batch {
        let keys = x.k.head(b, kv);
        ws.install(|cx| pool_rows(keys, segments, cx, &mut pooled));
        let bias: Vec<T> = log_lens(segments);
        for h in kv * p.group_size()..(kv + 1) * p.group_size() {
            let q = x.q.head(b, h);
            for first in (0..p.n_q).step_by(64) {
                let rows = q.sub_rows(first..(first + 64).min(p.n_q));
                let scale = T::from_f64(p.scale);
                let s = landmark_weights(rows, MatRef::new(&pooled, k, p.d), Some(&bias), scale);
                let exact = landmark_weights(rows, keys, None, scale);
                linalg::gemm(1.0, Op::T(s.as_ref()), Op::N(s.as_ref()), gram.data_mut(), k, true);
                linalg::gemm(1.0, Op::T(s.as_ref()), Op::N(exact.as_ref()), cross.data_mut(), n, true);
            }
        }
    }
    Ok(())
}

/// The plan: how keys and values are mixed.
#[derive(Debug)]
pub struct Linformer {
    params: Params,
    mix: Mix,
    /// Segment length of the causal form, from the planned number of keys.
    segment_len: usize,
}

/// Matrices of every key head, or none where they are made on the spot.
#[derive(Debug)]
enum Mix {
    Pool,
    Gaussian,
    /// $E$ and $F$ of each key head; a head without its own $F$ uses its $E$.
    Learned(Vec<(Mat<f64>, Option<Mat<f64>>)>),
    /// $F$ of each key head.
    Fitted(Vec<Mat<f64>>),
}

/// Rows of a projection that one task multiplies.
const CHUNK: usize = 16;

/// Query rows of one task.
const BLOCK_ROWS: usize = 256;

impl Linformer {
    /// A plan with these parameters and, for learned and fitted sources, what was learnt.
    pub fn new(problem: &Problem, params: Params, calibration: Option<&Calibration>) -> Result<Self> {
        params.validate()?;
        let need = |what: &str| Error::Unsupported {
            method: METHOD.id.into(),
            reasons: vec![format!("source = {what} takes its matrices from a calibration: pass one")],
        };
        let mix = match params.source {
            Source::Pool => Mix::Pool,
            Source::Gaussian => Mix::Gaussian,
            Source::Learned => Mix::learned(problem, calibration.ok_or_else(|| need("learned"))?)?,
            Source::Fitted => Mix::fitted(problem, calibration.ok_or_else(|| need("fitted"))?)?,
        };
        let segment_len = problem.n_k.div_ceil(params.rank).max(1);
        Ok(Self { params, mix, segment_len })
    }

    /// Mixed rows for `n` keys of a key head.
    fn rank(&self, n: usize, kv_head: usize) -> usize {
        match &self.mix {
            Mix::Pool | Mix::Gaussian => self.params.rank.min(n),
            Mix::Learned(heads) => heads[kv_head].0.rows(),
            Mix::Fitted(heads) => heads[kv_head].rows().min(n),
        }
    }

    /// Every query sees every mixed key.
    fn run_full<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let (k, v, scale, cx, index) = (g.k, g.v, g.scale, g.cx, g.index);
        let (n, rank) = (k.rows(), self.rank(k.rows(), index.kv_head));
        let mut k_mixed = cx.scratch.take::<T>(rank * k.cols());
        let mut v_mixed = cx.scratch.take::<T>(rank * v.cols());
        let segments = Segments::new(n, rank);
        let mut bias = None;
        let mut fallback = false;
        match &self.mix {
            Mix::Fitted(heads) if heads[index.kv_head].cols() == n => {
                pool_rows(k, &segments, cx, &mut k_mixed);
                multiply(|r, row| copy_row(&heads[index.kv_head], r, row), v, cx, &mut v_mixed);
                bias = Some(log_lens::<T>(&segments));
            }
            Mix::Pool | Mix::Fitted(_) => {
                // A fit for another length than a padded sequence has says nothing: pool instead.
                fallback = matches!(self.mix, Mix::Fitted(_));
                pool_rows(k, &segments, cx, &mut k_mixed);
                pool_rows(v, &segments, cx, &mut v_mixed);
                bias = Some(log_lens::<T>(&segments));
            }
            Mix::Gaussian => {
                let key = index.stream_key(self.params.seed).named("projection");
                multiply(|r, row| gaussian_row(key, rank, r, row), k, cx, &mut k_mixed);
                multiply(|r, row| gaussian_row(key, rank, r, row), v, cx, &mut v_mixed);
            }
            Mix::Learned(heads) => {
                let (e, f) = &heads[index.kv_head];
                multiply(|r, row| copy_row(e, r, row), k, cx, &mut k_mixed);
                multiply(|r, row| copy_row(f.as_ref().unwrap_or(e), r, row), v, cx, &mut v_mixed);
            }
        }
        let (k_mixed, v_mixed) =
            (MatRef::new(&k_mixed, rank, k.cols()), MatRef::new(&v_mixed, rank, v.cols()));
        g.par_row_blocks(BLOCK_ROWS, |block| {
            let bias = bias.as_deref();
            exact_rows(block.q, k_mixed, v_mixed, bias, scale, Band::ALL, cx, block.out, block.lse);
            Ok(())
        })?;
        let rows = (g.n_q() * g.q.heads()) as u64;
        let fallback_rows = if fallback { rows } else { 0 };
        let visited = rows * rank as u64;
        Ok(RunInfo { rank: Some(rank), fallback_rows, ..RunInfo::visited(visited) })
    }

    /// Means of earlier segments, own segment exactly.
    fn run_causal<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let (k, v, scale, cx) = (g.k, g.v, g.scale, g.cx);
        let len = k.rows().div_ceil(self.params.rank).max(1);
        // Only complete segments are ever seen as a mean.
        let count = k.rows() / len;
        let whole = Segments::new(count * len, count);
        let mut k_mean = cx.scratch.take::<T>(count * k.cols());
        let mut v_mean = cx.scratch.take::<T>(count * v.cols());
        pool_rows(k, &whole, cx, &mut k_mean);
        pool_rows(v, &whole, cx, &mut v_mean);
        let means = Means {
            k: MatRef::new(&k_mean, count, k.cols()),
            v: MatRef::new(&v_mean, count, v.cols()),
            bias: &vec![T::from_f64((len as f64).ln()); count],
        };
        let offset = k.rows() as isize - g.n_q() as isize;
        let parts = g.par_row_blocks(BLOCK_ROWS, |block| {
            Ok(causal_block(block, k, v, &means, len, offset, scale, cx))
        })?;
        let (visited, empty) = parts.into_iter().fold((0, 0), |(a, b), (x, y)| (a + x, b + y));
        Ok(RunInfo { rank: Some(count), empty_rows: empty, ..RunInfo::visited(visited) })
    }
}

impl Mix {
    fn learned(p: &Problem, calibration: &Calibration) -> Result<Self> {
        let find = |name: &str, g: usize| {
            let own = format!("{name}.{g}");
            let name = if calibration.matrices.contains_key(&own) { &own } else { name };
            calibration.matrix(name).and_then(|m| oriented(&m))
        };
        let mut heads = Vec::new();
        for g in 0..p.n_kv_heads {
            let e = find("e", g)?;
            let has_f = calibration.matrices.keys().any(|k| k == "f" || k.starts_with("f."));
            let f = if has_f { Some(find("f", g)?) } else { None };
            let f_shape = f.as_ref().map_or((e.rows(), e.cols()), |f| (f.rows(), f.cols()));
            if f_shape != (e.rows(), e.cols()) {
                return Err(wrong(
                    format!("f as large as e, {} × {}", e.rows(), e.cols()),
                    format!("{f_shape:?}"),
                ));
            }
            if p.n_k > e.cols() {
                return Err(Error::Unsupported {
                    method: METHOD.id.into(),
                    reasons: vec![format!(
                        "the projections were trained for at most {} tokens, there are {} keys",
                        e.cols(),
                        p.n_k
                    )],
                });
            }
            heads.push((e, f));
        }
        Ok(Mix::Learned(heads))
    }

    fn fitted(p: &Problem, calibration: &Calibration) -> Result<Self> {
        let heads = (0..p.n_kv_heads)
            .map(|g| {
                let f = calibration.matrix(&format!("fitted.{g}"))?;
                if f.cols() == p.n_k && f.rows() <= p.n_k && f.rows() > 0 {
                    Ok(f)
                } else {
                    Err(wrong(format!("a fit for {} keys", p.n_k), format!("one for {}", f.cols())))
                }
            })
            .collect::<Result<_>>()?;
        Ok(Mix::Fitted(heads))
    }
}

fn copy_row<T: Real>(m: &Mat<f64>, r: usize, row: &mut [T]) {
    row.iter_mut().zip(m.row(r)).for_each(|(x, m)| *x = T::from_f64(*m));
}

/// Row `r` of a projection with entries $N(0, 1/k)$; a shorter sequence sees the first entries of a longer one.
fn gaussian_row<T: Real>(key: StreamKey, k: usize, r: usize, row: &mut [T]) {
    let mut rng = key.with(r as u64).rng();
    let deviation = 1.0 / (k as f64).sqrt();
    row.iter_mut().for_each(|x| *x = T::from_f64(deviation * rng.normal()));
}

/// `out = projection · x`, rows of the projection written on demand by `fill(row, entries)`.
fn multiply<T: Real>(
    fill: impl Fn(usize, &mut [T]) + Sync,
    x: MatRef<'_, T>,
    cx: Context<'_>,
    out: &mut [T],
) {
    let (n, width) = (x.rows(), x.cols());
    out.par_chunks_mut(CHUNK * width).with_max_len(1).enumerate().for_each(|(c, out)| {
        let rows = out.len() / width;
        let mut e = cx.scratch.take::<T>(rows * n);
        e.chunks_exact_mut(n).enumerate().for_each(|(r, row)| fill(c * CHUNK + r, row));
        linalg::gemm(T::ONE, Op::N(MatRef::new(&e, rows, n)), Op::N(x), out, width, false);
    });
}

/// Means of complete segments, each standing for as many tokens as its bias says.
#[derive(Clone, Copy, Debug)]
struct Means<'a, T> {
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    bias: &'a [T],
}

impl<T: Real> Means<'_, T> {
    /// Attention of rows to the means in `range`.
    fn attend(
        &self,
        q: MatRef<'_, T>,
        range: std::ops::Range<usize>,
        scale: T,
        cx: Context<'_>,
        out: &mut [T],
        lse: &mut [T],
    ) {
        let (k, v) = (self.k.sub_rows(range.clone()), self.v.sub_rows(range.clone()));
        exact_rows(q, k, v, Some(&self.bias[range]), scale, Band::ALL, cx, out, lse);
    }
}

/// Rows of one block of the causal form; returns scores computed and rows that see nothing.
#[allow(clippy::too_many_arguments)]
fn causal_block<T: Real>(
    block: RowBlock<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    means: &Means<'_, T>,
    len: usize,
    offset: isize,
    scale: T,
    cx: Context<'_>,
) -> (u64, u64) {
    let (rows, d_v) = (block.lse.len(), v.cols());
    // Rows before `blind` come before the first key.
    let blind = usize::try_from(-(block.first as isize + offset)).unwrap_or(0).min(rows);
    block.out[..blind * d_v].fill(T::ZERO);
    block.lse[..blind].fill(T::NEG_INFINITY);
    if blind == rows {
        return (0, rows as u64);
    }
    let position = |row: usize| ((block.first + row) as isize + offset) as usize;
    // All rows see the means before the first row's segment.
    let common = position(blind) / len;
    let seeing = block.q.sub_rows(blind..rows);
    means.attend(seeing, 0..common, scale, cx, &mut block.out[blind * d_v..], &mut block.lse[blind..]);
    let mut visited = ((rows - blind) * common) as u64;
    let mut part = cx.scratch.take::<T>(rows.min(len) * d_v);
    let mut part_lse = cx.scratch.take::<T>(rows.min(len));
    let mut row = blind;
    while row < rows {
        let segment = position(row) / len;
        let first_key = segment * len;
        let end = rows.min(row + first_key + len - position(row));
        let (part, part_lse) = (&mut part[..(end - row) * d_v], &mut part_lse[..end - row]);
        let q = block.q.sub_rows(row..end);
        let mut merge = |part: &[T], part_lse: &[T]| {
            let out = block.out[row * d_v..end * d_v].chunks_exact_mut(d_v).zip(&mut block.lse[row..end]);
            for ((o, l), (o2, &l2)) in out.zip(part.chunks_exact(d_v).zip(part_lse)) {
                merge_lse(o, l, o2, l2);
            }
        };
        if segment > common {
            means.attend(q, common..segment, scale, cx, part, part_lse);
            merge(part, part_lse);
        }
        let keys = first_key..position(end - 1) + 1;
        let band = Band::causal((position(row) - first_key) as isize);
        let (k, v) = (k.sub_rows(keys.clone()), v.sub_rows(keys));
        exact_rows(q, k, v, None, scale, band, cx, part, part_lse);
        merge(part, part_lse);
        visited += (row..end).map(|r| segment - common + position(r) - first_key + 1).sum::<usize>() as u64;
        row = end;
    }
    (visited, blind as u64)
}

impl GroupPlan for Linformer {
    fn cost(&self, p: &Problem) -> Cost {
        let heads = (p.batch * p.n_heads) as u64;
        let (width, keys) = ((p.d + p.d_v) as u64, (p.batch * p.n_kv_heads * p.n_k) as u64);
        let rank = self.rank(p.n_k, 0) as u64;
        let bytes = 4 * ((p.batch * p.n_heads * p.n_q) as u64 + keys) * width;
        let pairs = match (&self.mix, p.mask) {
            (Mix::Pool | Mix::Gaussian, _) if self.params.rank >= p.n_k => p.visible_pairs(),
            (_, Mask::Causal) => heads * p.n_q as u64 * (rank + self.segment_len as u64).div_ceil(2),
            _ => heads * p.n_q as u64 * rank,
        };
        let setup = match self.mix {
            Mix::Pool => keys * width,
            Mix::Fitted(_) => keys * (p.d as u64 + 2 * rank * p.d_v as u64),
            Mix::Gaussian | Mix::Learned(_) => 2 * rank * keys * width,
        };
        Cost { setup_flops: setup, run_flops: 2 * pairs * width, bytes }
    }

    fn scratch_bytes(&self, p: &Problem, threads: usize, size: usize) -> usize {
        let largest = (0..p.n_kv_heads).map(|g| self.rank(p.n_k, g)).max().unwrap_or(0);
        let mixed = largest * (p.d + p.d_v) * size + 128;
        let chunk = threads * (CHUNK * p.n_k * size + 64);
        let block = threads * (BLOCK_ROWS * (p.d_v + 1) * size + 128);
        exact_scratch_bytes(p, threads, size)
            + mixed
            + chunk
            + block
            + pool_scratch_bytes(p.d.max(p.d_v), threads)
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if g.n_k() == 0 {
            return Ok(g.fill_empty());
        }
        let own_model = matches!(self.mix, Mix::Learned(_) | Mix::Fitted(_));
        if !own_model && self.params.rank >= g.n_k() {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        match g.mask {
            Mask::None => self.run_full(&mut g),
            Mask::Causal => self.run_causal(&mut g),
        }
    }

    fn stream<T: Real>(&self, p: &Problem, _: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let offered = p.mask == Mask::Causal && matches!(self.mix, Mix::Pool);
        offered.then(|| Box::new(Pooled::<T>::new(self.segment_len, p.d, p.d_v)) as Box<dyn GroupStream<T>>)
    }
}

/// Means of complete segments and the raw tokens of the current one.
#[derive(Debug)]
struct Pooled<T> {
    len: usize,
    d: usize,
    d_v: usize,
    k_mean: Vec<T>,
    v_mean: Vec<T>,
    bias: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Real> Pooled<T> {
    fn new(len: usize, d: usize, d_v: usize) -> Self {
        let empty = Vec::new;
        Self { len, d, d_v, k_mean: empty(), v_mean: empty(), bias: empty(), k: empty(), v: empty() }
    }

    /// Replaces the full current segment by its mean.
    fn close_segment(&mut self, cx: Context<'_>) {
        for (raw, means, width) in
            [(&mut self.k, &mut self.k_mean, self.d), (&mut self.v, &mut self.v_mean, self.d_v)]
        {
            let start = means.len();
            means.resize(start + width, T::ZERO);
            let rows = MatRef::new(raw, self.len, width);
            pool_rows(rows, &Segments::new(self.len, 1), cx, &mut means[start..]);
            raw.clear();
        }
        self.bias.push(T::from_f64((self.len as f64).ln()));
    }
}

impl<T: Real> GroupStream<T> for Pooled<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            // Not before the next token: the last one of a segment still sees it as it is.
            if self.k.len() == self.len * self.d {
                self.close_segment(cx);
            }
            self.k.extend_from_slice(k);
            self.v.extend_from_slice(v);
        }
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        let (count, raw) = (self.bias.len(), self.k.len() / self.d);
        let means = Means {
            k: MatRef::new(&self.k_mean, count, self.d),
            v: MatRef::new(&self.v_mean, count, self.d_v),
            bias: &self.bias,
        };
        means.attend(q, 0..count, scale, cx, out, lse);
        let mut part = cx.scratch.take::<T>(out.len());
        let mut part_lse = cx.scratch.take::<T>(lse.len());
        let (k, v) = (MatRef::new(&self.k, raw, self.d), MatRef::new(&self.v, raw, self.d_v));
        exact_rows(q, k, v, None, scale, Band::ALL, cx, &mut part, &mut part_lse);
        for ((o, l), (o2, &l2)) in
            out.chunks_exact_mut(self.d_v).zip(lse).zip(part.chunks_exact(self.d_v).zip(part_lse.iter()))
        {
            merge_lse(o, l, o2, l2);
        }
        Ok(RunInfo::visited((q.rows() * (count + raw)) as u64))
    }

    fn state_bytes(&self) -> usize {
        (self.k_mean.len() + self.v_mean.len() + self.bias.len() + self.k.len() + self.v.len())
            * size_of::<T>()
    }
}

#[cfg(test)]
mod tests;
