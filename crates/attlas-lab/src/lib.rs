//! Workloads, comparisons and benchmarks: the measuring part of attlas.
//!
//! A [`Source`] names inputs and loads them, a [`Selection`](select::Selection) names methods with their
//! settings, [`budget`] gives them equal budgets, [`mod@compare`] measures errors and times on those inputs,
//! [`mod@bench`] measures how times grow with length against the ceilings of the [`machine`], and [`atlas`] describes
//! the contents of the registry. [`mod@calibrate`] lets methods learn from text, [`mod@extract`], [`mod@perplexity`]
//! and [`mod@generate`] run a pretrained model over a text, [`mod@inspect`] looks inside heads, [`mod@tune`] chooses a
//! method for each, and [`report`] collects the results on one page. Results are plain records that serialise;
//! [`table`] formats them as tables. Only this crate reads the clock.

#![forbid(unsafe_code)]

pub mod atlas;
pub mod bench;
pub mod calibrate;
pub mod compare;
pub mod crew;
pub mod decompose;
pub mod demo;
pub mod device;
mod error;
pub mod extract;
pub mod figures;
pub mod generate;
pub mod hash;
pub mod html;
pub mod inspect;
pub mod layer;
pub mod machine;
mod npy;
pub mod output;
pub mod pdf;
pub mod perplexity;
pub mod reorder;
pub mod report;
mod reread;
pub mod rewrite;
mod run;
pub mod select;
pub mod self_check;
pub mod simulate;
pub mod source;
pub mod stats;
pub mod survey;
#[cfg(test)]
mod survey_page;
pub mod synthetic;
pub mod table;
pub mod task;
pub mod taxonomy;
#[cfg(test)]
mod testing;
pub mod text;
pub mod trace;
pub mod tune;
pub mod units;
pub mod words;
pub mod workload;

pub use attlas_model::calibration::{self, Calibrations};
pub use compare::budget;
pub use error::{Error, Result};
pub use run::{Meter, Progress, Run};
pub use source::Source;
pub use workload::{LayerData, Workload};
