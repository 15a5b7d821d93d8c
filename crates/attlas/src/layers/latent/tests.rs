//! The layer against its definition, its forms against one another, and refusals.

use super::*;
use crate::layers::testing::{
    assert_close, check_causal, dense, forward, forward_all, random, random_layer, random_weights,
};
use crate::{Mat, Options};
use attlas_num::linalg::{matmul, matmul_nt, matmul_tn, thin_qr};
use attlas_num::rope::{Angles, Layout, Scaling, Table, Yarn};

/// Heads of 5 unrotated and 4 rotated features, values of 3.
const SHAPE: LayerShape = LayerShape { d_model: 22, n_heads: 3, n_kv_heads: 3, d: 9, d_v: 3 };

fn options() -> Options {
    Options::new().with("rank", 7usize).with("rope_dim", 4usize)
}

fn layer(options: &Options) -> Box<dyn Layer> {
    random_layer(&LAYER, &SHAPE, options)
}

#[test]
fn keeps_the_contract_of_layers() {
    check_causal(&LAYER, &SHAPE, &options(), 41);
    check_causal(&LAYER, &SHAPE, &options().with("rank_q", 6usize), 20);
    check_causal(&LAYER, &SHAPE, &options().with("form", "expanded").with("rope", "half"), 20);
    check_causal(&LAYER, &SHAPE, &options().with("form", "absorbed").with("rope_dim", 0usize), 20);
    check_causal(&LAYER, &SHAPE, &options().with("rope_dim", 8usize).with("rank", 1usize), 13);
    // No unrotated feature at all.
    check_causal(&LAYER, &LayerShape { d: 4, ..SHAPE }, &options(), 13);
}

#[test]
fn forms_and_merges_agree() {
    let x = random("x", 33, 22);
    for base in [options(), options().with("rank_q", 6usize), options().with("rope_dim", 0usize)] {
        let of = |form: &str, merge: &str| layer(&base.clone().with("form", form).with("merge", merge));
        let want = forward(&*of("expanded", "none"), &x, &[33]);
        let all = forward_all(&*of("expanded", "none"), &x);
        for merge in ["none", "qk", "vo", "both"] {
            let layer = of("absorbed", merge);
            assert_close(&forward(&*layer, &x, &[33]), &want);
            assert_close(&forward(&*layer, &x, &[1; 33]), &want);
            assert_close(&forward_all(&*layer, &x), &all);
        }
        assert_close(&forward(&*of("auto", "both"), &x, &[20, 1, 1, 1, 10]), &want);
    }
}

#[test]
fn biases_pass_through_the_merged_weights() {
    let x = random("x", 17, 22);
    let of = |merge: &str| {
        let options = options().with("form", "absorbed").with("merge", merge);
        let mut weights = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
        for (name, n_out, n_in) in [("q", 27, 22), ("kv_a", 11, 22), ("o", 22, 9)] {
            let bias = Some(random(&format!("{name} bias"), n_out, 1).into_vec());
            weights.insert(name.into(), Box::new(Dense { weight: random(name, n_out, n_in), bias }));
        }
        LAYER.layer(&SHAPE, &options, weights).unwrap()
    };
    let want = forward(&*of("none"), &x, &[17]);
    for merge in ["qk", "vo", "both"] {
        assert_close(&forward(&*of(merge), &x, &[17]), &want);
    }
    let mut weights = random_weights(&(LAYER.weights)(&SHAPE, &options()).unwrap());
    let kv_b = Dense { weight: random("kv_b", 24, 7), bias: Some(vec![1.0; 24]) };
    weights.insert("kv_b".into(), Box::new(kv_b));
    assert!(LAYER.layer(&SHAPE, &options(), weights).unwrap_err().to_string().contains("bias"));
}

