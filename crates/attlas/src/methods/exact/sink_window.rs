//! Sinks and a sliding window: the first `sinks` keys and the last `window` keys, nothing in between.
//!
//! **Idea.** Trained models park much attention on the first few tokens and most of the rest on recent ones.
//! Keeping both bounds the cache and the work per token.
//!
//! **Math.** With $p_i = i + n_k - n_q$ the position of query $i$, the visible set is
//! $\{j < s\} \cup \{p_i - w < j \le p_i\}$ when causal, $\{j < s\} \cup \{|j - p_i| < w\}$ without a mask; softmax
//! attention over that set. Sinks and window are two exact parts over disjoint keys, merged by log-sum-exp.
//!
//! With `positions = cache_relative`, as in the paper, positions are those in the cache: a query that sees $s + w$ keys
//! is at position $s + w - 1$, keys of the window keep their distance, and sinks are at most $s + w - 1$ tokens away.
//! Cached keys need no new rotation: for the sinks alone, the query is rotated back to position $s + w - 1$.
//!
//! **Reference.** xiao2024 (StreamingLLM). Keys keep their original positions by default, as in the survey.
//!
//! **Cost.** $2 n_q (s + w)(d + d_v)$; scratch as for exact attention, plus one output block per thread.
//!
//! **Guarantees.** Exact when the window, or causally sinks and window together, cover all keys. The error is at
//! most the lost mass times the range of the values. With `precision = bf16` operands are rounded to 8 significant bits
//! and sums stay in single precision.
//!
//! **When to use.** As the yardstick of every method that claims to use the middle of the context.

use crate::engine::{Operands, RopeLayout, Turn, exact_group_capped, exact_rows_with};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, Promise, RunInfo, Spec, Status, Support, Tunable,
    Withdrawn,
};
use crate::workspace::Context;
use crate::{Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::kernels::{Band, Precision, merge_lse};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "sink_window",
    family: Family::Exact,
    title: "Attention sinks and a sliding window (StreamingLLM pattern)",
    reference: "xiao2024",
    claims: Claims {
        decode: true,
        exact_at: &[("window", Budget::NumTokens)],
        drops: true,
        softcap: true,
        exponent: 1.0,
        except: &[(Law::KeyOrder, "which keys are seen depends on their positions")],
        withdrawn: &[
            Withdrawn {
                param: "precision",
                value: "bf16",
                promise: Promise::RowStochastic,
                reason: "values rounded to 8 significant bits leave the hull of the values",
            },
            Withdrawn {
                param: "precision",
                value: "bf16",
                promise: Promise::ExactAt,
                reason: "operands are rounded to 8 significant bits",
            },
        ],
        spread: Spread::Ring { window: Some(("sinks", "window")), shared: &[] },
        ..Claims::BASE
    },
    probes: &[
        &[("sinks", "3"), ("window", "11")],
        &[("sinks", "0"), ("window", "1")],
        &[("sinks", "2"), ("window", "9"), ("precision", "bf16")],
        &[
            ("sinks", "3"),
            ("window", "11"),
            ("positions", "cache_relative"),
            ("rope_base", "100"),
            ("rope_dim", "4"),
        ],
    ],
    subsets: &[&[("sinks", "2"), ("window", "6")]],
    tunable: &[Tunable::budget("window"), Tunable::values("precision", &["bf16"])],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Position of a query relative to the sinks.
    pub enum Positions {
        /// Its position in the text.
        Original = "original",
        /// Its position in the cache, after sinks and window.
        CacheRelative = "cache_relative",
    }
}

crate::params! {
    /// Parameters of [`SinkWindow`].
    pub struct Params {
        /// Keys at the start that every query sees.
        sinks: usize = 4, in 0..=1 << 30;
        /// Most recent keys that a query sees, its own included.
        window: usize = 512, in 1..=1 << 30;
        /// Precision of the operands: full, or bf16 with sums in single precision; decoding is in full precision.
        precision: Operands = Operands::Full;
        /// Position of a query relative to the sinks: in the text, or in the cache (with a causal mask only).
        positions: Positions = Positions::Original;
        /// Base of the queries' rotary embedding, for cache_relative; in a model, the model's own by default.
        rope_base: Option<f64> = None, in 1.0..=1e12;
        /// Number of rotated features; auto for all.
        rope_dim: Option<usize> = None, in 2..=1 << 20;
        /// Layout of the rotated pairs.
        rope_layout: RopeLayout = RopeLayout::Half;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        let relative = self.positions == Positions::CacheRelative;
        let dim = self.rope_dim.unwrap_or(p.d);
        Support::unless(
            relative && self.rope_base.is_none(),
            "positions = cache_relative turns queries by the rotary embedding that they came with: set rope_base",
        )
        .and_unless(
            !relative && self.rope_base.is_some(),
            "rope_base is used by positions = cache_relative alone: set that, or leave rope_base out",
        )
        .and_unless(
            relative && p.mask == Mask::None,
            "places in a cache are those of tokens that come one after another: without a mask, set positions = original",
        )
        .and_unless(
            relative && !p.near.is_none(),
            "queries are turned by their place, which a near field shifts: set positions = original",
        )
        .and_unless(
            relative && (dim > p.d || !dim.is_multiple_of(2)),
            format!("rope_dim = {dim} rotates whole pairs of the {} features; give an even number up to it", p.d),
        )
    }

    fn build(self, accepted: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(SinkWindow::new(self, accepted.problem))
    }
}

