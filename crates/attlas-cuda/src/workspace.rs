//! A stream and scratch memory.

use crate::driver::{Event, Graph, Memory, Stream};
use crate::{Device, Result};
use std::ffi::c_void;
use std::sync::Arc;

/// Alignment of pieces of scratch memory.
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
    /// Creates a workspace with its own stream.
    pub fn new(device: &Device) -> Result<Self> {
        let stream = Arc::new(Stream::new(device.context())?);
        Ok(Self { device: device.clone(), stream, arena: None, used: 0, poison: false })
    }

    /// Creates a workspace on a stream of another library, such as the current one of torch.
    ///
    /// # Safety
    /// `stream` belongs to the device's primary context and outlives the workspace.
    #[allow(unsafe_code)]
    pub unsafe fn on_stream(device: &Device, stream: *mut c_void) -> Result<Self> {
        // SAFETY: of the caller.
        let stream = Arc::new(unsafe { Stream::foreign(device.context(), stream) });
        Ok(Self { device: device.clone(), stream, arena: None, used: 0, poison: false })
    }

    /// Reserves `bytes` of scratch memory for plans.
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

    /// Records the work that `work` puts on the stream, for [`replay`](Self::replay).
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

    /// Frees all scratch memory taken.
    pub(crate) fn reset(&mut self) {
        self.used = 0;
    }

    /// Returns the bytes taken so far, for `rewind`.
    pub(crate) fn mark(&self) -> usize {
        self.used
    }

    /// Frees the scratch memory taken after `mark`. Work on one stream runs in order: the memory can be reused at once.
    pub(crate) fn rewind(&mut self, mark: usize) {
        self.used = mark;
    }

    /// Takes `bytes` of reserved scratch memory and returns the address.
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

/// Returns the arena bytes of an allocation of `bytes`.
pub(crate) fn padded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(ALIGN)
}
