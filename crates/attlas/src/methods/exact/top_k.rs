//! Top-k attention: exact softmax over the `keys` largest logits of each row.
//!
//! **Idea.** Compute all logits, keep the largest, attend to those alone. No method that keeps a fixed number of keys
//! per query can do better, so it is the yardstick of the sparse ones.
//!
//! **Math.** For row $i$ let $S_i$ be the indices of the `keys` largest $s_{ij} = \beta\, q_i^\top k_j$ among the
//! visible ones, ties to the smaller index: $o_i = \sum_{j \in S_i} e^{s_{ij} - \ell_i} v_j$ with
//! $\ell_i = \ln \sum_{j \in S_i} e^{s_{ij}}$.
//!
//! **Reference.** gupta2021; survey, Section 3.
//!
//! **Cost.** $2 n_q n_k d$ for the logits, a linear selection, and $2\,\mathrm{keys}\,n_q d_v$; one row of logits
//! per thread.
//!
//! **Guarantees.** $|o - \hat o|_c \le (1 - p_S)\,\mathrm{range}_c$ where $p_S$ is the captured mass
//! $e^{\hat\ell - \ell}$; tested here. Exact when `keys` covers all keys.
//!
//! **When to use.** To see how sparse a head really is. It is not faster than exact attention.

use crate::engine::{exact_group, top_indices};
use crate::group::{Group, GroupPlan};
use crate::method::{Accepted, Budget, Claims, Cost, Family, Method, RunInfo, Spec, Status, Tunable};
use crate::{Problem, Real, Result, Spread};
use attlas_num::kernels::{axpy, matvec, softmax_in_place};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "top_k",
    family: Family::Exact,
    title: "Exact attention over the largest logits (yardstick)",
    reference: "gupta2021",
    claims: Claims {
        exact_at: &[("keys", Budget::NumKeys)],
        drops: true,
        spread: Spread::RANKS_KEYS,
        ..Claims::BASE
    },
    probes: &[&[("keys", "9")]],
    subsets: &[&[("keys", "5")]],
    tunable: &[Tunable::budget("keys")],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`TopK`].
    pub struct Params {
        /// Keys kept for each query, at most all visible ones.
        keys: usize = 64, in 1..=1 << 30;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(TopK::new(self))
    }
}

/// The plan: how many keys each row keeps.
#[derive(Debug)]
pub struct TopK {
    keys: usize,
}

impl TopK {
    /// A plan that keeps `params.keys` keys.
    pub(crate) fn new(params: Params) -> Self {
        Self { keys: params.keys }
    }
}

impl GroupPlan for TopK {
    fn cost(&self, p: &Problem) -> Cost {
        let pairs = p.visible_pairs();
        let kept = (p.batch * p.n_heads * p.n_q) as u64 * self.keys.min(p.n_k) as u64;
        Cost { setup_flops: 0, run_flops: 2 * (pairs * p.d as u64 + kept * p.d_v as u64), bytes: 4 * pairs }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if self.keys >= g.n_k() {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let (k, v, scale, cx, keys) = (g.k, g.v, g.scale, g.cx, self.keys);
        let visible: Vec<usize> = (0..g.n_q()).map(|i| g.visible(i)).collect();
        let visited = g.visible_pairs();
        let empty = g.par_row_blocks(16, |block| {
            let mut logits = cx.scratch.take::<T>(k.rows());
            let mut kept = cx.scratch.take::<T>(keys);
            let mut empty = 0;
            for (r, (out, lse)) in block.out.chunks_exact_mut(v.cols()).zip(block.lse.iter_mut()).enumerate()
            {
                let n = visible[block.first + r];
                matvec(k.sub_rows(0..n), block.q.row(r), &mut logits[..n]);
                let chosen = top_indices(&logits[..n], keys);
                let kept = &mut kept[..chosen.len()];
                kept.iter_mut().zip(&chosen).for_each(|(w, &j)| *w = scale * logits[j]);
                *lse = softmax_in_place(kept);
                out.fill(T::ZERO);
                chosen.iter().zip(kept.iter()).for_each(|(&j, &w)| axpy(w, v.row(j), out));
                empty += u64::from(n == 0);
            }
            Ok(empty)
        })?;
        let empty_rows = empty.into_iter().sum();
        Ok(RunInfo { keys_visited: visited, empty_rows, rank: Some(keys), ..RunInfo::default() })
    }
}

#[cfg(test)]
mod tests {
    use crate::testkit::{Case, check_method, reference, run_method};
    use crate::{Options, Problem};

    #[test]
    fn honours_the_contract() {
        check_method(&super::METHOD);
    }

    #[test]
    fn the_error_is_bounded_by_the_lost_mass() {
        for problem in [Problem::new(1, 130, 8), Problem::new(1, 130, 8).causal()] {
            let x = Case::gaussian(problem, 11);
            let (exact, exact_lse) = reference(&x);
            let range: Vec<f64> = (0..8)
                .map(|c| {
                    let column = || x.v.iter().skip(c).step_by(8);
                    column().cloned().fold(f64::MIN, f64::max) - column().cloned().fold(f64::MAX, f64::min)
                })
                .collect();
            for keys in [1usize, 7, 100] {
                let (o, lse) = run_method(&super::METHOD, &Options::new().with("keys", keys), &x);
                for i in 0..130 {
                    let lost = 1.0 - (lse[i] - exact_lse[i]).exp();
                    assert!(lost > -1e-12);
                    for c in 0..8 {
                        let gap = (o[i * 8 + c] - exact[i * 8 + c]).abs();
                        assert!(
                            gap <= lost.max(0.0) * range[c] + 1e-12,
                            "row {i}: {gap} > {lost} · {}",
                            range[c]
                        );
                    }
                }
            }
        }
    }
}
