//! Tests of tensor product attention.

use super::super::common::fold::attend;
use super::super::common::third::tests::{assert_known, fill};
use super::super::grouped_query;
use super::super::testing::{
    assert_close, check_causal, forward, forward_all, random, random_layer, weights_from,
};
use super::factors::{BLOCK, CHUNK, Query, Side, Sizes, attend_factors, combine};
use super::*;
use crate::{Mat, Options, Out, Qkv, TensorMut, TensorRef, registry};
use attlas_num::kernels::Band;
use attlas_num::linalg::{matmul, matmul_nt};
use attlas_num::rope::{Angles, Layout, Rope, Scaling, Table};
use std::borrow::Cow;
use std::ops::Range;

const SHAPE: LayerShape = LayerShape { d_model: 20, n_heads: 6, n_kv_heads: 6, d: 8, d_v: 4 };

#[test]
fn keeps_what_every_causal_layer_keeps() {
    let none = Options::new();
    check_causal(&LAYER, &SHAPE, &none, 33);
    check_causal(&LAYER, &SHAPE, &none.clone().with("path", "factors"), 20);
    check_causal(&LAYER, &SHAPE, &none.clone().with("path", "materialised").with("head_act", "softmax"), 20);
    check_causal(&LAYER, &SHAPE, &none.clone().with("contextual", "b_only").with("rope", "interleaved"), 20);
    check_causal(&LAYER, &SHAPE, &none.clone().with("contextual", "a_only").with("head_act", "sigmoid"), 20);
    check_causal(&LAYER, &SHAPE, &none.clone().with("kv_only", true).with("rope_dim", 4), 20);
    check_causal(&LAYER, &LayerShape { d_v: 8, ..SHAPE }, &none.clone().with("share_b", true), 20);
    for path in ["factors", "materialised"] {
        let order = none.clone().with("order", 3).with("d_b", 2).with("path", path);
        check_causal(&LAYER, &SHAPE, &order, 20);
        check_causal(&LAYER, &SHAPE, &order.clone().with("kv_only", true), 20);
        check_causal(&LAYER, &SHAPE, &order.clone().with("contextual", "a_only"), 20);
    }
}

#[test]
fn factors_and_formed_heads_give_the_same_rows() {
    let x = random("x", 30, 20);
    let variants = [
        Options::new(),
        Options::new().with("rank_q", 1).with("rank_k", 3),
        Options::new().with("order", 3).with("d_b", 4).with("kv_only", true),
        Options::new().with("order", 3).with("d_b", 4),
        Options::new().with("contextual", "a_only"),
    ];
    for options in variants {
        let on = |path: &str| random_layer(&LAYER, &SHAPE, &options.clone().with("path", path));
        let formed = forward(&*on("materialised"), &x, &[30]);
        assert_close(&forward(&*on("factors"), &x, &[30]), &formed);
        assert_close(&forward(&*on("factors"), &x, &[1; 30]), &formed);
    }
}

#[test]
fn shared_feature_factors_equal_equal_weights() {
    let s = LayerShape { d_v: 8, ..SHAPE };
    let x = random("x", 25, 20);
    let shared = random_layer(&LAYER, &s, &Options::new().with("share_b", true));
    let specs = (LAYER.weights)(&s, &Options::new()).unwrap();
    let weights =
        specs.iter().map(|w| (w.name, random(if w.name == "b_v" { "b_k" } else { w.name }, w.n_out, w.n_in)));
    let full = LAYER.layer(&s, &Options::new(), weights_from(weights)).unwrap();
    assert_close(&forward(&*shared, &x, &[25]), &forward(&*full, &x, &[25]));
    assert_close(&forward(&*shared, &x, &[1; 25]), &forward(&*full, &x, &[25]));
    assert_eq!((shared.cache_elements(), full.cache_elements()), (2 * (6 + 8) + 2 * 6, 4 * (6 + 8)));
}

