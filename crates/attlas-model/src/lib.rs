//! Pretrained models.
