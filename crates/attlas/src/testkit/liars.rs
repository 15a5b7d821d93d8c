//! Methods that lie, each in one way, to test that the checks find every one of them.

use super::check_method;
use crate::engine::exact_group;
use crate::group::{Group, GroupPlan};
use crate::method::{Accepted, Budget, Claims, Cost, Family, Method, RunInfo, Spec};
use crate::{Mask, Problem, Real, Result};

/// Fault that a liar adds to exact attention.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    None,
    LooksAhead,
    LastValueIsNan,
    NotQuiteExact,
    ForgetsHeads,
    LeavesRowsUnwritten,
    SubtractsAConstant,
    DependsOnThreads,
    PanicsWithoutKeys,
    IgnoresItsSeed,
    SquaresValues,
    FeelsKeyOrder,
    FeelsOtherQueries,
    NanOnHugeLogits,
    WrongNormaliser,
    FeelsLaterQueries,
    NormaliserLooksAhead,
    FarPartFeelsLaterQueries,
}

#[derive(Debug)]
struct Liar(Lie);

impl GroupPlan for Liar {
    fn cost(&self, p: &Problem) -> Cost {
        Cost { run_flops: 1 + p.visible_pairs(), ..Cost::default() }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let (lie, n_k, d_v) = (self.0, g.n_k(), g.d_v());
        if lie == Lie::LooksAhead && g.mask == Mask::Causal && g.n_q() <= n_k {
            g.mask = Mask::None;
        }
        if lie == Lie::PanicsWithoutKeys {
            assert!(n_k > 0, "no keys");
        }
        let info = exact_group(&mut g)?;
        match lie {
            Lie::LastValueIsNan if n_k > 0 => {
                // Zero times the NaN of a value that no row sees is still NaN.
                let last = g.v.row(n_k - 1)[0];
                g.out.iter_mut().for_each(|o| *o += last * T::ZERO);
            }
            Lie::NotQuiteExact => g.out.iter_mut().for_each(|o| *o *= T::from_f64(1.0 + 1e-6)),
            Lie::ForgetsHeads if g.q.heads() > 1 => {
                let (first, rest) = g.out.split_at_mut(g.q.n_q() * d_v);
                rest.chunks_mut(first.len().max(1)).for_each(|h| h.copy_from_slice(first));
            }
            Lie::LeavesRowsUnwritten if g.n_q() > 64 => g.out[64 * d_v] = T::NAN,
            Lie::SubtractsAConstant if n_k > 64 => g.out.iter_mut().for_each(|o| *o -= T::from_f64(0.5)),
            Lie::DependsOnThreads if g.cx.schedule.threads > 1 => g.out.iter_mut().for_each(|o| *o = -*o),
            Lie::SquaresValues if n_k > 64 => g.out.iter_mut().for_each(|o| *o *= o.abs()),
            Lie::FeelsKeyOrder if n_k > 64 => {
                let first = g.k.row(0)[0];
                g.out.iter_mut().for_each(|o| *o *= T::ONE + first * T::from_f64(1e-3));
            }
            Lie::FeelsOtherQueries if g.n_q() > 64 => {
                let n_q = g.n_q();
                for (h, out) in g.out.chunks_mut(n_q * d_v).enumerate() {
                    let first = g.q.head(h).row(0)[0];
                    out.iter_mut().for_each(|o| *o *= T::ONE + first * T::from_f64(1e-9));
                }
            }
            Lie::NanOnHugeLogits => {
                let lse = g.lse.iter().zip(g.out.chunks_mut(d_v));
                lse.for_each(|(l, o)| {
                    o[0] = if l.is_finite() && l.abs() > T::from_f64(700.0) { T::NAN } else { o[0] }
                });
            }
            Lie::FeelsLaterQueries if g.mask == Mask::Causal && g.n_q() > 64 => feel_last_query(&mut g),
            // Honest on all keys, but not once a near field has removed some of them.
            Lie::FarPartFeelsLaterQueries if g.mask == Mask::Causal && (65..97).contains(&n_k) => {
                feel_last_query(&mut g)
            }
            Lie::NormaliserLooksAhead if g.mask == Mask::Causal && n_k > 64 => {
                let last = g.k.row(n_k - 1)[0];
                g.lse.iter_mut().for_each(|l| *l += last * T::from_f64(1e-6));
            }
            Lie::WrongNormaliser => g.lse.iter_mut().for_each(|l| *l += T::from_f64(0.1)),
            _ => {}
        }
        Ok(info)
    }
}