/// `rank × heads` fixed head factors as a weight.
fn fixed(rank: usize, heads: usize, f: impl Fn(usize, usize) -> f32) -> Mat<f32> {
    Mat::from_fn(rank * heads, 1, |i, _| f(i / heads, i % heads))
}

#[test]
fn multi_head_grouped_and_multi_query_attention_are_special_cases() {
    let x = random("x", 21, 20);
    for groups in [6, 2, 1] {
        let grouped_shape = LayerShape { n_kv_heads: groups, ..SHAPE };
        for rope in ["half", "interleaved"] {
            let options = Options::new().with("rope", rope);
            let plain = random_layer(&grouped_query::LAYER, &grouped_shape, &options);
            let one_hot = |r: usize, h: usize, n: usize| if h * n / 6 == r { n as f32 } else { 0.0 };
            let weights = weights_from([
                ("a_q", fixed(6, 6, |r, h| one_hot(r, h, 6))),
                ("b_q", random("q", 48, 20)),
                ("a_k", fixed(groups, 6, |r, h| one_hot(r, h, groups))),
                ("b_k", random("k", 8 * groups, 20)),
                ("a_v", fixed(groups, 6, |r, h| one_hot(r, h, groups))),
                ("b_v", random("v", 4 * groups, 20)),
                ("o", random("o", 20, 24)),
            ]);
            let options = options
                .with("contextual", "b_only")
                .with("rank_q", 6)
                .with("rank_k", groups)
                .with("rank_v", groups);
            let layer = LAYER.layer(&SHAPE, &options, weights).unwrap();
            let want = forward(&*plain, &x, &[21]);
            assert_close(&forward(&*layer, &x, &[21]), &want);
            assert_close(&forward(&*layer, &x, &[1; 21]), &want);
            assert_eq!(layer.cache_elements(), plain.cache_elements());
        }
    }
}

#[test]
fn latent_attention_with_its_rotated_part_is_a_special_case() {
    // Heads of 4 rotated and 4 plain features, latent width 5, the rotated key shared by all heads.
    let (h, latent) = (6, 5);
    let x = random("x", 19, 20);
    let (down, up, rotated) =
        (random("down", latent, 20), random("up", h * 4, latent), random("rotated", 4, 20));
    let w_q = random("q", h * 8, 20);
    let up_down = matmul(up.as_ref(), down.as_ref());
    let mut b_k = Mat::zeros((h + 1) * 8, 20);
    for i in 0..h {
        for e in 0..4 {
            b_k.row_mut(i * 8 + 4 + e).copy_from_slice(up_down.row(i * 4 + e));
        }
    }
    (0..4).for_each(|e| b_k.row_mut(h * 8 + e).copy_from_slice(rotated.row(e)));
    let r = (h + 1) as f32;
    let weights = weights_from([
        ("q", w_q.clone()),
        ("a_k", fixed(h + 1, h, |t, head| if t == head || t == h { r } else { 0.0 })),
        ("b_k", b_k),
        ("a_v", fixed(h, h, |t, head| if t == head { h as f32 } else { 0.0 })),
        ("b_v", up_down.clone()),
        ("o", random("o", 20, 24)),
    ]);
    let options = Options::new()
        .with("contextual", "b_only")
        .with("kv_only", true)
        .with("rank_k", h + 1)
        .with("rank_v", h)
        .with("rope_dim", 4);
    let layer = LAYER.layer(&SHAPE, &options, weights).unwrap();
    // Latent attention by its definition: c = down·x, keys [rope(rotated·x), up·c], values up·c.
    let ws = Workspace::single().unwrap();
    let table = Table::<f32>::new(
        &Rope { dim: 4, base: 1e4, layout: Layout::Half, scaling: Scaling::None },
        19,
        Angles::Single,
    );
    let c = matmul_nt(x.as_ref(), down.as_ref());
    let (uc, kr, mut q) = (
        matmul_nt(c.as_ref(), up.as_ref()),
        matmul_nt(x.as_ref(), rotated.as_ref()),
        matmul_nt(x.as_ref(), w_q.as_ref()),
    );
    table.rotate_tokens_in_place(0, q.data_mut(), h, 8);
    let mut heads = Mat::zeros(19, h * 4);
    for i in 0..h {
        let mut k = Mat::from_fn(19, 8, |n, e| if e < 4 { kr[(n, e)] } else { uc[(n, i * 4 + e - 4)] });
        table.rotate_tokens_in_place(0, k.data_mut(), 1, 8);
        let v = Mat::from_fn(19, 4, |n, e| uc[(n, i * 4 + e)]);
        let q = Mat::from_fn(19, 8, |n, e| q[(n, i * 8 + e)]);
        let o = attend(
            q.as_ref(),
            k.as_ref(),
            v.as_ref(),
            1.0 / 8f32.sqrt(),
            None,
            Band::causal(0),
            ws.context(),
        )
        .0;
        o.chunks_exact(4)
            .enumerate()
            .for_each(|(n, o)| heads.row_mut(n)[i * 4..i * 4 + 4].copy_from_slice(o));
    }
    let want = matmul_nt(heads.as_ref(), random("o", 20, 24).as_ref());
    assert_close(&forward(&*layer, &x, &[19]), want.data());
    // A statement about functions: the cache is that of all heads, not the latent one.
    assert_eq!(layer.cache_elements(), (h + 1) * 8 + h * 4);
}

