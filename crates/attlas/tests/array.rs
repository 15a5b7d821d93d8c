//! Arrays of `ndarray` in and out.
#![cfg(feature = "ndarray")]

use attlas::testkit::{Case, assert_rows_close, reference};
use attlas::{Problem, TensorRef, attention_array};
use ndarray::{Array4, s};

#[test]
fn arrays_in_any_order_give_softmax_attention() {
    let p = Problem { d_v: 3, ..Problem::new(4, 9, 5).with_kv_heads(2).with_batch(2).causal() };
    let case = Case::gaussian(p, 1);
    let array = |x: &[f64], heads, width| Array4::from_shape_vec((2, heads, 9, width), x.to_vec()).unwrap();
    let (q, k, v) = (array(&case.q, 4, 5), array(&case.k, 2, 5), array(&case.v, 2, 3));
    let want = reference(&case).0;
    let o = attention_array(q.view(), k.view(), v.view(), true).unwrap();
    assert_rows_close(o.as_slice().unwrap(), &want, 1e-13, "arrays");
    // The same values with tokens before heads in memory.
    let mut turned = Array4::zeros((2, 9, 4, 5));
    turned.assign(&q.view().permuted_axes([0, 2, 1, 3]));
    let q = turned.view().permuted_axes([0, 2, 1, 3]);
    assert_eq!(attention_array(q, k.view(), v.view(), true).unwrap(), o);
    let tensor = TensorRef::try_from(q).unwrap();
    assert_eq!((tensor.dims(), tensor.strides()), ([2, 4, 9, 5], [180, 5, 20]));
    assert_eq!(tensor.head(1, 2).row(3), q.slice(s![1, 2, 3, ..]).as_slice().unwrap());
}

#[test]
fn arrays_that_do_not_fit_are_refused() {
    let x = Array4::<f32>::zeros((1, 2, 6, 4));
    assert!(attention_array(x.view(), x.slice(s![.., .., .., ..2]), x.view(), false).is_err());
    assert!(attention_array(x.view(), x.slice(s![.., .., ..3, ..]), x.view(), false).is_err());
    for view in [x.slice(s![.., .., ..;2, ..]), x.slice(s![.., .., .., ..;2]), x.slice(s![.., .., ..;-1, ..])]
    {
        assert!(TensorRef::try_from(view).unwrap_err().to_string().contains("as_standard_layout"));
    }
}
