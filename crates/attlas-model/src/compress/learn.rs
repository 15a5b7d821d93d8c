//! Second moments of the inputs of every matrix of a model, from calibration text.

use super::matrices::Matrices;
use crate::Encoder;
use crate::bert::{Batch, Input};
use crate::decoder::{CHUNK, Decoder, Observer, Rows};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::recipe::Recipe;
use crate::weights::Weights;
use attlas::conversions::common::moments::Moments;
use attlas::conversions::common::network::{Network, Role, Slot};
use attlas::{Mat, MatRef, Options, Workspace, registry};
use attlas_num::linalg::matmul_tn;
use attlas_num::par::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Second moments of the inputs of a model's matrices on a text, and, if measured, the sensitivity of its predictions
/// to errors of their outputs.
#[derive(Clone, Debug, Default)]
pub struct Learnt {
    moments: BTreeMap<(usize, Input), Arc<Moments>>,
    /// Nats per token for each unit of relative squared error of the outputs, by matrix.
    pub sensitivity: BTreeMap<Slot, f64>,
    /// Tokens that were read.
    pub tokens: usize,
}

/// Returns the input of a matrix.
fn input(role: Role) -> Input {
    match role {
        Role::Query | Role::Key | Role::Value => Input::Attention,
        Role::Output => Input::Heads,
        Role::Gate | Role::Up => Input::Ffn,
        Role::Down => Input::Inner,
    }
}

impl Learnt {
    /// Returns the moments of a matrix's inputs.
    pub fn moments(&self, slot: Slot) -> Option<&Arc<Moments>> {
        self.moments.get(&(slot.layer, input(slot.role)))
    }

    /// Reads `tokens` in separate windows of `window` and collects moments of the inputs of the matrices with these
    /// layers and roles, all by default. An encoder reads `texts` instead. `progress` receives tokens or texts done,
    /// and their total.
    pub fn read(
        model: &Arc<Model>,
        text: Calibration<'_>,
        layers: Option<&[usize]>,
        roles: Option<&[Role]>,
        threads: &Workspace,
        progress: &mut dyn FnMut(usize, usize),
        stop: &AtomicBool,
    ) -> Result<Self> {
        let c = &model.config;
        let all: Vec<usize> = (0..c.n_layers).collect();
        let roles = roles.unwrap_or(&Role::ALL);
        let matrices = Matrices::new(model)?;
        let slots = layers
            .unwrap_or(&all)
            .iter()
            .flat_map(|&layer| roles.iter().map(move |&role| Slot { layer, role }));
        let mut collector = Collector { sums: BTreeMap::new(), stop };
        for slot in slots {
            if let Some((_, width)) = matrices.size(slot) {
                collector.sums.entry((slot.layer, input(slot.role))).or_insert_with(|| Sums::new(width));
            }
        }
        let tokens = match (text, &model.weights) {
            (Calibration::Tokens { tokens, window }, Weights::Decoder(_)) => {
                let window = window.clamp(1, c.max_positions.min(CHUNK));
                let mut decoder = Decoder::on(model.clone(), &Recipe::default(), threads)?;
                let mut hidden = Vec::new();
                for (i, part) in tokens.chunks(window).enumerate() {
                    decoder.reset();
                    // The last layer runs to its end only if its rows are used.
                    decoder.forward_observed(part, Rows::Last, &mut hidden, &mut collector)?;
                    progress((i * window + part.len()).min(tokens.len()), tokens.len());
                }
                tokens.len()
            }
            (Calibration::Texts(texts), Weights::Encoder(_)) => {
                let encoder = Encoder::new(model)?;
                let mut ws = threads.sibling();
                for (i, text) in texts.iter().enumerate() {
                    if stop.load(Ordering::Relaxed) {
                        return Err(Error::Interrupted);
                    }
                    // One by one: no padding arises.
                    let batch = Batch::new(&[text])?;
                    let plans = encoder.plans(&batch, registry::baseline(), &Options::new())?;
                    let add = |l: usize, i: Input, x: &[f32]| threads.install(|_| collector.add(l, i, x));
                    encoder.forward_seen(&batch, &plans, &mut ws, |_, _| (), add)?;
                    progress(i + 1, texts.len());
                }
                texts.iter().map(Vec::len).sum()
            }
            (Calibration::Tokens { .. }, _) => {
                return Err(Error::Unsupported { what: "calibrating an encoder on running text".into() });
            }
            (Calibration::Texts(_), _) => {
                return Err(Error::Unsupported { what: "calibrating a decoder on texts to embed".into() });
            }
        };
        let finished = collector.sums.into_iter().map(|(place, sum)| Ok((place, Arc::new(sum.finish()?))));
        Ok(Self { moments: finished.collect::<Result<_>>()?, sensitivity: BTreeMap::new(), tokens })
    }
}

