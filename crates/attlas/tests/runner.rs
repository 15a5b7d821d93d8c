//! Promises of the runner: an error leaves the output alone, a failing key head does not affect the others, planned
//! lengths are capacities, and padding does not change results.

use attlas::group::{Group, GroupPlan};
use attlas::method::{Accepted, Cost, Method, RunInfo, Spec};
use attlas::testkit::{Case, How, assert_rows_close, assert_same_bits, run_method, run_with};
use attlas::{
    Align, DType, Error, Options, Out, Problem, Qkv, Real, Result, TensorMut, TensorRef, Workspace, registry,
};

static METHOD: Method = Method { id: "fails", title: "Fails", reference: "none", ..Method::of::<Params>() };

attlas::params! {
    /// Parameters of a method that fails on its second key head, after it has written something.
    pub struct Params {}
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(Fails)
    }
}

#[derive(Debug)]
struct Fails;

impl GroupPlan for Fails {
    fn cost(&self, _: &Problem) -> Cost {
        Cost::default()
    }

    fn run<T: Real>(&self, group: Group<'_, T>) -> Result<RunInfo> {
        group.out.fill(T::ONE);
        group.lse.fill(T::ONE);
        if group.index.kv_head == 0 {
            return Ok(RunInfo::default());
        }
        Err(Error::Numerical { what: "a test", reason: "it fails".into() })
    }
}

#[test]
fn an_error_leaves_output_and_log_sum_exp_as_they_were() {
    let p = Problem::new(2, 5, 4);
    let case = Case::gaussian(p, 1);
    let view = |x| TensorRef::bhnd(x, [1, 2, 5, 4]).unwrap();
    let x = Qkv::new(view(&case.q), view(&case.k), view(&case.v)).into();
    let (mut o, mut lse) = ([7.0f64; 40], [7.0f64; 10]);
    let out = Out::with_lse(TensorMut::bhnd(&mut o, [1, 2, 5, 4]).unwrap(), &mut lse);
    let plan = METHOD.plan(&p, &Options::new()).unwrap();
    let result = plan.execute(&x, &mut out.into(), &mut Workspace::single().unwrap());
    assert!(matches!(result, Err(Error::Numerical { .. })), "{result:?}");
    assert!(o.iter().chain(&lse).all(|&x| x == 7.0));
}

#[test]
fn nan_in_one_key_head_leaves_the_others_their_answers() {
    for variant in ["aderf", "saderf"] {
        let case = Case::gaussian(Problem::new(3, 64, 8), 1);
        let options = Options::new().with("variant", variant).with("features", 64);
        let plan = registry::method("crt").unwrap().plan(&case.problem, &options).unwrap();
        let want = run_with(&*plan, &case, How::default()).unwrap();
        let mut bad = case.clone();
        bad.key_rows(1).nth(5).unwrap()[3] = f64::NAN;
        let ran = run_with(&*plan, &bad, How::default()).unwrap();
        let head = |o: &[f64], h: usize| o[h * 64 * 8..(h + 1) * 64 * 8].to_vec();
        for h in [0, 2] {
            assert_same_bits(&head(&ran.o, h), &head(&want.o, h), &format!("{variant}, head {h}"));
        }
        assert!(head(&ran.o, 1).iter().all(|x| x.is_nan()), "{variant}");
        assert!(ran.lse[64..128].iter().all(|x| x.is_nan()), "{variant}");
        assert_eq!(ran.info.figures.get("rows_without_answer"), Some(&64.0), "{variant}");
    }
}

#[test]
fn planned_lengths_are_capacities() {
    for id in ["exact", "sink_window", "linear"] {
        let method = registry::method(id).unwrap();
        let room = Problem::new(4, 100, 8).with_kv_heads(2).causal();
        let plan = method.plan(&room, &Options::new()).unwrap();
        for (n_q, n_k) in [(100, 100), (1, 57), (20, 83), (30, 7)] {
            let case = Case::gaussian(room.with_lens(n_q, n_k), 5);
            let (want, _) = run_method(method, &Options::new(), &case);
            let how = How { lse: method.claims.lse, ..How::default() };
            let ran = run_with(&*plan, &case, how).unwrap();
            assert_same_bits(&ran.o, &want, &format!("{id}: {n_q} queries, {n_k} keys"));
        }
        let long = Case::gaussian(room.with_lens(1, 101), 5);
        let refused = run_with(&*plan, &long, How { lse: false, ..How::default() });
        assert!(matches!(refused, Err(Error::Shape { .. })), "{id}");
    }
    // Lengths that the method refuses are refused by its plans, too.
    let case = Case::gaussian(Problem::new(1, 64, 8), 5);
    let plan = registry::method("csalr").unwrap().plan(&case.problem, &Options::new()).unwrap();
    let cross = Case::gaussian(case.problem.with_lens(10, 64), 5);
    let refused = run_with(&*plan, &cross, How { lse: false, ..How::default() });
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
}

