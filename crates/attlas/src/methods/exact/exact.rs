//! Exact attention: tiled, one pass, online softmax. The baseline of every comparison.
//!
//! **Idea.** Walk over tiles of keys and keep, for every query row, a running maximum, a running sum and an
//! unnormalised output, so that no $n_q \times n_k$ matrix is ever stored.
//!
//! **Math.** For logits $s$ of a new tile and running $(m, l, a)$: $m' = \max(m, \max s)$,
//! $l \leftarrow e^{m - m'} l + \sum e^{s - m'}$, $a \leftarrow e^{m - m'} a + \sum_j e^{s_j - m'} v_j$; at the
//! end $o = a / l$ and the log-sum-exp is $m + \ln l$. With one query per head, keys are split into pieces of
//! fixed length whose results merge by log-sum-exp. A softcap $c$ replaces $s$ by $c \tanh(s / c)$ first.
//!
//! **Reference.** milakov2018 (online softmax), dao2022 (tiling); survey, Section 2.
//!
//! **Cost.** $2 n_q n_k (d + d_v)$ operations and $n_q n_k$ exponentials, half of it when causal, because tiles
//! that no row sees are skipped. Scratch: a few tiles per thread, whatever the length.
//!
//! The gradient recomputes the weights from the log-sum-exp, tile by tile: five products instead of the two of a run,
//! in memory proportional to the number of tokens (dao2022, Algorithm 4).
//!
//! **Guarantees.** $|o - \hat o|_c \le \mathrm{range}_c\,(\delta + 32u)$ with
//! $\delta = (d+2)\,u\,\beta \max_{ij} \sum_l |q_{il}||k_{jl}|$, tested with the kernels. A row's bits depend only on
//! its own query, the keys it sees and the key tile. With `precision = bf16` operands are rounded to 8 significant bits
//! and sums stay in single precision.
//!
//! **When to use.** Whenever it is fast enough; everything else is measured against it.

use crate::engine::{CachedRows, Operands, exact_backward, exact_group_capped, exact_on_caller};
use crate::gradient::GroupBackward;
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Accepted, Claims, Cost, Family, Method, Promise, RunInfo, Spec, Tunable, Withdrawn};
use crate::workspace::Context;
use crate::{Mask, MatRef, Problem, Real, Result, Spread};
use attlas_num::kernels;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "exact",
    family: Family::Exact,
    title: "Exact attention, tiled with online softmax",
    reference: "milakov2018, dao2022",
    claims: Claims {
        decode: true,
        softcap: true,
        gradient: true,
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
                promise: Promise::Gradient,
                reason: "the gradient is that of operands as they are given",
            },
        ],
        spread: Spread::RING,
        ..Claims::BASE
    },
    tunable: &[Tunable::values("precision", &["bf16"])],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`Exact`].
    pub struct Params {
        /// Precision of the operands: full, or bf16 with sums in single precision.
        precision: Operands = Operands::Full;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, accepted: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(Exact::new(self, accepted.problem.softcap))
    }
}

/// The plan: the precision and the cap.
#[derive(Clone, Debug)]
pub struct Exact {
    precision: kernels::Precision,
    softcap: Option<f64>,
}

impl Exact {
    /// Creates a plan with this precision and this cap.
    pub(crate) fn new(params: Params, softcap: Option<f64>) -> Self {
        Self { precision: params.precision.precision(), softcap }
    }
}

impl GroupPlan for Exact {
    const DOUBLE: bool = true;

    fn cost(&self, p: &Problem) -> Cost {
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        Cost {
            setup_flops: 0,
            run_flops: 2 * p.visible_pairs() * (p.d + p.d_v) as u64,
            bytes: 4 * (rows + keys) * (p.d + p.d_v) as u64,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        exact_group_capped(&mut g, self.precision, self.softcap)
    }

    fn can_fail(&self) -> bool {
        false
    }

    fn on_caller(&self, p: &Problem, threads: usize) -> bool {
        exact_on_caller(p, threads)
    }

    fn has_gradient(&self) -> bool {
        self.precision == kernels::Precision::Full
    }

    fn backward<T: Real>(&self, g: GroupBackward<'_, T>) -> Result<()> {
        exact_backward(g);
        Ok(())
    }

    fn stream<T: Real>(&self, p: &Problem, index: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(Box::new(ExactStream { cached: CachedRows::new(p.d, p.d_v), index, plan: self.clone() }))
    }
}

#[derive(Debug)]
struct ExactStream<T> {
    cached: CachedRows<T>,
    index: GroupIndex,
    plan: Exact,
}

impl<T: Real> GroupStream<T> for ExactStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, _: Context<'_>) -> Result<()> {
        self.cached.append(k, v);
        Ok(())
    }

    fn push_on_caller(&self, tokens: usize) -> bool {
        tokens == 1
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        scale: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        let (k, v) = (self.cached.keys(), self.cached.values());
        self.plan.run(Group::decode(q, k, v, scale, out, lse, self.index, cx)?)
    }

    /// Attends with all tokens in one call of the kernel.
    fn extend(&mut self, x: Group<'_, T>) -> Result<RunInfo> {
        self.push(x.k, x.v, x.cx)?;
        let (k, v) = (self.cached.keys(), self.cached.values());
        self.plan.run(Group { k, v, mask: Mask::Causal, ..x })
    }

    fn state_bytes(&self) -> usize {
        self.cached.bytes()
    }
}