/// Calibration text of a model.
#[derive(Clone, Copy, Debug)]
pub enum Calibration<'a> {
    /// Running text for a decoder.
    Tokens {
        /// Its tokens.
        tokens: &'a [u32],
        /// Tokens that are read as one text.
        window: usize,
    },
    /// Texts for an encoder.
    Texts(&'a [Vec<u32>]),
}

/// Sums over the rows that were seen.
struct Sums {
    gram: Mat<f64>,
    sum: Vec<f64>,
    rows: usize,
}

/// Columns of a Gram matrix that are computed together.
const BAND: usize = 256;

impl Sums {
    fn new(width: usize) -> Self {
        Self { gram: Mat::zeros(width, width), sum: vec![0.0; width], rows: 0 }
    }

    /// Adds rows of the width. Products of a few hundred rows are summed in single precision, and these sums in double.
    fn add(&mut self, x: &[f32]) {
        let width = self.sum.len();
        if width == 0 {
            return;
        }
        for part in x.chunks(CHUNK * width) {
            let rows = part.len() / width;
            // The lower triangle, band by band of its rows.
            self.gram.data_mut().par_chunks_mut(BAND * width).enumerate().for_each(|(i, band)| {
                let (first, height) = (i * BAND, band.len() / width);
                let columns = |from: usize, n: usize| MatRef::with_stride(&part[from..], rows, n, width);
                let (Some(mine), Some(left)) = (columns(first, height), columns(0, first + height)) else {
                    unreachable!("bands lie within rows")
                };
                let product = matmul_tn(mine, left);
                for (sum, new) in
                    band.chunks_exact_mut(width).zip(product.data().chunks_exact(product.cols()))
                {
                    sum.iter_mut().zip(new).for_each(|(s, x)| *s += f64::from(*x));
                }
            });
            for row in part.chunks_exact(width) {
                self.sum.iter_mut().zip(row).for_each(|(s, x)| *s += f64::from(*x));
            }
            self.rows += rows;
        }
    }

    fn finish(self) -> Result<Moments> {
        let Self { gram, sum, rows } = self;
        let n = rows.max(1) as f64;
        let whole =
            Mat::from_fn(
                sum.len(),
                sum.len(),
                |i, j| {
                    if j <= i { gram[(i, j)] / n } else { gram[(j, i)] / n }
                },
            );
        Ok(Moments::new(whole, sum.iter().map(|s| s / n).collect())?)
    }
}

/// Collects moments of the selected matrices' inputs.
struct Collector<'a> {
    sums: BTreeMap<(usize, Input), Sums>,
    stop: &'a AtomicBool,
}

impl Collector<'_> {
    fn add(&mut self, layer: usize, input: Input, x: &[f32]) {
        if let Some(sums) = self.sums.get_mut(&(layer, input)) {
            sums.add(x);
        }
    }
}

impl Observer for Collector<'_> {
    fn interrupted(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn entering(&mut self, layer: usize, _: usize, x: &[f32]) {
        self.add(layer, Input::Attention, x);
    }

    fn attended(&mut self, layer: usize, _: usize, o: &[f32]) {
        self.add(layer, Input::Heads, o);
    }

    fn entering_ffn(&mut self, layer: usize, _: usize, x: &[f32]) {
        self.add(layer, Input::Ffn, x);
    }

    fn gated(&mut self, layer: usize, _: usize, x: &[f32]) {
        self.add(layer, Input::Inner, x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_the_rows_whatever_the_width() {
        for width in [1, 5, BAND, BAND + 3] {
            let x: Vec<f32> = (0..11 * width).map(|i| ((i * 37) % 19) as f32 / 19.0 - 0.4).collect();
            let mut sums = Sums::new(width);
            sums.add(&x[..4 * width]);
            sums.add(&x[4 * width..]);
            let m = sums.finish().unwrap();
            for (i, j) in [(0, 0), (width - 1, 0), (0, width - 1), (width / 2, width - 1)] {
                let at = |r: usize, c: usize| f64::from(x[r * width + c]);
                let want = (0..11).map(|r| at(r, i) * at(r, j)).sum::<f64>() / 11.0;
                assert!((m.gram()[(i, j)] - want).abs() < 1e-6, "{width}: {i}, {j}");
            }
        }
    }
}
