//! Gather schedule: a few weighted keys represent many, and those of all processes are gathered.
//!
//! Each process compresses the keys of each of its pieces. Without a mask its queries attend to the representative keys
//! of all pieces. With a causal mask they attend to those of earlier pieces, and to their own piece by the method's
//! causal form; both merge by log-sum-exp.

use crate::attend::{Answer, Parts, Rows, rectangle, starts};
use crate::{Element, Transport};
use attlas::{Error, Mask, Method, Numbers, Options, Out, Problem, Result, RunInfo, TensorMut, Workspace};
use std::ops::Range;

/// Attends with a method that makes representative keys.
pub(crate) fn gather<T: Element>(
    t: &dyn Transport,
    p: &Problem,
    method: &Method,
    options: &Options,
    x: &Parts<'_, T>,
    mut rows: Rows<T>,
    ws: &mut Workspace,
) -> Result<Answer<T>> {
    let groups = p.batch * p.n_kv_heads;
    let plan = method.plan(p, options)?;
    let (q, k, v) = (x.q.local()?, x.k.local()?, x.v.local()?);
    let pieces = x.k.layout().pieces(t.rank());
    let mut message = Vec::new();
    for (piece, at) in pieces.iter().zip(starts(&pieces)) {
        let (k, v) = (k.rows(at..at + piece.len()), v.rows(at..at + piece.len()));
        let made = plan.stand_ins(T::tensor(k), T::tensor(v), piece.start as u64, ws)?;
        let lists = made.ok_or_else(|| Error::Unsupported {
            method: method.id.into(),
            reasons: vec!["with these settings nothing stands for its keys".into()],
        })?;
        for list in &lists {
            let list = T::list(list).unwrap_or(&[]);
            message.extend((list.len() as u64).to_le_bytes());
            message.extend_from_slice(bytemuck::cast_slice(list));
        }
    }
    // Every piece of every process with its lists, in the order of tokens.
    let mut all: Vec<(Range<usize>, Vec<Vec<T>>)> = Vec::new();
    for (rank, bytes) in t.gather_all(&message).into_iter().enumerate() {
        let mut rest = &bytes[..];
        for piece in x.k.layout().pieces(rank) {
            let mut lists = Vec::with_capacity(groups);
            for _ in 0..groups {
                let (len, tail) = rest.split_at(8);
                let len = u64::from_le_bytes(len.try_into().unwrap_or([0; 8])) as usize;
                let (own, tail) = tail.split_at(len * size_of::<T>());
                let mut list = vec![T::ZERO; len];
                bytemuck::cast_slice_mut(&mut list).copy_from_slice(own);
                lists.push(list);
                rest = tail;
            }
            all.push((piece, lists));
        }
    }
    all.sort_by_key(|(piece, _)| piece.start);
    let own = x.q.layout().pieces(t.rank());
    let mut info = RunInfo::default();
    for (mine, at) in own.iter().zip(starts(&own)) {
        let queries = q.rows(at..at + mine.len());
        let seen = |piece: &Range<usize>| p.mask == Mask::None || piece.start < mine.start;
        let joined = |g: usize| -> Vec<T> {
            all.iter().filter(|(piece, _)| seen(piece)).flat_map(|(_, lists)| &lists[g]).copied().collect()
        };
        let stand_ins: Vec<Numbers> = (0..groups).map(|g| T::numbers(joined(g))).collect();
        if stand_ins.iter().any(|list| !list.is_empty()) {
            let count = p.batch * p.n_heads * mine.len();
            let (mut o, mut lse) = (vec![T::ZERO; count * p.d_v], vec![T::ZERO; count]);
            let tensor = TensorMut::bhnd(&mut o, [p.batch, p.n_heads, mine.len(), p.d_v])?;
            let out = Out::with_lse(tensor, &mut lse);
            let done = plan.attend_stand_ins(T::tensor(queries), &stand_ins, &mut T::output(out), ws)?;
            rows.merge(at..at + mine.len(), &o, &lse, mine.len(), ws);
            info = info.merge(done);
        }
        if p.mask == Mask::Causal {
            let (k, v) = (k.rows(at..at + mine.len()), v.rows(at..at + mine.len()));
            let own = at..at + mine.len();
            let done = rectangle(&mut rows, own, p, method, options, queries, k, v, None, ws)?;
            info = info.merge(done);
        }
    }
    // Rows are empty where no part saw a key, not where one part did not.
    info.empty_rows = rows.clear_empty();
    Ok(rows.answer(method.claims.lse, info))
}
