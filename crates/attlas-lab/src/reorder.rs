//! The survey's figure of block-diagonal reordering: a head's weights in token order, and with queries and keys sorted
//! by hash codes, as in clustering methods.
//!
//! Centred queries and keys are sorted by the Gray ranks of their sign codes, as in `hyper`; a method that computes
//! only the diagonal blocks keeps the weight inside them.

use crate::figures::{colour_bar, heat_image};
use crate::html::escape;
use crate::table::percent;
use crate::{Error, Result, Workload};
use attlas::diagnostics::HeatMap;
use attlas::{Mask, Mat, MatRef};
use attlas_model::recipe::Numbers;
use attlas_num::hash::SignHash;
use attlas_num::kernels::{matvec, softmax_in_place};
use attlas_num::rng::StreamKey;
use std::fmt::Write;

/// Most tokens of a head, because every pair is scored.
const MOST: usize = 8192;
/// Cells along a side of a picture.
const SIDE: usize = 128;
/// Bits of a code.
const BITS: usize = 10;

/// A head before and after sorting.
#[derive(Clone, Debug)]
pub struct Reordered {
    /// Layer, where the source has layers.
    pub layer: Option<usize>,
    /// Query head.
    pub head: usize,
    /// Weights in the order of the tokens.
    pub before: HeatMap,
    /// Weights with queries and keys sorted by their codes.
    pub after: HeatMap,
    /// Tokens of a block.
    pub block: usize,
    /// Share of all weight inside the blocks on the diagonal, before and after.
    pub inside: [f64; 2],
}

/// Sorts the queries and keys of the chosen heads.
pub fn reorder(
    workload: &Workload,
    heads: Option<&Numbers>,
    mask: Option<Mask>,
    block: usize,
    seed: u64,
) -> Result<Vec<Reordered>> {
    let mask = mask.unwrap_or(workload.mask);
    let mut found = Vec::new();
    for layer in &workload.layers {
        let p = &layer.problem;
        if p.n_q.max(p.n_k) > MOST {
            let tokens = format!("{} queries and {} keys", p.n_q, p.n_k);
            return Err(Error::argument("--reorder", format!("heads of at most {MOST} tokens"), tokens));
        }
        for head in (0..p.n_heads).filter(|&h| heads.is_none_or(|heads| heads.contains(h))) {
            let x = layer.group(head / p.group_size())?;
            let (q, k) = (x.q.head(0, head % p.group_size()), x.k.head(0, 0));
            let (before, after, inside) = sorted(q, k, p.scale as f32, mask, block, seed);
            found.push(Reordered { layer: layer.layer, head, before, after, block, inside });
        }
    }
    if found.is_empty() {
        return Err(Error::argument("heads", "at least one", "none"));
    }
    Ok(found)
}

/// Returns the position of every row in the order of codes; rows with the same code keep their order.
fn places(x: MatRef<'_, f32>, hash: &SignHash<f32>) -> Vec<usize> {
    let n = x.rows().max(1) as f32;
    let mean: Vec<f32> = (0..x.cols()).map(|c| (0..x.rows()).map(|i| x.at(i, c)).sum::<f32>() / n).collect();
    let centred = Mat::from_fn(x.rows(), x.cols(), |i, c| x.at(i, c) - mean[c]);
    let ranks = hash.gray_ranks(centred.as_ref(), 0);
    let mut order: Vec<usize> = (0..x.rows()).collect();
    order.sort_by_key(|&i| ranks[i]);
    let mut place = vec![0; x.rows()];
    order.iter().enumerate().for_each(|(at, &i)| place[i] = at);
    place
}

fn sorted(
    q: MatRef<'_, f32>,
    k: MatRef<'_, f32>,
    scale: f32,
    mask: Mask,
    block: usize,
    seed: u64,
) -> (HeatMap, HeatMap, [f64; 2]) {
    let (n_q, n_k) = (q.rows(), k.rows());
    let hash = SignHash::new(StreamKey::new(seed), k.cols(), BITS, 1)
        .unwrap_or_else(|| unreachable!("fewer bits than a code may have"));
    let (to_q, to_k) = (places(q, &hash), places(k, &hash));
    let (rows, cols) = (SIDE.min(n_q), SIDE.min(n_k));
    let blank = || HeatMap { rows, cols, data: vec![0.0; rows * cols] };
    let (mut before, mut after) = (blank(), blank());
    let mut inside = [0.0; 2];
    let mut weights = vec![0.0f32; n_k];
    // There are as many blocks of queries as of keys, even if the numbers of tokens differ.
    let blocks = n_k.div_ceil(block.max(1)).max(1);
    let same = |i: usize, j: usize| i * blocks / n_q.max(1) == j * blocks / n_k.max(1);
    for i in 0..n_q {
        let seen = mask.visible(n_q, n_k, i);
        let weights = &mut weights[..seen];
        matvec(k.sub_rows(0..seen), q.row(i), weights);
        weights.iter_mut().for_each(|w| *w *= scale);
        softmax_in_place(weights);
        for (j, &w) in weights.iter().enumerate() {
            let w = f64::from(w) / n_q as f64;
            let places = [(i, j), (to_q[i], to_k[j])];
            for ((map, inside), (i, j)) in [&mut before, &mut after].into_iter().zip(&mut inside).zip(places)
            {
                map.data[i * rows / n_q * cols + j * cols / n_k] += w;
                *inside += if same(i, j) { w } else { 0.0 };
            }
        }
    }
    (before, after, inside)
}