#[test]
fn scaling_one_factor_up_and_the_other_down_changes_nothing() {
    let x = random("x", 15, 20);
    let specs = (LAYER.weights)(&SHAPE, &Options::new()).unwrap();
    let scaled = specs.iter().map(|w| {
        let c = if w.name.starts_with('a') {
            4.0
        } else if w.name.starts_with('b') {
            0.25
        } else {
            1.0
        };
        let m = random(w.name, w.n_out, w.n_in);
        (w.name, Mat::from_fn(w.n_out, w.n_in, |i, j| c * m[(i, j)]))
    });
    let other = LAYER.layer(&SHAPE, &Options::new(), weights_from(scaled)).unwrap();
    let layer = random_layer(&LAYER, &SHAPE, &Options::new());
    assert_close(&forward(&*other, &x, &[15]), &forward(&*layer, &x, &[15]));
}

#[test]
fn without_a_mask_the_last_row_is_the_causal_one() {
    let x = random("x", 15, 20);
    let layer = random_layer(&LAYER, &SHAPE, &Options::new());
    let (all, causal) = (forward_all(&*layer, &x), forward(&*layer, &x, &[15]));
    assert_close(&all[14 * 20..], &causal[14 * 20..]);
    assert!((all[0] - causal[0]).abs() > 1e-4);
}

