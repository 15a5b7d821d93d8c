//! Attention along the fibres of a sequence that is folded into a grid.
//!
//! Token $t$ is at $(i_1, \dots, i_m)$, row-major, the last index fastest. A fibre of mode $i$ holds the
//! tokens that differ in index $i$ only; they lie a fixed stride apart, so a fibre of a head is a strided view and
//! nothing is copied.

use super::rows::{HeadRows, head_of};
use crate::workspace::Context;
use attlas_num::kernels::{Attend, Band, Precision};
use attlas_num::par::*;
use attlas_num::{MatRef, Real};

/// The new tokens of one fibre, and the number of its tokens so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fibre {
    /// Its first token.
    pub(crate) base: usize,
    /// Distance between neighbours.
    pub(crate) stride: usize,
    /// Tokens of it that exist.
    pub(crate) len: usize,
    /// Index of the first new one.
    pub(crate) first_new: usize,
}

/// Returns the fibres of `mode` that hold a token of `first..end`.
pub(crate) fn fibres(sizes: &[usize], mode: usize, first: usize, end: usize) -> Vec<Fibre> {
    let stride: usize = sizes[mode + 1..].iter().product();
    let block = stride * sizes[mode];
    let mut list = Vec::new();
    if first >= end || block == 0 {
        return list;
    }
    for outer in first / block..=(end - 1) / block {
        for inner in 0..stride {
            let base = outer * block + inner;
            let len = end.saturating_sub(base).div_ceil(stride).min(sizes[mode]);
            let first_new = first.saturating_sub(base).div_ceil(stride);
            if first_new < len {
                list.push(Fibre { base, stride, len, first_new });
            }
        }
    }
    list
}

/// Keys and values along the fibres of one mode.
pub(crate) struct Along<'a> {
    /// New queries, `[tokens, heads, d]`.
    pub(crate) q: &'a [f32],
    /// Query heads.
    pub(crate) heads: usize,
    /// Keys of all tokens, new ones included; one head for each group of query heads.
    pub(crate) k: &'a HeadRows,
    /// Values of all tokens, with the number of heads of the keys or of the queries.
    pub(crate) v: &'a HeadRows,
    /// Heads of `k` and of `v`.
    pub(crate) kv_heads: (usize, usize),
    /// First new token, and one past the last.
    pub(crate) tokens: std::ops::Range<usize>,
    pub(crate) causal: bool,
    pub(crate) scale: f32,
}

impl Along<'_> {
    /// Computes the attended values of the new tokens, contiguous rows for each query head, and the visited pairs.
    pub(crate) fn run(&self, sizes: &[usize], mode: usize, cx: Context<'_>) -> (Vec<Vec<f32>>, u64) {
        let list = fibres(sizes, mode, self.tokens.start, self.tokens.end);
        let (n, dv, first) = (self.tokens.len(), self.v.width(), self.tokens.start);
        let visited: u64 = list
            .iter()
            .map(|f| {
                let (rows, len) = ((f.len - f.first_new) as u64, f.len as u64);
                if self.causal { rows * len - rows * (rows - 1) / 2 } else { rows * len }
            })
            .sum();
        let parts = (0..self.heads)
            .into_par_iter()
            .map(|h| {
                let (hk, hv) =
                    (h * self.kv_heads.0 / self.heads.max(1), h * self.kv_heads.1 / self.heads.max(1));
                let mut out = vec![0.0; n * dv];
                let rows: Vec<Vec<f32>> =
                    list.par_iter().map(|f| self.fibre(f, h, (hk, hv), first, cx)).collect();
                for (f, rows) in list.iter().zip(rows) {
                    for (s, row) in rows.chunks_exact(dv.max(1)).enumerate() {
                        let t = f.base + (f.first_new + s) * f.stride - first;
                        out[t * dv..][..dv].copy_from_slice(row);
                    }
                }
                out
            })
            .collect();
        (parts, visited * self.heads as u64)
    }

    fn fibre(
        &self,
        f: &Fibre,
        h: usize,
        (hk, hv): (usize, usize),
        first: usize,
        cx: Context<'_>,
    ) -> Vec<f32> {
        let new = f.len - f.first_new;
        let d = self.k.width();
        let all = head_of(self.q, self.tokens.len(), self.heads, d, h);
        let q = every(all, f.base + f.first_new * f.stride - first, f.stride, new);
        let k = every(self.k.head(hk), f.base, f.stride, f.len);
        let v = every(self.v.head(hv), f.base, f.stride, f.len);
        let band = if self.causal { Band::causal(f.first_new as isize) } else { Band::ALL };
        attend(q, k, v, self.scale, None, band, cx).0
    }
}

/// Returns rows `first`, `first + step`, … of a view.
fn every(x: MatRef<'_, f32>, first: usize, step: usize, rows: usize) -> MatRef<'_, f32> {
    let data = &x.data()[(first * x.stride()).min(x.data().len())..];
    MatRef::with_stride(data, rows, x.cols(), x.stride() * step)
        .unwrap_or_else(|| unreachable!("a fibre lies inside its rows"))
}

/// Computes exact attention on the calling thread: outputs and log-sum-exps.
pub(crate) fn attend<T: Real>(
    q: MatRef<'_, T>,
    k: MatRef<'_, T>,
    v: MatRef<'_, T>,
    scale: T,
    bias: Option<&[T]>,
    band: Band,
    cx: Context<'_>,
) -> (Vec<T>, Vec<T>) {
    let mut out = vec![T::ZERO; q.rows() * v.cols()];
    let mut lse = vec![T::ZERO; q.rows()];
    let job = Attend {
        q,
        k,
        v,
        scale,
        bias,
        band,
        tile_k: cx.schedule.tile_k,
        isa: cx.schedule.isa,
        precision: Precision::Full,
        decode: false,
        softcap: None,
    };
    job.run(cx.scratch, &mut out, &mut lse);
    (out, lse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_new_token_lies_in_one_fibre_of_each_mode() {
        let sizes = [3, 4, 5];
        for (first, end) in [(0, 60), (0, 1), (17, 43), (59, 60), (7, 7), (20, 40)] {
            for mode in 0..3 {
                let mut seen = vec![0; 60];
                for f in fibres(&sizes, mode, first, end) {
                    for s in 0..f.len {
                        let t = f.base + s * f.stride;
                        assert!(t < end);
                        if s >= f.first_new {
                            seen[t] += 1;
                        } else {
                            assert!(t < first);
                        }
                    }
                }
                let want: Vec<i32> = (0..60).map(|t| i32::from(t >= first && t < end)).collect();
                assert_eq!(seen, want, "mode {mode}, tokens {first}..{end}");
            }
        }
    }
}
