//! Attention inside a model whose tokens are divided among several processes.

use crate::attend::{Parts, attend, block};
use crate::{Layout, Sharded, Transport, Wire};
use attlas::{Error, Result, Workspace};
use attlas_model::decoder::{SpreadAttention, SpreadCall, SpreadRows};
use attlas_model::recipe::Attending;
use std::ops::Range;

/// The processes of a transport, each with its stripes of one sequence.
#[derive(Debug)]
pub struct SpreadModel<'a> {
    transport: &'a dyn Transport,
    layout: Layout,
}

impl<'a> SpreadModel<'a> {
    /// Uses all processes of `transport`.
    pub fn new(transport: &'a dyn Transport) -> Self {
        Self { transport, layout: Layout::contiguous(0, transport.size()) }
    }
}

impl SpreadAttention for SpreadModel<'_> {
    fn pieces(&mut self, tokens: usize, attending: &[Attending]) -> Vec<Range<usize>> {
        let blocks = attending.iter().map(|a| block(a.method, &a.options).max(1));
        // One layout for all layers, which divides no block of any method.
        let align = blocks.fold(1, |all, block| if all % block == 0 { all } else { lcm(all, block) });
        self.layout = Layout::striped(tokens, self.transport.size(), align);
        self.layout.pieces(self.transport.rank())
    }

    fn attend(&mut self, call: &SpreadCall<'_>, ws: &mut Workspace) -> Result<SpreadRows> {
        let Attending { method, options, calibration } = call.attending;
        if calibration.is_some() {
            let reasons = vec!["calibrations are not sent to other processes".to_owned()];
            return Err(Error::Unsupported { method: method.id.into(), reasons });
        }
        let rank = self.transport.rank();
        let part = |x| Sharded::of_rows(x, self.layout, rank);
        let (q, k, v) = (part(call.x.q)?, part(call.x.k)?, part(call.x.v)?);
        let parts = Parts { q: &q, k: &k, v: &v, key_lens: None };
        let answer = attend(self.transport, call.problem, method, options, &parts, Wire::Full, ws)?;
        Ok((answer.o, answer.lse, answer.info))
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}
