//! Device forms, one file each.

pub(crate) mod exact;
pub(crate) mod hyper;
pub(crate) mod linear;
pub(crate) mod sink_window;
