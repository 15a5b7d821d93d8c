//! Exact attention, and the yardsticks derived from it.

#[allow(clippy::module_inception)]
pub mod exact;
pub mod naive;
pub mod sink_window;
pub mod top_k;