/// Query rows per task.
const BLOCK_ROWS: usize = 96;

/// The plan: number of sinks, width of the window.
#[derive(Clone, Debug)]
pub struct SinkWindow {
    params: Params,
    softcap: Option<f64>,
    /// Rotation of queries to their position in the cache.
    turn: Option<Turn>,
}

impl SinkWindow {
    /// Creates a plan with these parameters.
    pub(crate) fn new(params: Params, p: &Problem) -> Self {
        let Params { rope_base, rope_dim, rope_layout, .. } = params;
        let of = |base| Turn::new(base, rope_dim.unwrap_or(p.d), rope_layout == RopeLayout::Half);
        let relative = params.positions == Positions::CacheRelative;
        Self { turn: rope_base.filter(|_| relative).map(of), params, softcap: p.softcap }
    }

    /// Rotates a query at `position` to its position in the cache, if they differ.
    fn to_cache<T: Real>(&self, position: isize, row: &mut [T]) {
        let last = (self.params.sinks.saturating_add(self.params.window) as isize).saturating_sub(1);
        if let Some(turn) = self.turn.as_ref().filter(|_| position > last) {
            turn.apply((last - position) as f64, row);
        }
    }

    /// True if every row sees all keys that its mask allows.
    fn covers<T: Real>(&self, g: &Group<'_, T>) -> bool {
        let Params { sinks, window, .. } = self.params;
        window >= g.n_k().max(g.n_q()) || g.mask == Mask::Causal && sinks.saturating_add(window) >= g.n_k()
    }
}

impl GroupPlan for SinkWindow {
    fn cost(&self, p: &Problem) -> Cost {
        let sides = if p.mask == Mask::Causal { 1 } else { 2 };
        let seen = (self.params.sinks + sides * self.params.window).min(p.n_k) as u64;
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let flops = 2 * rows * seen * (p.d + p.d_v) as u64;
        Cost { setup_flops: 0, run_flops: flops, bytes: 4 * rows * (p.d + p.d_v) as u64 }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let precision = (self.params.precision.precision(), self.softcap);
        if self.covers(&g) {
            let info = exact_group_capped(&mut g, precision.0, precision.1)?;
            return Ok(RunInfo { status: Status::Exact, ..info });
        }
        let (k, v, scale, cx) = (g.k, g.v, g.scale, g.cx);
        let sinks = self.params.sinks.min(k.rows());
        let (window, offset) = (self.params.window as isize, k.rows() as isize - g.n_q() as isize);
        let causal = g.mask == Mask::Causal;
        let visited = g.par_row_blocks(BLOCK_ROWS, |mut block| {
            let p = block.first as isize + offset;
            let upper = if causal { p } else { p + window - 1 };
            // The window, over the keys after the sinks.
            let shift = sinks as isize;
            let band = Band { lower: Some(p - window + 1 - shift), upper: Some(upper - shift) };
            let (k_near, v_near) = (k.sub_rows(sinks..k.rows()), v.sub_rows(sinks..v.rows()));
            exact_rows_with(block.q, k_near, v_near, scale, band, precision, cx, block.out, block.lse);
            let band_sinks = Band { lower: None, upper: causal.then_some(p) };
            let mut turned =
                cx.scratch.take::<T>(if self.turn.is_some() { block.q.rows() * k.cols() } else { 0 });
            let q = if self.turn.is_some() {
                let rows = turned.chunks_exact_mut(k.cols()).zip(block.q.iter_rows());
                for (r, (to, from)) in rows.enumerate() {
                    to.copy_from_slice(from);
                    self.to_cache(p + r as isize, to);
                }
                MatRef::new(&turned, block.q.rows(), k.cols())
            } else {
                block.q
            };
            merge_sinks(
                &mut block,
                q,
                k.sub_rows(0..sinks),
                v.sub_rows(0..sinks),
                scale,
                band_sinks,
                precision,
                cx,
            );
            let rows = 0..block.lse.len() as isize;
            let clip = |x: isize, n: usize| x.clamp(0, n as isize) as u64;
            Ok(rows
                .map(|r| {
                    let sunk = if causal { clip(p + r + 1, sinks) } else { sinks as u64 };
                    let n = k.rows() - sinks;
                    sunk + clip(upper + r - shift + 1, n).saturating_sub(clip(p + r - window + 1 - shift, n))
                })
                .sum::<u64>())
        })?;
        let empty = g.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64;
        Ok(RunInfo { keys_visited: visited.into_iter().sum(), empty_rows: empty, ..RunInfo::default() })
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(Box::new(Ring {
            plan: self.clone(),
            d: p.d,
            d_v: p.d_v,
            k: Vec::new(),
            v: Vec::new(),
            len: 0,
            index,
        }))
    }
}

