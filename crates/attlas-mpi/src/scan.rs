//! Scan schedule: exchanges sums over keys, whose bytes do not depend on the number of tokens.
//!
//! With a causal mask the state before a piece is the sum of all pieces before it: one exclusive scan. With stripes,
//! the early tokens are on processes in their order and the late ones in the opposite order, and two scans serve both.
//! Without a mask every process needs the sum of all. The states of a process's own keys are computed once and shared
//! by all rows that use them ([`Stream::prepare`]). A scan takes $\lceil \log_2 P \rceil$ messages of one state
//! (recursive doubling), which are added in the order of tokens: MPI does not fix the order in `MPI_Exscan` and
//! `MPI_Allreduce`, and floating-point sums would then differ from run to run. Hillis and Steele, *Data parallel
//! algorithms* (1986).

use crate::attend::{Answer, Parts, Rows};
use crate::{Element, Transport};
use attlas::{Error, Mask, Method, Numbers, Options, Plan, Problem, Qkv, Result, RunInfo, Stream, Workspace};
use std::ops::Range;

/// Attends with a method whose state is a sum over keys.
pub(crate) fn scan<T: Element>(
    t: &dyn Transport,
    p: &Problem,
    method: &Method,
    options: &Options,
    x: &Parts<'_, T>,
    mut rows: Rows<T>,
    ws: &mut Workspace,
) -> Result<Answer<T>> {
    let plan = method.plan(p, options)?;
    let sums = Sums { plan: &*plan, method: method.id, dtype: T::DTYPE };
    let (k, v, q) = (x.k.local()?, x.v.local()?, x.q.local()?);
    let halves = x.k.layout().halves(t.rank());
    let mut streams = Vec::new();
    let mut at = 0;
    for half in &halves {
        let own = at..at + half.len();
        at = own.end;
        let mut stream = sums.empty()?;
        let (k, v) = (T::tensor(k.rows(own.clone())), T::tensor(v.rows(own)));
        let prepared = if p.mask == Mask::Causal { stream.prepare(k, v, ws)? } else { None };
        let state = match prepared {
            Some(state) => state,
            None => {
                let mut own = sums.empty()?;
                if !half.is_empty() {
                    own.push(k, v, ws)?;
                }
                sums.of(&*own, ws)?
            }
        };
        streams.push((stream, state));
    }
    let mut info = RunInfo::default();
    let mut run = |stream: &mut dyn Stream, range: Range<usize>, causal: bool, ws: &mut Workspace| {
        let keys = if causal { range.clone() } else { 0..0 };
        let x = Qkv::new(q.rows(range.clone()), k.rows(keys.clone()), v.rows(keys));
        let done = rows.write(range, |mut part| {
            if !method.claims.lse {
                part.lse = None;
            }
            stream.rows(&T::inputs(x), causal, &mut T::output(part), ws)
        })?;
        info = std::mem::take(&mut info).merge(done);
        Ok::<(), Error>(())
    };
    match p.mask {
        Mask::None => {
            let (mut stream, own) = streams.swap_remove(0);
            let (_, upto) = sums.before::<T>(t, own, false, ws)?;
            stream.add_sums(&sums.last_states::<T>(t, upto), p.n_k)?;
            let own = x.q.layout().rows(t.rank());
            if own > 0 {
                run(&mut *stream, 0..own, false, ws)?;
            }
        }
        Mask::Causal => {
            let [(mut early, of_early), (mut late, of_late)] =
                <[_; 2]>::try_from(streams).unwrap_or_else(|_| unreachable!("two halves"));
            let (before, upto) = sums.before::<T>(t, of_early, false, ws)?;
            before.iter().try_for_each(|s| early.add_sums(s, halves[0].start))?;
            if x.k.layout().is_striped() {
                late.add_sums(&sums.last_states::<T>(t, upto), halves[1].start)?;
                let (after, _) = sums.before::<T>(t, of_late, true, ws)?;
                after.iter().try_for_each(|s| late.add_sums(s, 0))?;
            }
            let mut at = 0;
            for (stream, half) in [early, late].iter_mut().zip(&halves).filter(|(_, h)| !h.is_empty()) {
                run(&mut **stream, at..at + half.len(), true, ws)?;
                at += half.len();
            }
        }
    }
    Ok(rows.answer(method.claims.lse, info))
}

/// Sums of one plan.
struct Sums<'a> {
    plan: &'a dyn Plan,
    method: &'static str,
    dtype: attlas::DType,
}

impl Sums<'_> {
    fn refused(&self, reason: &str) -> Error {
        Error::Unsupported { method: self.method.into(), reasons: vec![reason.into()] }
    }

    fn empty(&self) -> Result<Box<dyn Stream>> {
        self.plan.stream(self.dtype).ok_or_else(|| {
            self.refused(
                "with these settings its features are fitted to all queries and keys of the sequence",
            )
        })
    }

    fn of(&self, stream: &dyn Stream, ws: &mut Workspace) -> Result<Numbers> {
        stream.sums(ws).ok_or_else(|| {
            self.refused(
                "with these settings it keeps keys and values beside its sums, or fits its features to them",
            )
        })
    }

    fn add(&self, a: &Numbers, b: &Numbers, ws: &mut Workspace) -> Result<Numbers> {
        let mut stream = self.empty()?;
        stream.add_sums(a, 0)?;
        stream.add_sums(b, 0)?;
        self.of(&*stream, ws)
    }

    /// Returns the sum of the states of all processes before this one (none on the first), and that sum with its own.
    /// With `reverse`, "before" means higher ranks.
    fn before<T: Element>(
        &self,
        t: &dyn Transport,
        own: Numbers,
        reverse: bool,
        ws: &mut Workspace,
    ) -> Result<(Option<Numbers>, Numbers)> {
        let size = t.size();
        let real = |place: usize| if reverse { size - 1 - place } else { place };
        let place = real(t.rank());
        let len = own.len();
        let (mut upto, mut before): (Numbers, Option<Numbers>) = (own, None);
        let mut step = 1;
        while step < size {
            let sent: &[u8] = T::list(&upto).map_or(&[], bytemuck::cast_slice);
            let mut came = vec![T::ZERO; len];
            let (to, from) = (place + step < size, place >= step);
            match (to, from) {
                (true, true) => t.exchange(
                    real(place + step),
                    sent,
                    real(place - step),
                    bytemuck::cast_slice_mut(&mut came),
                    &mut |_| (),
                ),
                (true, false) => t.send(real(place + step), sent),
                (false, true) => t.receive(real(place - step), bytemuck::cast_slice_mut(&mut came)),
                (false, false) => {}
            }
            if from {
                let came = T::numbers(came);
                upto = self.add(&came, &upto, ws)?;
                before = Some(match before {
                    Some(before) => self.add(&came, &before, ws)?,
                    None => came,
                });
            }
            step *= 2;
        }
        Ok((before, upto))
    }

    /// Broadcasts the sum of the last process, which covers all.
    fn last_states<T: Element>(&self, t: &dyn Transport, upto: Numbers) -> Numbers {
        let mut all: Vec<u8> = T::list(&upto).map_or(Vec::new(), |x| bytemuck::cast_slice(x).to_vec());
        t.broadcast(t.size() - 1, &mut all);
        let mut list = vec![T::ZERO; upto.len()];
        bytemuck::cast_slice_mut(&mut list).copy_from_slice(&all);
        T::numbers(list)
    }
}
