//! Hashing, clustering and importance sampling.
