//! Quest: exact attention to the pages of cached keys with the greatest upper bounds; means stand for the others.
//!
//! **Idea.** A query and the range of every coordinate within a page bound the logits of its keys without reading them.
//! While decoding, the pages with the greatest bounds are read; sinks and the last keys are always read; each run of
//! the other keys counts as one pseudo key, so that no mass is lost.
//!
//! **Math.** For a page $P$ with $M_c = \max_{j \in P} k_{jc}$, $m_c = \min_{j \in P} k_{jc}$:
//! $u_P = \tau \sum_c \max(q_c M_c, q_c m_c) \ge \tau \max_{j \in P} \langle q, k_j \rangle$. For query head $h$,
//! $w^h_P \propto |P| e^{u^h_P}$ normalised together with the exact weight of sinks and window; pages are taken in
//! order of $\sum_h w^h_P$ up to `keys` keys. The output is the softmax over the keys of sinks, window and taken pages,
//! and, for each aligned run of `far_block` keys, over the mean of its other keys with the logarithm of their number
//! added to its logit.
//!
//! **Whole sequences.** Each row is computed as in the stream, over the pages before it.
//!
//! **Reference.** tang2024. Departures: keys that are not read keep their mass as means (`far = none` leaves them out as
//! published); the heads of a group choose together.
//!
//! **Cost.** A token reads $2 n d / \mathrm{page}$ numbers of bounds, $\mathrm{keys}\,(d + d_v)$ of pages and
//! $n (d + d_v) / \mathrm{far\_block}$ of means, instead of $n (d + d_v)$.
//!
//! **Guarantees.** Exact when `keys` covers all keys. Weights are non-negative and sum to one. The bound of a page is never
//! below a logit of its keys (tested); the weight of the other pages is not bounded.
//!
//! **When to use.** Decoding over long contexts, where memory traffic is the cost and any key may be needed.

use crate::engine::{KeyPages, PageRule, PageScore, exact_group};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Accepted, Budget, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Tunable};
use crate::{Error, MatRef, Problem, Real, Result, Spread};
use attlas_num::par::*;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "quest",
    family: Family::Clustering,
    title: "Quest: pages of keys by upper bounds, means of the others",
    reference: "tang2024",
    claims: Claims {
        decode: true,
        exact_at: &[("keys", Budget::NumKeys)],
        except: &[
            (Law::KeyOrder, "pages are taken by position"),
            (Law::HeadsAlone, "the heads of a group choose their pages together"),
        ],
        spread: Spread::RANKS_KEYS,
        ..Claims::BASE
    },
    probes: &[
        &[("page", "4"), ("keys", "12"), ("sinks", "3"), ("window", "8"), ("far_block", "8")],
        &[
            ("page", "5"),
            ("keys", "10"),
            ("sinks", "0"),
            ("window", "0"),
            ("far", "none"),
            ("far_block", "5"),
        ],
    ],
    tunable: &[Tunable::budget("keys")],
    ..Method::of::<Params>()
};

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Quest::new(self)
    }
}

crate::choices! {
    /// Treatment of keys that are not read.
    pub enum Far {
        /// They are left out, as published.
        None = "none",
        /// Each run is one pseudo key at its mean.
        Mean = "mean",
    }
}

crate::params! {
    /// Parameters of [`Quest`].
    pub struct Params {
        /// Maximum number of keys in the pages that are read.
        keys: usize = 1024, in 0..=1 << 30;
        /// Keys per page.
        page: usize = 16, in 1..=1 << 20;
        /// Keys at the start that are always exact.
        sinks: usize = 4, in 0..=1 << 30;
        /// Last keys that are always exact, extended to the start of the run they begin in.
        window: usize = 64, in 0..=1 << 30;
        /// Treatment of keys that are not read.
        far: Far = Far::Mean;
        /// Keys per run that counts as one pseudo key; a multiple of the page.
        far_block: usize = 64, in 1..=1 << 20;
    }
}

/// The plan: page size and budget.
#[derive(Clone, Debug)]
pub struct Quest {
    rule: PageRule,
}

impl Quest {
    /// Creates a plan with these parameters; an error unless runs consist of whole pages.
    pub(crate) fn new(params: Params) -> Result<Self> {
        let Params { keys, page, sinks, window, far, far_block } = params;
        if !far_block.is_multiple_of(page) {
            return Err(Error::param("far_block", far_block, format!("a multiple of the page, {page}")));
        }
        let (means, score) = (far == Far::Mean, PageScore::Bound);
        Ok(Self { rule: PageRule { score, page, run: far_block, keys, share: 1.0, sinks, window, means } })
    }
}

