//! Text and typed parameters pass the same checks on the way to a plan, and streams refuse inputs that they cannot
//! read.

use attlas::methods::kernel::performer;
use attlas::methods::low_rank::nystromformer;
use attlas::testkit::{Case, How, assert_rows_close, run_method, run_with};
use attlas::{
    DType, Error, Options, Out, Plan, Problem, Qkv, Result, Spec, TensorMut, TensorRef, Workspace, registry,
};

/// Checks that typed parameters and the same options give the same refusal or the same plan.
fn both_ways(typed: Result<Box<dyn Plan>>, id: &str, options: &Options, case: &Case) {
    let by_name = registry::method(id).unwrap().plan(&case.problem, options);
    match (typed, by_name) {
        (Ok(a), Ok(b)) => {
            let how = How { lse: false, ..How::default() };
            assert_eq!(run_with(&*a, case, how).unwrap().o, run_with(&*b, case, how).unwrap().o, "{id}");
        }
        (Err(a), Err(b)) => assert_eq!(a, b, "{id}"),
        (a, b) => panic!("{id}: typed {:?}, by name {:?}", a.err(), b.err()),
    }
}

#[test]
fn typed_parameters_come_in_by_the_same_door_as_options() {
    let free = Case::gaussian(Problem::new(2, 96, 8), 1);
    let causal = free.with_problem(free.problem.causal());
    for case in [&free, &causal] {
        let landmarks = nystromformer::Params { landmarks: 16, ..Default::default() };
        let options = Options::new().with("landmarks", 16);
        both_ways(landmarks.plan(&case.problem), "nystromformer", &options, case);
        let eps = performer::Params { feature_eps: 1e-3, ..Default::default() };
        both_ways(eps.plan(&case.problem), "performer", &Options::new().with("feature_eps", 1e-3), case);
    }
}

#[test]
fn typed_parameters_are_refused_where_a_causal_row_would_see_later_tokens() {
    let causal = Problem::new(1, 256, 8).causal();
    let refused = [
        nystromformer::Params::default().plan(&causal),
        performer::Params { feature_eps: 0.01, ..Default::default() }.plan(&causal),
    ];
    for plan in refused {
        assert!(matches!(plan, Err(Error::Unsupported { .. })), "{plan:?}");
    }
    let out_of_range = nystromformer::Params { landmarks: 0, ..Default::default() };
    assert!(matches!(out_of_range.plan(&Problem::new(1, 8, 8)), Err(Error::InvalidParam { .. })));
}

#[test]
fn options_that_cannot_be_read_are_never_supported() {
    let p = Problem::new(2, 64, 8);
    for method in registry::METHODS {
        let unknown = Options::new().with("no_such_parameter", 1);
        assert!(!(method.supports)(&p, &unknown).is_yes(), "{}", method.id);
        let Some(seed) = method.params.iter().find(|s| s.name == "seed") else { continue };
        let negative = Options::new().with(seed.name, -1);
        let support = (method.supports)(&p, &negative);
        assert!(support.reasons[0].contains("seed = -1"), "{}: {:?}", method.id, support.reasons);
        assert!(matches!(method.plan(&p, &negative), Err(Error::InvalidParam { .. })), "{}", method.id);
    }
}

#[test]
fn several_tokens_at_once_are_the_rows_of_single_tokens() {
    let p = Problem { d_v: 6, ..Problem::new(4, 61, 8).with_kv_heads(2).causal() };
    let case = Case::gaussian(p, 3);
    let view = |x, h, c| TensorRef::bhnd(x, [1, h, 61, c]).unwrap();
    let (q, k, v) = (view(&case.q, 4, 8), view(&case.k, 2, 8), view(&case.v, 2, 6));
    let mut ws = Workspace::single().unwrap();
    for id in ["exact", "sink_window", "linear", "polynomial"] {
        let method = registry::method(id).unwrap();
        let plan = method.plan(&p, &Options::new()).unwrap();
        let (want, want_lse) = run_method(method, &Options::new(), &case);
        let mut stream = plan.stream(DType::F64).unwrap();
        let (mut o, mut lse) = (vec![f64::NAN; want.len()], vec![f64::NAN; want_lse.len()]);
        for rows in [0..20, 20..21, 21..21, 21..61] {
            let n = rows.len();
            let x = Qkv::new(q.rows(rows.clone()), k.rows(rows.clone()), v.rows(rows.clone()));
            let mut part = vec![f64::NAN; 4 * n];
            let mut whole = TensorMut::bhnd(&mut o, [1, 4, 61, 6]).unwrap();
            let rows_mut = whole.rows_mut(rows.clone());
            let out = if method.claims.lse { Out::with_lse(rows_mut, &mut part) } else { Out::new(rows_mut) };
            stream.extend(&x.into(), &mut out.into(), &mut ws).unwrap();
            for (h, i) in (0..4).flat_map(|h| rows.clone().map(move |i| (h, i))) {
                lse[h * 61 + i] = part[h * n + i - rows.start];
            }
        }
        assert_eq!(stream.len(), 61);
        assert_rows_close(&o, &want, 1e-12, id);
        if method.claims.lse {
            assert_rows_close(&lse, &want_lse, 1e-12, id);
        }
    }
}

#[test]
fn a_stream_refuses_the_other_element_type_and_other_shapes() {
    let p = Problem::new(2, 8, 4).causal();
    let plan = registry::baseline().plan(&p, &Options::new()).unwrap();
    let mut stream = plan.stream(DType::F32).unwrap();
    let mut ws = Workspace::single().unwrap();
    let (wide, narrow) = ([0.0f64; 8], [0.0f32; 8]);
    let f64s = TensorRef::bhnd(&wide, [1, 2, 1, 4]).unwrap();
    let f32s = TensorRef::bhnd(&narrow, [1, 2, 1, 4]).unwrap();
    assert!(stream.push(f64s.into(), f64s.into(), &mut ws).is_err());
    assert!(stream.push(f32s.into(), f64s.into(), &mut ws).is_err());
    assert!(stream.push(f32s.heads(0..1).into(), f32s.into(), &mut ws).is_err());
    assert!(stream.is_empty());
    stream.push(f32s.into(), f32s.into(), &mut ws).unwrap();
    let mut o = [f32::NAN; 8];
    let mut out = Out::new(TensorMut::bhnd(&mut o, [1, 2, 1, 4]).unwrap()).into();
    assert!(stream.attend(f64s.into(), &mut out, &mut ws).is_err());
    stream.attend(f32s.into(), &mut out, &mut ws).unwrap();
    assert_eq!((stream.len(), o), (1, [0.0; 8]));
}
