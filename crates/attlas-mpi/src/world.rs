//! The processes of `mpirun`.

use crate::transport::{COUNTERS, Traffic, Transport};
use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{AsRaw, Communicator};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::time::Instant;

/// Most bytes of one message: counts of MPI have 31 bits.
const MESSAGE: usize = 1 << 30;
/// Messages of a schedule, and reports to process 0.
const TAG: c_int = 1;
const REPORT: c_int = 2;
/// Bytes of one piece of a report: few enough to be sent immediately, even if process 0 is busy.
const PIECE: usize = 3072;

/// All processes that `mpirun` started. Errors of MPI end all of them, which is MPI's default.
pub struct World {
    comm: SimpleCommunicator,
    window: ffi::MPI_Win,
    traffic: RefCell<Traffic>,
    /// Pieces of reports being sent, with their requests.
    sent: RefCell<Vec<(Vec<u8>, ffi::MPI_Request)>>,
    /// Incomplete reports, by process.
    parts: RefCell<BTreeMap<i32, Vec<u8>>>,
    /// Dropped last: ends MPI.
    _universe: Universe,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "World({} of {})", self.rank(), self.size())
    }
}

impl World {
    /// Joins the processes of `mpirun`; `None` if MPI was joined before. Call it on the main thread, which then makes
    /// all calls of MPI.
    #[allow(unsafe_code)]
    pub fn join() -> Option<Self> {
        let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Funneled)?;
        let comm = universe.world();
        let bytes = if comm.rank() == 0 { COUNTERS * size_of::<u64>() } else { 0 };
        let mut base: *mut u64 = std::ptr::null_mut();
        // SAFETY: a null window is a value like any other, and is written below.
        let mut window = unsafe { ffi::RSMPI_WIN_NULL };
        // SAFETY: every process calls this once, with places for the results; process 0 gets memory for its counters,
        // which nobody reads before the barrier below.
        unsafe {
            ffi::MPI_Win_allocate(
                bytes as ffi::MPI_Aint,
                size_of::<u64>() as c_int,
                ffi::RSMPI_INFO_NULL,
                comm.as_raw(),
                (&raw mut base).cast::<c_void>(),
                &raw mut window,
            );
            if comm.rank() == 0 {
                std::slice::from_raw_parts_mut(base, COUNTERS).fill(0);
            }
            ffi::MPI_Barrier(comm.as_raw());
        }
        let (traffic, sent, parts) = (RefCell::default(), RefCell::default(), RefCell::default());
        Some(Self { comm, window, traffic, sent, parts, _universe: universe })
    }

    /// Ends all processes at once.
    pub fn abort(&self, code: i32) -> ! {
        self.comm.abort(code)
    }

    fn count(&self, bytes: usize) {
        let mut traffic = self.traffic.borrow_mut();
        traffic.bytes += bytes as u64;
        traffic.messages += 1;
    }

    /// Begins to send and receive; returns the requests of all messages.
    #[allow(unsafe_code)]
    fn begin(&self, to: Option<(usize, &[u8])>, from: Option<(usize, &mut [u8])>) -> Vec<ffi::MPI_Request> {
        let comm = self.comm.as_raw();
        let mut requests = Vec::new();
        if let Some((from, bytes)) = from {
            for part in chunks_mut(bytes) {
                // SAFETY: as below.
                let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
                let (ptr, len) = (part.as_mut_ptr().cast::<c_void>(), part.len() as c_int);
                // SAFETY: `part` is valid for that many bytes, and callers wait for the request before they give it up.
                unsafe {
                    ffi::MPI_Irecv(ptr, len, ffi::RSMPI_UINT8_T, from as c_int, TAG, comm, &raw mut request);
                }
                requests.push(request);
            }
        }
        if let Some((to, bytes)) = to {
            for part in chunks(bytes) {
                // SAFETY: as below.
                let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
                let (ptr, len) = (part.as_ptr().cast::<c_void>(), part.len() as c_int);
                // SAFETY: `part` is valid for that many bytes, and callers wait for the request before they give it up.
                unsafe {
                    ffi::MPI_Isend(ptr, len, ffi::RSMPI_UINT8_T, to as c_int, TAG, comm, &raw mut request);
                }
                requests.push(request);
            }
            self.count(bytes.len());
        }
        requests
    }

    /// Waits for all requests.
    #[allow(unsafe_code)]
    fn end(&self, mut requests: Vec<ffi::MPI_Request>) {
        let begun = Instant::now();
        let len = requests.len() as c_int;
        // SAFETY: the requests were begun by this process and are each waited for once.
        unsafe {
            ffi::MPI_Waitall(len, requests.as_mut_ptr(), ffi::RSMPI_STATUSES_IGNORE);
        }
        self.traffic.borrow_mut().waited += begun.elapsed().as_secs_f64();
    }
}

fn chunks(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    // An empty message is a message, too.
    let count = bytes.len().div_ceil(MESSAGE).max(1);
    (0..count).map(move |i| &bytes[i * MESSAGE..bytes.len().min((i + 1) * MESSAGE)])
}

fn chunks_mut(bytes: &mut [u8]) -> Vec<&mut [u8]> {
    if bytes.is_empty() { vec![bytes] } else { bytes.chunks_mut(MESSAGE).collect() }
}

impl Transport for World {
    fn rank(&self) -> usize {
        self.comm.rank() as usize
    }

    fn size(&self) -> usize {
        self.comm.size() as usize
    }