impl GroupPlan for Quest {
    fn cost(&self, p: &Problem) -> Cost {
        let PageRule { keys, page, run, sinks, window, .. } = self.rule;
        let pairs = p.visible_pairs() as f64;
        let rows = (p.batch * p.n_heads * p.n_q) as f64;
        let width = (p.d + p.d_v) as f64;
        let exact = (rows * (keys + sinks + window + run) as f64).min(pairs);
        let setup = (p.batch * p.n_kv_heads * p.n_k) as f64 * (2 * p.d + p.d + p.d_v) as f64;
        let scored = pairs / page as f64 * 2.0 * p.d as f64 + pairs / run as f64 * width;
        Cost {
            setup_flops: setup as u64,
            run_flops: (2.0 * (scored + exact.max(1.0) * width)) as u64,
            bytes: (4.0 * (scored + exact * width)) as u64,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if self.rule.keys >= g.n_k() || g.n_q() == 0 {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let (k, v, cx, scale) = (g.k, g.v, g.cx, g.scale);
        let (n_q, heads, d, d_v) = (g.n_q(), g.q.heads(), k.cols(), v.cols());
        let mut known = KeyPages::new(self.rule, d, d_v);
        known.extend(k, v);
        // Rows of all heads side by side; the group's outputs are head after head.
        let mut out = cx.scratch.take::<T>(n_q * heads * d_v);
        let mut lse = cx.scratch.take::<T>(n_q * heads);
        let rows = out.par_chunks_mut(heads * d_v).zip(lse.par_chunks_mut(heads)).enumerate();
        let visited: u64 = rows
            .map(|(i, (out, lse))| {
                let n = g.visible(i);
                if n == 0 {
                    out.fill(T::ZERO);
                    lse.fill(T::NEG_INFINITY);
                    return 0;
                }
                let mut token = cx.scratch.take::<T>(heads * d);
                (0..heads)
                    .zip(token.chunks_exact_mut(d))
                    .for_each(|(h, q)| q.copy_from_slice(g.q.head(h).row(i)));
                known.attend(MatRef::new(&token, heads, d), k, v, n, scale, false, cx, out, lse)
            })
            .sum();
        for h in 0..heads {
            for i in 0..n_q {
                let (from, to) = (i * heads + h, h * n_q + i);
                g.out[to * d_v..(to + 1) * d_v].copy_from_slice(&out[from * d_v..(from + 1) * d_v]);
                g.lse[to] = lse[from];
            }
        }
        let empty = g.lse.iter().filter(|l| **l == T::NEG_INFINITY).count() as u64;
        Ok(RunInfo { keys_visited: visited, empty_rows: empty, ..RunInfo::default() })
    }

    fn stream<T: Real>(&self, p: &Problem, _: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(KeyPages::stream(self.rule, p.d, p.d_v))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{Case, assert_rows_close, check_method, reference_masked, run_method};
    use crate::{Options, Problem};

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn the_page_with_the_greatest_bound_is_read() {
        // One key along the query among keys across it: its page is read, the others are left out.
        let (n, d) = (96, 4);
        let mut case = Case::gaussian(Problem::new(1, 1, d).with_lens(1, n).causal(), 1);
        case.q[..d].copy_from_slice(&[2.0, 0.0, 0.0, 0.0]);
        case.k
            .chunks_exact_mut(d)
            .enumerate()
            .for_each(|(j, k)| k[0] = if j == 37 { 5.0 } else { 0.1 * k[0] });
        let options = Options::new().with("keys", 8).with("page", 8).with("far_block", 8).with("far", "none");
        let options = options.with("sinks", 2).with("window", 10);
        let (o, lse) = run_method(&METHOD, &options, &case);
        let sees = |_: usize, j: usize| !(2..80).contains(&j) || (32..40).contains(&j);
        let (want, want_lse) = reference_masked(&case, sees);
        assert_rows_close(&o, &want, 1e-12, "outputs");
        assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
    }

    #[test]
    fn equal_keys_within_runs_are_exact_with_means() {
        let mut case = Case::gaussian(Problem::new(2, 130, 6).with_kv_heads(1).causal(), 2);
        for run in case.k.chunks_mut(16 * 6) {
            let first = run[..6].to_vec();
            run.chunks_exact_mut(6).for_each(|k| k.copy_from_slice(&first));
        }
        let options = Options::new().with("keys", 8).with("page", 4).with("far_block", 16).with("window", 5);
        let (o, lse) = run_method(&METHOD, &options, &case);
        let (want, want_lse) = crate::testkit::reference(&case);
        assert_rows_close(&o, &want, 1e-12, "outputs");
        assert_rows_close(&lse, &want_lse, 1e-12, "log-sum-exp");
    }

    #[test]
    fn runs_of_broken_pages_are_refused() {
        let options = Options::new().with("page", 16).with("far_block", 24);
        assert!(METHOD.plan(&Problem::new(1, 10, 4), &options).is_err());
    }
}
