//! Projections, landmarks and coresets.

pub mod csalr;
pub mod nystromformer;
pub mod wildcat;
