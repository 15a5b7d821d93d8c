//! Products of weights that the absorbed form uses instead of their factors.

use super::{Latent, Merge, Queries};
use crate::Mat;
use crate::layer::Dense;
use crate::layers::common::{bias, matrix};
use attlas_num::linalg::{matmul, matmul_tn};

impl Latent {
    /// Multiplies out the products that `merge` selects, in double precision.
    pub(super) fn merge(&mut self) {
        let s = self.sizes;
        if matches!(self.params.merge, Merge::Qk | Merge::Both) {
            let last = match &self.q {
                Queries::Plain(q) => q,
                Queries::Latent { b, .. } => b,
            };
            let (w, added) = (matrix(&**last), bias(&**last));
            let n_in = w.cols();
            let mut rows = Vec::with_capacity(s.heads * s.row() * n_in);
            let mut biases = Vec::with_capacity(s.heads * s.row());
            for h in 0..s.heads {
                // The bias is appended as one more column.
                let head = Mat::from_fn(s.d(), n_in + 1, |i, j| {
                    f64::from(if j < n_in { w[(h * s.d() + i, j)] } else { added[h * s.d() + i] })
                });
                let up = self.up(h, 0..s.nope).cast::<f64>();
                let product = matmul_tn(up.as_ref(), head.as_ref().sub_rows(0..s.nope));
                for row in (0..s.rank).map(|i| product.row(i)).chain((s.nope..s.d()).map(|i| head.row(i))) {
                    rows.extend(row[..n_in].iter().map(|&x| x as f32));
                    biases.push(row[n_in] as f32);
                }
            }
            let bias = biases.iter().any(|&b| b != 0.0).then_some(biases);
            self.merged_qk = Some(Dense { weight: Mat::from_vec(rows, s.heads * s.row(), n_in), bias });
        }
        if matches!(self.params.merge, Merge::Vo | Merge::Both) {
            let (o, added) = (matrix(&*self.o).cast::<f64>(), bias(&*self.o));
            let mut weight = Mat::zeros(s.d_model, s.heads * s.rank);
            for h in 0..s.heads {
                let columns = Mat::from_fn(s.d_model, s.d_v, |i, j| o[(i, h * s.d_v + j)]);
                let up = self.up(h, s.nope..s.nope + s.d_v).cast::<f64>();
                let product = matmul(columns.as_ref(), up.as_ref());
                for i in 0..s.d_model {
                    let row = weight.row_mut(i)[h * s.rank..(h + 1) * s.rank].iter_mut();
                    row.zip(product.row(i)).for_each(|(w, &p)| *w = p as f32);
                }
            }
            let bias = added.iter().any(|&b| b != 0.0).then_some(added);
            self.merged_vo = Some(Dense { weight, bias });
        }
    }
}
