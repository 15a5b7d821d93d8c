//! Safe wrappers of the driver: context, modules, launches, memory, streams, events, graphs and tensor maps.
//!
//! `cudarc` panics if the driver's library is missing: its presence is checked once before the first call.

use crate::{Error, Result};
use cudarc::driver::{result, sys};
use std::ffi::{CString, c_void};
use std::sync::{Arc, OnceLock};

/// Oldest CUDA version that the driver must support.
const NEEDED: i32 = 13_000;

/// Fails if there is no driver, or if it is too old.
pub(crate) fn presence() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            // SAFETY: the driver's library has no initialiser with preconditions.
            let library = unsafe { libloading::Library::new("libcuda.so.1") }
                .map_err(|e| Error::NoDriver { reason: e.to_string() })?;
            type Version = unsafe extern "C" fn(*mut i32) -> u32;
            // SAFETY: `cuDriverGetVersion` has had this signature since CUDA 2.2.
            let version = unsafe { library.get::<Version>(b"cuDriverGetVersion\0") }
                .map_err(|e| Error::NoDriver { reason: e.to_string() })?;
            let mut have = 0;
            // SAFETY: it writes one integer.
            let code = unsafe { version(&mut have) };
            if code != 0 {
                return Err(Error::Driver { call: "cuDriverGetVersion", code, text: "failed".into() });
            }
            if have < NEEDED {
                return Err(Error::OldDriver { have, need: NEEDED });
            }
            result::init().map_err(|e| driver_error("cuInit", e))
        })
        .clone()
}

fn driver_error(call: &'static str, e: result::DriverError) -> Error {
    let text = e.error_string().map(|s| s.to_string_lossy().into_owned());
    Error::Driver { call, code: e.0 as u32, text: text.unwrap_or_else(|_| "unknown".into()) }
}

fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    code.result().map_err(|e| driver_error(call, e))
}

/// Returns the number of GPUs that the driver sees; 0 without a driver.
pub(crate) fn count() -> usize {
    if presence().is_err() {
        return 0;
    }
    result::device::get_count().map_or(0, |n| n.max(0) as usize)
}

/// Properties of a GPU, from the driver.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) name: String,
    pub(crate) capability: (i32, i32),
    pub(crate) multiprocessors: usize,
    pub(crate) memory: usize,
    pub(crate) clock_khz: usize,
    pub(crate) memory_clock_khz: usize,
    pub(crate) bus_bits: usize,
    pub(crate) driver: i32,
}

/// The primary context of a GPU, which other libraries of the process share.
#[derive(Debug)]
pub(crate) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
}

