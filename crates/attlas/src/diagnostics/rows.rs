//! Figures of the rows of the weights, from blocks of rows that are dropped at once.

use super::{Head, Settings, norm};
use crate::workspace::Context;
use crate::{Mask, Workspace};
use attlas_num::Mat;
use attlas_num::kernels::{Op, exp_in_place, gemm};
use attlas_num::par::*;
use std::ops::Range;

/// Shares of the row maximum; weights below each are counted.
const THRESHOLDS: [f64; 3] = [1e-1, 1e-2, 1e-3];
/// Masses for which the least number of keys is determined.
const MASSES: [f64; 3] = [0.9, 0.95, 0.99];
/// Numbers of keys for which the mass is determined.
const TOP_KEYS: [usize; 6] = [1, 4, 16, 64, 256, 1024];
/// Number of parts of the rows for sums over columns; fixed, so that results do not depend on the number of threads.
const PARTS: usize = 32;
/// Rows whose logits are stored at a time.
const TILE_ROWS: usize = 16;
/// Buckets per unit of logit in the search for the largest weights of a row.
const BUCKETS_PER_UNIT: f64 = 8.0;
/// Number of buckets; weights below $e^{-64}$ of the largest share the last one.
const BUCKETS: usize = 512;

/// Distribution of the weights of a head.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct WeightProfile {
    /// Number of rows that see at least one key.
    pub rows: usize,
    /// Shares of the visible weights that are less than 1e-1, 1e-2 and 1e-3 of their row's largest.
    pub below: [(f64, f64); 3],
    /// Least number of keys whose weights reach 0.9, 0.95 and 0.99 of a row.
    pub keys_for_mass: [MassKeys; 3],
    /// Mass of the 1, 4, 16, 64, 256 and 1024 largest weights of a row.
    pub mass_of_top: [TopMass; 6],
    /// Entropies of the rows in nats.
    pub entropy: Summary,
    /// Mean weight of each key over the rows that see it; NaN (`null` in JSON) if none does.
    pub mean_weight: Vec<f64>,
    /// Keys that get far more than their share from most rows that see them, largest mean weight first.
    pub sinks: Vec<Sink>,
    /// $P_{ij} / \max_j P_{ij}$ of the first rows and keys.
    pub leading: HeatMap,
    /// Mass that the rows of one part of the sequence put on the keys of another; rows sum to one.
    pub map: HeatMap,
    /// Log-sum-exp of the rows.
    #[serde(skip)]
    pub lse: Vec<f64>,
    /// The largest logit.
    pub max_logit: f64,
    /// $\|A\|_F^2$ divided by $e^{2 \max S}$.
    pub(super) scores_energy: f64,
    /// $\|P\|_F^2$.
    pub(super) weights_energy: f64,
}

/// Number of keys that hold a mass, over the rows.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MassKeys {
    /// The mass.
    pub mass: f64,
    /// Number of keys that hold it.
    pub keys: Summary,
}

/// Mass of the largest weights, over the rows.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TopMass {
    /// Number of weights; a row that sees fewer keys has all its mass in them.
    pub keys: usize,
    /// Their sum.
    pub mass: Summary,
}

/// Mean and quantiles over rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Summary {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub median: f64,
    /// Nearest-rank 95 % quantile.
    pub p95: f64,
}

impl Summary {
    fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        values.sort_by(f64::total_cmp);
        let quantile = |p: f64| values[((p * values.len() as f64).ceil() as usize).max(1) - 1];
        Self { mean, median: quantile(0.5), p95: quantile(0.95) }
    }
}

/// A key that rows attend to whatever their query (gu2025).
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Sink {
    /// Its position.
    pub key: usize,
    /// Mean weight over the rows that see it.
    pub weight: f64,
    /// Norm of the key over the median norm of keys.
    pub key_norm: f64,
    /// Norm of its value over the median norm of values.
    pub value_norm: f64,
}

/// A small matrix for a plot.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct HeatMap {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Entries, row after row.
    pub data: Vec<f64>,
}

