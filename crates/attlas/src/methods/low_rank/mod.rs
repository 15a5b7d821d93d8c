//! Projections, landmarks and coresets.

pub mod wildcat;
