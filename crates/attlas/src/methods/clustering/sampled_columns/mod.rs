//! Sampled columns: a few scout rows choose the far keys of a block of rows; the other keys count as means of runs.
//!
//! **Idea.** Sinks and a window are exact. Most of the far mass of neighbouring rows lies on the same few keys, which
//! the exact scores of a few rows reveal. Rows are computed in blocks; scout rows no later than the block's first row
//! choose its keys, once for all query heads of a group. Copying heads attend to a different key in every row, always
//! at the same distance: a distance that several scouts favour adds the run of keys along its diagonal. Each aligned
//! run of the remaining keys is one pseudo key, so that no mass is lost.
//!
//! **Math.** A block begins at row $i_0$ (as a position among the keys); $E = \max(i_0 - w, 0)$ is the edge of its near
//! field and $F = [s, E)$ are its far keys, after $s$ sinks. For the scouts $R$ (the row $i_0$ and others spread over
//! the block before), $m_j = \sum_{r \in R} \sum_h p^h_{rj}$ with $p^h_r$ the exact softmax of row $r$ over all keys it
//! sees. $C$ holds the `keys` heaviest of $F$ (ties to the smaller index), or fewer that hold the share `mass` of
//! $\sum_F m_j$, and diagonals. At a distance $o$ scout $r$ votes with $a_r(o) = \sum_h p^h_{r, r - o}$, summed over
//! heads with $r - o$ far from $r$'s block and $p^h_{r, r - o} \ge 1/128$; over the scouts of the block and of the 7
//! before, the distance scores $\sum_r a_r(o) - \max_r a_r(o)$, so that a single key with weight in every scout, at a
//! different distance from each, scores nothing (with `scouts` = 1, $\sum_r a_r$). The `diagonals` distances with the
//! highest scores, and those within 2 of them, add the far keys among $i_0 - o, \dots, i_0 - o + B - 1$. For each
//! aligned run $A$ of `far_block` keys let $U = A \cap F \setminus C$ with means $\bar k, \bar v$. Row $i$ is the
//! softmax over the logits $\tau \langle q_i, k_j \rangle$ of sinks, $C$ and $[E, i]$ with values $v_j$, and
//! $\tau \langle q_i, \bar k \rangle + \ln |U|$ with values $\bar v$. With `chooser = mean_query`,
//! $m_j = e^{\tau \langle \bar q, k_j \rangle}$ for the mean $\bar q$ of the last `recent` queries of all heads.
//! Without a mask, scouts are spread over the block itself, and keys within the window on both sides are near.
//!
//! **Decoding.** Every `refresh` tokens, half the masses so far plus the token's exact weights over all keys become the
//! new masses, which choose the keys; the window begins at an aligned run, so that all runs in the far field are whole.
//! A token reads sinks, chosen keys, window and the means of runs; every `refresh`-th token also reads every key once.
//! A distance scores the weight that earlier tokens also had at this distance, or that is new to its key; its run lasts
//! until the next refresh.
//!
//! **Reference.** zhu2024 (SampleAttention: columns by sampled rows), jiang2024 (MInference: vertical and slash lines),
//! zhang2023 (H2O: masses of keys). Departures: scouts are strictly causal; the choice is shared by a group; runs of
//! unchosen keys keep their mass.
//!
//! **Cost.** Per row $2(s + w + B/2 + \mathrm{keys} + B\,\mathrm{diagonals} + n/(2\,\mathrm{far\_block}))(d + d_v)$, and
//! $2 (\mathrm{scouts}/B)(n/2)\,d$ for scores. Decoding reads $\mathrm{keys} + w + n/\mathrm{far\_block}$ keys and values and
//! $n/\mathrm{refresh}$ keys. Scratch: scouts times keys scores per thread.
//!
//! **Guarantees.** Exact when `keys` covers the far field. Weights are non-negative and sum to one. A row depends only
//! on queries up to the first row of its block and on keys up to itself. `error_estimate` of a run is the relative
//! error on `check_rows` rows of each head.
//!
//! **When to use.** Long prompts and long contexts of trained causal models, from a few thousand tokens on.

mod choose;
mod decode;
#[cfg(test)]
mod tests;

