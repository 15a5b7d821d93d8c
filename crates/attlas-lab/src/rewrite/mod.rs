//! A model rewritten by a conversion of the registry, with its proof: one way from a checkpoint to another.
//!
//! [`run`] opens the model, reads the texts, makes the new model, writes it, opens what was written again and has that
//! measured beside the model it was made from. A [`Rewrite`] brings what differs: [`factors`] puts matrices into factored
//! form, [`latents`] turns whole attention layers into latent ones. A conversion's registry entry says which of them it is
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

/// The parts of a rewrite that are its own.
pub trait Rewrite {
    /// Texts and choices that are made before anything is learnt.
    type Ready;
    /// The new model in memory.
    type Made<'a>
    where
        Self: 'a;
    /// Everything that was measured.
    type Record;

    /// What it works on; an error if its conversion is none that it can run.
    fn order(&self) -> Result<Order<'_>>;

    /// Reads the texts. Refuses what is known to fail without learning anything, first of all without reading a long text.
    fn prepare(&self, model: &Model) -> Result<Self::Ready>;

    /// Learns from text and makes the new model.
    fn make<'a>(&'a self, bench: &'a Bench<'a>, ready: &'a Self::Ready) -> Result<Self::Made<'a>>;

    /// Writes it; the folder where it is not to appear before its record does.
    fn write(&self, bench: &Bench<'_>, ready: &Self::Ready, made: &Self::Made<'_>) -> Result<Option<Folder>>;

    /// Measures what was written beside the model it was made from.
    fn measure(
        &self,
        bench: &Bench<'_>,
        ready: &Self::Ready,
        made: Self::Made<'_>,
        written: Written,
    ) -> Result<Self::Record>;

    /// Lets the folder that [`write`](Self::write) left appear, with its record where it has a place for that.
    fn finish(&self, folder: Folder, record: &Self::Record) -> Result<()> {
        let _ = record;
        Ok(folder.finish()?)
    }
}

/// The checkpoints of a rewrite and how the work is run.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    /// The model: a GGUF file, a folder, or one on the hub.
    pub model: &'a Path,
    /// Where to: a folder, or a GGUF file if its name says so.
    pub out: &'a Path,
    /// Tokens of a window of the text that both models read.
    pub window: usize,
    /// Threads; 0 takes as many as the machine offers.
    pub threads: usize,
}

impl Order<'_> {
    /// The model's name for records.
    fn name(&self) -> String {
        self.model.file_name().unwrap_or(self.model.as_os_str()).to_string_lossy().into_owned()
    }
}

/// An error unless `conversion` is `mine`, with those that are and the command that applies it.
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

/// The model that is rewritten, with threads to do it on.
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
    /// Passes on how far a step is.
    fn report(&self, what: &str) -> impl FnMut(usize, usize) {
        move |done, all| (self.progress)(what, done, all)
    }

    /// Lets a model read a text.
    fn read<'t>(&self, model: &Arc<Model>, tokens: &'t [u32], what: &str) -> Result<SelfCheck<'t>> {
        let (window, report) = (self.order.window, &mut self.report(what));
        SelfCheck::new(model, tokens, window, &self.threads, report, self.stop)
    }

    /// Lets another model read the same.
    fn against(&self, reference: &mut SelfCheck<'_>, after: &Arc<Model>, what: &str) -> Result<Quality> {
        reference.against(after, &self.threads, &mut self.report(what), self.stop)
    }

    /// An error once the work is to end.
    fn go_on(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(attlas_model::Error::Interrupted.into());
        }
        Ok(())
    }
}

/// A model that was written and opened again.
#[derive(Debug)]
pub struct Written {
    model: Arc<Model>,
    /// Numbers and bytes of the tensors before and after.
    sizes: [(usize, usize); 2],
    /// Seconds that it took to make, with all that was learnt and tried.
    make_seconds: f64,
}

/// Rewrites a model and measures what was written, which appears whole or not at all. `progress` receives what is done, parts
/// of it that are, and parts in all.
pub fn run<R: Rewrite>(
    rewrite: &R,
    progress: &(dyn Fn(&str, usize, usize) + Sync),
    stop: &AtomicBool,
) -> Result<R::Record> {
    let order = rewrite.order()?;
    // What can be known to fail is known before a model is opened.
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
