//! Cache size per token of each form of attention: the survey's table.
//!
//! Numbers per token and layer, for model width $D$, $H$ query heads, $G$ key heads of width $d$, latent rank $r$,
//! rotated width $d_R$ and ranks $R_K$, $R_V$ of factors: single head $2D$, MHA $2Hd$, GQA $2Gd$, MQA $2d$, MLA
//! $r + d_R$, TPA $(R_K + R_V)(H + d)$. Values whose width differs from $d$ count with their own width.
//!
//! References: vaswani2017, ainslie2023, shazeer2019, deepseek2024, zhang2025tpa.

use crate::layer::LayerShape;

/// A form of attention, by the contents of its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// One head as wide as the model.
    SingleHead,
    /// Keys and values of every query head.
    MultiHead,
    /// Keys and values of every key head.
    GroupedQuery,
    /// Keys and values of one head.
    MultiQuery,
    /// A latent and a shared rotated key.
    Latent {
        /// Width of the latent.
        rank: usize,
        /// Width of the rotated key.
        rope_dim: usize,
    },
    /// Factors of keys and values.
    TensorProduct {
        /// Terms of keys.
        rank_k: usize,
        /// Terms of values.
        rank_v: usize,
    },
}

impl Scheme {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::SingleHead => "SHA",
            Self::MultiHead => "MHA",
            Self::GroupedQuery => "GQA",
            Self::MultiQuery => "MQA",
            Self::Latent { .. } => "MLA",
            Self::TensorProduct { .. } => "TPA",
        }
    }

    /// Returns its size as a formula.
    pub fn formula(self) -> &'static str {
        match self {
            Self::SingleHead => "2·D",
            Self::MultiHead => "2·H·d",
            Self::GroupedQuery => "2·G·d",
            Self::MultiQuery => "2·d",
            Self::Latent { .. } => "r + d_R",
            Self::TensorProduct { .. } => "(R_K + R_V)·(H + d)",
        }
    }

    /// Returns how many numbers are cached per token in one layer of a model with these sizes.
    pub fn numbers_per_token(self, s: &LayerShape) -> usize {
        match self {
            Self::SingleHead => 2 * s.d_model,
            Self::MultiHead => s.n_heads * (s.d + s.d_v),
            Self::GroupedQuery => s.n_kv_heads * (s.d + s.d_v),
            Self::MultiQuery => s.d + s.d_v,
            Self::Latent { rank, rope_dim } => rank + rope_dim,
            Self::TensorProduct { rank_k, rank_v } => {
                rank_k * (s.n_heads + s.d) + rank_v * (s.n_heads + s.d_v)
            }
        }
    }
}

/// Returns all schemes for one model, in the order of the survey's table.
pub fn table(
    s: &LayerShape,
    rank: usize,
    rope_dim: usize,
    rank_k: usize,
    rank_v: usize,
) -> [(Scheme, usize); 6] {
    [
        Scheme::SingleHead,
        Scheme::MultiHead,
        Scheme::GroupedQuery,
        Scheme::MultiQuery,
        Scheme::Latent { rank, rope_dim },
        Scheme::TensorProduct { rank_k, rank_v },
    ]
    .map(|scheme| (scheme, scheme.numbers_per_token(s)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, registry};

    const fn shape(d_model: usize, n_heads: usize, n_kv_heads: usize, d: usize) -> LayerShape {
        LayerShape { d_model, n_heads, n_kv_heads, d, d_v: d }
    }

    const LLAMA_2_7B: LayerShape = shape(4096, 32, 32, 128);
    const LLAMA_3_8B: LayerShape = shape(4096, 32, 8, 128);
    const SMOLLM2: LayerShape = shape(576, 9, 3, 64);

    #[test]
    fn sizes_of_known_models_are_those_of_the_table() {
        let numbers = |s: &LayerShape, r: usize| table(s, r, 64, 2, 2).map(|(_, n)| n);
        assert_eq!(numbers(&LLAMA_2_7B, 512), [8192, 8192, 8192, 256, 576, 640]);
        assert_eq!(numbers(&LLAMA_3_8B, 512), [8192, 8192, 2048, 256, 576, 640]);
        assert_eq!(numbers(&SMOLLM2, 128), [1152, 1152, 384, 128, 192, 292]);
    }

    #[test]
    fn bytes_of_known_models_are_those_reported() {
        let deepseek = Scheme::Latent { rank: 512, rope_dim: 64 };
        assert_eq!(Scheme::MultiHead.numbers_per_token(&LLAMA_2_7B) * 32 * 2, 524_288);
        assert_eq!(Scheme::GroupedQuery.numbers_per_token(&LLAMA_3_8B) * 32 * 2, 131_072);
        assert_eq!(Scheme::GroupedQuery.numbers_per_token(&SMOLLM2) * 30 * 2, 23_040);
        assert_eq!(deepseek.numbers_per_token(&LLAMA_2_7B) * 27 * 2, 31_104);
        assert_eq!(deepseek.numbers_per_token(&LLAMA_2_7B) * 61 * 2, 70_272);
    }

    #[test]
    fn layers_cache_what_the_formulas_say() {
        let elements = |id: &str, s: &LayerShape, options: Options| {
            (registry::layer(id).unwrap().cache_elements)(s, &options).unwrap()
        };
        for s in [LLAMA_2_7B, LLAMA_3_8B, SMOLLM2, LayerShape { d_v: 48, ..SMOLLM2 }] {
            let full = LayerShape { n_kv_heads: s.n_heads, ..s };
            for (scheme, numbers) in table(&s, 128, 32, 3, 2) {
                let cached = match scheme {
                    // One head of the model's width.
                    Scheme::SingleHead => {
                        let one = shape(s.d_model, 1, 1, s.d_model);
                        elements("grouped_query", &one, Options::new())
                    }
                    Scheme::MultiHead => elements("grouped_query", &full, Options::new()),
                    Scheme::GroupedQuery => elements("grouped_query", &s, Options::new()),
                    Scheme::MultiQuery => {
                        elements("grouped_query", &LayerShape { n_kv_heads: 1, ..s }, Options::new())
                    }
                    Scheme::Latent { .. } => {
                        let options = Options::new().with("rank", 128usize).with("rope_dim", 32usize);
                        elements("latent", &full, options)
                    }
                    Scheme::TensorProduct { .. } => {
                        let options = Options::new().with("rank_k", 3usize).with("rank_v", 2usize);
                        elements("tensor_product", &full, options)
                    }
                };
                assert_eq!(cached, numbers, "{} ({})", scheme.name(), scheme.formula());
            }
        }
    }
}