#[test]
fn the_known_answer_in_double_precision() {
    let x = fill(5, 8, 10, 1.0);
    let (h, d, ranks) = (3, 4, [3, 2, 2]);
    let rope = Rope { dim: 4, base: 1e4, layout: Layout::Interleaved, scaling: Scaling::None };
    let table = Table::<f64>::new(&rope, 5, Angles::Double);
    let side = |n: usize, rotate: bool| {
        let a = matmul_nt(x.as_ref(), fill(ranks[n] * h, 8, 20 + n as u64, 1.0).as_ref());
        let mut b = matmul_nt(x.as_ref(), fill(ranks[n] * d, 8, 23 + n as u64, 1.0).as_ref());
        if rotate {
            table.rotate_tokens_in_place(0, b.data_mut(), ranks[n], d);
        }
        (a.into_vec(), b.into_vec())
    };
    let (q, k, v) = (side(0, true), side(1, true), side(2, false));
    let of = |(a, b): &(Vec<f64>, Vec<f64>), n: usize, t: Range<usize>| -> (Vec<f64>, Vec<f64>) {
        let (wa, wb) = (ranks[n] * h, ranks[n] * d);
        (a[t.start * wa..t.end * wa].to_vec(), b[t.start * wb..t.end * wb].to_vec())
    };
    let view = |x: &'static (Vec<f64>, Vec<f64>), n: usize| Side {
        rank: ranks[n],
        a: &x.0,
        a_fixed: false,
        b: Cow::Borrowed(&x.1[..]),
    };
    let leak = |x: (Vec<f64>, Vec<f64>)| -> &'static (Vec<f64>, Vec<f64>) { Box::leak(Box::new(x)) };
    let heads = |x: &(Vec<f64>, Vec<f64>), n: usize| combine(&view(leak(x.clone()), n), h, d);
    let (qh, kh, vh) = (heads(&q, 0), heads(&k, 1), heads(&v, 2));
    let problem = Problem::new(h, 5, d).causal();
    let dims = [1, h, 5, d];
    let mut o = vec![0.0; 5 * h * d];
    let plan = registry::method("exact").unwrap().plan(&problem, &Options::new()).unwrap();
    let tensor = |x| TensorRef::bnhd(x, dims).unwrap();
    let inputs = Qkv::new(tensor(&qh), tensor(&kh), tensor(&vh));
    let mut ws = Workspace::single().unwrap();
    let output = Out::new(TensorMut::bnhd(&mut o, dims).unwrap());
    plan.execute(&inputs.into(), &mut output.into(), &mut ws).unwrap();
    let out = matmul(MatRef::new(&o, 5, 12), fill(12, 8, 26, 1.0).as_ref());
    let first = [-0.250010619934, -0.705302304800, -0.863920937623, -1.142264101497];
    let last = [0.392826295170, 0.174333440257, -0.283631433681, -0.888242724666];
    assert_known(&out, &first, &last, -12.502438480972);
    // The same rows from the factors alone.
    let sizes = Sizes { heads: h, d, d_v: d, scale: 0.5 };
    for t in 0..5 {
        let (a, b) = of(&q, 0, t..t + 1);
        let load = |r: Range<usize>| (view(leak(of(&k, 1, r.clone())), 1), view(leak(of(&v, 2, r)), 2));
        let got =
            attend_factors(&sizes, &Query::Factors { a: &a, b: &b, rank: 3 }, t + 1, &load, ws.context());
        let want = &o[t * 12..(t + 1) * 12];
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-13), "{got:?} {want:?}");
    }
}

#[test]
fn queries_in_factors_score_as_formed_ones_do() {
    // Enough heads that scores go through the features that heads share.
    let (heads, d, d_v, n, rank) = (40, 8, 5, BLOCK + 7, 3);
    let numbers = |name: &str, n: usize| random(name, n, 1).cast::<f64>().into_vec();
    let (a_k, b_k) = (numbers("a_k", n * rank * heads), numbers("b_k", n * rank * d));
    let (a_v, b_v) = (numbers("a_v", n * rank * heads), numbers("b_v", n * rank * d_v));
    let (a, b) = (numbers("a", 2 * heads), numbers("b", 2 * d));
    let load = |t: Range<usize>| {
        let cut = |w: usize| t.start * rank * w..t.end * rank * w;
        let keys = Side { rank, a: &a_k[cut(heads)], a_fixed: false, b: Cow::Borrowed(&b_k[cut(d)]) };
        let values = Side { rank, a: &a_v[cut(heads)], a_fixed: false, b: Cow::Borrowed(&b_v[cut(d_v)]) };
        (keys, values)
    };
    let sizes = Sizes { heads, d, d_v, scale: 0.4 };
    let formed = combine(&Side { rank: 2, a: &a, a_fixed: true, b: Cow::Borrowed(&b) }, heads, d);
    let ws = Workspace::single().unwrap();
    let by = |query: Query<'_, f64>| attend_factors(&sizes, &query, n, &load, ws.context());
    let (one, other) =
        (by(Query::Factors { a: &a, b: &b, rank: 2 }), by(Query::Formed(Cow::Borrowed(&formed))));
    assert!(one.iter().zip(&other).all(|(a, b)| (a - b).abs() < 64.0 * f64::EPSILON));
    // The two are different sums.
    assert_ne!(one, other);
}

