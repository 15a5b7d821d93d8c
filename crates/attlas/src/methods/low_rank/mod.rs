//! Projections, landmarks and coresets.
