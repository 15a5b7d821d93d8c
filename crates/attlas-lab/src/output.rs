//! Files that commands write: whole or not at all, and never over anything that must not be replaced.
//!
//! A file is written under a new, random name in its folder, synced and renamed; then the folder is synced. Symbolic
//! links are followed: the file they lead to is replaced, and the link stays. Devices, pipes, folders and the command's
//! own inputs are refused. [`check`] tests all of this, and that the folder is writable, before any work is done.

use crate::{Error, Result};
use std::collections::hash_map::RandomState;
use std::fs::{File, Metadata, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Links followed before a chain counts as endless, as in the kernel.
const LINKS: usize = 40;
/// Random names that are tried.
const NAMES: usize = 16;

/// Fails if one of `outputs`, each with its flag, could not be written later: a device, a pipe, a folder, one of the
/// `inputs`, the same file as another output, or a file in a folder that is not writable.
pub fn check(outputs: &[(&str, &Path)], inputs: &[&Path]) -> Result<()> {
    let mut places: Vec<PathBuf> = Vec::new();
    for &(flag, path) in outputs {
        let place = place(path)?;
        if let Some(input) = inputs.iter().find(|input| is_input(&place, input)) {
            let found = format!("'{}', which is read ({})", path.display(), input.display());
            return Err(Error::argument(flag, "a file that is not an input", found));
        }
        if places.iter().any(|other| same_file(other, &place)) {
            let found = format!("'{}' twice", path.display());
            return Err(Error::argument(flag, "a file of its own for each output", found));
        }
        let (file, temporary) = create_beside(&place).map_err(|e| Error::writing(path, e))?;
        drop(file);
        std::fs::remove_file(&temporary).map_err(|e| Error::writing(path, e))?;
        places.push(place);
    }
    Ok(())
}

/// Writes `bytes` to the file at `path`, which is replaced as a whole.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    replace(path, bytes, false).map(drop)
}

/// Writes `bytes` and keeps the file open for appending, with a lock that other processes see from the moment of the
/// rename.
pub(crate) fn write_locked(path: &Path, bytes: &[u8]) -> Result<File> {
    replace(path, bytes, true)
}

/// Writes a figure: as PDF if the name ends in `.pdf`, otherwise as SVG.
pub fn write_figure(path: &Path, svg: &str) -> Result<()> {
    match path.extension().is_some_and(|e| e.eq_ignore_ascii_case("pdf")) {
        true => write(path, &crate::pdf::from_svg(svg)?),
        false => write(path, svg.as_bytes()),
    }
}

/// Opens an existing file and locks it against other processes; `None` if there is no file.
pub(crate) fn lock(path: &Path) -> Result<Option<File>> {
    for _ in 0..NAMES {
        let file = match OpenOptions::new().read(true).append(true).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::writing(path, e)),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(Error::argument(
                    path.display(),
                    "a file that no other process is writing; wait for it, or name another with --state",
                    "one that is being written",
                ));
            }
            // On a file system without locks the user must run one process at a time.
            Err(std::fs::TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => {}
            Err(std::fs::TryLockError::Error(e)) => return Err(Error::writing(path, e)),
        }
        // The former holder of the lock may have replaced the file meanwhile.
        let (ours, there) = (file.metadata(), std::fs::metadata(path));
        match (ours, there) {
            (Ok(ours), Ok(there)) if same(&ours, &there) => return Ok(Some(file)),
            _ => {}
        }
    }
    Err(Error::writing(path, io::Error::other("it is replaced again and again")))
}