#[test]
fn long_caches_are_cut_and_merged() {
    let s = LayerShape { d_model: 6, n_heads: 3, n_kv_heads: 3, d: 4, d_v: 4 };
    let n = CHUNK + BLOCK + 5;
    let x = random("x", n, 6);
    let layer = random_layer(&LAYER, &s, &Options::new());
    let want = forward(&*layer, &x, &[n]);
    assert_close(&forward(&*layer, &x, &[n - 3, 1, 2]), &want);
}

#[test]
fn counts_are_those_of_the_page() {
    let s = LayerShape { d_model: 2048, n_heads: 32, n_kv_heads: 32, d: 128, d_v: 128 };
    let count = |options: Options| {
        let specs = (LAYER.weights)(&s, &options).unwrap();
        let parameters: usize = specs.iter().map(|w| w.n_out * w.n_in).sum();
        (parameters, (LAYER.cache_elements)(&s, &options).unwrap())
    };
    let ranks =
        |q: usize, k: usize, v: usize| Options::new().with("rank_q", q).with("rank_k", k).with("rank_v", v);
    let (d, h, dh) = (2048, 32, 128);
    assert_eq!(count(ranks(6, 1, 1)), (d * 8 * (h + dh) + d * h * dh, 320));
    assert_eq!(count(ranks(6, 2, 2)), (d * 10 * (h + dh) + d * h * dh, 640));
    assert_eq!((2 * h * dh) as f64 / 320.0, 25.6);
    assert_eq!(count(ranks(6, 2, 2).with("kv_only", true)), (d * 4 * (h + dh) + 2 * d * h * dh, 640));
    assert_eq!(count(ranks(6, 2, 2).with("contextual", "b_only")), (10 * (d * dh + h) + d * h * dh, 4 * dh));
    assert_eq!(count(ranks(6, 2, 2).with("contextual", "a_only")), (10 * (d * h + dh) + d * h * dh, 4 * h));
    let third = ranks(6, 2, 2).with("order", 3).with("d_b", 16);
    assert_eq!(count(third).1, 4 * (h + 16 + 8));
    // T6 medium: 47 heads of 64 at rank 2, against 16 heads of equal parameter count.
    let t6 = LayerShape { d_model: 1024, n_heads: 47, n_kv_heads: 47, d: 64, d_v: 64 };
    assert_eq!((LAYER.cache_elements)(&t6, &ranks(6, 2, 2)).unwrap(), 444);
}

#[test]
fn decoding_work_is_that_of_the_paper() {
    // Multiply-adds for each cached token at d 2048, 32 heads of 64, without the head factors' own.
    let s = LayerShape { d_model: 64, n_heads: 32, n_kv_heads: 32, d: 64, d_v: 64 };
    let work = |q: usize, k: usize, v: usize| {
        let layer =
            random_layer(&LAYER, &s, &Options::new().with("rank_q", q).with("rank_k", k).with("rank_v", v));
        let at = |m| layer.cost(Mask::Causal, m, 1).unwrap().run_flops;
        (at(1001) - at(1000)) / 2 - 32 * k as u64
    };
    assert_eq!([work(16, 1, 1), work(8, 1, 1), work(16, 2, 2)], [3584, 2816, 7168]);
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let refused = |shape: &LayerShape, options: Options| (LAYER.weights)(shape, &options).is_err();
    assert!(refused(&SHAPE, Options::new().with("share_b", true)));
    assert!(refused(&SHAPE, Options::new().with("order", 3)));
    assert!(refused(&SHAPE, Options::new().with("order", 3).with("d_b", 3)));
    assert!(refused(&SHAPE, Options::new().with("rope_dim", 10)));
    assert!(refused(&LayerShape { n_kv_heads: 3, ..SHAPE }, Options::new()));
}
