//! The small fixed inputs and comparisons of the specification's table of golden values.

use super::Case;
use crate::Problem;

/// $Q_{ij} = \sin(0.7(i+1)(j+1) + 0.1i)$, $K_{ij} = \cos(0.5i(j+1) + 0.3j)$, 6 × 4, and
/// $V_{ij} = \sin(0.3i(j+1) + 0.4)$, 6 × 3, with scale ½.
pub fn inputs() -> Case {
    let fill = |cols: usize, f: fn(f64, f64) -> f64| {
        (0..6 * cols).map(|t| f((t / cols) as f64, (t % cols) as f64)).collect::<Vec<f64>>()
    };
    Case {
        problem: Problem { d_v: 3, scale: 0.5, ..Problem::new(1, 6, 4) },
        q: fill(4, |i, j| (0.7 * (i + 1.0) * (j + 1.0) + 0.1 * i).sin()),
        k: fill(4, |i, j| (0.5 * i * (j + 1.0) + 0.3 * j).cos()),
        v: fill(3, |i, j| (0.3 * i * (j + 1.0) + 0.4).sin()),
        single: false,
    }
}

/// Golden values are printed with ten decimals.
const TOLERANCE: f64 = 6e-11;

/// Asserts that row `i` of a three-column output has these values.
pub fn assert_row(o: &[f64], i: usize, want: &[f64]) {
    assert_close(&o[i * want.len()..(i + 1) * want.len()], want);
}

/// Asserts that the Frobenius norm of the output has this value.
pub fn assert_fro(o: &[f64], want: f64) {
    assert_close(&[o.iter().map(|x| x * x).sum::<f64>().sqrt()], &[want]);
}

/// Asserts that all values agree to the printed digits.
pub fn assert_close(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= TOLERANCE, "value {i}: found {g:.10}, expected {w:.10}");
    }
}
