//! Primitives: argument checks, grid arithmetic, launches. One file each, beside its kernel source of the same name.

pub(crate) mod attend;
pub(crate) mod decode;
pub(crate) mod exponential;
pub(crate) mod features;
pub(crate) mod hash;
pub(crate) mod linear;
pub(crate) mod lists;
pub(crate) mod pool;
pub(crate) mod positive;
pub(crate) mod ranked;
pub(crate) mod rows;
pub(crate) mod signed;
pub(crate) mod sort;

use crate::driver::{Arg, Sizes, View};
use crate::{DeviceRef, Element};
use attlas::Problem;

/// Returns `x` in the type of sums.
pub(crate) fn number(element: Element, x: f64) -> Arg<'static> {
    if element == Element::F64 { Arg::Double(x) } else { Arg::Float(x as f32) }
}

/// Returns the sizes of a problem as a kernel argument.
pub(crate) fn sizes(p: &Problem) -> Sizes {
    Sizes {
        heads: p.n_heads as i32,
        group: p.group_size() as i32,
        nq: p.n_q as i32,
        nk: p.n_k as i32,
        d: p.d as i32,
        dv: p.d_v as i32,
    }
}

/// Returns true if rows of 16-bit elements can be read 16 bytes at a time.
pub(crate) fn aligned(tensors: &[&DeviceRef<'_>]) -> bool {
    tensors.iter().all(|t| view_aligned(&t.view()))
}

pub(crate) fn view_aligned(view: &View) -> bool {
    view.address.is_multiple_of(16) && view.strides.iter().all(|s| s % 8 == 0)
}

/// Views a contiguous `[batch, heads, rows, columns]` tensor at an address.
pub(crate) fn contiguous(address: u64, heads: usize, rows: usize, columns: usize) -> View {
    View { address, strides: [(heads * rows * columns) as i64, (rows * columns) as i64, columns as i64] }
}
