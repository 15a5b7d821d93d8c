//! A stream and scratch memory.

use crate::driver::{Event, Graph, Memory, Stream};
use crate::{Device, Result};
use std::ffi::c_void;
use std::sync::Arc;

/// Pieces of scratch memory start at multiples of this.
const ALIGN: usize = 256;

/// A stream and scratch memory on the device; owned by the caller, reused from call to call.
#[derive(Debug)]
pub struct DeviceWorkspace {
    device: Device,
    stream: Arc<Stream>,
    arena: Option<Memory>,
    used: usize,
    poison: bool,
}

impl DeviceWorkspace {
    /// With a stream of its own.
    pub fn new(device: &Device) -> Result<Self> {
        let stream = Arc::new(Stream::new(device.context())?);
        Ok(Self { device: device.clone(), stream, arena: None, used: 0, poison: false })
    }

    /// On a stream of another library, such as the current one of torch.
    ///
    /// # Safety
    /// `stream` belongs to the device's primary context and outlives the workspace.
    #[allow(unsafe_code)]
    pub unsafe fn on_stream(device: &Device, stream: *mut c_void) -> Result<Self> {
        // SAFETY: of the caller.
        let stream = Arc::new(unsafe { Stream::foreign(device.context(), stream) });
        Ok(Self { device: device.clone(), stream, arena: None, used: 0, poison: false })
    }

    /// Makes room for plans that need `bytes` of scratch memory.
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        if self.arena.as_ref().is_none_or(|a| a.bytes() < bytes) {
            self.stream.synchronize()?;
            self.arena = None;
            self.arena = Some(Memory::new(self.device.context(), bytes)?);
        }
        if self.poison
            && let Some(arena) = &self.arena
        {
            self.stream.synchronize()?;
            arena.fill(255)?;
        }
        Ok(())
    }

    /// Fills scratch memory with NaN before every run: for tests.
    pub fn poison(&mut self) {
        self.poison = true;
    }

    /// Waits for all work of the stream.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Records what `work` puts on the stream, to be replayed.
    pub fn capture(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Graph> {
        let stream = self.stream.clone();
        stream.capture(|| work(self))
    }

    /// Puts recorded work on the stream.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        self.stream.replay(graph)
    }

    /// A point in the work of the stream.
    pub fn event(&self) -> Result<Event> {
        self.stream.record()
    }

    pub(crate) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Gives back everything that was taken.
    pub(crate) fn reset(&mut self) {
        self.used = 0;
    }

    /// Bytes taken so far, to be passed to `rewind`.
    pub(crate) fn mark(&self) -> usize {
        self.used
    }

    /// Gives back what was taken after `mark`. Work on one stream runs in order, so the memory can be taken again at once.
    pub(crate) fn rewind(&mut self, mark: usize) {
        self.used = mark;
    }

    /// The address of `bytes` of scratch memory, which `reserve` has made room for.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<u64> {
        let (at, room) = (self.used, self.arena.as_ref().map_or(0, Memory::bytes));
        let end = at + padded(bytes);
        if end > room {
            return Err(attlas::Error::shape("device workspace", format!("{end} bytes"), room).into());
        }
        self.used = end;
        Ok(self.arena.as_ref().map_or(0, Memory::address) + at as u64)
    }
}

/// Arena bytes that an allocation of `bytes` occupies.
pub(crate) fn padded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(ALIGN)
}
