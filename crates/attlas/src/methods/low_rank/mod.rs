//! Projections, landmarks and coresets.

pub mod csalr;
pub mod linformer;
pub mod loki;
pub mod nystromformer;
pub mod wildcat;
