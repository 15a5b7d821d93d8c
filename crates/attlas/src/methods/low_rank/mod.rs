//! Projections, landmarks and coresets.

pub mod csalr;
pub mod linformer;
pub mod nystromformer;
pub mod wildcat;