#[test]
fn right_padded_prompts_are_the_prompts_without_padding() {
    for id in ["exact", "sink_window", "linear", "top_k"] {
        let method = registry::method(id).unwrap();
        let p = Problem { d_v: 6, ..Problem::new(4, 40, 8).with_kv_heads(2).with_batch(3).causal() };
        let mut case = Case::gaussian(p, 2);
        let lens = [40, 23, 0];
        // Padding is never read.
        for (b, h) in (0..3).flat_map(|b| (0..2).map(move |h| (b, h))) {
            let start = (b * 2 + h) * 40;
            case.k[(start + lens[b]) * 8..(start + 40) * 8].fill(f64::NAN);
            case.v[(start + lens[b]) * 6..(start + 40) * 6].fill(f64::NAN);
        }
        let (q, k) =
            (TensorRef::bhnd(&case.q, [3, 4, 40, 8]).unwrap(), TensorRef::bhnd(&case.k, [3, 2, 40, 8]));
        let v = TensorRef::bhnd(&case.v, [3, 2, 40, 6]).unwrap();
        let x = Qkv::new(q, k.unwrap(), v).padded(&lens, Align::Start);
        let (mut o, mut lse) = (vec![f64::NAN; 3 * 4 * 40 * 6], vec![f64::NAN; 3 * 4 * 40]);
        let tensor = TensorMut::bhnd(&mut o, [3, 4, 40, 6]).unwrap();
        let plan = method.plan(&p, &Options::new()).unwrap();
        let mut ws = Workspace::single().unwrap();
        let info = plan.execute(&x.into(), &mut Out::with_lse(tensor, &mut lse).into(), &mut ws).unwrap();
        assert_eq!(info.empty_rows, 4 * (17 + 40), "{id}");
        for b in 0..3 {
            let n = lens[b];
            let rows = |x: &[f64], heads: usize, width: usize| -> Vec<f64> {
                let head = |h: usize| x[(b * heads + h) * 40 * width..][..n * width].to_vec();
                (0..heads).flat_map(head).collect()
            };
            let alone = Case {
                problem: Problem { batch: 1, ..p.with_lens(n, n) },
                q: rows(&case.q, 4, 8),
                k: rows(&case.k, 2, 8),
                v: rows(&case.v, 2, 6),
                single: false,
            };
            let (want, want_lse) = run_method(method, &Options::new(), &alone);
            assert_rows_close(&rows(&o, 4, 6), &want, 1e-13, id);
            assert_rows_close(&rows(&lse, 4, 1), &want_lse, 1e-13, id);
            for h in 0..4 {
                let start = (b * 4 + h) * 40;
                assert!(o[(start + n) * 6..(start + 40) * 6].iter().all(|&x| x == 0.0), "{id}");
                assert!(lse[start + n..start + 40].iter().all(|&l| l == f64::NEG_INFINITY), "{id}");
            }
        }
    }
}

#[test]
fn padded_queries_at_the_end_stand_at_the_last_valid_key() {
    let p = Problem::new(1, 1, 4).with_lens(2, 10).causal();
    let case = Case::gaussian(p, 3);
    let view = |x, n| TensorRef::bhnd(x, [1, 1, n, 4]).unwrap();
    let x = Qkv::new(view(&case.q, 2), view(&case.k, 10), view(&case.v, 10)).padded(&[6], Align::End);
    let mut o = [f64::NAN; 8];
    let out = Out::new(TensorMut::bhnd(&mut o, [1, 1, 2, 4]).unwrap());
    let plan = registry::baseline().plan(&p, &Options::new()).unwrap();
    plan.execute(&x.into(), &mut out.into(), &mut Workspace::single().unwrap()).unwrap();
    let (want, _) = run_method(registry::baseline(), &Options::new(), &case.with_keys(6));
    assert_same_bits(&o, &want, "six of ten keys");
}

#[test]
fn scratch_is_counted_by_the_run_that_takes_it() {
    for id in ["exact", "linear", "top_k", "hyper"] {
        let p = Problem::new(4, 200, 16).with_kv_heads(2).causal();
        let plan = registry::method(id).unwrap().plan(&p, &Options::new()).unwrap();
        let mut ws = Workspace::single().unwrap();
        let counted = plan.workspace_bytes(DType::F32, &mut ws).unwrap();
        assert!(counted > 0, "{id}");
        assert_eq!(plan.workspace_bytes(DType::F32, &mut ws).unwrap(), counted, "{id}: again");
        assert!(plan.workspace_bytes(DType::F64, &mut ws).unwrap() > counted, "{id}: wider elements");
    }
    // Exact attention takes buffers by sizes alone: any data of this size takes the counted bytes, except for the rows
    // that the counting pass stages for its layout.
    let case = Case::gaussian(Problem::new(4, 200, 16).with_kv_heads(2).causal(), 5);
    let plan = registry::method("exact").unwrap().plan(&case.problem, &Options::new()).unwrap();
    let counted = plan.workspace_bytes(DType::F64, &mut Workspace::single().unwrap()).unwrap();
    let used = run_with(&*plan, &case, How { token_major: true, lse: false, ..How::default() }).unwrap();
    assert_eq!(used.peak_bytes, counted);
}