/// Merges attention to the sinks into the rows of `block`.
fn merge_sinks<T: Real>(
    block: &mut crate::group::RowBlock<'_, T>,
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    scale: T,
    band: Band,
    precision: (Precision, Option<f64>),
    cx: Context<'_>,
) {
    if k.rows() == 0 {
        return;
    }
    let (rows, d_v) = (block.lse.len(), v.cols());
    let mut out = cx.scratch.take::<T>(rows * d_v);
    let mut lse = cx.scratch.take::<T>(rows);
    exact_rows_with(q, k, v, scale, band, precision, cx, &mut out, &mut lse);
    for ((o, l), (o2, &l2)) in
        block.out.chunks_exact_mut(d_v).zip(block.lse.iter_mut()).zip(out.chunks_exact(d_v).zip(lse.iter()))
    {
        merge_lse(o, l, o2, l2);
    }
}

/// Fixed slots for the sinks, a ring of `window` slots for the rest. The ring is not in order of age, which softmax
/// does not depend on.
#[derive(Debug)]
struct Ring<T> {
    plan: SinkWindow,
    d: usize,
    d_v: usize,
    k: Vec<T>,
    v: Vec<T>,
    len: usize,
    index: GroupIndex,
}

impl<T: Real> GroupStream<T> for Ring<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        let Params { sinks, window, .. } = self.plan.params;
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            let slot = if self.len < sinks { self.len } else { sinks + (self.len - sinks) % window };
            if slot * self.d == self.k.len() {
                self.k.extend_from_slice(k);
                self.v.extend_from_slice(v);
            } else {
                self.k[slot * self.d..(slot + 1) * self.d].copy_from_slice(k);
                self.v[slot * self.d_v..(slot + 1) * self.d_v].copy_from_slice(v);
            }
            self.len += 1;
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
        let n = self.k.len() / self.d;
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v));
        let (sinks, softcap) = (self.plan.params.sinks.min(n), self.plan.softcap);
        let attend = |q, rows: std::ops::Range<usize>, out: &mut [T], lse: &mut [T]| {
            let (k, v) = (k.sub_rows(rows.clone()), v.sub_rows(rows));
            let mut group = Group::decode(q, k, v, scale, out, lse, self.index, cx)?;
            exact_group_capped(&mut group, Precision::Full, softcap)
        };
        if self.plan.turn.is_none() || self.len <= n || sinks == 0 {
            return attend(q, 0..n, out, lse);
        }
        let info = attend(q, sinks..n, out, lse)?;
        let mut turned = cx.scratch.take::<T>(q.rows() * self.d);
        for (to, from) in turned.chunks_exact_mut(self.d).zip(q.iter_rows()) {
            to.copy_from_slice(from);
            self.plan.to_cache(self.len as isize - 1, to);
        }
        let mut part = cx.scratch.take::<T>(q.rows() * self.d_v);
        let mut part_lse = cx.scratch.take::<T>(q.rows());
        let sunk = attend(MatRef::new(&turned, q.rows(), self.d), 0..sinks, &mut part, &mut part_lse)?;
        let rows = out.chunks_exact_mut(self.d_v).zip(lse.iter_mut());
        for ((o, l), (o2, &l2)) in rows.zip(part.chunks_exact(self.d_v).zip(&*part_lse)) {
            merge_lse(o, l, o2, l2);
        }
        Ok(info.merge(sunk))
    }

    fn state_bytes(&self) -> usize {
        (self.k.len() + self.v.len()) * size_of::<T>()
    }
}

#[cfg(test)]
mod tests {
    use crate::testkit::{Case, assert_rows_close, check_method, reference_masked, run_method};
    use crate::{Options, Problem};

    #[test]
    fn honours_the_contract() {
        check_method(&super::METHOD);
    }

