//! The methods: `(q, k, v) → o`, one file each, families as in the survey.

pub mod clustering;
pub mod exact;
pub mod kernel;
pub mod low_rank;
