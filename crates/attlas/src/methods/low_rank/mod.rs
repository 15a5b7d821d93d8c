//! Projections, landmarks and coresets.

pub mod csalr;
pub mod lifted_nystrom;
pub mod linformer;
pub mod loki;
pub mod nystromformer;
pub mod skyformer;
pub mod wildcat;
