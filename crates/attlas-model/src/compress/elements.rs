//! Element types of new matrices.

use crate::error::{Error, Result};
use crate::model::Model;
use crate::tensor::{Source, Tensor};
use attlas_num::kernels::quant::Format;
use std::sync::Arc;

/// Element types that new matrices can be stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// Upper 16 bits of single precision.
    Bf16,
    /// 8 bits, and a scale per 32 numbers; half precision if rows are no multiple of 32 or a matrix is used transposed.
    Q8,
}

impl Elements {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8 => "q8",
        }
    }

    /// Returns the type nearest to that of most numbers in a model's layers: 8 bits if those are quantised.
    pub fn of(model: &Model) -> Self {
        let mut counts = [Self::F32, Self::F16, Self::Bf16, Self::Q8].map(|e| (0, e));
        let mut count = |m: &Tensor| {
            let of = Self::like(m.format());
            counts.iter_mut().filter(|(_, e)| *e == of).for_each(|(n, _)| *n += m.rows() * m.cols());
        };
        model.weights.maps().flat_map(|m| m.matrices()).for_each(&mut count);
        counts.into_iter().max_by_key(|(n, _)| *n).map_or(Self::F32, |(_, e)| e)
    }

    fn like(format: Format) -> Self {
        match format {
            Format::F32 => Self::F32,
            Format::F16 => Self::F16,
            Format::BF16 => Self::Bf16,
            _ => Self::Q8,
        }
    }

    /// Returns true if a matrix of this format takes more bytes than in these elements.
    pub(crate) fn narrower_than(self, format: Format) -> bool {
        let bytes = |e| match e {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8 => 1,
        };
        bytes(self) < bytes(Self::like(format))
    }

    /// Encodes numbers in this type. Fails if one is too large for it or not finite.
    pub(crate) fn encode(self, name: &str, values: &[f32], shape: Vec<usize>) -> Result<Tensor> {
        let most = match self {
            Self::F32 => f32::MAX,
            Self::Bf16 => half::bf16::MAX.to_f32(),
            Self::F16 | Self::Q8 => half::f16::MAX.to_f32(),
        };
        if let Some(bad) = values.iter().find(|x| x.is_nan() || x.abs() > most) {
            let expected = format!("at most {most} in magnitude; store it as f32");
            return Err(Error::invalid(format!("a number of {name}"), bad, expected));
        }
        let blocks = self == Self::Q8 && shape.last().is_some_and(|n| n.is_multiple_of(32));
        let (format, bytes): (Format, Vec<u8>) = match self {
            Self::Q8 if blocks => (Format::Q8_0, values.chunks_exact(32).flat_map(block).collect()),
            Self::F32 => (Format::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect()),
            Self::Bf16 => {
                (Format::BF16, values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect())
            }
            Self::F16 | Self::Q8 => {
                (Format::F16, values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect())
            }
        };
        let range = 0..bytes.len();
        Tensor::new(Arc::new(Source::Owned(bytes)), range, format, shape)
            .ok_or_else(|| Error::invalid(format!("the size of {name}"), values.len(), "that of its shape"))
    }
}

/// Encodes 32 numbers as a scale and 8 bits each, as in GGUF's Q8_0.
fn block(values: &[f32]) -> [u8; 34] {
    let largest = values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let scale = half::f16::from_f32(largest / 127.0);
    let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
    let mut out = [0; 34];
    out[..2].copy_from_slice(&scale.to_le_bytes());
    let bytes = out[2..].iter_mut().zip(values);
    bytes.for_each(|(o, x)| *o = (x * inverse).round().clamp(-127.0, 127.0) as i8 as u8);
    out
}
