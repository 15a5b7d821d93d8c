//! Randomised linear algebra.
