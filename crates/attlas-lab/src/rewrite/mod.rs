//! Rewriting of a model by a conversion of the registry, from one checkpoint to another, with measured results.
//!
//! [`run`] opens the model, reads the texts, makes the new model, writes it, opens the written one and measures it
//! against the original. A [`Rewrite`] supplies the steps that differ: [`factors`] factors matrices, [`latents`]
//! converts whole attention layers to latent attention. The registry entry of a conversion names its kind
//! ([`attlas::conversions::Run`]).

pub mod factors;
pub mod latents;

use crate::run::timed;
use crate::self_check::{Quality, SelfCheck};
use crate::text::{model_size, open_model};
use crate::{Error, Result};
use attlas::conversions::{Conversion, Run};
use attlas::{Schedule, Workspace, registry};
use attlas_model::Model;
use attlas_model::export::is_gguf;
use attlas_model::save::{Folder, GGUF};
use std::fmt::{Debug, Formatter};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The steps specific to one kind of rewrite.
pub trait Rewrite {
    /// Texts and choices made before anything is learnt.
    type Ready;
    /// The new model in memory.
    type Made<'a>
    where
        Self: 'a;
    /// All measurements.
    type Record;

    /// Returns the checkpoints and settings; an error if it cannot run its conversion.
    fn order(&self) -> Result<Order<'_>>;

    /// Reads the texts. Refuses early whatever is known to fail, if possible before it reads a long text.
    fn prepare(&self, model: &Model) -> Result<Self::Ready>;

    /// Learns from text and makes the new model.
    fn make<'a>(&'a self, bench: &'a Bench<'a>, ready: &'a Self::Ready) -> Result<Self::Made<'a>>;

    /// Writes the new model; returns the folder if it must not appear before its record.
    fn write(&self, bench: &Bench<'_>, ready: &Self::Ready, made: &Self::Made<'_>) -> Result<Option<Folder>>;

    /// Measures the written model against the original.
    fn measure(
        &self,
        bench: &Bench<'_>,
        ready: &Self::Ready,
        made: Self::Made<'_>,
        written: Written,
    ) -> Result<Self::Record>;

    /// Makes the folder from [`write`](Self::write) appear, with its record if the format has a place for it.
    fn finish(&self, folder: Folder, record: &Self::Record) -> Result<()> {
        let _ = record;
        Ok(folder.finish()?)
    }
}

/// The checkpoints of a rewrite, and settings of the run.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    /// The model: a GGUF file, a folder, or one on the hub.
    pub model: &'a Path,
    /// Output: a folder, or a GGUF file if its name says so.
    pub out: &'a Path,
    /// Tokens of a window of the text that both models read.
    pub window: usize,
    /// Threads; 0 uses all that the machine offers.
    pub threads: usize,
}

impl Order<'_> {
    /// Returns the model's name for records.
    fn name(&self) -> String {
        self.model.file_name().unwrap_or(self.model.as_os_str()).to_string_lossy().into_owned()
    }
}

/// Fails unless `mine` accepts `conversion`; the error lists those it accepts and the command for this one.
fn check_conversion(
    option: &str,
    conversion: &Conversion,
    mine: fn(&Run) -> bool,
    others: &str,
) -> Result<()> {
    if mine(&conversion.run) {
        return Ok(());
    }
    let able: Vec<&str> = registry::CONVERSIONS.iter().filter(|c| mine(&c.run)).map(|c| c.id).collect();
    let found = format!("{}, which {others} {} applies", conversion.id, conversion.id);
    Err(Error::argument(option, format!("one of {}", able.join(", ")), found))
}

/// The model to rewrite, with the threads for the work.
pub struct Bench<'a> {
    order: Order<'a>,
    before: Arc<Model>,
    threads: Workspace,
    progress: &'a (dyn Fn(&str, usize, usize) + Sync),
    stop: &'a AtomicBool,
}

impl Debug for Bench<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench").field("order", &self.order).finish_non_exhaustive()
    }
}

impl Bench<'_> {
    /// Returns a callback that reports the progress of a step.
    fn report(&self, what: &str) -> impl FnMut(usize, usize) {
        move |done, all| (self.progress)(what, done, all)
    }

    /// Runs a model over a text.
    fn read<'t>(&self, model: &Arc<Model>, tokens: &'t [u32], what: &str) -> Result<SelfCheck<'t>> {
        let (window, report) = (self.order.window, &mut self.report(what));
        SelfCheck::new(model, tokens, window, &self.threads, report, self.stop)
    }

    /// Runs another model over the same text and compares.
    fn against(&self, reference: &mut SelfCheck<'_>, after: &Arc<Model>, what: &str) -> Result<Quality> {
        reference.against(after, &self.threads, &mut self.report(what), self.stop)
    }

    /// Fails once a stop was requested.
    fn go_on(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(attlas_model::Error::Interrupted.into());
        }
        Ok(())
    }
}

/// A written model, reopened.
#[derive(Debug)]
pub struct Written {
    model: Arc<Model>,
    /// Numbers and bytes of the tensors before and after.
    sizes: [(usize, usize); 2],
    /// Seconds to make it, with all learning and trials.
    make_seconds: f64,
}

/// Rewrites a model and measures the written one, which appears whole or not at all. `progress` receives the name of a
/// step, its parts done, and its parts in all.
pub fn run<R: Rewrite>(
    rewrite: &R,
    progress: &(dyn Fn(&str, usize, usize) + Sync),
    stop: &AtomicBool,
) -> Result<R::Record> {
    let order = rewrite.order()?;
    // An impossible output fails before the model is opened.
    Folder::check(order.out)?;
    let before = open_model(order.model)?;
    let ready = rewrite.prepare(&before)?;
    let threads = Workspace::new(Schedule { threads: order.threads, ..Schedule::default() })?;
    let bench = Bench { order, before, threads, progress, stop };
    let (made, make_seconds) = timed(|| rewrite.make(&bench, &ready));
    let made = made?;
    bench.go_on()?;
    progress("writing", 0, 1);
    let folder = rewrite.write(&bench, &ready, &made)?;
    let place = match &folder {
        Some(folder) if is_gguf(order.out) => folder.path().join(GGUF),
        Some(folder) => folder.path().to_path_buf(),
        None => order.out.to_path_buf(),
    };
    let sizes = [model_size(order.model)?, model_size(&place)?];
    let written = Written { model: Arc::new(Model::open(&place)?), sizes, make_seconds };
    let record = rewrite.measure(&bench, &ready, made, written)?;
    if let Some(folder) = folder {
        bench.go_on()?;
        rewrite.finish(folder, &record)?;
    }
    Ok(record)
}
