//! Conversions: weights of a layer → weights of another layer or a factored form, exactly or with a measured loss.

pub mod collaborative;
pub mod common;
pub mod mla;
pub mod shared_factor;
pub mod svd;
pub mod tensor_product;
pub mod trawl;
pub mod tucker;
