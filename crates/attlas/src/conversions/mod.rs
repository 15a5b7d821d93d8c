//! Conversions: weights of a layer → weights of another layer or a factored form, exactly or with a measured loss.

pub mod collaborative;
pub mod common;
pub mod mla;
pub mod shared_factor;
pub mod svd;
pub mod tensor_product;
pub mod trawl;
pub mod tucker;

use crate::Result;
use crate::params::ParamSpec;
use common::network::{Request, Rewritten};

/// A conversion of a layer's weights into another layer or a factored form: its registry entry.
#[derive(Debug)]
pub struct Conversion {
    /// Name in the literature, `snake_case`; public API.
    pub id: &'static str,
    /// One line for people.
    pub title: &'static str,
    /// Authors and year, or the section of the survey.
    pub reference: &'static str,
    /// Its parameters.
    pub params: &'static [ParamSpec],
    /// Id of the layer it starts from.
    pub from: &'static str,
    /// Id of the layer it ends in.
    pub to: &'static str,
    /// True if it fits weights to their inputs on a calibration text.
    pub reads_text: bool,
    /// Application to a whole network.
    pub run: Run,
}

/// Application of a conversion to a whole network.
#[derive(Clone, Copy, Debug)]
pub enum Run {
    /// Converts any of its matrices, from weights and, if it reads text, moments of their inputs.
    Matrices(fn(&Request<'_>) -> Result<Rewritten>),
    /// Converts all attention layers to latent ones, in stages, from moments of their heads: [`mla::convert`].
    Latents,
}
