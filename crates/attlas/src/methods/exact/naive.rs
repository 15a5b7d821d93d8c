//! Naive attention: two passes over all keys for each row, in double precision. The oracle.
//!
//! **Idea.** Compute every logit of a row, subtract the maximum, exponentiate, normalise, average.
//!
//! **Math.** With $s_{ij} = \beta\, q_i^\top k_j$, or $c \tanh(s_{ij} / c)$ of it under a softcap $c$, over the keys that row $i$ sees, $m_i = \max_j s_{ij}$ and
//! $Z_i = \sum_j e^{s_{ij} - m_i}$: $o_i = Z_i^{-1} \sum_j e^{s_{ij} - m_i} v_j$ and the log-sum-exp is
//! $m_i + \ln Z_i$.
//!
//! **Reference.** vaswani2017; survey, Section 2.
//!
//! **Cost.** $2 n_q n_k (d + d_v)$ operations in scalar double precision; one row of logits per thread.
//!
//! **Guarantees.** Rounding of double precision, whatever the element type.
//!
//! **When to use.** As the reference for every other method. Never for speed.

use crate::group::{Group, GroupPlan};
use crate::method::{Accepted, Claims, Cost, Family, Method, RunInfo, Spec};
use crate::{Problem, Real, Result, Spread};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "naive",
    family: Family::Exact,
    title: "Naive attention in double precision (oracle)",
    reference: "vaswani2017",
    claims: Claims { oracle: true, softcap: true, spread: Spread::RING, ..Claims::BASE },
    probes: &[],
    ..Method::of::<Params>()
};

crate::params! {
    /// Naive attention has no parameters.
    pub struct Params {}
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, accepted: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(Naive { softcap: accepted.problem.softcap })
    }
}

/// The plan: the cap alone.
#[derive(Debug)]
pub struct Naive {
    softcap: Option<f64>,
}

impl GroupPlan for Naive {
    const DOUBLE: bool = true;

    fn cost(&self, p: &Problem) -> Cost {
        let pairs = p.visible_pairs();
        let flops = 2 * pairs * (p.d + p.d_v) as u64;
        Cost { setup_flops: 0, run_flops: flops, bytes: 8 * pairs }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let (k, v, cx) = (g.k, g.v, g.cx);
        let scale = g.scale.to_f64();
        let visible: Vec<usize> = (0..g.n_q()).map(|i| g.visible(i)).collect();
        let visited = g.visible_pairs();
        let empty = g.par_row_blocks(32, |block| {
            let mut logits = cx.scratch.take::<f64>(k.rows());
            let mut sum = cx.scratch.take::<f64>(v.cols());
            let mut empty = 0;
            for (r, (out, lse)) in block.out.chunks_exact_mut(v.cols()).zip(block.lse.iter_mut()).enumerate()
            {
                let logits = &mut logits[..visible[block.first + r]];
                let q = block.q.row(r);
                let mut max = f64::NEG_INFINITY;
                for (j, s) in logits.iter_mut().enumerate() {
                    *s = scale * q.iter().zip(k.row(j)).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>();
                    *s = self.softcap.map_or(*s, |c| c * (*s / c).tanh());
                    max = max.max(*s);
                }
                sum.fill(0.0);
                if logits.is_empty() {
                    empty += 1;
                    out.fill(T::ZERO);
                    *lse = T::NEG_INFINITY;
                    continue;
                }
                let mut z = 0.0;
                for (j, s) in logits.iter().enumerate() {
                    let w = (s - max).exp();
                    z += w;
                    sum.iter_mut().zip(v.row(j)).for_each(|(a, x)| *a += w * x.to_f64());
                }
                out.iter_mut().zip(sum.iter()).for_each(|(o, a)| *o = T::from_f64(a / z));
                *lse = T::from_f64(max + z.ln());
            }
            Ok(empty)
        })?;
        Ok(RunInfo { keys_visited: visited, empty_rows: empty.into_iter().sum(), ..RunInfo::default() })
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn honours_the_contract() {
        crate::testkit::check_method(&super::METHOD);
    }
}
