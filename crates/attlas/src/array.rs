//! Arrays of the crate `ndarray`, with the feature `ndarray`.

use crate::{Attention, Element, Error, Result, TensorRef, attention};
use ndarray::{Array4, ArrayView4, Axis};

/// Computes exact softmax attention of arrays `[batch, heads, rows, width]` on all threads, with the factor $1/\sqrt d$
/// on inner products. Keys and values may have fewer heads than queries.
///
/// ```
/// use ndarray::Array4;
///
/// let (q, kv) = (Array4::<f32>::ones((1, 8, 100, 64)), Array4::<f32>::ones((1, 2, 100, 64)));
/// let o = attlas::attention_array(q.view(), kv.view(), kv.view(), true)?;
/// assert_eq!(o.dim(), (1, 8, 100, 64));
/// # Ok::<(), attlas::Error>(())
/// ```
///
/// An array in another memory order is copied once; a [`TensorRef`] made from its view is not.
pub fn attention_array<E: Element>(
    q: ArrayView4<'_, E>,
    k: ArrayView4<'_, E>,
    v: ArrayView4<'_, E>,
    causal: bool,
) -> Result<Array4<E>> {
    let (batch, n_heads, n_q, d) = q.dim();
    let (_, n_kv_heads, n_k, d_v) = v.dim();
    if k.dim() != (batch, n_kv_heads, n_k, d) || v.dim().0 != batch {
        return Err(Error::shape(
            "keys and values",
            format!("{batch} sequences, the same heads and rows, keys of width {d}"),
            format!("keys {:?} and values {:?}", k.shape(), v.shape()),
        ));
    }
    let shape = Attention { batch, n_kv_heads, d_v, causal, ..Attention::new(n_heads, d) };
    let [q, k, v] = [q, k, v].map(|x| x.iter().copied().collect::<Vec<E>>());
    let o = attention(&q, &k, &v, &shape)?;
    Array4::from_shape_vec((batch, n_heads, n_q, d_v), o)
        .map_err(|e| Error::shape("output", format!("[{batch}, {n_heads}, {n_q}, {d_v}]"), e))
}

/// Views an array `[batch, heads, rows, width]` without a copy, in any order of the first three axes. An error if the
/// elements of a row are not contiguous or the view skips elements.
impl<'a, T> TryFrom<ArrayView4<'a, T>> for TensorRef<'a, T> {
    type Error = Error;

    fn try_from(view: ArrayView4<'a, T>) -> Result<Self> {
        let refused = || {
            Error::shape(
                "array",
                "a contiguous one with rows along the last axis: call `as_standard_layout`",
                format!("shape {:?} with strides {:?}", view.shape(), view.strides()),
            )
        };
        let dims = [view.len_of(Axis(0)), view.len_of(Axis(1)), view.len_of(Axis(2)), view.len_of(Axis(3))];
        let mut order = [0, 1, 2, 3];
        order.sort_by_key(|&a| std::cmp::Reverse(view.strides()[a]));
        let strides = [0, 1, 2].map(|a| usize::try_from(view.strides()[a]));
        let [Ok(batch), Ok(head), Ok(row)] = strides else { return Err(refused()) };
        if dims[3] > 1 && view.strides()[3] != 1 {
            return Err(refused());
        }
        let data = view.permuted_axes(order).to_slice().ok_or_else(refused)?;
        TensorRef::new(data, dims, [batch, head, row])
    }
}