/// Computes sparsity, mass, entropy and sinks of the weights. Stores $O(n)$ numbers beside blocks of a few rows.
pub fn weight_profile(head: &Head, settings: &Settings, ws: &Workspace) -> WeightProfile {
    let (n_q, n_k) = (head.q.rows(), head.k.rows());
    let map = |n: usize| settings.cells.min(n);
    let (map_rows, map_cols) = (map(n_q), map(n_k));
    let leading = (settings.block.min(n_q), settings.block.min(n_k));
    let parts = ws.install(|cx| {
        (0..PARTS)
            .into_par_iter()
            .with_max_len(1)
            .map(|part| {
                let rows = part * n_q / PARTS..(part + 1) * n_q / PARTS;
                RowsProfile::new(head, rows, (map_rows, map_cols), leading, settings.sink, cx)
            })
            .collect::<Vec<RowsProfile>>()
    });

    let mut columns = vec![0.0; n_k];
    let mut heavy = vec![0usize; n_k];
    let mut map = vec![0.0; map_rows * map_cols];
    let mut block = vec![0.0; leading.0 * leading.1];
    let (mut below, mut visible) = ([0u64; 3], 0u64);
    let mut rows: Vec<RowFigures> = Vec::with_capacity(n_q);
    for part in parts {
        let add = |sum: &mut [f64], more: &[f64]| sum.iter_mut().zip(more).for_each(|(s, x)| *s += x);
        add(&mut columns, &part.columns);
        heavy.iter_mut().zip(&part.heavy).for_each(|(sum, n)| *sum += n);
        add(&mut map, &part.map);
        add(&mut block, &part.leading);
        below.iter_mut().zip(part.below).for_each(|(b, x)| *b += x);
        visible += part.visible;
        rows.extend(part.rows);
    }
    let seen: Vec<&RowFigures> = rows.iter().filter(|r| r.lse > f64::NEG_INFINITY).collect();
    let max_logit = seen.iter().map(|r| r.max).fold(f64::NEG_INFINITY, f64::max);
    let over_rows = |f: &dyn Fn(&RowFigures) -> f64| Summary::of(seen.iter().map(|r| f(r)).collect());
    for (a, row) in map.chunks_mut(map_cols.max(1)).enumerate() {
        // A cell's sum over the rows that see a key, divided by their number.
        let range = a * n_q / map_rows..(a + 1) * n_q / map_rows;
        let live = rows[range].iter().filter(|r| r.lse > f64::NEG_INFINITY).count();
        row.iter_mut().for_each(|x| *x /= live.max(1) as f64);
    }

    let observers: Vec<usize> = (0..n_k).map(|j| n_q - first_observer(head, j)).collect();
    let mean_weight: Vec<f64> = columns.iter().zip(&observers).map(|(c, &n)| c / n as f64).collect();
    let norms = |x: attlas_num::MatRef<'_, f64>| x.iter_rows().map(norm).collect::<Vec<f64>>();
    let (key_norms, value_norms) = (norms(head.k()), norms(head.v()));
    let (key_median, value_median) = (median(&key_norms), median(&value_norms));
    let mut sinks: Vec<Sink> = (0..n_k)
        .filter(|&j| observers[j] >= settings.min_rows.max(1) && 2 * heavy[j] >= observers[j])
        .map(|j| Sink {
            key: j,
            weight: mean_weight[j],
            key_norm: ratio(key_norms[j], key_median),
            value_norm: ratio(value_norms[j], value_median),
        })
        .collect();
    sinks.sort_by(|a, b| b.weight.total_cmp(&a.weight).then(a.key.cmp(&b.key)));

    WeightProfile {
        rows: seen.len(),
        below: [0, 1, 2].map(|t| (THRESHOLDS[t], below[t] as f64 / visible.max(1) as f64)),
        keys_for_mass: [0, 1, 2]
            .map(|m| MassKeys { mass: MASSES[m], keys: over_rows(&|r: &RowFigures| r.keys[m] as f64) }),
        mass_of_top: [0, 1, 2, 3, 4, 5]
            .map(|t| TopMass { keys: TOP_KEYS[t], mass: over_rows(&|r: &RowFigures| r.top[t]) }),
        entropy: over_rows(&|r: &RowFigures| r.entropy),
        mean_weight,
        sinks,
        leading: HeatMap { rows: leading.0, cols: leading.1, data: block },
        map: HeatMap { rows: map_rows, cols: map_cols, data: map },
        scores_energy: seen.iter().map(|r| r.squares * (2.0 * (r.max - max_logit)).exp()).sum(),
        weights_energy: seen.iter().map(|r| r.squares * (2.0 * (r.max - r.lse)).exp()).sum(),
        lse: rows.iter().map(|r| r.lse).collect(),
        max_logit,
    }
}

