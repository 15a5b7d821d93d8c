//! Device forms, one file each.

pub(crate) mod crt;
pub(crate) mod exact;
pub(crate) mod hybrid_features;
pub(crate) mod hyper;
pub(crate) mod linear;
pub(crate) mod linformer;
pub(crate) mod loki;
pub(crate) mod nystromformer;
pub(crate) mod performer;
pub(crate) mod polaformer;
pub(crate) mod sink_window;
pub(crate) mod top_k;
