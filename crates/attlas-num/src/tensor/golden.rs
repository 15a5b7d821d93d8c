//! Answers of an independent implementation, made by `goldens/tensor/make.py`, and functions that read them.

use super::known::fill;
use super::{Tensor, khatri_rao, kronecker};
use crate::Mat;
use serde_json::Value;

/// Returns the stored answers under `key`.
pub(super) fn golden(key: &str) -> Value {
    // Read, not included: the published crate holds no goldens, and its tests must still compile.
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../goldens/tensor/tensorly.json");
    let text = std::fs::read_to_string(path).expect("the repository's goldens");
    let all: Value = serde_json::from_str(&text).unwrap();
    all[key].clone()
}

/// Reads the numbers of a list, to the last place but one: the parser does not always round correctly.
pub(super) fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

pub(super) fn sizes(v: &Value) -> Vec<usize> {
    v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect()
}

/// Returns a matrix of the deterministic fill.
pub(super) fn mat(rows: usize, cols: usize, seed: u64) -> Mat<f64> {
    Mat::from_vec(fill(&[rows, cols], seed).unwrap().into_vec(), rows, cols)
}

/// Asserts that two lists agree entry by entry to `tolerance`.
pub(super) fn assert_close(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!((x - y).abs() <= tolerance, "entry {i}: {x} against {y}");
    }
}

#[test]
fn products_agree_with_tensorly() {
    let answers = golden("products");
    let tolerance = 64.0 * f64::EPSILON;
    let t = fill(&[2, 3, 4], 70).unwrap();
    for mode in 0..3 {
        assert_close(t.unfold(mode).unwrap().data(), &floats(&answers["unfold"][mode]), f64::EPSILON);
    }
    let (a, b, c) = (mat(3, 2, 71), mat(2, 3, 72), mat(5, 4, 73));
    let product: Tensor<f64> = t.mode_products(&[(0, &a), (1, &b), (2, &c)]).unwrap();
    assert_close(product.data(), &floats(&answers["multi_mode_dot"]), tolerance);
    let (a, b) = (mat(2, 3, 75), mat(4, 3, 76));
    assert_close(khatri_rao(&a, &b).unwrap().data(), &floats(&answers["khatri_rao"]), f64::EPSILON);
    assert_close(kronecker(&a, &b).data(), &floats(&answers["kronecker"]), f64::EPSILON);
    let cp = super::cp::Cp {
        weights: vec![2.0, -0.5],
        factors: vec![mat(2, 2, 80), mat(3, 2, 81), mat(4, 2, 82)],
    };
    assert_close(cp.reconstruct().unwrap().data(), &floats(&answers["cp_to_tensor"]), tolerance);
    assert_close(
        cp.absorb_weights().reconstruct().unwrap().data(),
        &floats(&answers["cp_to_tensor"]),
        tolerance,
    );
}