    #[test]
    fn bf16_stays_within_the_rounding_of_its_operands() {
        let x = Case::gaussian(Problem::new(2, 257, 64).causal(), 3).cast_f32();
        let narrow = Options::new().with("window", 40);
        let full = run_method(&super::METHOD, &narrow, &x).0;
        let rounded = run_method(&super::METHOD, &narrow.with("precision", "bf16"), &x).0;
        let error = crate::metrics::relative_frobenius(&rounded, &full);
        // Each of q, k, p and v carries a relative rounding of at most 2⁻⁹.
        assert!(error > 1e-5 && error < 0.02, "relative error {error}");
    }

    #[test]
    fn rows_equal_the_masked_softmax() {
        for (n_q, n_k) in [(37, 37), (10, 41), (41, 10)] {
            for causal in [false, true] {
                for (sinks, window) in [(0usize, 3usize), (4, 6), (2, 1), (50, 2)] {
                    let base = Problem { d_v: 5, ..Problem::new(2, 1, 8).with_lens(n_q, n_k) };
                    let x = Case::gaussian(if causal { base.causal() } else { base }, 5);
                    let p = |i: usize| i as isize + n_k as isize - n_q as isize;
                    let (want, _) = reference_masked(&x, |i, j| {
                        let gap = p(i) - j as isize;
                        let sees = !causal || gap >= 0;
                        sees && (j < sinks || gap.abs() < window as isize)
                    });
                    let options = Options::new().with("sinks", sinks).with("window", window);
                    let (o, _) = run_method(&super::METHOD, &options, &x);
                    assert_rows_close(&o, &want, 1e-12, &format!("{n_q}×{n_k} {causal} {sinks}+{window}"));
                }
            }
        }
    }

    /// The paper's own form: keys before rotation, rotated by their position in the cache, and the query by the last
    /// one.
    #[test]
    fn cache_relative_positions_are_those_of_keys_rotated_in_the_cache() {
        use attlas_num::rope::{Angles, Layout, Rope, Scaling, Table};
        for (layout, name) in [(Layout::Half, "half"), (Layout::Interleaved, "interleaved")] {
            let (n, d, sinks, window) = (40, 8, 3, 9);
            let plain = Case::gaussian(Problem::new(1, n, d).causal(), 7);
            let rope = Rope { dim: 6, base: 50.0, layout, scaling: Scaling::None };
            let table = Table::<f64>::new(&rope, n, Angles::Double);
            let rotated = |x: &[f64]| {
                let mut out = x.to_vec();
                out.chunks_exact_mut(d).enumerate().for_each(|(i, row)| table.rotate_in_place(i, row));
                out
            };
            let case = Case { q: rotated(&plain.q), k: rotated(&plain.k), ..plain.clone() };
            let options = Options::new()
                .with("sinks", sinks)
                .with("window", window)
                .with("positions", "cache_relative")
                .with("rope_base", 50.0)
                .with("rope_dim", 6)
                .with("rope_layout", name);
            let (got, _) = run_method(&super::METHOD, &options, &case);
            for i in 0..n {
                let first = (i + 1).saturating_sub(window).max(sinks.min(i + 1));
                let seen: Vec<usize> = (0..sinks.min(i + 1)).chain(first..=i).collect();
                let at = |x: &[f64], from: usize, place: usize| {
                    let mut row = x[from * d..(from + 1) * d].to_vec();
                    table.rotate_in_place(place, &mut row);
                    row
                };
                let q = at(&plain.q, i, seen.len() - 1);
                let logit = |(place, &j): (usize, &usize)| {
                    let k = at(&plain.k, j, place);
                    plain.problem.scale * q.iter().zip(&k).map(|(a, b)| a * b).sum::<f64>()
                };
                let logits: Vec<f64> = seen.iter().enumerate().map(logit).collect();
                let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = logits.iter().map(|l| (l - top).exp()).sum();
                let want: Vec<f64> = (0..d)
                    .map(|c| {
                        let terms = seen.iter().zip(&logits);
                        terms.map(|(&j, l)| (l - top).exp() / total * plain.v[j * d + c]).sum()
                    })
                    .collect();
                assert_rows_close(&got[i * d..(i + 1) * d], &want, 1e-10, &format!("{name}, row {i}"));
            }
        }
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        let p = Problem::new(1, 40, 8).causal();
        let relative = Options::new().with("positions", "cache_relative");
        let refused = |p: &Problem, o: &Options| !super::METHOD.support(p, o).is_yes();
        assert!(refused(&p, &relative) && refused(&p, &Options::new().with("rope_base", 10.0)));
        let based = relative.with("rope_base", 10.0);
        assert!(!refused(&p, &based) && refused(&Problem::new(1, 40, 8), &based));
        assert!(refused(&p, &based.clone().with("rope_dim", 10)) && refused(&p, &based.with("rope_dim", 3)));
    }
}
