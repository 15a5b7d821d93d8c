//! Feature maps, sketches and linear attention.

pub mod crt;
pub mod gated_linear;
pub mod hybrid_features;
pub mod lev;
pub mod linear;
pub mod performer;
pub mod polaformer;
pub mod polynomial;
pub mod polysketch;
pub mod scatterbrain;
pub mod tensor_sketch;
