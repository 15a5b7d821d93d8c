//! Inner loops of the hash families: distances, norms, and products of rows with directions.

use crate::kernels::{Isa, Op, gemm};
use crate::rng::Rng;
use crate::{Mat, MatRef, Real, Scratch};
use std::ops::Range;

/// Independent partial sums, so that the compiler can keep them in vector registers.
const LANES: usize = 8;

/// Elements of the tile that [`project_tiles`] fills before each round of calls.
const TILE_LEN: usize = 1 << 14;

/// Computes $|a - b|^2$ in f64, from the differences: no cancellation between large norms.
#[inline]
pub(crate) fn squared_distance<T: Real>(a: &[T], b: &[T]) -> f64 {
    debug_assert_eq!(a.len(), b.len());
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut acc = [0.0; LANES];
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for l in 0..LANES {
            let t = x[l].to_f64() - y[l].to_f64();
            acc[l] += t * t;
        }
    }
    let square = |(x, y): (&T, &T)| (x.to_f64() - y.to_f64()).powi(2);
    acc.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(square).sum::<f64>()
}

/// Computes $|a|^2$ in f64: squares of f32 values cannot overflow there.
#[inline]
pub(crate) fn squared_norm<T: Real>(a: &[T]) -> f64 {
    let (chunks, rest) = a.as_chunks::<LANES>();
    let mut acc = [0.0; LANES];
    for x in chunks {
        for l in 0..LANES {
            let t = x[l].to_f64();
            acc[l] += t * t;
        }
    }
    acc.iter().sum::<f64>() + rest.iter().map(|x| x.to_f64() * x.to_f64()).sum::<f64>()
}

/// Draws `count` standard normal rows of length `dim`.
pub(crate) fn directions<T: Real>(rng: &mut Rng, count: usize, dim: usize) -> Mat<T> {
    let mut w = Mat::zeros(count, dim);
    rng.fill_normal(w.data_mut());
    w
}

/// Computes $X W^\top$ in tiles of rows and calls `f(i, y)` with row `i` of the product, in order.
pub(crate) fn project_tiles<T: Real>(x: MatRef<'_, T>, w: MatRef<'_, T>, mut f: impl FnMut(usize, &[T])) {
    let width = w.rows();
    if width == 0 {
        (0..x.rows()).for_each(|i| f(i, &[]));
        return;
    }
    in_tiles(x, w, |rows, x, y, scratch| {
        // A row of the result depends only on its own row of `x` and on `w`, down to the bits.
        gemm(Isa::best(), T::ONE, Op::N(x), Op::T(w), T::ZERO, y, width, scratch);
        rows.zip(y.chunks_exact(width)).for_each(|(i, y)| f(i, y));
    });
}

/// Computes $W X^\top$ for few directions, which would fill only part of a register in [`project_tiles`]. Calls
/// `f(rows, y)` with a tile of rows; row `t` of `y` belongs to direction `t`.
pub(crate) fn project_columns<T: Real>(
    x: MatRef<'_, T>,
    w: MatRef<'_, T>,
    mut f: impl FnMut(Range<usize>, MatRef<'_, T>),
) {
    in_tiles(x, w, |rows, x, y, scratch| {
        gemm(Isa::best(), T::ONE, Op::N(w), Op::T(x), T::ZERO, y, rows.len(), scratch);
        let y = MatRef::new(y, w.rows(), rows.len());
        f(rows, y);
    });
}

/// Calls `f(rows, x, y, scratch)` for one tile of rows of `x` after another, with room in `y` for their products with
/// all rows of `w`.
fn in_tiles<T: Real>(
    x: MatRef<'_, T>,
    w: MatRef<'_, T>,
    mut f: impl FnMut(Range<usize>, MatRef<'_, T>, &mut [T], &Scratch),
) {
    assert_eq!(x.cols(), w.cols(), "rows of {} elements, directions of {}", x.cols(), w.cols());
    let tile_rows = (TILE_LEN / w.rows().max(1)).clamp(1, x.rows().max(1));
    let mut tile = vec![T::ZERO; tile_rows * w.rows()];
    let scratch = Scratch::new();
    for start in (0..x.rows()).step_by(tile_rows) {
        let rows = start..x.rows().min(start + tile_rows);
        let y = &mut tile[..rows.len() * w.rows()];
        f(rows.clone(), x.sub_rows(rows), y, &scratch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::tests::gaussian;
    use crate::linalg::dot;

    #[test]
    fn distances_and_norms_of_every_short_length_are_right() {
        for n in 0..40 {
            let m = gaussian::<f64>(n as u64, 2, n);
            let (a, b) = (m.row(0), m.row(1));
            let tol = 4.0 * n as f64 * f64::EPSILON;
            let naive = |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(b).map(|(&x, &y)| f(x, y)).sum::<f64>();
            let squares = naive(&|x, y| (x - y) * (x - y));
            assert!((squared_distance(a, b) - squares).abs() <= tol * squares);
            let norm = naive(&|x, _| x * x);
            assert!((squared_norm(a) - norm).abs() <= tol * norm);
        }
    }

    #[test]
    fn tiles_cover_every_row_once_and_in_order() {
        let (x, w) = (gaussian::<f64>(1, 700, 5), gaussian::<f64>(2, 40, 5));
        let mut next = 0;
        project_tiles(x.as_ref(), w.as_ref(), |i, y| {
            assert_eq!(i, next);
            next += 1;
            for (j, &y) in y.iter().enumerate() {
                let size = (squared_norm(x.row(i)) * squared_norm(w.row(j))).sqrt();
                assert!((y - dot(x.row(i), w.row(j))).abs() <= 10.0 * f64::EPSILON * size);
            }
        });
        assert_eq!(next, 700);
        project_tiles(gaussian::<f64>(1, 0, 5).as_ref(), w.as_ref(), |_, _| unreachable!());
    }

    #[test]
    fn columns_are_the_tiles_transposed() {
        for (rows, count) in [(700, 40), (20_000, 1), (5000, 7), (3, 5), (9, 0), (0, 4)] {
            let (x, w) = (gaussian::<f32>(1, rows, 19), gaussian::<f32>(2, count, 19));
            let mut by_columns = Mat::zeros(rows, count);
            project_columns(x.as_ref(), w.as_ref(), |at, y| {
                assert_eq!((y.rows(), y.cols()), (count, at.len()));
                for i in at.clone() {
                    (0..count).for_each(|t| by_columns[(i, t)] = y.at(t, i - at.start));
                }
            });
            project_tiles(x.as_ref(), w.as_ref(), |i, y| assert_eq!(by_columns.row(i), y));
        }
    }
}