use crate::engine::{
    NearField, Operands, PackedKeys, RunMeans, Scored, add_sampled_error, attend_chosen_blocks,
    exact_group_with,
};
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, Promise, RunInfo, Spec, Status, Tunable, Withdrawn,
};
use crate::{Mask, Problem, Real, Result};
use attlas_num::par::*;
use choose::{Choice, Scouted};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "sampled_columns",
    family: Family::Clustering,
    title: "Sampled columns: far keys chosen by scout rows, means of the others",
    reference: "zhu2024, jiang2024, zhang2023",
    claims: Claims {
        decode: true,
        exact_at: &[("keys", Budget::NumKeys)],
        except: &[
            (Law::KeyOrder, "sinks, window and runs are taken by position"),
            (Law::HeadsAlone, "the heads of a group choose their keys together"),
            (Law::QueriesAlone, "keys are chosen by scout rows, once for a block of rows"),
            (
                Law::DecodeIsPrefill,
                "a decoded token chooses by tokens since the prompt, not by the rows before",
            ),
        ],
        withdrawn: &[Withdrawn {
            param: "mass",
            value: "< 1",
            promise: Promise::ExactAt,
            reason: "keys are left out once the chosen ones hold the share",
        }],
        ..Claims::BASE
    },
    probes: &[
        &[
            ("block", "16"),
            ("window", "16"),
            ("keys", "12"),
            ("far_block", "8"),
            ("sinks", "3"),
            ("refresh", "4"),
        ],
        &[
            ("block", "8"),
            ("window", "3"),
            ("keys", "9"),
            ("mass", "0.6"),
            ("diagonals", "2"),
            ("far", "split"),
            ("parts", "4"),
            ("far_block", "16"),
            ("scouts", "7"),
            ("far_share", "0.2"),
            ("refresh", "1"),
        ],
        &[
            ("chooser", "mean_query"),
            ("block", "10"),
            ("window", "0"),
            ("keys", "7"),
            ("far", "none"),
            ("sinks", "0"),
            ("recent", "5"),
            ("scouts", "1"),
        ],
        &[("block", "16"), ("window", "8"), ("keys", "0"), ("diagonals", "0"), ("check_rows", "0")],
    ],
    tunable: &[
        Tunable::budget("keys"),
        Tunable::values("precision", &["bf16"]),
        Tunable::values("block", &["128", "256"]),
    ],
    ..Method::of::<Params>()
};

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(SampledColumns::new(self))
    }
}

crate::choices! {
    /// Chooser of the far keys of a block of rows.
    pub enum Chooser {
        /// Rows whose exact weights are computed.
        Scouts = "scouts",
        /// The mean of the last queries.
        MeanQuery = "mean_query",
    }
}

crate::choices! {
    /// Treatment of far keys that are not chosen.
    pub enum Far {
        /// They are left out.
        None = "none",
        /// Each run is one pseudo key at its mean.
        Mean = "mean",
        /// Each run is a few pseudo keys at the means of its clusters.
        Split = "split",
    }
}

crate::params! {
    /// Parameters of [`SampledColumns`].
    pub struct Params {
        /// Number of far keys chosen for each block of rows.
        keys: usize = 192, in 0..=1 << 30;
        /// Share of the far keys chosen for each block of rows, if that is more than `keys`: keeps the error from
        /// growing with the length.
        far_share: f64 = 0.0, in 0.0..=1.0;
        /// Share of the far mass at which the choice of keys stops; 1 takes all `keys`.
        mass: f64 = 1.0, in 0.0..=1.0;
        /// Maximum number of distances whose runs of keys join the choice; only scouts can vote for them.
        diagonals: usize = 2, in 0..=1 << 20;
        /// Chooser of the far keys.
        chooser: Chooser = Chooser::Scouts;
        /// Scout rows per block.
        scouts: usize = 4, in 1..=1 << 20;
        /// Queries whose mean chooses keys, with chooser = mean_query.
        recent: usize = 256, in 1..=1 << 30;
        /// Rows that share a choice.
        block: usize = 64, in 1..=1 << 20;
        /// Keys at the start that every row sees exactly.
        sinks: usize = 4, in 0..=1 << 30;
        /// Keys before the first row of a block that its rows see exactly.
        window: usize = 64, in 0..=1 << 30;
        /// Treatment of far keys that are not chosen.
        far: Far = Far::Mean;
        /// Keys per run.
        far_block: usize = 64, in 1..=1 << 20;
        /// Clusters per run, with far = split.
        parts: usize = 2, in 2..=4;
        /// Decoded tokens between two renewals of the choice by exact weights.
        refresh: usize = 16, in 1..=1 << 30;
        /// Rows of each head on which the error of a run is measured; 0 for none.
        check_rows: usize = 8, in 0..=1 << 20;
        /// Precision of the operands: full, or bf16 with sums in single precision; scores and decoding are in full
        /// precision.
        precision: Operands = Operands::Full;
    }
}

