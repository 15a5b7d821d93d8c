//! Sources of queries, keys and values.

use crate::synthetic::Synthetic;
use crate::workload::Workload;
use crate::{Error, Result, trace};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A source of inputs, as named on the command line.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Source {
    /// Queries, keys and values of a real model, embedded in this crate; see [`mod@crate::demo`].
    #[default]
    Demo,
    /// Drawn from a random model of attention.
    Synthetic(Synthetic),
    /// Read from one trace, or from three `.npy` files of queries, keys and values.
    Files(Vec<PathBuf>),
    /// Taken from a model, a GGUF file or a Hugging Face folder, while it reads a text.
    Model(PathBuf),
}

impl FromStr for Source {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.strip_prefix("synthetic:") {
            Some(spec) => Ok(Source::Synthetic(spec.parse()?)),
            None if text == "synthetic" => Ok(Source::Synthetic(Synthetic::default())),
            None if text == "demo" => Ok(Source::Demo),
            None if text.ends_with(".gguf")
                || text.starts_with("hf:")
                || Path::new(text).join("config.json").is_file() =>
            {
                Ok(Source::Model(text.into()))
            }
            None => Ok(Source::Files(text.split(',').map(PathBuf::from).collect())),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Demo => f.write_str("demo"),
            Source::Model(path) => path.display().fmt(f),
            Source::Synthetic(s) => write!(f, "synthetic:{s}"),
            Source::Files(paths) => {
                let names: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
                f.write_str(&names.join(","))
            }
        }
    }
}

impl Source {
    /// Draws or reads the inputs. A model needs a text: see [`extract`](crate::extract::extract).
    pub fn load(&self) -> Result<Workload> {
        self.load_with(trace::read)
    }

    /// Loads like [`load`](Self::load) but accepts non-finite numbers in files, for callers that check them.
    pub fn load_unchecked(&self) -> Result<Workload> {
        self.load_with(trace::read_unchecked)
    }

    fn load_with(&self, read: fn(&[PathBuf]) -> Result<Workload>) -> Result<Workload> {
        let mut workload = match self {
            Source::Demo => crate::demo::load()?,
            Source::Model(path) => {
                let expected = "--text with a file for the model to read";
                return Err(Error::argument(path.display(), expected, "none"));
            }
            Source::Synthetic(s) => s.generate()?,
            Source::Files(paths) => read(paths)?,
        };
        workload.source = self.to_string();
        Ok(workload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::LayerData;
    use attlas::Mask;

    #[test]
    fn sources_print_as_they_are_read() {
        for text in [
            "synthetic:needle,n=100,d=16,heads=4,kv_heads=2,seed=7",
            "demo",
            "trace.safetensors",
            "model.gguf",
            "q.npy,k.npy,v.npy",
        ] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
        let short: Source = "synthetic:low_rank,n=2k".parse().unwrap();
        assert_eq!(short.to_string(), "synthetic:low_rank,n=2048,d=64,heads=1,kv_heads=1,seed=0");
        assert!("nowhere.safetensors".parse::<Source>().unwrap().load().is_err());
    }

    #[test]
    fn layers_are_kept_by_number() {
        let mut w = "synthetic:gaussian,n=2,d=1".parse::<Source>().unwrap().load().unwrap();
        w.layers = [1, 4, 7].map(|l| LayerData { layer: Some(l), ..w.layers[0].clone() }).to_vec();
        assert!(w.keep_layers(&[4, 5]).unwrap_err().to_string().contains("one of 1, 4, 7"));
        w.keep_layers(&[7, 1]).unwrap();
        assert_eq!(w.layers.iter().map(|x| x.layer).collect::<Vec<_>>(), [Some(1), Some(7)]);
    }

    #[test]
    fn a_group_is_a_key_head_with_its_query_heads() {
        let w = "synthetic:gaussian,n=5,d=3,heads=4,kv_heads=2".parse::<Source>().unwrap().load().unwrap();
        let layer = &w.layers[0];
        let p = layer.group_problem(Mask::Causal);
        assert_eq!((p.n_heads, p.n_kv_heads, p.mask), (2, 1, Mask::Causal));
        let g = layer.group(1).unwrap();
        g.validate(&p).unwrap();
        assert_eq!(g.q.head(0, 1).row(2), &layer.q[3 * 15 + 6..][..3]);
        assert_eq!(g.k.head(0, 0).row(0), &layer.k[15..18]);
    }
}
