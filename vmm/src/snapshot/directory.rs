// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Directory of a snapshot.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use carom_api::{CheckedConfig, ConfigError, VmConfig};
use devices::file_size;
use log::warn;
use serde::Serialize;
use serde::de::DeserializeOwned;
use vm_memory::VolatileSlice;

use super::{RamFile, RamFileWriter, older};
use crate::vm_state::{MemoryFile, StateSink, StateSource, VmState, VmStateError};

/// File of the configuration.
const CONFIG: &str = "config.json";
/// File of the VM's state, without the configuration and the bytes of memory.
const STATE: &str = "state.json";
/// Name of the state file while it is being written.
const UNFINISHED_STATE: &str = "state.json.unfinished";
/// File that contains the bytes of memory.
const MEMORY: &str = "memory-ranges";

/// Maximum bytes of a configuration file.
const MAX_CONFIG: u64 = 4 << 20;
/// Maximum bytes of a state file. A million mappings of the virtio-iommu take some 80 MiB.
const MAX_STATE: u64 = 512 << 20;

fn file_error(path: &Path) -> impl FnOnce(io::Error) -> VmStateError + '_ {
    move |source| VmStateError::File { path: path.display().to_string(), source: file_size::explain(source) }
}

/// Snapshot that is being written. If it is dropped unfinished, its files are removed.
#[derive(Debug)]
pub struct NewSnapshot {
    directory: PathBuf,
    /// True if this snapshot created the directory.
    made: bool,
    /// Files that this snapshot created. Another VMM may create files in the same directory.
    files: Vec<&'static str>,
    /// Writer of the file that contains the bytes of memory. Set once bytes were appended.
    memory: Option<RamFileWriter>,
    finished: bool,
    sync: SyncNames,
}

/// Function that flushes a directory, like `sync_names`.
pub(super) type SyncNames = fn(&Path) -> io::Result<()>;

/// Flushes a directory, so that new names survive a power loss. If this process can write to the directory but not read it, only logs a
/// warning. The same applies if the file system cannot flush directories.
///
/// # Errors
/// The directory cannot be opened or flushed for another reason, for example a disk error.
fn sync_names(directory: &Path) -> io::Result<()> {
    match File::open(directory).and_then(|names| names.sync_all()) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EINVAL)) => {
            warn!(
                "{}: new files may be lost in a power failure, because the directory cannot be flushed: {error}",
                directory.display()
            );
            Ok(())
        }
        synced => synced,
    }
}

impl NewSnapshot {
    /// Begins a snapshot in `directory`. The directory must contain no snapshot. If `directory` is missing, its parent must exist. The
    /// directory may contain other files, because clients put their own files there before they ask for a snapshot.
    ///
    /// # Errors
    /// The directory contains a snapshot file, or cannot be created.
    pub fn create(directory: &Path) -> Result<Self, VmStateError> {
        Self::create_with(directory, sync_names)
    }

    /// Like [`create`](Self::create), but flushes directories with `sync`.
    pub(super) fn create_with(directory: &Path, sync: SyncNames) -> Result<Self, VmStateError> {
        let made = match fs::create_dir(directory) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(file_error(directory)(error)),
        };
        for name in [CONFIG, MEMORY, STATE, UNFINISHED_STATE] {
            let path = directory.join(name);
            match fs::symlink_metadata(&path) {
                Ok(_) => return Err(VmStateError::Exists(path.display().to_string())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(file_error(directory)(error)),
            }
        }
        let new =
            Self { directory: directory.to_path_buf(), made, files: Vec::new(), memory: None, finished: false, sync };
        // Flush the new directory's own name before anything large is written. If the directory existed before, its creator must flush the
        // directory's name.
        if let (true, Some(parent)) = (made, directory.parent()) {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            sync(parent).map_err(file_error(parent))?;
        }
        Ok(new)
    }

    /// Calls `write` with the writer of the file that contains the bytes of memory. The first call creates the file.
    fn write_memory<R>(&mut self, write: impl FnOnce(&mut RamFileWriter) -> io::Result<R>) -> Result<R, VmStateError> {
        let writer = match self.memory.take() {
            Some(writer) => writer,
            None => RamFileWriter::new(self.make(MEMORY)?.0),
        };
        write(self.memory.insert(writer)).map_err(file_error(&self.directory.join(MEMORY)))
    }

    fn make(&mut self, name: &'static str) -> Result<(File, PathBuf), VmStateError> {
        let path = self.directory.join(name);
        // Only this user can open the file, because it may contain all of the guest's data.
        let mut options = File::options();
        let file = options.mode(0o600).write(true).create_new(true).open(&path).map_err(file_error(&path))?;
        self.files.push(name);
        Ok((file, path))
    }

    fn write<T: Serialize>(&mut self, name: &'static str, value: &T) -> Result<(), VmStateError> {
        let (file, path) = self.make(name)?;
        let mut writer = io::BufWriter::new(file);
        let written = serde_json::to_writer(&mut writer, value).map_err(io::Error::from);
        let written = written.and_then(|()| writer.flush()).and_then(|()| writer.get_ref().sync_all());
        written.map_err(file_error(&path))
    }
}

impl StateSink for NewSnapshot {
    fn append(&mut self, memory: &VolatileSlice<'_>) -> Result<u64, VmStateError> {
        self.write_memory(|file| file.append(memory))
    }

