//! Feature maps, sketches and linear attention.