// SAFETY: a context may be made current on any thread; the driver does its own locking.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn open(ordinal: usize) -> Result<(Arc<Self>, Facts)> {
        presence()?;
        let count = count();
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let device = result::device::get(ordinal as i32).map_err(|e| driver_error("cuDeviceGet", e))?;
        use sys::CUdevice_attribute_enum as A;
        // SAFETY: the device exists, as checked above.
        let number = |a| unsafe { result::device::get_attribute(device, a) }.unwrap_or(0);
        let mut driver = 0;
        // SAFETY: writes one integer.
        let _ = unsafe { sys::cuDriverGetVersion(&mut driver) };
        let facts = Facts {
            name: result::device::get_name(device).unwrap_or_else(|_| "GPU".into()),
            capability: (
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            multiprocessors: number(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).max(0) as usize,
            // SAFETY: the device exists.
            memory: unsafe { result::device::total_mem(device) }.unwrap_or(0),
            clock_khz: number(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE).max(0) as usize,
            memory_clock_khz: number(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).max(0) as usize,
            bus_bits: number(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).max(0) as usize,
            driver,
        };
        if facts.capability < (8, 0) {
            return Err(Error::OldDevice { name: facts.name, capability: facts.capability });
        }
        // SAFETY: the device exists; the context is released on drop.
        let raw = unsafe { result::primary_ctx::retain(device) }
            .map_err(|e| driver_error("cuDevicePrimaryCtxRetain", e))?;
        Ok((Arc::new(Self { raw, device }), facts))
    }

    /// Makes the context current on this thread.
    pub(crate) fn bind(&self) -> Result<()> {
        // SAFETY: the context is alive as long as `self`.
        unsafe { result::ctx::set_current(self.raw) }.map_err(|e| driver_error("cuCtxSetCurrent", e))
    }

    pub(crate) fn free_bytes(&self) -> usize {
        self.bind().ok().and_then(|()| result::mem_get_info().ok()).map_or(0, |(free, _)| free)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Memory of the device.
#[derive(Debug)]
pub(crate) struct Memory {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl Memory {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.bind()?;
        // SAFETY: a positive number of bytes; freed on drop.
        match unsafe { result::malloc_sync(bytes.max(256)) } {
            Ok(address) => Ok(Self { context: context.clone(), address, bytes }),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(Error::OutOfMemory { asked: bytes, free: context.free_bytes() })
            }
            Err(e) => Err(driver_error("cuMemAlloc", e)),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies from the host, and waits for the copy.
    pub(crate) fn write(&self, at: usize, data: &[u8]) -> Result<()> {
        if at + data.len() > self.bytes {
            return Err(attlas::Error::shape("device buffer", self.bytes, at + data.len()).into());
        }
        if data.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the range was checked against the allocation.
        unsafe { result::memcpy_htod_sync(self.address + at as u64, data) }
            .map_err(|e| driver_error("cuMemcpyHtoD", e))?;
        finish_default_stream()
    }

    /// Copies to the host after all work of the device.
    pub(crate) fn read(&self, at: usize, data: &mut [u8]) -> Result<()> {
        if at + data.len() > self.bytes {
            return Err(attlas::Error::shape("device buffer", self.bytes, at + data.len()).into());
        }
        if data.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        result::ctx::synchronize().map_err(|e| driver_error("cuCtxSynchronize", e))?;
        // SAFETY: the range was checked against the allocation.
        unsafe { result::memcpy_dtoh_sync(data, self.address + at as u64) }
            .map_err(|e| driver_error("cuMemcpyDtoH", e))
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, byte: u8) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the whole allocation.
        unsafe { result::memset_d8_sync(self.address, byte, self.bytes) }
            .map_err(|e| driver_error("cuMemsetD8", e))?;
        finish_default_stream()
    }

    /// Copies bytes of another buffer, in order with the work of `stream`.
    pub(crate) fn copy_range(
        &self,
        from: &Memory,
        at: u64,
        to: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        if at as usize + bytes > from.bytes || to as usize + bytes > self.bytes {
            return Err(attlas::Error::shape("device buffer", self.bytes, to as usize + bytes).into());
        }
        self.context.bind()?;
        // SAFETY: both ranges were checked against their allocations.
        unsafe { result::memcpy_dtod_async(self.address + to, from.address + at, bytes, stream.raw) }
            .map_err(|e| driver_error("cuMemcpyDtoDAsync", e))
    }
}

/// Waits for the default stream. Copies of pageable memory return once it is staged, and fills return at once, before
/// the device has the bytes. Our streams do not wait for the default one: without this, a kernel could read old data.
fn finish_default_stream() -> Result<()> {
    // SAFETY: null names the default stream, which every context has.
    unsafe { result::stream::synchronize(std::ptr::null_mut()) }
        .map_err(|e| driver_error("cuStreamSynchronize", e))
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`; `cuMemFree` waits for work that uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// A stream, our own or of another library.
#[derive(Debug)]
pub(crate) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    owned: bool,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        context.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|e| driver_error("cuStreamCreate", e))?;
        Ok(Self { context: context.clone(), raw, owned: true })
    }

    /// # Safety
    /// `raw` belongs to the context and outlives the value.
    pub(crate) unsafe fn foreign(context: &Arc<Context>, raw: *mut c_void) -> Self {
        Self { context: context.clone(), raw: raw.cast(), owned: false }
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.raw) }.map_err(|e| driver_error("cuStreamSynchronize", e))
    }

    /// Records the work that `work` puts on the stream, instead of running it.
    pub(crate) fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.context.bind()?;
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not capturing.
        unsafe { result::stream::begin_capture(self.raw, mode) }
            .map_err(|e| driver_error("cuStreamBeginCapture", e))?;
        let done = work();
        // SAFETY: capturing was begun above.
        let graph = unsafe { result::stream::end_capture(self.raw) }
            .map_err(|e| driver_error("cuStreamEndCapture", e))?;
        done?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph was just captured; the executable one does not need it any more.
        let made =
            check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) });
        // SAFETY: as above.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        made?;
        Ok(Graph { context: self.context.clone(), exec })
    }

    pub(crate) fn replay(&self, graph: &Graph) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both are alive and of one context.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.exec, self.raw) })
    }

    pub(crate) fn record(&self) -> Result<Event> {
        self.context.bind()?;
        let raw = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|e| driver_error("cuEventCreate", e))?;
        let event = Event { context: self.context.clone(), raw };
        // SAFETY: both are alive.
        unsafe { result::event::record(raw, self.raw) }.map_err(|e| driver_error("cuEventRecord", e))?;
        Ok(event)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned && self.context.bind().is_ok() {
            // SAFETY: created in `new`; work on it still completes.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// A point in the work of a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// Returns the milliseconds from `earlier` to this event, after waiting for both.
    pub fn milliseconds_since(&self, earlier: &Event) -> Result<f32> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.map_err(|e| driver_error("cuEventSynchronize", e))?;
        // SAFETY: both are alive and recorded.
        unsafe { result::event::elapsed(earlier.raw, self.raw) }
            .map_err(|e| driver_error("cuEventElapsedTime", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created in `record`.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

/// Recorded work that can be launched on a stream at once.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    exec: sys::CUgraphExec,
}

// SAFETY: graphs may be launched from any thread, one at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: instantiated in `capture`.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// A loaded cubin.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub(crate) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self> {
        context.bind()?;
        // SAFETY: the driver checks the image; it is an ELF file, whose header states its length.
        let raw = unsafe { result::module::load_data(image.as_ptr().cast()) }
            .map_err(|e| driver_error("cuModuleLoadData", e))?;
        Ok(Self { context: context.clone(), raw })
    }

    /// A kernel that may use `shared` bytes of dynamic shared memory.
    pub(crate) fn kernel(self: &Arc<Self>, name: &str, shared: usize) -> Result<Kernel> {
        self.context.bind()?;
        let c_name = CString::new(name).unwrap_or_default();
        // SAFETY: the module is alive.
        let raw = unsafe { result::module::get_function(self.raw, c_name) }
            .map_err(|e| driver_error("cuModuleGetFunction", e))?;
        // Up to 48 KiB, including static shared memory, need no attribute.
        if shared > 32 << 10 {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is alive.
            unsafe { result::function::set_function_attribute(raw, attribute, shared as i32) }
                .map_err(|e| driver_error("cuFuncSetAttribute", e))?;
        }
        Ok(Kernel { module: self.clone(), raw, shared })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: loaded in `load`; no kernel of it is left.
            let _ = unsafe { result::module::unload(self.raw) };
        }
    }
}

/// A kernel with its shared memory.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    module: Arc<Module>,
    raw: sys::CUfunction,
    pub(crate) shared: usize,
}

// SAFETY: functions may be launched from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// A tensor argument of kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct View {
    pub(crate) address: u64,
    /// Elements between neighbours along batch, head and row.
    pub(crate) strides: [i64; 3],
}

/// A sizes argument of kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sizes {
    pub(crate) heads: i32,
    pub(crate) group: i32,
    pub(crate) nq: i32,
    pub(crate) nk: i32,
    pub(crate) d: i32,
    pub(crate) dv: i32,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    Address(u64),
    Int(i32),
    Long(i64),
    Float(f32),
    Double(f64),
    View(View),
    Sizes(Sizes),
    Map(&'a TensorMap),
}

impl Arg<'_> {
    fn pointer(&self) -> *mut c_void {
        match self {
            Arg::Address(x) => (&raw const *x) as *mut c_void,
            Arg::Int(x) => (&raw const *x) as *mut c_void,
            Arg::Long(x) => (&raw const *x) as *mut c_void,
            Arg::Float(x) => (&raw const *x) as *mut c_void,
            Arg::Double(x) => (&raw const *x) as *mut c_void,
            Arg::View(x) => (&raw const *x) as *mut c_void,
            Arg::Sizes(x) => (&raw const *x) as *mut c_void,
            Arg::Map(x) => (&raw const **x) as *mut c_void,
        }
    }
}

impl Kernel {
    /// Puts a launch on the stream. The arguments must match the kernel's signature; every caller in `prims` has the
    /// kernel's source beside it.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        grid: [usize; 3],
        threads: usize,
        shared: usize,
        args: &[Arg<'_>],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        if grid[0] > i32::MAX as usize || grid[1] > 65535 || grid[2] > 65535 {
            return Err(attlas::Error::TooLarge { what: "grid of a kernel", sizes: grid.to_vec() }.into());
        }
        self.module.context.bind()?;
        let mut pointers: Vec<*mut c_void> = args.iter().map(Arg::pointer).collect();
        let size = (grid[0] as u32, grid[1] as u32, grid[2] as u32);
        // SAFETY: the function is alive; the driver copies the arguments, which live until it returns.
        unsafe {
            result::launch_kernel(
                self.raw,
                size,
                (threads as u32, 1, 1),
                shared as u32,
                stream.raw,
                &mut pointers,
            )
        }
        .map_err(|e| driver_error("cuLaunchKernel", e))
    }
}

/// Descriptor for the copy engine.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap(sys::CUtensorMap);

impl std::fmt::Debug for TensorMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TensorMap")
    }
}

impl TensorMap {
    /// Describes boxes of 64 columns and `rows` rows of a tensor of 16-bit elements, with the 128-byte swizzle. `dims`
    /// are columns, rows, heads and batch; `strides` are those of the last three, in elements.
    pub(crate) fn new(
        half: bool,
        address: u64,
        dims: [u64; 4],
        strides: [u64; 3],
        rows: u32,
    ) -> Result<Self> {
        use sys::CUtensorMapDataType_enum as T;
        let kind =
            if half { T::CU_TENSOR_MAP_DATA_TYPE_FLOAT16 } else { T::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
        // SAFETY: plain memory that the call below fills.
        let mut map = Self(unsafe { std::mem::zeroed() });
        let (bytes, boxed, step) = (strides.map(|s| 2 * s), [64, rows, 1, 1], [1u32; 4]);
        // SAFETY: all arrays have the length of the rank; the map is aligned to 64 bytes.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                kind,
                4,
                address as *mut c_void,
                dims.as_ptr(),
                bytes.as_ptr(),
                boxed.as_ptr(),
                step.as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", code)?;
        Ok(map)
    }
}
