//! Feature maps, sketches and linear attention.

pub mod gated_linear;
pub mod lev;
pub mod performer;
pub mod polynomial;
pub mod polysketch;
pub mod tensor_sketch;
