//! Pretrained models: weight files, tokenisers, and products with weights in their stored form.
//!
//! [`Model::open`] reads a GGUF file or a Hugging Face folder of the Llama and BERT families. Every file is
//! treated as hostile: a header that lies is an [`Error`], never a panic or a huge allocation.

pub mod bert;
pub mod calibration;
pub mod chat;
pub mod checkpoint;
pub mod compress;
pub mod config;
pub mod convert;
pub mod decoder;
pub mod error;
pub mod experts;
pub mod export;
pub mod factored;
pub mod gguf;
pub mod hub;
pub mod kept;
pub mod linear;
pub mod model;
pub mod ops;
pub mod perplexity;
mod quiet;
pub mod recipe;
pub mod sample;
pub mod save;
pub mod tensor;
pub mod tokenizer;
pub mod weights;

pub use attlas_num::kernels::quant::Compute;
pub use bert::Encoder;
pub use calibration::Calibrations;
pub use chat::{ChatTemplate, Message};
pub use config::{Architecture, LatentConfig, ModelConfig};
pub use decoder::{Decoder, Rows};
pub use error::{Error, Result};
pub use linear::Linear;
pub use model::Model;
pub use recipe::Recipe;
pub use tensor::Tensor;
pub use tokenizer::Tokenizer;
pub use weights::Weights;
