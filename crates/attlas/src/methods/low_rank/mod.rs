//! Projections, landmarks and coresets.

pub mod nystromformer;