#[cfg(test)]
mod tests {
    use crate::testkit::{check_method, golden, run_method};
    use crate::{Mask, Options, Problem};

    #[test]
    fn honours_the_contract() {
        check_method(&super::METHOD);
    }

    #[test]
    fn reproduces_the_golden_values() {
        let x = golden::inputs();
        let (o, lse) = run_method(&super::METHOD, &Options::new(), &x);
        golden::assert_row(&o, 0, &[0.6572051421, 0.4608600799, 0.1648587091]);
        golden::assert_fro(&o, 2.3654611302);
        golden::assert_close(
            &lse,
            &[2.0567296516, 2.0159919823, 1.9997967711, 1.9227142930, 1.7378044153, 1.8838552797],
        );

        let causal = x.with_problem(Problem { mask: Mask::Causal, ..x.problem });
        let (o, lse) = run_method(&super::METHOD, &Options::new(), &causal);
        golden::assert_row(&o, 3, &[0.7070584823, 0.7650313262, 0.5754746598]);
        golden::assert_fro(&o, 2.6371664850);
        golden::assert_close(
            &lse,
            &[1.2531615897, 1.3081550853, 1.3105764748, 1.3476206365, 1.3514916333, 1.8838552797],
        );

        let short = causal.with_keys(4);
        let (o, lse) = run_method(&super::METHOD, &Options::new(), &short);
        assert!(o[..6].iter().all(|&x| x == 0.0) && lse[..2].iter().all(|&l| l == f64::NEG_INFINITY));
        golden::assert_row(&o, 2, &[0.3894183423; 3]);
        golden::assert_fro(&o, 2.1254241812);
    }

    /// Rows of a stream fed the tokens of `x` one at a time.
    fn streamed(method: &crate::Method, options: &Options, x: &crate::testkit::Case) -> Vec<f64> {
        let p = x.problem;
        let mut stream = method.plan(&p, options).unwrap().stream(crate::DType::F64).unwrap();
        let mut ws = crate::Workspace::single().unwrap();
        let mut all = vec![f64::NAN; p.n_heads * p.n_q * p.d_v];
        let q = crate::TensorRef::bhnd(&x.q, [1, p.n_heads, p.n_q, p.d]).unwrap();
        let k = crate::TensorRef::bhnd(&x.k, [1, p.n_kv_heads, p.n_k, p.d]).unwrap();
        let v = crate::TensorRef::bhnd(&x.v, [1, p.n_kv_heads, p.n_k, p.d_v]).unwrap();
        for i in 0..p.n_q {
            let mut o = vec![f64::NAN; p.n_heads * p.d_v];
            let out = crate::Out::new(crate::TensorMut::bhnd(&mut o, [1, p.n_heads, 1, p.d_v]).unwrap());
            stream.push(k.rows(i..i + 1).into(), v.rows(i..i + 1).into(), &mut ws).unwrap();
            stream.attend(q.rows(i..i + 1).into(), &mut out.into(), &mut ws).unwrap();
            for h in 0..p.n_heads {
                all[(h * p.n_q + i) * p.d_v..][..p.d_v].copy_from_slice(&o[h * p.d_v..][..p.d_v]);
            }
        }
        all
    }

