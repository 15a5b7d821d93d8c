//! Programs: sources with the constants of a shape, compiled to cubins and cached in a folder.

use crate::nvrtc::Nvrtc;
use crate::{Element, Error, Result};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Chips for which every kernel is compiled, by their NVRTC names; Hopper's own kernels are only for `sm_90a`.
pub const CHIPS: &[&str] = &["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"];

/// Returns NVRTC's name of a compute capability.
pub(crate) fn chip(capability: (i32, i32)) -> String {
    match capability {
        (9, 0) => "sm_90a".into(),
        (major, minor) => format!("sm_{major}{minor}"),
    }
}

/// A source with its constants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// Name for messages.
    pub name: &'static str,
    /// Sources, concatenated in this order.
    pub sources: Vec<&'static str>,
    /// Constants.
    pub constants: Vec<(&'static str, i64)>,
    /// Columns of both products of a warpgroup, for programs that use them: keys per tile, and the width of values.
    pub products: Option<(usize, usize)>,
    /// True if it runs only on Hopper.
    pub hopper: bool,
}

impl Program {
    pub(crate) fn new(name: &'static str, element: Element, sources: &[&'static str]) -> Self {
        let code = match element {
            Element::Bf16 => 0,
            Element::F16 => 1,
            Element::F32 => 2,
            Element::F64 => 3,
        };
        Self {
            name,
            sources: sources.to_vec(),
            constants: vec![("ELEM", code)],
            products: None,
            hopper: false,
        }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl TryInto<i64>) -> Self {
        self.constants.push((name, value.try_into().unwrap_or(0)));
        self
    }

    pub(crate) fn with_products(mut self, keys: usize, width: usize) -> Self {
        self.products = Some((keys, width));
        self.hopper = true;
        self
    }

    /// Returns the whole text.
    pub fn source(&self) -> String {
        let mut text = String::new();
        for (i, source) in self.sources.iter().enumerate() {
            text.push_str(source);
            if let (0, Some((keys, width))) = (i, self.products) {
                text.push_str(&product("wg_qk", keys, false));
                text.push_str(&product("wg_pv", width, true));
            }
        }
        text
    }

    /// Returns the options of the compiler.
    pub fn options(&self, chip: &str) -> Vec<String> {
        // 177: a program does not call every function of the common sources.
        let mut options = vec![
            format!("-arch={chip}"),
            "-std=c++17".into(),
            "-default-device".into(),
            "-diag-suppress=177".into(),
        ];
        options.extend(self.constants.iter().map(|(name, value)| format!("-D{name}={value}")));
        options
    }
}

/// Returns the text of one product of a warpgroup: 64 rows by `columns`, 16 deep. Either the first operand comes from
/// registers and the second is read transposed, or both come from shared memory untransposed.
fn product(name: &str, columns: usize, from_registers: bool) -> String {
    let n = columns / 2;
    let list = |from: usize, to: usize| (from..to).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
    let (a, b, s, tail, inputs, signature) = if from_registers {
        let inputs = "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b), \"r\"(s)";
        (format!("{{{}}}", list(n, n + 4)), n + 4, n + 5, "1", inputs, "const u32* a, u64 b")
    } else {
        (format!("%{n}"), n + 1, n + 2, "0, 0", "\"l\"(a), \"l\"(b), \"r\"(s)", "u64 a, u64 b")
    };
    let outputs: Vec<String> = (0..n).map(|i| format!("\"+f\"(d[{i}])")).collect();
    let mut text = String::new();
    let _ = writeln!(
        text,
        "DEV void {name}(float* d, {signature}, int s) {{ asm volatile(\"{{.reg .pred p; setp.ne.b32 p, %{s}, 0; \
         wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.\" MMA_TYPE \".\" MMA_TYPE \" {{{}}}, {a}, %{b}, p, 1, 1, {tail};}}\" \
         : {} : {inputs}); }}",
        list(0, n),
        outputs.join(", "),
    );
    text
}