fn feel_last_query<T: Real>(g: &mut Group<'_, T>) {
    let (n_q, d_v) = (g.n_q(), g.d_v());
    if n_q == 0 {
        return;
    }
    for (h, out) in g.out.chunks_mut(n_q * d_v).enumerate() {
        let last = g.q.head(h).row(n_q - 1)[0];
        out.iter_mut().for_each(|o| *o *= T::ONE + last * T::from_f64(1e-6));
    }
}

macro_rules! liar {
    ($name:ident, $lie:ident, $expected:literal, $claims:expr, $probes:expr) => {
        #[test]
        #[should_panic(expected = $expected)]
        fn $name() {
            static LIAR: Method = Method {
                id: "liar",
                family: Family::Exact,
                title: "A liar",
                reference: "none",
                claims: $claims,
                probes: $probes,
                ..Method::of::<Params>()
            };
            crate::params! {
                /// Parameters that liars pretend to have.
                struct Params {
                    /// Budget.
                    samples: usize = 5, in 1..=1000;
                    /// Stream.
                    seed: u64 = 0, in 0..=u64::MAX;
                }
            }
            impl Spec for Params {
                const METHOD: &'static Method = &LIAR;

                fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
                    Ok(Liar(Lie::$lie))
                }
            }
            check_method(&LIAR);
            panic!("the checks believed it");
        }
    };
}

const EXACT_AT: Claims = Claims { exact_at: &[("samples", Budget::NumKeys)], ..Claims::BASE };
const RANDOM: Claims = Claims { deterministic: false, ..Claims::BASE };
const UNBIASED: Claims = Claims { unbiased: true, ..Claims::BASE };
const PROBES: &[&[(&str, &str)]] = &[&[("samples", "3")]];

liar!(an_honest_one_passes, None, "the checks believed it", EXACT_AT, PROBES);
liar!(looking_ahead_is_found, LooksAhead, "feels it", Claims::BASE, &[]);
liar!(hidden_nan_is_found, LastValueIsNan, "feels it", Claims::BASE, &[]);
liar!(almost_exact_is_not_exact, NotQuiteExact, "constant values", EXACT_AT, PROBES);
liar!(mixing_up_heads_is_found, ForgetsHeads, "head alone", Claims::BASE, &[]);
liar!(unwritten_rows_are_found, LeavesRowsUnwritten, "gives NaN", Claims::BASE, &[]);
liar!(weights_that_do_not_sum_to_one_are_found, SubtractsAConstant, "constant values", Claims::BASE, &[]);
liar!(thread_dependence_is_found, DependsOnThreads, "2 threads", Claims::BASE, &[]);
liar!(panics_are_found, PanicsWithoutKeys, "no keys", Claims::BASE, &[]);
liar!(false_randomness_is_found, IgnoresItsSeed, "the seed must matter", RANDOM, &[]);
liar!(
    nonlinear_values_are_found,
    SquaresValues,
    "values",
    Claims { row_stochastic: false, ..Claims::BASE },
    &[]
);
liar!(
    key_order_is_found,
    FeelsKeyOrder,
    "reverse order",
    Claims { row_stochastic: false, ..Claims::BASE },
    &[]
);
liar!(
    query_mixing_is_found,
    FeelsOtherQueries,
    "other queries",
    Claims { row_stochastic: false, ..Claims::BASE },
    &[]
);
liar!(overflow_is_found, NanOnHugeLogits, "1e4", Claims::BASE, &[]);
liar!(a_biased_normaliser_is_found, WrongNormaliser, "mean ratio", UNBIASED, PROBES);
liar!(a_wrong_exact_limit_is_found, WrongNormaliser, "exact at samples", EXACT_AT, PROBES);

const MIXES_QUERIES: Claims = Claims {
    row_stochastic: false,
    except: &[
        (crate::method::Law::QueriesAlone, "the liar admits it"),
        (crate::method::Law::LinearInValues, "the liar admits it"),
        (crate::method::Law::KeyOrder, "the liar admits it"),
    ],
    ..Claims::BASE
};
liar!(feeling_later_queries_is_found, FeelsLaterQueries, "feels it", MIXES_QUERIES, &[]);
liar!(a_leak_through_the_normaliser_is_found, NormaliserLooksAhead, "log-sum-exp", MIXES_QUERIES, &[]);
liar!(a_leak_of_the_far_part_is_found, FarPartFeelsLaterQueries, "near.window", MIXES_QUERIES, &[]);
