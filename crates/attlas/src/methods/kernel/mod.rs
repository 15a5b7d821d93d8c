//! Feature maps, sketches and linear attention.

pub mod performer;