fn replace(path: &Path, bytes: &[u8], locked: bool) -> Result<File> {
    let place = place(path)?;
    let failed = |e: io::Error| Error::writing(path, e);
    let (mut file, temporary) = create_beside(&place).map_err(failed)?;
    let written = (|| {
        if locked {
            // The file is new and its name random: no other process has it. Without locks in the file system, none is
            // kept.
            let _ = file.try_lock();
        }
        if let Ok(old) = std::fs::metadata(&place) {
            file.set_permissions(old.permissions())?;
        }
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, &place)
    })();
    if let Err(e) = written {
        let _ = std::fs::remove_file(&temporary);
        return Err(failed(e));
    }
    sync_folder(folder(&place)).map_err(failed)?;
    Ok(file)
}

/// Returns the file that a path leads to through symbolic links; an error if something other than a regular file exists
/// there.
fn place(path: &Path) -> Result<PathBuf> {
    let mut at = path.to_path_buf();
    for _ in 0..LINKS {
        if at.file_name().is_none() {
            let found = format!("'{}'", path.display());
            return Err(Error::argument("the output", "the name of a file", found));
        }
        match std::fs::symlink_metadata(&at) {
            Ok(m) if m.is_symlink() => {
                let next = std::fs::read_link(&at).map_err(|e| Error::writing(path, e))?;
                at = folder(&at).join(next);
            }
            Ok(m) if m.is_file() => return Ok(at),
            Ok(m) => {
                let kind = if m.is_dir() { "a folder" } else { "a device, pipe or socket" };
                let found = format!("'{}', {kind}", path.display());
                return Err(Error::argument("the output", "a regular file or a new name", found));
            }
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(at),
            Err(e) => return Err(Error::writing(path, e)),
        }
    }
    Err(Error::argument("the output", "a link that leads to a file", format!("'{}'", path.display())))
}

