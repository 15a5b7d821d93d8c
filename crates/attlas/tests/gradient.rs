//! Gradients compared with those of PyTorch, which `goldens/gradients/make.py` wrote.

use attlas::gradient::{Backward, Pass};
use attlas::layers::common::third::{Form, Pairwise};
use attlas::{Band, Mask, Options, Out, Problem, Qkv, TensorMut, TensorRef, Workspace, registry};
use attlas_num::{Mat, MatRef};

/// Computes the inputs of the script.
fn fill(s: usize, n: usize) -> Vec<f64> {
    let entry = |t: usize| (0.7 * (t as f64 + 1.0) + 1.3 * s as f64 + 0.05 * ((t % 11) as f64).powi(2)).sin();
    (0..n).map(entry).collect()
}

fn golden(case: &str) -> Vec<Vec<f64>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../goldens/gradients/torch.json");
    let text = std::fs::read_to_string(path).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    serde_json::from_value(json["cases"][case].clone()).unwrap()
}

fn assert_close(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= 1e-12 * (1.0 + w.abs()), "{what}: entry {i} is {g}, PyTorch has {w}");
    }
}

#[test]
fn exact_and_linear_attention_have_the_gradients_of_torch() {
    for (id, mask) in ["exact", "linear"].into_iter().flat_map(|id| [(id, Mask::None), (id, Mask::Causal)]) {
        let p =
            Problem { mask, d_v: 3, ..Problem::new(4, 5, 6) }.with_kv_heads(2).with_batch(2).with_lens(5, 7);
        let [q_dims, k_dims, v_dims] = [[2, 4, 5, 6], [2, 2, 7, 6], [2, 2, 7, 3]];
        let o_dims = [2, 4, 5, 3];
        let len = |dims: [usize; 4]| dims.iter().product::<usize>();
        let (q, k, v) = (fill(1, len(q_dims)), fill(2, len(k_dims)), fill(3, len(v_dims)));
        let view = |x, dims| TensorRef::bhnd(x, dims).unwrap();
        let x = Qkv::new(view(&q, q_dims), view(&k, k_dims), view(&v, v_dims));
        let plan = registry::method(id).unwrap().plan(&p, &Options::new()).unwrap();
        let mut ws = Workspace::single().unwrap();
        let (mut o, mut lse) = (vec![0.0; len(o_dims)], vec![0.0; 2 * 4 * 5]);
        let out = Out::with_lse(TensorMut::bhnd(&mut o, o_dims).unwrap(), &mut lse);
        plan.execute(&x.into(), &mut out.into(), &mut ws).unwrap();
        let (d_o, d_lse) = (fill(4, o.len()), fill(5, lse.len()));
        let [mut dq, mut dk, mut dv] = [q_dims, k_dims, v_dims].map(|dims| vec![f64::NAN; len(dims)]);
        let pass = Pass {
            x,
            o: view(&o, o_dims),
            lse: &lse,
            d_o: view(&d_o, o_dims),
            d_lse: Some(&d_lse),
            dq: TensorMut::bhnd(&mut dq, q_dims).unwrap(),
            dk: TensorMut::bhnd(&mut dk, k_dims).unwrap(),
            dv: TensorMut::bhnd(&mut dv, v_dims).unwrap(),
        };
        plan.backward(&mut Backward::from(pass), &mut ws).unwrap();
        let case = format!("{id}{}", if mask == Mask::Causal { "_causal" } else { "" });
        for (got, want) in [dq, dk, dv].iter().zip(&golden(&case)) {
            assert_close(got, want, &case);
        }
    }
}

#[test]
fn third_order_attention_has_the_gradients_of_torch() {
    let ws = Workspace::single().unwrap();
    for (case, band) in [("third_order", Band::ALL), ("third_order_causal", Band::causal(0))] {
        let x: Vec<Mat<f64>> = (1..=5)
            .map(|s| Mat::from_vec(fill(s, 6 * if s < 4 { 6 } else { 3 }), 6, if s < 4 { 6 } else { 3 }))
            .collect();
        let p = Pairwise {
            q: x[0].as_ref(),
            k1: x[1].as_ref(),
            k2: x[2].as_ref(),
            v1: x[3].as_ref(),
            v2: x[4].as_ref(),
            scale: 0.5,
            band1: band,
            band2: band,
            form: Form::Trilinear,
        };
        let (mut out, mut lse) = (vec![0.0; 18], vec![0.0; 6]);
        let g = fill(6, 18);
        let grads = ws.install(|cx| {
            p.run(&mut out, &mut lse, cx);
            p.backward(&out, &lse, MatRef::new(&g, 6, 3), cx)
        });
        let got = [&grads.q, &grads.k1, &grads.k2, &grads.v1, &grads.v2];
        for (got, want) in got.iter().zip(&golden(case)) {
            assert_close(got.data(), want, case);
        }
    }
}