/// Returns the first row that sees key `j`, or the number of rows if none does.
fn first_observer(head: &Head, j: usize) -> usize {
    match head.mask {
        Mask::None => 0,
        Mask::Causal => usize::try_from(j as isize - head.offset()).unwrap_or(0).min(head.q.rows()),
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if a == b { 1.0 } else { a / b }
}

fn median(values: &[f64]) -> f64 {
    Summary::of(values.to_vec()).median
}

/// Figures of one row.
struct RowFigures {
    max: f64,
    lse: f64,
    /// $\sum_j e^{2(s_j - \max s)}$.
    squares: f64,
    entropy: f64,
    keys: [usize; 3],
    top: [f64; 6],
}

/// Figures of some consecutive rows.
struct RowsProfile {
    rows: Vec<RowFigures>,
    columns: Vec<f64>,
    /// For each key, the number of rows that give it far more than a uniform row would.
    heavy: Vec<usize>,
    map: Vec<f64>,
    leading: Vec<f64>,
    below: [u64; 3],
    visible: u64,
}

impl RowsProfile {
    fn new(
        head: &Head,
        rows: Range<usize>,
        (map_rows, map_cols): (usize, usize),
        leading: (usize, usize),
        sink: f64,
        cx: Context<'_>,
    ) -> Self {
        let (n_q, n_k) = (head.q.rows(), head.k.rows());
        let mut part = RowsProfile {
            rows: Vec::with_capacity(rows.len()),
            columns: vec![0.0; n_k],
            heavy: vec![0; n_k],
            map: vec![0.0; map_rows * map_cols],
            leading: vec![0.0; leading.0 * leading.1],
            below: [0; 3],
            visible: 0,
        };
        let mut logits = Mat::zeros(TILE_ROWS.min(rows.len()), n_k);
        let mut weights = vec![0.0; n_k];
        let mut order = Order::default();
        for first in rows.clone().step_by(TILE_ROWS) {
            let q = head.q().sub_rows(first..(first + TILE_ROWS).min(rows.end));
            gemm(
                cx.schedule.isa,
                head.scale,
                Op::N(q),
                Op::T(head.k()),
                0.0,
                &mut logits.data_mut()[..q.rows() * n_k],
                n_k,
                cx.scratch,
            );
            for i in first..first + q.rows() {
                let seen = head.band().range(i, n_k).end;
                let s = &logits.row(i - first)[..seen];
                let w = &mut weights[..seen];
                let figures = part.row(s, w, &mut order);
                if figures.lse > f64::NEG_INFINITY {
                    let place = map_row(i, n_q, map_rows) * map_cols;
                    let relative = (figures.max - figures.lse).exp();
                    // A weight is `relative * w`; a uniform one is `1 / seen`.
                    let threshold = sink / (seen as f64 * relative);
                    for (j, w) in w.iter().enumerate() {
                        part.columns[j] += relative * w;
                        part.heavy[j] += usize::from(*w > threshold);
                    }
                    for b in 0..map_cols {
                        let range = b * n_k / map_cols..((b + 1) * n_k / map_cols).min(seen);
                        if range.start < range.end {
                            part.map[place + b] += relative * w[range].iter().sum::<f64>();
                        }
                    }
                    if i < leading.0 {
                        let cols = leading.1.min(seen);
                        part.leading[i * leading.1..][..cols].copy_from_slice(&w[..cols]);
                    }
                }
                part.rows.push(figures);
            }
        }
        part
    }

    /// Computes the figures of a row with logits `s`; leaves $e^{s - \max s}$ in `w`.
    fn row(&mut self, s: &[f64], w: &mut [f64], order: &mut Order) -> RowFigures {
        let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            return RowFigures { max, lse: max, squares: 0.0, entropy: 0.0, keys: [0; 3], top: [0.0; 6] };
        }
        w.iter_mut().zip(s).for_each(|(w, s)| *w = s - max);
        exp_in_place(w);
        let sum: f64 = w.iter().sum();
        self.visible += s.len() as u64;
        for (t, threshold) in THRESHOLDS.iter().enumerate() {
            self.below[t] += w.iter().filter(|w| **w < *threshold).count() as u64;
        }
        order.fill(max, s, w);
        // H = ln Z − Σ p (s − max), with Z the sum relative to the largest.
        let spread: f64 = w.iter().zip(s).map(|(w, s)| w * (max - s)).sum();
        RowFigures {
            max,
            lse: max + sum.ln(),
            squares: w.iter().map(|w| w * w).sum(),
            entropy: sum.ln() + spread / sum,
            keys: MASSES.map(|mass| order.take(max, s, w, mass * sum, usize::MAX).keys),
            top: TOP_KEYS.map(|keys| (order.take(max, s, w, f64::INFINITY, keys).mass / sum).min(1.0)),
        }
    }
}

