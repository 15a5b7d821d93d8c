//! The layers: hidden states → hidden states, one file each.

pub mod grouped_query;
