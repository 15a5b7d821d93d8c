//! Gradients: the claim, finite differences, threads, layouts, padding and single precision.

use super::Subject;
use crate::gradient::Pass;
use crate::testkit::{Case, How, assert_rows_close, assert_same_bits, swap_axes};
use crate::{Align, Mask, Plan, Problem, Qkv, Real, Schedule, TensorMut, TensorRef, Workspace};
use attlas_num::Scratch;
use attlas_num::rng::StreamKey;

/// Gradients of queries, keys and values.
type Gradients = [Vec<f64>; 3];

impl Subject {
    /// Checks that a plan has a gradient if and only if it is claimed, and that it is the gradient of the plan's
    /// results.
    pub(super) fn check_gradient(&self) {
        let claimed = self.method.claims_with(&self.options).gradient;
        for mask in self.masks() {
            for (n_q, n_k) in [(5, 7), (7, 5), (1, 3)] {
                let p =
                    Problem { batch: 2, mask, n_q, n_k, d_v: 3, ..Problem::new(4, 7, 4).with_kv_heads(2) };
                let case = Case::gaussian(p, 31);
                let Some(plan) = self.plan_for(&case, &self.options) else { continue };
                match backward::<f64>(&*plan, &case, 1, false, None) {
                    Ok(got) if claimed => self.check_slopes(&*plan, &case, &got),
                    Ok(_) => panic!("{}", self.name("has a gradient that is not claimed", &p)),
                    Err(_) if !claimed => {}
                    Err(e) => panic!("{}: {e}", self.name("gradient", &p)),
                }
            }
            if claimed {
                self.check_large_gradient(mask);
            }
        }
    }

    /// Compares every sixth entry with central differences.
    fn check_slopes(&self, plan: &dyn Plan, case: &Case, got: &Gradients) {
        let what = self.name("gradient", &case.problem);
        for (which, gradient) in got.iter().enumerate() {
            for at in (0..gradient.len()).step_by(6) {
                let moved = |step: f64| {
                    let mut case = case.clone();
                    [&mut case.q, &mut case.k, &mut case.v][which][at] += step;
                    loss(self, plan, &case)
                };
                let h = 1e-5;
                let slope = (moved(h) - moved(-h)) / (2.0 * h);
                let near = (slope - gradient[at]).abs() <= 1e-7 * (1.0 + slope.abs());
                assert!(near, "{what}: of {which}, entry {at} is {}, expected {slope}", gradient[at]);
            }
        }
    }

    /// Checks that threads and layouts change no bit, that single precision changes results by rounding only, and that
    /// padding changes nothing valid.
    fn check_large_gradient(&self, mask: Mask) {
        let p = Problem { mask, d_v: 19, ..Problem::new(2, 211, 16).with_kv_heads(1) };
        let case = Case::gaussian(p, 32);
        let Some(plan) = self.plan_for(&case, &self.options) else { return };
        let what = self.name("gradient", &p);
        let run = |threads, token_major, lens| {
            backward::<f64>(&*plan, &case, threads, token_major, lens)
                .unwrap_or_else(|e| panic!("{what}: {e}"))
        };
        let want = run(1, false, None);
        for (threads, token_major) in [(3, false), (1, true)] {
            for (got, want) in run(threads, token_major, None).iter().zip(&want) {
                assert_same_bits(got, want, &format!("{what}, {threads} threads, token-major {token_major}"));
            }
        }
        let single = backward::<f32>(&*plan, &case, 1, false, None).unwrap_or_else(|e| panic!("{what}: {e}"));
        for (got, want) in single.iter().zip(&want) {
            assert_rows_close(got, want, 2e-4, &format!("{what} in single precision"));
        }
        let padded = run(1, false, Some(150));
        let short = case.with_keys(150);
        let Some(plan) = self.plan_for(&short, &self.options) else { return };
        let want = backward::<f64>(&*plan, &short, 1, false, None).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_rows_close(&padded[0], &want[0], 1e-12, &format!("{what} of padded queries"));
        for (which, width) in [(1, 16), (2, 19)] {
            let (valid, rest) = padded[which].split_at(150 * width);
            assert_rows_close(valid, &want[which], 1e-12, &format!("{what} of padded keys"));
            assert!(rest.iter().all(|&x| x == 0.0), "{what}: padding has a gradient");
        }
    }
}

/// Draws gradients of outputs and log-sum-exps.
fn reaches(p: &Problem) -> (Vec<f64>, Vec<f64>) {
    let rows = p.batch * p.n_heads * p.n_q;
    let mut rng = StreamKey::new(33).named("gradient").rng();
    ((0..rows * p.d_v).map(|_| rng.normal()).collect(), (0..rows).map(|_| rng.normal()).collect())
}

