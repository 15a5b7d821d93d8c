//! Elements of messages, and their precision.

use attlas::{Inputs, Numbers, Out, Output, Qkv, Real, Tensor, TensorRef};
use bytemuck::Pod;
use half::bf16;

/// An element of tensors that processes send to each other.
pub trait Element: Real + Pod {
    /// Wraps a tensor of either precision.
    fn tensor(x: TensorRef<'_, Self>) -> Tensor<'_>;
    /// Wraps inputs of either precision.
    fn inputs(x: Qkv<'_, Self>) -> Inputs<'_>;
    /// Wraps an output of either precision.
    fn output(x: Out<'_, Self>) -> Output<'_>;
    /// Wraps a list of numbers.
    fn numbers(x: Vec<Self>) -> Numbers;
    /// Returns the wrapped list.
    fn list(x: &Numbers) -> Option<&[Self]>;
}

macro_rules! element {
    ($t:ty, $variant:ident) => {
        impl Element for $t {
            fn tensor(x: TensorRef<'_, Self>) -> Tensor<'_> {
                Tensor::$variant(x)
            }
            fn inputs(x: Qkv<'_, Self>) -> Inputs<'_> {
                Inputs::$variant(x)
            }
            fn output(x: Out<'_, Self>) -> Output<'_> {
                Output::$variant(x)
            }
            fn numbers(x: Vec<Self>) -> Numbers {
                Numbers::$variant(x)
            }
            fn list(x: &Numbers) -> Option<&[Self]> {
                match x {
                    Numbers::$variant(x) => Some(x),
                    _ => None,
                }
            }
        }
    };
}
element!(f32, F32);
element!(f64, F64);

/// Form in which keys and values travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// Unchanged.
    #[default]
    Full,
    /// Rounded to 8 significant bits. A process rounds its own keys, too: all rows then use the same ones.
    Bf16,
}

impl Wire {
    /// Rounds elements before they are sent.
    pub(crate) fn round<T: Element>(self, x: &mut [T]) {
        if self == Wire::Bf16 {
            x.iter_mut().for_each(|x| *x = T::from_f64(bf16::from_f64(x.to_f64()).to_f64()));
        }
    }

    /// Returns the bytes of `count` elements in a message.
    pub(crate) fn bytes<T: Element>(self, count: usize) -> usize {
        count * if self == Wire::Bf16 { size_of::<bf16>() } else { size_of::<T>() }
    }

    /// Returns rounded elements in the form of a message; uses `packed` if that form differs.
    pub(crate) fn pack<'a, T: Element>(self, x: &'a [T], packed: &'a mut Vec<u8>) -> &'a [u8] {
        match self {
            Wire::Full => bytemuck::cast_slice(x),
            Wire::Bf16 => {
                packed.clear();
                packed.extend(x.iter().flat_map(|x| bf16::from_f64(x.to_f64()).to_le_bytes()));
                packed
            }
        }
    }

    /// Converts received bytes to elements.
    pub(crate) fn unpack<T: Element>(self, bytes: &[u8], x: &mut [T]) {
        match self {
            Wire::Full => bytemuck::cast_slice_mut(x).copy_from_slice(bytes),
            Wire::Bf16 => {
                for (x, bytes) in x.iter_mut().zip(bytes.chunks_exact(2)) {
                    *x = T::from_f64(bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64());
                }
            }
        }
    }
}