    fn append_file(&mut self, memory: &File, at: u64, len: usize) -> Result<u64, VmStateError> {
        self.write_memory(|file| file.append_file(memory, at, len))
    }

    /// Completes the snapshot, which then survives a power loss.
    fn finish(&mut self, config: &VmConfig, state: &VmState) -> Result<(), VmStateError> {
        self.write_memory(|file| file.sync())?;
        self.write(CONFIG, &config.to_be_saved())?;
        self.write(UNFINISHED_STATE, state)?;
        let (unfinished, path) = (self.directory.join(UNFINISHED_STATE), self.directory.join(STATE));
        fs::rename(unfinished, &path).map_err(file_error(&path))?;
        self.files.retain(|name| *name != UNFINISHED_STATE);
        self.files.push(STATE);
        (self.sync)(&self.directory).map_err(file_error(&self.directory))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for NewSnapshot {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // Remove the state file first. Without the state file, the other files are not a snapshot.
        for name in self.files.iter().rev() {
            // Ignore this error: a file that cannot be removed stays in the directory.
            let _ = fs::remove_file(self.directory.join(name));
        }
        if self.made {
            let _ = fs::remove_dir(&self.directory);
        }
    }
}

/// Snapshot that was read, and validated as far as possible without a VM.
#[derive(Debug)]
pub struct Snapshot {
    /// The configuration.
    pub config: CheckedConfig,
    /// State without the configuration and the bytes of memory.
    pub state: VmState,
    /// The bytes of memory.
    pub memory: RamFile,
    memory_len: u64,
    memory_path: PathBuf,
}

impl Snapshot {
    /// Reads the snapshot in `directory`. `change` adapts the snapshot's configuration to the client's request.
    ///
    /// # Errors
    /// A file is missing or invalid, or the change is not allowed.
    pub fn open(
        directory: &Path,
        change: impl FnOnce(&mut VmConfig) -> Result<(), ConfigError>,
    ) -> Result<Self, VmStateError> {
        let mut state: VmState = read(&directory.join(STATE), MAX_STATE, parse)?;
        older::fill_in_window_aperture(&mut state);
        let path = directory.join(CONFIG);
        let mut config: VmConfig = read(&path, MAX_CONFIG, carom_api::body::parse_own)?;
        change(&mut config)?;
        let form = |rule: String| VmStateError::Form { path: path.display().to_string(), rule };
        let config =
            config.check_again().map_err(|error| form(carom_api::Explain::explain(&error, carom_api::Terms::Json)))?;
        let memory_path = directory.join(MEMORY);
        let memory = RamFile::new(open(&memory_path)?);
        let memory_len = memory.size().map_err(file_error(&memory_path))?;
        let path = directory.join(STATE);
        state
            .check(&(config.cpus.boot_vcpus..=config.cpus.max_vcpus), &config.memory, memory_len)
            .map_err(|error| VmStateError::Form { path: path.display().to_string(), rule: error.to_string() })?;
        Ok(Self { config, state, memory, memory_len, memory_path })
    }

    /// Returns the path of the file that contains the bytes of memory.
    pub fn memory_path(&self) -> &Path {
        &self.memory_path
    }
}

impl StateSource for Snapshot {
    fn config(&self) -> &CheckedConfig {
        &self.config
    }

    fn state(&self) -> &VmState {
        &self.state
    }

    fn read(&self, offset: u64, memory: &VolatileSlice<'_>) -> Result<(), VmStateError> {
        self.memory.read(offset, memory).map_err(file_error(&self.memory_path))
    }

    fn file(&self) -> Option<MemoryFile<'_>> {
        Some(MemoryFile { file: self.memory.as_fd(), path: &self.memory_path, len: self.memory_len })
    }
}

/// Opens a regular file. With `O_NONBLOCK`, opening a FIFO does not wait for its writer.
fn open(path: &Path) -> Result<File, VmStateError> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(file_error(path))?;
    if !file.metadata().map_err(file_error(path))?.is_file() {
        return Err(VmStateError::Form {
            path: path.display().to_string(),
            rule: "is not a regular file: restore from an unmodified snapshot".into(),
        });
    }
    Ok(file)
}

/// Reads a JSON file of at most `most` bytes.
fn read<T>(path: &Path, most: u64, parse: fn(&[u8]) -> Result<T, String>) -> Result<T, VmStateError> {
    let form = |rule: String| VmStateError::Form { path: path.display().to_string(), rule };
    let mut text = Vec::new();
    open(path)?.take(most + 1).read_to_end(&mut text).map_err(file_error(path))?;
    if text.len() as u64 > most {
        return Err(form(format!("has more than the maximum of {most} bytes: restore from an unmodified snapshot")));
    }
    parse(&text).map_err(form)
}

/// Parses JSON. The error is one line with the place of the mistake.
pub(crate) fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let place = error.path().to_string();
        let inner = error.into_inner();
        carom_api::error::one_line(&if place == "." {
            inner.to_string()
        } else {
            format!("{place}: {inner}; restore an unmodified snapshot with the release that saved it")
        })
    })?;
    reader.end().map_err(|error| error.to_string())?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_system_without_directory_sync_is_accepted() {
        let error = File::open("/proc").and_then(|names| names.sync_all()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        sync_names(Path::new("/proc")).unwrap();
        sync_names(Path::new("/no/such")).unwrap_err();
    }
}