/// Draws the figure as SVG: a row per head, before and after, with axis titles and a colour bar.
pub fn svg(found: &[Reordered]) -> String {
    const PANEL: f64 = 220.0;
    const GAP: f64 = 46.0;
    let (left, top, row_height) = (60.0, 40.0, PANEL + 62.0);
    let mut body = String::new();
    for (r, h) in found.iter().enumerate() {
        let y = top + r as f64 * row_height;
        let name = h.layer.map_or(format!("head {}", h.head), |l| format!("layer {l}, head {}", h.head));
        let panels = [("in the order of the tokens", &h.before), ("sorted by hash codes", &h.after)];
        for (c, (what, map)) in panels.into_iter().enumerate() {
            let x = left + c as f64 * (PANEL + GAP);
            let share = percent(h.inside[c]);
            let (middle, bottom) = (x + PANEL / 2.0, y + PANEL + 14.0);
            let _ = write!(
                body,
                "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}: {what}</text>{}\
                 <rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{PANEL}\" height=\"{PANEL}\" fill=\"none\" stroke=\"#888\"/>\
                 <text x=\"{middle:.1}\" y=\"{bottom:.1}\" text-anchor=\"middle\">key</text>\
                 <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{share} of the weight in blocks of {}</text>\
                 <text transform=\"translate({:.1} {:.1}) rotate(-90)\" text-anchor=\"middle\">query</text>",
                y - 6.0,
                escape(&name),
                heat_image(map, x, y, PANEL, what),
                bottom + 14.0,
                h.block,
                x - 6.0,
                y + PANEL / 2.0,
            );
        }
    }
    let bar = left + 2.0 * (PANEL + GAP);
    body += &colour_bar(bar, top, PANEL, "weight / largest");
    let (width, height) = (bar + 90.0, top + found.len() as f64 * row_height);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\">\
         <style>text{{font:11px system-ui,sans-serif;fill:#222}}</style>\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>{body}</svg>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorting_gathers_the_weight_of_clusters_on_the_diagonal() {
        // Eight clusters in turn: neighbours in the sequence belong to different ones.
        let (n, d) = (256, 16);
        let mut rng = StreamKey::new(3).rng();
        let centres = Mat::from_fn(8, d, |_, _| 4.0 * rng.normal() as f32);
        let x = Mat::from_fn(n, d, |i, c| centres[(i % 8, c)] + 0.3 * rng.normal() as f32);
        let (before, after, inside) = sorted(x.as_ref(), x.as_ref(), 0.25, Mask::None, 32, 1);
        let total = |m: &HeatMap| m.data.iter().sum::<f64>();
        assert!((total(&before) - 1.0).abs() < 1e-4 && (total(&after) - 1.0).abs() < 1e-4);
        assert!((inside[0] - 0.125).abs() < 0.03, "{inside:?}");
        assert!(inside[1] > 0.5, "{inside:?}");
        let head = Reordered { layer: Some(1), head: 2, before, after, block: 32, inside };
        let picture = svg(&[head]);
        assert!(
            picture.contains("layer 1, head 2") && picture.contains(">query<") && picture.contains("1e-4")
        );
    }

    #[test]
    fn a_causal_head_with_fewer_queries_than_keys_is_sorted_too() {
        let x = Mat::from_fn(40, 4, |i, c| ((i * 7 + c) as f32).sin());
        let q = x.as_ref().sub_rows(0..25);
        let (before, after, inside) = sorted(q, x.as_ref(), 0.5, Mask::Causal, 8, 1);
        assert_eq!((before.rows, before.cols), (25, 40));
        let sum: f64 = after.data.iter().sum();
        assert!((sum - 1.0).abs() < 1e-4 && inside.iter().all(|s| (0.0..=1.0).contains(s)));
    }
}
