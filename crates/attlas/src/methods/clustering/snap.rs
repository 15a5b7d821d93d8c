//! SnapKV: the last rows vote for the keys to keep; the others are evicted.
//!
//! **Idea.** The answer will attend to the keys that the last rows of the prompt attend to. The rows of an observation
//! window vote for keys by their weights, votes are pooled over neighbours so that phrases stay whole, and the cache
//! keeps the keys with the most votes and the window. Evicted keys are gone: a later row cannot find a key that the
//! window ignored.
//!
//! **Math.** A row attends to the keys in the cache $S$ up to itself. After every `interval` rows let $W$ be the last
//! `window` of them: $a_j = \sum_{i \in W} \sum_h p^h_{ij}$, $\tilde a_j = \max_{|l - j| \le \mathrm{pool}/2} a_l$ over
//! neighbours in the cache, and $S$ keeps its last `window` keys and the `keys` others with the greatest $\tilde a_j$
//! (ties to the earlier key).
//!
//! **Reference.** li2024. Departures: the paper compresses once, after the prompt, and lets the cache grow from there; here
//! it is compressed after every `interval` rows, so that it stays bounded, and the heads of a group share a cache.
//! Maximum pooling as in the paper's code.
//!
//! **Cost.** Per row $2 c (d + d_v)$ for a cache of at most $c = \mathrm{keys} + \mathrm{window} + \mathrm{interval}$ keys,
//! and $2 c\, d\, \mathrm{window}/\mathrm{interval}$ for votes, whatever the length; the state is $c (d + d_v + 1)$ numbers
//! per key head.
//!
//! **Guarantees.** Exact when `keys` covers all keys. Weights are non-negative and sum to one. The state does not grow with
//! the length. No bound on the error: an evicted key cannot be found again.
//!
//! **When to use.** When cache memory is the limit and the question is at the end of the prompt; as the
//! yardstick for methods that keep the cache and read little of it.

use crate::engine::{Eviction, exact_group};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Support, Tunable,
};
use crate::{Error, Mask, Problem, Real, Result};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "snap",
    family: Family::Clustering,
    title: "Cache compressed by an observation window (SnapKV)",
    reference: "li2024",
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
        &[("keys", "7"), ("window", "5"), ("interval", "6"), ("pool", "3")],
        &[("keys", "0"), ("window", "1"), ("interval", "1"), ("pool", "1")],
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
        Snap::new(self)
    }
}

crate::params! {
    /// Parameters of [`Snap`].
    pub struct Params {
        /// Number of keys kept by votes.
        keys: usize = 480, in 0..=1 << 30;
        /// Number of rows that vote, at most the interval, and of last keys that are kept.
        window: usize = 32, in 1..=1 << 20;
        /// Rows between two compressions.
        interval: usize = 64, in 1..=1 << 20;
        /// Neighbours over which votes are pooled; an odd number.
        pool: usize = 7, in 1..=1 << 20;
    }
}

/// The plan: the size of the cache.
#[derive(Clone, Debug)]
pub struct Snap {
    rule: Eviction,
}

impl Snap {
    /// Creates a plan with these parameters; an error if the window exceeds the interval or the pool has no middle.
    pub(crate) fn new(params: Params) -> Result<Self> {
        let Params { keys, window, interval, pool } = params;
        if window > interval {
            return Err(Error::param("window", window, format!("at most the interval, {interval}")));
        }
        if pool.is_multiple_of(2) {
            return Err(Error::param("pool", pool, "an odd number, with a key in the middle"));
        }
        Ok(Self { rule: Eviction { keys, recent: window, interval, observed: Some(window), pool } })
    }
}

impl GroupPlan for Snap {
    fn cost(&self, p: &Problem) -> Cost {
        let pairs = p.visible_pairs().min((p.batch * p.n_heads * p.n_q) as u64 * self.rule.most() as u64);
        let votes = pairs as f64 * self.rule.recent as f64 / self.rule.interval as f64;
        Cost {
            setup_flops: 2 * (votes * p.d as f64) as u64,
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
    use crate::Options;
    use crate::testkit::{Case, assert_rows_close, check_method, reference_masked, run_method};

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn the_window_votes_for_whole_neighbourhoods() {
        let (n, d) = (48, 4);
        let mut case = Case::gaussian(Problem::new(1, n, d).causal(), 1);
        case.q.chunks_exact_mut(d).for_each(|q| q[0] = 3.0);
        case.k.chunks_exact_mut(d).enumerate().for_each(|(j, k)| k[0] = if j == 9 { 9.0 } else { 0.0 });
        let options = Options::new().with("keys", 3).with("window", 4).with("interval", 16).with("pool", 3);
        let (o, _) = run_method(&METHOD, &options, &case);
        // After the first 16 rows, the cache holds key 9 with its neighbours and the last 4 keys.
        let sees = |i: usize, j: usize| i < 16 || (8..=10).contains(&j) || j >= 12;
        let (want, _) = reference_masked(&case, sees);
        assert_rows_close(&o[..32 * d], &want[..32 * d], 1e-12, "outputs");
    }

    #[test]
    fn impossible_windows_are_refused() {
        let p = Problem::new(1, 10, 4).causal();
        assert!(METHOD.plan(&p, &Options::new().with("window", 65)).is_err());
        assert!(METHOD.plan(&p, &Options::new().with("pool", 4)).is_err());
        assert!(METHOD.plan(&Problem::new(1, 10, 4), &Options::new()).is_err());
    }
}
