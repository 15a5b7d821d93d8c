//! The layers: hidden states → hidden states, one file each.

pub mod axial;
pub mod collaborative;
pub mod common;
pub mod feature_wise;
pub mod gau;
pub mod grouped_query;
pub mod higher_order;
pub mod latent;
pub mod mode_wise;
pub mod teaformer;
pub mod tensor_product;
pub mod tensorized;
#[cfg(test)]
pub(crate) mod testing;
pub mod third_order;
pub mod two_simplicial;
