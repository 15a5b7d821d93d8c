//! NVRTC through its C interface, loaded from a path or by name.

use crate::{Error, Result};
use libloading::Library;
use std::ffi::{CString, c_char, c_void};
use std::path::{Path, PathBuf};

type Program = *mut c_void;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> i32;
type Length = unsafe extern "C" fn(Program, *mut usize) -> i32;

/// The library and its functions.
#[derive(Debug)]
pub(crate) struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        i32,
        *const c_void,
        *const c_void,
    ) -> i32,
    compile: unsafe extern "C" fn(Program, i32, *const *const c_char) -> i32,
    log_len: Length,
    log: Text,
    cubin_len: Length,
    cubin: Text,
    destroy: unsafe extern "C" fn(*mut Program) -> i32,
    pub(crate) version: (i32, i32),
    _libraries: Vec<Library>,
}

impl Nvrtc {
    /// Loads it from `path`, a file or its folder, or by its name.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self> {
        let mut looked_for = Vec::new();
        let mut names: Vec<PathBuf> = Vec::new();
        match path {
            Some(p) if p.is_dir() => names.push(p.join("libnvrtc.so.13")),
            Some(p) => names.push(p.into()),
            None => {
                names.extend(["libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.13"].map(PathBuf::from))
            }
        }
        for name in names {
            // The library of built-in functions is in the same folder, and NVRTC loads it only by name.
            let beside = name.parent().filter(|d| d.is_dir()).and_then(|d| std::fs::read_dir(d).ok());
            let mut libraries: Vec<Library> = beside
                .into_iter()
                .flatten()
                .filter_map(|e| e.ok())
                .filter(|e| {
                    let name = e.file_name();
                    let name = name.to_string_lossy();
                    name.starts_with("libnvrtc-builtins.so") && !name.contains(".alt.")
                })
                // SAFETY: a library of data and functions without initialisers.
                .filter_map(|e| unsafe { Library::new(e.path()) }.ok())
                .collect();
            // SAFETY: NVRTC's initialisers have no preconditions.
            match unsafe { Library::new(&name) } {
                Ok(library) => {
                    libraries.push(library);
                    // SAFETY: the symbols have had these signatures since CUDA 11.
                    let bound = unsafe { Self::bind(libraries) };
                    return bound.map_err(|e| Error::NoCompiler {
                        looked_for: vec![format!("{}: {e}", name.display())],
                    });
                }
                Err(_) => looked_for.push(name.display().to_string()),
            }
        }
        Err(Error::NoCompiler { looked_for })
    }

    /// # Safety
    /// The last library is NVRTC.
    unsafe fn bind(libraries: Vec<Library>) -> std::result::Result<Self, libloading::Error> {
        let Some(l) = libraries.last() else { unreachable!("the caller pushes NVRTC") };
        // SAFETY: of the caller.
        unsafe {
            let version: unsafe extern "C" fn(*mut i32, *mut i32) -> i32 = *l.get(b"nvrtcVersion\0")?;
            let (mut major, mut minor) = (0, 0);
            version(&mut major, &mut minor);
            Ok(Self {
                create: *l.get(b"nvrtcCreateProgram\0")?,
                compile: *l.get(b"nvrtcCompileProgram\0")?,
                log_len: *l.get(b"nvrtcGetProgramLogSize\0")?,
                log: *l.get(b"nvrtcGetProgramLog\0")?,
                cubin_len: *l.get(b"nvrtcGetCUBINSize\0")?,
                cubin: *l.get(b"nvrtcGetCUBIN\0")?,
                destroy: *l.get(b"nvrtcDestroyProgram\0")?,
                version: (major, minor),
                _libraries: libraries,
            })
        }
    }

    /// Compiles to a cubin; returns it with the log.
    pub(crate) fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<(Vec<u8>, String)> {
        let text = |s: &str| CString::new(s).unwrap_or_default();
        let (source, file) = (text(source), text(name));
        let options: Vec<CString> = options.iter().map(|o| text(o)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        let failed = |log: String| Error::Compile { kernel: name.into(), log };
        // SAFETY: strings end with zero and live through the call; no headers.
        let code = unsafe {
            (self.create)(&mut program, source.as_ptr(), file.as_ptr(), 0, std::ptr::null(), std::ptr::null())
        };
        if code != 0 {
            return Err(failed(format!("nvrtcCreateProgram gave {code}")));
        }
        // SAFETY: the program is alive; the array has the given number of strings.
        let code = unsafe { (self.compile)(program, pointers.len() as i32, pointers.as_ptr()) };
        let log = self.fetch(program, self.log_len, self.log);
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string();
        let cubin = if code == 0 { self.fetch(program, self.cubin_len, self.cubin) } else { Vec::new() };
        // SAFETY: created above.
        unsafe { (self.destroy)(&mut program) };
        if code != 0 || cubin.is_empty() {
            return Err(failed(log));
        }
        Ok((cubin, log))
    }

    fn fetch(&self, program: Program, length: Length, text: Text) -> Vec<u8> {
        let mut n = 0;
        // SAFETY: the program is alive; one number is written.
        if unsafe { length(program, &mut n) } != 0 {
            return Vec::new();
        }
        let mut out = vec![0u8; n];
        // SAFETY: the buffer has the length that was just given.
        if n > 0 && unsafe { text(program, out.as_mut_ptr().cast()) } != 0 {
            return Vec::new();
        }
        out
    }
}