    #[test]
    fn softcaps_are_honoured_in_prompts_and_decoding() {
        use crate::testkit::{Case, assert_rows_close, reference_weights};
        for cap in [0.3, 2.0, 50.0] {
            let p = Problem::new(4, 37, 8).with_kv_heads(2).causal().with_softcap(Some(cap));
            let x = Case::gaussian(Problem { scale: 2.0, ..p }, 9);
            let (want, want_lse) = reference_weights(&x, |_, _, s| cap * (s / cap).tanh());
            for method in [&super::METHOD, &crate::methods::exact::naive::METHOD] {
                let (o, lse) = run_method(method, &Options::new(), &x);
                assert_rows_close(&o, &want, 1e-12, method.id);
                assert_rows_close(&lse, &want_lse, 1e-12, method.id);
            }
            let narrow = Options::new().with("sinks", 1).with("window", 5);
            let (o, _) = run_method(&crate::methods::exact::sink_window::METHOD, &narrow, &x);
            let (want, _) = reference_weights(&x, |i, j, s| {
                if j < 1 || j + 5 > i { cap * (s / cap).tanh() } else { f64::NEG_INFINITY }
            });
            assert_rows_close(&o, &want, 1e-12, "sink_window");
            for (method, options) in
                [(&super::METHOD, Options::new()), (&crate::methods::exact::sink_window::METHOD, narrow)]
            {
                let (want, _) = run_method(method, &options, &x);
                assert_rows_close(&streamed(method, &options, &x), &want, 1e-12, method.id);
            }
        }
        let p = Problem::new(2, 64, 8).causal().with_softcap(Some(30.0));
        for method in crate::registry::METHODS.iter().filter(|m| !m.claims.softcap) {
            let error = method.plan(&p, &Options::new()).unwrap_err().to_string();
            assert!(error.contains("capped at 30"), "{}: {error}", method.id);
        }
        assert!(super::METHOD.plan(&p.with_softcap(Some(0.0)), &Options::new()).is_err());
    }

    /// Same result on the caller's thread and inside the threads of the workspace.
    #[test]
    fn the_thread_that_calls_gives_the_bits_of_the_others() {
        use crate::testkit::Case;
        use crate::{Out, Qkv, Schedule, TensorMut, TensorRef, Workspace};
        // New tokens over a piece of keys and over several, prompts, rows that see nothing, padding.
        let cases = [(1, 1, 7), (2, 1, 1024), (1, 1, 9001), (2, 70, 70), (1, 60, 41), (2, 1, 0), (1, 0, 5)];
        for (batch, n_q, n_k) in cases {
            for mask in [Mask::None, Mask::Causal] {
                let p = Problem { batch, n_k, mask, ..Problem::new(6, n_q, 8).with_kv_heads(2) };
                let x = Case::gaussian(p, 5);
                let lens: Vec<usize> = (0..batch).map(|b| n_k - n_k.min(b)).collect();
                let plan = super::METHOD.plan(&p, &Options::new()).unwrap();
                let run = |ws: &mut Workspace, key_lens: Option<&[usize]>, tokens_first: bool| {
                    let (mut o, mut lse) =
                        (vec![f64::NAN; 6 * batch * n_q * 8], vec![f64::NAN; 6 * batch * n_q]);
                    let strides = if tokens_first { [6 * n_q * 8, 8, 48] } else { [6 * n_q * 8, n_q * 8, 8] };
                    let out = TensorMut::new(&mut o, [batch, 6, n_q, 8], strides).unwrap();
                    let q = TensorRef::bhnd(&x.q, [batch, 6, n_q, 8]).unwrap();
                    let k = TensorRef::bhnd(&x.k, [batch, 2, n_k, 8]).unwrap();
                    let v = TensorRef::bhnd(&x.v, [batch, 2, n_k, 8]).unwrap();
                    let inputs = Qkv { key_lens, ..Qkv::new(q, k, v) };
                    let info =
                        plan.execute(&inputs.into(), &mut Out::with_lse(out, &mut lse).into(), ws).unwrap();
                    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<u64>>();
                    (bits(&o), bits(&lse), info.keys_visited, info.empty_rows)
                };
                for threads in [1, 3] {
                    let base = Workspace::new(Schedule { threads, ..Schedule::default() }).unwrap();
                    for (key_lens, tokens_first) in [(None, false), (Some(&lens[..]), false), (None, true)] {
                        let here = run(&mut base.sibling(), key_lens, tokens_first);
                        let there = base.install(|_| run(&mut base.sibling(), key_lens, tokens_first));
                        assert_eq!(here, there, "{batch} × {n_q} × {n_k}, {mask:?}, {threads} threads");
                    }
                }
            }
        }
    }

    #[test]
    fn bf16_stays_within_the_rounding_of_its_operands() {
        let x = crate::testkit::Case::gaussian(Problem::new(2, 257, 64), 3).cast_f32();
        let exact = run_method(&super::METHOD, &Options::new(), &x).0;
        let rounded = run_method(&super::METHOD, &Options::new().with("precision", "bf16"), &x).0;
        let error = crate::metrics::relative_frobenius(&rounded, &exact);
        // Each of q, k, p and v carries a relative rounding of at most 2⁻⁹.
        assert!(error > 1e-5 && error < 0.02, "relative error {error}");
    }
}