/// The expanded form, in double precision and one number at a time.
fn naive(x: &Mat<f32>, rank_q: Option<usize>, rope: &Rope, scale: f64) -> Vec<f32> {
    let (n, r, dn, dr, dv, heads) = (x.rows(), 7, 5, 4, 3, 3);
    let map = |name: &str, x: &Mat<f64>, n_out: usize| {
        matmul_nt(x.as_ref(), random(name, n_out, x.cols()).cast::<f64>().as_ref())
    };
    let norm = |m: &mut Mat<f64>, name: &str, width: usize| {
        let weight = random(name, width, 1);
        for i in 0..m.rows() {
            let row = &mut m.row_mut(i)[..width];
            let rms = (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + 1e-6).sqrt();
            row.iter_mut().enumerate().for_each(|(j, x)| *x *= f64::from(weight[(j, 0)]) / rms);
        }
    };
    let x = x.cast::<f64>();
    let q = match rank_q {
        None => map("q", &x, heads * (dn + dr)),
        Some(rq) => {
            let mut latent = map("q_a", &x, rq);
            norm(&mut latent, "q_a_norm", rq);
            map("q_b", &latent, heads * (dn + dr))
        }
    };
    let mut c = map("kv_a", &x, r + dr);
    norm(&mut c, "kv_a_norm", r);
    let table = Table::<f64>::new(rope, n, Angles::Double);
    let latents = Mat::from_fn(n, r, |i, j| c[(i, j)]);
    let up = map("kv_b", &latents, heads * (dn + dv));
    let mut out = Mat::zeros(n, heads * dv);
    for h in 0..heads {
        let at = |i: usize, j: usize| up[(i, h * (dn + dv) + j)];
        for i in 0..n {
            let mut qr = q.row(i)[h * (dn + dr) + dn..][..dr].to_vec();
            table.rotate_in_place(i, &mut qr);
            let score = |j: usize| {
                let mut kr = c.row(j)[r..].to_vec();
                table.rotate_in_place(j, &mut kr);
                let own: f64 = (0..dn).map(|e| q[(i, h * (dn + dr) + e)] * at(j, e)).sum();
                let shared: f64 = qr.iter().zip(&kr).map(|(a, b)| a * b).sum();
                (scale * (own + shared)).exp()
            };
            let weights: Vec<f64> = (0..=i).map(score).collect();
            let total: f64 = weights.iter().sum();
            for e in 0..dv {
                out[(i, h * dv + e)] = (0..=i).map(|j| weights[j] * at(j, dn + e)).sum::<f64>() / total;
            }
        }
    }
    map("o", &out, 22).cast::<f32>().into_vec()
}

#[test]
fn equals_the_definition_with_norms_and_either_layout() {
    let x = random("x", 29, 22);
    for (name, layout) in [("interleaved", Layout::Interleaved), ("half", Layout::Half)] {
        let rope = Rope { dim: 4, base: 1e4, layout, scaling: Scaling::None };
        for rank_q in [None, Some(6usize)] {
            let want = naive(&x, rank_q, &rope, 1.0 / 3.0);
            let mut options = options().with("rope", name);
            if let Some(r) = rank_q {
                options = options.with("rank_q", r);
            }
            for form in ["expanded", "absorbed"] {
                assert_close(&forward(&*layer(&options.clone().with("form", form)), &x, &[29]), &want);
            }
        }
    }
}

#[test]
fn a_context_extension_changes_frequencies_and_scale() {
    let x = random("x", 29, 22);
    let mut yarn = Yarn::new(40.0, 16.0);
    (yarn.mscale, yarn.mscale_all_dim) = (Some(1.0), Some(1.0));
    let scale_factor = yarn.softmax_factor();
    assert!((scale_factor - 1.36889f64.powi(2)).abs() < 1e-5);
    let rope = Rope { dim: 4, base: 1e4, layout: Layout::Interleaved, scaling: Scaling::Yarn(yarn) };
    let params = Params { scale_factor, ..Params::from_options(&options()).unwrap() };
    let weights = || random_weights(&(LAYER.weights)(&SHAPE, &options()).unwrap());
    let layer = Latent::new(SHAPE, params.clone(), Some(rope.clone()), weights()).unwrap();
    assert_close(&forward(&layer, &x, &[20, 9]), &naive(&x, None, &rope, scale_factor / 3.0));
    let narrow = Rope { dim: 2, ..rope };
    assert!(Latent::new(SHAPE, params, Some(narrow), weights()).is_err());
}