/// Returns the cell of the map that holds row `i`: the inverse of the ranges `a·n/cells..(a+1)·n/cells`.
fn map_row(i: usize, n: usize, cells: usize) -> usize {
    ((i + 1) * cells - 1) / n
}

/// Buffers for finding the largest weights of a row without sorting it.
#[derive(Default)]
struct Order {
    mass: Vec<f64>,
    count: Vec<usize>,
    crossing: Vec<f64>,
}

/// Some of the largest weights of a row.
struct Taken {
    keys: usize,
    mass: f64,
}

/// Returns the bucket of a logit.
fn bucket(max: f64, s: f64) -> usize {
    (((max - s) * BUCKETS_PER_UNIT) as usize).min(BUCKETS - 1)
}

impl Order {
    /// Counts the weights `w = e^{s − max}` of a row in buckets of nearly equal logits.
    fn fill(&mut self, max: f64, s: &[f64], w: &[f64]) {
        self.mass.clear();
        self.mass.resize(BUCKETS, 0.0);
        self.count.clear();
        self.count.resize(BUCKETS, 0);
        for (&s, &w) in s.iter().zip(w) {
            let b = bucket(max, s);
            self.mass[b] += w;
            self.count[b] += 1;
        }
    }

    /// Takes the largest weights of the current row until their sum reaches `mass` or their number `keys`: first whole
    /// buckets, then the sorted members of the last one.
    fn take(&mut self, max: f64, s: &[f64], w: &[f64], mass: f64, keys: usize) -> Taken {
        let mut taken = Taken { keys: 0, mass: 0.0 };
        let mut b = 0;
        while b + 1 < BUCKETS && taken.mass + self.mass[b] < mass && taken.keys + self.count[b] <= keys {
            taken.mass += self.mass[b];
            taken.keys += self.count[b];
            b += 1;
        }
        if taken.keys == keys {
            return taken;
        }
        self.crossing.clear();
        self.crossing.extend(s.iter().zip(w).filter(|(s, _)| bucket(max, **s) == b).map(|(_, w)| *w));
        self.crossing.sort_by(|a, b| b.total_cmp(a));
        for w in &self.crossing {
            if taken.mass >= mass || taken.keys == keys {
                break;
            }
            taken.mass += w;
            taken.keys += 1;
        }
        taken
    }
}
