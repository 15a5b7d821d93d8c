//! The layers: hidden states → hidden states, one file each.