/// Returns the folder of a file.
fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates a new file with a random name beside `path`; the name begins with a dot, which hides it on Unix.
fn create_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut last = ErrorKind::AlreadyExists.into();
    for _ in 0..NAMES {
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(format!(".{:016x}.tmp", random()));
        let temporary = path.with_file_name(name);
        match OpenOptions::new().append(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

/// Returns an unpredictable number, from the random keys of a map's hasher.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A renamed file survives a power failure once its folder is on the disk, too.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(folder).and_then(|f| f.sync_all()) {
        // Some file systems do not sync folders, and a folder may be writable but not readable.
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::InvalidInput | ErrorKind::Unsupported | ErrorKind::PermissionDenied
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// Returns true if writing `place` would destroy an input: the file itself, a part of a split file, or a file of a
/// model's folder.
fn is_input(place: &Path, input: &Path) -> bool {
    let ends = |path: &Path, kinds: &[&str]| {
        path.extension().and_then(|e| e.to_str()).is_some_and(|e| kinds.contains(&e))
    };
    if same_file(place, input) {
        return true;
    }
    if !place.exists() {
        return false;
    }
    if input.is_dir() {
        return ends(place, &["json", "safetensors", "gguf", "jinja", "model", "txt"])
            && same_file(folder(place), input);
    }
    ends(place, &["gguf"]) && ends(input, &["gguf"]) && same_file(folder(place), folder(input))
}

fn same_file(a: &Path, b: &Path) -> bool {
    match (std::fs::metadata(a), std::fs::metadata(b)) {
        (Ok(x), Ok(y)) if same(&x, &y) => cfg!(unix) || a.canonicalize().ok() == b.canonicalize().ok(),
        // Neither is there yet.
        (Err(_), Err(_)) => {
            a.file_name() == b.file_name() && folder(a).canonicalize().ok() == folder(b).canonicalize().ok()
        }
        _ => false,
    }
}

#[cfg(unix)]
fn same(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// Other systems have no inode numbers to compare.
#[cfg(not(unix))]
fn same(_: &Metadata, _: &Metadata) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed at the end of the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("attlas-output-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn file(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }

        fn names(&self) -> Vec<String> {
            let entries = std::fs::read_dir(&self.0).unwrap();
            let mut names: Vec<String> =
                entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_is_replaced_whole_and_a_temporary_of_the_users_own_is_left_alone() {
        let scratch = Scratch::new("own");
        let path = scratch.file("page.html");
        std::fs::write(scratch.file("page.html.tmp"), "precious").unwrap();
        std::fs::write(&path, "old").unwrap();
        check(&[("--out", &path)], &[]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"old", "checking changes nothing");
        write(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::read(scratch.file("page.html.tmp")).unwrap(), b"precious");
        assert_eq!(scratch.names(), ["page.html", "page.html.tmp"]);
        assert!(write(&scratch.file("none/page.html"), b"x").is_err());
        assert!(check(&[("--out", &scratch.file("none/page.html"))], &[]).is_err());
    }

    #[test]
    #[cfg(unix)]
    fn links_are_followed_and_stay() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let scratch = Scratch::new("links");
        let target = scratch.file("target");
        std::fs::write(&target, "old").unwrap();
        std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o600)).unwrap();
        symlink("target", scratch.file("link")).unwrap();
        symlink("link", scratch.file("second")).unwrap();
        write(&scratch.file("second"), b"new").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
        assert_eq!(std::fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(scratch.file("second").is_symlink() && scratch.file("link").is_symlink());
        symlink("later", scratch.file("dangling")).unwrap();
        write(&scratch.file("dangling"), b"new").unwrap();
        assert_eq!(std::fs::read(scratch.file("later")).unwrap(), b"new");
        symlink("round", scratch.file("round")).unwrap();
        assert!(write(&scratch.file("round"), b"new").is_err());
    }

    #[test]
    #[cfg(unix)]
    fn devices_pipes_and_folders_are_refused() {
        let scratch = Scratch::new("special");
        let _socket = std::os::unix::net::UnixListener::bind(scratch.file("socket")).unwrap();
        for path in [Path::new("/dev/null"), &scratch.file("socket"), &scratch.0] {
            for outcome in [write(path, b"x"), check(&[("--out", path)], &[])] {
                let message = outcome.unwrap_err().to_string();
                assert!(message.contains("a regular file or a new name"), "{message}");
            }
        }
        assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
        assert_eq!(scratch.names(), ["socket"]);
    }

    #[test]
    fn inputs_and_other_outputs_are_not_written_over() {
        let scratch = Scratch::new("inputs");
        let model = scratch.file("m-00001-of-00002.gguf");
        let part = scratch.file("m-00002-of-00002.gguf");
        let text = scratch.file("book.txt");
        for path in [&model, &part, &text, &scratch.file("config.json")] {
            std::fs::write(path, "x").unwrap();
        }
        let inputs = [model.as_path(), text.as_path()];
        for output in [&model, &part, &text, &scratch.0.join("./book.txt")] {
            let message = check(&[("--out", output)], &inputs).unwrap_err().to_string();
            assert!(message.starts_with("--out: expected a file that is not an input"), "{message}");
        }
        check(&[("--out", &scratch.file("new.html"))], &inputs).unwrap();
        assert!(check(&[("--out", &scratch.file("config.json"))], &[&scratch.0]).is_err());
        check(&[("--out", &scratch.file("report.html"))], &[&scratch.0]).unwrap();
        let page = scratch.file("page");
        let twice = check(&[("--html", &page), ("--svg", &page)], &[]).unwrap_err().to_string();
        assert!(twice.contains("--svg") && twice.contains("twice"), "{twice}");
    }

    #[test]
    fn a_locked_file_is_known_to_others() {
        let scratch = Scratch::new("lock");
        let path = scratch.file("state");
        assert!(lock(&path).unwrap().is_none());
        let mut file = write_locked(&path, b"one\n").unwrap();
        file.write_all(b"two\n").unwrap();
        let message = lock(&path).unwrap_err().to_string();
        assert!(message.contains("being written"), "{message}");
        drop(file);
        assert!(lock(&path).unwrap().is_some());
        assert_eq!(std::fs::read(&path).unwrap(), b"one\ntwo\n");
    }
}