/// Returns the sum whose gradient is taken; log-sum-exps of rows that see nothing count as 0.
fn loss(subject: &Subject, plan: &dyn Plan, case: &Case) -> f64 {
    let (d_o, d_lse) = reaches(&case.problem);
    let ran = subject.run_plan(plan, case, How::default());
    let outputs: f64 = ran.o.iter().zip(&d_o).map(|(a, b)| a * b).sum();
    let sums = ran.lse.iter().zip(&d_lse).filter(|(l, _)| l.is_finite());
    outputs + sums.map(|(a, b)| a * b).sum::<f64>()
}

fn backward<T: Real>(
    plan: &dyn Plan,
    case: &Case,
    threads: usize,
    token_major: bool,
    keys: Option<usize>,
) -> crate::Result<Gradients>
where
    for<'a> Pass<'a, T>: Into<crate::gradient::Backward<'a>>,
    for<'a> Qkv<'a, T>: Into<crate::Inputs<'a>>,
    for<'a> crate::Out<'a, T>: Into<crate::Output<'a>>,
{
    let p = case.problem;
    let (d_o, d_lse) = reaches(&p);
    let q_dims = [p.batch, p.n_heads, p.n_q, p.d];
    let [k_dims, v_dims] = [p.d, p.d_v].map(|c| [p.batch, p.n_kv_heads, p.n_k, c]);
    let o_dims = [p.batch, p.n_heads, p.n_q, p.d_v];
    let load = |x: &[f64], dims| {
        let x: Vec<T> = x.iter().map(|&x| T::from_f64(x)).collect();
        if token_major { swap_axes(&x, dims) } else { x }
    };
    fn view<T>(x: &[T], dims: [usize; 4], token_major: bool) -> crate::Result<TensorRef<'_, T>> {
        if token_major { TensorRef::bnhd(x, dims) } else { TensorRef::bhnd(x, dims) }
    }
    fn view_mut<T>(x: &mut [T], dims: [usize; 4], token_major: bool) -> crate::Result<TensorMut<'_, T>> {
        if token_major { TensorMut::bnhd(x, dims) } else { TensorMut::bhnd(x, dims) }
    }
    let (q, k, v) = (load(&case.q, q_dims), load(&case.k, k_dims), load(&case.v, v_dims));
    let d_o = load(&d_o, o_dims);
    let d_lse: Vec<T> = d_lse.iter().map(|&x| T::from_f64(x)).collect();
    let lens = vec![keys.unwrap_or(p.n_k); p.batch];
    let mut x = Qkv::new(
        view(&q, q_dims, token_major)?,
        view(&k, k_dims, token_major)?,
        view(&v, v_dims, token_major)?,
    );
    if keys.is_some() {
        x = x.padded(&lens, Align::End);
    }
    let mut ws = Workspace::with_scratch(Schedule { threads, ..Schedule::default() }, Scratch::poisoned())?;
    let mut o = vec![T::NAN; o_dims.iter().product()];
    let mut lse = vec![T::NAN; p.batch * p.n_heads * p.n_q];
    let out = crate::Out::with_lse(view_mut(&mut o, o_dims, token_major)?, &mut lse);
    // An error for methods without a log-sum-exp, which have no gradient either.
    plan.execute(&x.into(), &mut out.into(), &mut ws)?;
    let dims = [q_dims, k_dims, v_dims];
    let mut grads = dims.map(|dims| vec![T::NAN; dims.iter().product()]);
    let [dq, dk, dv] = &mut grads;
    let pass = Pass {
        x,
        o: view(&o, o_dims, token_major)?,
        lse: &lse,
        d_o: view(&d_o, o_dims, token_major)?,
        d_lse: Some(&d_lse),
        dq: view_mut(dq, q_dims, token_major)?,
        dk: view_mut(dk, k_dims, token_major)?,
        dv: view_mut(dv, v_dims, token_major)?,
    };
    plan.backward(&mut pass.into(), &mut ws)?;
    let widen = |x: Vec<T>| x.into_iter().map(Real::to_f64).collect::<Vec<f64>>();
    let [dq, dk, dv] = grads;
    let back =
        |x: Vec<f64>, [b, h, n, c]: [usize; 4]| if token_major { swap_axes(&x, [b, n, h, c]) } else { x };
    Ok([back(widen(dq), q_dims), back(widen(dk), k_dims), back(widen(dv), v_dims)])
}