/// NVRTC with a cache folder of cubins.
#[derive(Debug)]
pub struct Compiler {
    nvrtc: Nvrtc,
    cache: Option<PathBuf>,
}

impl Compiler {
    /// Loads NVRTC from `nvrtc`, a file or folder, or by name. Cubins are cached in `cache`, if given.
    pub fn new(nvrtc: Option<&Path>, cache: Option<&Path>) -> Result<Self> {
        Ok(Self { nvrtc: Nvrtc::load(nvrtc)?, cache: cache.map(Into::into) })
    }

    /// Its version.
    pub fn version(&self) -> (i32, i32) {
        self.nvrtc.version
    }

    /// Compiles a program; returns the cubin and the compiler's log.
    pub fn compile(&self, program: &Program, chip: &str, options: &[&str]) -> Result<(Vec<u8>, String)> {
        let mut all = program.options(chip);
        all.extend(options.iter().map(|o| (*o).to_string()));
        self.nvrtc.compile(program.name, &program.source(), &all)
    }

    /// Puts the cubin of a program into the folder, if it is not there yet.
    pub fn store(&self, program: &Program, chip: &str) -> Result<()> {
        self.cubin(program, chip, false).map(|_| ())
    }

    /// Returns the cubin, from the folder if it is there; `fresh` always recompiles.
    pub(crate) fn cubin(&self, program: &Program, chip: &str, fresh: bool) -> Result<Vec<u8>> {
        let file = self.cache.as_ref().map(|folder| folder.join(self.file_name(program, chip)));
        if let (false, Some(file)) = (fresh, &file)
            && let Ok(cubin) = std::fs::read(file)
            && cubin.starts_with(b"\x7fELF")
        {
            return Ok(cubin);
        }
        let (cubin, log) = self.compile(program, chip, &[])?;
        // Serialised products of warpgroups are correct but slow: a fault of the source.
        if log.contains("C7510") || log.contains("C7512") {
            return Err(Error::Compile { kernel: program.name.into(), log });
        }
        if let Some(file) = file {
            // A cache that cannot be written costs only time.
            let _ = store(&file, &cubin);
        }
        Ok(cubin)
    }

    fn file_name(&self, program: &Program, chip: &str) -> String {
        let (major, minor) = self.nvrtc.version;
        let mut text = program.source();
        let _ = write!(text, "\0{}\0{major}.{minor}", program.options(chip).join("\0"));
        format!(
            "{}-{chip}-{:016x}{:016x}.cubin",
            program.name,
            fnv(text.as_bytes(), 0),
            fnv(text.as_bytes(), 1)
        )
    }
}

/// Writes under another name first: a reader never sees a partial file.
fn store(file: &Path, data: &[u8]) -> std::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let unfinished =
        file.with_extension(format!("{}.{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    std::fs::write(&unfinished, data)?;
    std::fs::rename(&unfinished, file)
}

/// Computes the hash of Fowler, Noll and Vo, which is stable across versions.
fn fnv(data: &[u8], seed: u64) -> u64 {
    data.iter()
        .fold(0xcbf2_9ce4_8422_2325 ^ seed, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_name_every_register_once() {
        let text = product("wg_qk", 128, false);
        assert!(text.contains("m64n128k16") && text.contains("%66, 0;") && text.contains("d[63]"));
        let text = product("wg_pv", 64, true);
        assert!(text.contains("{%32, %33, %34, %35}, %36, p, 1, 1, 1;"));
    }

    #[test]
    fn a_stored_file_is_whole_and_replaces_an_older_one() {
        let folder = std::env::temp_dir().join(format!("attlas-cuda-{}", std::process::id()));
        let file = folder.join("a.cubin");
        store(&file, b"one").unwrap();
        store(&file, b"two").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"two");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn capabilities_have_the_names_of_chips() {
        assert_eq!([(8, 0), (9, 0), (12, 0)].map(chip), ["sm_80", "sm_90a", "sm_120"]);
    }
}