    fn node(&self) -> String {
        mpi::environment::processor_name().unwrap_or_else(|_| "unknown".into())
    }

    #[allow(unsafe_code)]
    fn exchange(
        &self,
        to: usize,
        send: &[u8],
        from: usize,
        recv: &mut [u8],
        meanwhile: &mut dyn FnMut(&dyn Fn()),
    ) {
        let requests = self.begin(Some((to, send)), Some((from, recv)));
        let comm = self.comm.as_raw();
        // Any call of MPI advances messages.
        let progress = || {
            let mut found: c_int = 0;
            // SAFETY: only tests if a message with this tag has arrived, and accesses nothing else.
            unsafe {
                ffi::MPI_Iprobe(0, REPORT, comm, &raw mut found, ffi::RSMPI_STATUS_IGNORE);
            }
        };
        meanwhile(&progress);
        self.end(requests);
    }

    fn send(&self, to: usize, bytes: &[u8]) {
        let requests = self.begin(Some((to, bytes)), None);
        self.end(requests);
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) {
        let requests = self.begin(None, Some((from, bytes)));
        self.end(requests);
    }

    #[allow(unsafe_code)]
    fn fetch_add(&self, counter: usize) -> u64 {
        let (one, mut before): (u64, u64) = (1, 0);
        // SAFETY: the window holds that many counters on process 0, and both numbers live until the window is unlocked.
        unsafe {
            ffi::MPI_Win_lock(ffi::MPI_LOCK_SHARED as c_int, 0, 0, self.window);
            ffi::MPI_Fetch_and_op(
                (&raw const one).cast::<c_void>(),
                (&raw mut before).cast::<c_void>(),
                ffi::RSMPI_UINT64_T,
                0,
                (counter % COUNTERS) as ffi::MPI_Aint,
                ffi::RSMPI_SUM,
                self.window,
            );
            ffi::MPI_Win_unlock(0, self.window);
        }
        before
    }

    #[allow(unsafe_code)]
    fn reset(&self, counter: usize) {
        let zero: u64 = 0;
        // SAFETY: the window holds that many counters on process 0, and the number lives until the window is unlocked.
        unsafe {
            ffi::MPI_Win_lock(ffi::MPI_LOCK_EXCLUSIVE as c_int, 0, 0, self.window);
            ffi::MPI_Put(
                (&raw const zero).cast::<c_void>(),
                1,
                ffi::RSMPI_UINT64_T,
                0,
                (counter % COUNTERS) as ffi::MPI_Aint,
                1,
                ffi::RSMPI_UINT64_T,
                self.window,
            );
            ffi::MPI_Win_unlock(0, self.window);
        }
    }

    #[allow(unsafe_code)]
    fn report(&self, bytes: &[u8]) {
        let mut sent = self.sent.borrow_mut();
        sent.retain_mut(|(_, request)| {
            let mut done: c_int = 0;
            // SAFETY: the request was begun by this process; once it is done its bytes may go.
            unsafe {
                ffi::MPI_Test(request, &raw mut done, ffi::RSMPI_STATUS_IGNORE);
            }
            done == 0
        });
        let pieces: Vec<&[u8]> = if bytes.is_empty() { vec![bytes] } else { bytes.chunks(PIECE).collect() };
        for (i, piece) in pieces.iter().enumerate() {
            // The first byte is 1 if more pieces follow.
            let mut message = vec![u8::from(i + 1 < pieces.len())];
            message.extend_from_slice(piece);
            // SAFETY: as below.
            let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
            // SAFETY: the bytes are kept beside the request until it is done, for which the world waits at its end.
            unsafe {
                ffi::MPI_Isend(
                    message.as_ptr().cast::<c_void>(),
                    message.len() as c_int,
                    ffi::RSMPI_UINT8_T,
                    0,
                    REPORT,
                    self.comm.as_raw(),
                    &raw mut request,
                );
            }
            sent.push((message, request));
        }
        self.count(bytes.len());
    }

    fn arrived(&self) -> Vec<Vec<u8>> {
        use mpi::point_to_point::{MatchedReceiveVec, Source};
        let (mut all, mut parts) = (Vec::new(), self.parts.borrow_mut());
        // Pieces of one process arrive in order.
        while let Some(message) = self.comm.any_process().immediate_matched_probe_with_tag(REPORT) {
            let (piece, status) = message.matched_receive_vec::<u8>();
            let from = status.source_rank();
            let Some((more, bytes)) = piece.split_first() else { continue };
            parts.entry(from).or_default().extend_from_slice(bytes);
            if *more == 0 {
                all.push(parts.remove(&from).unwrap_or_default());
            }
        }
        all
    }

    fn traffic(&self) -> Traffic {
        *self.traffic.borrow()
    }

    #[allow(unsafe_code)]
    fn barrier(&self) {
        // SAFETY: every process calls it.
        unsafe {
            ffi::MPI_Barrier(self.comm.as_raw());
        }
    }
}

impl Drop for World {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        for (_bytes, mut request) in self.sent.borrow_mut().drain(..) {
            // SAFETY: the request was begun by this process and is waited for once, before its bytes are dropped.
            unsafe {
                ffi::MPI_Wait(&raw mut request, ffi::RSMPI_STATUS_IGNORE);
            }
        }
        // SAFETY: every process drops its world at the end, and nobody uses the window after.
        unsafe {
            ffi::MPI_Win_free(&raw mut self.window);
        }
    }
}
