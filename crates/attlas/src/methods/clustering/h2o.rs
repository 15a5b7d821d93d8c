//! Heavy hitters (H2O): a cache of the keys with the greatest weights so far and of the last keys; others are evicted.
//!
//! **Idea.** Few keys hold most of the weight of all rows, and these keys show early. A cache of bounded size keeps
//! those with the greatest sums of weights so far, beside the most recent ones. Evicted keys are gone: a later row
//! cannot find a key that earlier queries ignored.
//!
//! **Math.** The cache $S$ begins empty. A row attends to the keys in $S$ up to itself, $o = \sum_{j \in S} p_j v_j$ with
//! $p$ the softmax over $S$, and adds $p_j$, summed over the query heads of the group, to the score $a_j$. After every
//! `interval` rows $S$ keeps its `recent` last keys and the `keys` others with the greatest $a_j$ (ties to the earlier
//! key).
//!
//! **Reference.** zhang2023. Departures: keys are evicted after every `interval` rows instead of after each, and the heads
//! of a group share a cache. A prompt that is pushed without queries is kept whole until the first `interval` rows have
//! voted.
//!
//! **Cost.** Per row $2 c (2d + d_v)$ for a cache of at most $c = \mathrm{keys} + \mathrm{recent} + \mathrm{interval}$ keys,
//! whatever the length; the state is $c (d + d_v + 1)$ numbers per key head.
//!
//! **Guarantees.** Exact when `keys` covers all keys. Weights are non-negative and sum to one. The state does not grow with
//! the length. No bound on the error: an evicted key cannot be found again.
//!
//! **When to use.** When cache memory is the limit and the task does not search the text for single facts; as the
//! yardstick for methods that keep the cache and read little of it.

use crate::engine::{Eviction, exact_group};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Support, Tunable,
};
use crate::{Mask, Problem, Real, Result};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "h2o",
    family: Family::Clustering,
    title: "Heavy-hitter cache that forgets the lightest keys (H2O)",
    reference: "zhang2023",
    claims: Claims {
        decode: true,
        exact_at: &[("keys", Budget::NumKeys)],
        exponent: 1.0,
        except: &[
            (Law::HeadsAlone, "the heads of a group share a cache and choose together"),
            (Law::QueriesAlone, "what is kept depends on the weights of earlier rows"),
            (Law::DecodeIsPrefill, "a prompt pushed at once has no queries to vote with"),
        ],
        ..Claims::BASE
    },
    probes: &[
        &[("keys", "7"), ("recent", "5"), ("interval", "4")],
        &[("keys", "0"), ("recent", "1"), ("interval", "1")],
    ],
    tunable: &[Tunable::budget("keys")],
    ..Method::of::<Params>()
};

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(p.mask != Mask::Causal, "keys are forgotten as tokens come; give a causal mask")
    }

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(HeavyHitters::new(self))
    }
}

crate::params! {
    /// Parameters of [`HeavyHitters`].
    pub struct Params {
        /// Number of keys kept by their sums of weights.
        keys: usize = 256, in 0..=1 << 30;
        /// Number of most recent keys kept.
        recent: usize = 256, in 1..=1 << 30;
        /// Rows between two evictions.
        interval: usize = 64, in 1..=1 << 20;
    }
}

/// The plan: the size of the cache.
#[derive(Clone, Debug)]
pub struct HeavyHitters {
    rule: Eviction,
}

impl HeavyHitters {
    /// Creates a plan with these parameters.
    pub(crate) fn new(params: Params) -> Self {
        let Params { keys, recent, interval } = params;
        Self { rule: Eviction { keys, recent, interval, observed: None, pool: 1 } }
    }
}

impl GroupPlan for HeavyHitters {
    fn cost(&self, p: &Problem) -> Cost {
        let pairs = p.visible_pairs().min((p.batch * p.n_heads * p.n_q) as u64 * self.rule.most() as u64);
        Cost {
            setup_flops: 2 * pairs * p.d as u64,
            run_flops: 2 * pairs * (p.d + p.d_v) as u64,
            bytes: 4 * pairs,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if self.rule.keys >= g.n_k() || g.n_q() == 0 {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        self.rule.run(&mut g)
    }

    fn stream<T: Real>(&self, p: &Problem, _: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(self.rule.stream(p))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{Case, assert_rows_close, check_method, reference_masked, run_method};
    use crate::{DType, Options, Out, TensorMut, TensorRef, Workspace};

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn a_key_that_every_row_looks_at_is_kept_and_others_are_forgotten() {
        let (n, d) = (120, 4);
        let mut case = Case::gaussian(Problem::new(1, n, d).causal(), 1);
        // Key 9 has a large product with every query, so that it is heavy throughout.
        case.q.chunks_exact_mut(d).for_each(|q| q[0] = 3.0);
        case.k.chunks_exact_mut(d).enumerate().for_each(|(j, k)| k[0] = if j == 9 { 6.0 } else { 0.0 });
        let options = Options::new().with("keys", 1).with("recent", 8).with("interval", 8);
        let (o, lse) = run_method(&METHOD, &options, &case);
        let sees = |i: usize, j: usize| {
            let first = i / 8 * 8;
            j == 9 || j + 8 >= first
        };
        let (want, want_lse) = reference_masked(&case, sees);
        // From the third block on: before it, another key may be the heaviest.
        assert_rows_close(&o[24 * d..], &want[24 * d..], 1e-12, "outputs");
        assert_rows_close(&lse[24..], &want_lse[24..], 1e-12, "log-sum-exp");
    }

    #[test]
    fn tokens_one_by_one_give_the_rows_of_the_plan_within_bounded_memory() {
        let p = Problem { d_v: 5, ..Problem::new(4, 200, 6).with_kv_heads(2).causal() };
        let case = Case::gaussian(p, 2);
        let options = Options::new().with("keys", 6).with("recent", 5).with("interval", 7);
        let (want, _) = run_method(&METHOD, &options, &case);
        let plan = METHOD.plan(&p, &options).unwrap();
        let mut stream = plan.stream(DType::F64).unwrap();
        let mut ws = Workspace::single().unwrap();
        let q = TensorRef::bhnd(&case.q, [1, 4, 200, 6]).unwrap();
        let k = TensorRef::bhnd(&case.k, [1, 2, 200, 6]).unwrap();
        let v = TensorRef::bhnd(&case.v, [1, 2, 200, 5]).unwrap();
        for t in 0..200 {
            let rows = t..t + 1;
            stream.push(k.rows(rows.clone()).into(), v.rows(rows.clone()).into(), &mut ws).unwrap();
            let mut o = vec![f64::NAN; 4 * 5];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, 4, 1, 5]).unwrap());
            stream.attend(q.rows(rows).into(), &mut out.into(), &mut ws).unwrap();
            let rows: Vec<f64> = (0..4).flat_map(|h| want[(h * 200 + t) * 5..][..5].to_vec()).collect();
            assert_rows_close(&o, &rows, 1e-12, &format!("token {t}"));
            assert!(
                stream.state_bytes() <= 2 * (6 + 5 + 7) * (6 + 5 + 1) * 8,
                "{} bytes",
                stream.state_bytes()
            );
        }
    }
}
