//! A list of keys that every query sees exactly, whatever the method does with the others.
//!
//! Without a mask the order of keys is free, so the listed keys move to the front and become the method's sinks. With a
//! causal mask the order of keys is their order in time, so the list must name the first keys.

use crate::group::Group;
use crate::params::Indices;
use crate::{Mask, Problem, Real, Result, RunInfo};

/// Keys that move to the front: the first `sinks` and those in `always`, of `n_k` keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstKeys(Vec<usize>);

impl FirstKeys {
    /// Collects these keys; `None` if `always` is empty and `sinks` suffices.
    pub fn new(sinks: usize, always: &Indices, n_k: usize) -> Option<Self> {
        if always.is_empty() {
            return None;
        }
        let mut keys: Vec<usize> = (0..sinks.min(n_k)).collect();
        keys.extend(always.iter().filter(|&j| j >= sinks && j < n_k));
        Some(Self(keys))
    }

    /// Returns their number.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    fn is_beginning(&self) -> bool {
        self.0.last().is_none_or(|&last| last + 1 == self.0.len())
    }

    /// Runs `inner` on the group with these keys moved to the front and the others behind them in their order.
    pub fn run<T: Real>(
        &self,
        group: &mut Group<'_, T>,
        inner: impl FnOnce(Group<'_, T>) -> Result<RunInfo>,
    ) -> Result<RunInfo> {
        if self.is_beginning() {
            return inner(group.reborrow());
        }
        let (n_k, d, d_v, cx) = (group.n_k(), group.k.cols(), group.v.cols(), group.cx);
        let mut others = vec![true; n_k];
        self.0.iter().for_each(|&j| others[j] = false);
        let order = || self.0.iter().copied().chain((0..n_k).filter(|&j| others[j]));
        let mut k = cx.scratch.take::<T>(n_k * d);
        let mut v = cx.scratch.take::<T>(n_k * d_v);
        group.k.gather_into(order(), &mut k);
        group.v.gather_into(order(), &mut v);
        let mut front = group.reborrow();
        front.k = crate::MatRef::new(&k, n_k, d);
        front.v = crate::MatRef::new(&v, n_k, d_v);
        inner(front)
    }
}

/// Reason for the refusals of [`always_leaks`].
pub const ALWAYS_LEAKS: &str =
    "with a causal mask, keys that every query sees must be the first ones; use sinks instead of always";

/// Returns true if a list names keys that a causal mask hides from some queries. The problem's number of keys does not
/// matter: a stream may grow past it.
pub fn always_leaks(p: &Problem, sinks: usize, always: &Indices) -> bool {
    let beginning = always.iter().filter(|&j| j >= sinks).zip(sinks..).all(|(j, next)| j == next);
    p.mask == Mask::Causal && !beginning
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::relative_frobenius;
    use crate::testkit::{Case, assert_rows_close, reference, reference_masked, run_method};
    use crate::{Options, registry};

    fn indices(text: &str) -> Indices {
        use crate::params::{ParamValue, Value};
        Indices::from_value(&Value::from(text)).unwrap()
    }

    /// Methods that take the list, with settings that leave most keys to chance.
    const METHODS: [(&str, &[(&str, &str)]); 7] = [
        ("hyper", &[("block", "8"), ("samples", "8"), ("n_min", "1")]),
        ("kdeformer", &[("block", "8"), ("samples", "8"), ("n_min", "1")]),
        ("prescored_hyper", &[("keys", "24"), ("block", "8"), ("n_min", "1")]),
        ("smyrf", &[("rounds", "1"), ("block", "8")]),
        ("reformer", &[("rounds", "1"), ("block", "8")]),
        ("routing", &[("clusters", "10"), ("window", "10")]),
        (
            "multipole",
            &[("budget", "8"), ("interval", "4"), ("window", "64"), ("far", "drop"), ("sinks", "0")],
        ),
    ];

    fn options(pairs: &[(&str, &str)]) -> Options {
        pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
    }

    #[test]
    fn named_keys_come_first_once() {
        let first = |sinks, text, n| FirstKeys::new(sinks, &indices(text), n).map(|f| f.0);
        assert_eq!(first(2, "none", 10), None);
        assert_eq!(first(2, "1+7-8", 10), Some(vec![0, 1, 7, 8]));
        assert_eq!(first(0, "9+3", 8), Some(vec![3]));
        assert!(FirstKeys::new(1, &indices("0-3"), 9).unwrap().is_beginning());
        assert!(!FirstKeys::new(1, &indices("2"), 9).unwrap().is_beginning());
    }

    #[test]
    fn heavy_keys_anywhere_are_seen_by_every_query() {
        // Two keys in the middle that hold nearly all mass.
        let mut case = Case::gaussian(crate::Problem::new(2, 150, 8).with_kv_heads(1), 3);
        case.q.chunks_exact_mut(8).for_each(|q| q[0] = 6.0);
        for j in [57, 101] {
            case.k[j * 8] = 6.0;
        }
        let (want, lse) = reference(&case);
        let (_, heavy) = reference_masked(&case, |_, j| j == 57 || j == 101);
        for (id, pairs) in METHODS {
            let method = registry::method(id).unwrap();
            let named = options(pairs).with("always", "57+101");
            let (o, found) = run_method(method, &named, &case);
            let error = relative_frobenius(&o, &want);
            assert!(error < 0.05, "{id}: error {error}");
            for i in 0..lse.len() {
                let mass = (found[i] - lse[i]).exp();
                assert!(mass >= (heavy[i] - lse[i]).exp() - 1e-12, "{id}: row {i} misses a named key");
            }
            // Without the list the method misses some of them.
            let (o, _) = run_method(method, &options(pairs), &case);
            assert!(relative_frobenius(&o, &want) > 2.0 * error, "{id} finds the keys by itself");
        }
    }

    #[test]
    fn a_causal_list_past_the_last_key_is_refused_by_every_method() {
        let p = crate::Problem::new(1, 16, 8).causal();
        for (id, pairs) in METHODS {
            let method = registry::method(id).unwrap();
            assert!(method.plan(&p, &options(pairs).with("always", "20")).is_err(), "{id}");
            assert!(method.plan(&p, &options(pairs).with("always", "0-20")).is_ok(), "{id}");
            let unmasked = crate::Problem { mask: Mask::None, ..p };
            assert!(method.plan(&unmasked, &options(pairs).with("always", "20")).is_ok(), "{id}");
        }
    }

    #[test]
    fn a_list_that_is_a_beginning_is_the_same_as_sinks() {
        for causal in [false, true] {
            let p = crate::Problem {
                mask: if causal { Mask::Causal } else { Mask::None },
                ..crate::Problem::new(1, 150, 8)
            };
            let case = Case::gaussian(p, 4);
            for (id, pairs) in METHODS {
                let method = registry::method(id).unwrap();
                let (a, _) = run_method(method, &options(pairs).with("always", "0-2"), &case);
                let (b, _) = run_method(method, &options(pairs).with("sinks", 3), &case);
                assert_rows_close(&a, &b, 0.0, id);
                let refused = method.plan(&p, &options(pairs).with("always", "2-3"));
                assert_eq!(refused.is_err(), causal, "{id}");
            }
        }
    }
}
