//! The view of a model for conversions.

use super::learn::Learnt;
use crate::error::{Error, Result};
use crate::export::pair_order;
use crate::linear::Linear;
use crate::model::Model;
use crate::tensor::Tensor;
use crate::weights::{HF_DECODER, HF_ENCODER, Weights};
use attlas::Mat;
use attlas::conversions::common::moments::Moments;
use attlas::conversions::common::network::{Network, Role, Slot};
use attlas::layer::{Dense, LayerShape};
use attlas_num::rope::{Layout, Rope};
use std::borrow::Cow;
use std::sync::Arc;

/// A model as a list of matrices, in the orientation and order of rows of Hugging Face checkpoints.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrices<'a> {
    pub(super) model: &'a Model,
    /// Their moments from a calibration text.
    pub(super) learnt: Option<&'a Learnt>,
}

impl<'a> Matrices<'a> {
    /// Creates the list; fails if the model is already in factored form.
    pub(super) fn new(model: &'a Model) -> Result<Self> {
        if model.weights.has_products() || model.weights.has_other_attention() {
            let what = "compressing a model that is already in another form".into();
            return Err(Error::Unsupported { what });
        }
        if !model.config.is_plain() {
            let what = format!("compressing a {} model", model.config.architecture.name());
            return Err(Error::Unsupported { what });
        }
        Ok(Self { model, learnt: None })
    }

    fn linear(&self, slot: Slot) -> Option<&'a Linear> {
        self.model.weights.maps_of(slot.layer)?[slot.role as usize]
    }

    /// Returns for each row in Hugging Face's order the index of its stored row; `None` if the orders agree.
    fn order(&self, slot: Slot) -> Option<Vec<usize>> {
        let c = &self.model.config;
        let heads = match slot.role {
            Role::Query => c.n_heads,
            Role::Key => c.n_kv_heads,
            _ => return None,
        };
        pair_order(c, Layout::Half, heads)
    }

    /// Returns the stored tensor with its rows in order, and the bias.
    pub(super) fn stored(&self, slot: Slot) -> Option<(Cow<'a, Tensor>, Option<Vec<f32>>)> {
        let map = self.linear(slot)?;
        let Some(order) = self.order(slot) else {
            return Some((Cow::Borrowed(map.weight()), map.bias().map(<[f32]>::to_vec)));
        };
        let tensor = map.weight().some_rows(order.iter().copied())?;
        Some((Cow::Owned(tensor), map.bias().map(|b| order.iter().map(|&r| b[r]).collect())))
    }

    /// Returns the name of a map, without `.weight`.
    pub(super) fn name(&self, slot: Slot) -> String {
        if self.model.config.architecture.is_encoder() {
            let n = &HF_ENCODER;
            let part = [n.q, n.k, n.v, n.o, n.up, n.up, n.down][slot.role as usize];
            format!("{}.{part}", (n.layer)(slot.layer))
        } else {
            let n = &HF_DECODER;
            let part = [n.q, n.k, n.v, n.o, n.gate, n.up, n.down][slot.role as usize];
            format!("model.{}.{part}", (n.layer)(slot.layer))
        }
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let all =
            (0..self.model.config.n_layers).flat_map(|layer| Role::ALL.map(|role| Slot { layer, role }));
        all.filter(|s| self.linear(*s).is_some())
    }
}

impl Network for Matrices<'_> {
    fn shape(&self) -> LayerShape {
        self.model.config.layer_shape()
    }

    fn n_layers(&self) -> usize {
        self.model.config.n_layers
    }

    fn size(&self, slot: Slot) -> Option<(usize, usize)> {
        self.linear(slot).map(|l| (l.outputs(), l.inputs()))
    }

    fn map(&self, slot: Slot) -> attlas::Result<Dense> {
        let missing = || attlas::Error::UnknownId { kind: "matrix", id: slot.to_string(), known: Vec::new() };
        let (weight, bias) = self.stored(slot).ok_or_else(missing)?;
        Ok(Dense { weight: Mat::from_vec(weight.to_f32(), weight.rows(), weight.cols()), bias })
    }

    fn rope(&self) -> Option<Rope> {
        self.model.config.rope.clone().map(|rope| Rope { layout: Layout::Half, ..rope })
    }

    fn moments(&self, slot: Slot) -> Option<Arc<Moments>> {
        self.learnt?.moments(slot).cloned()
    }

    fn sensitivity(&self, slot: Slot) -> Option<f64> {
        self.learnt?.sensitivity.get(&slot).copied()
    }

    fn obstacles(&self) -> Vec<String> {
        let mut list = Vec::new();
        if self.model.config.windows.iter().any(Option::is_some) {
            list.push("sliding windows".to_owned());
        }
        if let Weights::Decoder(w) = &self.model.weights
            && w.layers.iter().any(|l| l.q_norm.is_some() || l.k_norm.is_some())
        {
            list.push("norms of query and key heads".to_owned());
        }
        list
    }
}
