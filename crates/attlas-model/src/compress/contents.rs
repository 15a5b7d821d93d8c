//! The tensors of a checkpoint in factored form, by name, and their entries in its section.

use super::elements::Elements;
use crate::error::{Error, Result};
use crate::factored::{FactorSpec, Stored};
use crate::tensor::Tensor;
use crate::weights::{DecoderWeights, EncoderWeights, HF_DECODER, HF_ENCODER, LayerNorm};
use attlas::Mat;
use attlas::conversions::common::product::{Factor, Values};
use attlas::layer::Dense;
use attlas_num::kernels::quant::Format;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Tensors to write and their entries in the section.
#[derive(Default)]
pub(super) struct Contents<'a> {
    pub(super) tensors: Vec<(String, Cow<'a, Tensor>)>,
    pub(super) vectors: Vec<(String, Cow<'a, [f32]>)>,
    pub(super) section: BTreeMap<String, Stored>,
    /// Shared matrices that were written, by address.
    shared: HashMap<usize, String>,
}

impl<'a> Contents<'a> {
    fn tensor(&mut self, name: String, tensor: Cow<'a, Tensor>) {
        let format = tensor.format();
        if !matches!(format, Format::F32 | Format::F16 | Format::BF16) {
            let stored = Stored { format: format.name().into(), shape: tensor.shape().to_vec() };
            self.section.insert(name.clone(), stored);
        }
        self.tensors.push((name, tensor));
    }

    pub(super) fn dense(&mut self, name: &str, map: &Dense, elements: Elements) -> Result<()> {
        let weight = format!("{name}.weight");
        let shape = vec![map.weight.rows(), map.weight.cols()];
        let tensor = elements.encode(&weight, map.weight.data(), shape)?;
        self.tensor(weight, Cow::Owned(tensor));
        if let Some(bias) = &map.bias {
            self.vectors.push((format!("{name}.bias"), Cow::Owned(bias.clone())));
        }
        Ok(())
    }

    pub(super) fn stored(&mut self, name: &str, (weight, bias): (Cow<'a, Tensor>, Option<Vec<f32>>)) {
        self.tensor(format!("{name}.weight"), weight);
        if let Some(bias) = bias {
            self.vectors.push((format!("{name}.bias"), Cow::Owned(bias)));
        }
    }

    /// Returns the name under which shared numbers are written, and true the first time.
    fn share(&mut self, address: usize) -> (String, bool) {
        let next = format!("attlas.factor.{}", self.shared.len());
        let name = self.shared.entry(address).or_insert_with(|| next.clone()).clone();
        let first = name == next;
        (name, first)
    }

    pub(super) fn factor(&mut self, factor: &Factor, elements: Elements) -> Result<FactorSpec> {
        let Factor { values, transposed, slices } = factor;
        let (transposed, slices) = (*transposed, *slices);
        // Blocks run along rows: a matrix that is read transposed is stored as plain numbers instead.
        let matrix = if elements == Elements::Q8 && transposed { Elements::F16 } else { elements };
        // Mixtures and diagonals have few weights.
        let exact = Elements::F32;
        let write =
            |this: &mut Self, address: usize, shape: Vec<usize>, data: Cow<'_, [f32]>, e: Elements| {
                let (name, first) = this.share(address);
                if first {
                    let tensor = e.encode(&name, &data, shape)?;
                    this.tensor(name.clone(), Cow::Owned(tensor));
                }
                Ok::<String, Error>(name)
            };
        let mat = |m: &Arc<Mat<f32>>| (Arc::as_ptr(m) as usize, vec![m.rows(), m.cols()]);
        Ok(match values {
            Values::Matrix(m) => {
                let (address, shape) = mat(m);
                let tensor = write(self, address, shape, Cow::Borrowed(m.data()), matrix)?;
                FactorSpec::Matrix { tensor, transposed, slices }
            }
            Values::Diagonal { table, row } => {
                let (address, shape) = mat(table);
                let diagonal = write(self, address, shape, Cow::Borrowed(table.data()), exact)?;
                FactorSpec::Diagonal { diagonal, row: *row }
            }
            Values::Mixture { cores, weights, rows } => {
                let (height, width) = cores.first().map_or((0, 0), |c| (c.rows(), c.cols()));
                let all: Vec<f32> = cores.iter().flat_map(|c| c.data()).copied().collect();
                let shape = vec![cores.len(), height, width];
                // They are mixed when read: quantised blocks would only add error.
                let e = if elements == Elements::Q8 { Elements::F16 } else { elements };
                let cores = write(self, Arc::as_ptr(cores) as usize, shape, Cow::Owned(all), e)?;
                let (address, shape) = mat(weights);
                let mixture = write(self, address, shape, Cow::Borrowed(weights.data()), exact)?;
                FactorSpec::Mixture { cores, mixture, rows: rows.clone(), transposed, slices }
            }
        })
    }
}

pub(super) fn decoder_tensors<'a>(w: &'a DecoderWeights, out: &mut Contents<'a>) {
    let n = &HF_DECODER;
    out.tensor(format!("model.{}", n.embedding), Cow::Borrowed(&w.embedding));
    if !w.is_tied() {
        out.tensor("lm_head.weight".into(), Cow::Borrowed(w.output.weight()));
    }
    out.vectors.push((format!("model.{}", n.final_norm), Cow::Borrowed(&w.final_norm)));
    for (i, layer) in w.layers.iter().enumerate() {
        let norms = [
            (n.attention_norm, layer.attention_norm.as_ref()),
            (n.ffn_norm, layer.ffn_norm.as_ref()),
            (n.q_norm, layer.q_norm.as_ref()),
            (n.k_norm, layer.k_norm.as_ref()),
        ];
        for (name, norm) in norms {
            out.vectors
                .extend(norm.map(|v| (format!("model.{}.{name}", (n.layer)(i)), Cow::Borrowed(&v[..]))));
        }
    }
}

pub(super) fn encoder_tensors<'a>(w: &'a EncoderWeights, out: &mut Contents<'a>) {
    let n = &HF_ENCODER;
    out.tensor(n.word.into(), Cow::Borrowed(&w.word_embedding));
    out.tensor(n.position.into(), Cow::Borrowed(&w.position_embedding));
    out.tensor(n.kind.into(), Cow::Borrowed(&w.type_embedding));
    let mut norm = |name: String, norm: &'a LayerNorm| {
        out.vectors.push((format!("{name}.weight"), Cow::Borrowed(&norm.weight[..])));
        out.vectors.push((format!("{name}.bias"), Cow::Borrowed(&norm.bias[..])));
    };
    norm(n.embedding_norm.into(), &w.embedding_norm);
    for (i, layer) in w.layers.iter().enumerate() {
        norm(format!("{}.{}", (n.layer)(i), n.attention_norm), &layer.attention_norm);
        norm(format!("{}.{}", (n.layer)(i), n.output_norm), &layer.output_norm);
    }
}