#[test]
fn the_basis_of_the_latent_is_free_without_a_norm() {
    let x = random("x", 25, 22);
    let options = options();
    let weights = || {
        let mut w = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
        w.remove("kv_a_norm");
        w
    };
    let want = forward(&*LAYER.layer(&SHAPE, &options, weights()).unwrap(), &x, &[25]);
    let turn = thin_qr(random("turn", 7, 7).as_ref()).unwrap().q;
    let kv_a = random("kv_a", 11, 22).cast::<f64>();
    let turned = matmul_tn(turn.as_ref(), kv_a.as_ref().sub_rows(0..7));
    let kv_a = Mat::from_fn(11, 22, |i, j| if i < 7 { turned[(i, j)] } else { kv_a[(i, j)] });
    let kv_b = matmul(random("kv_b", 24, 7).cast::<f64>().as_ref(), turn.as_ref());
    let mut turned = weights();
    turned.insert("kv_a".into(), dense(kv_a.cast()));
    turned.insert("kv_b".into(), dense(kv_b.cast()));
    assert_close(&forward(&*LAYER.layer(&SHAPE, &options, turned).unwrap(), &x, &[25]), &want);
    // With a norm it is not.
    let mut normed = random_weights(&(LAYER.weights)(&SHAPE, &options).unwrap());
    let want = forward(&*layer(&options), &x, &[25]);
    normed.insert("kv_b".into(), dense(kv_b.cast()));
    let other = forward(&*LAYER.layer(&SHAPE, &options, normed).unwrap(), &x, &[25]);
    assert!(other.iter().zip(&want).any(|(a, b)| (a - b).abs() > 1e-3));
}

#[test]
fn the_cheaper_form_is_chosen() {
    // DeepSeek's widths: prompts are expanded, decoding is absorbed, the change is at 171 new tokens.
    let shape = LayerShape { d_model: 1, n_heads: 1, n_kv_heads: 1, d: 192, d_v: 128 };
    let rope = Rope { dim: 64, base: 1e4, layout: Layout::Interleaved, scaling: Scaling::None };
    let weights = random_weights(&(LAYER.weights)(&shape, &Options::new()).unwrap());
    let layer = Latent::new(shape, Params::default(), Some(rope), weights).unwrap();
    assert!(!layer.absorbs(1 << 20, 1 << 20) && !layer.absorbs(2, 2) && layer.absorbs(1, 4096));
    assert!(layer.absorbs(170, 1 << 24) && !layer.absorbs(171, 1 << 24));
    let one = layer.cost(Mask::Causal, 4095, 1).unwrap().run_flops;
    assert_eq!(one, 2 * (192 + 576 + 512 + 128 + 512 * 256 + 4096 * 1088));
}

#[test]
fn the_cache_holds_the_latent_and_the_shared_key() {
    let layer = layer(&options());
    let mut cache = layer.new_cache();
    let (x, mut out) = (random("x", 10, 22), vec![0.0; 220]);
    layer.forward(x.as_ref(), &mut *cache, &mut out, &mut Workspace::single().unwrap()).unwrap();
    assert_eq!((layer.cache_elements(), cache.bytes()), (11, 4 * 10 * 11));
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |shape: LayerShape, options: Options, word: &str| {
        let error = (LAYER.weights)(&shape, &options).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused(LayerShape { n_kv_heads: 1, ..SHAPE }, options(), "key heads");
    refused(SHAPE, options().with("rope_dim", 10usize), "rope_dim");
    refused(SHAPE, options().with("rank", 0usize), "rank");
    let odd = options().with("rope_dim", 3usize);
    let weights = random_weights(&(LAYER.weights)(&SHAPE, &odd).unwrap());
    assert!(LAYER.layer(&SHAPE, &odd, weights).is_err());
}