impl Params {
    /// Returns the number of keys to choose among `far` ones, before the limit `far` itself.
    fn chosen_of(&self, far: usize) -> usize {
        self.keys.max((self.far_share * far as f64) as usize)
    }
}

/// The plan: sizes of blocks, near field and choice.
#[derive(Clone, Debug)]
pub struct SampledColumns {
    params: Params,
}

impl SampledColumns {
    /// Creates a plan with these parameters.
    pub(crate) fn new(params: Params) -> Self {
        Self { params }
    }

    /// Returns the number of pseudo keys per whole run; 0 without a far field.
    fn parts(&self) -> usize {
        match self.params.far {
            Far::None => 0,
            Far::Mean => 1,
            Far::Split => self.params.parts,
        }
    }

    fn field(&self) -> NearField {
        let Params { block, sinks, window, .. } = self.params;
        NearField { block, sinks, window }
    }

    /// True if every far key is chosen for every block.
    fn covers(&self, mask: Mask, n_q: usize, n_k: usize) -> bool {
        let most = self.field().most_far(mask, n_q, n_k);
        most == 0 || self.params.mass >= 1.0 && self.params.chosen_of(most) >= most
    }

    /// Returns the maximum number of keys and pseudo keys that a block attends to.
    fn gathered(&self, p: &Problem) -> usize {
        let Params { diagonals, block, far_block, .. } = self.params;
        let chosen = self.params.chosen_of(p.n_k).saturating_add(diagonals.saturating_mul(block));
        let exact = self.field().most_near().saturating_add(chosen).min(p.n_k);
        exact + (p.n_k / far_block + 4) * self.parts()
    }
}

impl GroupPlan for SampledColumns {
    fn cost(&self, p: &Problem) -> Cost {
        let Params { scouts, block, check_rows, .. } = self.params;
        let rows = (p.batch * p.n_heads * p.n_q) as f64;
        let pairs = p.visible_pairs() as f64;
        let gathered = (self.gathered(p) as f64 * rows).min(pairs);
        let scored = match self.params.chooser {
            Chooser::Scouts => pairs * (scouts as f64 / block as f64).min(1.0),
            Chooser::MeanQuery => pairs / (block * p.group_size()) as f64,
        };
        let checked = pairs * (check_rows as f64 / p.n_q.max(1) as f64).min(1.0);
        let width = (p.d + p.d_v) as f64;
        Cost {
            setup_flops: 2 * (scored * p.d as f64) as u64,
            run_flops: 2 * ((gathered + checked).max(1.0) * width) as u64,
            bytes: (4.0 * (2.0 * rows + gathered / block as f64) * width) as u64,
        }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let precision = self.params.precision.precision();
        if self.covers(g.mask, g.n_q(), g.n_k()) {
            return Ok(RunInfo { status: Status::Exact, ..exact_group_with(&mut g, precision)? });
        }
        let mut means = RunMeans::new(self.params.far_block, self.parts(), g.k.cols(), g.d_v());
        let means = (self.parts() > 0).then(|| {
            means.extend(g.k, g.v);
            &means
        });
        let packed = (self.params.chooser == Chooser::Scouts).then(|| PackedKeys::new(g.k, g.cx));
        let scored = Scored { q: g.q, k: g.k, packed: packed.as_ref(), scale: g.scale, cx: g.cx };
        let choice = Choice { params: &self.params, mask: g.mask, scored };
        let (field, mask, n_q, n_k) = (self.field(), g.mask, g.n_q(), g.n_k());
        let blocks = (0..n_q.div_ceil(field.block)).into_par_iter().with_max_len(1);
        let scouted: Vec<Scouted> =
            blocks.map(|b| choice.scout(&field.query_block(mask, b * field.block, n_q, n_k))).collect();
        let mut info = attend_chosen_blocks(&mut g, field, means, precision, |query_block| {
            let b = query_block.first / field.block;
            (choice.choose(query_block, &scouted[..=b]), scouted[b].visited)
        })?;
        add_sampled_error(&g, self.params.check_rows, &mut info);
        Ok(info)
    }

    fn stream<T: Real>(&self, p: &Problem, _: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        Some(Box::new(decode::ColumnStream::new(self.clone(), p)))
    }
}
